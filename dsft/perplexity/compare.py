"""Compares results of several models on the same texts, with 95 % intervals over pairs of documents: what makes one
hard for both models cancels. Over other tokenizations, tokens are no common measure: only bits per byte and byte
perplexity are compared.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from dsft.errors import UserError, nearest, raise_if_any
from dsft.perplexity.modes import CONTEXT, find_mode
from dsft.perplexity.results import DOCUMENTS, REPORTS, Evaluation, Results, frame, groups_of, html_table, on_data
from dsft.perplexity.sums import ONE_DOCUMENT, exp, in_words, ratio_interval, sign_test, units_of
from dsft.runtime.console import print_table, say
from dsft.units import plural

ESTIMATES = {
    "perplexity_ratio": "perplexity, ratio",
    "nats_per_token": "nats per token, difference",
    "bits_per_byte": "bits per byte, difference",
    "byte_perplexity_ratio": "byte perplexity, ratio",
}
"""Field of a Comparison -> its name in a table."""
HOW_COMPUTED = ("dtype", "attn_implementation", "quantization")  # options that change the numbers of one model
MOVED = 5  # documents shown at each end
PICTURE = "context_curve.png"


@dataclass(frozen=True)
class Estimate:
    """Holds a number with its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:,.6g}, {in_words((self.low, self.high), '{:,.6g}'.format)}"

    def mapped(self, function: Callable[[float], float]) -> "Estimate":
        return Estimate(*map(function, (self.value, self.low, self.high)))


@dataclass(frozen=True, kw_only=True)
class MovedDocument:
    """Holds one document that changed the result."""

    document: int
    """Its place in the data, from 0, as in documents.parquet."""
    base_nats: float
    nats: float
    """Over two tokenizers, of as many bytes as the base scored."""
    tokens: int | None
    """Scored; None over two tokenizers."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Compares one model with the base on one data set; less than 0, or a ratio below 1, is better than the base."""

    model: str
    base: str
    data: str
    protocol: str | None
    group: str | None = None
    """With group_by: whose tokens alone are compared."""
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
    p_adjusted: float
    """The same after Holm's correction for all comparisons that were made together."""
    units: str
    """What the intervals are computed over: documents, or blocks of windows."""
    moved: tuple[MovedDocument, ...]
    """Those that gained most, then those that lost most; in the order of their change."""
    note: str = ""

    @property
    def title(self) -> str:
        group = "" if self.group is None else f", {self.group}"
        return f"{self.model} against {self.base} on {on_data(self.data, self.protocol)}{group}"

    def summary(self) -> dict[str, str]:
        """Return the rows of a table about the comparison, for the screen."""
        adjusted = f", {self.p_adjusted:.2g} by Holm" if self.p_adjusted != self.p_value else ""
        rows = {title: str(getattr(self, name)) for name, title in ESTIMATES.items() if getattr(self, name)} | {
            "documents": f"{self.better:,} better, {self.worse:,} worse, {self.same:,} the same"
            f" (sign test: p = {self.p_value:.2g}{adjusted})",
            "interval": f"none: {self.units}" if self.units == ONE_DOCUMENT else f"over {self.units}, in pairs",
        }
        if self.note:
            rows["note"] = self.note
        for end, sign, moved in (("gained most", 1, self.moved), ("lost most", -1, reversed(self.moved))):
            lines = []
            for item in (item for item in moved if sign * (item.base_nats - item.nats) > 0):
                change = f"{item.base_nats:.1f} to {item.nats:.1f} nats"
                if item.tokens is not None:
                    before, after = item.base_nats / item.tokens, item.nats / item.tokens
                    change = f"{before:.3f} to {after:.3f} nats per token ({item.tokens:,} tokens)"
                lines.append(f"document {item.document}: {change}")
            if lines:
                rows[end] = "\n".join(lines)
        return rows


