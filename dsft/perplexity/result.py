"""Defines the result of an evaluation, and its report in perplexity.json."""

import functools
import math
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

from dsft.config.options import UNQUANTISED
from dsft.perplexity.display import frame, html_table
from dsft.perplexity.divergence import COLUMNS, Divergence
from dsft.perplexity.intervals import LEVEL, ResultIntervals, result_intervals
from dsft.perplexity.sums import Perplexity, exp
from dsft.units import GiB

SHOWN_GROUPS = 20
DOCUMENT_COLUMNS = ("nats", "tokens", "bytes", "words")
"""Columns of documents.parquet that hold the `document_` arrays of a Perplexity."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Holds one result and how it came about."""

    perplexity: Perplexity
    model: str
    data: str
    protocol: str | None
    """As the option; then `perplexity` of the report is that protocol's."""
    mode: str
    options: dict[str, Any]
    """seq_len, stride, scope, bos, separator, dtype, batch_tokens ... as they were."""
    zero: str
    ranks: int
    machine: str
    """Of the whole job: nodes, ranks and their memory."""
    groups: dict[str, list[dict[str, Any]]]
    """With group_by: group, nats, tokens and perplexity of each group, by grouping."""
    divergence: Divergence | None
    """With a reference."""
    tokens_folder: str | None
    """With save_tokens: where they are."""
    truncated_documents: int
    """Answers cut to seq_len; their cut-off tokens are not scored."""
    seconds: float
    """Scoring alone, without loading; of this run, where an earlier one had scored a part."""
    peak_memory_bytes: dict[str, int]
    """Of the rank that needed most: "host", and "gpu" where there is one."""
    model_hash: str
    """Of the files of the model and of its base, by blocks of them; the same for a copy."""
    hashes: dict[str, str]
    """Of the "texts", their "tokens" and the "windows" over these: results are compared where they are the same."""
    fingerprint: str
    """Of all that the result depends on, see `identity.py`."""
    versions: dict[str, str]
    verified_difference: float | None
    """With `verify`: largest |nats - plain nats| / plain nats over the documents that were scored again."""
    is_known: bool = False
    """Whether it was taken over from an earlier evaluation."""

    def report(self) -> dict[str, Any]:
        """Return the report for perplexity.json; docs of the modes are in dsft/perplexity/modes.py."""
        result = self.perplexity
        of_evaluation = {field.name: getattr(self, field.name) for field in fields(self)}
        del of_evaluation["perplexity"], of_evaluation["is_known"]
        of_evaluation["divergence"] = asdict(self.divergence) if self.divergence else None
        return of_evaluation | {
            "perplexity": exp(result.reported_loss) if self.protocol else result.perplexity,
            "nats": result.nats,
            "tokens": result.tokens,
            "nats_per_token": result.loss,
            "reported_loss": result.reported_loss,
            "bytes": result.bytes,
            "words": result.words,
            "word_perplexity": result.word_perplexity,
            "byte_perplexity": result.byte_perplexity,
            "bits_per_byte": result.bits_per_byte,
            "interval": self.intervals.report(),
            "documents": result.documents,
            "unscored_documents": result.unscored_documents,
            "fed_tokens": result.fed_tokens,
            "rows_alone": result.rows_alone,
            "blocks": {
                "windows": result.windows_per_block,
                "nats": result.block_nats.tolist(),
                "tokens": result.block_tokens.tolist(),
            },
            "tokens_per_second": result.fed_tokens / self.seconds,
            "definition": f"perplexity = exp(nats / tokens), {self.definition}",
        }

    @property
    def definition(self) -> str:
        if self.protocol:
            return f"protocol {self.protocol} of dsft/perplexity/protocols.py ({self._source})"
        return f"mode {self.mode} of dsft/perplexity/modes.py"

    @property
    def _source(self) -> str:
        """Where the protocol comes from."""
        from dsft.perplexity.protocols import find_protocol  # loads transformers, which reading results does not need

        return find_protocol(self.protocol).source

    @property
    def key(self) -> tuple[str, str, str]:
        """Return what a later result of the same kind replaces: model, data and protocol."""
        return self.model, self.data, self.protocol or ""

    def documents(self) -> dict[str, Any]:
        """Return the columns of documents.parquet, a row for each document."""
        result = self.perplexity
        return {
            "model": [self.model] * result.documents,
            "data": [self.data] * result.documents,
            "protocol": [self.protocol or ""] * result.documents,
            "document": np.arange(result.documents),
            **{name: getattr(result, f"document_{name}") for name in DOCUMENT_COLUMNS},
            **dict(zip(COLUMNS[1:], result.document_pairs, strict=False)),
        }

    @functools.cached_property
    def intervals(self) -> ResultIntervals:
        """Compute the 95 % intervals."""
        return result_intervals(self.perplexity)

    def summary(self) -> dict[str, str]:
        """Return the rows of a table about the result, for the screen."""
        report = self.report()
        low, high = self.intervals.perplexity
        bounds = "unknown" if math.isnan(low) else f"{low:.4f} to {high:.4f}"
        rows = {
            "perplexity": f"{report['perplexity']:.4f}",
            f"{LEVEL:.0%} interval": f"{bounds} (resampled: {self.intervals.resampled})",
            "scored": f"{report['tokens']:,} tokens of {report['documents']:,} documents ({report['mode']})",
            "nats per token": f"{report['nats_per_token']:.6f}",
        }
        if report["bytes"]:
            rows["per text"] = (
                f"word perplexity {report['word_perplexity']:,.4f}, byte perplexity {report['byte_perplexity']:.4f}\n"
                f"{report['bits_per_byte']:.4f} bits per byte"
            )
        rows |= {f"by {name}": _group_rows(groups) for name, groups in self.groups.items()}
        if self.divergence:
            rows[f"against {self.divergence.reference}"] = self.divergence.row()
        left_out = {
            "without a token to score": report["unscored_documents"],
            "truncated": report["truncated_documents"],
        }
        if any(left_out.values()):
            rows["documents"] = ", ".join(f"{number:,} {reason}" for reason, number in left_out.items() if number)
        if report["verified_difference"] is not None:
            rows["verified"] = f"largest relative difference to the plain way {report['verified_difference']:.1e}"
        peaks = report["peak_memory_bytes"]
        return rows | {
            "computed as": ", ".join(
                (
                    report["options"]["dtype"],
                    *_in_format(report),
                    f"ZeRO {report['zero']}, {report['ranks']} ranks",
                )
            ),
            "speed": f"{report['tokens_per_second']:,.0f} tokens/s, {report['seconds']:.1f} s",
            "peak memory per rank": ", ".join(f"{name} {value / GiB:.2f} GiB" for name, value in peaks.items()),
        }

    def protocol_row(self) -> str:
        """Return one line of the table of all protocols."""
        seq_len, tokens = self.options["seq_len"], self.perplexity.tokens
        perplexity = exp(self.perplexity.reported_loss)
        return f"{perplexity:.4f}  (windows of {seq_len:,}, {tokens:,} tokens scored; {self._source})"

    def to_pandas(self, group_by: str | None = None) -> Any:
        """Return a pandas.DataFrame with a row for each document, or for each group of one grouping."""
        return frame(self.groups[group_by] if group_by else self.documents())

    def _repr_html_(self) -> str:
        return html_table(f"Perplexity of {self.model} on {self.data}", self.summary())

    @classmethod
    def known(cls, report: dict[str, Any], documents: dict[str, np.ndarray]) -> "Evaluation":
        """Make the evaluation again that gave a report and the columns of its documents."""
        perplexity = Perplexity(
            nats=report["nats"],
            tokens=report["tokens"],
            fed_tokens=report["fed_tokens"],
            reported_loss=report["reported_loss"],
            rows_alone=report["rows_alone"],
            windows_per_block=report["blocks"]["windows"],
            block_nats=np.array(report["blocks"]["nats"], np.float64),
            block_tokens=np.array(report["blocks"]["tokens"], np.int64),
            document_pairs=np.array([documents[name] for name in COLUMNS[1:] if name in documents]).reshape(
                -1, len(documents["nats"])
            ),
            **{f"document_{name}": documents[name] for name in DOCUMENT_COLUMNS},
        )
        of_evaluation = {field.name: report[field.name] for field in fields(cls) if field.name in report}
        divergence = report["divergence"] and Divergence(**report["divergence"])
        return cls(**of_evaluation | {"perplexity": perplexity, "divergence": divergence, "is_known": True})


def _in_format(report: dict[str, Any]) -> list[str]:
    quantization = report["options"].get("quantization", UNQUANTISED)
    return [f"quantised as {quantization}"] if quantization != UNQUANTISED else []


def _group_rows(groups: list[dict[str, Any]]) -> str:
    lines = [f"{row['perplexity']:.4f}  {row['group']} ({row['tokens']:,} tokens)" for row in groups[:SHOWN_GROUPS]]
    more = [f"and {len(groups) - SHOWN_GROUPS:,} more in perplexity.json"] if len(groups) > SHOWN_GROUPS else []
    return "\n".join([*lines, *more])
