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
from typing import Any

import psutil
import torch
from transformers import TrainerCallback

from dsft.planner.plans import FRAGMENTATION, Plan
from dsft.planner.zero_layout import FULL_TRAINING, OVERHEAD, bytes_by_phase, peak_bytes
from dsft.runtime.console import say
from dsft.runtime.distributed import from_all
from dsft.runtime.hardware import has_gpu, peak_resident_bytes, set_back_peaks
from dsft.training.metrics import mark, seconds_between
from dsft.units import GiB

FIRST_STEPS = 3
"""Steps after which the first comparison is made; the first one compiles and allocates, and its time does not count."""


class PlanCheck(TrainerCallback):
    """Compares after the first steps and at the end: the fullest GPU, the fullest node, the slowest rank. Collective at
    those steps.
    """

    def __init__(self, plan: Plan):
        self.plan = plan
        self.comparisons: dict[str, dict[str, dict[str, float]]] = {}
        """When -> figure -> what was predicted and measured, and the error, (predicted - measured) / measured."""
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
        # Without waiting: the marks that the GPU's work has reached.
        while self.unread and (isinstance(self.unread[0][1], float) or self.unread[0][1].query()):
            self.step_seconds.append(seconds_between(*self.unread.popleft()))
        self.num_steps += 1
        if self.num_steps == FIRST_STEPS:
            self._compare(f"after {FIRST_STEPS} steps")
            self.started = mark()

    def on_evaluate(self, args, state, control, **kwargs):
        self.started = mark()

    on_save = on_evaluate

    def on_train_end(self, args, state, control, **kwargs):
        if self.num_steps:
            self._compare(FULL_TRAINING)

    def _compare(self, when: str) -> None:
        if has_gpu():
            torch.cuda.synchronize()
        self.step_seconds += [seconds_between(*marks) for marks in self.unread]
        self.unread.clear()
        mine = {"seconds": statistics.median(self.step_seconds[1:] or self.step_seconds)}
        if has_gpu():
            mine["held"] = self.held_bytes
            mine["allocated"] = torch.cuda.max_memory_allocated()
            mine["reserved"] = torch.cuda.max_memory_reserved()
        children = sum(child.memory_info().rss for child in psutil.Process().children(recursive=True))
        ranks = from_all([(socket.gethostname(), peak_resident_bytes() + children, mine)])
        nodes: Counter[str] = Counter()
        for host, host_bytes, _ in ranks:
            nodes[host] += host_bytes
        largest = {name: max(figures[name] for _, _, figures in ranks) for name in mine}
        plan = self.plan
        terms = [term for term in plan.terms if term.phase != "load"]
        planned = peak_bytes(terms, "host")
        if not plan.has_gpu:
            planned += plan.ranks_per_node * peak_bytes(terms, "device")
        rows = [("host memory of a node", planned, max(nodes.values()), "GiB")]
        if has_gpu():
            of_torch = [term for term in plan.terms if term.name != OVERHEAD]
            allocated = peak_bytes(of_torch, "device")
            if largest["held"]:
                held = bytes_by_phase(of_torch, "device")["always"]
                rows.append(("GPU memory between steps", held, largest["held"], "GiB"))
            rows.append(("GPU memory allocated", allocated, largest["allocated"], "GiB"))
            rows.append(("GPU memory reserved", int((1 + FRAGMENTATION) * allocated), largest["reserved"], "GiB"))
        if plan.has_time_estimate:
            rows.append(("time of a step", plan.time.step_seconds, largest["seconds"], "s"))
        figures, shown = {}, []
        for name, predicted, measured, unit in rows:
            error, scale = predicted / measured - 1, GiB if unit == "GiB" else 1
            figures[name] = {"predicted": predicted, "measured": measured, "error": error}
            shown.append(f"{name} {measured / scale:.3g} {unit} (predicted {predicted / scale:.3g}, {error:+.0%})")
        self.comparisons[when] = figures
        if when == FULL_TRAINING:
            say(f"measured {when}: " + "; ".join(shown))
