"""What a training measures, logs and checks: metrics from one collective for each optimizer step, which is read a step
later so that the host does not wait for the GPU; metrics.jsonl and the lines on the screen; whether anything is learnt,
and whether the plan was right.
"""

import contextlib
import dataclasses
import json
import math
import re
import shutil
import statistics
import sys
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import torch
from torch import nn
from tqdm.auto import tqdm
from transformers import EarlyStoppingCallback, PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from dsft.checkpoints.run_folder import METRICS as METRICS_FILE
from dsft.checkpoints.run_folder import SAMPLE, samples_in
from dsft.data.training_data import Prompt
from dsft.errors import TrainingStopped, Unsaved
from dsft.job import beat as watchdog
from dsft.models.tokenizer import generate
from dsft.perplexity.sums import Perplexity, exp, in_words, ratio_interval
from dsft.planner.choose import Plan
from dsft.planner.memory import FRAGMENTATION, peak_bytes
from dsft.planner.speed import CARDS, card_of, cards_named, flops_per_token
from dsft.runtime.console import say
from dsft.runtime.distributed import add_over_ranks, from_all, on_rank_0, rank, this_node, wait_long
from dsft.runtime.hardware import (
    gpu_utilization,
    has_gpu,
    peak_memory_bytes,
    peak_resident_bytes,
    reset_peaks,
)
from dsft.setup.decide import TrainingRun
from dsft.units import GiB, in_digits, plural, printable

Metrics = dict[str, float]
"""Figures of the log by name."""
MAX_NEW_TOKENS = 64
"""Of a sample, decoded greedily."""
ROUNDING = 1e-5
"""Relative error of fp32 sums of the loss; terms that models add to it are larger."""


@dataclass(frozen=True, kw_only=True)
class Compute:
    """The peak rates of a run, for MFU."""

    num_gpus: int
    """Of all nodes; 0 for CPU ranks, for which only the total speed is logged."""
    flops_per_token: float
    """Of training on full sequences, without recomputation."""
    peak_flops: float
    """Of one GPU by its data sheet, in the run's dtype; 0 if unknown."""
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
    """Sums over all ranks and micro batches, of one optimizer step or of those since the last log entry."""

    bad: float = 0.0
    """Number of losses that are NaN or infinite."""
    tokens: float = 0.0
    """Without padding."""
    trained: float = 0.0
    positions: float = 0.0
    """With padding."""
    weighted: float = 0.0
    """Nats of the trained tokens with label smoothing, or their losses by `compute_loss`, times their weights."""
    nats: float = 0.0
    """Of the trained tokens, without weights and smoothing."""
    objective: float = 0.0
    """The trained loss times the trained tokens: `weighted`, plus terms that the model adds."""
    asked: float = 0.0
    """Number of ranks that were asked to stop."""
    due: float = 0.0
    """Number of ranks for which a save is due."""


class Work:
    """Sums of the current step, of steps that were sent and not read yet, and of the next log entry so far."""

    def __init__(self, device: torch.device):
        # Counts are exact in float64.
        self._step_sums = torch.zeros(len(dataclasses.fields(Sums)), dtype=torch.float64, device=device)
        self.unread = deque()
        """Step, its sums on the host, and the event after which they are there."""
        self.begin_interval()

    def begin_interval(self) -> None:
        self.sums = Sums()
        """Of the steps that were read."""
        self.data_seconds = 0.0
        """This rank waited for batches."""
        self.begun = time.perf_counter()
        """When the interval began, moved later by the time of evaluations and saves."""

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude an evaluation or a save inside a `with` from the interval's time."""
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
        """Count a micro batch: the loss times the step's trained tokens, nats with and without weights, and the numbers
        of tokens without padding, of trained tokens, and of positions.
        """
        is_bad = ~objective.isfinite()
        self._step_sums[:7] += torch.cat([is_bad.view(1), num_tokens, nats, objective.view(1)])

    def send(self, step: int, *, asked: bool, due: bool) -> None:
        """Add up over all ranks what was counted since the last step. Collective."""
        self._step_sums[7] = asked
        self._step_sums[8] = due
        add_over_ranks(self._step_sums)
        on_host = self._step_sums.to("cpu", non_blocking=True, copy=True)  # pinned memory, if it comes from a GPU
        copied = torch.cuda.Event() if self._step_sums.is_cuda else None
        if copied:
            copied.record()
        self.unread.append((step, on_host, copied))
        self._step_sums.zero_()

    def read(self) -> tuple[int, Sums]:
        """Return the oldest unread step and its sums, added to the interval's; waits until the step's work is done."""
        step, on_host, copied = self.unread.popleft()
        if copied:
            copied.synchronize()
        sums = Sums(*on_host.tolist())
        for name, value in vars(sums).items():
            setattr(self.sums, name, getattr(self.sums, name) + value)
        return step, sums


