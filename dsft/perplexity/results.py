"""The result of an evaluation, and its files. Results are read without torch.

documents.parquet                 a row for each document of each model, data set and protocol; a new result replaces an
                                  earlier one of the same three; its metadata contains the reports for later evaluations
perplexity.json                   the reports, for people and other programs
partial/FINGERPRINT/rank-0.jsonl  during a run: a line for each batch that this rank scored, to resume from
tokens.parquet/FINGERPRINT/       with save_tokens: a table with a row for each scored token, one file per rank

Batches do not depend on the number of ranks, so any number can resume. Evaluations with save_tokens do not resume.
"""

import contextlib
import functools
import json
import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow
import pyarrow.parquet

from dsft.config.reader import Values
from dsft.errors import UserError
from dsft.perplexity.modes import Windows
from dsft.perplexity.sums import (
    LONG_SHARE,
    Estimate,
    Perplexity,
    exp,
    in_words,
    ratio_interval,
    result_intervals,
)
from dsft.runtime import distributed
from dsft.units import GiB, JsonObject, plural, write_json

if TYPE_CHECKING:  # results are read without torch
    import torch

REPORTS = "perplexity.json"
DOCUMENTS = "documents.parquet"
COLUMNS = ("nats", "reference_nats", "kl", "reverse_kl", "same_top")
"""Rows that `scoring.score` returns for two models; the first is the model's."""
SHOWN_GROUPS = 20
GROUP = "group_"  # prefix of a grouping's column in documents.parquet
DOCUMENT_COLUMNS = ("nats", "tokens", "bytes", "words")
"""Columns of documents.parquet that contain the `document_` arrays of a Perplexity."""
RESULT_FIELDS = (
    *("perplexity", "nats", "tokens", "reported_loss", "reference_loss", "bytes", "words", "word_perplexity"),
    *("byte_perplexity", "bits_per_byte", "documents", "unscored_documents", "fed_tokens"),
)
"""Fields of a Perplexity that its report contains by the same name."""
UNREPORTED = ("perplexity", "is_known", "document_groups", "document_texts")
"""Fields of an Evaluation that its report leaves out, or replaces by a number."""
Key = tuple[str, str, str]
"""Model, data and protocol (empty without one): a new result replaces an earlier one with the same key."""
TOKEN_COLUMNS = pyarrow.schema({"document": "int64", "position": "int64", "token": "int32", "nats": "float64"})


def finite(report: Any) -> Any:
    """Replace NaN and infinite numbers of a report by None: JSON has neither."""
    return json.loads(json.dumps(report), parse_constant=lambda _: None)


