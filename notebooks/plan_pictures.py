"""Pictures of plans for `notebooks/plan_a_run.ipynb`: memory by component, speed and length against nodes.

Plots are matplotlib figures of what the planner predicts; nothing is computed here but sums.
"""

from collections.abc import Sequence
from typing import Any

from checkpoint_tools import finished

from dsft.planner.plans import Plan
from dsft.planner.zero_layout import bytes_by_phase
from dsft.runtime.hardware import Machine
from dsft.units import GiB

SMALLEST_SHARE = 0.01
"""Of the limit: components that stay below it in every plan are one, "others"."""


def memory_at_peak(plan: Plan) -> dict[str, int]:
    """Bytes on one GPU (one rank, on CPU) by component, when most are held: in forward and backward, or in the step."""
    phase = max(("compute", "step"), key=bytes_by_phase(plan.terms, "device").get)
    parts: dict[str, int] = {}
    for term in plan.terms:
        if term.place == "device" and term.phase in ("always", phase):
            parts[term.name] = parts.get(term.name, 0) + term.num_bytes
    return parts


def plot_memory(plans: Sequence[Plan], machine: Machine, *, chosen: Plan) -> Any:
    """Return a figure with a bar for each plan: its components at the peak, stacked, and the limit of the GPU."""
    from matplotlib import pyplot

    peaks = [memory_at_peak(plan) for plan in plans]
    limit = machine.device_bytes
    names = list(dict.fromkeys(name for peak in peaks for name in peak))
    small = [name for name in names if all(peak.get(name, 0) < SMALLEST_SHARE * limit for peak in peaks)]
    names = sorted((name for name in names if name not in small), key=lambda name: -peaks[0].get(name, 0))
    figure, axis = pyplot.subplots(figsize=(9, 1.6 + 0.55 * len(plans)), layout="constrained")
    rows, left = range(len(plans)), [0.0] * len(plans)
    for number, name in enumerate([*names, "others"]):
        merged = small if name == "others" else [name]
        widths = [sum(peak.get(part, 0) for part in merged) / GiB for peak in peaks]
        if any(widths):
            axis.barh(rows, widths, left=left, label=name, color=pyplot.colormaps["tab20"](number % 20))
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axis.axvline(limit / GiB, color="black", linestyle="--")
    axis.annotate(
        f" {limit / GiB:.0f} GiB", (limit / GiB, 1), xycoords=("data", "axes fraction"), va="bottom", fontsize=9
    )
    labels = [
        f"ZeRO {plan.zero}{', checkpointing' if plan.activation_checkpointing else ''},"
        f" {plan.micro_batch} x {plan.accumulation}{' *' if plan is chosen else ''}"
        for plan in plans
    ]
    axis.set_yticks(rows, labels, fontsize=9)
    axis.invert_yaxis()
    axis.margins(x=0.08)
    axis.set_xlabel(f"GiB on one {'GPU' if machine.has_gpu else 'rank'}; * chosen")
    axis.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize=8)
    return finished(figure, axis)


def plot_speed(plans: dict[int, Plan]) -> Any:
    """Return a figure of tokens per second against nodes, beside what the fewest nodes would give without loss."""
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(6, 4), layout="constrained")
    nodes = sorted(plans)
    speeds = [plans[number].time.tokens_per_second for number in nodes]
    axis.plot(nodes, [speeds[0] * number / nodes[0] for number in nodes], "-", color="0.6", label="without loss")
    axis.plot(nodes, speeds, "o-", label="planned")
    for number, speed in zip(nodes, speeds, strict=True):
        plan = plans[number]
        text = f"ZeRO {plan.zero}" + ("" if plan.fits else "\ndoes not fit")
        axis.annotate(text, (number, speed), textcoords="offset points", xytext=(4, -12), fontsize=8)
    axis.yaxis.set_major_formatter(lambda speed, _: f"{speed:,.0f}")
    axis.set(xlabel="nodes", xticks=nodes, ylabel="tokens per second")
    axis.margins(x=0.12)
    axis.set_ylim(bottom=0)
    axis.legend()
    return finished(figure, axis)


def plot_longest(lengths: dict[str, dict[int, int]]) -> Any:
    """Return a figure of the longest sequence that fits, a bar for each method, against nodes.

    Args:
        lengths: method -> nodes -> tokens, 0 where none fits.
    """
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(6, 4), layout="constrained")
    nodes = sorted({number for of_method in lengths.values() for number in of_method})
    width = 0.8 / len(lengths)
    for place, (method, of_method) in enumerate(lengths.items()):
        left = [nodes.index(number) + (place - (len(lengths) - 1) / 2) * width for number in of_method]
        bars = axis.bar(left, list(of_method.values()), 0.95 * width, label=method)
        axis.bar_label(bars, [f"{tokens:,}" for tokens in of_method.values()], padding=2, fontsize=8)
    axis.yaxis.set_major_formatter(lambda tokens, _: f"{tokens:,.0f}")
    axis.set_xticks(range(len(nodes)), [str(number) for number in nodes])
    axis.set(xlabel="nodes", ylabel="tokens of the longest sequence")
    axis.margins(y=0.25)
    axis.legend()
    return finished(figure, axis)
