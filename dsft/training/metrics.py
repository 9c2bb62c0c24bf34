"""The metrics of a training's log, and what they are computed from: one collective for each optimizer step, which is
read a step later, so that the host waits for no work that a GPU is still at, and one more at each line of the log.

A new metric is one value of METRICS: how it is computed, how the screen shows it, and how the report draws it.
"""

import contextlib
import dataclasses
import math
import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dsft.perplexity.sums import Perplexity, exp, in_words, ratio_interval
from dsft.planner.speed import CARDS, card_of, cards_named, flops_per_token
from dsft.run_setup.resolve import TrainingRun
from dsft.runtime.console import say
from dsft.runtime.distributed import add_over_ranks, from_all
from dsft.runtime.hardware import gpu_utilization, peak_memory_bytes
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
        machine, half = run.machine, run.options.dtype in ("bfloat16", "float16")
        is_known = machine.has_gpu and half and bool(cards_named(machine.gpu_type))
        return cls(
            num_gpus=machine.world_size if machine.has_gpu else 0,
            flops_per_token=flops_per_token(run.model.size, run.options.seq_len, checkpointing=False),
            peak_flops=1e12 * CARDS[card_of(machine)].tflops if is_known else 0.0,
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
    """The line as far as it is known: what the Trainer logs, and metrics that come earlier in METRICS."""


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


@dataclass(frozen=True)
class Metric:
    """One metric of the log: in metrics.jsonl, run.json and trackers by its name."""

    name: str
    of: Callable[[Line], float | None] | None = None
    """Computes it, None where it has no place in a line. Without, the Trainer or an evaluation logs it."""
    on_screen: str = ""
    """Its name in the line of the log; empty where it is in the files alone."""
    in_words: Callable[[dict[str, float]], str] | None = None
    """Writes it for that line, from all metrics of the line; without, the number."""
    in_bar: bool = False
    """Shown at the moving line too."""


def _more_than(line: Line, name: str, base: str) -> bool:
    """Whether a sum of the line's steps differs from another by more than rounding."""
    sums = vars(line.sums or Sums())
    return abs(sums[name] - sums[base]) > ROUNDING * abs(sums[base])


def _per_trained_token(line: Line, name: str) -> float | None:
    """A sum of the line's steps by their trained tokens; None where there are none: the last window of a text may be of
    one token, before which nothing stands.
    """
    return getattr(line.sums, name) / line.sums.trained if line.sums and line.sums.trained else None


def _flops_of_a_gpu(line: Line, unit: float) -> float | None:
    speed = line.logs.get("tokens_per_second_per_gpu")
    return speed * line.compute.flops_per_token / unit if speed is not None and unit else None


def _held_out(logs: dict[str, float]) -> str:
    """Write the perplexity of an evaluation, and its interval where there is one."""
    perplexity = in_digits(logs["eval_perplexity"])
    bounds = [logs.get(f"eval_perplexity_{end}") for end in ("low", "high")]
    return perplexity if None in bounds else f"{perplexity}, {in_words(bounds)}"


METRICS = (
    Metric("loss", lambda line: _per_trained_token(line, "nats"), on_screen="loss", in_bar=True),
    Metric("perplexity", lambda line: exp(line.logs["loss"]) if "loss" in line.logs else None),
    Metric(
        "weighted_loss",
        lambda line: (
            _per_trained_token(line, "weighted")
            if not line.compute.own_loss and _more_than(line, "weighted", "nats")
            else None
        ),
        on_screen="weighted_loss",
    ),
    Metric(
        "own_loss",
        lambda line: _per_trained_token(line, "weighted") if line.compute.own_loss else None,
        on_screen="own_loss",
    ),
    Metric(
        "aux_loss",
        lambda line: (
            (line.sums.objective - line.sums.weighted) / line.sums.trained
            if _more_than(line, "objective", "weighted")
            else None
        ),
    ),
    Metric("learning_rate", on_screen="lr"),
    Metric(
        "grad_norm",
        on_screen="grad_norm",
    ),
    Metric("train_tokens_per_second"),
    Metric(
        "tokens_per_second",
        lambda line: line.sums and line.sums.tokens / line.seconds,
        on_screen="tokens/s",
        in_bar=True,
    ),
    Metric(
        "tokens_per_second_per_gpu",
        lambda line: (
            line.logs["tokens_per_second"] / line.compute.num_gpus
            if line.compute.num_gpus and "tokens_per_second" in line.logs
            else None
        ),
        on_screen="per GPU",
        in_bar=True,
    ),
    Metric("tflops_per_gpu", lambda line: _flops_of_a_gpu(line, 1e12)),
    Metric("mfu", lambda line: _flops_of_a_gpu(line, line.compute.peak_flops), on_screen="MFU", in_bar=True),
    Metric("eval_loss", on_screen="held-out loss"),
    Metric("eval_perplexity", on_screen="perplexity", in_words=_held_out),
    *(
        Metric(
            f"peak_{where.lower()}_gib",
            lambda line, where=where: line.peak_gib.get(where.lower()),
            on_screen=f"peak_{where.lower()}_gib",
            in_bar=True,
        )
        for where in ("GPU", "host")
    ),
    Metric("num_input_tokens_seen", on_screen="tokens"),
    Metric("skipped_steps", lambda line: line.skipped_steps or None, on_screen="skipped_steps"),
    Metric("eval_tokens", on_screen="eval_tokens"),
    Metric("num_trained_tokens", lambda line: line.trained_tokens),
    Metric("padding_share", lambda line: line.sums and 1 - line.sums.tokens / line.sums.positions),
    Metric("data_wait_seconds", lambda line: line.data_seconds),
    Metric("data_wait_share", lambda line: None if line.data_seconds is None else line.data_seconds / line.seconds),
    Metric("gpu_utilization", lambda line: line.gpu_utilization),
    Metric("save_seconds", lambda line: line.save_seconds),
)
"""In the order of the screen's line, of which a narrow terminal leaves out the last, and so that each is computed after
those that it is made of. The report draws loss and perplexity by itself, with what evaluations measured.
"""


PART = re.compile(r"eval_(.+)_(loss|perplexity)")
"""Metrics of one set of what is held out; `eval_macro_*` are means over sets."""


def complete(line: Line) -> dict[str, float]:
    """Compute every metric of a line, beside what the Trainer logs."""
    logs = line.logs
    if line.sums and not line.sums.trained:  # the Trainer's is 0, which is not a loss
        logs.pop("loss", None)
    for metric in METRICS:
        if metric.of and (value := metric.of(line)) is not None:
            logs[metric.name] = value
    return logs


def on_screen(logs: dict[str, float]) -> Iterator[tuple[str, bool]]:
    """Yield what a line of the log shows, part by part, and whether the moving line shows it too."""
    for metric in METRICS:
        if metric.on_screen and (value := logs.get(metric.name)) is not None:
            yield f"{metric.on_screen} {metric.in_words(logs) if metric.in_words else in_digits(value)}", metric.in_bar
    for name, value in logs.items():
        if part := PART.fullmatch(name):
            yield f"{part[1]} {part[2]} {in_digits(value)}", False


def of_sets(result: Perplexity, names: Sequence[str], set_D: np.ndarray) -> dict[str, float]:
    """Compute loss, perplexity and tokens of each held-out set, and the means over sets: of losses, and exp of that.
    `set_D`: which of `names` each document of the result is of.
    """
    metrics, losses = {}, []
    for number, name in enumerate(names):
        is_scored_D = (set_D == number) & (result.document_tokens > 0)
        sums_KU = np.stack([result.document_nats, result.document_tokens])[:, is_scored_D]
        nats, tokens = map(math.fsum, sums_KU)
        if not tokens:
            continue
        losses.append(nats / tokens)
        metrics |= {f"{name}_loss": losses[-1], f"{name}_perplexity": exp(losses[-1]), f"{name}_tokens": int(tokens)}
        low, high = ratio_interval(sums_KU, 1)
        if not math.isnan(low):  # a single document has no interval
            metrics |= {f"{name}_perplexity_low": exp(low), f"{name}_perplexity_high": exp(high)}
    if losses:
        mean = math.fsum(losses) / len(losses)
        metrics |= {"macro_loss": mean, "macro_perplexity": exp(mean)}
    return metrics
