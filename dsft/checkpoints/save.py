"""Saves a checkpoint on all ranks: write beside its name, hash, verify, publish.

RUN/.saving/checkpoint-8/   every rank writes here; a rank that fails notes it and stays in the collectives
RUN/checkpoint-8/           renamed once rank 0 has verified it and written its manifest
"""

import contextlib
import copy
import ctypes
import errno
import functools
import os
import re
import shutil
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map

from dsft.checkpoints.manifest import (
    STAGING,
    TRAINER_STATE,
    discard,
    files_of,
    hash_and_sync,
    publish,
    shares_of_ranks,
    write_hashed,
)
from dsft.checkpoints.readback import readback_errors
from dsft.errors import UserError, one_line
from dsft.models.model_folder import OPTIMIZER_FILES
from dsft.models.weight_files import SafetensorsFiles
from dsft.runtime import distributed, patches
from dsft.runtime.disk import free_bytes
from dsft.runtime.hardware import which_memory
from dsft.units import GB
from dsft.watchdog import client as watchdog

DISK_ERRORS = re.compile(
    r"os error (?P<number>\d+)"  # safetensors, written in Rust
    r"|PytorchStreamWriter|inline_container|iostream error|Parent directory .* does not exist"  # torch's zip writer
)
"""How libraries report a disk, in errors that are no OSError."""
PASSING = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.EINTR, errno.EBUSY)
"""Numbers of a full disk, and of one that may be well at the next save. Others, such as a disk that is read-only, come
again at every save.
"""


@dataclass
class Saves:
    """Counts a run's saves, for run.json."""

    number: int = 0
    seconds: float = 0.0
    largest_bytes: int = 0
    failed: list[str] = field(default_factory=list)
    """One entry for each save that failed, with all its problems."""


