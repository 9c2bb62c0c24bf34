"""What a training shows and tells while it runs: metrics.jsonl, one line per log with the progress bar, the heartbeat.

A new metric is a line of `gather_extra_metrics` or `derived_metrics`, and of LOGGED where the line of the log shows it.
"""

import json
import math
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from tqdm.auto import tqdm
from transformers import PreTrainedConfig, TrainerCallback

from dsft.checkpoints.run_folder import METRICS
from dsft.errors import TrainingStopped
from dsft.models.size import COUNT_FROM_PADDING
from dsft.perplexity.sums import exp
from dsft.planner.gpus import GPUS, gpu_name, named_gpus
from dsft.planner.step_time import flops_per_token
from dsft.run_setup.resolve import ResolvedRun
from dsft.runtime.console import say
from dsft.runtime.distributed import max_over_ranks
from dsft.runtime.hardware import peak_memory_bytes
from dsft.units import GiB
from dsft.watchdog import client as watchdog

LOGGED = {
    "loss": "loss",
    "learning_rate": "lr",
    "grad_norm": "grad_norm",
    "train_tokens_per_second": "tokens/s",
    "tokens_per_second_per_gpu": "per GPU",
    "mfu": "MFU",
    "eval_loss": "eval_loss",
    "eval_perplexity": "eval_perplexity",
    "eval_perplexity_low": "from",
    "eval_perplexity_high": "to",
    "peak_gpu_gib": "peak_gpu_gib",
    "peak_host_gib": "peak_host_gib",
    "num_input_tokens_seen": "tokens",
    "eval_tokens": "eval_tokens",
}
"""Metric of the log -> its name in the line, in the line's order: a narrow terminal leaves out the last. Other metrics
are in metrics.jsonl alone.
"""

BAR = "{desc} {n_fmt}/{total_fmt} |{bar}| {elapsed}<{remaining}{postfix}"
"""The progress line; its bar takes what the terminal's width leaves."""

AS_GOOD_AS_GUESSING = 0.01
"""A loss within this share of ln(vocabulary) is that of guessing."""


MOST_SKIPPED = 10
"""Steps that may be left out in a row in bf16. In fp16 the first ones are, until the loss's scale fits."""


def gather_extra_metrics() -> dict[str, float]:
    """Gather what each log entry holds beside the Trainer's own metrics: the largest peak memory of one rank so far.

    Collective.
    """
    return {
        f"peak_{name}_gib": round(max_over_ranks(num_bytes) / GiB, 3) for name, num_bytes in peak_memory_bytes().items()
    }


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


class Heartbeat(TrainerCallback):
    """Tells the watchdog of each step; the first one may take as long as loading, since it compiles and allocates."""

    def on_substep_end(self, args, state, control, **kwargs):
        watchdog.heartbeat(state.global_step)

    def on_step_end(self, args, state, control, **kwargs):
        watchdog.set_phase("training")
        watchdog.heartbeat(state.global_step)


class PositionsKept(TrainerCallback):
    """Keeps the padding token in the config of a model that counts positions from it, where the Trainer writes the
    tokenizer's (align_special_tokens): the saved model would count from another one than was trained.
    """

    def __init__(self, config: PreTrainedConfig):
        self.config, self.pad_token_id = config, getattr(config, "pad_token_id", None)

    def on_train_begin(self, args, state, control, **kwargs):
        if self.config.model_type in COUNT_FROM_PADDING:
            self.config.pad_token_id = self.pad_token_id


class LearningCheck(TrainerCallback):
    """Says where nothing is learnt: a gradient norm of 0, or a loss that stays at that of guessing, ln(vocabulary)."""

    def __init__(self, vocab_size: int):
        self.guessing = math.log(vocab_size)
        self.vocab_size = vocab_size
        self.losses: list[float] = []
        self.warnings: list[str] = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs.get("grad_norm") == 0 and not self.warnings:
            self._warn(
                f"the gradient norm is 0 at step {state.global_step}: this step teaches nothing. Usual causes: weights"
                " that are all zero, frozen parameters, or rows whose answers are all cut off"
            )
        if "loss" in logs:
            self.losses.append(logs["loss"])

    def on_train_end(self, args, state, control, **kwargs):
        if len(self.losses) > 1 and all(abs(loss / self.guessing - 1) < AS_GOOD_AS_GUESSING for loss in self.losses):
            self._warn(
                f"the loss stays at {self.guessing:.4g}, that of guessing among {self.vocab_size} tokens: nothing is"
                " learnt. Usual causes: a learning rate too low, too few steps, or random weights where trained ones"
                " were meant"
            )

    def _warn(self, text: str) -> None:
        self.warnings.append(text)
        say(f"warning: {text}")


