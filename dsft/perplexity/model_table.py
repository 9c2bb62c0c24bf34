"""Makes the table of a paper: models x data sets, as CSV, Markdown or LaTeX, with 95 % intervals.

A cell is one result. Behind several sets stand two means of nats: micro, in which each set has the weight of its tokens
(of its bytes, for bits per byte), and macro, in which all sets have the same. Sets are independent, so the squares of
half the widths of their intervals add up, each times the square of its weight.
"""

import csv
import io
import math
import re
from dataclasses import dataclass

from dsft.errors import UserError
from dsft.perplexity.compare import Estimate, check_grouping, named_apart
from dsft.perplexity.intervals import LEVEL
from dsft.perplexity.results import Evaluation
from dsft.perplexity.sums import exp

METRICS = {
    "perplexity": ("tokens", exp),
    "nats_per_token": ("tokens", float),
    "bits_per_byte": ("bytes", lambda nats: nats / math.log(2)),
}
"""Metric -> what its nats are divided by, and the metric of that ratio."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Holds nats per token or byte, and by how many of them it is divided."""

    nats: Estimate
    size: int
    spread: float = math.nan
    """Standard deviation of the metric over seeds; NaN for a single one."""


def table_of(evaluations: list[Evaluation], metric: str, group_by: str | None = None) -> tuple[list[str], dict]:
    """Return the columns, and for each model its cell of each of them; a cell that is not known is not there.

    Args:
        group_by: a grouping of the results, each of whose groups is a column.

    Raises:
        UserError: where no result has that grouping, groups have no such metric, or a cell has two results.
    """
    evaluations = named_apart(evaluations)
    if group_by:
        check_grouping(evaluations, group_by)
    below, of_nats = METRICS[metric]
    if group_by and below == "bytes":
        raise UserError(f"metric={metric} and group_by={group_by}: the bytes of a group are not known; leave one out")
    cells: dict[str, dict[str, Cell]] = {}
    for evaluation in evaluations:
        of_model, result, new = cells.setdefault(evaluation.model, {}), evaluation.perplexity, {}
        column = f"{evaluation.data} by {evaluation.protocol}" if evaluation.protocol else evaluation.data
        for group in evaluation.groups.get(group_by, ()):
            low, high = (math.log(bound) if bound else math.nan for bound in group.get("interval") or (None, None))
            value = Estimate(group["nats"] / group["tokens"], low, high)
            new[f"{group['group']} ({column})"] = Cell(nats=value, size=group["tokens"])
        if not group_by and getattr(result, below):
            if below == "bytes":
                bounds = (bound * math.log(2) for bound in evaluation.intervals.bits_per_byte)
                nats, scale = result.nats / result.bytes, result.tokens / result.bytes
            else:
                bounds, nats, scale = evaluation.intervals.nats_per_token, result.reported_loss, 1.0
            values, spread = [of_nats(loss * scale) for loss in evaluation.seed_losses], math.nan
            if values:
                mean = math.fsum(values) / len(values)
                spread = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))
            new[column] = Cell(nats=Estimate(nats, *bounds), size=getattr(result, below), spread=spread)
        for name, cell in new.items():
            known = of_model.setdefault(name, cell)
            if (known.nats.value, known.size) != (cell.nats.value, cell.size):
                raise UserError(
                    f"{evaluation.model} has two results on {name} that differ; name folders that hold one of them"
                )
    columns = list(dict.fromkeys(column for of_model in cells.values() for column in of_model))
    if len(columns) == 1 or group_by:
        return columns, cells
    for of_model in cells.values():
        parts = [of_model[column] for column in columns if column in of_model]
        if len(parts) < len(columns):
            continue  # the mean of other sets is no comparison
        total = sum(part.size for part in parts)
        for mean, weights in (
            ("micro mean", [part.size / total for part in parts]),
            ("macro mean", [1 / len(parts)] * len(parts)),
        ):
            value = math.fsum(part.nats.value * weight for part, weight in zip(parts, weights, strict=True))
            halves = [
                (part.nats.high - part.nats.low) / 2 * weight for part, weight in zip(parts, weights, strict=True)
            ]
            half = math.hypot(*halves)
            of_model[mean] = Cell(nats=Estimate(value, value - half, value + half), size=total)
    return [*columns, "micro mean", "macro mean"], cells


def written(columns: list[str], cells: dict[str, dict[str, Cell]], *, metric: str, format: str) -> str:
    """Return the table as text. CSV has three columns for each: value and bounds; a fourth where models are seeds."""
    of_nats = METRICS[metric][1]
    has_seeds = any(not math.isnan(cell.spread) for of_model in cells.values() for cell in of_model.values())
    if format == "csv":
        text = io.StringIO()
        lines = csv.writer(text, lineterminator="\n")
        ends = ["", " low", " high", *([" sd over seeds"] if has_seeds else [])]
        lines.writerow(["model", *(f"{column}{end}" for column in columns for end in ends)])
        for model, of_model in cells.items():
            row = [model]
            for column in columns:
                cell, numbers = of_model.get(column), []
                if cell:
                    estimate = cell.nats
                    numbers = [of_nats(nats) for nats in (estimate.value, estimate.low, estimate.high)] + [cell.spread]
                row += ["" if math.isnan(number) else repr(number) for number in numbers][: len(ends)]
                row += [""] * (len(ends) - len(numbers[: len(ends)]))
            lines.writerow(row)
        return text.getvalue().rstrip("\n")

    plus_minus = r"$\pm$" if format == "latex" else "±"

    def shown(cell: Cell | None) -> str:
        if cell is None:
            return "-"
        value, low, high = (
            f"{of_nats(nats):#.4g}".rstrip(".") for nats in (cell.nats.value, cell.nats.low, cell.nats.high)
        )
        spread = "" if math.isnan(cell.spread) else f" {plus_minus} {cell.spread:.2g}"
        bounds = "" if math.isnan(cell.nats.low) else f" ({low} to {high})"
        return f"{value}{spread}{bounds}"

    about = f"{metric.replace('_', ' ')}, {LEVEL:.0%} interval over documents, or blocks of windows of a single one"
    about += ", ± standard deviation over seeds" if has_seeds else ""
    rows = {model: [shown(of_model.get(column)) for column in columns] for model, of_model in cells.items()}
    if format == "markdown":
        lines = [["model", *columns], ["---"] * (1 + len(columns)), *([name, *row] for name, row in rows.items())]
        return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines) + (
            f"\n\n{about}"
        )
    lines = [
        rf"% {about}; needs \usepackage{{booktabs}}",
        rf"\begin{{tabular}}{{l{'r' * len(columns)}}}",
        r"\toprule",
        " & ".join(["model", *map(_latex, columns)]) + r" \\",
        r"\midrule",
        *(" & ".join([_latex(name), *row]) + r" \\" for name, row in rows.items()),
        r"\bottomrule",
        r"\end{tabular}",
    ]
    return "\n".join(lines)


def _latex(text: str) -> str:
    special = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    return re.sub(r"[\\~^&%$#_{}]", lambda match: special.get(match[0], "\\" + match[0]), text)
