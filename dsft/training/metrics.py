"""What a line of the log tells beside the Trainer's own metrics. It costs one collective at log steps, none at others.

A new metric is a line of `gather_metrics` or `derived_metrics`, and of LOGGED (callbacks.py) where the screen shows it.
"""

import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from dsft.perplexity.sums import exp
from dsft.planner.gpus import GPUS, gpu_name, named_gpus
from dsft.planner.step_time import flops_per_token
from dsft.run_setup.resolve import ResolvedRun
from dsft.runtime.console import say
from dsft.runtime.distributed import device, from_all
from dsft.runtime.hardware import has_gpu, peak_memory_bytes
from dsft.training.step_reports import StepReport
from dsft.units import GiB

ROUNDING = 1e-5
"""Of sums of the loss in fp32: what models add to theirs is more."""
SLOW, SLOW_SHARE = 3.0, 0.2
"""A rank is slow whose own work takes this many times as long as the fastest rank's, and, where it is work of the
training, this share of the interval longer.
"""


@dataclass(frozen=True, kw_only=True)
class Compute:
    """What a run can compute, for the shares of it that are used."""

    num_gpus: int
    """Of all nodes; 0 where ranks run on CPU, whose speed is told only together."""
    flops_per_token: float
    """Of training a full sequence, without what activation checkpointing computes again."""
    peak_flops: float
    """Of one GPU by its data sheet, in the run's dtype; 0 where that is not known."""


def compute_of(run: ResolvedRun) -> Compute:
    """Find what a run can compute."""
    machine, half = run.machine, run.options.dtype in ("bfloat16", "float16")
    is_known = machine.has_gpu and half and bool(named_gpus(machine.gpu_type))
    return Compute(
        num_gpus=machine.world_size if machine.has_gpu else 0,
        flops_per_token=flops_per_token(run.model.size, run.options.seq_len, checkpointing=False),
        peak_flops=1e12 * GPUS[gpu_name(machine)].tflops if is_known else 0.0,
    )


def derived_metrics(logs: dict[str, float], compute: Compute) -> dict[str, float]:
    """Compute what follows from a log entry: perplexity of the loss; of one GPU speed, TFLOP/s and MFU."""
    derived = {"perplexity": exp(logs["loss"])} if "loss" in logs else {}
    if compute.num_gpus and "train_tokens_per_second" in logs:
        speed = logs["train_tokens_per_second"] / compute.num_gpus
        flops = speed * compute.flops_per_token
        derived |= {"tokens_per_second_per_gpu": speed, "tflops_per_gpu": flops / 1e12}
        if compute.peak_flops:
            derived["mfu"] = flops / compute.peak_flops
    return derived


