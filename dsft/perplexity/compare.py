"""Compares results of several models on the same texts, with 95 % intervals over pairs.

Both models scored the same documents, so the documents are drawn in pairs: what makes a document hard for both cancels.
Results over other texts or windows are refused. Over other tokenizations, tokens are no common measure: only bits per
byte and byte perplexity are compared.

Of one model it shows how the loss of the same tokens falls as their context grows, in a table and a picture.
"""

import math
from collections import defaultdict
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from dsft.errors import UserError, nearest, raise_if_any
from dsft.perplexity.intervals import LEVEL, RESAMPLES, grouped, ratio_intervals, sign_test, units_of
from dsft.perplexity.results import HOW_OPTIONS, Evaluation, Results, frame, html_table
from dsft.perplexity.sums import exp

ESTIMATES = ("perplexity_ratio", "nats_per_token", "bits_per_byte", "byte_perplexity_ratio")
"""Fields of a Comparison."""
MOVED = 5
"""Documents shown at each end."""


@dataclass(frozen=True)
class Estimate:
    """Holds a number with its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        bounds = "unknown" if math.isnan(self.low) else f"{self.low:.6g} to {self.high:.6g}"
        return f"{self.value:.6g}, {LEVEL:.0%} {bounds}"

    def exp(self) -> "Estimate":
        return Estimate(exp(self.value), exp(self.low), exp(self.high))

    def __truediv__(self, divisor: float) -> "Estimate":
        return Estimate(self.value / divisor, self.low / divisor, self.high / divisor)


@dataclass(frozen=True, kw_only=True)
class MovedDocument:
    """Holds one document that changed the result."""

    document: int
    """Its place in the data, from 0, as in documents.parquet."""
    base_nats: float
    nats: float
    tokens: int | None
    """Scored; None over two tokenizers."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Compares one model with the base on one data set; less than 0, or a ratio below 1, is better than the base."""

    model: str
    base: str
    data: str
    protocol: str | None
    perplexity_ratio: Estimate | None
    """None over two tokenizers."""
    nats_per_token: Estimate | None
    """Difference to the base; None over two tokenizers."""
    bits_per_byte: Estimate | None
    """Difference to the base; None where the bytes of the scored text are not known."""
    byte_perplexity_ratio: Estimate | None
    better: int
    """Documents with fewer nats than with the base."""
    worse: int
    same: int
    p_value: float
    """Of the sign test, two-sided: of so uneven a split, were better and worse equally likely."""
    resampled: str
    moved: tuple[MovedDocument, ...]
    """Those that gained most, then those that lost most; in the order of their change."""
    note: str = ""


class Comparisons(tuple[Comparison, ...]):
    """Holds a comparison for each model and data set; a notebook shows them as tables."""

    def to_pandas(self) -> Any:
        """Return a pandas.DataFrame with a row for each comparison."""
        rows = []
        for comparison in self:
            row: dict[str, Any] = {}  # numbers apart, such as bits_per_byte, bits_per_byte_low and bits_per_byte_high
            for field in fields(comparison):
                value = getattr(comparison, field.name)
                if field.name in ESTIMATES:
                    numbers = (value.value, value.low, value.high) if value else (math.nan,) * 3
                    row |= dict(zip((field.name, f"{field.name}_low", f"{field.name}_high"), numbers, strict=True))
                elif field.name != "moved":
                    row[field.name] = value
            rows.append(row)
        return frame(rows)

    def _repr_html_(self) -> str:
        return "".join(html_table(comparison_title(item), comparison_rows(item)) for item in self)


def read_evaluations(folders: list[str]) -> list[Evaluation]:
    """Read all results of folders that evaluations wrote; a folder, or its perplexity.json.

    Raises:
        UserError: with every folder that holds none.
    """
    problems, evaluations = [], []
    for name in folders:
        path = Path(name).expanduser()
        results = Results(path.parent if path.name == "perplexity.json" else path)
        if not results.reports:
            problems.append(f"{name}: holds no perplexity.json; write one with dsft eval ... --output_dir {name}")
        for key in results.reports:
            if not results.is_whole(key):
                problems.append(f"{name}: documents.parquet lacks documents of {key[0]}; run dsft eval again")
            else:
                evaluations.append(results.evaluation(key))
    raise_if_any(problems)
    return evaluations