class Comparisons(tuple[Comparison, ...]):
    """Holds a comparison for each model and data set, or for each of their groups; a notebook shows them as tables."""

    def tables(self) -> list[tuple[str, dict[str, str]]]:
        """Return titles and rows, for the screen: a table for each comparison, one for all groups of a data set."""
        tables: list[tuple[str, dict[str, str]]] = []
        for each in self:
            rows = each.summary()
            if each.group is None:
                tables.append((each.title, rows))
                continue
            title = replace(each, group="by group").title
            # One model may have several results on a data set, such as those of two seq_len.
            if not tables or tables[-1][0] != title or each.group in tables[-1][1]:
                tables.append((title, {"note on all groups": each.note} if each.note else {}))
            measure = ESTIMATES["perplexity_ratio" if each.perplexity_ratio else "bits_per_byte"]
            tables[-1][1][each.group] = f"{measure} {rows[measure]}\n{rows['documents']}"
        return tables

    def to_pandas(self) -> Any:
        """Return a pandas.DataFrame with a row for each comparison."""
        rows = []
        for comparison in self:
            row: dict[str, Any] = {}  # numbers apart, such as bits_per_byte, bits_per_byte_low and bits_per_byte_high
            for name, value in vars(comparison).items():
                if name in ESTIMATES:
                    numbers = value or Estimate(math.nan, math.nan, math.nan)
                    row |= {name: numbers.value, f"{name}_low": numbers.low, f"{name}_high": numbers.high}
                elif name != "moved":
                    row[name] = value
            rows.append(row)
        return frame(rows)

    def _repr_html_(self) -> str:
        return "".join(html_table(*table) for table in self.tables())


def how_computed(evaluation: Evaluation) -> tuple:
    """Return its values of HOW_COMPUTED."""
    return tuple(evaluation.options.get(option) for option in HOW_COMPUTED)


