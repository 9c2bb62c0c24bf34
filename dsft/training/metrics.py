"""The metrics of a training's log, and what they are computed from: one collective for each optimizer step, which is
read a step later, so that the host waits for no work that a GPU is still at, and one more at each line of the log.
"""

import contextlib
import dataclasses
import math
import re
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dsft.perplexity.sums import Perplexity, exp, in_words, ratio_interval
from dsft.planner.speed import CARDS, card_of, cards_named, flops_per_token
from dsft.runtime.console import say
from dsft.runtime.distributed import add_over_ranks, from_all
from dsft.runtime.hardware import gpu_utilization, peak_memory_bytes
from dsft.setup.decide import TrainingRun
from dsft.units import GiB, in_digits

ROUNDING = 1e-5
"""Of sums of the loss in fp32: what models add to theirs is more."""
MOST_DATA_WAIT = 0.2
"""Share of the time from which waiting for data is reported."""
LEAST_INTERVAL = 0.2
"""Seconds: shares of a shorter one are chance."""


@dataclass(frozen=True, kw_only=True)
class Compute:
    """What a run can compute, for the shares of it that are used."""

    num_gpus: int
    """Of all nodes; 0 where ranks run on CPU, whose speed is logged only together."""
    flops_per_token: float
    """Of training a full sequence, without what activation checkpointing computes again."""
    peak_flops: float
    """Of one GPU by its data sheet, in the run's dtype; 0 where that is not known."""
    own_loss: bool = False
    """The first sum of nats is of the user's `compute_loss`."""

    @classmethod
    def of_run(cls, run: TrainingRun) -> "Compute":
        machine = run.machine
        peak_flops = 0.0
        if machine.has_gpu and run.options.dtype in ("bfloat16", "float16") and cards_named(machine.gpu_type):
            peak_flops = 1e12 * CARDS[card_of(machine)].tflops
        return cls(
            num_gpus=machine.world_size if machine.has_gpu else 0,
            flops_per_token=flops_per_token(run.model.size, run.options.seq_len, checkpointing=False),
            peak_flops=peak_flops,
            own_loss=run.options.compute_loss is not None,
        )


@dataclass
class Sums:
    """Over all ranks and micro batches: of one optimizer step, or of those since the last line of the log."""

    bad: float = 0.0
    """Losses that are NaN or infinite."""
    tokens: float = 0.0
    """Without padding."""
    trained: float = 0.0
    positions: float = 0.0
    """With padding."""
    weighted: float = 0.0
    """Nats of the trained tokens, with label smoothing, or their losses of `compute_loss`, times their weights."""
    nats: float = 0.0
    """Of the trained tokens, without."""
    objective: float = 0.0
    """What is trained times the trained tokens: `weighted`, and what the model adds to them."""
    asked: float = 0.0
    """Ranks that were asked to stop."""
    due: float = 0.0
    """Ranks for which a save is due."""


@dataclass(kw_only=True)
class Line:
    """What the metrics of one line of the log are computed from."""

    peak_gib: dict[str, float] = dataclasses.field(default_factory=dict)
    """"gpu" (where there is one) and "host" -> the largest peak of one rank so far."""
    sums: Sums | None = None
    """Since the last line; None where the line is of an evaluation, or of the end."""
    seconds: float = 0.0
    """That the steps of `sums` took, without evaluations and saves."""
    data_seconds: float | None = None
    """That the rank waited for batches which waited longest."""
    gpu_utilization: float | None = None
    """Share of the last moments in which the least used GPU was at work (NVML), if nvidia-ml-py is installed."""
    skipped_steps: int = 0
    """Over the full training."""
    trained_tokens: int | None = None
    """Over the full training, where the line is of steps."""
    save_seconds: float | None = None
    compute: Compute | None = None
    logs: dict[str, float] = dataclasses.field(default_factory=dict)
    """What the Trainer logs."""


