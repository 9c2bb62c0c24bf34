"""Computes perplexity for the `evaluate` library, of texts under a model.

metric = evaluate.load(str(Path(dsft.__file__).parent / "evaluate_perplexity"))
metric.compute(predictions=texts, model="runs/first", mode="rolling")    # options of `dsft eval`
"""

import tempfile
from pathlib import Path

import datasets
import evaluate

DESCRIPTION = "exp(nats / tokens) over all scored tokens of all documents, as dsft computes it"


class EvaluatePerplexity(evaluate.Measurement):
    def _info(self) -> evaluate.MeasurementInfo:
        return evaluate.MeasurementInfo(
            description=DESCRIPTION,
            citation="",
            inputs_description=__doc__,
            module_type="measurement",
            features=datasets.Features({"predictions": datasets.Value("string")}),
        )

    def compute(self, *, predictions, **options):
        """Return perplexity, nats and tokens, and perplexities of words and bytes. Args: `predictions`: the texts."""
        from dsft.api import evaluate

        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "texts.parquet"
            datasets.Dataset.from_dict({"text": list(predictions)}).to_parquet(str(path))
            options = {"data_cache": folder} | options  # the texts are not seen again
            # A training that `run` names may have read its own data in another form.
            form = {"data_format": "text", "text_column": "text", "columns": {}, "as_chat": False}
            form |= dict.fromkeys(("prompt_template", "completion_template", "map_row"))
            report = evaluate(data=str(path), progress=False, **options | form).report()
        names = ("perplexity", "nats", "tokens", "word_perplexity", "byte_perplexity", "bits_per_byte")
        return {name: report[name] for name in names}
