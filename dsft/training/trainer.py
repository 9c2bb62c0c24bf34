"""`transformers.Trainer` with dsft's additions: exact evaluation, metrics over all ranks, a stop at NaN, and atomic
checkpoints. In order: preparation, steps, the log, evaluation, saving.
"""

import contextlib
import dataclasses
import functools
import json
import math
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from peft import PeftModel
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import GenerationConfig, Trainer, TrainingArguments
from transformers.integrations.deepspeed import deepspeed_load_checkpoint, is_deepspeed_zero3_enabled
from transformers.trainer_callback import ExportableState, PrinterCallback, ProgressCallback, TrainerCallback

from dsft.checkpoints.export import add_keys_of_transformers_4, copy_processor
from dsft.checkpoints.manifest import TRAINER_STATE, checkpoint_folder, checkpoints, prune
from dsft.checkpoints.resume import (
    TAKEN,
    earlier_values,
    optimizer_kind,
    restore,
    run_identity,
    topology_change,
)
from dsft.checkpoints.run_folder import CARD, FINAL, resume_errors
from dsft.checkpoints.save import (
    Saves,
    StagedSave,
    adapter_parameters,
    changed_files,
    gathered,
    missing_shards,
    missing_weights,
    shapes_of,
    trained_shapes,
)
from dsft.config import user_code
from dsft.config.deepspeed import get_value, offloads, stage
from dsft.config.options import shuffle_seed
from dsft.data.epoch import EpochSampler
from dsft.data.training_data import TrainingData
from dsft.errors import TrainingStopped
from dsft.job import beat as watchdog
from dsft.models.adapters import learning_rates, rate_factors
from dsft.models.sequence_parallel import team_of
from dsft.perplexity.modes import windows_of_held_out
from dsft.perplexity.scoring import evaluate_windows
from dsft.perplexity.sums import result_intervals
from dsft.runtime import distributed
from dsft.runtime.console import say
from dsft.setup.decide import TrainingRun
from dsft.training.callbacks import (
    PEAKS,
    Compute,
    EarlyStopping,
    LearningCheck,
    Metrics,
    MetricsFile,
    PlanCheck,
    ProgressLog,
    SkippedSteps,
    Work,
    answer_prompts,
    gather_metrics,
    gather_peaks,
    of_sets,
)
from dsft.training.loss import TokenLoss
from dsft.units import padded_width

ORDERS = {"group_by_length": "steps of like length", "sequential": "as in the data"}
"""Sampling strategies that give steps other items than a random order -> description for the run's identity."""
STATEFUL_SCHEDULES = ("reduce_lr_on_plateau", "greedy")
"""Schedules whose learning rate depends on the losses seen."""
ADAPTER_SCALE = ("lora_alpha", "alpha_pattern", "use_rslora")
"""Fields of an adapter's config that change the meaning of its tensors and not their shapes."""
LEAST_SCALE = "loss scale already at minimum"
"""In DeepSpeed's error when fp16 finds no loss scale (runtime/fp16/loss_scaler.py, DynamicLossScaler)."""
HYPERPARAMETERS = ("initial_lr", "weight_decay", "betas", "eps", "momentum")
"""Entries of an optimizer's groups that options set. Others may be states (Prodigy)."""
STATES = {
    "bf16.bf16_master_weights_and_grads": "bfloat16, moments float32",
    "bf16.bf16_optimizer_states": "bfloat16",
}
"""Setting of DeepSpeed -> the type of its optimizer's states, for the run's identity; the last match wins."""