def gather_peaks() -> Metrics:
    """Return the largest peak of memory of one rank so far. Collective."""
    return _peak_metrics(from_all([peak_memory_bytes()]))


def gather_metrics(work: Work, compute: Compute) -> Metrics:
    """Return the metrics of the steps since the last log entry, and peaks of memory. Collective."""
    ranks = from_all([(peak_memory_bytes(), work.data_seconds, gpu_utilization())])
    peaks, waits, utilizations = zip(*ranks, strict=True)
    metrics = _peak_metrics(peaks)
    if not work.sums.positions:
        return metrics
    seconds = time.perf_counter() - work.begun
    metrics |= step_metrics(work.sums, seconds, compute)
    metrics["data_wait_seconds"] = max(waits)
    metrics["data_wait_share"] = max(waits) / seconds
    if None not in utilizations:
        metrics["gpu_utilization"] = min(utilizations)
    return metrics


def _peak_metrics(ranks: Sequence[dict[str, int]]) -> Metrics:
    """Return `peak_gpu_gib` (with a GPU) and `peak_host_gib` from the ranks' peaks in bytes."""
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
    "num_input_tokens_seen": "tokens",
    "peak_gpu_gib": "peak_gpu_gib",
    "peak_host_gib": "peak_host_gib",
    "skipped_steps": "skipped_steps",
    "eval_tokens": "eval_tokens",
}
"""Metric -> its name on the screen, in the order of a line: a narrow terminal drops the last ones."""
PART = re.compile(r"eval_(.+)_(loss|perplexity)")
"""Metrics of one held-out set; `eval_macro_*` are means over sets."""


def step_metrics(sums: Sums, seconds: float, compute: Compute) -> Metrics:
    """Compute the metrics of steps that took `seconds`; without a loss if no token was trained."""
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


def on_screen(logs: Metrics) -> Iterator[tuple[str, str]]:
    """Yield label and text of the figures in a line on the screen."""
    for name, label in SCREEN.items():
        if name in logs:
            text = in_digits(logs[name])
            if name == "eval_perplexity" and "eval_perplexity_low" in logs:
                interval = in_words([logs["eval_perplexity_low"], logs["eval_perplexity_high"]])
                text = f"{text}, {interval}"
            yield label, text
    for name, value in logs.items():
        if part := PART.fullmatch(name):
            yield f"{part[1]} {part[2]}", in_digits(value)


def of_sets(result: Perplexity, names: Sequence[str], set_D: np.ndarray) -> Metrics:
    """Compute the metrics of each held-out set and their means. `set_D`: the number of each document's set."""
    metrics = {}
    losses = []
    for number, name in enumerate(names):
        is_scored_D = (set_D == number) & (result.document_tokens > 0)
        sums_KU = np.stack([result.document_nats, result.document_tokens])[:, is_scored_D]
        nats = math.fsum(sums_KU[0])
        tokens = math.fsum(sums_KU[1])
        if not tokens:
            continue
        loss = nats / tokens
        losses.append(loss)
        of_set = {"loss": loss, "perplexity": exp(loss), "tokens": int(tokens)}
        low, high = ratio_interval(sums_KU, 1)
        if not math.isnan(low):  # a single document has no interval
            of_set |= {"perplexity_low": exp(low), "perplexity_high": exp(high)}
        metrics |= {f"{name}_{key}": value for key, value in of_set.items()}
    if losses:
        mean = math.fsum(losses) / len(losses)
        metrics |= {"macro_loss": mean, "macro_perplexity": exp(mean)}
    return metrics


