"""Compares results of several models on the same texts, with 95 % intervals over pairs of documents: a document's
difficulty for both models cancels. With different tokenizers, tokens are not a common unit: only bits per byte and byte
perplexity are compared.
"""

import math
from collections import defaultdict
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from dsft.config.options import UNQUANTISED
from dsft.errors import UserError, raise_if_any
from dsft.perplexity.modes import WINDOW_OPTIONS, find_mode
from dsft.perplexity.results import DOCUMENTS, REPORTS, Evaluation, Results, on_data
from dsft.perplexity.sums import Estimate, exp, ratio_interval, sign_test, units_of
from dsft.runtime.console import say, show_table
from dsft.units import one_of

COMPUTED_BY = ("dtype", "attn_implementation", "quantization")  # options that change one model's results
MOVED = 5  # documents named at each end
RATIO = "ratio (95 %)"  # a column of the table


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One model against the base on one data set; values below 0, or ratios below 1, are better than the base."""

    model: str
    base: str
    data: str
    protocol: str | None
    group: str | None = None  # with group_by: the value whose documents are compared
    base_perplexity: float
    perplexity: float
    perplexity_ratio: Estimate | None  # None for two tokenizers
    nats_per_token: Estimate | None  # difference to the base; None for two tokenizers
    bits_per_byte: Estimate | None  # difference to the base; None if the bytes of the scored text are unknown
    byte_perplexity_ratio: Estimate | None
    better: int  # documents with fewer nats than with the base
    worse: int
    same: int
    p_value: float
    """Of the two-sided sign test: probability of a split at least this uneven if both are equally likely."""
    units: str  # units of the intervals: documents, or blocks of windows
    gained_most: tuple[int, ...]
    """Documents, by their index in the data from 0 as in documents.parquet, the largest gain first."""
    lost_most: tuple[int, ...]
    examples: tuple[tuple[str, int, str], ...] = ()
    """The documents that gained and lost most: which of the two, index, excerpt."""
    note: str = ""

    def row(self) -> dict[str, str]:
        data = on_data(self.data, self.protocol)
        if self.group is not None:
            data += f", {self.group}"
        ratio = ""
        if self.perplexity_ratio:
            ratio = f"{self.perplexity_ratio:.3f}"
        elif self.byte_perplexity_ratio:
            ratio = f"{self.byte_perplexity_ratio:.3f} per byte"
        return {
            "data": data,
            "model": self.model,
            "base": f"{self.base_perplexity:,.2f}",
            "perplexity": f"{self.perplexity:,.2f}",
            RATIO: ratio,
            "better": f"{self.better:,}",
            "worse": f"{self.worse:,}",
            "p": f"{self.p_value:.2g}",
        }


class Comparisons(tuple[Comparison, ...]):
    """A comparison for each model and data set, or for each group."""

    def overview(self) -> Table:
        """Return one table with a row for each comparison; below it the units of intervals, and notes."""
        rows = [each.row() for each in self]
        units = dict.fromkeys(each.units for each in self)
        lines = [f"against {self[0].base}; intervals over pairs: {one_of(units)}"]
        lines += dict.fromkeys(f"{each.model} on {each.data}: {each.note}" for each in self if each.note)
        for model, data, which, number, text in self.examples():
            lines.append(f"{model} {which}, document {number} of {data}: {text}")
        table = Table(caption="\n".join(lines), caption_justify="left")
        for name in rows[0]:
            if name in ("data", "model"):
                table.add_column(name)
                continue
            words = " ".join([name, *(row[name] for row in rows)]).split()  # no number is wrapped
            table.add_column(name, no_wrap=name != RATIO, min_width=max(map(len, words)))
        for row in rows:
            table.add_row(*row.values())
        return table

    def examples(self) -> list[tuple[str, str, str, int, str]]:
        """Return the documents that changed most: model, data, "gained most" or "lost most", index, excerpt."""
        return [(each.model, each.data, *example) for each in self for example in each.examples]

    def __repr__(self) -> str:
        import pandas  # takes a second

        return pandas.DataFrame([each.row() for each in self]).to_string(index=False)

    def to_pandas(self) -> Any:
        """Return a pandas.DataFrame, a row for each comparison; an estimate has columns such as bits_per_byte_low"""
        import pandas

        return pandas.json_normalize([asdict(each) for each in self], sep="_")


def read_evaluations(folders: list[str]) -> list[Evaluation]:
    """Read all results of folders, or of their perplexity.json. Raises UserError, naming every folder without any."""
    problems = []
    evaluations = []
    for name in folders:
        path = Path(name).expanduser()
        folder = path.parent if path.name == REPORTS else path
        results = Results(folder)
        if not results.evaluations:
            problems.append(f"{name}: contains no {DOCUMENTS}; write one with dsft eval ... --output_dir {folder}")
        evaluations += results.evaluations.values()
    raise_if_any(problems)
    return evaluations


def compare_results(
    evaluations: list[Evaluation], *, base: str | None = None, group_by: str | None = None
) -> Comparisons:
    """Compare every other model with the base, on each data set of the base.

    Args:
        base: name of a model as in its results, or the last parts of its path; by default the first.
        group_by: a grouping of the results; each group is compared separately.

    Raises:
        UserError: if there is no such base, a model has no result on the base's texts, or results cannot be compared.
    """
    of_model = defaultdict(list)
    for evaluation in told_apart(evaluations):
        of_model[evaluation.model].append(evaluation)
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
            labels_D = reference.document_groups[group_by]  # the other may have been evaluated without this grouping
            for label in dict.fromkeys(labels_D):
                pair = []
                for each in (reference, other):
                    result = each.perplexity.of_documents(labels_D == label)
                    if result.tokens:
                        pair.append(replace(each, perplexity=result))
                if len(pair) == 2:
                    comparisons.append(replace(compare_pair(*pair), group=label))
    raise_if_any(problems)
    return Comparisons(comparisons)


def _find_base(base: str | None, models: list[str]) -> str:
    if base is None or base in models:
        return base or models[0]
    parts = Path(base).parts
    matching = [model for model in models if parts and Path(model).parts[-len(parts) :] == parts]
    if len(matching) != 1:
        raise UserError(f"base={base} matches {len(matching)} of the models in these results: {', '.join(models)}")
    return matching[0]


def told_apart(evaluations: list[Evaluation]) -> list[Evaluation]:
    """Drop copies of a result, and return results of one model in two dtypes or attentions under different names."""
    by_key = defaultdict(dict)
    for each in evaluations:
        values = [each.options.get(name) for name in COMPUTED_BY]
        settings = [str(value) for value in values if value not in (None, UNQUANTISED)]
        by_key[each.key].setdefault((", ".join(settings), each.perplexity.nats), each)
    unlike = []
    for results in by_key.values():
        has_several = len({settings for settings, _ in results}) > 1
        for (settings, _), each in results.items():
            unlike.append(replace(each, model=f"{each.model} ({settings})") if has_several else each)
    return unlike


def refusal(base: Evaluation, other: Evaluation) -> str:
    """Return why two results on the same texts cannot be compared; empty if they can."""
    same_tokens = base.hashes["tokens"] == other.hashes["tokens"]
    if same_tokens and base.hashes["windows"] == other.hashes["windows"] and base.protocol == other.protocol:
        return ""  # tokens and windows are the same, whatever the options
    names = f"{other.model} and {base.model} on {base.data}"
    decisive = ("protocol", "mode", "seq_len", *WINDOW_OPTIONS)
    differing = [name for name in decisive if base.options.get(name) != other.options.get(name)]
    if differing or same_tokens:
        values = [f"{name} {other.options.get(name)} and {base.options.get(name)}" for name in differing]
        values = ", ".join(values) or "by another dsft"
        return f"{names} were scored in other windows ({values}); evaluate both with the same options"
    is_scored_D = (base.perplexity.document_tokens > 0) & (other.perplexity.document_tokens > 0)
    base_D = base.perplexity.document_bytes[is_scored_D]
    other_D = other.perplexity.document_bytes[is_scored_D]
    if not base_D.any() or not other_D.any():
        return f"{names} have other tokens, and the bytes of the scored text are not known; use another mode"
    if find_mode(base.mode).is_text or np.array_equal(base_D, other_D):  # texts are scored whole, except first tokens
        return ""
    return (
        f"{names} scored different text: cut to seq_len at other places, or rendered otherwise; evaluate both with a"
        " larger seq_len and the same chat_template, train_on and train_thinking"
    )


def compare_pair(base: Evaluation, other: Evaluation) -> Comparison:
    """Compare two results for which `refusal` returned nothing."""
    before = base.perplexity
    after = other.perplexity
    is_scored_D = (after.document_tokens > 0) & (before.document_tokens > 0)
    same_tokens = base.hashes["tokens"] == other.hashes["tokens"]
    nats_D = after.document_nats
    if not same_tokens:  # first tokens, which are context only, differ in bytes: scale nats to the base's bytes
        ratios_D = before.document_bytes / np.maximum(after.document_bytes, 1)
        nats_D = nats_D * np.where(after.document_bytes > 0, ratios_D, 1.0)
    change_D = np.where(is_scored_D, nats_D - before.document_nats, 0.0)
    notes = []
    for name in COMPUTED_BY:
        ours = other.options.get(name)
        theirs = base.options.get(name)
        if ours != theirs:
            notes.append(f"{name} differs: {ours}, the base {theirs}")
    # Blocks of windows can be compared if both models have the same windows.
    changed_blocks = None
    if same_tokens:
        changed_blocks = after.block_nats - before.block_nats
    sums_KU, units = units_of(after, change_D, changed_blocks, is_scored_D=is_scored_D)
    nats_per_token = per_byte = None
    if same_tokens:
        nats_per_token = Estimate(after.reported_loss - before.reported_loss, *ratio_interval(sums_KU, 1))
        if after.bytes:
            per_byte = Estimate((after.nats - before.nats) / after.bytes, *ratio_interval(sums_KU, 2))
    else:
        notes.append("two tokenizers: only bits per byte and byte perplexity can be compared")
        if other.mode != "rolling":  # which scores all bytes of the texts, and no token that a tokenizer adds
            way_out = "; mode rolling compares the texts alone" if find_mode(other.mode).is_text else ""
            notes.append(
                f"{other.protocol or f'mode {other.mode}'} also scores tokens that a tokenizer puts between or before"
                f" texts, or leaves first tokens out{way_out}"
            )
        sums = []
        for each in (after, before):
            sums_KU, _ = units_of(each, each.document_nats, None, is_scored_D=is_scored_D)
            sums.append(sums_KU)
        ratio, base_ratio = (nats_U.sum() / bytes_U.sum() for nats_U, _, bytes_U in sums)
        per_byte = Estimate(float(ratio - base_ratio), *ratio_interval(sums[0], 2, sums[1]))
    better = int((change_D < 0).sum())
    worse = int((change_D > 0).sum())
    order = np.argsort(change_D, kind="stable").tolist()  # the largest gain first, the largest loss last
    gained_most = tuple(order[: min(better, MOVED)])
    lost_most = tuple(order[::-1][: min(worse, MOVED)])
    examples = []
    for which, documents in (("gained most", gained_most), ("lost most", lost_most)):
        if documents and base.document_texts:
            words = base.document_texts[documents[0]].split()
            examples.append((which, documents[0], " ".join(words)))
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
        gained_most=gained_most,
        lost_most=lost_most,
        examples=tuple(examples),
        note="; ".join(notes),
    )


def print_together(evaluations: list[Evaluation]) -> None:
    """Print the comparison of a launch's models with the first."""
    if len({evaluation.model for evaluation in evaluations}) == 1:
        return
    try:
        show_table(compare_results(evaluations).overview())
    except UserError as error:  # the results remain; only their comparison is missing
        for problem in error.problems:
            say(f"note: not compared: {problem}")
