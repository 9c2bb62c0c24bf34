"""What of results others read: the table of a paper, and cards that laboratories compare without models.

The table has models x data sets, as CSV, Markdown or LaTeX, with 95 % intervals. A cell is one result. Behind several
sets stand two means of nats: micro, in which each set has the weight of its tokens (of its bytes, for bits per byte),
and macro, in which all sets have the same. Sets are independent, so the squares of half the widths of their intervals
add up, each times the square of its weight.

A card is a JSON file. Of each result it holds the hashes of texts, tokens, windows and weights, the protocol, the
versions, and the nats of each document. It holds no text and no weights.
"""

import csv
import io
import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dsft.errors import UserError, one_line
from dsft.perplexity.compare import Estimate, named_apart
from dsft.perplexity.results import Evaluation, finite, on_data
from dsft.perplexity.sums import LEVEL, exp
from dsft.units import write_json

METRICS = {
    "perplexity": ("tokens", exp),
    "nats_per_token": ("tokens", float),
    "bits_per_byte": ("bytes", lambda nats: nats / math.log(2)),
}
"""Metric -> what its nats are divided by, and the metric of that ratio."""
CARD_VERSION = 1  # of the format of cards
CARD_FIELDS = ("model", "data", "protocol", "mode", "options", "hashes", "model_hash", "versions")


@dataclass(frozen=True, kw_only=True)
class Cell:
    nats: Estimate  # per token or byte
    size: int  # the tokens or bytes
    spread: float = math.nan  # standard deviation of the metric over seeds; NaN for a single one


def table_of(evaluations: list[Evaluation], metric: str, group_by: str | None = None) -> tuple[list[str], dict]:
    """Return the columns, and for each model its cell of each of them; a cell that is not known is not there. Args:
    `group_by`: a grouping of the results, each of whose groups is a column. Raises UserError where no result has that
    grouping, groups have no such metric, or a cell has two results.
    """
    evaluations = named_apart(evaluations, group_by)
    below, of_nats = METRICS[metric]
    if group_by and below == "bytes":
        raise UserError(f"metric={metric} and group_by={group_by}: the bytes of a group are not known; leave one out")
    cells: dict[str, dict[str, Cell]] = {}
    set_of: dict[str, str] = {}  # column -> its data set
    for evaluation in evaluations:
        of_model, result, new = cells.setdefault(evaluation.model, {}), evaluation.perplexity, {}
        column = on_data(evaluation.data, evaluation.protocol)
        set_of[column] = evaluation.data
        for group in evaluation.groups.get(group_by, ()):
            low, high = (math.log(bound) if bound else math.nan for bound in group["interval"])
            value = Estimate(group["nats"] / group["tokens"], low, high)
            new[f"{group['group']} ({column})"] = Cell(nats=value, size=group["tokens"])
        if not group_by and getattr(result, below):
            if below == "bytes":
                bounds = (bound * math.log(2) for bound in evaluation.intervals.bits_per_byte)
                nats, scale = result.nats / result.bytes, result.tokens / result.bytes
            else:
                bounds, nats, scale = evaluation.intervals.nats_per_token, result.reported_loss, 1.0
            values = [of_nats(loss * scale) for loss in evaluation.seed_losses]
            spread = float(np.std(values, ddof=1)) if values else math.nan
            new[column] = Cell(nats=Estimate(nats, *bounds), size=getattr(result, below), spread=spread)
        for name, cell in new.items():
            known = of_model.setdefault(name, cell)
            if (known.nats.value, known.size) != (cell.nats.value, cell.size):
                raise UserError(
                    f"{evaluation.model} has two results on {name} that differ; name folders that hold one of them"
                )
    columns = list(dict.fromkeys(column for of_model in cells.values() for column in of_model))
    if len(columns) == 1 or group_by or len({set_of[column] for column in columns}) < len(columns):
        return columns, cells  # a set by several protocols would be several sets
    for of_model in cells.values():
        if len(of_model) < len(columns):
            continue  # the mean of other sets is no comparison
        parts = [of_model[column] for column in columns]
        total = sum(part.size for part in parts)
        for mean, weights in (
            ("micro mean", [part.size / total for part in parts]),
            ("macro mean", [1 / len(parts)] * len(parts)),
        ):
            weighted = list(zip((part.nats for part in parts), weights, strict=True))
            value = math.fsum(nats.value * weight for nats, weight in weighted)
            half = math.hypot(*((nats.high - nats.low) / 2 * weight for nats, weight in weighted))
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
                numbers = [math.nan] * len(ends)
                if cell := of_model.get(column):
                    numbers = [*map(of_nats, (cell.nats.value, cell.nats.low, cell.nats.high)), cell.spread]
                row += ["" if math.isnan(number) else repr(number) for number in numbers][: len(ends)]
            lines.writerow(row)
        return text.getvalue().rstrip("\n")

    plus_minus = r"$\pm$" if format == "latex" else "±"

    def shown(cell: Cell | None) -> str:
        if cell is None:
            return "-"
        numbers = map(of_nats, (cell.nats.value, cell.nats.low, cell.nats.high))
        value, low, high = (f"{number:#.4g}".rstrip(".") for number in numbers)
        spread = "" if math.isnan(cell.spread) else f" {plus_minus} {cell.spread:.2g}"
        bounds = "" if math.isnan(cell.nats.low) else f" ({low} to {high})"
        return f"{value}{spread}{bounds}"

    about = f"{metric.replace('_', ' ')}, {LEVEL:.0%} interval over documents, or blocks of windows of a single one"
    about += ", ± standard deviation over seeds" if has_seeds else ""
    rows = [[model, *(shown(of_model.get(column)) for column in columns)] for model, of_model in cells.items()]
    if format == "markdown":
        lines = [["model", *columns], ["---"] * (1 + len(columns)), *rows]
        table = (f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)
        return "\n".join([*table, "", about])
    special = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}

    def escaped(text: str) -> str:
        return re.sub(r"[\\~^&%$#_{}]", lambda match: special.get(match[0], "\\" + match[0]), text)

    lines = [
        rf"% {about}; needs \usepackage{{booktabs}}",
        rf"\begin{{tabular}}{{l{'r' * len(columns)}}}",
        r"\toprule",
        " & ".join(["model", *map(escaped, columns)]) + r" \\",
        r"\midrule",
        *(" & ".join([escaped(name), *values]) + r" \\" for name, *values in rows),
        r"\bottomrule",
        r"\end{tabular}",
    ]
    return "\n".join(lines)