def answer_prompts(
    prompts: Sequence[Prompt], model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> dict[str, str]:
    """Return the prompts and rank 0's answers by their names in the log, on every rank. Collective."""
    samples = {}
    if not prompts:
        return samples
    was_training = model.training
    model.eval()
    prompt_name, answer_name = SAMPLE
    with gathered(model):
        for number, prompt in enumerate(prompts if rank() == 0 else [], start=1):
            watchdog.heartbeat()
            ids = generate(model, tokenizer, prompt.ids, max_new_tokens=MAX_NEW_TOKENS)
            samples[prompt_name.format(number)] = prompt.text
            samples[answer_name.format(number)] = tokenizer.decode(ids, skip_special_tokens=True)
    model.train(was_training)
    wait_long("samples are generated")
    return on_rank_0(lambda: samples)


@contextlib.contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """Gather all weights that ZeRO-3 shards on every rank inside a `with`, without DeepSpeed's hooks, which gather in
    step with the other ranks. Collective.
    """
    if not is_deepspeed_zero3_enabled():
        yield
        return
    modules = list(model.modules())
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        hooks = [(module._forward_pre_hooks, module._forward_hooks) for module in modules]
        for module in modules:
            module._forward_pre_hooks = OrderedDict()
            module._forward_hooks = OrderedDict()
        yield
        for module, (before, after) in zip(modules, hooks, strict=True):
            module._forward_pre_hooks = before
            module._forward_hooks = after


CLOSE_TO_UNIFORM = 0.01
"""A loss within this share of ln(vocabulary) is not better than uniform."""
MOST_SKIPPED = 10
MOST_SKIPPED_IN_FP16 = 17
"""Steps that may be skipped in a row. In fp16 the search for the loss scale skips steps: 17 from 65,536 to 1."""
PEAKS = ("peak_gpu_gib", "peak_host_gib")


class LearningCheck(TrainerCallback):
    """Warns if nothing is learnt: a gradient norm of 0, or a loss that stays at ln(vocabulary)."""

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size
        self.losses = []
        self.warnings = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs.get("grad_norm") == 0 and "loss" in logs and not self.warnings:
            self._warn(
                f"the gradient norm is 0 at step {state.global_step}: no gradient reaches the trained parameters."
                " Usual causes: weights that are all zero, frozen parameters, or rows whose answers are all cut off"
            )
        if "loss" in logs:
            self.losses.append(logs["loss"])

    def on_train_end(self, args, state, control, **kwargs):
        uniform = math.log(self.vocab_size)
        are_close = [abs(loss / uniform - 1) < CLOSE_TO_UNIFORM for loss in self.losses]
        if len(are_close) > 1 and all(are_close):
            self._warn(
                f"the loss stays at {uniform:.4g}, no better than uniform over {self.vocab_size} tokens: nothing is"
                " learnt. Usual causes: a learning rate too low, too few steps, or random weights instead of"
                " trained ones"
            )

    def _warn(self, warning: str) -> None:
        self.warnings.append(warning)
        say(f"warning: {warning}")


class SkippedSteps:
    """Counts the steps that DeepSpeed skips silently because a gradient is infinite or NaN; ends at `most` in a row."""

    def __init__(self, *, in_fp16: bool = False, most: int | None = None):
        self.number = self.in_a_row = 0
        self.in_fp16 = in_fp16
        self.most = most or (MOST_SKIPPED_IN_FP16 if in_fp16 else MOST_SKIPPED)

    def note(self, step: int, *, is_skipped: bool, at_least_scale: bool = False) -> None:
        """Note a step; the same on all ranks. `at_least_scale`: fp16's loss scale is at its minimum. Raises
        TrainingStopped.
        """
        self.in_a_row = self.in_a_row + 1 if is_skipped else 0
        self.number += is_skipped
        if is_skipped and self.in_a_row == 1 and not self.in_fp16:
            say(f"warning: a gradient is infinite or NaN at step {step}: DeepSpeed skips this optimizer step")
        if at_least_scale or self.in_a_row == self.most:
            raise TrainingStopped(
                f"a gradient was infinite or NaN in {self.in_a_row} steps in a row, up to step {step}: nothing is"
                " learnt any more. Usual causes: a learning rate too high, or broken weights in the model that training"
                f" started from{', or numbers beyond the range of float16' if self.in_fp16 else ''}; checkpoints are"
                " untouched"
            )


class EarlyStopping(EarlyStoppingCallback):
    """transformers', which reports that it ends the training, and whose count survives a resume."""

    def on_train_begin(self, args, state, control, **kwargs):
        """Continues the checkpoint's count, even if its patience has run out; transformers' starts from zero."""
        saved = state.stateful_callbacks.get(type(self).__name__, {})
        vars(self).update(saved.get("attributes", {}))
        self.resumed_at = state.global_step
        control.should_training_stop = self.early_stopping_patience_counter >= self.early_stopping_patience

    def on_evaluate(self, args, state, control, metrics, **kwargs):
        if 0 < state.global_step == self.resumed_at:  # eval_on_start: this step was counted before the checkpoint
            return
        was_stopping = control.should_training_stop
        super().on_evaluate(args, state, control, metrics, **kwargs)
        count = self.early_stopping_patience_counter
        if count >= self.early_stopping_patience and not was_stopping and state.global_step < state.max_steps:
            say(
                f"note: training ends early: {args.metric_for_best_model} was not better in the last"
                f" {plural(count, 'evaluation')}, up to step {state.global_step}, than {in_digits(state.best_metric)}"
            )


class MetricsFile(TrainerCallback):
    """Appends each log entry to metrics.jsonl; a resumed run continues the file. On rank 0."""

    def on_train_begin(self, args, state, control, **kwargs):
        self.path = Path(args.output_dir) / METRICS_FILE
        earlier = []
        if state.global_step and self.path.is_file():
            for line in self.path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True):
                with contextlib.suppress(ValueError, KeyError, TypeError):  # a truncated or foreign line
                    if line.endswith("\n") and json.loads(line)["step"] <= state.global_step:
                        earlier.append(line)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text("".join(earlier), encoding="utf-8")

    def on_log(self, args, state, control, logs=None, **kwargs):
        entry = {"step": state.global_step, "epoch": state.epoch} | logs
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")
        except OSError as error:
            raise Unsaved(f"{self.path} could not be written ({error.strerror})") from None


