"""Says what a resume keeps, what it takes and what it refuses: the same on the same ranks and on others.

Kept are the weights, the optimizer's moments, the step, the place in the data and, on the same ranks, random states.
Refused is a run of another identity: other trained parameters, data or order, sequences per step or kind of optimizer,
each of which would make kept states those of something else. All other options are taken as they are now; where one
changes a step, such as the learning rate, the log says so.
"""

import hashlib
import json
import math
from pathlib import Path
from typing import Any

from dsft.checkpoints.manifest import read_manifest
from dsft.errors import UserError

TAKEN = (
    *("learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "max_steps", "num_train_epochs"),
    *("weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm", "label_smoothing_factor"),
)
"""Options of a step that a resume takes, in the manifest beside the identity."""


def run_identity(
    shapes: dict[str, tuple[int, ...]],
    *,
    data: dict[str, Any],
    seed: int,
    sequences_per_step: int,
    options: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the identity of a run, by the words that a message uses.

    Args:
        shapes: of the trained parameters, by name.
        data: the identity of what is read, by the words that a message uses.
        sequences_per_step: over all ranks.
        options: others that a resume cannot change, by the words that a message uses.
    """
    names_and_shapes = json.dumps(sorted((name, list(shape)) for name, shape in shapes.items()))
    return {
        "trained tensors": len(shapes),
        "trained elements": sum(map(math.prod, shapes.values())),
        "names and shapes of what is trained": hashlib.sha256(names_and_shapes.encode()).hexdigest()[:16],
        **data,
        "seed of the order": seed,
        "sequences per step": sequences_per_step,
        **(options or {}),
    }


def optimizer_kind(name: str) -> str:
    """Return what optimizers with the same states have in common: that of "paged_lion_32bit" and "Lion" is "lion"."""
    kind = name.lower().removeprefix("paged_").removesuffix("_fused").removesuffix("_torch").removesuffix("_32bit")
    return {"adam": "adamw"}.get(kind, kind.replace("_bnb", ""))


def changed_options(checkpoint: str, now: dict[str, Any]) -> list[str]:
    """Say which of the options TAKEN differ from those that saved `checkpoint`."""
    then = (read_manifest(Path(checkpoint)) or {}).get("options", {})
    return [f"{name} {value} ({then[name]} before)" for name, value in now.items() if then.get(name, value) != value]


def check_identity(checkpoint: str, now: dict[str, Any]) -> None:
    """Compare a run with the one that saved `checkpoint`. One without a manifest is another tool's, and not compared.

    Raises:
        UserError: with each difference, or where an earlier dsft wrote a manifest that does not say.
    """
    manifest = read_manifest(Path(checkpoint))
    weights_alone = "start from its weights alone with --resume_weights_only and a new output_dir"
    if manifest and "run_identity" not in manifest:
        raise UserError([f"resume_from_checkpoint: {checkpoint} is of an earlier dsft; {weights_alone}"])
    then = manifest["run_identity"] if manifest else {}
    changed = [
        f"{name}: {then[name]} then, {value} now" for name, value in now.items() if name in then and then[name] != value
    ]
    if changed:
        raise UserError(
            [
                f"resume_from_checkpoint: {checkpoint} is of another run ({'; '.join(changed)}); give the options of"
                f" that run, or {weights_alone}"
            ]
        )
