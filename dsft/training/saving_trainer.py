"""Defines a Trainer whose checkpoints are complete or are not there."""

import math
import time
from pathlib import Path
from typing import Any

from torch import nn
from transformers import Trainer

from dsft.checkpoints.identity import run_identity
from dsft.checkpoints.manifest import TRAINER_STATE, checkpoint_folder, prune
from dsft.checkpoints.readback import readback_errors, trained_shapes
from dsft.checkpoints.reshard import restore, topology_change
from dsft.checkpoints.run_folder import FINAL
from dsft.checkpoints.save import Saves, StagedSave, missing_shards
from dsft.checkpoints.tensor_sources import SafetensorsFiles
from dsft.config.deepspeed_json import offloads, stage
from dsft.runtime.console import say
from dsft.runtime.distributed import max_over_ranks
from dsft.watchdog import client as watchdog

SAMPLED_TENSORS = 16
"""Of the final model, read back and compared in full."""


class SavingTrainer(Trainer):
    """Saves by the Trainer's strategy and every `save_minutes`, and resumes from checkpoints of other ranks and stages.

    `saves` counts.
    """

    def __init__(
        self, model: nn.Module, *args: Any, save_minutes: float | None, data_identity: dict[str, Any], **kwargs: Any
    ):
        super().__init__(model, *args, **kwargs)
        deepspeed_config = self.args.hf_deepspeed_config.config
        self.topology = {
            "world_size": self.args.world_size,
            "zero_stage": stage(deepspeed_config),
            "offload": offloads(deepspeed_config),
        }
        self.save_minutes = save_minutes
        shapes = trained_shapes(model)
        self.saves, self._num_trained = Saves(), sum(map(math.prod, shapes.values()))
        self.run_identity = run_identity(
            shapes,
            data=data_identity,
            seed=self.args.data_seed or self.args.seed,
            sequences_per_step=self.args.per_device_train_batch_size
            * self.args.gradient_accumulation_steps
            * self.args.world_size,
        )
        self._saved_at = time.monotonic()
        self._staged_save: StagedSave | None = None
        self._final_errors: list[str] = []

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
        """Prepare as the Trainer, which ends with DeepSpeed reading a checkpoint; `reshard.py` reads what it cannot.

        Collective.
        """
        if resume_from_checkpoint is None or not topology_change(resume_from_checkpoint, self.topology):
            return super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        prepared = super()._prepare_for_training(max_steps, train_dataloader, None)
        self._restore(resume_from_checkpoint)
        return prepared

    def _restore(self, checkpoint: str) -> None:
        engine = self.model_wrapped
        restore(engine, engine.lr_scheduler or self.lr_scheduler, checkpoint)

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        if topology_change(best, self.topology):
            self._restore(best)
        else:
            super()._load_best_model()

    def _get_output_dir(self, trial: Any) -> str:
        return str(self._staged_save.staged.parent if self._staged_save else super()._get_output_dir(trial))

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Save into a folder that gets its name once everything is written and verified, then remove older ones.

        Collective.
        """
        step, output_dir = self.state.global_step, self.args.output_dir
        losses = (entry["loss"] for entry in reversed(self.state.log_history) if "loss" in entry)
        save = self._staged_save = StagedSave(output_dir, step)
        with watchdog.phase("saving"):
            is_saved = save.run(
                lambda: self._write_checkpoint(model, trial, save),
                self._check_saved,
                saves=self.saves,
                needed_bytes=self._checkpoint_bytes(),
                facts={"step": step, **self.topology, "run_identity": self.run_identity, "loss": next(losses, None)},
            )
        self._staged_save, self._saved_at = None, time.monotonic()
        if not is_saved:
            say(
                f"error: checkpoint-{step} could not be saved ({self.saves.failed[-1]}); training continues, earlier"
                " checkpoints stay"
            )
        elif self.is_world_process_zero():
            prune(output_dir, limit=self.args.save_total_limit, best=self.state.best_model_checkpoint)

    def _write_checkpoint(self, model: nn.Module, trial: Any, save: StagedSave) -> None:
        best = self.state.best_model_checkpoint
        with save.noting_errors_of(self.model_wrapped.checkpoint_engine):
            super()._save_checkpoint(model, trial)
        # The Trainer names the best checkpoint by where it is now, not by where it will be.
        folder = checkpoint_folder(self.args.output_dir, self.state.best_global_step or 0)
        self.state.best_model_checkpoint = str(folder) if folder == save.folder or folder.is_dir() else best
        if self.args.should_save:
            self.state.save_to_json(str(save.staged / TRAINER_STATE))

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        save, sampled, errors = self._staged_save, SAMPLED_TENSORS, self._final_errors
        if save is None:
            super()._save(output_dir, state_dict)
        else:
            sampled, errors = 0, save.errors
            save.attempt(lambda: super(SavingTrainer, self)._save(output_dir, state_dict))
        if self.args.should_save and not errors:
            errors += readback_errors(SafetensorsFiles(Path(output_dir)), state_dict or {}, sampled=sampled)

    def _checkpoint_bytes(self) -> int:
        """Return at least what is saved: the trained weights and, to resume, an fp32 copy with Adam's two moments."""
        return self._num_trained * (
            next(self.model.parameters()).element_size() + (0 if self.args.save_only_model else 12)
        )

    def _check_saved(self, folder: Path) -> list[str]:
        problems = self._missing_weights(folder)
        if not self.args.save_only_model:
            problems += missing_shards(folder, self.args.world_size, sharded=self.topology["zero_stage"] > 0)
        return problems

    def _missing_weights(self, folder: Path) -> list[str]:
        return readback_errors(SafetensorsFiles(folder), {}, num_elements=self._num_trained)

    def save_final(self) -> Path:
        """Save the model (LoRA: the adapter) to `final/`, count its elements and read a sample back. Collective."""
        folder = Path(self.args.output_dir) / FINAL
        watchdog.set_phase("saving")
        self._final_errors = []
        self.save_model(str(folder))
        errors = self._missing_weights(folder) + self._final_errors if self.is_world_process_zero() else []
        if max_over_ranks(float(len(errors))):
            raise RuntimeError(
                f"{folder} is incomplete, do not use it: {'; '.join(errors[:5])} (see the checkpoints for intact"
                " weights)"
            )
        return folder