def write_card(path: Path, evaluations: list[Evaluation]) -> None:
    cards = []
    for evaluation in evaluations:
        result = evaluation.perplexity
        card = {name: getattr(evaluation, name) for name in CARD_FIELDS}
        card |= {name: getattr(result, name) for name in ("perplexity", "reported_loss", "nats", "tokens", "bytes")}
        columns = {name: getattr(result, f"document_{name}").tolist() for name in ("nats", "tokens", "bytes")}
        cards.append(finite(card) | {"documents": columns})
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {"card": CARD_VERSION, "results": cards})


def read_card(path: Path) -> list[dict[str, Any]]:
    """Read what `write_card` wrote. Raises UserError where it is no card."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["card"] != CARD_VERSION:
            raise UserError(f"{path}: a card of format {content['card']}; this dsft reads {CARD_VERSION}")
        names = (*CARD_FIELDS, "perplexity", "documents")
        return [{name: card[name] for name in names} for card in content["results"]]
    except UserError:  # which is a ValueError too
        raise
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UserError(f"{path}: is no card that dsft compare --card wrote ({one_line(error)})") from None


def agreement(evaluation: Evaluation, cards: list[dict[str, Any]], where: str) -> tuple[str, dict[str, str]]:
    """Return the title and rows of a table: what of a result is the same in a card, and how close the numbers are.

    Of several that were measured on the same texts, the one is taken that has most in common.

    Raises:
        UserError: where no result of the card is of the same texts.
    """

    def same(card: dict[str, Any]) -> dict[str, bool]:
        hashes = {name: card["hashes"][name] == evaluation.hashes[name] for name in ("texts", "tokens", "windows")}
        is_protocol = (card["protocol"], card["mode"]) == (evaluation.protocol, evaluation.mode)
        return hashes | {"protocol": is_protocol, "weights": card["model_hash"] == evaluation.model_hash}

    card = max(cards, key=lambda card: (same(card)["texts"], sum(same(card).values())), default=None)
    if card is None or not same(card)["texts"]:
        raise UserError(f"{where}: holds no result on the texts of {evaluation.data}; compare results on the same data")
    rows = {name: "the same" if is_same else "another" for name, is_same in same(card).items()}
    for name in ("options", "versions"):
        ours, theirs = getattr(evaluation, name), card[name]
        differing = [key for key in dict.fromkeys([*ours, *theirs]) if ours.get(key) != theirs.get(key)]
        rows[name] = ", ".join(f"{key} {ours.get(key)}, there {theirs.get(key)}" for key in differing) or "the same"
    result = evaluation.perplexity
    theirs = math.inf if card["perplexity"] is None else card["perplexity"]  # JSON has no infinite numbers
    rows["perplexity"] = f"{result.perplexity:.6f}, there {theirs:.6f}"
    if rows["windows"] == rows["tokens"] == "the same":
        ours_D, theirs_D = result.document_nats, np.array(card["documents"]["nats"])
        difference_D = np.abs(ours_D - theirs_D) / np.maximum(np.abs(theirs_D), 1e-12)
        rows["nats of documents"] = (
            f"{(ours_D == theirs_D).sum():,} of {len(ours_D):,} bit-identical, largest relative difference"
            f" {difference_D.max():.1e} (document {difference_D.argmax()})"
        )
    return f"{evaluation.title}, against {card['model']} of {where}", rows
