"""Plans and their pictures for `notebooks/plan_a_run.ipynb`: memory by component, speed and length against nodes.

Plots are matplotlib figures of what the planner predicts; nothing is computed here but sums.
"""

import functools
import os
import tempfile
from collections.abc import Sequence
from typing import Any

from checkpoint_tools import finished

from dsft.cli.commands import PlanOptions
from dsft.cli.plan import read_machines
from dsft.config.options import TrainConfig
from dsft.planner.plans import Plan
from dsft.planner.plans import shortlist as shortlist
from dsft.planner.zero_layout import bytes_by_phase
from dsft.run_setup.alternatives import USUAL_MODELS, longest_sequence, usual_config
from dsft.run_setup.resolve import Choice, TrainingRun, choose_plan, resolve_offline
from dsft.runtime.hardware import Machine, has_gpu
from dsft.units import GiB

SMALLEST_SHARE = 0.01
"""Of the limit: components that stay below it in every plan are one, "others"."""


def machines(**options: Any) -> list[Machine]:
    """The machine that the hardware options of `dsft plan` describe, once for each number of nodes."""
    if not has_gpu():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed warns that there is no GPU
    return read_machines(PlanOptions(**options))


def choose(model: str, machine: Machine, **options: Any) -> Choice:
    """What a training with these options would take there."""
    return choose_plan(_resolved(model, machine, **options).job, machine)


def longest(model: str, machine: Machine, **options: Any) -> int:
    """The most tokens per sequence that fit, 0 where none do."""
    length_and_plan = longest_sequence(_resolved(model, machine, **options))
    return length_and_plan[0] if length_and_plan else 0


def _resolved(model: str, machine: Machine, **options: Any) -> TrainingRun:
    path = _usual_folder(model).name if model in USUAL_MODELS else model
    return resolve_offline(TrainConfig(model=path, **options), machine)


@functools.cache
def _usual_folder(model: str) -> tempfile.TemporaryDirectory:
    """A folder with the config of a usual model, which is part of dsft; it goes with this process."""
    folder = tempfile.TemporaryDirectory()
    usual_config(model).save_pretrained(folder.name)
    return folder


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
        f"ZeRO {plan.zero}{', checkpointing' * plan.activation_checkpointing}"
        f"{f' 1/{plan.checkpoint_every}' if plan.checkpoint_every > 1 else ''},"
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
