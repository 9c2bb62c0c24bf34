"""The result of an evaluation, and its files. Results are read without torch.

perplexity.json                   a report for each model, data set and protocol; a new result replaces the one of these
documents.parquet                 a row for each document of these
partial/FINGERPRINT/rank-0.jsonl  while it runs: a line for each batch that this rank scored, to resume from
tokens.parquet/FINGERPRINT/       with save_tokens: parts of a table with a row for each scored token

Batches do not depend on the number of ranks, so another number may resume. A batch is noted for resuming only when the
part with its tokens is on disk, and parts that no note names are removed at the next start: no token is lost or written
twice.
"""

import contextlib
import functools
import html
import json
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow
import pyarrow.compute
import pyarrow.parquet

from dsft.config.options import UNQUANTISED
from dsft.errors import UserError
from dsft.perplexity.modes import find_mode
from dsft.perplexity.sums import (
    Interval,
    Perplexity,
    ResultIntervals,
    exp,
    in_words,
    ratio_interval,
    result_intervals,
    units_of,
)
from dsft.perplexity.windows import Windows
from dsft.runtime import distributed
from dsft.units import GiB, plural, write_json

if TYPE_CHECKING:  # results are read without torch
    import torch


REPORTS, DOCUMENTS = "perplexity.json", "documents.parquet"
COLUMNS = ("nats", "reference_nats", "kl", "reverse_kl", "same_top")
"""Rows of what `scoring.score` returns of two models; the first is the model's own."""
SHOWN_GROUPS = 20
DOCUMENT_COLUMNS = ("nats", "tokens", "bytes", "words")
"""Columns of documents.parquet that hold the `document_` arrays of a Perplexity."""
RESULT_FIELDS = (
    *("perplexity", "nats", "tokens", "reported_loss", "bytes", "words", "word_perplexity", "byte_perplexity"),
    *("bits_per_byte", "documents", "unscored_documents", "fed_tokens", "rows_alone"),
)
"""What a report has of its Perplexity by the same name."""
Key = tuple[str, str, str]
"""Model, data, protocol, the last is empty without one: a later result of the same replaces an earlier one."""
PART_TOKENS = 1 << 20  # tokens in memory before a part is written: 24 MiB
STYLE = "text-align:left;vertical-align:top;white-space:pre-wrap;max-width:60em;overflow-wrap:anywhere"


