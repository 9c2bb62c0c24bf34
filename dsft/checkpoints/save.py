"""Saves a checkpoint on all ranks: write beside its name, hash, check, publish.

RUN/.saving/checkpoint-8/   every rank writes here
RUN/checkpoint-8/           renamed once rank 0 has checked it and written its manifest

A failure ends the run: the rank that failed raises, and the others are ended with its cause. Earlier checkpoints are
complete, and `.saving/` is discarded at the next start.
"""

import contextlib
import functools
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsft.checkpoints.manifest import (
    STAGING,
    TRAINER_STATE,
    discard,
    files_of,
    hash_and_sync,
    publish,
    share_of,
)
from dsft.errors import Unsaved, one_line
from dsft.models.model_folder import OPTIMIZER_FILES
from dsft.runtime import distributed
from dsft.runtime.disk import free_bytes
from dsft.runtime.hardware import which_memory
from dsft.units import GB

DISK_ERRORS = re.compile(
    r"os error \d+"  # safetensors, written in Rust
    r"|PytorchStreamWriter|inline_container|iostream error|Parent directory .* does not exist"  # torch's zip writer
)
"""How libraries report a disk, in errors that are no OSError."""


@dataclass
class Saves:
    """Counts a run's saves, for run.json."""

    number: int = 0
    seconds: float = 0.0
    largest_bytes: int = 0


class StagedSave:
    """Carries one save of all ranks, a checkpoint or the final model, from `.saving/` to the folder at its name."""

    def __init__(self, folder: Path, saves: Saves):
        """
        Args:
            saves: of the run, among which this one is counted.
        """
        self.staged = folder.parent / STAGING / folder.name
        self.folder = folder
        self.saves = saves

    def run(
        self,
        write: Callable[[], None],
        check: Callable[[Path], list[str]],
        *,
        facts: dict[str, Any],
        needed_bytes: int,
    ) -> None:
        """Lets every rank `write`, and publishes what was written. Collective.

        Args:
            check: on rank 0: lists what is missing in the staged folder.
            facts: for the manifest, beside the files.
            needed_bytes: what the save takes at least, if none was made before.

        Raises:
            Unsaved: on a rank that could not write, or on all if something is missing.
        """
        start = time.monotonic()
        rank = distributed.rank()
        with failures_named(self.folder):
            # What a killed save left goes first: it would be published with the rest.
            distributed.first_on_rank_0(functools.partial(discard, self.staged.parent))
            # safetensors maps the file that it writes: a full disk would kill the process without a word (SIGBUS).
            needed = max(needed_bytes, self.saves.largest_bytes)
            free = free_bytes(self.folder.parent) if rank == 0 else None
            if free is not None and free < needed:
                raise OSError(f"it takes {needed / GB:.3g} GB, and {free / GB:.3g} GB are free")
            write()
            distributed.wait_long("shards are written")
            files = self._hash()
            errors = check(self.staged) if rank == 0 else []
            if rank == 0 and not errors:
                publish(self.staged, facts | {"files": files})
        distributed.wait_long("checkpoint is published")
        if problems := distributed.from_all(errors):
            raise Unsaved(f"{self.folder.name} could not be saved: {'; '.join(problems)}")
        self.saves.number += 1
        self.saves.seconds += time.monotonic() - start
        self.saves.largest_bytes = max(self.saves.largest_bytes, sum(entry["size"] for entry in files.values()))

    def _hash(self) -> dict[str, dict[str, Any]]:
        """Returns size and SHA-256 of each staged file by its path: ranks read their own and a share of the rest."""
        # Nodes need not share the folder: what rank 0 sees is read by ranks that see the same one.
        status = self.staged.stat() if self.staged.exists() else None
        folders = distributed.from_all([status and (distributed.this_node(), status.st_dev, status.st_ino)])
        readers = [number for number, folder in enumerate(folders) if folder == folders[0]]
        written = distributed.on_rank_0(functools.partial(files_of, self.staged))
        mine = []
        if distributed.rank() in readers:
            mine = share_of(written, reader=readers.index(distributed.rank()), readers=len(readers))
        hashed = [(str(path.relative_to(self.staged)), hash_and_sync(path)) for path in mine]
        distributed.wait_long("files are hashed")
        return dict(sorted(distributed.from_all(hashed)))


@contextlib.contextmanager
def failures_named(folder: Path) -> Iterator[None]:
    """Turns a disk's error inside a `with` into `Unsaved` with the name of what could not be saved."""
    try:
        yield
    except Exception as error:
        is_of_disk = isinstance(error, OSError) or DISK_ERRORS.search(str(error))
        if which_memory(error) or not is_of_disk:
            raise
        text = f"{folder.name} could not be saved: {one_line(error)}; earlier checkpoints are complete"
        raise Unsaved(text) from error


def missing_shards(folder: Path, world_size: int, *, sharded: bool) -> list[str]:
    """List the ranks' parts that a checkpoint has not: optimizer shards under ZeRO, random states."""
    errors = []
    if not (folder / TRAINER_STATE).is_file():
        errors.append(f"{TRAINER_STATE} is missing")
    shards = len(list(folder.glob(f"global_step*/{OPTIMIZER_FILES}")))
    if sharded and shards < world_size:
        errors.append(f"{shards} of {world_size} ranks' optimizer states are there")
    states = len(list(folder.glob("rng_state*.pth")))
    if states < world_size:
        errors.append(f"{states} of {world_size} ranks' random states are there; do all nodes share the output folder?")
    return errors
