"""Computes perplexity for the `evaluate` library: from texts and a model, or from sums that an evaluation left.

metric = evaluate.load(str(Path(dsft.__file__).parent / "evaluate_perplexity"))
metric.compute(nats=[...], tokens=[...], bytes=[...], words=[...])       # rows of documents.parquet
metric.compute(predictions=texts, model="runs/first", mode="rolling")    # options of `dsft eval`
"""

import math
import tempfile
from pathlib import Path

import datasets
import evaluate
import numpy as np

from dsft.perplexity.sums import exp

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

    def compute(self, *, nats=None, tokens=None, bytes=None, words=None, predictions=None, **options):
        """Return perplexity, nats and tokens; with `bytes` and `words` also those of words, bytes and bits per byte."""
        if nats is not None:
            # Columns of pandas, numpy or Arrow come as often as lists.
            nats, *sizes = (np.asarray([] if each is None else each) for each in (nats, tokens, bytes, words))
            if not 0 < len(sizes[0]) == len(nats) or not sizes[0].sum():
                raise ValueError("nats needs tokens: for each document how many of its tokens were scored")
            nats, (tokens, num_bytes, words) = math.fsum(nats), (int(each.sum()) for each in sizes)
            perplexity = exp(nats / tokens)
        elif predictions is None:
            raise ValueError("give predictions, the texts, with a model, or nats and tokens of each document")
        else:
            from dsft.api import evaluate

            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "texts.parquet"
                datasets.Dataset.from_dict({"text": list(predictions)}).to_parquet(str(path))
                options = {"data_cache": folder} | options  # the texts are not seen again
                # A training that `run` names may have read its own data in another form.
                form = {"data_format": "text", "text_column": "text", "columns": {}, "as_chat": False}
                form |= dict.fromkeys(("prompt_template", "completion_template", "map_row"))
                result = evaluate(data=str(path), progress=False, **options | form).perplexity
            nats = result.nats
            tokens = result.tokens
            num_bytes = result.bytes
            words = result.words
            perplexity = result.perplexity  # as a protocol weighs it
        figures = {"perplexity": perplexity, "nats": nats, "tokens": tokens}
        if num_bytes:
            figures |= {"byte_perplexity": exp(nats / num_bytes), "bits_per_byte": nats / num_bytes / math.log(2)}
        if words:
            figures["word_perplexity"] = exp(nats / words)
        return figures
