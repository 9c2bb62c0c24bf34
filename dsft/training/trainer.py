"""`transformers.Trainer` with what dsft adds: exact evaluation, peak memory in the log, a stop at NaN, verified saves.

No training loop here: the Trainer's own runs.
"""

import dataclasses
import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase, TrainingArguments
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.trainer_callback import PrinterCallback, ProgressCallback, TrainerCallback
from transformers.trainer_utils import TrainOutput, speed_metrics

from dsft.checkpoints.kept_weights import LeftOut
from dsft.checkpoints.manifest import checkpoints
from dsft.config.options import shuffle_seed
from dsft.data.batches import EpochSampler, LengthGrouping, PaddedToFullSteps, Stream
from dsft.data.sequences import Sequences
from dsft.data.training_data import TrainingData
from dsft.errors import TrainingStopped
from dsft.perplexity.intervals import result_intervals
from dsft.perplexity.scoring import evaluate_windows
from dsft.perplexity.windows import windows_of_sequences
from dsft.planner.plans import Plan
from dsft.run_setup.checkpoint_size import CheckpointSize
from dsft.runtime import distributed, patches, preemption
from dsft.training.callbacks import (
    Heartbeat,
    LearningCheck,
    MetricsFile,
    PositionsKept,
    ProgressLog,
    SkippedSteps,
)
from dsft.training.loss import TokenLoss
from dsft.training.metrics import Compute, SlowRanks, Work, derived_metrics, gather_metrics, mark
from dsft.training.plan_check import PlanCheck
from dsft.training.saving_trainer import SavingTrainer, averaged_weights
from dsft.training.step_reports import StepReport, StepReports
from dsft.units import Batch, padded_width
from dsft.watchdog import client as watchdog

ORDERS = {LengthGrouping.ACROSS_STEPS: "steps of like length", LengthGrouping.IN_ORDER: "as it stands in the data"}
"""Groupings that give steps other items than a drawn order does -> words for the run's identity."""


