"""Saves a checkpoint on all ranks: write beside its name, hash, verify, publish.

    RUN/.saving/checkpoint-8/   every rank writes here; a rank that fails notes it and stays in the collectives
    RUN/checkpoint-8/           renamed once rank 0 has verified it and written its manifest

A save that fails leaves the last good checkpoint as it was.
"""

import contextlib
import shutil
import socket
import time
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from safetensors import SafetensorError

from dsft.checkpoints.manifest import (
    STAGING,
    TRAINER_STATE,
    files_of,
    hash_and_sync,
    publish,
    shares_of_ranks,
    write_hashed,
)
from dsft.checkpoints.removal import discard_if_possible
from dsft.errors import one_line
from dsft.models.zero_shards import OPTIMIZER_FILES
from dsft.runtime import distributed

WRITE_ERRORS = (OSError, RuntimeError, SafetensorError)
"""A full disk, as Python, torch's zip writer and safetensors report it."""


@dataclass
class Saves:
    """Counts a run's saves, for run.json."""

    number: int = 0
    seconds: float = 0.0
    largest_bytes: int = 0
    failed: list[str] = field(default_factory=list)
    """One entry for each save that failed, with all its problems."""


class StagedSave:
    """Carries one save of all ranks from the first byte in `.saving/` to the folder at its name.

    It is a checkpoint, or the final model.
    """

    def __init__(self, folder: Path):
        self.staged, self.folder = folder.parent / STAGING / folder.name, folder
        self.errors: list[str] = []
        """What this rank could not write."""
        self.hashed: dict[str, dict[str, Any]] = {}
        """Files that this rank hashed while it wrote them: path in the folder -> size and SHA-256."""

    def attempt(self, write: Callable[[], Any]) -> None:
        """Note an error of `write` instead of raising it: the other ranks wait in the collectives that follow."""
        try:
            write()
        except WRITE_ERRORS as error:
            self.errors.append(one_line(error))

    @contextlib.contextmanager
    def noting_errors_of(self, checkpoint_engine: Any, optimizer: Any = None) -> Iterator[None]:
        """Replace `save` of DeepSpeed's checkpoint engine, which writes this rank's shards, by one that never raises.

        rank 0: save(shards), commit, barrier ...
        rank 1: save(shards) fails and is noted, commit, barrier ...   (if it raised, rank 0 would wait for it)

        Before `commit`, and before ZeRO-3's `optimizer` gathers parameters again, the ranks wait for each other, so
        that none waits in a collective while another still writes.
        DeepSpeed's default engine hands its path to torch.save as it is, and takes a file that hashes in its place.
        """
        from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

        save = checkpoint_engine.save

        def save_hashed(state_dict: Any, path: str) -> None:
            if not isinstance(checkpoint_engine, TorchCheckpointEngine):
                return save(state_dict, path)
            entry = write_hashed(Path(path), lambda file: save(state_dict, file))
            self.hashed[str(Path(path).relative_to(self.staged))] = entry

        def together(function: Callable[..., Any]) -> Callable[..., Any]:
            def wait_and_call(*args: Any, **kwargs: Any) -> Any:
                distributed.wait_long("shards are written")
                return function(*args, **kwargs)

            return wait_and_call

        def save_and_note(state_dict: Any, path: str) -> None:
            self.attempt(lambda: save_hashed(state_dict, path))

        with contextlib.ExitStack() as replaced:
            replaced.enter_context(mock.patch.object(checkpoint_engine, "save", save_and_note))
            for owner, name in ((checkpoint_engine, "commit"), (optimizer, "checkpoint_event_epilogue")):
                if function := getattr(owner, name, None):
                    replaced.enter_context(mock.patch.object(owner, name, together(function)))
            yield

    def run(
        self,
        write: Callable[[], None],
        check: Callable[[Path], list[str]],
        *,
        needed_bytes: int,
        facts: dict[str, Any],
        saves: Saves,
    ) -> bool:
        """Let every rank `write`, then publish. Returns whether the checkpoint stands; `saves` counts. Collective.

        Args:
            check: on rank 0: what the staged folder lacks.
            needed_bytes: what a checkpoint takes at least, where none was saved before.
            facts: for the manifest, beside the files.
        """
        start = time.monotonic()
        # What a killed save left goes first, on nodes with their own disks too: it would be published with the rest.
        distributed.first_on_rank_0(self._clear_staging)
        # Room first: safetensors maps the file it writes, and a full disk then ends the process by a signal (SIGBUS).
        lacks = self._leftovers() or self._lack_of_room(max(needed_bytes, saves.largest_bytes))
        problems = distributed.from_all(lacks)[:1]
        if not problems:
            self.attempt(write)
            problems = distributed.from_all([f"rank {distributed.rank()}: {error}" for error in self.errors])
        problems = problems or self._publish(check, facts)
        saves.seconds += time.monotonic() - start
        if problems:
            saves.failed.append(f"{self.folder.name}: {'; '.join(problems)}")
            distributed.first_on_rank_0(self._clear_staging)  # the room that it took
            return False
        saves.number += 1
        saves.largest_bytes = max(saves.largest_bytes, sum(path.stat().st_size for path in files_of(self.folder)))
        return True

    def _clear_staging(self) -> None:
        discard_if_possible(self.staged.parent)

    def _leftovers(self) -> list[str]:
        return [f"{self.staged} is left of an earlier save and cannot be moved"] if self.staged.exists() else []

    def _lack_of_room(self, needed_bytes: int) -> list[str]:
        free_bytes = shutil.disk_usage(self.folder.parent).free
        if free_bytes >= needed_bytes:
            return []
        free, needed = f"{free_bytes / 1e9:.3g} GB", f"{needed_bytes / 1e9:.3g} GB"
        return [f"{free} are free on {socket.gethostname()}, and {self.folder.name} takes {needed}"]

    def _publish(self, check: Callable[[Path], list[str]], facts: dict[str, Any]) -> list[str]:
        """Hash the files that were not while they were written, each rank its own and a share of the rest, and move the
        checkpoint to its name.

        Returns problems. Collective.
        """
        hashed, errors = [], []
        written = dict(distributed.from_all(list(self.hashed.items())))
        # By rank 0's view: another node of a network file system may know a file's size later.
        shares = distributed.on_rank_0(lambda: shares_of_ranks(self._unhashed(written), distributed.world_size()))
        try:
            hashed = [(str(path.relative_to(self.staged)), hash_and_sync(path)) for path in shares[distributed.rank()]]
        except OSError as error:
            errors = [f"rank {distributed.rank()}: {error}"]
        distributed.wait_long("files are hashed")
        files, errors = distributed.from_all(hashed), distributed.from_all(errors)
        if errors:
            return errors
        if distributed.rank() == 0 and not (errors := check(self.staged)):
            try:
                publish(self.staged, facts | {"files": dict(sorted([*written.items(), *files]))})
            except OSError as error:
                errors = [str(error)]
        distributed.wait_long("checkpoint is published")
        return distributed.from_all(errors)

    def _unhashed(self, written: Container[str]) -> list[Path]:
        return [path for path in files_of(self.staged) if str(path.relative_to(self.staged)) not in written]


def missing_shards(folder: Path, world_size: int, *, sharded: bool) -> list[str]:
    """List what a checkpoint to resume from lacks of the ranks' parts: optimizer shards under ZeRO, random states."""
    errors = []
    if not (folder / TRAINER_STATE).is_file():
        errors.append(f"{TRAINER_STATE} is missing")
    shards = len(list(folder.glob(f"global_step*/{OPTIMIZER_FILES}")))
    if sharded and shards < world_size:
        errors.append(
            f"{shards} of {world_size} ranks' optimizer states are there; is the output folder shared by all nodes?"
        )
    states = len(list(folder.glob("rng_state*.pth")))
    if states < world_size:
        errors.append(f"{states} of {world_size} ranks' random states are there")
    return errors
