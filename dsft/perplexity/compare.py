"""Compares results of several models on the same texts, with 95 % intervals over pairs of documents: what makes one
hard for both models cancels. Over other tokenizations, tokens are no common measure: only bits per byte and byte
perplexity are compared.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from dsft.errors import UserError, nearest, raise_if_any
from dsft.perplexity.modes import find_mode
from dsft.perplexity.results import DOCUMENTS, REPORTS, Evaluation, Results, frame, on_data
from dsft.perplexity.sums import ONE_DOCUMENT, exp, in_words, ratio_interval, sign_test, units_of
from dsft.runtime.console import say, show_table

ESTIMATES = {
    "perplexity_ratio": "perplexity, ratio",
    "nats_per_token": "nats per token, difference",
    "bits_per_byte": "bits per byte, difference",
    "byte_perplexity_ratio": "byte perplexity, ratio",
}
"""Field of a Comparison -> its name in a table."""
COMPUTED_BY = ("dtype", "attn_implementation", "quantization")  # options that change the numbers of one model
MOVED = 5  # documents shown at each end


@dataclass(frozen=True)
class Estimate:
    """A number with its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:,.6g}, {in_words((self.low, self.high), '{:,.6g}'.format)}"

    def mapped(self, function: Callable[[float], float]) -> "Estimate":
        return Estimate(function(self.value), function(self.low), function(self.high))


@dataclass(frozen=True, kw_only=True)
class MovedDocument:
    """One document that changed the result."""

    document: int
    """Its place in the data, from 0, as in documents.parquet."""
    base_nats: float
    nats: float
    """Over two tokenizers, of as many bytes as the base scored."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One model against the base on one data set; less than 0, or a ratio below 1, is better than the base."""

    model: str
    base: str
    data: str
    protocol: str | None
    group: str | None = None
    """With group_by: the documents that alone are compared."""
    base_perplexity: float
    perplexity: float
    perplexity_ratio: Estimate | None
    """None over two tokenizers."""
    nats_per_token: Estimate | None
    """Difference to the base; None over two tokenizers."""
    bits_per_byte: Estimate | None
    """Difference to the base; None if the bytes of the scored text are not known."""
    byte_perplexity_ratio: Estimate | None
    better: int
    """Documents with fewer nats than with the base."""
    worse: int
    same: int
    p_value: float
    """Of the sign test, two-sided: of so uneven a split, were better and worse equally likely."""
    units: str
    """What the intervals are computed over: documents, or blocks of windows."""
    moved: tuple[MovedDocument, ...]
    """Those that gained most, then those that lost most; in the order of their change."""
    note: str = ""

    @property
    def title(self) -> str:
        return f"{self.model} against {self.base} on {on_data(self.data, self.protocol)}"

    def summary(self) -> dict[str, str]:
        """Return the rows of a table about the comparison, for the screen."""
        rows = {title: str(getattr(self, name)) for name, title in ESTIMATES.items() if getattr(self, name)}
        rows["documents"] = (
            f"{self.better:,} better, {self.worse:,} worse, {self.same:,} the same (sign test: p = {self.p_value:.2g})"
        )
        rows["interval"] = f"none: {self.units}" if self.units == ONE_DOCUMENT else f"over {self.units}, in pairs"
        if self.note:
            rows["note"] = self.note
        gained = [each for each in self.moved if each.nats < each.base_nats]
        lost = [each for each in reversed(self.moved) if each.nats > each.base_nats]
        for name, moved in (("gained most", gained), ("lost most", lost)):
            if moved:
                lines = [f"document {each.document}: {each.base_nats:.1f} to {each.nats:.1f} nats" for each in moved]
                rows[name] = "\n".join(lines)
        return rows