def on_data(data: str, protocol: str | None) -> str:
    return f"{data} by {protocol}" if protocol else data


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """One result and how it was computed."""

    perplexity: Perplexity
    model: str
    data: str
    protocol: str | None  # the option; with it, `perplexity` in the report is that protocol's
    mode: str
    options: Values  # values of seq_len, stride, scope, bos, separator, dtype, batch_tokens ...
    zero: str
    ranks: int
    machine: str  # of the whole job: nodes, ranks and their memory
    reference: str | None  # the option
    tokens_folder: str | None  # with save_tokens: their folder
    truncated_documents: int  # answers truncated to seq_len; tokens beyond are not scored
    seconds: float  # of scoring, without loading; of this run alone if it was resumed
    peak_memory_bytes: dict[str, int]  # of the rank that needed most: "host", and "gpu" if there is one
    model_hash: str  # of blocks of the files of the model and its base; the same for a copy
    hashes: dict[str, str]
    """Of the "texts", their "tokens" and the "windows": results are compared if they are the same."""
    fingerprint: str  # of everything that the result depends on, see `evaluation.py`
    versions: dict[str, str]
    verified_difference: float | None = None
    """With verify: the largest |nats - plain nats| / plain nats of the documents that were scored again."""
    document_groups: dict[str, np.ndarray] = field(default_factory=dict)
    """[D] with group_by: each document's value, by column."""
    document_texts: list[str] = field(default_factory=list)  # an excerpt of each document, from its scored part
    is_known: bool = False  # whether it is from an earlier evaluation

    def report(self) -> JsonObject:
        """Return the report for perplexity.json; the modes are defined in dsft/perplexity/modes.py."""
        result = self.perplexity
        report = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in UNREPORTED}
        report |= {name: getattr(result, name) for name in RESULT_FIELDS}
        report |= {
            "groups": self.groups,
            "divergence": self.divergence,
            "nats_per_token": result.loss,
            "interval": self.intervals,
            "blocks": {"nats": result.block_nats.tolist(), "tokens": result.block_tokens.tolist()},
            "tokens_per_second": result.fed_tokens / self.seconds,
        }
        return finite(report)

    def documents(self) -> dict[str, Any]:
        """Return the columns of documents.parquet, one row per document."""
        result = self.perplexity
        columns = {
            "model": [self.model] * result.documents,
            "data": [self.data] * result.documents,
            "protocol": [self.protocol or ""] * result.documents,
            "document": np.arange(result.documents),
            "text": self.document_texts or [""] * result.documents,
        }
        columns |= {name: getattr(result, f"document_{name}") for name in DOCUMENT_COLUMNS}
        columns |= dict(zip(COLUMNS[1:], result.document_pairs, strict=False))
        return columns | {f"{GROUP}{name}": labels for name, labels in self.document_groups.items()}

    @property
    def key(self) -> Key:
        return self.model, self.data, self.protocol or ""

    @functools.cached_property
    def intervals(self) -> JsonObject:
        return result_intervals(self.perplexity)

    @functools.cached_property
    def groups(self) -> dict[str, list[JsonObject]]:
        """By column: group, nats, tokens, perplexity and its interval for each value with scored tokens."""
        groups = {}
        for name, labels_D in self.document_groups.items():
            groups[name] = []
            for label in dict.fromkeys(labels_D):
                result = self.perplexity.of_documents(labels_D == label)
                if not result.tokens:
                    continue
                group = {
                    "group": label,
                    "nats": result.nats,
                    "tokens": result.tokens,
                    "perplexity": result.perplexity,
                    "interval": result_intervals(result)["perplexity"],
                }
                groups[name].append(group)
        return groups

    @functools.cached_property
    def divergence(self) -> JsonObject | None:
        """The distance of the model's predictions from the reference's: means over scored tokens of kl (of the model
        from the reference) and reverse_kl in nats, and same_top, a share; their 95 % intervals over documents.
        """
        if not self.reference:
            return None
        result = self.perplexity
        is_scored_D = result.document_tokens > 0
        means = {"reference": self.reference, "reference_perplexity": exp(result.reference_loss)}
        intervals = {}
        for name, row_D in zip(COLUMNS[2:], result.document_pairs[1:], strict=True):
            means[name] = math.fsum(row_D) / result.tokens
            low, high = ratio_interval(np.stack([row_D, result.document_tokens])[:, is_scored_D], 1)
            if name == "same_top":
                high = min(high, 1.0)
            intervals[name] = max(low, 0.0), high  # NaN stays NaN
        return means | {"intervals": intervals}

    @property
    def title(self) -> str:
        cached = " (cached)" if self.is_known else ""
        return f"Perplexity of {self.model} on {on_data(self.data, self.protocol)}{cached}"

    def __repr__(self) -> str:
        rows = self.summary().items()
        return "\n".join(f"{name:<24}" + value.replace("\n", "\n" + 24 * " ") for name, value in rows)

    def summary(self) -> dict[str, str]:
        result = self.perplexity
        bounds = self.intervals["perplexity"]
        interval = in_words(bounds, "{:,.4f}".format)
        units = f"over {self.intervals['units']}"
        if math.isnan(bounds[0]):
            units = f"none: {self.intervals['units']}"
        elif result.documents > 1 and result.longest_share > LONG_SHARE:
            units += f"; the longest document has {result.longest_share:.0%} of the tokens"
        scored = f"{result.tokens:,} tokens of {plural(result.documents, 'document')} ({self.mode})"
        if result.unscored_documents:
            scored += f"; {result.unscored_documents:,} documents have no token to score"
        if self.truncated_documents:
            scored += f"; {self.truncated_documents:,} documents are truncated"
        rows = {
            "perplexity": f"{result.perplexity:,.4f}, {interval}",
            "interval": units,
            "scored": scored,
            "nats per token": f"{result.loss:.6f}",
        }
        if result.bytes:
            rows["per text"] = (
                f"word perplexity {result.word_perplexity:,.4f}, byte perplexity {result.byte_perplexity:,.4f}\n"
                f"{result.bits_per_byte:.4f} bits per byte"
            )
        for name, groups in self.groups.items():
            lines = []
            for group in groups[:SHOWN_GROUPS]:
                estimate = Estimate(group["perplexity"], *group["interval"])
                lines.append(f"{estimate:,.4f}  {group['group']} ({group['tokens']:,} tokens)")
            if len(groups) > SHOWN_GROUPS:
                lines.append(f"and {len(groups) - SHOWN_GROUPS:,} more in {REPORTS}")
            rows[f"by {name}"] = "\n".join(lines)
        if divergence := self.divergence:
            intervals = divergence["intervals"]
            kl, reverse_kl, same_top = (Estimate(divergence[name], *intervals[name]) for name in COLUMNS[2:])
            rows[f"against {self.reference}"] = (
                f"KL(reference || model) {kl:.6f} nats per token\n"
                f"KL(model || reference) {reverse_kl:.6f}\n"
                f"same top token {same_top:.2%}\n"
                f"perplexity of the reference {divergence['reference_perplexity']:,.4f}"
            )
        if self.verified_difference is not None:
            rows["verified"] = f"largest relative difference to full logits {self.verified_difference:.1e}"
        rows["computed as"] = (
            f"{self.options['dtype']}, quantization {self.options['quantization']}, ZeRO {self.zero},"
            f" {plural(self.ranks, 'rank')}, {result.fed_tokens / self.seconds:,.0f} tokens/s"
        )
        peaks = [f"{name} {value / GiB:.2f} GiB" for name, value in self.peak_memory_bytes.items()]
        rows["peak memory per rank"] = ", ".join(peaks)
        return rows

    def to_pandas(self, group_by: str | None = None) -> Any:
        """Return a pandas.DataFrame with a row for each document, or for each group of one grouping."""
        import pandas  # takes a second

        return pandas.DataFrame(self.groups[group_by] if group_by else self.documents())


