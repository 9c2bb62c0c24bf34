"""Identifies the run of a checkpoint, as far as resuming depends on it: model, adapter, data and their order.

Kept in the checkpoint's manifest. A run that differs is refused with each difference, instead of training something
else in silence.
"""

import hashlib
import json
import math
from pathlib import Path
from typing import Any

from dsft.checkpoints.manifest import read_manifest
from dsft.errors import UserError


def run_identity(
    shapes: dict[str, tuple[int, ...]], *, data: dict[str, Any], seed: int, sequences_per_step: int
) -> dict[str, Any]:
    """Return the identity of a run, by the words that a message uses.

    Args:
        shapes: of the trained parameters, by name.
        data: the identity of what is read, by the words that a message uses.
        sequences_per_step: over all ranks.
    """
    names_and_shapes = json.dumps(sorted((name, list(shape)) for name, shape in shapes.items()))
    return {
        "trained tensors": len(shapes),
        "trained elements": sum(map(math.prod, shapes.values())),
        "names and shapes of what is trained": hashlib.sha256(names_and_shapes.encode()).hexdigest()[:16],
        **data,
        "seed of the order": seed,
        "sequences per step": sequences_per_step,
    }


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
