"""Holds a plan's predictions against what training really took: memory of GPUs and hosts, time of a step.

Peaks are those of training, without loading, which maps checkpoint files into memory that the kernel takes back when it
needs it.
Host memory is resident memory (RSS) of all ranks of a node and their child processes; pages that processes share count
once for each.
Held-out evaluation and checkpoints on the way are part of the peak over the whole training, but not of the plan.
"""

import socket
import statistics
import time
from dataclasses import dataclass
from typing import Any

import psutil
import torch
import torch.distributed as dist
from transformers import TrainerCallback

from dsft.planner.plan import Plan
from dsft.runtime.console import say
from dsft.runtime.hardware import has_gpu, peak_resident_bytes, set_back_peaks
from dsft.units import GiB

FIRST_STEPS = 3
"""Steps after which the first comparison is made; the first one compiles and allocates, and its time does not count."""
TOLERANCE = 0.1


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
        self.step_seconds: list[float] = []
        self.started = 0.0

    def on_train_begin(self, args, state, control, **kwargs):
        set_back_peaks()

    def on_step_begin(self, args, state, control, **kwargs):
        self.started = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        if has_gpu():
            torch.cuda.synchronize()
        self.step_seconds.append(time.perf_counter() - self.started)
        if len(self.step_seconds) == FIRST_STEPS:
            self._compare(f"after {FIRST_STEPS} steps")

    def on_train_end(self, args, state, control, **kwargs):
        if self.step_seconds:
            self._compare("over the whole training")

    def _compare(self, when: str) -> None:
        found = compare(self.plan, self.step_seconds)
        self.comparisons[when] = {
            one.name: {"predicted": one.predicted, "measured": one.measured, "error": one.error} for one in found
        }
        say(f"measured {when}: " + "; ".join(map(str, found)))
        off = [one.name for one in found if abs(one.error) > TOLERANCE]
        if off:
            say(f"the prediction of {' and '.join(off)} is off by more than {TOLERANCE:.0%}")


def compare(plan: Plan, step_seconds: list[float]) -> list[Comparison]:
    """Every figure that this machine can measure. Collective: the fullest GPU, the fullest node, the slowest rank."""
    children = sum(child.memory_info().rss for child in psutil.Process().children(recursive=True))
    facts = {
        "node": socket.gethostname(),
        "host": peak_resident_bytes() + children,
        "seconds": statistics.median(step_seconds[1:] or step_seconds),
    }
    if has_gpu():
        facts |= {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
    everyone = [facts]
    if dist.is_initialized() and dist.get_world_size() > 1:
        everyone = [facts for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyone, facts)
    nodes: dict[str, int] = {}
    for one in everyone:
        nodes[one["node"]] = nodes.get(one["node"], 0) + one["host"]
    found = [
        Comparison(
            name="host memory of a node", predicted=plan.training_host_bytes, measured=max(nodes.values()), unit="GiB"
        )
    ]
    if has_gpu():
        found.append(
            Comparison(
                name="GPU memory allocated",
                predicted=plan.allocated_bytes,
                measured=max(one["allocated"] for one in everyone),
                unit="GiB",
            )
        )
        found.append(
            Comparison(
                name="GPU memory reserved",
                predicted=plan.reserved_bytes,
                measured=max(one["reserved"] for one in everyone),
                unit="GiB",
            )
        )
    found.append(
        Comparison(
            name="time of a step",
            predicted=plan.time.step_seconds,
            measured=max(one["seconds"] for one in everyone),
            unit="s",
        )
    )
    return found
