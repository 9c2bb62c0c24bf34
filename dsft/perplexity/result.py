"""Defines the result of an evaluation, and its report in perplexity.json."""

from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from dsft.perplexity.scoring import Perplexity

DOCUMENT_COLUMNS = ("nats", "tokens", "bytes", "words")
"""Columns of documents.parquet that hold the `document_` arrays of a Perplexity."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Holds one result and how it came about."""

    perplexity: Perplexity
    model: str
    data: str
    mode: str
    options: dict[str, Any]
    """seq_len, stride, scope, bos, separator, dtype, batch_tokens ... as they were."""
    zero: str
    ranks: int
    machine: str
    """Of the whole job: nodes, ranks and their memory."""
    truncated_documents: int
    """Answers cut to seq_len; their cut-off tokens are not scored."""
    seconds: float
    """Scoring alone, without loading; of this run, where an earlier one had scored a part."""
    peak_memory_bytes: dict[str, int]
    """Of the rank that needed most: "host", and "gpu" where there is one."""
    model_hash: str
    """Of the files of the model and of its base, by blocks of them; the same for a copy."""
    fingerprint: str
    """Of all that the result depends on, see `identity.py`."""
    versions: dict[str, str]
    verified_difference: float | None
    """With `verify`: largest |nats - plain nats| / plain nats over the documents that were scored again."""
    is_known: bool = False
    """Whether it was taken over from an earlier evaluation."""

    def report(self) -> dict[str, Any]:
        """Return the report for perplexity.json; docs of the modes are in dsft/perplexity/windows.py."""
        result = self.perplexity
        of_evaluation = {field.name: getattr(self, field.name) for field in fields(self)}
        del of_evaluation["perplexity"], of_evaluation["is_known"]
        return of_evaluation | {
            "perplexity": result.perplexity,
            "nats": result.nats,
            "tokens": result.tokens,
            "nats_per_token": result.loss,
            "bytes": result.bytes,
            "words": result.words,
            "word_perplexity": result.word_perplexity,
            "byte_perplexity": result.byte_perplexity,
            "bits_per_byte": result.bits_per_byte,
            "documents": result.documents,
            "unscored_documents": result.unscored_documents,
            "fed_tokens": result.fed_tokens,
            "rows_alone": result.rows_alone,
            "tokens_per_second": result.fed_tokens / self.seconds,
            "definition": f"perplexity = exp(nats / tokens), mode {self.mode} of dsft/perplexity/windows.py",
        }

    def documents(self) -> dict[str, Any]:
        """Return the columns of documents.parquet, a row for each document."""
        result = self.perplexity
        return {
            "model": [self.model] * result.documents,
            "data": [self.data] * result.documents,
            "document": np.arange(result.documents),
            **{name: getattr(result, f"document_{name}") for name in DOCUMENT_COLUMNS},
        }

    @classmethod
    def known(cls, report: dict[str, Any], documents: dict[str, np.ndarray]) -> "Evaluation":
        """Make the evaluation again that gave a report and the columns of its documents."""
        perplexity = Perplexity(
            nats=report["nats"],
            tokens=report["tokens"],
            fed_tokens=report["fed_tokens"],
            rows_alone=report["rows_alone"],
            **{f"document_{name}": documents[name] for name in DOCUMENT_COLUMNS},
        )
        of_evaluation = {field.name: report[field.name] for field in fields(cls) if field.name in report}
        return cls(**of_evaluation | {"perplexity": perplexity, "is_known": True})
