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
from dsft.runtime.distributed import add_over_ranks, from_all
from dsft.runtime.hardware import gpu_utilization, peak_memory_bytes
from dsft.setup.decide import TrainingRun
from dsft.units import GiB, in_digits

ROUNDING = 1e-5
"""Of sums of the loss in fp32: what models add to theirs is more."""


@dataclass(frozen=True, kw_only=True)
class Compute:
    """What a run can compute, for the shares of it that are used."""

    num_gpus: int
    """Of all nodes; 0 where ranks run on CPU, whose speed is logged only together."""
    flops_per_token: float
    """Of training a full sequence, without what activation checkpointing computes again."""
    peak_flops: float
    """Of one GPU by its data sheet, in the run's dtype; 0 where that is not known."""
    own_loss: bool
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


class Work:
    """Sums of the step at hand, of steps that were sent and not read yet, and the next line of the log so far."""

    def __init__(self, device: torch.device):
        self._step_sums = torch.zeros(
            len(dataclasses.fields(Sums)), dtype=torch.float64, device=device
        )  # counts are exact
        self.unread: deque[tuple[int, torch.Tensor, Any]] = deque()
        """Step, its sums on the host, and when they are there."""
        self.begin_interval()

    def begin_interval(self) -> None:
        """Start from 0 after a line of the log."""
        self.sums = Sums()
        """Of the steps that were read."""
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
        self._step_sums[:7] += torch.cat([(~objective.isfinite()).view(1), num_tokens, nats, objective.view(1)])

    def send(self, step: int, *, asked: bool, due: bool) -> None:
        """Add up over all ranks what was counted since the last step. Collective."""
        self._step_sums[7], self._step_sums[8] = asked, due
        add_over_ranks(self._step_sums)
        on_host = self._step_sums.to("cpu", non_blocking=True, copy=True)  # pinned memory, if it comes from a GPU
        copied = torch.cuda.Event() if self._step_sums.is_cuda else None
        if copied:
            copied.record()
        self.unread.append((step, on_host, copied))
        self._step_sums.zero_()

    def read(self) -> tuple[int, Sums]:
        """(the oldest step that was sent, its sums), added to the interval's; waits until the step's work is done."""
        step, on_host, copied = self.unread.popleft()
        if copied:
            copied.synchronize()
        sums = Sums(*on_host.tolist())
        for name, value in vars(sums).items():
            setattr(self.sums, name, getattr(self.sums, name) + value)
        return step, sums


def gather_peaks() -> dict[str, float]:
    """Return the largest peak of memory of one rank so far. Collective."""
    return _peak_metrics(from_all([peak_memory_bytes()]))


def gather_metrics(work: Work, compute: Compute) -> dict[str, float]:
    """Return the metrics of the steps since the last line of the log, and the peaks of memory. Collective."""
    ranks = from_all([(peak_memory_bytes(), work.data_seconds, gpu_utilization())])
    metrics = _peak_metrics([peaks for peaks, _, _ in ranks])
    if not work.sums.positions:
        return metrics
    seconds = time.perf_counter() - work.begun
    waited = max(data_seconds for _, data_seconds, _ in ranks)
    metrics |= step_metrics(work.sums, seconds, compute)
    metrics |= {"data_wait_seconds": waited, "data_wait_share": waited / seconds}
    shares = [share for _, _, share in ranks if share is not None]
    if shares:
        metrics["gpu_utilization"] = min(shares)
    return metrics


def _peak_metrics(ranks: list[dict[str, int]]) -> dict[str, float]:
    """`peak_gpu_gib` (where there is a GPU) and `peak_host_gib` of the ranks' peaks in bytes."""
    metrics = {}
    for place in ranks[0]:
        most = max(peaks[place] for peaks in ranks)
        metrics[f"peak_{place}_gib"] = round(most / GiB, 3)
    return metrics


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
PART = re.compile(r"eval_(.+)_(loss|perplexity)")
"""Metrics of one set of what is held out; `eval_macro_*` are means over sets."""


def step_metrics(sums: Sums, seconds: float, compute: Compute) -> dict[str, float]:
    """Compute the metrics of steps that took `seconds`, without evaluations and saves. There is no loss where no token
    was trained: the last window of a text may be of one token, before which nothing stands.
    """
    metrics = {}
    if sums.trained:
        loss = sums.nats / sums.trained
        metrics |= {"loss": loss, "perplexity": exp(loss)}
        if compute.own_loss:
            metrics["own_loss"] = sums.weighted / sums.trained
        elif _differ(sums.weighted, sums.nats):
            metrics["weighted_loss"] = sums.weighted / sums.trained
        if _differ(sums.objective, sums.weighted):
            metrics["aux_loss"] = (sums.objective - sums.weighted) / sums.trained
    metrics["tokens_per_second"] = sums.tokens / seconds
    metrics["padding_share"] = 1 - sums.tokens / sums.positions
    if compute.num_gpus:
        speed = metrics["tokens_per_second"] / compute.num_gpus
        metrics["tokens_per_second_per_gpu"] = speed
        metrics["tflops_per_gpu"] = speed * compute.flops_per_token / 1e12
        if compute.peak_flops:
            metrics["mfu"] = speed * compute.flops_per_token / compute.peak_flops
    return metrics


def _differ(value: float, base: float) -> bool:
    return abs(value - base) > ROUNDING * abs(base)


def on_screen(logs: dict[str, float]) -> Iterator[str]:
    """Yield what a line of the log shows, part by part."""
    for name, label in SCREEN.items():
        if name in logs:
            text = f"{label} {in_digits(logs[name])}"
            if name == "eval_perplexity" and "eval_perplexity_low" in logs:
                text += f", {in_words([logs['eval_perplexity_low'], logs['eval_perplexity_high']])}"
            yield text
    for name, value in logs.items():
        if part := PART.fullmatch(name):
            yield f"{part[1]} {part[2]} {in_digits(value)}"


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