class ProgressLog(TrainerCallback):
    """Prints a line per log entry and per sample: above a terminal's progress bar, or with the time left. On rank 0."""

    def __init__(self):
        self.bar: tqdm | None = None
        self.peak = ""
        """As last printed."""

    def on_train_begin(self, args, state, control, **kwargs):
        self.begin = time.monotonic(), state.global_step
        if sys.stderr.isatty() and not args.disable_tqdm:
            steps = {"total": state.max_steps, "initial": state.global_step, "unit": "step"}
            self.bar = tqdm(desc="Training", dynamic_ncols=True, leave=False, **steps)

    def on_step_end(self, args, state, control, **kwargs):
        if self.bar is not None:
            self.bar.update(state.global_step - self.bar.n)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if not {"loss", "eval_loss"} & logs.keys():  # the totals
            return
        width = 9 if "loss" in logs else 0
        parts = [f"step {state.global_step:>6}"]
        for label, text in on_screen(logs):
            if label not in PEAKS:
                parts.append(f"{label} {text:<{width}}")
            elif self.peak != text:  # printed only when it changes
                parts.append(f"{label} {text}")
                self.peak = text
        samples = []
        for prompt, answer in samples_in(logs):
            prompt = " ".join(prompt.split())
            samples.append(printable(f"  {prompt[-60:]} => {' '.join(answer.split())}"))
        if self.bar is not None:
            while len("  ".join(parts)) > shutil.get_terminal_size().columns and len(parts) > 1:
                parts.pop()
            self.bar.write("\n".join(["  ".join(parts), *samples]))
            return
        start, first = self.begin
        done = state.global_step - first
        left = state.max_steps - state.global_step
        if done > 0 and left > 0:
            parts.append(f"left {timedelta(seconds=round((time.monotonic() - start) / done * left))}")
        print("\n".join(["  ".join(parts), *samples]), flush=True)

    def on_train_end(self, args, state, control, **kwargs):
        if self.bar is not None:
            self.bar.close()
            self.bar = None


