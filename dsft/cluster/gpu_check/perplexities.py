"""Checks that the perplexity has the same bits however many ranks score, with the model whole or sharded, and twice."""

import json
from collections.abc import Iterator
from typing import Any

from dsft.cluster.gpu_check.check import Row, Setting, command, launch


def perplexity(setting: Setting) -> Iterator[Row]:
    """Score the held-out text in several ways, and compare each with one rank that holds the model."""
    first = score(setting, "first", ranks=1, zero="0")
    text = f"{first['nats_per_token']:.9f} nats per token"
    yield Row(claim="one rank scores the held-out text", measured=f"{text}, {first['tokens']:,} tokens", ok=True)
    ways = {"again": ("one rank, a second time", 1, "0"), "sharded": ("under ZeRO-3", setting.ranks, "3")}
    if setting.ranks > 1:
        ways["replicated"] = (f"on {setting.ranks} ranks", setting.ranks, "0")
    for name, (title, ranks, zero) in ways.items():
        yield same_bits(title, first, score(setting, name, ranks=ranks, zero=zero))


def same_bits(title: str, first: dict[str, Any], other: dict[str, Any]) -> Row:
    """Compare two reports of perplexity.json."""
    same = all(first[key] == other[key] for key in ("nats", "tokens", "blocks"))
    difference = abs(other["nats"] / first["nats"] - 1)
    return Row(
        claim=f"the same bits {title}",
        predicted=f"{first['nats_per_token']:.9f}",
        measured="the same" if same else f"{other['nats_per_token']:.9f}, {difference:.1e} off",
        ok=same,
        details={"nats": other["nats"], "tokens": other["tokens"]},
    )


def score(setting: Setting, name: str, *, ranks: int, zero: str) -> dict[str, Any]:
    """Evaluate; returns the only report."""
    options = {
        "model": setting.path("base"),
        "data": setting.path("demo", "corpus", "held_out.jsonl"),
        "seq_len": 128 if setting.tiny else 2048,
        "max_documents": 8 if setting.tiny else 64,
        "zero": zero,
        "output_dir": setting.runs / name,
    }
    launch(setting, command(setting, "eval", options, ranks=ranks))
    content = json.loads((setting.runs / name / "perplexity.json").read_text(encoding="utf-8"))
    (report,) = content["results"]
    return report
