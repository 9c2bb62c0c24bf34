"""What a checkpoint was made with, as far as going on from it depends on that: model, adapter, data and their order.

Kept in the checkpoint's manifest; a run that differs is refused with what differs, instead of starting from something
else in silence.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from dsft.checkpoints.manifest import read_manifest
from dsft.errors import raise_if_any


def run_identity(
    shapes: dict[str, tuple[int, ...]], *, data: dict[str, Any], seed: int, sequences_per_step: int
) -> dict[str, Any]:
    """By the words that a message uses.

    Args:
        shapes: of the trained parameters, by name.
        data: the identity of what is read, by the words that a message uses.
        sequences_per_step: over all ranks.
    """
    return {
        "trained tensors": len(shapes),
        "trained elements": int(sum(np.prod(shape, dtype=np.int64) for shape in shapes.values())),
        "names and shapes of what is trained": _digest(sorted((name, list(shape)) for name, shape in shapes.items())),
        **data,
        "seed of the order": seed,
        "sequences per step": sequences_per_step,
    }


def check_identity(checkpoint: str, now: dict[str, Any]) -> None:
    """Going on from `checkpoint` must continue what it was made with. One without a manifest is another tool's: nothing
    is known of it.

    Raises:
        UserError: with each difference.
    """
    then = (read_manifest(Path(checkpoint)) or {}).get("run_identity", {})
    changed = [
        f"{name}: {then[name]} then, {value} now" for name, value in now.items() if name in then and then[name] != value
    ]
    way_out = (
        "give the options it was made with, or start from its weights alone with --resume_weights_only and a new"
        " output_dir"
    )
    raise_if_any(
        [f"resume_from_checkpoint: {checkpoint} was made with something else ({'; '.join(changed)}); {way_out}"]
        if changed
        else []
    )


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]