class PerplexityTrainer(SavingTrainer):
    """Trains on `TrainingData.items`; evaluates with `perplexity/scoring.py` instead of a mean of batch means."""

    loss_is_scaled_for_ga = True  # `compute_loss` divides by the tokens of all micro batches

    def __init__(
        self,
        model: nn.Module,
        args: TrainingArguments,
        *,
        tokenizer: PreTrainedTokenizerBase,
        data: TrainingData,
        plan: Plan,
        compute: Compute,
        disk: CheckpointSize,
        save_minutes: float | None = None,
        left_out: LeftOut | None = None,
        frozen_weights: str | None = None,
    ):
        per_step = Batch(args.per_device_train_batch_size, args.gradient_accumulation_steps, args.world_size).sequences
        super().__init__(
            model=model,
            args=args,
            train_dataset=data.items if isinstance(data.items, Stream) else PaddedToFullSteps(data.items, per_step),
            eval_dataset=data.held_out,
            processing_class=tokenizer,
            data_collator=data.collator,
            save_minutes=save_minutes,
            disk=disk,
            left_out=left_out,
            frozen_weights=frozen_weights,
            data_identity=data.items.identity | {"order of data": ORDERS.get(data.grouping, "drawn at random")},
        )
        self.grouping = data.grouping
        self.token_loss = TokenLoss(model, label_smoothing=args.label_smoothing_factor)
        for printer in (PrinterCallback, ProgressCallback):
            self.remove_callback(printer)
        for callback in (ProgressLog, MetricsFile, Heartbeat):
            self.add_callback(callback)
        self.learning = LearningCheck(model.config.get_text_config().vocab_size)
        self.add_callback(self.learning)
        self.add_callback(PositionsKept(model.config.get_text_config()))
        self.skipped_steps = SkippedSteps(in_fp16=self.args.fp16)
        self.is_stopping = False
        self.extra_metrics: dict[str, float] = {}
        self.work = Work()
        self.slow_ranks = SlowRanks(waits_in_forward=is_deepspeed_zero3_enabled())
        self.compute = compute
        self.plan_check = PlanCheck(plan)
        self.add_callback(self.plan_check)
        self.callback_handler.callbacks.insert(0, LastEvaluation(self))  # trackers close after it
        self.reports = StepReports(args.device)

    @property
    def totals(self) -> dict[str, int]:
        """Counts over the full training. The Trainer's state keeps them, so that checkpoints do."""
        return self.state.stateful_callbacks.setdefault("dsft", {"trained_tokens": 0, "nats": 0.0})

    @property
    def train_loss(self) -> float:
        """Mean nats per trained token over the full training, also of what came before a checkpoint."""
        return self.totals["nats"] / max(1, self.totals["trained_tokens"])

    def _get_train_sampler(self, train_dataset: PaddedToFullSteps | None = None) -> torch.utils.data.Sampler | None:
        """The same order on any number of ranks."""
        data = train_dataset if train_dataset is not None else self.train_dataset
        return EpochSampler(
            data,
            seed=shuffle_seed(self.args.data_seed, self.args.seed),
            step=lambda: self.state.global_step,
            drop_last=self.args.dataloader_drop_last,
            grouping=self.grouping,
        )

    def evaluate(
        self,
        eval_dataset: Sequences | None = None,
        ignore_keys: Sequence[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Measures perplexity over all tokens of the held-out data, whatever the batch size and number of ranks.
        Collective.
        """
        start = time.perf_counter()
        windows = windows_of_sequences(self.eval_dataset if eval_dataset is None else eval_dataset)
        with watchdog.phase("evaluating"), averaged_weights(self.model_wrapped):
            result = evaluate_windows(
                self.model,
                windows,
                pad_token_id=self.processing_class.pad_token_id,
                device=self.args.device,
                collective_forward=is_deepspeed_zero3_enabled(),
                batch_tokens=self.args.per_device_eval_batch_size * padded_width(windows.lengths.max()),
                progress=self.is_world_process_zero() and not self.args.disable_tqdm,
            )
        low, high = result_intervals(result).perplexity
        bounds = {f"{metric_key_prefix}_perplexity_low": low, f"{metric_key_prefix}_perplexity_high": high}
        if math.isnan(low):  # of one window there is no interval
            bounds = {}
        metrics = {
            f"{metric_key_prefix}_loss": result.loss,
            f"{metric_key_prefix}_perplexity": result.perplexity,
            **bounds,
            f"{metric_key_prefix}_tokens": result.tokens,
            f"{metric_key_prefix}_runtime": time.perf_counter() - start,
        }
        self.extra_metrics = gather_metrics()
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def get_batch_samples(self, epoch_iterator: Iterator[Any], *args: Any, **kwargs: Any) -> tuple[list, Any]:
        """The Trainer's, timed."""
        return super().get_batch_samples(self.work.timed(epoch_iterator), *args, **kwargs)

    def _prepare_input(self, data: Any) -> Any:
        """Leaves weights of tokens in fp32: the Trainer's casts all that is no integer to the engine's dtype."""
        return data.to(self.args.device) if isinstance(data, torch.Tensor) else super()._prepare_input(data)

    def _get_num_items_in_batch(self, batch_samples: list[dict[str, torch.Tensor]], device: torch.device) -> Any:
        """Count the tokens without padding and the trained tokens of an optimizer step, [2]. Collective."""
        counts = sum(batch["num_tokens"][:2].to(device) for batch in batch_samples)
        if batch_samples:
            distributed.add_over_ranks(counts)
        return counts

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, torch.Tensor],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Computes a micro batch's part of the step's loss (loss.py), timed and counted for the step's report."""
        num_tokens, start = inputs.pop("num_tokens"), mark()
        search = _sequence_numbers if "position_ids" in inputs else lambda position_ids: None
        with patches.replaced("positions_on_gpu", lambda _: search):
            loss, nats = self.token_loss(model, inputs, num_tokens[:2], num_items_in_batch)
        self.work.note_forward(start, mark())
        self.reports.add(loss.detach() * num_items_in_batch[1], nats, num_tokens)
        return loss * self.args.world_size  # DeepSpeed divides gradients by the number of ranks

    def training_step(
        self, model: nn.Module, inputs: dict[str, torch.Tensor], num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """The Trainer's step; after an optimizer step every rank tells the others how many tokens it had, whether its
        loss is NaN or infinite and whether it was asked to stop. Micro batches in between are not waited for.
        """
        skipped = self.model_wrapped.skipped_steps
        with self.skipped_steps.least_scale_explained(self.state.global_step + 1):
            loss = super().training_step(model, inputs, num_items_in_batch)
        if self.accelerator.sync_gradients:  # the same on all ranks
            step = self.state.global_step + 1
            due = self.is_save_due() and self.is_world_process_zero()  # one clock counts
            self.reports.send(step, asked=preemption.is_asked(), due=due, passes=self.work.take_passes())
            self.skipped_steps.note(step, is_skipped=self.model_wrapped.skipped_steps > skipped)
        return loss

    def _read_reports(self) -> None:
        """Read what was told of the step before; of this step too, where something that is due needs it. All ranks
        read the same at the same step, so all stop together.
        """
        control = self.control
        while self.reports and (
            len(self.reports) > 1
            or control.should_log
            or control.should_evaluate
            or control.should_save
            or control.should_training_stop
        ):
            self._take_in(self.reports.read())

    def _take_in(self, report: StepReport) -> None:
        if report.bad:
            saved = checkpoints(self.args.output_dir)
            kept = f"the last checkpoint, {saved[-1]}, is untouched" if saved else "nothing had been saved yet"
            raise TrainingStopped(
                f"the loss is NaN or infinite at step {report.step}; {kept}. Usual causes: a learning rate too high"
                f" (here {self.args.learning_rate}), fp16 where bf16 is needed, or broken weights in the model that"
                " training started from"
            )
        if self.args.include_num_input_tokens_seen == "non_padding":
            self.state.num_input_tokens_seen += report.tokens
        self.totals["trained_tokens"] += report.trained
        self.totals["nats"] += report.nats
        self.work.note_step(report)
        if report.due:
            self.control.should_save = True
        if report.asked and self.state.global_step < self.state.max_steps:  # else training ends anyhow
            self.is_stopping = self.control.should_save = self.control.should_training_stop = True

    def _clip_grad_norm(self, model: nn.Module) -> None:
        """Leaves clipping to DeepSpeed, which has done it. The Trainer's and accelerate's wait for the norm here."""

    def _get_grad_norm(self, model: nn.Module, grad_norm: None = None) -> torch.Tensor | float | None:
        """Leaves the norm on the GPU until the log reads it."""
        return self.model_wrapped.get_global_grad_norm()

    def floating_point_ops(self, inputs: dict[str, torch.Tensor]) -> float:
        """The Trainer's own goes through all parameters for each micro batch, and ZeRO-3's are empty."""
        return inputs["input_ids"].numel() * self.compute.flops_per_token

    def _track_num_input_tokens(self, inputs: dict[str, torch.Tensor]) -> None:
        """Leaves tokens without padding to `training_step`: the Trainer's own count is a collective for each micro
        batch, and takes end tokens for padding in rows without a mask.
        """
        if self.args.include_num_input_tokens_seen != "non_padding":
            super()._track_num_input_tokens(inputs)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """The Trainer's, after every step; `should_log` is the same on all ranks. Collective."""
        self._read_reports()
        if self.control.should_log:
            self.extra_metrics = gather_metrics(self.work, self.slow_ranks)
            self.extra_metrics["num_trained_tokens"] = self.totals["trained_tokens"]
            self.work = Work()
        super()._maybe_log_save_evaluate(*args, **kwargs)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> TrainOutput:
        """The Trainer's, which logs the figures of the full training. Collective."""
        self.extra_metrics = gather_metrics()
        return super()._finalize_training(*args, **kwargs)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds the extra metrics gathered last, seconds of saving, and what follows from all of these. `loss` and
        `train_loss` are per trained token, where the Trainer's are means of the steps' means.
        """
        logs = logs | self.extra_metrics | ({"train_loss": self.train_loss} if "train_loss" in logs else {})
        if start_time is not None and self.args.include_num_input_tokens_seen != "no":  # here: others follow from it
            tokens = self.state.num_input_tokens_seen - self._initial_num_input_tokens_seen
            logs = logs | speed_metrics("train", start_time, num_tokens=tokens)
        saving = {"save_seconds": self.saves.seconds} if self.saves.number else {}
        super().log(logs | derived_metrics(logs, self.compute) | saving)

    def last_evaluation(self) -> dict[str, float]:
        """Finds the newest log entry with eval_loss; before any, one of step -1."""
        return next((entry for entry in reversed(self.state.log_history) if "eval_loss" in entry), {"step": -1})

    def results(self) -> dict[str, Any]:
        """Collects the figures of the run for run.json: steps, tokens, speed, peak memory, held-out perplexity, log."""
        log, evaluation = self.state.log_history, self.last_evaluation()
        speeds = [entry["train_tokens_per_second"] for entry in log if "train_tokens_per_second" in entry]
        peaks = {
            name: max(entry[name] for entry in log if name in entry)
            for name in ("peak_gpu_gib", "peak_host_gib")
            if any(name in entry for entry in log)
        }
        evaluated = ("eval_loss", "eval_perplexity", "eval_perplexity_low", "eval_perplexity_high", "eval_tokens")
        return {
            "steps": self.state.global_step,
            "tokens_seen": self.state.num_input_tokens_seen,
            "trained_tokens": self.totals["trained_tokens"],
            "tokens_per_second": speeds[-1] if speeds else None,
            **peaks,
            **{name: evaluation[name] for name in evaluated if name in evaluation},
            "best_checkpoint": self.state.best_model_checkpoint,
            "saves": dataclasses.asdict(self.saves),
            "skipped_steps": self.skipped_steps.number,
            "warnings": self.learning.warnings,
            "plan_check": self.plan_check.comparisons,
            "log": log,
        }


def _sequence_numbers(position_ids_BT: torch.Tensor) -> torch.Tensor:
    """Number the sequences of each packed row [B, T]: one begins where a position does not follow the one before."""
    steps_BT = torch.diff(position_ids_BT, prepend=position_ids_BT[:, :1] - 1, dim=-1)
    return (steps_BT != 1).cumsum(-1)


class LastEvaluation(TrainerCallback):
    """Evaluates what was trained last while trackers still listen: later MLflow and Trackio would begin another run."""

    def __init__(self, trainer: PerplexityTrainer):
        self.trainer = trainer

    def on_train_end(self, args, state, control, **kwargs):
        is_due = args.load_best_model_at_end or self.trainer.last_evaluation()["step"] != state.global_step
        if self.trainer.eval_dataset and is_due and not self.trainer.is_stopping:
            self.trainer.evaluate()
