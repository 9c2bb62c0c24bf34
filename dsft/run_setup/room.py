"""Whether the disk has room for what a training keeps there: the final model and every checkpoint to come."""

import math

from dsft.checkpoints.manifest import checkpoints, files_of
from dsft.config.options import TrainConfig
from dsft.run_setup.arguments import with_defaults
from dsft.runtime.disk import free_bytes
from dsft.units import GB, plural

STEPS_BETWEEN_SAVES = 500
"""transformers' own default of save_steps."""


def check_room(options: TrainConfig, num_trainable: int) -> list[str]:
    """Compares the free bytes of output_dir's disk with what the run will hold there at once.

    Args:
        num_trainable: trained parameters; those that are tied count once.
    """
    output_dir = options.training["output_dir"]
    final = num_trainable * (4 if options.dtype == "float32" else 2)
    # To resume: an fp32 copy of the weights and Adam's two moments.
    checkpoint = final + (0 if options.training.get("save_only_model") else 12 * num_trainable)
    count = num_checkpoints(options)
    replaced = sum(file.stat().st_size for folder in checkpoints(output_dir) for file in files_of(folder))
    needed, free = final + max(0, count * checkpoint - replaced), free_bytes(output_dir)
    if free is None or free >= needed:
        return []
    and_checkpoints = f" and {plural(count, 'checkpoint')} of {checkpoint / GB:.3g} GB" if count else ""
    fewer = ", a smaller save_total_limit, or save_strategy: no" if count else ""
    return [
        f"output_dir={output_dir}: the final model ({final / GB:.3g} GB){and_checkpoints} need"
        f" {needed / GB:.3g} GB more, but the disk has {free / GB:.3g} GB free; choose another disk{fewer}"
    ]


def num_checkpoints(options: TrainConfig) -> int:
    """Counts the checkpoints that lie in output_dir at once, at most: those kept, and the one that is being written."""
    values = with_defaults(options)
    strategy = str(values.get("save_strategy", "steps"))
    if strategy == "no" and not options.save_minutes:
        return 0
    limit = values.get("save_total_limit")
    kept = limit + 1 if limit else math.inf
    saves = math.inf
    if strategy == "epoch" and values.get("max_steps", -1) <= 0:
        saves = math.ceil(values.get("num_train_epochs", 3))
    elif strategy == "steps" and (every := values.get("save_steps", STEPS_BETWEEN_SAVES)) < 1:
        saves = math.ceil(1 / every)  # a share of the steps
    elif strategy == "steps" and values.get("max_steps", -1) > 0:
        saves = math.ceil(values["max_steps"] / every)
    known = min(kept, math.inf if options.save_minutes else saves)
    return 2 if known == math.inf else int(known)
