"""Checks that the perplexity has the same bits however many ranks score, with the model whole or sharded, and twice."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpu.check import Row, Setting, command, launch


def perplexity(setting: Setting) -> Iterator[Row]:
    """Score the held-out text in every way, and compare with the first: one rank that holds the model. A second check
    compares with the first of the first one.
    """
    kept, first = setting.path("first-perplexity.json"), None
    if kept.is_file():
        first = json.loads(kept.read_text(encoding="utf-8"))
    for ranks in sorted({1, setting.ranks}):
        for zero, held in (("0", "each with the model"), ("3", "under ZeRO-3")):
            report = score(setting, ranks=ranks, zero=zero)
            title = f"{ranks} rank{'s' if ranks > 1 else ''}, {held}"
            if first is None:
                first = report
                kept.write_text(json.dumps(first), encoding="utf-8")
                text = f"{first['nats_per_token']:.9f} nats per token, {first['tokens']:,} tokens"
                yield Row(claim=f"{title}, scores the held-out text", measured=text, ok=True)
            else:
                yield same_bits(title, first, report)


def same_bits(title: str, first: dict[str, Any], other: dict[str, Any]) -> Row:
    """Compare two reports of perplexity.json."""
    same = all(first[key] == other[key] for key in ("nats", "tokens", "blocks"))
    difference = abs(other["nats"] / first["nats"] - 1)
    return Row(
        claim=f"the same bits: {title}",
        predicted=f"{first['nats_per_token']:.9f}",
        measured="the same" if same else f"{other['nats_per_token']:.9f}, {difference:.1e} off",
        ok=same,
        details={"nats": other["nats"], "tokens": other["tokens"]},
    )


def score(setting: Setting, *, ranks: int, zero: str) -> dict[str, Any]:
    """Evaluate; returns the only report."""
    out = setting.runs / f"{ranks}-{zero}"
    launch(setting, command(setting, "eval", evaluation(setting, out, zero=zero), ranks=ranks))
    (report,) = json.loads((out / "perplexity.json").read_text(encoding="utf-8"))["results"]
    return report


def evaluation(setting: Setting, out: Path, *, zero: str) -> dict[str, Any]:
    """Compose the options of an evaluation of `base`."""
    return {
        "model": setting.path("base"),
        "data": setting.path("demo", "corpus", "held_out.jsonl"),
        "seq_len": 128 if setting.tiny else 2048,
        "max_documents": 8 if setting.tiny else 64,
        "zero": zero,
        "output_dir": out,
    }