class StagedSave:
    """Carries one save of all ranks, a checkpoint or the final model, from `.saving/` to the folder at its name."""

    def __init__(self, folder: Path, saves: Saves, *, in_background: bool = False):
        """
        Args:
            saves: of the run, among which this one is counted.
            in_background: large files are written by a thread, of copies in host memory, from the end of `begin` on.
        """
        self.staged, self.folder, self.saves = folder.parent / STAGING / folder.name, folder, saves
        self.later: list[Callable[[], Any]] | None = [] if in_background else None
        """What the thread writes; None where nothing is put off."""
        self._writer = threading.Thread(target=self._write_later, daemon=True)
        self._clear_staging = functools.partial(discard, folder.parent / STAGING, if_possible=True)
        self._memory_error: Exception | None = None
        self._problems: list[str] = []
        """Of all ranks, so far."""
        self.errors: list[str] = []
        """What this rank could not write."""
        self.will_fail_again = False
        """The next save would fail too: the cause is no disk that is full or may recover. After `complete` the
        same on all ranks.
        """
        self.is_past_collectives = False
        """No rank waits for another any more while it writes."""
        self.hashed: dict[str, dict[str, Any]] = {}
        """Files that this rank hashed while it wrote them: path in the folder -> size and SHA-256."""

    def attempt(self, write: Callable[[], Any]) -> None:
        """Note an error of `write` instead of raising it: the other ranks wait in the collectives that follow.
        Raises MemoryError or RuntimeError where memory runs out, which no disk is to blame for.
        """
        try:
            write()
        except Exception as error:
            self._note(error)

    def _write_later(self) -> None:
        try:
            while self.later:
                self.attempt(self.later.pop(0))  # and its copy is free
        except Exception as error:  # of memory: `complete` raises it in the rank's own thread
            self._memory_error = error

    @property
    def is_writing(self) -> bool:
        """Whether this rank's thread is at it; it makes no collective, which are for one thread alone."""
        return self._writer.is_alive()

    @contextlib.contextmanager
    def tensors_later(self) -> Iterator[None]:
        """Put off what transformers and peft write inside a `with`, where this save is in the background."""

        def put_off(save: Callable[..., None], tensors: dict[str, Any], path: str, metadata: Any = None) -> None:
            def write(tensors: dict[str, torch.Tensor]) -> None:
                save(tensors, path, metadata=metadata)
                self.hashed[str(Path(path).relative_to(self.staged))] = hash_and_sync(Path(path))
                self.errors += readback_errors(SafetensorsFiles(Path(path)), tensors)

            self.later.append(functools.partial(write, on_host(tensors)))

        with contextlib.ExitStack() as stack:
            for name in ("weights_later", "adapters_later") if self.later is not None else ():
                stack.enter_context(patches.replaced(name, lambda save: functools.partial(put_off, save)))
            yield

    def _note(self, error: Exception) -> None:
        if which_memory(error):
            raise error
        if not self.errors:  # later errors follow from the first
            told = DISK_ERRORS.search(str(error))
            number = error.errno if isinstance(error, OSError) else told and told["number"]
            self.will_fail_again = int(number) not in PASSING if number else not told
            if not (number or told):
                traceback.print_exception(error, file=sys.stderr)
        self.errors.append(one_line(error))

    @contextlib.contextmanager
    def noting_errors_of(self, checkpoint_engine: Any, engine: Any = None) -> Iterator[None]:
        """Replace what each rank, or rank 0 alone, writes inside DeepSpeed's collective save by what never raises.

        rank 0: save(shards), commit, barrier ...
        rank 1: save(shards) fails and is noted, commit, barrier ...   (if it raised, rank 0 would wait for it)

        Ranks wait for each other before `commit` and before ZeRO-3 gathers again: not in a collective while one writes.
        `engine`: DeepSpeed's engine, whose `save_checkpoint` is called inside the `with`.
        """
        from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

        save = checkpoint_engine.save

        def save_hashed(state_dict: Any, path: str) -> None:
            def write(content: Any) -> None:
                entry = write_hashed(Path(path), lambda file: save(content, file))
                self.hashed[str(Path(path).relative_to(self.staged))] = entry

            if not isinstance(checkpoint_engine, TorchCheckpointEngine):
                save(state_dict, path)
            elif self.later is None:
                write(state_dict)
            else:
                self.later.append(functools.partial(write, on_host(state_dict)))

        def together(function: Callable[..., Any]) -> Callable[..., Any]:
            return lambda *args, **kwargs: distributed.wait_long("shards are written") or function(*args, **kwargs)

        def noting(function: Callable[..., Any]) -> Callable[..., None]:
            return lambda *args, **kwargs: self.attempt(lambda: function(*args, **kwargs))

        replacements = [
            ("shards_hashed", checkpoint_engine, lambda _: noting(save_hashed)),
            ("shard_folders", checkpoint_engine, noting),
            ("commit_together", checkpoint_engine, together),
        ]
        if engine is not None:
            save_checkpoint = engine.save_checkpoint

            @functools.wraps(save_checkpoint)  # the Trainer looks at its parameters
            def save_and_name(save_dir: str, **options: Any) -> Any:
                is_saved = save_checkpoint(save_dir, save_latest=False, **options)
                self.is_past_collectives = True
                if distributed.rank() == 0:  # afterwards: inside, rank 0 would leave the others at a barrier
                    self.attempt(lambda: Path(save_dir, "latest").write_text(f"global_step{engine.global_steps}"))
                return is_saved

            replacements += [
                ("gather_together", engine.optimizer, together),
                ("recovery_script", engine, noting),
                ("latest_after", engine, lambda _: save_and_name),
                ("nvme_states", shutil, noting),
            ]
        with contextlib.ExitStack() as stack:
            for name, owner, by in replacements:
                if hasattr(owner, patches.PATCHES[name].attribute):  # not all engines and optimizers have each
                    stack.enter_context(patches.replaced(name, by, on=owner))
            yield

    def begin(self, write: Callable[[], None], *, needed_bytes: int) -> None:
        """Let every rank `write`; `complete` publishes it, where no rank has a problem. Collective.
        An error of `write` is raised while other ranks may wait for this one: they would do so for ever.

        Args:
            needed_bytes: what a checkpoint takes at least, where none was saved before.
        """
        start, rank = time.monotonic(), distributed.rank()
        # What a killed save left goes first, on nodes with their own disks too: it would be published with the rest.
        distributed.first_on_rank_0(self._clear_staging)
        # Room first: safetensors maps the file it writes, and a full disk then kills the process (SIGBUS).
        # Of rank 0's disk: the only one, or the one that the model lies on.
        needed = max(needed_bytes, self.saves.largest_bytes)
        free = free_bytes(self.folder.parent) if rank == 0 else None
        obstacles = []
        if self.staged.exists():
            obstacles = [f"{self.staged} is left of an earlier save and cannot be moved"]
        elif free is not None and free < needed:
            host, takes = socket.gethostname(), f"{self.folder.name} takes {needed / GB:.3g} GB"
            obstacles = [f"{free / GB:.3g} GB are free on {host}, and {takes}"]
        self._problems = distributed.from_all(obstacles)[:1]
        if not self._problems:
            try:
                write()
            except Exception as error:
                if not self.is_past_collectives:
                    raise
                self._note(error)
            if self.later is not None:
                self._writer.start()
        self.saves.seconds += time.monotonic() - start

    def complete(self, check: Callable[[Path], list[str]], *, facts: dict[str, Any]) -> bool:
        """Publish what was written, once all ranks have; returns whether it was. Collective.

        Args:
            check: on rank 0: lists what is missing in the staged folder.
            facts: for the manifest, beside the files.
        """
        start, rank, problems, num_bytes = time.monotonic(), distributed.rank(), self._problems, 0
        while self.is_writing:
            watchdog.heartbeat()
            self._writer.join(1)
        if self._memory_error:
            raise self._memory_error
        if not problems:
            distributed.wait_long("shards are written")
            problems = distributed.from_all([f"rank {rank}: {error}" for error in self.errors])
            # A disk's error on one rank explains others on the rest.
            self.will_fail_again = bool(problems) and all(
                distributed.from_all([self.will_fail_again] if self.errors else [])
            )
        if not problems:
            # Files that were not hashed while they were written: each rank reads its own and a share of the rest.
            written = dict(distributed.from_all(list(self.hashed.items())))
            # Nodes need not share the folder: what rank 0 sees is read where the system reports the same one.
            status = None
            with contextlib.suppress(OSError):
                status = os.stat(self.staged)
            folders = distributed.from_all([status and (distributed.this_node(), status.st_dev, status.st_ino)])
            readers = [number for number, folder in enumerate(folders) if folder == folders[0]]
            # By rank 0's view: another node of a network file system may know a file's size later.
            shares = distributed.on_rank_0(
                lambda: shares_of_ranks(
                    [path for path in files_of(self.staged) if str(path.relative_to(self.staged)) not in written],
                    distributed.world_size(),
                    readers=readers,
                )
            )
            hashed, errors = [], []
            try:
                hashed = [(str(path.relative_to(self.staged)), hash_and_sync(path)) for path in shares[rank]]
            except OSError as error:
                errors = [f"rank {rank}: {error}"]
            distributed.wait_long("files are hashed")
            files = dict(sorted([*written.items(), *distributed.from_all(hashed)]))
            num_bytes = sum(entry["size"] for entry in files.values())
            problems = distributed.from_all(errors)
        if not problems:
            errors = []
            if rank == 0:
                try:
                    errors = check(self.staged)
                    if not errors:
                        publish(self.staged, facts | {"files": files})
                except Exception as error:
                    self._note(error)
                    errors = self.errors
            distributed.wait_long("checkpoint is published")
            self.will_fail_again = any(distributed.from_all([self.will_fail_again]))
            problems = distributed.from_all(errors)
        self.saves.seconds += time.monotonic() - start
        if problems:
            self.saves.failed.append(f"{self.folder.name}: {'; '.join(problems)}")
            distributed.first_on_rank_0(self._clear_staging)  # the room that it took
            return False
        self.saves.number += 1
        self.saves.largest_bytes = max(self.saves.largest_bytes, num_bytes)
        return True


