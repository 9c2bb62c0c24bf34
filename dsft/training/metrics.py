"""The metrics of a training's log, and what they are computed from: one collective for each optimizer step, which is
read a step later, so that the host waits for no work that a GPU is still at, and one more at each line of the log.

A new metric is one value of METRICS: how it is computed, how the screen shows it, and how the report draws it.
"""

import contextlib
import dataclasses
import functools
import math
import operator
import re
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from dsft.models.size import num_experts_of
from dsft.models.trained import unwrapped
from dsft.perplexity.sums import Perplexity, exp, in_words, ratio_interval
from dsft.planner.speed import CARDS, card_of, cards_named, flops_per_token
from dsft.run_setup.resolve import TrainingRun
from dsft.runtime.console import say
from dsft.runtime.distributed import add_over_ranks, device, from_all
from dsft.runtime.hardware import gpu_utilization, has_gpu, peak_memory_bytes
from dsft.units import GiB, in_digits

ROUNDING = 1e-5
"""Of sums of the loss in fp32: what models add to theirs is more."""
SLOW, SLOW_SHARE = 3.0, 0.2
"""A rank is slow whose own work takes this many times as long as the fastest rank's, and, where it is work of the
training, this share of the interval longer.
"""

MOST_DATA_WAIT, MOST_NETWORK = 0.2, 0.5
"""Shares of the time from which a training is bound by it."""
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
    writing: float = 0.0
    """Ranks that still write a checkpoint in the background."""


@dataclass(kw_only=True)
class RankTimes:
    """What one rank did by itself since the last line of the log, in seconds."""

    host: str
    data: float = 0.0
    """It waited for batches."""
    forward: float = 0.0
    """Its forward passes took. In ZeRO stages 0 to 2 a rank waits for no other before their end, in ZeRO-3 it does."""
    network: float = 0.0
    """It was in collectives: the slowest rank the least, since the others wait for it there. On a GPU this counts also
    where computation goes on beside them."""
    gpu: float | None = None
    """Share of the last moments in which its GPU was at work (NVML), where nvidia-ml-py is installed."""
    product: float = 0.0
    """A product of matrices took that each rank computes alone, now: of a throttled device it takes long."""


