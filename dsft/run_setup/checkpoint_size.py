"""What a training writes to its disk: the bytes of the final model, of a checkpoint, and how many lie there at once.

One count for all who ask: the check before training, the trainer before each save, and `dsft doctor`.
"""

import math
from dataclasses import dataclass
from typing import Any

from dsft.checkpoints.manifest import checkpoints, files_of
from dsft.config.deepspeed import stage
from dsft.config.options import TrainConfig
from dsft.models.size import ModelSize
from dsft.planner.optimizers import optimizer_memory
from dsft.run_setup.arguments import with_defaults
from dsft.runtime.disk import free_bytes
from dsft.units import DTYPE_BYTES, GB, plural

STEPS_BETWEEN_SAVES = 500
"""transformers' own default of save_steps."""
BYTES_PER_TOKEN = 200
"""Of a tokenizer's files, at most: Llama 3's take 134."""
SMALL_FILES_BYTES = 100_000
"""Of the config, the model card, the training arguments and run.json."""


@dataclass(frozen=True, kw_only=True)
class CheckpointSize:
    """Bytes on the disk of `output_dir`, over all ranks."""

    weight_bytes: int
    """The weights of the model, frozen ones too, or of the adapters, as safetensors; tied ones once."""
    state_bytes: int
    """What a checkpoint has beside them to resume from: DeepSpeed's own copy of the weights, the optimizer's state."""
    small_bytes: int
    """Tokenizer, configs, card."""
    kept: int
    """Checkpoints that lie there at once, at most: those kept, and the one that is being written."""

    @property
    def final_bytes(self) -> int:
        return self.weight_bytes + self.small_bytes

    @property
    def checkpoint_bytes(self) -> int:
        return self.weight_bytes + self.state_bytes + self.small_bytes

    @property
    def total_bytes(self) -> int:
        return self.final_bytes + self.kept * self.checkpoint_bytes


def checkpoint_size(
    options: TrainConfig, size: ModelSize, deepspeed_config: dict[str, Any] | None = None
) -> CheckpointSize:
    """Counts what a training writes.

    Args:
        options: with `dtype` decided.
        deepspeed_config: of the plan, or of an explicit `zero`; where there is none yet, the stage that writes least.
    """
    num_bytes = DTYPE_BYTES[options.dtype]
    optimizer = optimizer_memory(deepspeed_config or {}, options.training.get("optim"), size=size)
    zero = 3 if deepspeed_config is None else stage(deepspeed_config)
    # Stages 0 to 2 write the module again, stages 2 and 3 what of it is frozen (engine.py, frozen_param_fragments); of
    # adapters none writes the base. ZeRO 0 in fp32 trains the weights themselves, without a master.
    written = size.num_trainable if size.lora_r else size.num_params
    module = (written if zero < 3 else 0) + (written - size.num_trainable if zero >= 2 else 0)
    of_optimizer = optimizer.state_bytes if zero == 0 and num_bytes == 4 else optimizer.checkpoint_bytes
    states = num_bytes * module + of_optimizer * size.num_trainable
    # How many lie there at once: those kept and the one that is being written, and no more than are saved.
    values = with_defaults(options)
    strategy, max_steps = str(values.get("save_strategy", "steps")), values.get("max_steps", -1)
    every, limit = values.get("save_steps", STEPS_BETWEEN_SAVES), values.get("save_total_limit")
    keeps_best = any(values.get(name) for name in ("load_best_model_at_end", "metric_for_best_model"))
    num_kept = max(limit, 2 if keeps_best or strategy == "best" else 1) + 1 if limit else math.inf
    num_saved = math.inf  # unknown, also with save_minutes
    if not options.save_minutes:
        if strategy == "no":
            num_saved = 0
        elif strategy == "epoch" and max_steps <= 0:
            num_saved = math.ceil(values.get("num_train_epochs", 3))
        elif strategy == "steps" and every < 1:
            num_saved = math.ceil(1 / every)  # a share of the steps
        elif strategy == "steps" and max_steps > 0:
            num_saved = math.ceil(max_steps / every)
    known = min(num_kept, num_saved)
    return CheckpointSize(
        weight_bytes=num_bytes * written,
        state_bytes=0 if options.training.get("save_only_model") else int(states),
        small_bytes=BYTES_PER_TOKEN * size.vocab_size + SMALL_FILES_BYTES,
        kept=2 if known == math.inf else int(known),
    )


def check_room(output_dir: str, size: CheckpointSize) -> list[str]:
    """Compares the free bytes of output_dir's disk with what the run will hold there at once."""
    replaced = sum(file.stat().st_size for folder in checkpoints(output_dir) for file in files_of(folder))
    needed, free = max(size.final_bytes, size.total_bytes - replaced), free_bytes(output_dir)
    if free is None or free >= needed:
        return []
    each = f"{size.checkpoint_bytes / GB:.3g} GB"
    and_checkpoints = f" and {plural(size.kept, 'checkpoint')} of {each}" if size.kept else ""
    fewer = ", a smaller save_total_limit, or save_strategy: no" if size.kept else ""
    return [
        f"output_dir={output_dir}: the final model ({size.final_bytes / GB:.3g} GB){and_checkpoints} need"
        f" {needed / GB:.3g} GB more, but the disk has {free / GB:.3g} GB free; choose another disk{fewer}"
    ]
