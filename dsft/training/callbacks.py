"""What a training writes and checks while it runs: metrics.jsonl, a line per log with the progress bar, whether
anything is learnt, and whether the plan was right.
"""

import contextlib
import json
import math
import shutil
import statistics
import sys
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path

import torch
from tqdm.auto import tqdm
from transformers import EarlyStoppingCallback, TrainerCallback

from dsft.checkpoints.run_folder import METRICS as METRICS_FILE
from dsft.checkpoints.run_folder import samples_in
from dsft.errors import TrainingStopped, Unsaved
from dsft.planner.choose import Plan
from dsft.planner.memory import FRAGMENTATION, peak_bytes
from dsft.runtime.console import say
from dsft.runtime.distributed import from_all, this_node
from dsft.runtime.hardware import children_bytes, has_gpu, peak_resident_bytes, reset_peaks
from dsft.training.metrics import on_screen
from dsft.units import GiB, in_digits, plural

CLOSE_TO_UNIFORM = 0.01
"""A loss within this share of ln(vocabulary) is no better than uniform."""
MOST_SKIPPED = 10
MOST_SKIPPED_IN_FP16 = 30
"""Steps that may be skipped in a row. In fp16 the first ones are, until the loss's scale fits: 16 from 65,536 to 1."""
PEAKS = ("peak_gpu_gib", "peak_host_gib")


class LearningCheck(TrainerCallback):
    """Warns where nothing is learnt: a gradient norm of 0, or a loss that stays at ln(vocabulary)."""

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size
        self.losses: list[float] = []
        self.warnings: list[str] = []

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
        if len(self.losses) > 1 and all(abs(loss / uniform - 1) < CLOSE_TO_UNIFORM for loss in self.losses):
            self._warn(
                f"the loss stays at {uniform:.4g}, no better than uniform over {self.vocab_size} tokens: nothing is"
                " learnt. Usual causes: a learning rate too low, too few steps, or random weights where trained ones"
                " were meant"
            )

    def _warn(self, warning: str) -> None:
        self.warnings.append(warning)
        say(f"warning: {warning}")


class SkippedSteps:
    """Counts the optimizer steps that DeepSpeed skips in silence: a gradient is infinite or NaN. In fp16 that is now
    and then no fault, but the search for the loss's scale. `most` may be skipped in a row.
    """

    def __init__(self, *, in_fp16: bool = False, most: int | None = None):
        self.number = self.in_a_row = 0
        self.in_fp16 = in_fp16
        self.most = most or (MOST_SKIPPED_IN_FP16 if in_fp16 else MOST_SKIPPED)

    def note(self, step: int, *, is_skipped: bool, at_least_scale: bool = False) -> None:
        """Note step number `step`; the same on all ranks. `at_least_scale`: fp16's loss scale can be no smaller.
        Raises TrainingStopped where too many steps in a row were skipped.
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
        """Goes on counting where a checkpoint has stopped, be it at the end of the patience; transformers' own begins
        again.
        """
        saved = state.stateful_callbacks.get(type(self).__name__, {}).get("attributes", {})
        vars(self).update(saved)
        self.resumed_at = state.global_step
        control.should_training_stop = self.early_stopping_patience_counter >= self.early_stopping_patience

    def on_evaluate(self, args, state, control, metrics, **kwargs):
        if 0 < state.global_step == self.resumed_at:  # eval_on_start; the step counted before the checkpoint
            return
        super().on_evaluate(args, state, control, metrics, **kwargs)
        count = self.early_stopping_patience_counter
        metric = args.metric_for_best_model
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
        earlier = []
        if state.global_step and self.path.is_file():
            for line in self.path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True):
                with contextlib.suppress(ValueError, KeyError, TypeError):  # a torn line, or one of another program
                    if line.endswith("\n") and json.loads(line)["step"] <= state.global_step:
                        earlier.append(line)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text("".join(earlier), encoding="utf-8")

    def on_log(self, args, state, control, logs=None, **kwargs):
        if self.path is not None:
            entry = {"step": state.global_step, "epoch": state.epoch} | logs
            try:
                with self.path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(entry) + "\n")
            except OSError as error:
                raise Unsaved(f"{self.path} could not be written ({error.strerror})") from None


class ProgressLog(TrainerCallback):
    """Shows a short line per log and one per sample on rank 0: above a terminal's progress line, or with time left."""

    def __init__(self):
        self.bar: tqdm | None = None
        self.peak = ""
        """As the last line that has one shows it."""

    def on_train_begin(self, args, state, control, **kwargs):
        self.begin = time.monotonic(), state.global_step
        if state.is_world_process_zero and not args.disable_tqdm and sys.stderr.isatty():
            steps = {"total": state.max_steps, "initial": state.global_step, "unit": "step"}
            self.bar = tqdm(desc="Training", dynamic_ncols=True, leave=False, **steps)

    def on_step_end(self, args, state, control, **kwargs):
        if self.bar is not None:
            self.bar.update(state.global_step - self.bar.n)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if not state.is_world_process_zero or not {"loss", "eval_loss"} & logs.keys():  # the sums of the end
            return
        width = 8 if "loss" in logs else 0
        parts = [f"step {state.global_step:>6}"]
        for text in on_screen(logs):
            name, _, value = text.partition(" ")
            if name not in PEAKS:  # in every line it would be the same number
                parts.append(f"{name} {value:<{width}}")
            elif self.peak != text:
                parts.append(text)
                self.peak = text
        samples = [[" ".join(text.split()) for text in sample] for sample in samples_in(logs)]
        samples = [f"  {prompt[-60:]} => {answer}" for prompt, answer in samples]
        if self.bar is not None:
            columns = shutil.get_terminal_size().columns
            self.bar.write("\n".join([_fitting(parts, columns), *samples]))
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


