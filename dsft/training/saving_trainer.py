"""Defines a Trainer whose checkpoints are complete or are not there."""

import contextlib
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from deepspeed import DeepSpeedEngine
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from peft import PeftModel
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import Trainer
from transformers.integrations.deepspeed import deepspeed_load_checkpoint

from dsft.checkpoints.kept_weights import LeftOut, keep_left_out
from dsft.checkpoints.manifest import TRAINER_STATE, checkpoint_folder, prune
from dsft.checkpoints.readback import SafetensorsFiles, Verification, readback_errors, trained_shapes
from dsft.checkpoints.resume import TAKEN, optimizer_kind, restore, run_identity, topology_change
from dsft.checkpoints.run_folder import FINAL
from dsft.checkpoints.save import Saves, StagedSave, missing_shards, release_reserved_space
from dsft.config.deepspeed import offloads, stage
from dsft.config.options import shuffle_seed
from dsft.errors import TrainingStopped
from dsft.models.zero_shards import mapped_resume
from dsft.run_setup.checkpoint_size import CheckpointSize
from dsft.runtime import distributed
from dsft.runtime.console import say
from dsft.training.patches import import_muon, patch_engine
from dsft.watchdog import client as watchdog

STATEFUL_SCHEDULES = ("reduce_lr_on_plateau", "greedy")
"""Of the learning rate, which they change by what they see."""
ADAPTER_SCALE = ("lora_alpha", "alpha_pattern", "use_rslora")
"""Fields of an adapter's config that change what its tensors mean, and not their shapes."""
HYPERPARAMETERS = (
    *("initial_lr", "weight_decay", "betas", "eps", "momentum"),
    *("warmup_steps", "r", "weight_lr_power"),  # of schedule-free ones
)
"""Of an optimizer's groups: what options say. Whatever else stands there may be a state (schedule-free, Prodigy)."""
SAMPLED_TENSORS = 16
"""Of the final model, read back and compared in full."""