def _ratio_cell(comparison: Comparison) -> str:
    """The ratio of perplexities with its interval; over two tokenizers that of perplexities of a byte."""
    ratio = comparison.perplexity_ratio or comparison.byte_perplexity_ratio
    if ratio is None:
        return ""
    interval = "" if math.isnan(ratio.low) else f" ({ratio.low:.3f} to {ratio.high:.3f})"
    return f"{ratio.value:.3f}{interval}" + ("" if comparison.perplexity_ratio else " per byte")


class Comparisons(tuple[Comparison, ...]):
    """A comparison for each model and data set, or for each of their groups."""

    def overview(self) -> Table:
        """Return one table: a row for each comparison."""
        table = Table("data", "model", "base", "perplexity", "ratio (95 %)", "better", "worse")
        for each in self:
            data = on_data(each.data, each.protocol)
            table.add_row(
                data if each.group is None else f"{data}, {each.group}",
                each.model,
                f"{each.base_perplexity:,.2f}",
                f"{each.perplexity:,.2f}",
                _ratio_cell(each),
                str(each.better),
                str(each.worse),
            )
        return table

    def tables(self) -> list[tuple[str, dict[str, str]]]:
        """Return a title and rows for each comparison, for the screen; groups have their rows in `overview` alone."""
        return [(each.title, each.summary()) for each in self if each.group is None]

    def __str__(self) -> str:
        lines = []
        for title, rows in self.tables():
            lines.append(title)
            for name, value in rows.items():
                lines.append(f"  {name:<28}" + value.replace("\n", "\n" + 30 * " "))
        return "\n".join(lines)

    def to_pandas(self) -> Any:
        """Return a pandas.DataFrame with a row for each comparison."""
        rows = []
        for comparison in self:
            row = dict(vars(comparison))
            del row["moved"]
            for name in ESTIMATES:  # numbers apart, such as bits_per_byte, bits_per_byte_low and bits_per_byte_high
                estimate = row[name] or Estimate(math.nan, math.nan, math.nan)
                row |= {name: estimate.value, f"{name}_low": estimate.low, f"{name}_high": estimate.high}
            rows.append(row)
        return frame(rows)


def read_evaluations(folders: list[str]) -> list[Evaluation]:
    """Read all results of folders, or of their perplexity.json. Raises UserError with every folder without any."""
    problems = []
    evaluations = []
    for name in folders:
        path = Path(name).expanduser()
        folder = path.parent if path.name == REPORTS else path
        results = Results(folder)
        if not results.reports:
            problems.append(f"{name}: holds no {REPORTS}; write one with dsft eval ... --output_dir {folder}")
        for key in results.reports:
            evaluation = results.evaluation(key)
            if evaluation:
                evaluations.append(evaluation)
            else:
                problems.append(f"{name}: {DOCUMENTS} lacks documents of {key[0]}; run dsft eval again")
    raise_if_any(problems)
    return evaluations


def compare_results(
    evaluations: list[Evaluation], *, base: str | None = None, group_by: str | None = None
) -> Comparisons:
    """Compare every other model with the base, on each data set of the base.

    Args:
        base: name of a model as in its results, or the end of its path; by default the first.
        group_by: a grouping of the results, each of whose groups is compared by itself.

    Raises:
        UserError: if the base is not there, a model has no result on the base's texts, or results cannot be compared.
    """
    of_model: dict[str, list[Evaluation]] = {}
    for evaluation in told_apart(evaluations):
        of_model.setdefault(evaluation.model, []).append(evaluation)
    base = _find_base(base, list(of_model))
    references = of_model.pop(base)
    if not of_model:
        raise UserError(f"nothing to compare with {base}: name the results of another model too")
    problems = []
    comparisons = []
    for reference in references:
        for model, candidates in of_model.items():
            fitting = [each for each in candidates if each.hashes["texts"] == reference.hashes["texts"]]
            if not fitting:
                problems.append(
                    f"{model} has no result on the texts of {reference.data} (as {base} has); evaluate both on the same"
                    " data, with the same max_documents"
                )
                continue
            refusals = [refusal(reference, each) for each in fitting]
            if all(refusals):
                problems.append(refusals[0])
                continue
            other = fitting[refusals.index("")]
            if group_by is None:
                comparisons.append(compare_pair(reference, other))
                continue
            if group_by not in reference.document_groups:
                groupings = ", ".join(reference.document_groups) or "none"
                problems.append(
                    f"group_by={group_by}: the result of {base} on {reference.data} was evaluated without it (it has"
                    f" {groupings}); dsft eval --group_by makes groups"
                )
                continue
            labels_D = reference.document_groups[group_by]  # the same documents, whatever the other was grouped by
            for label in dict.fromkeys(labels_D):
                before, after = (
                    replace(each, perplexity=each.perplexity.of_documents(labels_D == label))
                    for each in (reference, other)
                )
                if before.perplexity.tokens and after.perplexity.tokens:
                    comparisons.append(replace(compare_pair(before, after), group=label))
    raise_if_any(problems)
    return Comparisons(comparisons)


