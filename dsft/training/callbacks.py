"""What a training writes and checks while it runs: metrics.jsonl, a line per log with the progress bar, and whether
anything is learnt.
"""

import json
import math
import sys
import time
from datetime import timedelta
from pathlib import Path

from tqdm.auto import tqdm
from transformers import EarlyStoppingCallback, TrainerCallback

from dsft.checkpoints.run_folder import METRICS as METRICS_FILE
from dsft.checkpoints.run_folder import samples_in
from dsft.errors import TrainingStopped
from dsft.runtime.console import say
from dsft.training.metrics import on_screen
from dsft.units import in_digits, plural

BAR = "{desc} {n_fmt}/{total_fmt} |{bar}| {elapsed}<{remaining}{postfix}"
"""The progress line; its bar takes what the terminal's width leaves."""
BAR_COLUMNS = 40
"""Of the progress line, for what stands before the metrics."""

SHOWN_PROMPT = 60
"""Characters of a sample's prompt on the screen, its last ones."""

CLOSE_TO_UNIFORM = 0.01
"""A loss within this share of ln(vocabulary) is no better than uniform."""

MOST_SKIPPED, MOST_SKIPPED_IN_FP16 = 10, 30
"""Steps that may be skipped in a row. In fp16 the first ones are, until the loss's scale fits: 16 from 65,536 to 1."""


class LearningCheck(TrainerCallback):
    """Warns where nothing is learnt: a gradient norm of 0, or a loss that stays at ln(vocabulary)."""

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size
        self.losses: list[float] = []
        self.warnings: list[str] = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs.get("grad_norm") == 0 and not self.warnings:
            self.warnings.append(
                f"the gradient norm is 0 at step {state.global_step}: no gradient reaches the trained parameters."
                " Usual causes: weights that are all zero, frozen parameters, or rows whose answers are all cut off"
            )
            say(f"warning: {self.warnings[-1]}")
        if "loss" in logs:
            self.losses.append(logs["loss"])

    def on_train_end(self, args, state, control, **kwargs):
        uniform = math.log(self.vocab_size)
        if len(self.losses) > 1 and all(abs(loss / uniform - 1) < CLOSE_TO_UNIFORM for loss in self.losses):
            self.warnings.append(
                f"the loss stays at {uniform:.4g}, no better than uniform over {self.vocab_size} tokens: nothing is"
                " learnt. Usual causes: a learning rate too low, too few steps, or random weights where trained ones"
                " were meant"
            )
            say(f"warning: {self.warnings[-1]}")


class SkippedSteps:
    """Counts the optimizer steps that DeepSpeed skips in silence: a gradient is infinite or NaN.

    Args:
        in_fp16: now and then that is no fault, but the search for the loss's scale.
        most: that may be skipped in a row.
    """

    def __init__(self, *, in_fp16: bool = False, most: int | None = None):
        self.number = self.in_a_row = 0
        self.in_fp16 = in_fp16
        self.most = most or (MOST_SKIPPED_IN_FP16 if in_fp16 else MOST_SKIPPED)

    def note(self, step: int, *, is_skipped: bool, at_least_scale: bool = False) -> None:
        """Note step number `step`; the same on all ranks.

        Args:
            at_least_scale: DeepSpeed ends training, since the loss's scale in fp16 can be no smaller.

        Raises:
            TrainingStopped: where too many steps in a row were skipped.
        """
        self.in_a_row = self.in_a_row + 1 if is_skipped else 0
        self.number += is_skipped
        if is_skipped and self.in_a_row == 1 and not self.in_fp16:
            say(f"warning: a gradient is infinite or NaN at step {step}: DeepSpeed skips this optimizer step")
        if at_least_scale or self.in_a_row == self.most:
            raise TrainingStopped(
                f"a gradient was infinite or NaN in {self.in_a_row} steps in a row, up to step {step}: nothing is"
                " learnt any more. Usual causes: a learning rate too high, or broken weights in the model that training"
                f" started from{', or numbers beyond what float16 holds' if self.in_fp16 else ''}; checkpoints are"
                " untouched"
            )


class EarlyStopping(EarlyStoppingCallback):
    """transformers', which reports that it ends the training; checkpoints keep its count."""

    stopped = ""
    """Why it did."""

    def on_train_begin(self, args, state, control, **kwargs):
        """Goes on counting where a checkpoint has stopped; transformers' own begins anew."""
        saved = state.stateful_callbacks.get(type(self).__name__, {}).get("attributes", {})
        vars(self).update(saved)

    def on_evaluate(self, args, state, control, metrics, **kwargs):
        super().on_evaluate(args, state, control, metrics, **kwargs)
        count, metric = self.early_stopping_patience_counter, args.metric_for_best_model
        if count >= self.early_stopping_patience and not self.stopped and state.global_step < state.max_steps:
            self.stopped = (
                f"{metric} was not better in the last {plural(count, 'evaluation')}, up to step {state.global_step},"
                f" than {in_digits(state.best_metric)}"
            )
            say(f"note: training ends early: {self.stopped}")


class MetricsFile(TrainerCallback):
    """Writes each log entry into metrics.jsonl as it comes, on rank 0; a run that resumes continues the file."""

    def on_train_begin(self, args, state, control, **kwargs):
        self.path = Path(args.output_dir) / METRICS_FILE if state.is_world_process_zero else None
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
    """Shows one short line per log, on rank 0 only: above a progress line on a terminal, else with the time left; and
    one for each sample.
    """

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
        if not state.is_world_process_zero or not {"loss", "eval_loss"} & logs.keys():  # the sums of the end
            return
        shown = [*on_screen(logs)]
        parts = [f"step {state.global_step:>6}", *(text for text, _ in shown)]
        samples = [[" ".join(text.split()) for text in sample] for sample in samples_in(logs)]
        samples = [f"  {prompt[-SHOWN_PROMPT:]} => {answer}" for prompt, answer in samples]
        if self.bar is not None:
            self.bar.write("\n".join([_fitting(parts, self.bar.ncols), *samples]))
            if "loss" in logs:
                in_bar = [text for text, is_in_bar in shown if is_in_bar]
                self.bar.set_postfix_str(_fitting(in_bar, self.bar.ncols - BAR_COLUMNS))
            return
        start, first = self.begin
        done, left = state.global_step - first, state.max_steps - state.global_step
        if done > 0 and left > 0:
            parts.append(f"left {timedelta(seconds=round((time.monotonic() - start) / done * left))}")
        print("\n".join(["  ".join(parts), *samples]), flush=True)

    def on_train_end(self, args, state, control, **kwargs):
        if self.bar is not None:
            self.bar.close()
            self.bar = None


def _fitting(parts: list[str], columns: int) -> str:
    """Join the first parts, as many as there is room for."""
    while len(text := "  ".join(parts)) > columns and parts:
        parts = parts[:-1]
    return text