class Work:
    """Sums of the step at hand, of steps that were sent and not read yet, and the next line of the log so far."""

    def __init__(self, device: torch.device):
        self._sums = torch.zeros(len(dataclasses.fields(Sums)), dtype=torch.float64, device=device)  # counts are exact
        self.unread: deque[tuple[int, torch.Tensor, Any]] = deque()
        """Step, its sums on the host, and when they are there."""
        self.begin_interval()

    def begin_interval(self) -> None:
        """Start from 0 after a line of the log."""
        self.line = Line(sums=Sums())
        self.data_seconds = 0.0
        """This rank waited for batches."""
        self.begun = time.perf_counter()
        """When it began, put off by what is not its steps' time."""

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave an evaluation or a save inside a `with` out of the interval's time."""
        start = time.perf_counter()
        yield
        self.begun += time.perf_counter() - start

    def timed(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield batches, and count the seconds until each is there."""
        while True:
            start = time.perf_counter()
            batch = next(batches, None)
            self.data_seconds += time.perf_counter() - start
            if batch is None:
                return
            yield batch

    def count(self, objective: torch.Tensor, nats: torch.Tensor, num_tokens: torch.Tensor) -> None:
        """Count a micro batch.

        Args:
            objective: what is trained, times the step's trained tokens.
            nats: with and without weights.
            num_tokens: without padding, trained tokens, and positions.
        """
        self._sums[:7] += torch.cat([(~objective.isfinite()).view(1), num_tokens, nats, objective.view(1)])

    def send(self, step: int, *, asked: bool, due: bool) -> None:
        """Add up over all ranks what was counted since the last step. Collective."""
        self._sums[7], self._sums[8] = asked, due
        add_over_ranks(self._sums)
        on_host = self._sums.to("cpu", non_blocking=True, copy=True)  # pinned memory, if it comes from a GPU
        copied = torch.cuda.Event() if self._sums.is_cuda else None
        if copied:
            copied.record()
        self.unread.append((step, on_host, copied))
        self._sums.zero_()

    def read(self) -> tuple[int, Sums]:
        """(the oldest step that was sent, its sums), added to the interval's; waits until the step's work is done."""
        step, on_host, copied = self.unread.popleft()
        if copied:
            copied.synchronize()
        sums = Sums(*on_host.tolist())
        for name, value in vars(sums).items():
            setattr(self.line.sums, name, getattr(self.line.sums, name) + value)
        return step, sums


class DataWait:
    """Reports once that a training waits for its data, if two lines of the log in a row show it."""

    def __init__(self):
        self.was_long = self.is_reported = False

    def note(self, share: float, seconds: float) -> None:
        """Note a line of the log: the share of its time that the slowest rank waited for data."""
        is_long = seconds > LEAST_INTERVAL and share > MOST_DATA_WAIT
        if is_long and self.was_long and not self.is_reported:
            self.is_reported = True
            say(
                f"note: waiting for data: {share:.0%} of the time; raise dataloader_num_workers, or prepare the data on"
                " a faster disk (data_cache)"
            )
        self.was_long = is_long


def gather(work: Work | None = None) -> Line:
    """Gather peaks of memory and, of `work`, sums and how long ranks waited for data. Collective."""
    waited = None if work is None else work.data_seconds
    ranks = from_all([(peak_memory_bytes(), waited, gpu_utilization() if work else None)])
    peaks = [peak for peak, _, _ in ranks]
    peak_gib = {name: round(max(peak[name] for peak in peaks) / GiB, 3) for name in peaks[0]}
    if work is None or not work.line.sums.positions:
        return Line(peak_gib=peak_gib)
    return dataclasses.replace(
        work.line,
        peak_gib=peak_gib,
        seconds=time.perf_counter() - work.begun,
        data_seconds=max(seconds for _, seconds, _ in ranks),
        gpu_utilization=min((share for _, _, share in ranks if share is not None), default=None),
    )


SCREEN = {
    "loss": "loss",
    "weighted_loss": "weighted_loss",
    "own_loss": "own_loss",
    "learning_rate": "lr",
    "grad_norm": "grad_norm",
    "tokens_per_second": "tokens/s",
    "tokens_per_second_per_gpu": "per GPU",
    "mfu": "MFU",
    "eval_loss": "held-out loss",
    "eval_perplexity": "perplexity",
    "peak_gpu_gib": "peak_gpu_gib",
    "peak_host_gib": "peak_host_gib",
    "num_input_tokens_seen": "tokens",
    "skipped_steps": "skipped_steps",
    "eval_tokens": "eval_tokens",
}
"""Metric -> its name in a line of the screen, in the line's order: a narrow terminal leaves out the last."""
IN_BAR = ("loss", "tokens_per_second", "tokens_per_second_per_gpu", "mfu", "peak_gpu_gib", "peak_host_gib")
"""Metrics that the moving line shows too."""
PART = re.compile(r"eval_(.+)_(loss|perplexity)")
"""Metrics of one set of what is held out; `eval_macro_*` are means over sets."""


def complete(line: Line) -> dict[str, float]:
    """Compute every metric of a line, beside what the Trainer logs: in metrics.jsonl, run.json and trackers by its
    name.
    """
    logs = line.logs
    sums = line.sums
    compute = line.compute
    if sums:
        # The last window of a text may be of one token, before which nothing stands: the Trainer's 0 is not a loss.
        logs.pop("loss", None)
        if sums.trained:
            logs["loss"] = sums.nats / sums.trained
            if compute.own_loss:
                logs["own_loss"] = sums.weighted / sums.trained
            elif _differ(sums.weighted, sums.nats):
                logs["weighted_loss"] = sums.weighted / sums.trained
            if _differ(sums.objective, sums.weighted):
                logs["aux_loss"] = (sums.objective - sums.weighted) / sums.trained
        logs["tokens_per_second"] = sums.tokens / line.seconds
        logs["padding_share"] = 1 - sums.tokens / sums.positions
    if "loss" in logs:
        logs["perplexity"] = exp(logs["loss"])
    if compute.num_gpus and "tokens_per_second" in logs:
        speed = logs["tokens_per_second"] / compute.num_gpus
        logs["tokens_per_second_per_gpu"] = speed
        logs["tflops_per_gpu"] = speed * compute.flops_per_token / 1e12
        if compute.peak_flops:
            logs["mfu"] = speed * compute.flops_per_token / compute.peak_flops
    for place, peak in line.peak_gib.items():
        logs[f"peak_{place}_gib"] = peak
    if line.skipped_steps:
        logs["skipped_steps"] = line.skipped_steps
    if line.data_seconds is not None:
        logs["data_wait_seconds"] = line.data_seconds
        logs["data_wait_share"] = line.data_seconds / line.seconds
    measured = {
        "num_trained_tokens": line.trained_tokens,
        "gpu_utilization": line.gpu_utilization,
        "save_seconds": line.save_seconds,
    }
    return logs | {name: value for name, value in measured.items() if value is not None}


def _differ(value: float, base: float) -> bool:
    return abs(value - base) > ROUNDING * abs(base)


def on_screen(logs: dict[str, float]) -> Iterator[tuple[str, bool]]:
    """Yield what a line of the log shows, part by part, and whether the moving line shows it too."""
    for name, label in SCREEN.items():
        if name in logs:
            text = f"{label} {in_digits(logs[name])}"
            if name == "eval_perplexity" and "eval_perplexity_low" in logs:
                text += f", {in_words([logs['eval_perplexity_low'], logs['eval_perplexity_high']])}"
            yield text, name in IN_BAR
    for name, value in logs.items():
        if part := PART.fullmatch(name):
            yield f"{part[1]} {part[2]} {in_digits(value)}", False


def of_sets(result: Perplexity, names: Sequence[str], set_D: np.ndarray) -> dict[str, float]:
    """Compute loss, perplexity and tokens of each held-out set, and the means over sets: of losses, and exp of that.
    `set_D`: which of `names` each document of the result is of.
    """
    metrics = {}
    losses = []
    for number, name in enumerate(names):
        is_scored_D = (set_D == number) & (result.document_tokens > 0)
        sums_KU = np.stack([result.document_nats, result.document_tokens])[:, is_scored_D]
        nats = math.fsum(sums_KU[0])
        tokens = math.fsum(sums_KU[1])
        if not tokens:
            continue
        losses.append(nats / tokens)
        metrics[f"{name}_loss"] = losses[-1]
        metrics[f"{name}_perplexity"] = exp(losses[-1])
        metrics[f"{name}_tokens"] = int(tokens)
        low, high = ratio_interval(sums_KU, 1)
        if not math.isnan(low):  # a single document has no interval
            metrics[f"{name}_perplexity_low"] = exp(low)
            metrics[f"{name}_perplexity_high"] = exp(high)
    if losses:
        mean = math.fsum(losses) / len(losses)
        metrics |= {"macro_loss": mean, "macro_perplexity": exp(mean)}
    return metrics