@dataclass(kw_only=True)
class Line:
    """What the metrics of one line of the log are computed from."""

    peak_gib: dict[str, float] = dataclasses.field(default_factory=dict)
    """"gpu" (where there is one) and "host" -> the largest peak of one rank so far."""
    sums: Sums | None = None
    """Since the last line; None where the line is of an evaluation, or of the end."""
    seconds: float = 0.0
    """That the steps of `sums` took, without evaluations and saves."""
    ranks: tuple[RankTimes, ...] = ()
    by_source: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros((2, 0)))
    """[2, number of sources], trained tokens and nats since the last line."""
    by_expert: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros((0, 0)))
    """[R, E] tokens of each expert of each router since the last line."""
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

    def __init__(self, device: torch.device, num_sources: int = 0, routers: Sequence[nn.Module] = (), experts: int = 0):
        """
        Args:
            num_sources: whose nats are counted apart; 0 where there is one.
            routers: modules that send tokens to `experts` each, counted while these train.
        """
        self._loads_shape = len(routers), experts + 1
        self._sizes = len(dataclasses.fields(Sums)), 2 * num_sources, math.prod(self._loads_shape)
        self._counted = torch.zeros(sum(self._sizes), dtype=torch.float64, device=device)  # counts too are exact
        self._sums, self._sources, loads = self._counted.split(self._sizes)
        # [R, E + 1] tokens that each router has sent to each of its experts, padding included, and to what is none, as
        # the identity.
        for router, loads_E in zip(routers, loads.view(self._loads_shape), strict=True):
            router.register_forward_hook(functools.partial(_count_loads, loads_E))
        self._passes: list[tuple[Any, Any]] = []
        self.collectives: list[tuple[Any, Any]] = []
        """Marks around what this rank has spent in them."""
        self.unread: deque[tuple[int, torch.Tensor, Any, list[tuple[Any, Any]]]] = deque()
        """Step, its sums on the host, when they are there, and the marks around this rank's forward passes."""
        self.begin_interval()

    def begin_interval(self) -> None:
        """Start from 0 after a line of the log."""
        routers, kinds = self._loads_shape
        by_source, by_expert = np.zeros((2, self._sizes[1] // 2)), np.zeros((routers, kinds - 1))
        self.line = Line(sums=Sums(), by_source=by_source, by_expert=by_expert)
        self.times = RankTimes(host=socket.gethostname())
        self.compiled_seconds = 0.0
        """This rank compiled, in forward passes or elsewhere."""
        self.begun = time.perf_counter()
        """When it began, put off by what is none of its steps' time."""

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave an evaluation or a save inside a `with` out of the interval's time, and its collectives too."""
        start, begun, before = time.perf_counter(), self.begun, len(self.collectives)
        yield
        self.begun = begun + time.perf_counter() - start  # also what was compiled in it, once
        del self.collectives[before:]

    def leave_out(self, seconds: float) -> None:
        """Leave what was compiled out of the interval's time."""
        self.begun += seconds
        self.compiled_seconds += seconds

    def timed(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield batches, and count the seconds until each is there."""
        while True:
            start = time.perf_counter()
            batch = next(batches, None)
            self.times.data += time.perf_counter() - start
            if batch is None:
                return
            yield batch

    def count(
        self, objective: torch.Tensor, nats: torch.Tensor, num_tokens: torch.Tensor, *, started: Any, done: Any
    ) -> None:
        """Count a micro batch.

        Args:
            nats: with and without weights, then of each source.
            num_tokens: without padding, trained tokens, and positions; then trained tokens of each source.
            started, done: marks around its forward pass.
        """
        self._sums[:7] += torch.cat([(~objective.isfinite()).view(1), num_tokens[:3], nats[:2], objective.view(1)])
        self._sources += torch.cat([num_tokens[3:], nats[2:]])
        self._passes.append((started, done))

    def add_over_ranks(self, values: torch.Tensor) -> None:
        """The same of `runtime/distributed.py`, timed. Collective."""
        started = mark()
        add_over_ranks(values)
        self.collectives.append((started, mark()))

    def send(self, step: int, *, asked: bool, due: bool, writing: bool = False) -> None:
        """Add up over all ranks what was counted since the last step. Collective."""
        self._sums[7], self._sums[8], self._sums[9] = asked, due, writing
        self.add_over_ranks(self._counted)
        on_host = self._counted.to("cpu", non_blocking=True, copy=True)  # pinned memory, where it comes from a GPU
        copied = torch.cuda.Event() if self._counted.is_cuda else None
        if copied:
            copied.record()
        self.unread.append((step, on_host, copied, self._passes))
        self._passes = []
        self._counted.zero_()

    def read(self) -> tuple[int, Sums, np.ndarray]:
        """(the oldest step that was sent, its sums, [2, sources] trained tokens and nats), added to the interval's;
        waits until the step's work is done.
        """
        step, on_host, copied, passes = self.unread.popleft()
        if copied:
            copied.synchronize()
        sums, by_source, loads = on_host.split(self._sizes)
        sums, by_source = Sums(*sums.tolist()), by_source.numpy().reshape(2, -1)
        self.line.by_source += by_source
        self.line.by_expert += loads.numpy().reshape(self._loads_shape)[:, :-1]
        self.line.sums = Sums(*map(operator.add, dataclasses.astuple(self.line.sums), dataclasses.astuple(sums)))
        self.times.forward += sum(seconds_between(start, end) for start, end in passes)
        # On a GPU those of other streams may not be done; they are read with a later step.
        pending = []
        for start, end in self.collectives:
            if isinstance(end, float) or end.query():
                self.times.network += seconds_between(start, end)
            else:
                pending.append((start, end))
        self.collectives = pending
        return step, sums, by_source


def routers_of(model: nn.Module) -> tuple[list[nn.Module], int]:
    """The modules that send tokens to experts, and to how many each, where transformers names their class and the
    config the number; else none.
    """
    inner = unwrapped(model)
    recorder = (getattr(type(inner), "_can_record_outputs", None) or {}).get("router_logits")
    kind = getattr(recorder, "target_class", recorder)  # a list of recorders in JetMoe, whose router sorts tokens
    experts = num_experts_of(inner.config.get_text_config())
    if not isinstance(kind, type) or not isinstance(experts, int):
        return [], 0
    return [module for module in model.modules() if isinstance(module, kind)], experts


def _count_loads(loads_E: torch.Tensor, router: nn.Module, _: Any, output: Any) -> None:
    """Add the tokens of each expert to `loads_E` while the router trains."""
    parts = output if isinstance(output, tuple) else ()
    chosen = [each for each in parts if isinstance(each, torch.Tensor) and each.dtype == torch.int64]
    if router.training and chosen:
        experts_N = chosen[0].reshape(-1).clamp(max=len(loads_E) - 1)
        loads_E.scatter_add_(0, experts_N, torch.ones_like(experts_N, dtype=loads_E.dtype))


class TimedCollectives:
    """DeepSpeed's backend of collectives, or the handle of an asynchronous one, with marks around what a rank spends in
    each call.
    """

    TIMED = re.compile("all_|reduce|broadcast|barrier|scatter|gather|send|recv|wait")

    def __init__(self, inner: Any, work: Work):
        self._inner, self._work = inner, work

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._inner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            started = mark()
            result = function(*args, **kwargs)
            self._work.collectives.append((started, mark()))
            return result if isinstance(result, torch.Tensor | int | None) else TimedCollectives(result, self._work)

        return timed if self.TIMED.match(name) else function


def mark() -> Any:
    """Mark the time in a rank's work; on a GPU, whose work is done later than it is asked for, without waiting."""
    if not has_gpu():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(start: Any, end: Any) -> float:
    """Of two marks whose work is done."""
    return end - start if isinstance(start, float) else start.elapsed_time(end) / 1000


class Bottlenecks:
    """Reports what holds a training up: a rank that is much slower than the others, waiting for data, the network. Each
    once, and only what two lines of the log in a row show: once alone is chance.
    `waits_in_forward`: ranks wait for each other in forward passes, as in ZeRO-3.
    """

    def __init__(self, *, waits_in_forward: bool):
        self.waits_in_forward = waits_in_forward
        self._before: set[Any] = set()
        self._reported: set[Any] = set()

    def note(self, logs: dict[str, float], ranks: Sequence[RankTimes], *, interval: float) -> None:
        """Note a line of the log, and the times of all ranks over its `interval` seconds."""
        seen: dict[Any, str] = {}
        least = SLOW_SHARE * interval
        kinds = [("reading its data", [rank.data for rank in ranks], least)]
        if not self.waits_in_forward:
            kinds.append(("forward passes", [rank.forward for rank in ranks], least))
        kinds.append(("a product of matrices that each rank computes alone", [rank.product for rank in ranks], 0.0))
        for work, seconds, least in kinds:
            slowest, fastest = max(seconds), min(seconds)
            if slowest - fastest > least and slowest > SLOW * fastest:
                rank = seconds.index(slowest)
                seen[rank, work] = (
                    f"warning: rank {rank} on {ranks[rank].host} holds up the others: {work} took it {slowest:.3g} s,"
                    f" the fastest rank {fastest:.3g} s. Look there for other programs, a GPU that is hot or throttled,"
                    " and a slow disk"
                )
                break
        data, network = logs.get("data_wait_share", 0), logs.get("network_share", 0)
        is_long = interval > LEAST_INTERVAL
        if is_long and data > MOST_DATA_WAIT:
            slowest = max(ranks, key=lambda rank: rank.data).host
            seen["data"] = (
                f"note: waiting for data: {data:.0%} of the time (longest on {slowest}); raise dataloader_num_workers,"
                " or prepare the data on a faster disk (data_cache)"
            )
        elif is_long and network > MOST_NETWORK:
            seen["network"] = (
                f"note: the network: {network:.0%} of the time; more accumulation, a lower ZeRO stage or hpZ send less;"
                " dsft doctor measures the links"
            )
        for cause, message in seen.items():
            if cause in self._before - self._reported:
                say(message)
        self._reported |= seen.keys() & self._before
        self._before = {*seen}


def gather(work: Work | None = None) -> Line:
    """Gather peaks of memory and, of `work`, sums and what ranks waited for. Collective."""
    mine = None
    if work is not None:
        # A product of small matrices, a millisecond or less, shows a throttled device: the least of five counts.
        width, products = 1024 if has_gpu() else 256, []
        matrix = torch.ones(width, width, device=device())
        for _ in range(5):
            start = mark()
            matrix @ matrix
            end = mark()
            if not isinstance(end, float):
                end.synchronize()
            products.append(seconds_between(start, end))
        mine = dataclasses.replace(work.times, gpu=gpu_utilization(), product=min(products))
    peaks, ranks = zip(*from_all([(peak_memory_bytes(), mine)]), strict=True)
    peak_gib = {name: round(max(peak[name] for peak in peaks) / GiB, 3) for name in peaks[0]}
    if work is None or not work.line.sums.positions:
        return Line(peak_gib=peak_gib)
    return dataclasses.replace(work.line, peak_gib=peak_gib, seconds=time.perf_counter() - work.begun, ranks=ranks)


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
    Metric(
        "expert_load",
        lambda line: float((line.by_expert.max(1) / line.by_expert.mean(1)).mean()) if line.by_expert.any() else None,
    ),
    Metric("unused_experts", lambda line: int((line.by_expert == 0).sum()) if line.by_expert.any() else None),
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
    Metric(
        "data_wait_seconds",
        lambda line: max((rank.data for rank in line.ranks), default=None),
    ),
    Metric(
        "data_wait_share",
        lambda line: max(rank.data for rank in line.ranks) / line.seconds if line.ranks else None,
    ),
    Metric(
        "network_share",
        lambda line: min(1.0, min(rank.network for rank in line.ranks) / line.seconds) if len(line.ranks) > 1 else None,
    ),
    Metric(
        "gpu_utilization", lambda line: min((rank.gpu for rank in line.ranks if rank.gpu is not None), default=None)
    ),
    Metric(
        "rank_skew",
        lambda line: (
            max(seconds := [rank.data + rank.forward for rank in line.ranks]) / min(seconds)
            if len(line.ranks) > 1
            else None
        ),
    ),
    Metric(
        "slowest_rank",
        lambda line: (
            (waits := [rank.network for rank in line.ranks]).index(min(waits)) if len(line.ranks) > 1 else None
        ),
    ),
    Metric("save_seconds", lambda line: line.save_seconds),
)
"""In the order of the screen's line, of which a narrow terminal leaves out the last, and so that each is computed after
those that it is made of. The report draws loss and perplexity by itself, with what evaluations measured.
"""


PART = re.compile(r"(source|eval)_(.+)_(loss|perplexity|tokens)")
"""Metrics of one source of what is trained, or of one set of what is held out; `eval_macro_*` are means over sets."""


def complete(line: Line, sources: Sequence[str] = ()) -> dict[str, float]:
    """Compute every metric of a line, beside what the Trainer logs; `sources` are the names of `line.by_source`."""
    logs = line.logs
    if line.sums and not line.sums.trained:  # the Trainer's is 0, and no loss
        logs.pop("loss", None)
    for metric in METRICS:
        if metric.of and (value := metric.of(line)) is not None:
            logs[metric.name] = value
    for source, tokens, nats in zip(sources, *line.by_source.tolist(), strict=False):
        logs[f"source_{source}_tokens"] = int(tokens)
        if tokens and not math.isnan(nats):
            logs[f"source_{source}_loss"] = nats / tokens
    return logs


def on_screen(logs: dict[str, float]) -> Iterator[tuple[str, bool]]:
    """Yield what a line of the log shows, part by part, and whether the moving line shows it too."""
    for metric in METRICS:
        if metric.on_screen and (value := logs.get(metric.name)) is not None:
            yield f"{metric.on_screen} {metric.in_words(logs) if metric.in_words else in_digits(value)}", metric.in_bar
    for name, value in logs.items():
        if (part := PART.fullmatch(name)) and part[3] != "tokens":
            yield f"{part[2]} {part[3]} {in_digits(value)}", False


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