def on_host(content: Any) -> Any:
    """Copy tensors in a nest of containers to host memory, those that are one tensor once, and deep-copy the rest."""
    copies: dict[tuple, torch.Tensor] = {}

    def copied(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return copy.deepcopy(leaf)
        key = leaf.data_ptr(), leaf.dtype, leaf.shape, leaf.stride()
        if key not in copies or not leaf.numel():
            copies[key] = leaf.detach().to("cpu", copy=True)
        return copies[key]

    return tree_map(copied, content)


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


RESERVED = ".room_for_final"


def reserve_space(output_dir: str, num_bytes: int) -> None:
    """Let the file system allocate `num_bytes` in `output_dir` (fallocate(2)) until they are released, for the final
    model. Where it cannot (NFS before 4.2) nothing is held: posix_fallocate(3) would write into every block. Raises
    UserError where there is no room.
    """
    fallocate = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
    if fallocate is None:
        return
    file = Path(output_dir) / RESERVED
    file.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        failed = fallocate(descriptor, 0, ctypes.c_longlong(0), ctypes.c_longlong(num_bytes))
    finally:
        os.close(descriptor)
    if failed and ctypes.get_errno() in (errno.ENOSPC, errno.EDQUOT):
        release_reserved_space(output_dir)
        raise UserError(
            f"output_dir={output_dir}: has no room for the final model ({num_bytes / GB:.3g} GB); choose another disk"
        )


def release_reserved_space(output_dir: str) -> None:
    """Free what was held, for the final model to be written; on a disk that is read-only now it stays."""
    with contextlib.suppress(OSError):
        (Path(output_dir) / RESERVED).unlink()