HOST_MEMORY = "host memory of a node"
STEP_TIME = "time of a step"


class PlanCheck(TrainerCallback):
    """Compares the plan with measurements of the full training, at its end. Collective there.

    Peaks are those of the fullest GPU and node (resident memory of its ranks), with evaluations and saves, which the
    plan does not count. The first step, which compiles, and those after evaluations and saves are not timed.
    """

    def __init__(self, plan: Plan):
        self.plan = plan
        self.figures: dict[str, Metrics] = {}
        """Figure -> predicted, measured, and the error (predicted - measured) / measured."""
        self.step_seconds = []
        self.ended_at: float | None = None
        """When the step before ended; None if this one is not counted."""

    def on_train_begin(self, args, state, control, **kwargs):
        reset_peaks()

    def on_step_end(self, args, state, control, **kwargs):
        now = time.perf_counter()  # the GPU is at most one step behind, whose sums were read
        if self.ended_at is not None:
            self.step_seconds.append(now - self.ended_at)
        self.ended_at = now

    def on_evaluate(self, args, state, control, **kwargs):
        self.ended_at = None

    on_save = on_evaluate

    def on_train_end(self, args, state, control, **kwargs):
        plan = self.plan
        predicted = {HOST_MEMORY: plan.host_bytes}
        measured = {HOST_MEMORY: peak_resident_bytes()}
        if has_gpu():
            allocated = peak_bytes([term for term in plan.terms if term.phase != "outside"], "device")
            predicted["GPU memory allocated"] = allocated
            predicted["GPU memory reserved"] = int((1 + FRAGMENTATION) * allocated)
            measured["GPU memory allocated"] = torch.cuda.max_memory_allocated()
            measured["GPU memory reserved"] = torch.cuda.max_memory_reserved()
        if plan.has_time_estimate and self.step_seconds:
            predicted[STEP_TIME] = plan.step_seconds
            measured[STEP_TIME] = statistics.median(self.step_seconds)
        ranks = from_all([(this_node(), measured)])
        node_bytes = Counter()
        largest = {}
        for node, figures in ranks:
            node_bytes[node] += figures[HOST_MEMORY]
            for name, value in figures.items():
                largest[name] = max(value, largest.get(name, 0))
        largest[HOST_MEMORY] = max(node_bytes.values())
        shown = []
        for name, expected in predicted.items():
            actual = largest[name]
            error = expected / actual - 1
            self.figures[name] = {"predicted": expected, "measured": actual, "error": error}
            unit, scale = ("s", 1) if name == STEP_TIME else ("GiB", GiB)
            shown.append(f"{name} {actual / scale:.3g} {unit} (predicted {expected / scale:.3g}, {error:+.0%})")
        say(f"measured over the full training: {'; '.join(shown)}")
