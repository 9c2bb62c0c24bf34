"""Compares a plan's predictions with what training really took: memory of GPUs and hosts, time of a step.

Peaks are those of training, without loading, which maps checkpoint files into memory that the kernel takes back when it
needs it.
Host memory is resident memory (RSS) of all ranks of a node and their child processes; pages that processes share count
once for each.
Held-out evaluation and checkpoints on the way are part of the peak over the full training, but not of the plan.
A step lasts from the end of the one before to its own: the host may be done with it long before a GPU is.
"""

import socket
import statistics
from collections import Counter, deque
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from transformers import TrainerCallback

from dsft.planner.plans import Plan
from dsft.runtime.console import say
from dsft.runtime.distributed import from_all
from dsft.runtime.hardware import has_gpu, peak_resident_bytes, set_back_peaks
from dsft.training.metrics import is_reached, mark, seconds_between
from dsft.units import GiB

FIRST_STEPS = 3
"""Steps after which the first comparison is made; the first one compiles and allocates, and its time does not count."""
FULL_TRAINING = "over the full training"
"""The comparison at the end, in `plan_check` of run.json."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One predicted figure and the measured one."""

    name: str
    predicted: float
    measured: float
    unit: str

    @property
    def error(self) -> float:
        """(predicted - measured) / measured."""
        return self.predicted / self.measured - 1

    def __str__(self) -> str:
        scale = GiB if self.unit == "GiB" else 1
        return (
            f"{self.name} {self.measured / scale:.3g} {self.unit} (predicted {self.predicted / scale:.3g},"
            f" {self.error:+.0%})"
        )


class PlanCheck(TrainerCallback):
    """Compares after the first steps and at the end; `comparisons` holds the newest, for run.json. Collective at those
    steps.
    """

    def __init__(self, plan: Plan):
        self.plan = plan
        self.comparisons: dict[str, dict[str, Any]] = {}
        self.num_steps = 0
        self.step_seconds: list[float] = []
        self.started: Any = None
        """The mark from which the step at hand is timed."""
        self.unread: deque[tuple[Any, Any]] = deque()
        """Marks around the steps that a GPU may still be at."""
        self.held_bytes = 0
        """Of this rank's GPU, between two steps, at most; 0 before the second."""

    def on_train_begin(self, args, state, control, **kwargs):
        set_back_peaks()

    def on_step_begin(self, args, state, control, **kwargs):
        if self.started is None:
            self.started = mark()
        elif has_gpu():
            self.held_bytes = max(self.held_bytes, torch.cuda.memory_allocated())

    def on_step_end(self, args, state, control, **kwargs):
        end = mark()
        self.unread.append((self.started, end))
        self.started = end
        while self.unread and is_reached(self.unread[0][1]):
            self.step_seconds.append(seconds_between(*self.unread.popleft()))
        self.num_steps += 1
        if self.num_steps == FIRST_STEPS:
            self._compare(f"after {FIRST_STEPS} steps")
            self.started = mark()

    def on_evaluate(self, args, state, control, **kwargs):
        self.started = mark()

    def on_save(self, args, state, control, **kwargs):
        self.started = mark()

    def on_train_end(self, args, state, control, **kwargs):
        if self.num_steps:
            self._compare(FULL_TRAINING)

    def _compare(self, when: str) -> None:
        if has_gpu():
            torch.cuda.synchronize()
        self.step_seconds += [seconds_between(*marks) for marks in self.unread]
        self.unread.clear()
        comparisons = compare(self.plan, self.step_seconds, held_bytes=self.held_bytes)
        self.comparisons[when] = {
            comparison.name: {
                "predicted": comparison.predicted,
                "measured": comparison.measured,
                "error": comparison.error,
            }
            for comparison in comparisons
        }
        if when == FULL_TRAINING:
            say(f"measured {when}: " + "; ".join(map(str, comparisons)))


def compare(plan: Plan, step_seconds: list[float], *, held_bytes: int) -> list[Comparison]:
    """Compares every figure that this machine can measure: the fullest GPU, the fullest node, the slowest rank.
    Collective.
    """
    children = sum(child.memory_info().rss for child in psutil.Process().children(recursive=True))
    figures = {"seconds": statistics.median(step_seconds[1:] or step_seconds)}
    if has_gpu():
        figures["held"] = held_bytes
        figures["allocated"] = torch.cuda.max_memory_allocated()
        figures["reserved"] = torch.cuda.max_memory_reserved()
    ranks = from_all([(socket.gethostname(), peak_resident_bytes() + children, figures)])
    nodes: Counter[str] = Counter()
    for host, host_bytes, _ in ranks:
        nodes[host] += host_bytes
    largest = {name: max(figures[name] for _, _, figures in ranks) for name in figures}
    rows = [("host memory of a node", plan.training_host_bytes, max(nodes.values()), "GiB")]
    if has_gpu():
        if largest["held"]:
            rows.append(("GPU memory between steps", plan.held_bytes, largest["held"], "GiB"))
        rows += [
            ("GPU memory allocated", plan.allocated_bytes, largest["allocated"], "GiB"),
            ("GPU memory reserved", plan.reserved_bytes, largest["reserved"], "GiB"),
        ]
    if plan.has_time_estimate:
        rows.append(("time of a step", plan.time.step_seconds, largest["seconds"], "s"))
    return [
        Comparison(name=name, predicted=predicted, measured=measured, unit=unit)
        for name, predicted, measured, unit in rows
    ]