class PerplexityTrainer(Trainer):
    """Trains, evaluates with `perplexity/scoring.py`, saves, and resumes from checkpoints of other ranks and stages.
    Methods without types are the Trainer's.
    """

    loss_is_scaled_for_ga = True  # `compute_loss` divides by the tokens of all micro batches

    def __init__(
        self,
        model: nn.Module,
        args: TrainingArguments,
        *,
        run: TrainingRun,
        data: TrainingData,
        sequences_per_step: int,
        frozen_weights: str | None,
    ):
        """`sequences_per_step`: over all ranks; `frozen_weights`: a hash of their files, for the run's identity."""
        options = run.options
        args.use_cache = getattr(model.config, "use_cache", None)  # else the Trainer turns it off, also in final/
        super().__init__(
            model=model,
            args=args,
            train_dataset=data.items,
            eval_dataset=data.held_out,
            processing_class=run.tokenizer,
            data_collator=data.collator,
        )
        # The Trainer counts micro batches itself and leaves accelerate at 1, which would then warn.
        self.accelerator.gradient_accumulation_steps = args.gradient_accumulation_steps
        self.run = run
        self.data = data
        self.team = team_of(options.sequence_parallel)
        self.sequences_per_step = sequences_per_step
        self.compute = Compute.of_run(run)
        self.token_loss = TokenLoss(
            model,
            label_smoothing=args.label_smoothing_factor,
            compute_loss=options.compute_loss and user_code.load("compute_loss", options.compute_loss),
        )
        self._set_callbacks()
        self.skipped_steps = SkippedSteps(in_fp16=args.fp16, most=options.max_skipped_steps)
        self.is_stopping = False
        self.work = Work(args.device)
        self.metrics: Metrics = {}
        """For the next log entry, beside the Trainer's."""

        deepspeed_config = args.hf_deepspeed_config.config
        zero_stage = stage(deepspeed_config)
        self.topology = {
            "world_size": args.world_size,
            "zero_stage": zero_stage,
            "offload": offloads(deepspeed_config),
            "nvme": zero_stage == 3 and offloads(deepspeed_config, to=("nvme",)),  # else DeepSpeed uses host memory
            "sub_group_size": get_value(deepspeed_config, "zero_optimization.sub_group_size"),
            "optimizer_in_json": "optimizer" in deepspeed_config,  # it has one group, the Trainer's has two
        }
        self.saves = Saves()
        self.learning_rates = learning_rates(options)
        # `prune` removes checkpoints. With a limit of 1 the Trainer would remove the newest one at its end.
        self.save_total_limit = args.save_total_limit
        args.save_total_limit = None
        self._saved_at = time.monotonic()
        self._staged_save: StagedSave | None = None
        shapes = trained_shapes(model)
        saved = shapes_of(adapter_parameters(model)) if isinstance(model, PeftModel) else shapes
        num_saved = sum(map(math.prod, saved.values()))
        self._missing_weights = functools.partial(missing_weights, num_elements=num_saved)
        self.run_identity = self._identity(shapes, data, frozen_weights)
        # As in JSON, to compare with a checkpoint's.
        taken = {name: getattr(args, name) for name in TAKEN} | dict.fromkeys(user_code.KEYS)
        taken["chat_date"] = options.chat_date
        self.taken_options = json.loads(json.dumps(taken | user_code.digests(options)))

    def _set_callbacks(self) -> None:
        options = self.run.options
        for printer in (PrinterCallback, ProgressCallback):
            self.remove_callback(printer)
        if self.is_world_process_zero():
            # A notebook keeps transformers' table and bar, unless disable_tqdm asks for lines.
            if not any("Notebook" in type(each).__name__ for each in self.callback_handler.callbacks):
                self.add_callback(ProgressLog)
            self.add_callback(MetricsFile)
        self.learning = LearningCheck(self.model.config.get_text_config().vocab_size)
        self.plan_check = PlanCheck(self.run.plan)
        self.add_callback(self.learning)
        self.add_callback(self.plan_check)
        if options.early_stopping_patience:
            self.add_callback(EarlyStopping(options.early_stopping_patience, options.early_stopping_threshold))
        for name in options.callbacks:
            self.add_callback(user_code.load("callbacks", name))
        self.callback_handler.callbacks.insert(0, LastEvaluation(self))  # trackers close after it

    def _identity(
        self, shapes: dict[str, tuple[int, ...]], data: TrainingData, frozen_weights: str | None
    ) -> dict[str, Any]:
        """Returns what a resumed run must have in common with this one."""
        args = self.args
        config = args.hf_deepspeed_config.config
        unchangeable = {
            "optimizer": optimizer_kind(get_value(config, "optimizer.type") or args.optim.value),
            "dataloader_drop_last": args.dataloader_drop_last,
            "learning_rates": json.dumps(self.learning_rates),  # they split the parameters into groups
            "states": "float32",
        }
        for name, states in STATES.items():
            if get_value(config, name):
                unchangeable["states"] = states
        if args.lr_scheduler_type in STATEFUL_SCHEDULES:  # the rate is part of their state
            unchangeable["learning_rate"] = args.learning_rate
        if args.metric_for_best_model:  # the best value so far is of this metric
            unchangeable["metric_for_best_model"] = args.metric_for_best_model
        if frozen_weights:
            unchangeable["content of the frozen weights"] = frozen_weights
        for name, adapter in getattr(self.model, "peft_config", {}).items():
            scale = {key: value for key, value in vars(adapter).items() if key in ADAPTER_SCALE}
            unchangeable[f"scale of adapter {name}"] = json.dumps(scale, sort_keys=True)
        return run_identity(
            shapes,
            data=data.items.identity | {"order of data": ORDERS.get(data.strategy, "drawn at random")},
            seed=shuffle_seed(vars(args)),
            sequences_per_step=self.sequences_per_step,
            options=unchangeable,
        )

    @property
    def totals(self) -> Metrics:
        """Counts over the full training, in the Trainer's state, which checkpoints contain."""
        return self.state.stateful_callbacks.setdefault("dsft", {"trained_tokens": 0, "nats": 0.0})

    @property
    def train_loss(self) -> float:
        """Mean nats per trained token over the full training, including steps before a resume."""
        return self.totals["nats"] / max(1, self.totals["trained_tokens"])

    # Preparing and resuming.

    def create_optimizer(self, model=None):
        """The Trainer's, with groups split by factors of the learning rate; factor 1, which is logged, comes first."""
        is_new = self.optimizer is None
        optimizer = super().create_optimizer(model)
        if not is_new or not self.learning_rates:
            return optimizer
        factors = rate_factors(self.model, self.learning_rates)
        groups = []
        for group in optimizer.param_groups:
            parts = defaultdict(list)
            for parameter in group["params"]:
                parts[factors[parameter]].append(parameter)
            for factor in sorted(parts, key=lambda factor: (factor != 1, factor)):
                groups.append(group | {"params": parts[factor], "lr": group["lr"] * factor})
        optimizer.param_groups[:] = groups
        return optimizer

    def _get_train_sampler(self, train_dataset=None):
        """The same order on any number of ranks."""
        return EpochSampler(
            train_dataset or self.train_dataset,
            per_step=self.sequences_per_step,
            seed=shuffle_seed(vars(self.args)),
            step=lambda: self.state.global_step,
            drop_last=self.args.dataloader_drop_last,
            strategy=self.data.strategy,
            micro_batch=self.args.per_device_train_batch_size,
            shared_by=self.team.size,
        )

    def get_total_train_batch_size(self, args):
        """Counts ranks that share a batch once; the Trainer's counts each."""
        return self.sequences_per_step

    def _init_training_state(self, max_steps, *args, **kwargs):
        started = super()._init_training_state(max_steps, *args, **kwargs)
        # Else a resumed run logs, evaluates and saves as often as its checkpoint's run.
        self.state.compute_steps(self.args, max_steps)
        # Trainer._save_checkpoint looks these up; the checkpoint's run may not have had all of them.
        for each in (*self.callback_handler.callbacks, self.control):
            if isinstance(each, ExportableState):
                self.state.stateful_callbacks.setdefault(type(each).__name__, each.state())
        return started

    def _prepare_for_training(self, max_steps, train_dataloader, resume_from_checkpoint):
        """Prepares like the Trainer; `resume.py` reads checkpoints that DeepSpeed cannot. Collective."""
        checkpoint = resume_from_checkpoint
        prepared = super()._prepare_for_training(max_steps, train_dataloader, None)
        engine = self.model_wrapped
        # The values of this run's options, before a checkpoint's overwrite them.
        options_now = []
        for group in engine.optimizer.param_groups:
            options_now.append({name: group[name] for name in HYPERPARAMETERS if name in group})
        distributed.extend_timeouts()
        if checkpoint is None:
            take_back_first_step(engine.optimizer)
        else:
            if topology_change(checkpoint, self.topology):
                restore(engine, engine.lr_scheduler or self.lr_scheduler, checkpoint)
            else:
                deepspeed_load_checkpoint(engine, checkpoint, load_module_strict=not isinstance(self.model, PeftModel))
                self._load_optimizer_and_scheduler(checkpoint)
            self._take_options(checkpoint, options_now)
        self.skipped_steps.number = engine.skipped_steps
        self.work.begin_interval()
        return prepared

    def _take_options(self, checkpoint: str, options_now: list[dict[str, Any]]) -> None:
        """Applies changed options to a resumed optimizer and schedule; else the checkpoint's values stay."""
        engine = self.model_wrapped
        groups = engine.optimizer.param_groups
        scheduler = engine.lr_scheduler or self.lr_scheduler
        changed = earlier_values(checkpoint, "options", self.taken_options)
        is_of_deepspeed = hasattr(scheduler, "last_batch_iteration")
        if not changed and not is_of_deepspeed:
            return
        for group, values in zip(groups, options_now, strict=True):
            if getattr(scheduler, "cycle_momentum", 0):  # OneCycle changes betas with the steps
                values.pop("betas", None)
            group.update(values)
        if is_of_deepspeed:
            rates = scheduler.get_lr()
        elif isinstance(scheduler, LambdaLR):  # the rates at this step
            if "learning_rate" in changed:
                scheduler.base_lrs = [values["initial_lr"] for values in options_now]
            rates = []
            for rate, factor in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True):
                rates.append(rate * factor(scheduler.last_epoch))
        else:
            return
        scheduler._last_lr = rates
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate

    # Steps.

    def _run_epoch(self, *args, **kwargs):
        """The Trainer's. A run that was killed before it saved its final model resumes without another step."""
        self.control.should_training_stop |= self.state.global_step >= self.state.max_steps
        if not self.control.should_training_stop:
            super()._run_epoch(*args, **kwargs)

    def get_batch_samples(self, epoch_iterator, *args, **kwargs):
        return super().get_batch_samples(self.work.timed(epoch_iterator), *args, **kwargs)

    def _prepare_input(self, data):
        """Keeps token weights in fp32: the Trainer casts all floating-point inputs to the engine's dtype."""
        if isinstance(data, torch.Tensor):
            return data.to(self.args.device)
        return super()._prepare_input(data)

    def _get_num_items_in_batch(self, batch_samples, device):
        """Counts non-padding tokens and trained tokens of an optimizer step, [2]. Collective."""
        counts = sum(batch["num_tokens"][:2].to(device) for batch in batch_samples)
        if batch_samples:
            distributed.add_over_ranks(counts)
        return counts

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """Computes a micro batch's part of the step's loss (loss.py), and counts it for the log."""
        num_tokens = inputs.pop("num_tokens")
        loss, nats = self.token_loss(model, inputs, num_tokens[:2], num_items_in_batch)
        self.work.count(loss.detach() * num_items_in_batch[1], nats, num_tokens)
        return loss * self.args.world_size  # DeepSpeed divides gradients by the number of ranks

    def _get_learning_rate(self):
        """The rate of the finished step: an optimizer made by DeepSpeed has already advanced the schedule."""
        return self._learning_rate

    def training_step(self, model, inputs, num_items_in_batch=None):
        """The Trainer's; after an optimizer step ranks add up tokens, losses, and requests to stop or save."""
        step = self.state.global_step
        skipped = self.model_wrapped.skipped_steps
        self._learning_rate = super()._get_learning_rate()
        # Ranks that share sequences exchange full rows in attention, also when the backward recomputes it.
        rows_BT = inputs.pop("row_positions", None)
        attention = contextlib.nullcontext()
        if self.team.size > 1:
            rows_BT = None if rows_BT is None else rows_BT.to(self.args.device)
            attention = self.team.attention(self.model, rows_BT=rows_BT)
        try:
            with attention:
                loss = super().training_step(model, inputs, num_items_in_batch)
        except Exception as error:  # DeepSpeed raises a plain Exception
            if LEAST_SCALE in str(error):
                self.skipped_steps.note(step + 1, is_skipped=True, at_least_scale=True)
            raise
        if self.accelerator.sync_gradients:  # the same on all ranks
            step += 1
            minutes = (time.monotonic() - self._saved_at) / 60
            is_due = minutes > (self.run.options.save_minutes or math.inf)
            # By one clock.
            self.work.send(step, asked=distributed.is_asked_to_save(), due=is_due and self.is_world_process_zero())
            self.skipped_steps.note(step, is_skipped=self.model_wrapped.skipped_steps > skipped)
            watchdog.set_phase("training")  # the first step, which compiles and allocates, has the limit of loading
        watchdog.heartbeat(step)
        return loss

    def _clip_grad_norm(self, model):
        """Does nothing: DeepSpeed has clipped. The Trainer's would wait for the norm here."""

    def _get_grad_norm(self, model, grad_norm=None):
        """Returns the norm on the GPU, to be read by the log."""
        return self.model_wrapped.get_global_grad_norm()

    def floating_point_ops(self, inputs):
        """The Trainer's counts all parameters for each micro batch, and ZeRO-3's are empty."""
        return inputs["input_ids"].numel() * self.compute.flops_per_token

    def _track_num_input_tokens(self, inputs):
        """Does nothing: `_maybe_log_save_evaluate` counts. The Trainer's has a collective per micro batch, and takes
        end tokens for padding in rows without a mask.
        """

    def _maybe_log_save_evaluate(self, *args, **kwargs):
        """The Trainer's, after the sums of the step before are read, and those of this step if something is due.
        Collective. Raises TrainingStopped if a loss was NaN or infinite.
        """
        if self.is_stopping and self.state.epoch % 1:  # the Trainer's call at the end of an unfinished epoch
            return
        control = self.control
        unread = self.work.unread
        due = ("should_log", "should_evaluate", "should_save", "should_training_stop")
        while unread:
            is_due = any(getattr(control, name) for name in due)
            if len(unread) == 1 and not is_due:
                break
            step, sums = self.work.read()
            if sums.bad:
                saved = checkpoints(self.args.output_dir)
                kept = f"the last checkpoint, {saved[-1]}, is untouched" if saved else "nothing had been saved yet"
                raise TrainingStopped(
                    f"the loss is NaN or infinite at step {step}; {kept}. Usual causes: a learning rate too high"
                    f" (here {self.args.learning_rate}), fp16 instead of bf16, or broken weights in the model that"
                    " training started from"
                )
            self.state.num_input_tokens_seen += int(sums.tokens)
            self.totals["trained_tokens"] += int(sums.trained)
            self.totals["nats"] += sums.nats
            if sums.due:
                control.should_save = True
            if sums.asked and self.state.global_step < self.state.max_steps:  # else training ends anyway
                self.is_stopping = control.should_save = control.should_training_stop = True
        if control.should_log:
            self.metrics = gather_metrics(self.work, self.compute) | {
                "num_trained_tokens": self.totals["trained_tokens"]
            }
            if self.skipped_steps.number:
                self.metrics["skipped_steps"] = self.skipped_steps.number
            self.work.begin_interval()
        super()._maybe_log_save_evaluate(*args, **kwargs)

    # The log.

    def log(self, logs, start_time=None):
        """Adds dsft's latest metrics; `loss` and `train_loss` are per trained token."""
        logs = logs | self.metrics
        if "loss" not in self.metrics:
            logs.pop("loss", None)  # the Trainer's
        if "train_loss" in logs:
            logs["train_loss"] = self.train_loss
        if self.saves.number:
            logs["save_seconds"] = self.saves.seconds
        super().log(logs, start_time)

    def _finalize_training(self, *args, **kwargs):
        """The Trainer's, which logs totals. Collective."""
        self.metrics = gather_peaks()
        return super()._finalize_training(*args, **kwargs)

    def last_evaluation(self) -> Metrics:
        """Returns the newest log entry with eval_loss; without any, one of step -1."""
        for entry in reversed(self.state.log_history):
            if "eval_loss" in entry:
                return entry
        return {"step": -1}

    def results(self) -> dict[str, Any]:
        """Collects the figures of the run for run.json: steps, tokens, speed, peak memory, held-out perplexity, log."""
        log = self.state.log_history
        results = {
            "steps": self.state.global_step,
            "tokens_seen": self.state.num_input_tokens_seen,
            "trained_tokens": self.totals["trained_tokens"],
            "tokens_per_second": None,
            "best_checkpoint": self.state.best_model_checkpoint,
            "saves": dataclasses.asdict(self.saves),
            "skipped_steps": self.skipped_steps.number,
            "warnings": self.learning.warnings,
            "plan_check": self.plan_check.figures,
        }
        for entry in log:
            for name, value in entry.items():
                if name == "train_tokens_per_second":
                    results["tokens_per_second"] = value
                elif name in PEAKS:
                    results[name] = value
        for name, value in self.last_evaluation().items():
            if name.startswith("eval_") and name != "eval_runtime":
                results[name] = value
        return results | {"log": log}

    # Evaluation.

    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval"):
        """Measures perplexity over all held-out tokens; the same for any batch size and ranks. Collective."""
        start = time.perf_counter()
        held_out = eval_dataset or self.eval_dataset
        windows = windows_of_held_out(held_out)
        with watchdog.phase("evaluating"), self.work.paused():
            result = evaluate_windows(
                self.model,
                windows,
                pad_token_id=self.processing_class.pad_token_id,
                device=self.args.device,
                collective_forward=is_deepspeed_zero3_enabled(),
                batch_tokens=self.args.per_device_eval_batch_size * padded_width(windows.lengths.max()),
                team=self.team,
                progress=self.is_world_process_zero() and not self.args.disable_tqdm,
            )
            samples = answer_prompts(self.data.prompts, self.model, self.processing_class)
        documents = [len(store.row_ends) for store in held_out.stores]
        set_D = np.repeat(np.arange(len(documents)), documents)
        low, high = result_intervals(result)["perplexity"]
        metrics = {"loss": result.loss, "perplexity": result.perplexity}
        if not math.isnan(low):  # a single window has no interval
            metrics |= {"perplexity_low": low, "perplexity_high": high}
        metrics["tokens"] = result.tokens
        metrics |= of_sets(result, self.data.held_out_sets, set_D)
        metrics["runtime"] = time.perf_counter() - start
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in metrics.items()}
        self.metrics = gather_peaks()
        self.log(metrics | samples)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _determine_best_metric(self, *args, **kwargs):
        """The Trainer's, for `save_strategy: best`; it would cancel a save that a stop or the clock asks for."""
        return super()._determine_best_metric(*args, **kwargs) or self.control.should_save

    # Saving.

    def _get_output_dir(self, trial):
        return str(self._staged_save.staged.parent if self._staged_save else super()._get_output_dir(trial))

    def _save_checkpoint(self, model, trial):
        """Writes a checkpoint beside its name, publishes it, and removes older ones. Collective. Raises Unsaved."""
        state = self.state
        output_dir = self.args.output_dir
        folder = checkpoint_folder(output_dir, state.global_step)
        save = StagedSave(folder, self.saves)
        self._staged_save = save
        save_as_the_trainer = super()._save_checkpoint
        best = state.best_model_checkpoint

        def write():
            save_as_the_trainer(model, trial)
            # The Trainer names the best checkpoint by its staged path, not by its final one.
            folder = checkpoint_folder(output_dir, state.best_global_step or 0)
            state.best_model_checkpoint = str(folder) if folder == save.folder or folder.is_dir() else best
            if self.args.should_save:
                state.save_to_json(str(save.staged / TRAINER_STATE))

        def check(folder):
            problems = self._missing_weights(folder)
            if not self.args.save_only_model:
                problems += missing_shards(folder, self.args.world_size, sharded=self.topology["zero_stage"] > 0)
            return problems

        losses = [entry["loss"] for entry in state.log_history if "loss" in entry]
        facts = {
            "step": state.global_step,
            "zero": self.run.plan.zero,
            **self.topology,
            "sequence_parallel": self.team.size,
            "run_identity": self.run_identity,
            "options": self.taken_options,
            "loss": losses[-1] if losses else None,
        }
        with watchdog.phase("saving"), self.work.paused():
            save.run(write, check, facts=facts, needed_bytes=self.run.disk.checkpoint_bytes)
            if self.is_world_process_zero():
                best = state.best_model_checkpoint
                prune(output_dir, limit=self.save_total_limit, best=best, newest=save.folder)
            distributed.wait_long("older checkpoints are removed")
        self._staged_save = None
        self._saved_at = time.monotonic()

    def save_final(self) -> Path:
        """Saves the model (LoRA: the adapter) to `final/`. Collective. Raises Unsaved."""
        save = StagedSave(Path(self.args.output_dir) / FINAL, Saves())
        self._staged_save = save
        with watchdog.phase("saving"):
            save.run(
                functools.partial(self.save_model, str(save.staged)),
                self._missing_weights,
                facts={"step": self.state.global_step, **self.topology},
                needed_bytes=self.run.disk.weight_bytes,
            )
        self._staged_save = None
        return save.folder

    def save_model(self, output_dir=None, _internal_call=False):
        """Saves like the Trainer, under ZeRO 0 to 2 on rank 0 alone: accelerate copies on every rank. Collective."""
        output_dir = output_dir or self.args.output_dir
        if self.topology["zero_stage"] == 3 and isinstance(self.model, PeftModel):
            # The Trainer's gather skips frozen parameters: a frozen part of the adapter would be lost.
            adapter = gathered(adapter_parameters(self.model))
            if self.args.should_save:
                self._save(output_dir, adapter)
        elif self.topology["zero_stage"] == 3:
            super().save_model(output_dir, _internal_call=True)
        elif self.args.should_save:
            # Copies: under stages 1 and 2 trained parameters are views of flat tensors, which would be saved whole.
            names = self.model.named_parameters(remove_duplicate=False)  # a tied head has two
            trained = {name: parameter for name, parameter in names if parameter.requires_grad}
            self._save(output_dir, self.model.state_dict() | gathered(trained))
        # Not in a collective, whose time limit a large model would exceed.
        distributed.wait_long("model is saved")

    def _save(self, output_dir=None, state_dict=None):
        """Writes the weights, and what dsft adds to their folder."""
        save = self._staged_save
        generation = getattr(self.model, "generation_config", None)  # none if it cannot generate
        # Written below. transformers refuses one with a temperature but without do_sample (Vicuna's); peft writes none.
        self.model.generation_config = GenerationConfig()
        super()._save(output_dir, state_dict)
        self.model.generation_config = generation
        if not self.args.should_save:
            return
        if generation:
            file = Path(output_dir) / "generation_config.json"
            file.write_text(generation.to_json_string(), encoding="utf-8")
        if save is None:
            return
        add_keys_of_transformers_4(Path(output_dir), self.processing_class.name_or_path)
        if save.folder.name == FINAL:
            if not isinstance(self.model, PeftModel):
                copy_processor(self.run.options.model, Path(output_dir), self.run.options.revision)
            # peft's template. The run's card follows with its results.
            (Path(output_dir) / CARD).unlink(missing_ok=True)

    def _load_best_model(self):
        """Loads it like the Trainer. If it has changed since it was saved, the last step's weights stay. Collective."""
        best = self.state.best_model_checkpoint
        if self.is_stopping or self.state.best_global_step == self.state.global_step:  # not needed, or loaded already
            return
        folder = Path(best)
        missing = distributed.on_rank_0(lambda: resume_errors(folder) if folder.is_dir() else ["it does not exist"])
        if errors := missing or changed_files(best):
            say(f"error: {best}, the best checkpoint, is damaged ({errors[0]}): the last step's weights stay")
            self.state.best_model_checkpoint = None
            return
        if topology_change(best, self.topology):
            engine = self.model_wrapped
            restore(engine, engine.lr_scheduler or self.lr_scheduler, best)
        else:
            super()._load_best_model()


def take_back_first_step(optimizer: object) -> None:
    """Resets the states and fp32 weights of ZeRO 0's half-precision optimizer: DeepSpeed 0.19.8 initialises them by a
    step with zero gradients, which decays the weights and which Adam counts.
    """
    if isinstance(optimizer, FP16_UnfusedOptimizer | FP16_Optimizer):
        optimizer.optimizer.state.clear()
        optimizer.refresh_fp32_params()


class LastEvaluation(TrainerCallback):
    """Evaluates the last step before trackers close: afterwards MLflow and Trackio would begin another run."""

    def __init__(self, trainer: PerplexityTrainer):
        self.trainer = trainer

    def on_train_end(self, args, state, control, **kwargs):
        is_due = args.load_best_model_at_end or self.trainer.last_evaluation()["step"] != state.global_step
        if self.trainer.eval_dataset and is_due and not self.trainer.is_stopping:
            self.trainer.evaluate()
