"""`transformers.Trainer` with what dsft adds: exact evaluation, speed and memory in the log, a stop at NaN, verified
saves.

No training loop here: the Trainer's own runs.
"""

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase, TrainerCallback, TrainingArguments
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from dsft.checkpoints.manifest import checkpoints
from dsft.data.batches import EpochSampler, PaddedToFullSteps
from dsft.data.sequences import Sequences
from dsft.data.streaming import Stream
from dsft.data.training_data import TrainingData
from dsft.errors import TrainingStopped
from dsft.perplexity.scoring import evaluate_windows
from dsft.perplexity.windows import windows_of_sequences
from dsft.planner.plan import Plan
from dsft.runtime import preemption
from dsft.runtime.distributed import max_over_ranks, sum_over_ranks
from dsft.runtime.hardware import peak_memory_bytes
from dsft.training.plan_check import PlanCheck
from dsft.training.saving_trainer import SavingTrainer
from dsft.units import GiB, padded_width
from dsft.watchdog import client as watchdog


class PerplexityTrainer(SavingTrainer):
    """Trains on `TrainingData.items`; evaluates with `perplexity.py` instead of a mean of batch means."""

    def __init__(
        self,
        model: nn.Module,
        args: TrainingArguments,
        *,
        tokenizer: PreTrainedTokenizerBase,
        data: TrainingData,
        plan: Plan,
        save_minutes: float | None = None,
    ):
        per_step = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
        super().__init__(
            model=model,
            args=args,
            train_dataset=data.items if isinstance(data.items, Stream) else PaddedToFullSteps(data.items, per_step),
            eval_dataset=data.held_out,
            processing_class=tokenizer,
            data_collator=data.collator,
            save_minutes=save_minutes,
            data_identity=data.items.identity,
        )
        self.grouped = data.grouped
        if (
            not self.model_accepts_loss_kwargs
        ):  # its own loss would be a mean over each micro batch, and NaN for blank ones
            self.compute_loss_func = mean_over_the_global_batch
        for printer in (PrinterCallback, ProgressCallback):
            self.remove_callback(printer)
        self.add_callback(ProgressLog)
        self.add_callback(Heartbeat)
        self.is_stopping = False
        self.plan_check = PlanCheck(plan)
        self.add_callback(self.plan_check)
        self.bad_losses = torch.zeros((), dtype=torch.int64, device=args.device)

    def _get_train_sampler(self, train_dataset: PaddedToFullSteps | None = None) -> torch.utils.data.Sampler | None:
        """The same order on any number of ranks."""
        data = train_dataset if train_dataset is not None else self.train_dataset
        if self.args.train_sampling_strategy == "sequential":
            return super()._get_train_sampler(data)
        return EpochSampler(
            data,
            seed=self.args.data_seed or self.args.seed,
            step=lambda: self.state.global_step,
            drop_last=self.args.dataloader_drop_last,
            grouped=self.grouped,
        )

    def evaluate(
        self,
        eval_dataset: Sequences | None = None,
        ignore_keys: Sequence[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Perplexity over all tokens of the held-out data; the same number for any batch size and number of ranks."""
        start = time.perf_counter()
        windows = windows_of_sequences(self.eval_dataset if eval_dataset is None else eval_dataset)
        with watchdog.phase("evaluating"):
            result = evaluate_windows(
                self.model,
                windows,
                pad_token_id=self.processing_class.pad_token_id,
                device=self.args.device,
                collective_forward=is_deepspeed_zero3_enabled(),
                batch_tokens=self.args.per_device_eval_batch_size * padded_width(windows.lengths.max()),
                progress=self.is_world_process_zero() and not self.args.disable_tqdm,
            )
        metrics = {
            f"{metric_key_prefix}_loss": result.loss,
            f"{metric_key_prefix}_perplexity": result.perplexity,
            f"{metric_key_prefix}_tokens": result.tokens,
            f"{metric_key_prefix}_runtime": time.perf_counter() - start,
        }
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def training_step(
        self, model: nn.Module, inputs: dict[str, torch.Tensor], num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """The Trainer's step; then every rank learns whether any rank's loss is NaN or infinite or any was asked to
        stop, and all stop together.
        """
        loss = super().training_step(model, inputs, num_items_in_batch)
        self.bad_losses += ~loss.isfinite()
        if not self.accelerator.sync_gradients:  # the same on all ranks; micro batches in between are not waited for
            return loss
        due = self.is_save_due() and self.is_world_process_zero()  # one clock counts
        bad, asked, due = sum_over_ranks(torch.tensor([self.bad_losses.item(), preemption.is_asked(), due])).tolist()
        if due:
            self.control.should_save = True
        if asked and self.state.global_step + 1 < self.state.max_steps:  # else this is the last step anyhow
            self.is_stopping = self.control.should_save = self.control.should_training_stop = True
        if bad:
            saved = checkpoints(self.args.output_dir)
            kept = f"the last checkpoint, {saved[-1]}, is untouched" if saved else "nothing had been saved yet"
            raise TrainingStopped(
                f"the loss is NaN or infinite at step {self.state.global_step + 1}; {kept}. Usual causes: a learning"
                f" rate too high (here {self.args.learning_rate}), fp16 where bf16 is needed, or broken weights in the"
                " model that training started from"
            )
        return loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds tokens/s over all ranks and the largest peak memory of one rank. Collective: every rank logs at the same
        steps.
        """
        peak = peak_memory_bytes()
        for name, value in peak.items():
            logs[f"peak_{name}_gib"] = round(max_over_ranks(value) / GiB, 3)
        super().log(logs, start_time)

    def last_evaluation(self) -> dict[str, float]:
        """The newest log entry with eval_loss; before any, one of step -1."""
        return next((entry for entry in reversed(self.state.log_history) if "eval_loss" in entry), {"step": -1})

    def results(self) -> dict[str, Any]:
        """Figures of the run for run.json: steps, tokens, speed, peak memory, held-out perplexity, and the whole
        log.
        """
        log = self.state.log_history
        evaluation = self.last_evaluation()
        return {
            "steps": self.state.global_step,
            "tokens_seen": self.state.num_input_tokens_seen,
            "tokens_per_second": next(
                (entry["train_tokens_per_second"] for entry in reversed(log) if "train_tokens_per_second" in entry),
                None,
            ),
            **{
                name: max(entry[name] for entry in log if name in entry)
                for name in ("peak_gpu_gib", "peak_host_gib")
                if any(name in entry for entry in log)
            },
            **{
                name: evaluation[name] for name in ("eval_loss", "eval_perplexity", "eval_tokens") if name in evaluation
            },
            "best_checkpoint": self.state.best_model_checkpoint,
            "saves": dataclasses.asdict(self.saves),
            "plan_check": self.plan_check.comparisons,
            "log": log,
        }


def mean_over_the_global_batch(
    outputs: Any, labels: torch.Tensor, num_items_in_batch: torch.Tensor | int | None = None
) -> torch.Tensor:
    """Nats of all trained tokens over `num_items_in_batch`, those of all micro batches and ranks of a step."""
    logits = outputs["logits"]
    return ForCausalLMLoss(logits, labels, logits.shape[-1], num_items_in_batch=num_items_in_batch)


class Heartbeat(TrainerCallback):
    """Tells the guard of each step; the first one may take as long as loading, since it compiles and allocates."""

    def on_substep_end(self, args, state, control, **kwargs):
        watchdog.heartbeat(state.global_step)

    def on_step_end(self, args, state, control, **kwargs):
        watchdog.set_phase("training")
        watchdog.heartbeat(state.global_step)


class ProgressLog(TrainerCallback):
    """One progress bar and one short line per log, on rank 0 only."""

    def __init__(self):
        self.bar = None

    def on_train_begin(self, args, state, control, **kwargs):
        if state.is_world_process_zero and not args.disable_tqdm:
            from tqdm.auto import tqdm

            self.bar = tqdm(
                total=state.max_steps, initial=state.global_step, desc="Training", unit="step", dynamic_ncols=True
            )

    def on_step_end(self, args, state, control, **kwargs):
        if self.bar is not None:
            self.bar.update(state.global_step - self.bar.n)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero:
            line = f"step {state.global_step:>6}  " + "  ".join(
                f"{_NAMES.get(key, key)} {_number(logs[key])}" for key in _SHOWN if key in logs
            )
            print(line, flush=True) if self.bar is None else self.bar.write(line)

    def on_train_end(self, args, state, control, **kwargs):
        if self.bar is not None:
            self.bar.close()
            self.bar = None


_SHOWN = (
    "loss",
    "learning_rate",
    "grad_norm",
    "train_tokens_per_second",
    "num_input_tokens_seen",
    "eval_loss",
    "eval_perplexity",
    "eval_tokens",
    "peak_gpu_gib",
    "peak_host_gib",
)
_NAMES = {"learning_rate": "lr", "train_tokens_per_second": "tokens/s", "num_input_tokens_seen": "tokens"}


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
