"""What all ranks do together to save a checkpoint: write beside, hash, verify, publish. A save that fails leaves the
last good one.
"""

import shutil
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from dsft.checkpoints.manifest import TRAINER_STATE, files_of, hash_and_sync, publish
from dsft.errors import one_line
from dsft.runtime import distributed

WRITE_ERRORS = (OSError, RuntimeError, SafetensorError)
"""A full disk, as Python, torch's zip writer and safetensors say it."""
OPTIMIZER_SHARDS = "*_optim_states.pt"


@dataclass
class Saves:
    """Figures of a run's saves, for run.json."""

    number: int = 0
    seconds: float = 0.0
    largest_bytes: int = 0
    failed: list[str] = field(default_factory=list)


def save_whole(
    staged: Path,
    write: Callable[[], list[str]],
    check: Callable[[Path], list[str]],
    *,
    needed_bytes: int,
    facts: dict[str, Any],
    saves: Saves,
) -> Path | None:
    """Let every rank `write` into `staged`, then publish it. Returns the checkpoint's folder, or None where it failed,
    which `saves` records. Collective.

    Args:
        write: returns what it could not write. Where it has no more collectives to take part in, it may raise instead.
        check: on rank 0: what `staged` lacks.
        needed_bytes: what a checkpoint takes at least, where none was saved before.
        facts: for the manifest, beside the files.
    """
    start = time.monotonic()
    # Asked first: safetensors maps the file it writes, and a full disk then ends the process by a signal (SIGBUS).
    problems = distributed.from_all(_lack_of_room(staged, max(needed_bytes, saves.largest_bytes)))[:1]
    if not problems:
        try:
            problems = write()
        except WRITE_ERRORS as error:
            problems = [one_line(error)]
        problems = distributed.from_all([f"rank {distributed.rank()}: {problem}" for problem in problems])
    if not problems:
        problems = _publish(staged, check, facts)
    saves.seconds += time.monotonic() - start
    if problems:
        saves.failed += [f"{staged.name}: {problem}" for problem in problems]
        if distributed.rank() == 0:
            shutil.rmtree(staged.parent, ignore_errors=True)  # the room that it took
        distributed.wait_for_all()
        return None
    folder = staged.parent.parent / staged.name
    saves.number += 1
    saves.largest_bytes = max(saves.largest_bytes, sum(path.stat().st_size for path in files_of(folder)))
    return folder


def _lack_of_room(staged: Path, needed_bytes: int) -> list[str]:
    free_bytes = shutil.disk_usage(staged.parent.parent).free
    return (
        [
            f"{free_bytes / 1e9:.3g} GB are free on {socket.gethostname()}, and a checkpoint takes"
            f" {needed_bytes / 1e9:.3g} GB"
        ]
        if free_bytes < needed_bytes
        else []
    )


def _publish(staged: Path, check: Callable[[Path], list[str]], facts: dict[str, Any]) -> list[str]:
    """Hash the files, each rank its share of them, and move the checkpoint to its name on rank 0. Returns problems.
    Collective.
    """
    files, sealed, problems = files_of(staged), [], []
    try:
        sealed = [
            (str(path.relative_to(staged)), hash_and_sync(path))
            for path in files[distributed.rank() :: distributed.world_size()]
        ]
    except OSError as error:
        problems = [f"rank {distributed.rank()}: {error}"]
    everyone, problems = distributed.from_all(sealed), distributed.from_all(problems)
    if distributed.rank() == 0 and not problems:
        problems = check(staged)
        if not problems:
            try:
                publish(staged, facts | {"files": dict(sorted(everyone))})
            except OSError as error:
                problems = [str(error)]
    return distributed.from_all(problems)


def missing_shards(folder: Path, world_size: int, *, sharded: bool) -> list[str]:
    """What a checkpoint to resume from lacks of the ranks' own parts: optimizer shards under ZeRO, random states."""
    found = []
    if not (folder / TRAINER_STATE).is_file():
        found.append(f"{TRAINER_STATE} is missing")
    shards = len(list(folder.glob(f"global_step*/{OPTIMIZER_SHARDS}")))
    if sharded and shards < world_size:
        found.append(
            f"{shards} of {world_size} ranks' optimizer states are there; is the output folder shared by all nodes?"
        )
    states = len(list(folder.glob("rng_state*.pth")))
    if states < world_size:
        found.append(f"{states} of {world_size} ranks' random states are there")
    return found
