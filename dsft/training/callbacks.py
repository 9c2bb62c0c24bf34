"""What a training shows and tells while it runs: metrics.jsonl, a line per log with the progress bar, the heartbeat."""

import contextlib
import json
import math
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

from tqdm.auto import tqdm
from transformers import PreTrainedConfig, TrainerCallback

from dsft.checkpoints.run_folder import METRICS
from dsft.errors import TrainingStopped
from dsft.models.size import COUNT_FROM_PADDING
from dsft.runtime.console import say
from dsft.watchdog import client as watchdog

LOGGED = {
    "loss": "loss",
    "weighted_loss": "weighted_loss",
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
IN_BAR = ("loss", "train_tokens_per_second", "tokens_per_second_per_gpu", "mfu", "peak_gpu_gib", "peak_host_gib")
BAR_COLUMNS = 40
"""Of the progress line, for what stands before the metrics."""

CLOSE_TO_UNIFORM = 0.01
"""A loss within this share of ln(vocabulary) is no better than uniform."""


MOST_SKIPPED, MOST_SKIPPED_IN_FP16 = 10, 30
"""Steps that may be left out in a row. In fp16 the first ones are, until the loss's scale fits: 16 from 65,536 to 1."""
LEAST_SCALE = "loss scale already at minimum"
"""What DeepSpeed says under ZeRO 1 to 3 before that (runtime/fp16/loss_scaler.py, DynamicLossScaler)."""


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
    """Warns where nothing is learnt: a gradient norm of 0, or a loss that stays at ln(vocabulary)."""

    def __init__(self, vocab_size: int):
        self.uniform_loss = math.log(vocab_size)
        self.vocab_size = vocab_size
        self.losses: list[float] = []
        self.warnings: list[str] = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs.get("grad_norm") == 0 and not self.warnings:
            self._warn(
                f"the gradient norm is 0 at step {state.global_step}: no gradient reaches the trained parameters."
                " Usual causes: weights that are all zero, frozen parameters, or rows whose answers are all cut off"
            )
        if "loss" in logs:
            self.losses.append(logs["loss"])

    def on_train_end(self, args, state, control, **kwargs):
        if len(self.losses) > 1 and all(abs(loss / self.uniform_loss - 1) < CLOSE_TO_UNIFORM for loss in self.losses):
            self._warn(
                f"the loss stays at {self.uniform_loss:.4g}, no better than uniform over {self.vocab_size} tokens:"
                " nothing is learnt. Usual causes: a learning rate too low, too few steps, or random weights where"
                " trained ones were meant"
            )

    def _warn(self, text: str) -> None:
        self.warnings.append(text)
        say(f"warning: {text}")


class SkippedSteps:
    """Counts the optimizer steps that DeepSpeed skips in silence: a gradient is infinite or NaN.

    Args:
        in_fp16: now and then that is no fault, but the search for the loss's scale.
    """

    def __init__(self, *, in_fp16: bool = False):
        self.number = self.in_a_row = 0
        self.in_fp16 = in_fp16

    def note(self, step: int, *, is_skipped: bool) -> None:
        """Note step number `step`; the same on all ranks.

        Raises:
            TrainingStopped: where too many steps in a row were skipped.
        """
        self.in_a_row = self.in_a_row + 1 if is_skipped else 0
        if not is_skipped:
            return
        self.number += 1
        if self.in_a_row == 1 and not self.in_fp16:
            say(f"warning: a gradient is infinite or NaN at step {step}: DeepSpeed skips this optimizer step")
        if self.in_a_row == (MOST_SKIPPED_IN_FP16 if self.in_fp16 else MOST_SKIPPED):
            raise self._stopped(step)

    @contextlib.contextmanager
    def least_scale_explained(self, step: int) -> Iterator[None]:
        """Turn DeepSpeed's own end, at the least scale of fp16, into a clear one."""
        try:
            yield
        except Exception as error:  # it raises no narrower one
            if LEAST_SCALE not in str(error):
                raise
            self.in_a_row += 1
            raise self._stopped(step) from error

    def _stopped(self, step: int) -> TrainingStopped:
        return TrainingStopped(
            f"a gradient was infinite or NaN in {self.in_a_row} steps in a row, up to step {step}: nothing is learnt"
            " any more. Usual causes: a learning rate too high, or broken weights in the model that training started"
            f" from{', or numbers beyond what float16 holds' if self.in_fp16 else ''}; checkpoints are untouched"
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
            try:
                with self.path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(entry) + "\n")
            except OSError as error:  # a full disk ends no training; the other ranks would wait for this one
                say(f"warning: {self.path} could not be written ({error.strerror}) at step {state.global_step}")


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
            metrics = {metric: f"{LOGGED[metric]} {_number(logs[metric])}" for metric in LOGGED if metric in logs}
            parts = [f"step {state.global_step:>6}", *metrics.values()]
            if self.bar is None:
                print("  ".join(parts) + self._time_left(state), flush=True)
                return
            self.bar.write(_fitting(parts, self.bar.ncols))
            if "loss" in logs:
                now = [metrics[metric] for metric in IN_BAR if metric in metrics]
                self.bar.set_postfix_str(_fitting(now, self.bar.ncols - BAR_COLUMNS))

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


def _fitting(parts: list[str], columns: int) -> str:
    """Join the first parts, as many as there is room for."""
    while len(text := "  ".join(parts)) > columns and parts:
        parts = parts[:-1]
    return text


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