@dataclass(kw_only=True)
class Work:
    """What was done since the last line of the log that tells of steps."""

    tokens: int = 0
    """Of all ranks, without padding."""
    positions: int = 0
    """Of all ranks, with padding."""
    trained: int = 0
    """Tokens of all ranks that were trained."""
    weighted: float = 0.0
    """Nats of these, times their weights."""
    nats: float = 0.0
    """Of these, without."""
    objective: float = 0.0
    """What was trained, times the trained tokens: `weighted`, and what the model adds."""
    data_seconds: float = 0.0
    """This rank waited for batches."""
    forward_seconds: float = 0.0
    """This rank's forward passes took. In ZeRO stages 0 to 2 a rank waits for no other before their end."""
    begun: float = field(default_factory=time.perf_counter)
    _passes: list[tuple[Any, Any]] = field(default_factory=list)

    def timed(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield batches, and count the seconds until each is there."""
        while True:
            start = time.perf_counter()
            batch = next(batches, None)
            self.data_seconds += time.perf_counter() - start
            if batch is None:
                return
            yield batch

    def note_forward(self, start: Any, end: Any) -> None:
        """Note the marks before and after a forward pass."""
        self._passes.append((start, end))

    def take_passes(self) -> list[tuple[Any, Any]]:
        """Return the marks of the step at hand, and forget them."""
        passes, self._passes = self._passes, []
        return passes

    def note_step(self, report: StepReport) -> None:
        """Note what all ranks computed in a step, when this rank's work of it, and so its `passes`, is known to be
        done.
        """
        self.tokens += report.tokens
        self.positions += report.positions
        self.trained += report.trained
        self.weighted += report.weighted
        self.nats += report.nats
        self.objective += report.objective
        self.forward_seconds += sum(seconds_between(start, end) for start, end in report.passes)


def mark() -> Any:
    """Mark the time in a rank's work; on a GPU, whose work is done later than it is asked for, without waiting."""
    if not has_gpu():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def is_reached(marked: Any) -> bool:
    """Tell, without waiting, whether the work before a mark is done."""
    return isinstance(marked, float) or marked.query()


def seconds_between(start: Any, end: Any) -> float:
    """Of two marks whose work is done."""
    return end - start if isinstance(start, float) else start.elapsed_time(end) / 1000


@dataclass(frozen=True, kw_only=True)
class RankTimes:
    """What one rank did by itself since the last line of the log, in seconds."""

    host: str
    data: float
    """It waited for batches."""
    forward: float
    """Its forward passes took; in ZeRO-3 a rank waits for the others in them."""
    product: float
    """A product of matrices took that each rank computes alone, now: of a throttled device it takes long."""


class SlowRanks:
    """Names a rank that is much slower than the others in two lines of the log in a row, once."""

    def __init__(self, *, waits_in_forward: bool):
        """Args:
        waits_in_forward: ranks wait for each other in forward passes, as in ZeRO-3.
        """
        self.waits_in_forward = waits_in_forward
        self.blamed: tuple[int, str] | None = None
        self.warned: set[tuple[int, str]] = set()

    def note(self, ranks: list[RankTimes], *, interval: float) -> None:
        """Note the times of all ranks over `interval` seconds."""
        before, self.blamed = self.blamed, None
        for work, seconds, least in (
            ("reading its data", [rank.data for rank in ranks], SLOW_SHARE * interval),
            ("forward passes", [rank.forward for rank in ranks], SLOW_SHARE * interval),
            ("a product of matrices that each rank computes alone", [rank.product for rank in ranks], 0.0),
        ):
            slowest, fastest = max(seconds), min(seconds)
            if work == "forward passes" and self.waits_in_forward:
                continue
            if slowest - fastest > least and slowest > SLOW * fastest:
                number = seconds.index(slowest)
                self.blamed = number, work
                if self.blamed == before and self.blamed not in self.warned:
                    self.warned.add(self.blamed)
                    say(
                        f"warning: rank {number} on {ranks[number].host} holds up the others: {work} took it"
                        f" {slowest:.3g} s, the fastest rank {fastest:.3g} s. Look there for other programs, a GPU that"
                        " is hot or throttled, and a slow disk"
                    )
                return


def _product_seconds() -> float:
    """Time a product of small matrices on this rank's device: the least of five, a millisecond or less each."""
    width = 1024 if has_gpu() else 256
    matrix, times = torch.ones(width, width, device=device()), []
    for _ in range(5):
        start = mark()
        matrix @ matrix
        end = mark()
        if not isinstance(end, float):
            end.synchronize()
        times.append(seconds_between(start, end))
    return min(times)


def gather_metrics(work: Work | None = None, slow_ranks: SlowRanks | None = None) -> dict[str, float]:
    """Gather the largest peak memory of one rank so far and, of `work`, its loss per trained token and what ranks
    waited for; name a rank that holds up the others. Collective.
    """
    mine = None
    if work is not None:
        product = _product_seconds()
        mine = RankTimes(
            host=socket.gethostname(), data=work.data_seconds, forward=work.forward_seconds, product=product
        )
    peaks, ranks = zip(*from_all([(peak_memory_bytes(), mine)]), strict=True)
    metrics = {f"peak_{name}_gib": round(max(peak[name] for peak in peaks) / GiB, 3) for name in peaks[0]}
    if work is None or not work.positions:
        return metrics
    metrics["loss"] = work.nats / work.trained
    if abs(work.weighted - work.nats) > ROUNDING * work.nats:
        metrics["weighted_loss"] = work.weighted / work.trained
    if abs(work.objective - work.weighted) > ROUNDING * work.weighted:
        metrics["aux_loss"] = (work.objective - work.weighted) / work.trained
    metrics |= {
        "data_wait_seconds": max(rank.data for rank in ranks),
        "padding_share": 1 - work.tokens / work.positions,
    }
    if len(ranks) > 1:
        seconds = [rank.data + rank.forward for rank in ranks]
        metrics["rank_skew"] = max(seconds) / min(seconds)
        slow_ranks.note(list(ranks), interval=time.perf_counter() - work.begun)
    return metrics