def finite(value: Any) -> Any:
    """Replace NaN and infinite numbers, also inside of lists and dictionaries, by None: JSON has neither."""
    if isinstance(value, dict):
        return {name: finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def html_table(title: str, rows: Mapping[str, str]) -> str:
    """Return a table of names and values under a title."""
    body = "".join(
        f'<tr><th style="{STYLE}">{html.escape(name)}</th><td style="{STYLE}">{html.escape(value)}</td></tr>'
        for name, value in rows.items()
    )
    return f"<table><caption><b>{html.escape(title)}</b></caption><tbody>{body}</tbody></table>"


def on_data(data: str, protocol: str | None) -> str:
    return f"{data} by {protocol}" if protocol else data


def frame(columns: Any) -> Any:
    """Return a pandas.DataFrame of columns, or of rows that are dictionaries."""
    import pandas  # takes a second, and comes with datasets

    return pandas.DataFrame(columns)


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """How far a model's predictions are from those of a reference; means are over scored tokens."""

    reference: str
    reference_perplexity: float
    kl: float
    """Mean KL(reference || model) in nats."""
    reverse_kl: float
    """Mean KL(model || reference) in nats."""
    same_top: float
    """Share of the tokens where both find the same token likeliest."""
    change_quantiles: dict[str, float]
    """Share -> change of the true token's probability that so large a share of the tokens stays below."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """One result and how it came about."""

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
    """With group_by: group, nats, tokens, perplexity and its interval of each group, by grouping."""
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
    """Of all that the result depends on, see `evaluation.py`."""
    versions: dict[str, str]
    verified_difference: float | None
    """With `verify`: largest |nats - plain nats| / plain nats over the documents that were scored again."""
    group_sums: dict[str, np.ndarray] = field(default_factory=dict)
    """[2, D, G] nats and tokens of documents by group, for each grouping but those of too many documents x groups."""
    seed_losses: tuple[float, ...] = ()
    """`reported_loss` of each seed, where this is the mean of several (`compare.joined_seeds`)."""
    is_known: bool = False
    """Whether it was taken over from an earlier evaluation."""

    def report(self) -> dict[str, Any]:
        """Return the report for perplexity.json; docs of the modes are in dsft/perplexity/modes.py."""
        result, unwritten = self.perplexity, ("perplexity", "is_known", "seed_losses", "group_sums")
        named = f"protocol {self.protocol}" if self.protocol else f"mode {self.mode}"
        source = f" ({find_mode(self.protocol).source})" if self.protocol else ""
        report = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in unwritten} | {
            "divergence": asdict(self.divergence) if self.divergence else None,
            "divergence_intervals": self.divergence_intervals,
            "nats_per_token": result.loss,
            "interval": asdict(self.intervals),
            "blocks": {
                "windows": result.windows_per_block,
                "nats": result.block_nats.tolist(),
                "tokens": result.block_tokens.tolist(),
            },
            "tokens_per_second": result.fed_tokens / self.seconds,
            "definition": f"perplexity = exp(nats / tokens), {named} of dsft/perplexity/modes.py{source}",
        }
        return finite(report | {name: getattr(result, name) for name in RESULT_FIELDS})

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

    @property
    def key(self) -> Key:
        return self.model, self.data, self.protocol or ""

    @functools.cached_property
    def intervals(self) -> ResultIntervals:
        return result_intervals(self.perplexity)

    @functools.cached_property
    def divergence_intervals(self) -> dict[str, Interval]:
        """Compute the 95 % intervals over documents of the means against the reference: kl, reverse_kl, same_top."""
        result, intervals = self.perplexity, {}
        for name, row_D in zip(COLUMNS[2:], result.document_pairs[1:], strict=False):
            low, high = ratio_interval(units_of(result, row_D, None, is_scored_D=result.document_tokens > 0)[0], 1)
            intervals[name] = max(low, 0.0), min(high, 1.0) if name == "same_top" else high  # NaN stays NaN
        return intervals

    @property
    def title(self) -> str:
        known = " (known from an earlier evaluation)" if self.is_known else ""
        return f"Perplexity of {self.model} on {on_data(self.data, self.protocol)}{known}"

    def __repr__(self) -> str:
        """The result in a line; `summary()` has the table."""
        names = ("model", "data", "protocol", "mode")
        return f"Evaluation({', '.join(f'{name}={getattr(self, name)!r}' for name in names)}, {self.perplexity!r})"

    def summary(self) -> dict[str, str]:
        """Return the rows of a table about the result, for the screen."""
        result = self.perplexity
        interval = in_words(self.intervals.perplexity, "{:,.4f}".format)
        units = f"over {self.intervals.units}"
        longest = result.document_tokens.max() / result.tokens
        if longest > 0.2 and result.documents > 1:
            units += f"; the longest document holds {longest:.0%} of the tokens"
        rows = {
            "perplexity": f"{result.perplexity:,.4f}, {interval}",
            "interval": units if not math.isnan(self.intervals.perplexity[0]) else f"none: {self.intervals.units}",
            "scored": f"{result.tokens:,} tokens of {result.documents:,} documents ({self.mode})",
            "nats per token": f"{result.loss:.6f}",
        }
        if result.bytes:
            rows["per text"] = (
                f"word perplexity {result.word_perplexity:,.4f}, byte perplexity {result.byte_perplexity:,.4f}\n"
                f"{result.bits_per_byte:.4f} bits per byte"
            )
        for name, groups in self.groups.items():
            lines = [
                f"{each['perplexity']:,.4f}{_bounds(*each['interval'], ',.4f')}  {each['group']}"
                f" ({each['tokens']:,} tokens)"
                for each in groups
            ]
            hidden = len(lines) - SHOWN_GROUPS
            more = [f"and {hidden:,} more in {REPORTS}"] if hidden > 0 else []
            rows[f"by {name}"] = "\n".join([*lines[:SHOWN_GROUPS], *more])
        if divergence := self.divergence:
            low, middle, high = (divergence.change_quantiles[share] for share in ("0.01", "0.5", "0.99"))
            kl, reverse_kl, same_top = (
                f"{getattr(divergence, name):{spec}}{_bounds(*self.divergence_intervals[name], spec)}"
                for name, spec in (("kl", ".6f"), ("reverse_kl", ".6f"), ("same_top", ".2%"))
            )
            rows[f"against {divergence.reference}"] = (
                f"KL(reference || model) {kl}, KL(model || reference) {reverse_kl} nats"
                f" per token; same likeliest token {same_top}; change of the true token's probability"
                f" {low:+.4f} (1%), {middle:+.4f} (median), {high:+.4f} (99%); perplexity of the reference"
                f" {divergence.reference_perplexity:,.4f}"
            )
        left_out = {"without a token to score": result.unscored_documents, "truncated": self.truncated_documents}
        if any(left_out.values()):
            rows["documents"] = ", ".join(f"{number:,} {reason}" for reason, number in left_out.items() if number)
        if self.verified_difference is not None:
            rows["verified"] = f"largest relative difference to the plain way {self.verified_difference:.1e}"
        quantization = self.options.get("quantization", UNQUANTISED)
        quantised = f", quantised as {quantization}" if quantization != UNQUANTISED else ""
        return rows | {
            "computed as": f"{self.options['dtype']}{quantised}, ZeRO {self.zero}, {plural(self.ranks, 'rank')}",
            "speed": f"{result.fed_tokens / self.seconds:,.0f} tokens/s, {self.seconds:.1f} s",
            "peak memory per rank": ", ".join(
                f"{name} {value / GiB:.2f} GiB" for name, value in self.peak_memory_bytes.items()
            ),
        }

    def to_pandas(self, group_by: str | None = None) -> Any:
        """Return a pandas.DataFrame with a row for each document, or for each group of one grouping."""
        return frame(self.groups[group_by] if group_by else self.documents())

    def _repr_html_(self) -> str:
        return html_table(self.title, self.summary())


def groups_of(labels: Sequence[str], sums_2DG: np.ndarray) -> tuple[list[dict[str, Any]], np.ndarray]:
    """Return the groups with a scored token as a report has them, and the sums of these alone. Args: `sums_2DG`: nats
    and tokens of each document; of all together, where documents are too many.
    """
    sums_2DG = sums_2DG[:, :, scored_G := sums_2DG[1].any(axis=0)]
    groups = []
    for label, sums_2D in zip(np.array(labels, object)[scored_G], np.moveaxis(sums_2DG, 2, 0), strict=True):
        nats, tokens = sums_2D.sum(axis=1).tolist()
        low, high = ratio_interval(sums_2D[:, sums_2D[1] > 0], 1)
        sizes = {"nats": nats, "tokens": int(tokens), "perplexity": exp(nats / tokens)}
        groups.append({"group": label} | sizes | {"interval": finite([exp(low), exp(high)])})
    return groups, sums_2DG


def _bounds(low: float | None, high: float | None, spec: str) -> str:
    if low is None or math.isnan(low):
        return ""
    return f" ({low:{spec}} to {math.inf if high is None else high:{spec}})"  # None: infinite, as JSON has it


class Results:
    """The results in a folder, of this evaluation and of earlier ones; rank 0 reads and writes. Collective: every rank
    makes one. Raises UserError where a file that is there cannot be read.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.reports: dict[Key, dict[str, Any]] = {}
        """On rank 0."""
        self.documents: dict[Key, pyarrow.Table] = {}

        def read() -> None:
            path = self.folder / REPORTS
            if not path.is_file():
                return
            with self._damage_explained():
                reports = json.loads(path.read_text(encoding="utf-8"))["results"]
                table = pyarrow.parquet.read_table(self.folder / DOCUMENTS).replace_schema_metadata(None)
                self.reports = {(each["model"], each["data"], each["protocol"] or ""): each for each in reports}
                for key in self.reports:
                    rows = table
                    for name, value in zip(("model", "data", "protocol"), key, strict=True):
                        rows = rows.filter(pyarrow.compute.equal(rows[name], value))
                    self.documents[key] = rows

        distributed.on_rank_0(read)

    @contextlib.contextmanager
    def _damage_explained(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError, LookupError, TypeError, AttributeError, pyarrow.ArrowException) as error:
            raise UserError(
                f"{self.folder}: holds a {REPORTS} with {DOCUMENTS} beside it that cannot be read"
                f" ({type(error).__name__}: {error}); remove both, or name another folder"
            ) from None

    def known(self, about: Mapping[str, Any], *, verified: bool, tokens: Path | None) -> Evaluation | None:
        """Find a result that was the same in everything that counts, `verified` where that is asked for, and all of
        whose tokens lie in the folder `tokens` where they are to be kept. Collective. Args: `about`: what is known of
        it before it is scored.
        """
        same = (
            self.evaluation(key)
            for key, report in self.reports.items()
            if report.get("fingerprint") == about["fingerprint"]
            and (report.get("verified_difference") is not None or not verified)
        )
        evaluation = distributed.on_rank_0(lambda: next(filter(None, same), None))
        if evaluation is None:
            return None
        if tokens:
            rows = {}
            for part in tokens.glob("*.parquet"):
                with contextlib.suppress(OSError, pyarrow.ArrowException):  # a part that was cut off has no tokens
                    rows[part.name] = pyarrow.parquet.read_metadata(part).num_rows
            rows = dict(distributed.from_all([*rows.items()]))  # nodes that share no folder keep their own parts
            if sum(rows.values()) != evaluation.perplexity.tokens:
                return None
        # A copy of a model or of its data has the same result, and output_dir may have been moved.
        names = {"model": about["model"], "data": about["data"], "tokens_folder": tokens and str(tokens)}
        return replace(evaluation, **names)

    def add(self, evaluation: Evaluation) -> None:
        """Put a result, new or known, behind all others; a new one is on the disk from then on. Collective."""

        def write() -> None:
            for results in (self.reports, self.documents):
                results.pop(evaluation.key, None)
            self.reports[evaluation.key] = evaluation.report()
            columns = evaluation.documents()
            for name, sums_2DG in evaluation.group_sums.items():  # lists in the order of the report's groups
                ends = np.arange(sums_2DG.shape[1] + 1) * sums_2DG.shape[2]
                for kind, sums_DG in zip(("nats", "tokens"), sums_2DG, strict=True):
                    columns[f"{kind}_by_{name}"] = pyarrow.ListArray.from_arrays(ends, sums_DG.ravel())
            self.documents[evaluation.key] = pyarrow.table(columns)
            self.folder.mkdir(parents=True, exist_ok=True)
            beside = self.folder / "documents.tmp"
            tables = pyarrow.concat_tables(self.documents.values(), promote_options="default")
            pyarrow.parquet.write_table(tables, beside)
            beside.replace(self.folder / DOCUMENTS)
            write_json(self.folder / REPORTS, {"results": list(self.reports.values())})

        distributed.on_rank_0(write)

    def evaluation(self, key: Key) -> Evaluation | None:
        """Make the evaluation again whose report and documents are those of `key`; None where the documents are not
        those that the report counts. On rank 0.
        """
        report, table = self.reports[key], self.documents[key]
        with self._damage_explained():
            # The two files are written one after the other; a kill between them leaves other documents.
            total = math.fsum(table["nats"].to_numpy())
            if len(table) != report["documents"] or not math.isclose(total, report["nats"], rel_tol=1e-12):
                return None
            pairs = [table[name].to_numpy() for name in (COLUMNS[1:] if report["divergence"] else ())]
            perplexity = Perplexity(
                **{name: report[name] for name in ("nats", "tokens", "fed_tokens", "reported_loss", "rows_alone")},
                windows_per_block=report["blocks"]["windows"],
                block_nats=np.array(report["blocks"]["nats"], np.float64),
                block_tokens=np.array(report["blocks"]["tokens"], np.int64),
                document_pairs=np.array(pairs).reshape(-1, len(table)),
                **{f"document_{name}": table[name].to_numpy() for name in DOCUMENT_COLUMNS},
            )
            of_evaluation = {each.name: report[each.name] for each in fields(Evaluation) if each.name in report}
            # JSON has no infinite numbers, as perplexities may be.
            if divergence := report["divergence"]:
                if divergence["reference_perplexity"] is None:
                    divergence = divergence | {"reference_perplexity": math.inf}
                of_evaluation["divergence"] = Divergence(**divergence)
            of_evaluation["groups"] = {
                name: [group | {"perplexity": exp(group["nats"] / group["tokens"])} for group in groups]
                for name, groups in report["groups"].items()
            }
            of_evaluation["group_sums"] = {
                name: np.stack(
                    [table[f"{kind}_by_{name}"].combine_chunks().flatten().to_numpy() for kind in ("nats", "tokens")]
                ).reshape(2, len(table), -1)
                for name in report["groups"]
                if f"nats_by_{name}" in table.column_names and not table[f"nats_by_{name}"].null_count
            }
            return Evaluation(**of_evaluation | {"perplexity": perplexity, "is_known": True})


class Recorder:
    """Takes every batch that this rank scores, writes what resuming needs, and knows what was scored before.
    Collective: every rank makes one.

    Args:
        partial: folder of the lines of this evaluation; None where it cannot be resumed.
        observers: each adds something up over all tokens. `update(windows, columns_KN)` takes a batch and returns what
            its line keeps of it; `restore` takes that when an evaluation resumes, with the same observers.
        tokens: folder of the scored tokens; None where they are not kept.
    """

    def __init__(
        self,
        windows: Windows,
        *,
        partial: Path | None = None,
        observers: Sequence[Any] = (),
        tokens: Path | None = None,
    ):
        self.windows, self.partial, self.observers, self.tokens = windows, partial, observers, tokens
        lines = []
        if partial:
            partial.mkdir(parents=True, exist_ok=True)
            # Nodes may not share the folder, so what is known is the union over all ranks, before anyone appends.
            for path in sorted(partial.glob("rank-*.jsonl")):
                for line in path.read_text(encoding="utf-8").splitlines():
                    with contextlib.suppress(ValueError):  # of the line that was written when the rank was killed
                        lines.append(json.loads(line))
            lines = list({line[0]: line for line in distributed.from_all(lines)}.values())
            self._file = (partial / f"rank-{distributed.rank()}.jsonl").open("a", encoding="utf-8")
        self.known = {batch: sums for batch, sums, *_ in lines}
        """Index of a batch -> sums of its pieces, [K][pieces], the same on every rank."""
        if distributed.rank() == 0:  # the sums of all ranks are added up: each batch counts once
            for _, _, recorded, *_ in lines:
                for observer, of_observer in zip(observers, recorded if observers else [], strict=True):
                    observer.restore(of_observer)
        if tokens:
            self._document_starts = windows.document_starts  # once: it takes a pass over all documents
            tokens.mkdir(parents=True, exist_ok=True)
            kept = {part for _, _, _, *parts in lines for part in parts}
            for path in tokens.iterdir():
                if path.name not in kept:  # no line names it, so its batches are scored again
                    path.unlink(missing_ok=True)  # another rank of this node may have been first
            distributed.wait_for_all()
        self._lines: list[list] = []
        self._tables: list[pyarrow.Table] = []
        """Of the tokens that are not on disk yet."""

    def record(self, batch: int, windows: list[int], columns_KN: "torch.Tensor", piece_sums: list[list[float]]) -> None:
        """Take a scored batch: its columns, window by window, nats first; and sums of its pieces, [K][pieces]."""
        recorded = [observer.update(windows, columns_KN.numpy()) for observer in self.observers]
        self._lines.append([batch, piece_sums, recorded])
        if self.tokens:
            places = np.concatenate([self.windows.scored_places(window) for window in windows])
            documents = self.windows.documents_of(places)
            columns = {
                "document": documents.astype(np.int64),
                "position": (places - self._document_starts[documents]).astype(np.int64),
                "token": np.asarray(self.windows.tokens[places]).astype(np.int32),
                "nats": columns_KN[0].numpy(),
            }
            self._tables.append(pyarrow.table(columns))
        if not self.tokens or sum(map(len, self._tables)) >= PART_TOKENS:
            self.flush()

    def flush(self) -> None:
        """Put everything on disk: the tokens as a part, then the lines that name it."""
        part = []
        if self._tables:
            part = [f"batch-{self._lines[0][0]:08d}-rank-{distributed.rank()}.parquet"]
            beside = self.tokens / f"{part[0]}.tmp"
            pyarrow.parquet.write_table(pyarrow.concat_tables(self._tables), beside)
            beside.replace(self.tokens / part[0])
        if self.partial:
            for line in self._lines:  # Python's repr of a float, as JSON has it, gives back every bit
                self._file.write(f"\n{json.dumps([*line, *part])}")
                self._file.flush()
        self._lines, self._tables = [], []

    def remove(self) -> None:
        """Remove the lines, which are not needed any more once the result is written. Collective."""
        if self.partial:
            self._file.close()
            distributed.wait_for_all()
            shutil.rmtree(self.partial, ignore_errors=True)  # on every rank, since nodes may not share the folder