class SavingTrainer(Trainer):
    """Saves by the Trainer's strategy and every `save_minutes`, and resumes from checkpoints of other ranks and stages.

    `saves` counts.
    """

    def __init__(
        self,
        model: nn.Module,
        *args: Any,
        save_minutes: float | None,
        data_identity: dict[str, Any],
        disk: CheckpointSize,
        left_out: LeftOut | None = None,
        frozen_weights: str | None = None,
        **kwargs: Any,
    ):
        """
        Args:
            frozen_weights: a digest of the files that hold them, for the run's identity.
        """
        self._frozen_weights = frozen_weights
        self._use_cache = getattr(model.config, "use_cache", None)  # the Trainer turns it off
        super().__init__(model, *args, **kwargs)
        self.left_out = None if isinstance(model, PeftModel) else left_out
        deepspeed_config = self.args.hf_deepspeed_config.config
        self.topology = {
            "world_size": self.args.world_size,
            "zero_stage": stage(deepspeed_config),
            "offload": offloads(deepspeed_config),
        }
        self.save_minutes = save_minutes
        shapes = trained_shapes(model)
        self.saves, self.final_save = Saves(), Saves()
        self._num_trained = sum(map(math.prod, shapes.values()))
        self._disk = disk
        self.run_identity = run_identity(
            shapes,
            data=data_identity,
            seed=shuffle_seed(self.args.data_seed, self.args.seed),
            sequences_per_step=self.args.per_device_train_batch_size
            * self.args.gradient_accumulation_steps
            * self.args.world_size,
            options=self._unchangeable_options(),
        )
        # As JSON has them, to be compared with those of a checkpoint.
        self.taken_options = json.loads(json.dumps({name: getattr(self.args, name) for name in TAKEN}))
        self._saved_at = time.monotonic()
        self._staged_save: StagedSave | None = None

    def _unchangeable_options(self) -> dict[str, Any]:
        optimizer = self.args.hf_deepspeed_config.config.get("optimizer") or {}
        options = {
            "optimizer": optimizer_kind(optimizer.get("type") or self.args.optim.value),
            "dataloader_drop_last": self.args.dataloader_drop_last,
        }
        if self.args.lr_scheduler_type in STATEFUL_SCHEDULES:  # the rate is a state of these
            options["learning_rate"] = self.args.learning_rate
        if self._frozen_weights:
            options["content of the frozen weights"] = self._frozen_weights
        for name, adapter in getattr(self.model, "peft_config", {}).items():
            scale = {key: value for key, value in vars(adapter).items() if key in ADAPTER_SCALE}
            options[f"scale of adapter {name}"] = json.dumps(scale, sort_keys=True)
        return options

    def is_save_due(self) -> bool:
        """Tell whether `save_minutes` are over since the last save, by this rank's clock."""
        return self.save_minutes is not None and time.monotonic() - self._saved_at > 60 * self.save_minutes

    def _init_training_state(self, max_steps: int, *args: Any, **kwargs: Any) -> tuple[int, int]:
        started = super()._init_training_state(max_steps, *args, **kwargs)
        # Else a resumed run logs, evaluates and saves as often as the checkpoint's did.
        self.state.compute_steps(self.args, max_steps)
        return started

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None
    ) -> tuple[Any, Any]:
        """Prepare as the Trainer, which ends with DeepSpeed reading a checkpoint; `resume.py` reads what it cannot.

        Collective.
        """
        is_changed = resume_from_checkpoint is not None and topology_change(resume_from_checkpoint, self.topology)
        import_muon(self.args.hf_deepspeed_config.config)
        prepared = super()._prepare_for_training(max_steps, train_dataloader, None)
        options_now = hyperparameters(self.model_wrapped.optimizer)  # a checkpoint brings those that saved it
        if resume_from_checkpoint is not None and not is_changed:
            with self._mapped_resume():
                deepspeed_load_checkpoint(
                    self.model_wrapped,
                    resume_from_checkpoint,
                    load_module_strict=not isinstance(self.model, PeftModel),
                )
                self._load_optimizer_and_scheduler(resume_from_checkpoint)
        distributed.extend_timeouts()
        patch_engine(self.model_wrapped, resumes=resume_from_checkpoint is not None)
        if is_changed:
            self._restore(resume_from_checkpoint)
        if resume_from_checkpoint is not None:
            engine = self.model_wrapped
            take_hyperparameters(engine.optimizer, engine.lr_scheduler or self.lr_scheduler, options_now)
        swap_in(self.model_wrapped, "train")  # a checkpoint holds the average
        return prepared

    def _mapped_resume(self) -> contextlib.AbstractContextManager[None]:
        return mapped_resume(on_gpu=self.args.device.type == "cuda" and not self.topology["offload"])

    def _restore(self, checkpoint: str) -> None:
        engine = self.model_wrapped
        swap_in(engine, "train")  # it takes a step
        restore(engine, engine.lr_scheduler or self.lr_scheduler, checkpoint)

    def _load_best_model(self) -> None:
        """Load it as the Trainer; where it has changed since it was saved, the last step's weights stay. Collective."""
        best = self.state.best_model_checkpoint
        if errors := Verification(best, hashes=True).errors():
            say(f"error: {best}, the best checkpoint, is damaged ({errors[0]}): the last step's weights stay")
            self.state.best_model_checkpoint = None
            return
        if topology_change(best, self.topology):
            self._restore(best)
        else:
            with self._mapped_resume():
                super()._load_best_model()

    def _get_output_dir(self, trial: Any) -> str:
        return str(self._staged_save.staged.parent if self._staged_save else super()._get_output_dir(trial))

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Save into a folder that gets its name once everything is written and verified, then remove older ones.

        Collective.
        """
        step, output_dir = self.state.global_step, self.args.output_dir
        losses = (entry["loss"] for entry in reversed(self.state.log_history) if "loss" in entry)
        save = self._staged_save = StagedSave(checkpoint_folder(output_dir, step))
        with watchdog.phase("saving"), averaged_weights(self.model_wrapped):
            is_saved = save.run(
                lambda: self._write_checkpoint(model, trial, save),
                self._check_saved,
                saves=self.saves,
                needed_bytes=self._disk.checkpoint_bytes,
                facts={
                    "step": step,
                    **self.topology,
                    "run_identity": self.run_identity,
                    "options": self.taken_options,
                    "loss": next(losses, None),
                },
            )
            if is_saved:
                self._remove_older(save.folder)
        self._staged_save, self._saved_at = None, time.monotonic()
        if not is_saved and save.will_fail_again and not self.saves.number:
            raise TrainingStopped(
                f"{save.folder.name}, the first of this run, could not be saved, nor could a later one: the disk is not"
                f" the cause ({self.saves.failed[-1]}). Training stops instead of going on towards nothing"
            )
        if not is_saved:
            say(
                f"error: {save.folder.name} could not be saved ({self.saves.failed[-1]}); training continues, earlier"
                " checkpoints stay"
            )

    def _remove_older(self, newest: Path) -> None:
        if self.is_world_process_zero():
            best, limit = self.state.best_model_checkpoint, self.args.save_total_limit
            for error in prune(self.args.output_dir, limit=limit, best=best, newest=newest):
                say(f"warning: {error}; an older checkpoint could not be removed, the next save tries again")
        distributed.wait_long("older checkpoints are removed")

    def _write_checkpoint(self, model: nn.Module, trial: Any, save: StagedSave) -> None:
        best = self.state.best_model_checkpoint
        with save.noting_errors_of(self.model_wrapped.checkpoint_engine, self.model_wrapped):
            super()._save_checkpoint(model, trial)
        # The Trainer names the best checkpoint by where it is now, not by where it will be.
        folder = checkpoint_folder(self.args.output_dir, self.state.best_global_step or 0)
        self.state.best_model_checkpoint = str(folder) if folder == save.folder or folder.is_dir() else best
        if self.args.should_save:
            self.state.save_to_json(str(save.staged / TRAINER_STATE))

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save as the Trainer, but in ZeRO stages 0 to 2, where every rank holds the model, on rank 0 alone: accelerate
        would copy all of it to host memory on every rank, frozen weights too. Collective.
        """
        if self.topology["zero_stage"] == 3:
            super().save_model(output_dir, _internal_call=True)
        elif self.args.should_save:
            self._save(output_dir or self.args.output_dir, self._trained_state())
        # Outside of any collective, whose limit a large model would exceed.
        distributed.wait_long("model is saved")
        if self.args.push_to_hub and not _internal_call:  # on every rank: it saves once more
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)
        if self._staged_save and (self.args.save_only_model or not _internal_call):
            self._staged_save.is_past_collectives = True

    def _trained_state(self) -> dict[str, torch.Tensor]:
        """Return the weights that are saved, by name. Each is a copy where it is trained: stages 1 and 2 keep these as
        views of flat tensors, of which a file would hold all.
        """
        copies = {
            parameter: parameter.detach().to("cpu", copy=True)
            for parameter in self.model.parameters()
            if parameter.requires_grad
        }
        names = self.model.named_parameters(remove_duplicate=False)  # a tied head shares the embedding's copy
        return self.model.state_dict() | {name: copies[parameter] for name, parameter in names if parameter in copies}

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        save = self._staged_save
        if save is None:
            return self._save_as_it_serves(output_dir, state_dict)
        state_dict = state_dict or {}

        def write_and_read_back() -> None:
            self._save_as_it_serves(output_dir, state_dict)
            if self.args.should_save:
                if isinstance(self.model, PeftModel):  # peft saves none: what stops the adapter's answers would be lost
                    text = self.model.generation_config.to_json_string()
                    (Path(output_dir) / "generation_config.json").write_text(text, encoding="utf-8")
                sampled = SAMPLED_TENSORS if save.folder.name == FINAL else 0
                save.errors += readback_errors(SafetensorsFiles(Path(output_dir)), state_dict, sampled=sampled)
            if self.args.should_save and save.folder.name == FINAL and not save.errors:
                keep_left_out(Path(output_dir), self.model, self.left_out)

        save.attempt(write_and_read_back)

    def _save_as_it_serves(self, output_dir: str | None, state_dict: dict | None) -> None:
        """Save with the cache of generation on where the model that was loaded has it on."""
        config, in_training = self.model.config, getattr(self.model.config, "use_cache", None)
        if in_training is not None:
            config.use_cache = self._use_cache
        try:
            super()._save(output_dir, state_dict)
        finally:
            if in_training is not None:
                config.use_cache = in_training

    def _check_saved(self, folder: Path) -> list[str]:
        problems = self._missing_weights(folder)
        if not self.args.save_only_model:
            problems += missing_shards(folder, self.args.world_size, sharded=self.topology["zero_stage"] > 0)
        return problems

    def _missing_weights(self, folder: Path) -> list[str]:
        problems = readback_errors(SafetensorsFiles(folder), {}, num_elements=self._num_trained)
        self._staged_save.will_fail_again |= bool(problems)
        return problems

    def save_final(self) -> Path | None:
        """Save the model (LoRA: the adapter) to `final/`, count its elements and read a sample back. Collective.

        Returns None where it could not be saved; `final_save.failed` says why.
        """
        save = self._staged_save = StagedSave(Path(self.args.output_dir) / FINAL)
        if self.is_world_process_zero():
            release_reserved_space(self.args.output_dir)
        swap_in(self.model_wrapped, "eval")
        with watchdog.phase("saving"):
            is_saved = save.run(
                lambda: self.save_model(str(save.staged)),
                self._missing_weights,
                saves=self.final_save,
                needed_bytes=self._disk.weight_bytes + (self.left_out.kept_bytes if self.left_out else 0),
                facts={"step": self.state.global_step, **self.topology},
            )
        self._staged_save = None
        return save.folder if is_saved else None


