"""Splits a run's memory into the plan's components beside what was measured, and its time into what it went to."""

from collections import Counter
from typing import Any

from dsft.planner.terms import OVERHEAD
from dsft.report.runs import Run
from dsft.units import GiB

MOST_PARTS = 4
"""Components shown by name; the smaller ones of a bar are added up."""
OTHERS = "other components"
MEASURED = {"measured": "muted", "held between steps": "muted", "added by a step": "ink"}
"""Parts of the measured bar -> their colours: the sum alone, or what a GPU's allocator tells apart."""
FULL_TRAINING = "over the full training"
"""Of `plan_check` in run.json."""


def memory_parts(run: Run) -> list[dict[str, Any]]:
    """Return segments of bars, in GiB: the planned components, and what was measured.

    On GPUs that is what torch allocates on the fullest, split into what is held between steps and what a step adds; on
    CPU ranks the host memory of a node.
    """
    plan = run.facts.get("plan")
    if not plan:
        return []
    checks = run.results.get("plan_check", {})
    checked = checks.get(FULL_TRAINING) or next(iter(checks.values()), {})
    bars = {"planned": _planned_bytes(plan), "measured": _measured_bytes(checked, has_gpu=plan["has_gpu"])}
    return [
        {"bar": bar, "part": part, "value": num_bytes / GiB, "detail": detail}
        for bar, parts in bars.items()
        for part, (num_bytes, detail) in parts.items()
    ]


def _measured_bytes(checked: dict[str, dict[str, float]], *, has_gpu: bool) -> dict[str, tuple[float, str]]:
    """Return (bytes, what they are) of each part that could be measured."""
    name, held_name = "GPU memory allocated" if has_gpu else "host memory of a node", "GPU memory between steps"
    if name not in checked:
        return {}
    peak = checked[name]["measured"]
    if held_name not in checked:
        return {"measured": (peak, name)}
    held = checked[held_name]["measured"]
    return {"held between steps": (held, held_name), "added by a step": (peak - held, f"{name}, less that")}


def _planned_bytes(plan: dict[str, Any]) -> dict[str, tuple[int, str]]:
    """Return (bytes, formula) of each component that is alive at the peak of training."""
    sizes = _peak_terms(plan, "device")
    if plan["has_gpu"]:
        return {term["name"]: (term["num_bytes"], term["formula"]) for term in sizes if term["name"] != OVERHEAD}
    ranks = plan["ranks_per_node"]
    of_ranks = {term["name"]: (ranks * term["num_bytes"], f"{ranks} ranks x ({term['formula']})") for term in sizes}
    of_node = {term["name"]: (term["num_bytes"], term["formula"]) for term in _peak_terms(plan, "host")}
    return of_ranks | of_node


def _peak_terms(plan: dict[str, Any], place: str) -> list[dict[str, Any]]:
    """As planner/terms.py: what is always there, with the larger of a micro batch and the optimizer's step."""
    terms = [term for term in plan["terms"] if term["place"] == place]
    by_phase = {phase: [term for term in terms if term["phase"] == phase] for phase in ("always", "compute", "step")}
    peak = max(by_phase["compute"], by_phase["step"], key=lambda terms: sum(term["num_bytes"] for term in terms))
    return by_phase["always"] + peak


def largest_parts(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Keep the largest components of all bars by name, largest first, and add up the smaller ones of each bar."""
    sizes: Counter[str] = Counter()
    for row in rows:
        if row["part"] not in MEASURED:
            sizes[row["part"]] = max(sizes[row["part"]], row["value"])
    named = [part for part, _ in sizes.most_common(MOST_PARTS)]
    others: dict[str, dict[str, Any]] = {}
    for row in rows:
        if row["part"] not in (*named, *MEASURED):
            other = others.setdefault(
                row["bar"], {"bar": row["bar"], "part": OTHERS, "value": 0.0, "detail": "smaller"}
            )
            other["value"] += row["value"]
    ranked = sorted((row for row in rows if row["part"] in named), key=lambda row: named.index(row["part"]))
    measured = [row for row in rows if row["part"] in MEASURED]
    order = list(dict.fromkeys(row["bar"] for row in rows))
    return sorted([*ranked, *others.values(), *measured], key=lambda row: order.index(row["bar"]))


def time_parts(run: Run) -> list[dict[str, Any]]:
    """Return the segments of one bar, in minutes; none before anything was timed."""
    attempt = run.last_attempt()
    evaluating = sum(entry.get("eval_runtime", 0.0) for entry in attempt)
    timed = [entry["train_runtime"] for entry in attempt if "train_runtime" in entry]
    seconds = run.results.get("seconds") or (timed[-1] if timed else None)
    if not seconds:
        return []
    saving = run.results.get("saves", {}).get("seconds", 0.0)
    waiting = sum(entry.get("data_wait_seconds", 0.0) for entry in attempt)
    training = max(seconds - evaluating - saving - waiting, 0.0)
    parts = {"training": training, "waiting for data": waiting, "evaluation": evaluating, "saving": saving}
    return [
        {"bar": "", "part": part, "value": value / 60, "detail": f"{value:,.0f} s"}
        for part, value in parts.items()
        if value
    ]