def _find_base(base: str | None, models: list[str]) -> str:
    if base is None or base in models:
        return base or models[0]
    parts = Path(base).parts
    ending = [model for model in models if Path(model).parts[-len(parts) :] == parts]
    if len(ending) != 1:
        raise UserError(
            f"base={base} matches {len(ending)} of the models in these results: {', '.join(models)}"
            + nearest(base, models)
        )
    return ending[0]


def told_apart(evaluations: list[Evaluation]) -> list[Evaluation]:
    """Take a result that several folders have once, and name results of one model in two dtypes or attentions apart."""
    unlike: dict[tuple, Evaluation] = {}
    options_of: dict[tuple, set[tuple]] = {}
    for each in evaluations:
        options = tuple(str(each.options.get(option)) for option in COMPUTED_BY)
        unlike.setdefault((options, each.key, *each.hashes.values(), each.perplexity.nats), each)
        options_of.setdefault(each.key, set()).add(options)
    apart = []
    for (options, *_), each in unlike.items():
        values_of_each = zip(*options_of[each.key], strict=True)
        differing = [value for value, values in zip(options, values_of_each, strict=True) if len({*values}) > 1]
        apart.append(replace(each, model=f"{each.model} ({', '.join(differing)})") if differing else each)
    return apart


def refusal(base: Evaluation, other: Evaluation) -> str:
    """Return why two results on the same texts cannot be compared; empty if they can."""
    same_tokens = base.hashes["tokens"] == other.hashes["tokens"]
    if same_tokens and base.hashes["windows"] == other.hashes["windows"] and base.protocol == other.protocol:
        return ""  # options may be named or left out, and BOS be there or not: these tokens are in these windows
    names = f"{other.model} and {base.model} on {base.data}"
    decisive = dict.fromkeys(
        ["protocol", "seq_len", *find_mode(base.mode).options, *find_mode(other.mode).options, "mode"]
    )
    differing = [name for name in decisive if base.options.get(name) != other.options.get(name)]
    if differing or same_tokens:
        values = [f"{name} {other.options.get(name)} and {base.options.get(name)}" for name in differing]
        values = ", ".join(values) or "by another dsft"
        return f"{names} were scored in other windows ({values}); evaluate both with the same options"
    is_scored_D = (base.perplexity.document_tokens > 0) & (other.perplexity.document_tokens > 0)
    base_D, other_D = (each.perplexity.document_bytes[is_scored_D] for each in (base, other))
    if not base_D.any() or not other_D.any():
        return f"{names} have other tokens, and the bytes of the scored text are not known; use another mode"
    if find_mode(base.mode).is_text or np.array_equal(base_D, other_D):  # a text is scored whole, but for first tokens
        return ""
    return (
        f"{names} are of other scored text: cut to seq_len at other places, or rendered otherwise; evaluate both with a"
        " larger seq_len and the same chat_template, train_on and train_thinking"
    )