def compare_results(evaluations: list[Evaluation], *, base: str | None = None) -> Comparisons:
    """Compare every other model with the base, on each data set of the base.

    Args:
        base: name of a model as in its results, or the end of its path; by default the first.

    Raises:
        UserError: where the base is not there, a model has no result on the base's texts, or results cannot be
            compared.
    """
    base_model = _base_model(evaluations, base)
    problems, comparisons = [], []
    others = dict.fromkeys(evaluation.model for evaluation in evaluations if evaluation.model != base_model)
    if not others:
        raise UserError([f"nothing to compare with {base_model}: name the results of another model too"])
    for reference in _of_model(evaluations, base_model):
        for model in others:
            candidates = _of_model(evaluations, model)
            fitting = [item for item in candidates if item.hashes["texts"] == reference.hashes["texts"]]
            if not fitting:
                problems.append(
                    f"{model} has no result on the texts of {reference.data} (as {base_model} has); evaluate both on"
                    " the same data, with the same max_documents"
                )
                continue
            refusals = [refusal(reference, item) for item in fitting]
            if all(refusals):
                problems.append(refusals[0])
            else:
                comparisons.append(compare_pair(reference, fitting[refusals.index("")]))
    raise_if_any(problems)
    return Comparisons(comparisons)


def _of_model(evaluations: list[Evaluation], model: str) -> list[Evaluation]:
    return [evaluation for evaluation in evaluations if evaluation.model == model]


def _base_model(evaluations: list[Evaluation], base: str | None) -> str:
    models = list(dict.fromkeys(evaluation.model for evaluation in evaluations))
    if base is None:
        return models[0]
    if base in models:
        return base
    ending = [model for model in models if Path(model).parts[-len(Path(base).parts) :] == Path(base).parts]
    if len(ending) == 1:
        return ending[0]
    known = ", ".join(models)
    if ending:
        raise UserError([f"base={base} is the end of {len(ending)} models; name more of the path: {known}"])
    raise UserError([f"base={base}: is no model of these results, which are of {known}{nearest(base, models)}"])


def refusal(base: Evaluation, other: Evaluation) -> str:
    """Say why two results on the same texts cannot be compared; empty where they can."""
    names = f"{other.model} and {base.model} on {base.data}"
    decisive = [name for name in base.options | other.options if name not in HOW_OPTIONS]
    differing = [name for name in decisive if base.options.get(name) != other.options.get(name)]
    if differing:
        values = ", ".join(f"{name} {other.options.get(name)} and {base.options.get(name)}" for name in differing)
        return f"{names} were scored in other windows ({values}); evaluate both with the same options"
    if has_same_tokens(base, other):
        if base.hashes["windows"] != other.hashes["windows"]:
            return f"{names} were scored in other windows; evaluate both with this dsft"
        return ""
    if not base.perplexity.bytes:
        return f"{names} have other tokens, and the bytes of the scored text are not known; use another mode"
    if not np.array_equal(base.perplexity.document_bytes, other.perplexity.document_bytes):
        return f"{names} were cut to seq_len at other places; evaluate both with a larger seq_len"
    return ""


def has_same_tokens(base: Evaluation, other: Evaluation) -> bool:
    return base.hashes["tokens"] == other.hashes["tokens"]


def compare_pair(base: Evaluation, other: Evaluation) -> Comparison:
    """Compare two results that `refusal` lets pass."""
    before, after = base.perplexity, other.perplexity
    change_D = after.document_nats - before.document_nats
    is_scored_D = (after.document_tokens > 0) & (before.document_tokens > 0)
    same_tokens, note = has_same_tokens(base, other), ""
    if same_tokens:
        units = units_of(after, [change_D], [after.block_nats - before.block_nats])
        intervals = ratio_intervals(units, [(0, 1), (0, 2)])
        nats_per_token = Estimate(after.loss - before.loss, *intervals[0])
        resampled = units.kind
        if after.windows_per_block:
            note = f"fewer than 30 documents: {units.kind} are drawn instead"
    else:
        units = grouped(np.stack([change_D, after.document_bytes])[:, is_scored_D])
        nats_per_token, intervals = None, [None, *ratio_intervals(units, [(0, 1)])]
        resampled = units.kind
        note = "two tokenizers: only bits per byte and byte perplexity can be compared"
        if after.windows_per_block or before.windows_per_block:
            intervals[1], resampled = (math.nan, math.nan), "nothing"
            note += "; fewer than 30 documents and other windows: no interval"
    per_byte = Estimate((after.nats - before.nats) / after.bytes, *intervals[1]) if after.bytes else None
    better, worse = (int((change_D[is_scored_D] * sign < 0).sum()) for sign in (1, -1))
    return Comparison(
        model=other.model,
        base=base.model,
        data=base.data,
        protocol=base.protocol,
        perplexity_ratio=nats_per_token and nats_per_token.exp(),
        nats_per_token=nats_per_token,
        bits_per_byte=per_byte and per_byte / math.log(2),
        byte_perplexity_ratio=per_byte and per_byte.exp(),
        better=better,
        worse=worse,
        same=int(is_scored_D.sum()) - better - worse,
        p_value=sign_test(better, worse),
        resampled=resampled,
        moved=_moved(before, after, same_tokens=same_tokens),
        note=note,
    )


