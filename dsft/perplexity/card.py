"""Writes a card of results, and compares with one: two laboratories see without models whether numbers agree.

A card is a JSON file. Of each result it holds the hashes of texts, tokens, windows and weights, the protocol, the
versions, and the nats of each document. It holds no text and no weights.
"""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from dsft.errors import UserError, one_line
from dsft.perplexity.results import Evaluation, finite
from dsft.units import write_json

VERSION = 1
"""Of the format of cards."""
RESULT_FIELDS = ("model", "data", "protocol", "mode", "options", "hashes", "model_hash", "versions")


def write_card(path: Path, evaluations: list[Evaluation]) -> None:
    """Write the card of these results."""
    cards = []
    for evaluation in evaluations:
        result = evaluation.perplexity
        card = {name: getattr(evaluation, name) for name in RESULT_FIELDS}
        card |= {name: getattr(result, name) for name in ("perplexity", "reported_loss", "nats", "tokens", "bytes")}
        columns = {name: getattr(result, f"document_{name}").tolist() for name in ("nats", "tokens", "bytes")}
        cards.append(finite(card) | {"documents": columns})
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {"card": VERSION, "results": cards})


def read_card(path: Path) -> list[dict[str, Any]]:
    """Read what `write_card` wrote.

    Raises:
        UserError: where it is no card.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["card"] != VERSION:
            raise UserError(f"{path}: a card of format {content['card']}; this dsft reads {VERSION}")
        return [
            {name: card[name] for name in (*RESULT_FIELDS, "perplexity", "documents")} for card in content["results"]
        ]
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
    for name, ours, theirs in (
        ("options", evaluation.options, card["options"]),
        ("versions", evaluation.versions, card["versions"]),
    ):
        differing = [key for key in dict.fromkeys([*ours, *theirs]) if ours.get(key) != theirs.get(key)]
        rows[name] = ", ".join(f"{key} {ours.get(key)}, there {theirs.get(key)}" for key in differing) or "the same"
    result = evaluation.perplexity
    theirs = math.inf if card["perplexity"] is None else card["perplexity"]  # JSON has no infinite numbers
    rows["perplexity"] = f"{result.perplexity:.6f}, there {theirs:.6f}"
    if rows["windows"] == rows["tokens"] == "the same":
        ours_D, theirs_D = result.document_nats, np.array(card["documents"]["nats"])
        difference_D = np.abs(ours_D - theirs_D) / np.maximum(np.abs(theirs_D), 1e-12)
        equal = int((ours_D == theirs_D).sum())
        rows["nats of documents"] = (
            f"{equal:,} of {len(ours_D):,} bit-identical, largest relative difference {difference_D.max():.1e}"
            f" (document {int(difference_D.argmax())})"
        )
    return f"{evaluation.title}, against {card['model']} of {where}", rows