class Results:
    """The results in a folder, of this evaluation and earlier ones; rank 0 reads and writes. Collective: every rank
    creates one. Raises UserError if a file cannot be read.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.evaluations: dict[Key, Evaluation] = {}  # on rank 0
        distributed.on_rank_0(self._read)

    def _read(self) -> None:
        path = self.folder / DOCUMENTS
        if not path.is_file():
            if (self.folder / REPORTS).is_file():  # it would be replaced
                raise UserError(
                    f"{self.folder} has a {REPORTS} without its {DOCUMENTS}; remove it, or name another folder"
                )
            return
        try:
            table = pyarrow.parquet.read_table(path)
            first = 0
            for report in json.loads(table.schema.metadata[b"reports"]):
                rows = table.slice(first, report["documents"])
                first += len(rows)
                evaluation = read_back(report, rows)
                self.evaluations[evaluation.key] = evaluation
        except (OSError, ValueError, LookupError, TypeError, pyarrow.ArrowException) as error:
            raise UserError(
                f"{path} cannot be read as results ({type(error).__name__}: {error}); remove it, or name another folder"
            ) from None

    def find(self, about: Mapping[str, Any]) -> Evaluation | None:
        """Return an earlier result with the fingerprint of `about`, or None. Collective."""
        folder = about["tokens_folder"]
        same = {each.fingerprint: each for each in self.evaluations.values()}
        if folder and not Path(folder).is_dir():
            same = {}
        evaluation = distributed.on_rank_0(lambda: same.get(about["fingerprint"]))
        if evaluation is None:
            return None
        # A copy of the model or data has the same result, and output_dir may have been moved.
        return replace(evaluation, model=about["model"], data=about["data"], tokens_folder=folder)

    def add(self, evaluation: Evaluation) -> None:
        """Append a result, new or known, and write all results to disk. Collective."""

        def write():
            self.evaluations.pop(evaluation.key, None)
            self.evaluations[evaluation.key] = evaluation
            self.folder.mkdir(parents=True, exist_ok=True)
            reports = [each.report() for each in self.evaluations.values()]
            tables = [pyarrow.table(each.documents()) for each in self.evaluations.values()]
            table = pyarrow.concat_tables(tables, promote_options="default")
            beside = self.folder / "documents.tmp"
            pyarrow.parquet.write_table(table.replace_schema_metadata({"reports": json.dumps(reports)}), beside)
            beside.replace(self.folder / DOCUMENTS)
            write_json(self.folder / REPORTS, {"results": reports})

        distributed.on_rank_0(write)


def read_back(report: JsonObject, table: pyarrow.Table) -> Evaluation:
    """Return the evaluation that this report and these documents describe."""
    reference_loss = report["reference_loss"]
    documents = {f"document_{name}": table[name].to_numpy() for name in DOCUMENT_COLUMNS}
    names = COLUMNS[1:] if report["reference"] else ()
    pairs = [table[name].to_numpy() for name in names]
    groups = {name: table[f"{GROUP}{name}"].to_numpy(zero_copy_only=False) for name in report["groups"]}
    perplexity = Perplexity(
        nats=report["nats"],
        tokens=report["tokens"],
        fed_tokens=report["fed_tokens"],
        reported_loss=report["reported_loss"],
        reference_loss=math.nan if reference_loss is None else reference_loss,
        block_nats=np.array(report["blocks"]["nats"], np.float64),
        block_tokens=np.array(report["blocks"]["tokens"], np.int64),
        document_pairs=np.array(pairs).reshape(-1, len(table)),
        **documents,
    )
    values = {each.name: report[each.name] for each in fields(Evaluation) if each.name not in UNREPORTED}
    return Evaluation(
        **values,
        perplexity=perplexity,
        document_groups=groups,
        document_texts=table["text"].to_pylist(),
        is_known=True,
    )


class Recorder:
    """Writes the state for a resume, or the scored tokens, of every batch that this rank scores. Collective: every rank
    creates one.

    Args:
        partial: folder for the lines of this evaluation; None if it cannot be resumed.
        tokens: folder for the scored tokens; None if they are not saved.
    """

    def __init__(self, windows: Windows, *, partial: Path | None = None, tokens: Path | None = None):
        self.windows = windows
        self.partial = partial
        self.tokens = tokens
        self.scored_before = {}
        """Index of a batch -> cells and sums from `scoring.sum_tokens`, the same on every rank."""
        if partial:
            partial.mkdir(parents=True, exist_ok=True)
            # Nodes may not share the folder, so lines are collected from all ranks, before any rank appends.
            lines = []
            for path in sorted(partial.glob("rank-*.jsonl")):
                for line in path.read_text(encoding="utf-8").splitlines():
                    with contextlib.suppress(ValueError):  # the line that was being written when the rank was killed
                        lines.append(json.loads(line))
            self.scored_before = dict(distributed.from_all(lines))
            self._file = (partial / f"rank-{distributed.rank()}.jsonl").open("a", encoding="utf-8")
        if tokens:
            shutil.rmtree(tokens, ignore_errors=True)  # from an interrupted evaluation
            distributed.wait_for_all()
            tokens.mkdir(parents=True, exist_ok=True)
            self._document_starts = windows.document_starts  # once: a pass over all documents
            self._parts = pyarrow.parquet.ParquetWriter(tokens / f"rank-{distributed.rank()}.parquet", TOKEN_COLUMNS)

    def record(self, batch: int, places_N: np.ndarray, nats_N: "torch.Tensor", sums: list[Any]) -> None:
        """Write a scored batch: positions of its tokens, their nats, and their cells and sums."""
        if self.partial:
            self._file.write(f"\n{json.dumps([batch, sums])}")
            self._file.flush()
        if self.tokens:
            documents_N = self.windows.documents_of(places_N)
            columns = {
                "document": documents_N,
                "position": places_N - self._document_starts[documents_N],
                "token": self.windows.tokens[places_N],
                "nats": nats_N.numpy(),
            }
            self._parts.write_table(pyarrow.table(columns).cast(TOKEN_COLUMNS))

    def close(self) -> None:
        if self.tokens:
            self._parts.close()

    def remove(self) -> None:
        """Remove the lines, which are not needed after the result is written. Collective."""
        if self.partial:
            self._file.close()
            distributed.wait_for_all()
            shutil.rmtree(self.partial, ignore_errors=True)  # on every rank, since nodes may not share the folder