def _moved(before, after, *, same_tokens: bool) -> tuple[MovedDocument, ...]:
    """Return the documents with the largest changes of their nats, the largest gain first and the largest loss last."""
    change_D = after.document_nats - before.document_nats
    order = np.argsort(change_D, kind="stable").tolist()
    ends = [*(number for number in order[:MOVED] if change_D[number] < 0)]
    ends += [number for number in order[-MOVED:] if change_D[number] > 0]
    return tuple(
        MovedDocument(
            document=number,
            base_nats=float(before.document_nats[number]),
            nats=float(after.document_nats[number]),
            tokens=int(after.document_tokens[number]) if same_tokens else None,
        )
        for number in ends
    )


def comparison_title(comparison: Comparison) -> str:
    """Return the title of a table about one comparison."""
    protocol = f" by {comparison.protocol}" if comparison.protocol else ""
    return f"{comparison.model} against {comparison.base} on {comparison.data}{protocol}"


def comparison_rows(comparison: Comparison) -> dict[str, str]:
    """Return the rows of a table about one comparison."""
    rows = {
        "perplexity, ratio": comparison.perplexity_ratio,
        "nats per token, difference": comparison.nats_per_token,
        "bits per byte, difference": comparison.bits_per_byte,
        "byte perplexity, ratio": comparison.byte_perplexity_ratio,
    }
    rows = {name: str(estimate) for name, estimate in rows.items() if estimate is not None}
    rows["documents"] = (
        f"{comparison.better:,} better, {comparison.worse:,} worse, {comparison.same:,} the same"
        f" (sign test: p = {comparison.p_value:.2g})"
    )
    rows["interval"] = f"{RESAMPLES:,} resamples of {comparison.resampled}, in pairs"
    if comparison.note:
        rows["note"] = comparison.note
    for end, documents in (
        ("gained most", [item for item in comparison.moved if item.nats < item.base_nats]),
        ("lost most", [item for item in reversed(comparison.moved) if item.nats > item.base_nats]),
    ):
        lines = []
        for item in documents:
            if item.tokens is None:
                change = f"{item.base_nats:.1f} to {item.nats:.1f} nats"
            else:
                before, after = item.base_nats / item.tokens, item.nats / item.tokens
                change = f"{before:.3f} to {after:.3f} nats per token ({item.tokens:,} tokens)"
            lines.append(f"document {item.document}: {change}")
        if lines:
            rows[end] = "\n".join(lines)
    return rows


PICTURE = "context_curve.png"
Curves = dict[tuple[str, str], list[Evaluation]]
"""Model and data -> the result of each length, shortest first."""


def context_curves(evaluations: list[Evaluation]) -> Curves:
    """Group the results of lengths of context."""
    curves: Curves = defaultdict(list)
    for evaluation in evaluations:
        curves[evaluation.model, evaluation.data].append(evaluation)
    return {
        names: sorted(results, key=lambda evaluation: evaluation.options["seq_len"])
        for names, results in curves.items()
    }


def curve_rows(results: list[Evaluation]) -> dict[str, str]:
    """Return the rows of a table: length -> perplexity, its interval, and the change from the length before."""
    rows, before = {}, None
    for evaluation in results:
        result, (low, high) = evaluation.perplexity, evaluation.intervals.perplexity
        change = "" if before is None else f", {result.loss - before:+.6f} nats per token"
        rows[f"{evaluation.options['seq_len']:,} tokens"] = (
            f"{result.perplexity:.4f} ({LEVEL:.0%} interval {low:.4f} to {high:.4f}){change}"
        )
        before = result.loss
    first = results[0].perplexity
    documents = first.documents - first.unscored_documents
    rows["scored"] = f"the last {first.tokens // documents:,} tokens of {documents:,} documents"
    if first.unscored_documents:
        rows["left out"] = f"{first.unscored_documents:,} shorter documents"
    return rows


def draw_curves(curves: Curves, path: Path) -> bool:
    """Draw perplexity against length of context; False where matplotlib is not installed (`pip install dsft[demo]`)."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    FigureCanvasAgg(figure)  # without a screen, and whatever backend the user has
    axes = figure.subplots()
    for (model, data), results in curves.items():
        lengths = [evaluation.options["seq_len"] for evaluation in results]
        values = [evaluation.perplexity.perplexity for evaluation in results]
        bounds = [evaluation.intervals.perplexity for evaluation in results]
        line = axes.plot(lengths, values, "o-", label=f"{Path(model).name}, {Path(data).name}")[0]
        if not any(math.isnan(low) for low, _ in bounds):
            axes.fill_between(lengths, *zip(*bounds, strict=True), color=line.get_color(), alpha=0.15)
    axes.set_xscale("log", base=2)
    axes.set(xlabel="window, tokens", ylabel="perplexity of the last tokens")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    return True