def _fitting(parts: list[str], columns: int) -> str:
    """Join the first parts, as many as there is room for."""
    while len(text := "  ".join(parts)) > columns and parts:
        parts = parts[:-1]
    return text


class PlanCheck(TrainerCallback):
    """Compares the plan with what was measured over the full training, at its end. Collective there.

    Peaks are those of the fullest GPU and node (RSS of all ranks, PSS of their children), without loading, but with
    evaluations and saves, which no plan counts. A step lasts from the end of the one before to its own; the first one,
    which compiles and allocates, and those after evaluations and saves do not count.
    """

    def __init__(self, plan: Plan):
        self.plan = plan
        self.figures: dict[str, dict[str, float]] = {}
        """Figure -> what was predicted and measured, and the error, (predicted - measured) / measured."""
        self.step_seconds: list[float] = []
        self.ended_at: float | None = None
        """When the step before ended; None if this one does not count."""

    def on_train_begin(self, args, state, control, **kwargs):
        reset_peaks()

    def on_step_end(self, args, state, control, **kwargs):
        now = time.perf_counter()  # a GPU is at most a step behind: its results are read then
        if self.ended_at is not None:
            self.step_seconds.append(now - self.ended_at)
        self.ended_at = now

    def on_evaluate(self, args, state, control, **kwargs):
        self.ended_at = None

    on_save = on_evaluate

    def on_train_end(self, args, state, control, **kwargs):
        plan = self.plan
        measured = {"seconds": statistics.median(self.step_seconds) if self.step_seconds else 0.0}
        if has_gpu():
            measured["allocated"] = torch.cuda.max_memory_allocated()
            measured["reserved"] = torch.cuda.max_memory_reserved()
        ranks = from_all([(this_node(), peak_resident_bytes() + children_bytes(), measured)])
        node_bytes: Counter[tuple[str, str]] = Counter()
        for node, host_bytes, _ in ranks:
            node_bytes[node] += host_bytes
        largest = {name: max(figures[name] for _, _, figures in ranks) for name in measured}
        rows = [("host memory of a node", plan.host_bytes, max(node_bytes.values()), "GiB")]
        if has_gpu():
            allocated = peak_bytes([term for term in plan.terms if term.phase != "outside"], "device")
            rows.append(("GPU memory allocated", allocated, largest["allocated"], "GiB"))
            rows.append(("GPU memory reserved", int((1 + FRAGMENTATION) * allocated), largest["reserved"], "GiB"))
        if plan.has_time_estimate and largest["seconds"]:
            rows.append(("time of a step", plan.step_seconds, largest["seconds"], "s"))
        shown = []
        for name, predicted, actual, unit in rows:
            error = predicted / actual - 1
            self.figures[name] = {"predicted": predicted, "measured": actual, "error": error}
            scale = GiB if unit == "GiB" else 1
            shown.append(f"{name} {actual / scale:.3g} {unit} (predicted {predicted / scale:.3g}, {error:+.0%})")
        say(f"measured over the full training: {'; '.join(shown)}")