class SkippedSteps:
    """Counts the optimizer steps that DeepSpeed leaves out in bf16 without a word: a gradient is infinite or NaN."""

    def __init__(self):
        self.number = self.in_a_row = 0

    def note(self, step: int, *, is_skipped: bool) -> None:
        """Note step number `step`; the same on all ranks.

        Raises:
            TrainingStopped: where MOST_SKIPPED steps in a row were left out.
        """
        self.in_a_row = self.in_a_row + 1 if is_skipped else 0
        if not is_skipped:
            return
        self.number += 1
        if self.in_a_row == 1:
            say(f"warning: a gradient is infinite or NaN at step {step}: DeepSpeed leaves this step out")
        if self.in_a_row == MOST_SKIPPED:
            raise TrainingStopped(
                f"a gradient was infinite or NaN in {MOST_SKIPPED} steps in a row, up to step {step}: nothing is learnt"
                " any more. Usual causes: a learning rate too high, or broken weights in the model that training"
                " started from; checkpoints are untouched"
            )


class MetricsFile(TrainerCallback):
    """Writes each log entry into metrics.jsonl as it comes, on rank 0; a run that resumes continues the file."""

    def on_train_begin(self, args, state, control, **kwargs):
        self.path = Path(args.output_dir) / METRICS if state.is_world_process_zero else None
        if self.path is None:
            return
        lines = self.path.read_text(encoding="utf-8").splitlines(keepends=True) if self.path.is_file() else []
        earlier = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= state.global_step]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text("".join(earlier) if state.global_step else "", encoding="utf-8")

    def on_log(self, args, state, control, logs=None, **kwargs):
        if self.path is not None:
            entry = {"step": state.global_step, "epoch": state.epoch} | logs
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")


class ProgressLog(TrainerCallback):
    """Shows one short line per log, on rank 0 only: above a progress line on a terminal, else with the time left."""

    def __init__(self):
        self.bar: tqdm | None = None

    def on_train_begin(self, args, state, control, **kwargs):
        self.begin = time.monotonic(), state.global_step
        if state.is_world_process_zero and not args.disable_tqdm and sys.stderr.isatty():
            steps = {"total": state.max_steps, "initial": state.global_step, "unit": "step"}
            self.bar = tqdm(desc="Training", dynamic_ncols=True, leave=False, bar_format=BAR, **steps)

    def on_step_end(self, args, state, control, **kwargs):
        if self.bar is not None:
            self.bar.update(state.global_step - self.bar.n)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero and {"loss", "eval_loss"} & logs.keys():  # not the sums of the end
            metrics = [f"{label} {_number(logs[metric])}" for metric, label in LOGGED.items() if metric in logs]
            parts = [f"step {state.global_step:>6}", *metrics]
            if self.bar is None:
                print("  ".join(parts) + self._time_left(state), flush=True)
            else:
                while len("  ".join(parts)) > self.bar.ncols:
                    parts.pop()
                self.bar.write("  ".join(parts))
                now = {metric: logs[metric] for metric in ("loss", "train_tokens_per_second") if metric in logs}
                if now:
                    text = "  ".join(f"{LOGGED[metric]} {_number(value)}" for metric, value in now.items())
                    self.bar.set_postfix_str(text)

    def _time_left(self, state) -> str:
        start, first = self.begin
        done, left = state.global_step - first, state.max_steps - state.global_step
        if done <= 0 or left <= 0:
            return ""
        return f"  left {timedelta(seconds=round((time.monotonic() - start) / done * left))}"

    def on_train_end(self, args, state, control, **kwargs):
        if self.bar is not None:
            self.bar.close()
            self.bar = None


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