def read_evaluations(folders: list[str]) -> list[Evaluation]:
    """Read all results of folders, or of their perplexity.json. Raises UserError with every folder without any."""
    problems, evaluations = [], []
    for name in folders:
        path = Path(name).expanduser()
        folder = path.parent if path.name == REPORTS else path
        results = Results(folder)
        if not results.reports:
            problems.append(f"{name}: holds no {REPORTS}; write one with dsft eval ... --output_dir {folder}")
        for key in results.reports:
            if evaluation := results.evaluation(key):
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
        UserError: where the base is not there, a model has no result on the base's texts, or results cannot be
            compared.
    """
    of_model: dict[str, list[Evaluation]] = {}
    for evaluation in named_apart(evaluations, group_by):
        of_model.setdefault(evaluation.model, []).append(evaluation)
    if base is None:
        base = next(iter(of_model))
    elif base not in of_model:
        ending = [model for model in of_model if Path(model).parts[-len(Path(base).parts) :] == Path(base).parts]
        known = ", ".join(of_model)
        if not ending:
            raise UserError(f"base={base}: no such model in these results, which have {known}{nearest(base, of_model)}")
        if len(ending) > 1:
            raise UserError(f"base={base} matches {len(ending)} models; name more of the path: {known}")
        base = ending[0]
    references = of_model.pop(base)
    if not of_model:
        raise UserError(f"nothing to compare with {base}: name the results of another model too")
    problems, comparisons = [], []
    for reference in references:
        for model, candidates in of_model.items():
            fitting = [item for item in candidates if item.hashes["texts"] == reference.hashes["texts"]]
            if not fitting:
                problems.append(
                    f"{model} has no result on the texts of {reference.data} (as {base} has); evaluate both on the same"
                    " data, with the same max_documents"
                )
                continue
            refusals = [refusal(reference, item) for item in fitting]
            if all(refusals):
                problems.append(refusals[0])
                continue
            pair = reference, fitting[refusals.index("")]
            if group_by is None:
                comparisons.append(compare_pair(*pair))
                continue
            if lacking := [each for each in pair if group_by not in each.group_sums]:
                problems += [
                    f"group_by={group_by}: the result of {each.model} on {each.data} has no nats of each document in"
                    " these groups: it was evaluated without them, or documents x groups are too many"
                    for each in lacking
                ]
                continue
            base_groups, other_groups = (_by_group(each, group_by) for each in pair)
            for name in [name for name in base_groups if name in other_groups]:
                in_group = base_groups[name], other_groups[name]
                if why := refusal(*in_group):
                    problems.append(f"group_by={group_by}: {why}")
                    break
                comparisons.append(replace(compare_pair(*in_group), group=name))
    raise_if_any(problems)
    # Holm, A simple sequentially rejective multiple test procedure, 1979: the smallest p-value times their number, the
    # next times one less, none smaller than the one before.
    order = sorted(range(len(comparisons)), key=lambda place: comparisons[place].p_value)
    adjusted = 0.0
    for rank, place in enumerate(order):
        adjusted = max(adjusted, min(1.0, (len(order) - rank) * comparisons[place].p_value))
        comparisons[place] = replace(comparisons[place], p_adjusted=adjusted)
    return Comparisons(comparisons)


def _by_group(evaluation: Evaluation, group_by: str) -> dict[str, Evaluation]:
    """Return for each group the result as if it held all tokens."""
    result, groups = evaluation.perplexity, {}
    for place, group in enumerate(evaluation.groups[group_by]):
        nats_D, tokens_D = evaluation.group_sums[group_by][:, :, place]
        # A document's bytes are known as a whole: those of a group are where it has whole documents alone.
        is_whole = not ((tokens_D > 0) & (tokens_D != result.document_tokens)).any()
        in_group = replace(
            result,
            nats=group["nats"],
            tokens=group["tokens"],
            document_nats=nats_D,
            document_tokens=tokens_D.astype(np.int64),
            document_bytes=np.where(is_whole & (tokens_D > 0), result.document_bytes, 0),
            document_words=np.where(is_whole & (tokens_D > 0), result.document_words, 0),
            document_pairs=np.zeros((0, result.documents)),
            reported_loss=group["nats"] / group["tokens"],
            block_nats=np.zeros(0),
            block_tokens=np.zeros(0, np.int64),
            windows_per_block=0,
        )
        groups[group["group"]] = replace(evaluation, perplexity=in_group, groups={}, group_sums={})
    return groups


def named_apart(evaluations: list[Evaluation], group_by: str | None = None) -> list[Evaluation]:
    """Name results of one model in two dtypes or attentions apart. Raises UserError where none has the grouping."""
    evaluations = without_repeats(evaluations)
    groupings = dict.fromkeys(name for evaluation in evaluations for name in evaluation.groups)
    if group_by and group_by not in groupings:
        known = f"have {', '.join(groupings)}" if groupings else "have none"
        raise UserError(
            f"group_by={group_by}: no such grouping in these results, which {known}{nearest(group_by, groupings)};"
            " dsft eval --group_by makes them"
        )
    for option in HOW_COMPUTED:
        values: dict[tuple, set] = {}
        for each in evaluations:
            values.setdefault(each.key, set()).add(each.options.get(option))
        apart = {model for (model, *_), of_model in values.items() if len(of_model) > 1}
        evaluations = [
            replace(each, model=f"{each.model} ({each.options.get(option)})") if each.model in apart else each
            for each in evaluations
        ]
    return evaluations


def without_repeats(evaluations: list[Evaluation]) -> list[Evaluation]:
    """Take a result that several folders hold, such as that of a base model beside each of its runs, once."""
    unlike: dict[tuple, Evaluation] = {}
    for each in evaluations:
        unlike.setdefault((each.key, how_computed(each), *each.hashes.values(), each.perplexity.nats), each)
    return list(unlike.values())


def joined_seeds(evaluations: list[Evaluation], patterns: Sequence[str]) -> list[Evaluation]:
    """Replace the results of models whose names match one pattern, such as runs/a-seed*, by their mean: of the nats of
    each document, so that intervals are over documents, and `seed_losses` has the spread over seeds.

    Raises:
        UserError: where a pattern matches fewer than two models, one of these has no result on a set of another, or
            their results are of other texts or windows.
    """
    problems, evaluations = [], without_repeats(evaluations)
    for pattern in patterns:
        models = dict.fromkeys(each.model for each in evaluations if fnmatchcase(each.model, pattern))
        if len(models) < 2:
            known = ", ".join(dict.fromkeys(each.model for each in evaluations))
            problems.append(f"seeds={pattern}: matches {plural(len(models), 'model')} of these results: {known}")
            continue
        alike: dict[tuple, list[Evaluation]] = {}
        for each in evaluations:
            if each.model in models:
                alike.setdefault((each.hashes["texts"], each.protocol, how_computed(each)), []).append(each)
        means = {}
        for (*_, how), seeds in alike.items():
            first, results = seeds[0], [each.perplexity for each in seeds]
            numbers = Counter(each.model for each in seeds)
            as_computed = ", ".join(f"{option} {value}" for option, value in zip(HOW_COMPUTED, how, strict=True))
            problems += [  # a mean over some of the seeds, or over one of them twice, would look like that over all
                f"seeds={pattern}: {model} has {plural(numbers[model], 'result')} on the texts of {first.data}"
                f" ({as_computed}); each seed needs one"
                for model in models
                if numbers[model] != 1
            ]
            for each in seeds[1:]:
                why = refusal(first, each)
                if not why and each.hashes["tokens"] != first.hashes["tokens"]:
                    why = f"{each.model} and {first.model} have other tokens of {each.data}"
                problems += [f"seeds={pattern}: {why}"] if why else []
            if problems:
                break
            mean = replace(
                results[0],
                nats=fmean(result.nats for result in results),
                reported_loss=fmean(result.reported_loss for result in results),
                document_nats=np.mean([result.document_nats for result in results], axis=0),
                block_nats=np.mean([result.block_nats for result in results], axis=0),
                document_pairs=np.zeros((0, results[0].documents)),
            )
            groups, group_sums = {}, {}
            for name in first.group_sums:  # of groups that all seeds have
                labels = [[group["group"] for group in each.groups[name]] for each in seeds if name in each.group_sums]
                if labels == [labels[0]] * len(seeds):
                    sums_2DG = np.mean([each.group_sums[name] for each in seeds], axis=0)
                    groups[name], group_sums[name] = groups_of(labels[0], sums_2DG)
            means[id(first)] = replace(
                first,
                model=pattern,
                perplexity=mean,
                seed_losses=tuple(result.reported_loss for result in results),
                groups=groups,
                group_sums=group_sums,
                divergence=None,
                model_hash="",
                fingerprint="",
            )
        # A mean has the place of its first seed.
        kept = [each for each in evaluations if id(each) in means or each.model not in models]
        evaluations = [means.get(id(each), each) for each in kept]
    raise_if_any(problems)
    return evaluations


def refusal(base: Evaluation, other: Evaluation) -> str:
    """Return why two results on the same texts cannot be compared; empty where they can."""
    same_tokens = base.hashes["tokens"] == other.hashes["tokens"]
    if same_tokens and base.hashes["windows"] == other.hashes["windows"] and base.protocol == other.protocol:
        return ""  # options may be named or left out, and BOS be there or not: these tokens are in these windows
    names = f"{other.model} and {base.model} on {base.data}"
    decisive = ["protocol", "seq_len", *find_mode(base.mode).options, *find_mode(other.mode).options, "mode"]
    differing = [name for name in dict.fromkeys(decisive) if base.options.get(name) != other.options.get(name)]
    if differing:
        values = ", ".join(f"{name} {other.options.get(name)} and {base.options.get(name)}" for name in differing)
        return f"{names} were scored in other windows ({values}); evaluate both with the same options"
    if same_tokens:
        return f"{names} were scored in other windows; evaluate both with this dsft"
    is_scored_D = (base.perplexity.document_tokens > 0) & (other.perplexity.document_tokens > 0)
    if not all(each.perplexity.document_bytes[is_scored_D].any() for each in (base, other)):
        return f"{names} have other tokens, and the bytes of the scored text are not known; use another mode"
    ours_D, theirs_D = (each.perplexity.document_bytes[is_scored_D] for each in (base, other))
    if find_mode(base.mode).is_text or np.array_equal(ours_D, theirs_D):  # a text is scored whole, but for first tokens
        return ""
    if base.truncated_documents or other.truncated_documents:
        return f"{names} were cut to seq_len at other places; evaluate both with a larger seq_len"
    same = "chat_template, train_on and train_thinking"
    return f"{names} were rendered otherwise, and other text is scored; evaluate both with the same {same}"


def compare_pair(base: Evaluation, other: Evaluation) -> Comparison:
    """Compare two results that `refusal` lets pass."""
    before, after = base.perplexity, other.perplexity
    is_scored_D = (after.document_tokens > 0) & (before.document_tokens > 0)
    same_tokens, nats_D = base.hashes["tokens"] == other.hashes["tokens"], after.document_nats
    if not same_tokens:  # first tokens that are context only have other bytes: nats of as many bytes as the base's
        ones_D = np.ones(before.documents)
        nats_D = nats_D * np.divide(
            before.document_bytes, after.document_bytes, out=ones_D, where=after.document_bytes > 0
        )
    change_D = np.where(is_scored_D, nats_D - before.document_nats, 0.0)
    how = zip(HOW_COMPUTED, how_computed(other), how_computed(base), strict=True)
    notes = [f"{name} differs: {value}, the base {of_base}" for name, value, of_base in how if value != of_base]
    # Blocks of windows can be compared where both models have the same windows.
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
        ratios = [
            math.fsum(each.document_nats[is_scored_D]) / int(each.document_bytes[is_scored_D].sum())
            for each in (after, before)
        ]
        both = [units_of(each, each.document_nats, None, is_scored_D=is_scored_D)[0] for each in (after, before)]
        per_byte = Estimate(ratios[0] - ratios[1], *ratio_interval(both[0], 2, both[1]))
    better, worse = (int((change_D[is_scored_D] * sign < 0).sum()) for sign in (1, -1))
    order = np.argsort(change_D, kind="stable").tolist()  # the largest gain first, the largest loss last
    ends = [number for number in order[:MOVED] if change_D[number] < 0]
    ends += [number for number in order[-MOVED:] if change_D[number] > 0]
    moved = [
        MovedDocument(
            document=number,
            base_nats=float(before.document_nats[number]),
            nats=float(nats_D[number]),
            tokens=int(after.document_tokens[number]) if same_tokens else None,
        )
        for number in ends
    ]
    return Comparison(
        model=other.model,
        base=base.model,
        data=base.data,
        protocol=base.protocol,
        perplexity_ratio=nats_per_token and nats_per_token.mapped(exp),
        nats_per_token=nats_per_token,
        bits_per_byte=per_byte and per_byte.mapped(lambda nats: nats / math.log(2)),
        byte_perplexity_ratio=per_byte and per_byte.mapped(exp),
        better=better,
        worse=worse,
        same=int(is_scored_D.sum()) - better - worse,
        p_value=(p_value := sign_test(better, worse)),
        p_adjusted=p_value,
        units=units,
        moved=tuple(moved),
        note="; ".join(notes),
    )


def print_together(evaluations: list[Evaluation], output_dir: str | None = None) -> None:
    """Print what several results of one launch give: a table of protocols and one of the context curve for each
    model and data set, every model against the first one, and all against the reference. `output_dir` gets the picture
    of the curve.
    """
    same_pair: dict[tuple[str, str], list[Evaluation]] = {}
    against: dict[str, dict[str, str]] = {}
    for evaluation in evaluations:
        same_pair.setdefault((evaluation.model, evaluation.data), []).append(evaluation)
        if divergence := evaluation.divergence:
            rows = against.setdefault(on_data(evaluation.data, evaluation.protocol), {})
            rows.setdefault(f"{divergence.reference} (reference)", f"{divergence.reference_perplexity:,.4f}")
            rows[evaluation.model] = (
                f"{evaluation.perplexity.perplexity:,.4f}  (KL {divergence.kl:.6f} nats per token, same likeliest token"
                f" {divergence.same_top:.2%})"
            )
    is_curve = (evaluations[0].protocol or "").startswith(f"{CONTEXT}-")
    for (model, data), results in same_pair.items():
        if is_curve:  # each length with the change from the one before
            results.sort(key=lambda each: each.options["seq_len"])
            rows, before = {}, None
            for each in results:
                result, interval = each.perplexity, in_words(each.intervals.perplexity, "{:,.4f}".format)
                change = "" if before is None else f", {result.loss - before:+.6f} nats per token"
                rows[f"{each.options['seq_len']:,} tokens"] = f"{result.perplexity:,.4f}, {interval}{change}"
                before = result.loss
            documents = result.documents - result.unscored_documents
            rows["scored"] = f"the last {result.tokens // documents:,} tokens of {documents:,} documents"
            if result.unscored_documents:
                rows["left out"] = f"{result.unscored_documents:,} shorter documents"
            print_table(f"Context curve of {model} on {data}", rows)
        elif len({each.protocol for each in results}) > 1:
            rows = {
                each.protocol: f"{each.perplexity.perplexity:,.4f}  (windows of {each.options['seq_len']:,},"
                f" {each.perplexity.tokens:,} tokens scored; {find_mode(each.protocol).source})"
                for each in results
            }
            print_table(f"{model} on {data}, as others report it", rows)
    if is_curve and output_dir:
        drawn = draw_curves(same_pair, Path(output_dir) / PICTURE)
        no_picture = "note: no picture of the curve, which needs matplotlib (pip install matplotlib)"
        say(f"plotted: {Path(output_dir) / PICTURE}" if drawn else no_picture)
    if len({evaluation.model for evaluation in evaluations}) > 1:
        try:
            for table in compare_results(evaluations).tables():
                print_table(*table)
        except UserError as error:  # the results stand; only what joins them does not
            for problem in error.problems:
                say(f"note: not compared: {problem}")
        for texts, rows in against.items():
            print_table(f"Perplexity on {texts}, against the reference", rows)


def draw_curves(curves: dict[tuple[str, str], list[Evaluation]], path: Path) -> bool:
    """Draw perplexity against length, a line for each (model, data); False where matplotlib is not installed."""
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
        line = axes.plot(lengths, values, "o-", label=f"{model}, {data}")[0]
        if not any(math.isnan(low) for low, _ in bounds):
            axes.fill_between(lengths, *zip(*bounds, strict=True), color=line.get_color(), alpha=0.15)
    axes.set_xscale("log", base=2)
    axes.set(xlabel="window, tokens", ylabel="perplexity of the last tokens")
    axes.legend(fontsize="small")  # with whole paths: models of two runs are both called final
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    return True