def compare_pair(base: Evaluation, other: Evaluation) -> Comparison:
    """Compare two results that `refusal` lets pass."""
    before = base.perplexity
    after = other.perplexity
    is_scored_D = (after.document_tokens > 0) & (before.document_tokens > 0)
    same_tokens = base.hashes["tokens"] == other.hashes["tokens"]
    nats_D = after.document_nats
    if not same_tokens:  # first tokens that are context only have other bytes: nats of as many bytes as the base's
        ones_D = np.ones(before.documents)
        nats_D = nats_D * np.divide(
            before.document_bytes, after.document_bytes, out=ones_D, where=after.document_bytes > 0
        )
    change_D = np.where(is_scored_D, nats_D - before.document_nats, 0.0)
    notes = []
    for name in COMPUTED_BY:
        ours = other.options.get(name)
        theirs = base.options.get(name)
        if ours != theirs:
            notes.append(f"{name} differs: {ours}, the base {theirs}")
    # Blocks of windows can be compared if both models have the same windows.
    changed_blocks = after.block_nats - before.block_nats if same_tokens else None
    sums_KU, units = units_of(after, change_D, changed_blocks, is_scored_D=is_scored_D)
    nats_per_token = per_byte = None
    if same_tokens:
        nats_per_token = Estimate(after.reported_loss - before.reported_loss, *ratio_interval(sums_KU, 1))
        if after.bytes:
            per_byte = Estimate((after.nats - before.nats) / after.bytes, *ratio_interval(sums_KU, 2))
    else:
        notes.append("two tokenizers: only bits per byte and byte perplexity can be compared")
        mode = find_mode(other.mode)
        if not mode.scores_text_alone:
            notes.append(
                f"{other.protocol or f'mode {other.mode}'} also scores tokens that a tokenizer puts between or before"
                " texts, or leaves first tokens out" + "; mode rolling compares the texts alone" * mode.is_text
            )
        ratios = []
        sums = []
        for each in (after, before):
            bytes_scored = int(each.document_bytes[is_scored_D].sum())
            ratios.append(math.fsum(each.document_nats[is_scored_D]) / bytes_scored)
            sums.append(units_of(each, each.document_nats, None, is_scored_D=is_scored_D)[0])
        per_byte = Estimate(ratios[0] - ratios[1], *ratio_interval(sums[0], 2, sums[1]))
    better = int((change_D < 0).sum())
    worse = int((change_D > 0).sum())
    order = np.argsort(change_D, kind="stable").tolist()  # the largest gain first, the largest loss last
    ends = [number for number in order[:MOVED] if change_D[number] < 0]
    ends += [number for number in order[-MOVED:] if change_D[number] > 0]
    moved = [
        MovedDocument(document=number, base_nats=float(before.document_nats[number]), nats=float(nats_D[number]))
        for number in ends
    ]
    return Comparison(
        model=other.model,
        base=base.model,
        data=base.data,
        protocol=base.protocol,
        base_perplexity=before.perplexity,
        perplexity=after.perplexity,
        perplexity_ratio=nats_per_token and nats_per_token.mapped(exp),
        nats_per_token=nats_per_token,
        bits_per_byte=per_byte and per_byte.mapped(lambda nats: nats / math.log(2)),
        byte_perplexity_ratio=per_byte and per_byte.mapped(exp),
        better=better,
        worse=worse,
        same=int(is_scored_D.sum()) - better - worse,
        p_value=sign_test(better, worse),
        units=units,
        moved=tuple(moved),
        note="; ".join(notes),
    )


def print_together(evaluations: list[Evaluation]) -> None:
    """Print how the models of one launch compare with the first."""
    if len({evaluation.model for evaluation in evaluations}) == 1:
        return
    try:
        show_table(compare_results(evaluations).overview())
    except UserError as error:  # the results stand; only what joins them does not
        for problem in error.problems:
            say(f"note: not compared: {problem}")