def hyperparameters(optimizer: Any) -> list[dict[str, Any]]:
    """Return what options say of each of an optimizer's groups."""
    return [{name: group[name] for name in HYPERPARAMETERS if name in group} for group in optimizer.param_groups]


def take_hyperparameters(optimizer: Any, scheduler: Any, options_now: list[dict[str, Any]]) -> None:
    """Give an optimizer that was restored what options say now, and the learning rate that follows at its step."""
    for group, values in zip(optimizer.param_groups, options_now, strict=True):
        # OneCycle changes betas with the step.
        group.update({k: v for k, v in values.items() if k != "betas" or not getattr(scheduler, "cycle_momentum", 0)})
    if isinstance(scheduler, LambdaLR):
        scheduler.base_lrs = [values["initial_lr"] for values in options_now]
        factors = [factor(scheduler.last_epoch) for factor in scheduler.lr_lambdas]
        scheduler._last_lr = [rate * factor for rate, factor in zip(scheduler.base_lrs, factors, strict=True)]
    elif hasattr(scheduler, "last_batch_iteration"):  # DeepSpeed's
        scheduler._last_lr = scheduler.get_lr()
    else:
        return
    for group, rate in zip(optimizer.param_groups, scheduler._last_lr, strict=True):
        group["lr"] = rate


@contextlib.contextmanager
def averaged_weights(model: DeepSpeedEngine | torch.nn.Module) -> Iterator[None]:
    """Evaluate or save inside a `with` the average that a schedule-free optimizer makes, and train on from the point
    where gradients are taken. Collective. Nothing changes under other optimizers, and where it is the average already.
    """
    is_swapped = swap_in(model, "eval")
    yield
    if is_swapped:  # after an error ranks may be apart, and to gather the weights is collective
        swap_in(model, "train")


def swap_in(model: DeepSpeedEngine | torch.nn.Module, point: Literal["train", "eval"]) -> bool:
    """Put the weights to one of a schedule-free optimizer's two points; returns whether they were at the other.
    Collective.
    """
    optimizer = model.optimizer if isinstance(model, DeepSpeedEngine) else None
    averaging = optimizer.optimizer if isinstance(optimizer, DeepSpeedZeroOptimizer) else optimizer
    if averaging is None or averaging.param_groups[0].get("train_mode", point == "train") == (point == "train"):
        return False
    getattr(averaging, point)()
    if averaging is not optimizer:  # it has changed this rank's share in float32, not what computes
        optimizer.update_lp_params()
    return True
