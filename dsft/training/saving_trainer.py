"""A Trainer whose checkpoints are whole or are not there, and what a saved folder is held against."""

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn
from transformers import Trainer

from dsft.checkpoints.identity import run_identity
from dsft.checkpoints.manifest import TRAINER_STATE, checkpoint_folder, prune, staging_folder
from dsft.checkpoints.readback import readback_errors, trained_shapes
from dsft.checkpoints.reshard import restore, topology_change
from dsft.checkpoints.run_folder import FINAL
from dsft.checkpoints.save import WRITE_ERRORS, Saves, missing_shards, save_whole
from dsft.checkpoints.tensor_sources import SafetensorsFiles
from dsft.config.deepspeed_json import offloads, stage
from dsft.errors import one_line
from dsft.runtime.console import say
from dsft.runtime.distributed import max_over_ranks
from dsft.watchdog import client as watchdog

SAMPLED_TENSORS = 16
"""Of the final model, read back and compared in full."""


class SavingTrainer(Trainer):
    """Saves by the Trainer's strategy and every `save_minutes`; `saves` counts. Goes on from checkpoints of other ranks
    and stages.
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
        self.saves, self.expected = Saves(), trained_shapes(model)
        self.run_identity = run_identity(
            self.expected,
            data=data_identity,
            seed=self.args.data_seed or self.args.seed,
            sequences_per_step=self.args.per_device_train_batch_size
            * self.args.gradient_accumulation_steps
            * self.args.world_size,
        )
        self._saved_at, self._writes_to, self._unwritten = time.monotonic(), None, []

    def is_save_due(self) -> bool:
        """Whether `save_minutes` are over since the last save, by this rank's clock."""
        return self.save_minutes is not None and time.monotonic() - self._saved_at > 60 * self.save_minutes

    def _init_training_state(self, max_steps: int, *args: Any, **kwargs: Any) -> tuple[int, int]:
        started = super()._init_training_state(max_steps, *args, **kwargs)
        self.state.compute_steps(
            self.args, max_steps
        )  # else a resumed run logs, evaluates and saves as often as the checkpoint's did
        return started

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None
    ) -> tuple[Any, Any]:
        """The Trainer's, which ends with DeepSpeed reading a checkpoint; one that DeepSpeed cannot read is read by
        `resharding.py`. Collective.
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
        return str(self._writes_to or super()._get_output_dir(trial))

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """The Trainer's save, into a folder that gets its name once everything is written and verified; then older ones
        are removed. Collective.
        """
        step, output_dir = self.state.global_step, self.args.output_dir
        staged = staging_folder(output_dir, step)
        self._writes_to, self._unwritten = staged.parent, []
        with watchdog.phase("saving"):
            saved = save_whole(
                staged,
                lambda: self._write_checkpoint(model, trial, staged),
                self._check_saved,
                saves=self.saves,
                needed_bytes=self._checkpoint_bytes(),
                facts={
                    "step": step,
                    **self.topology,
                    "run_identity": self.run_identity,
                    "loss": next(
                        (entry["loss"] for entry in reversed(self.state.log_history) if "loss" in entry), None
                    ),
                },
            )
        self._writes_to, self._saved_at = None, time.monotonic()
        if saved is None:
            say(
                f"error: checkpoint-{step} could not be saved ({self.saves.failed[-1]}); training goes on, earlier"
                " checkpoints stay"
            )
        elif self.is_world_process_zero():
            prune(output_dir, limit=self.args.save_total_limit, best=self.state.best_model_checkpoint)

    def _write_checkpoint(self, model: nn.Module, trial: Any, staged: Path) -> list[str]:
        """The Trainer's save. What one rank cannot write it notes and goes on: the others wait for it in the
        collectives that follow. Returns the notes.
        """
        engine = self.model_wrapped.checkpoint_engine
        best, write = self.state.best_model_checkpoint, engine.save
        engine.save = lambda *args, **kwargs: self._note_errors(lambda: write(*args, **kwargs))
        try:
            super()._save_checkpoint(model, trial)
        finally:
            engine.save = write
        # The Trainer names the best checkpoint by where it is now, not by where it will be.
        folder = checkpoint_folder(self.args.output_dir, self.state.best_global_step or 0)
        self.state.best_model_checkpoint = str(folder) if folder.name == staged.name or folder.is_dir() else best
        if self.args.should_save:
            self.state.save_to_json(str(staged / TRAINER_STATE))
        return self._unwritten

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        if self._writes_to is None:
            super()._save(output_dir, state_dict)
        else:
            self._note_errors(lambda: super(SavingTrainer, self)._save(output_dir, state_dict))
        if self.args.should_save and not self._unwritten:
            sampled = 0 if self._writes_to else SAMPLED_TENSORS
            self._unwritten += readback_errors(SafetensorsFiles(Path(output_dir)), state_dict or {}, sampled=sampled)

    def _note_errors(self, write: Callable[[], Any]) -> None:
        try:
            write()
        except WRITE_ERRORS as error:
            self._unwritten.append(one_line(error))

    def _checkpoint_bytes(self) -> int:
        """At least: the trained weights as they are saved and, to resume, a fp32 copy with Adam's two moments."""
        trained = sum(math.prod(shape) for shape in self.expected.values())
        return trained * (next(self.model.parameters()).element_size() + (0 if self.args.save_only_model else 12))

    def _check_saved(self, folder: Path) -> list[str]:
        problems = self._missing_weights(folder)
        if not self.args.save_only_model:
            problems += missing_shards(folder, self.args.world_size, sharded=self.topology["zero_stage"] > 0)
        return problems

    def _missing_weights(self, folder: Path) -> list[str]:
        num_elements = sum(map(math.prod, self.expected.values()))
        return readback_errors(SafetensorsFiles(folder), {}, num_elements=num_elements)

    def save_final(self) -> Path:
        """Save the model (LoRA: the adapter) to `final/` and read back that every weight is there, and a sample of them
        bit by bit. Collective.
        """
        folder = Path(self.args.output_dir) / FINAL
        watchdog.set_phase("saving")
        self._unwritten = []
        self.save_model(str(folder))
        problems = self._missing_weights(folder) + self._unwritten if self.is_world_process_zero() else []
        if max_over_ranks(float(len(problems))):
            raise RuntimeError(
                f"{folder} is incomplete, do not use it: {'; '.join(problems[:5])} (see the checkpoints for intact"
                " weights)"
            )
        return folder
