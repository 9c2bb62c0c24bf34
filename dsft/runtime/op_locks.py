"""Locks on DeepSpeed's compiled operators: whoever waits for one says for whom, and a dead owner's lock is removed.

torch waits for such a lock in silence and for ever, also where its owner was killed while it compiled.
"""

import contextlib
import fcntl
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from dsft.runtime.lock_file import Owner, create, file_system_time, owner_of

SILENT_SECONDS = 10.0
"""Of waiting or compiling before a line says so."""
LOOK_SECONDS = 1.0
"""Between two looks at a lock: one that its owner has just closed to remove it is not there at the second."""
BEAT_SECONDS = 5.0
"""Between two heartbeats of a lock's owner: the time of its file."""
SILENT_OWNER_SECONDS = 120.0
"""An owner elsewhere that gave no heartbeat for so long is taken for dead."""
OLD_SECONDS = 300
"""A lock without a name is taken for left behind: torch's own gives no heartbeat, and a compilation takes a minute or
two."""
LOCAL_FILE_SYSTEMS = ("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "tmpfs", "overlay")
"""File systems of one machine: who holds a lock there runs here."""


class OperatorLock:
    """torch's lock on an operator's build folder (torch/utils/file_baton.py), with an owner.

    It stays a file that exists as long as it is held, so that processes without dsft respect it and are respected.
    """

    def __init__(self, lock_file_path: str):
        self.path = Path(lock_file_path)
        self._descriptor: int | None = None
        self._timer: threading.Timer | None = None
        self._is_released = threading.Event()

    def try_acquire(self) -> bool:
        """Returns whether this process has the lock, and has to build. False once another has built and released it:
        all waiting is done here, since torch builds only what it acquires at once.
        """
        start, is_said, suspect = time.monotonic(), False, None
        while not self._make():
            lock, reason = _identity(self.path), _left_behind(self.path)
            if lock is None:
                return False
            if reason and lock == suspect and self._take_over(lock, reason):
                return True
            suspect = lock if reason else None
            if not is_said and time.monotonic() - start > SILENT_SECONDS:
                is_said = True
                _say(f"waiting for {self.path}, held by {_holder(self.path)}; if that is wrong, remove the file")
            time.sleep(LOOK_SECONDS)
            if _identity(self.path) is None:
                return False
        return True

    def wait(self) -> None:
        """Nothing: `try_acquire` has waited."""

    def release(self) -> None:
        self._timer.cancel()
        self._is_released.set()
        self._beating.join()  # it writes to the descriptor
        # Another process may have taken the lock over, from an owner that was stopped or cut off for too long.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(self.path.stat(), os.fstat(self._descriptor)):
                self.path.unlink()
        os.close(self._descriptor)

    def _beat(self) -> None:
        while not self._is_released.wait(BEAT_SECONDS):
            with contextlib.suppress(OSError):  # the next one may get through
                os.utime(self._descriptor)  # the file system's own time

    def _make(self, path: Path | None = None) -> bool:
        """Make the lock, or the file that will replace it, with this process's name in it; False where it exists."""
        self._descriptor = create(path or self.path)
        if self._descriptor is None:
            return False
        text = (
            f"compiling DeepSpeed's operator {self.path.parent.name}, once for this machine; it takes a minute or two"
        )
        self._timer = threading.Timer(SILENT_SECONDS, _say, [text])
        self._timer.daemon = True
        self._timer.start()
        self._is_released.clear()
        self._beating = threading.Thread(target=self._beat, daemon=True)
        self._beating.start()
        return True

    def _take_over(self, lock: tuple[int, Owner | float], reason: str) -> bool:
        """Replace a lock that was left behind, unless another process was faster. There is no moment without a lock,
        which other waiting processes would take for the end of the build.
        """
        with _alone(self.path.parent):
            mine = self.path.with_name(f"lock.{socket.gethostname()}.{os.getpid()}")
            if _identity(self.path) != lock or not self._make(mine):
                return False
            os.replace(mine, self.path)
        _say(f"took over {self.path}, left behind: {reason}")
        return True


def name_owners_of_operator_locks() -> None:
    """Let every operator that this process loads use `OperatorLock`."""
    import torch.utils.cpp_extension

    torch.utils.cpp_extension.FileBaton = OperatorLock


def _left_behind(path: Path) -> str | None:
    """Why nobody holds the lock any more; None where somebody does, or may."""
    try:
        owner, stat = owner_of(path), path.stat()  # what is opened first is not of NFS's cache
    except OSError:
        return None
    if owner is not None and owner.is_here():
        return None if owner.is_alive() else f"its owner, process {owner.pid}, is gone"
    if _process_with(path) is not None:
        return None
    try:
        age = file_system_time(path) - stat.st_mtime
    except OSError:  # nothing can be written here: no lock either
        return None
    # Of no name, or of a time before this machine was started again.
    is_of_before = owner is None or (owner.host == socket.gethostname() and owner.boot != Owner.this_process().boot)
    if is_of_before and _is_local(path) and os.geteuid() in (0, stat.st_uid):
        return "no process has it open"
    if owner is not None:
        return f"{_holder(path)} gave no heartbeat for {age:.0f} s" if age > SILENT_OWNER_SECONDS else None
    return f"it is {age:.0f} s old, and no process here has it open" if age > OLD_SECONDS else None


def _holder(path: Path) -> str:
    """The process that holds the lock, as far as it can be told."""
    owner, pid = owner_of(path), _process_with(path)
    if owner is not None:
        return f"process {owner.pid} on {owner.host}"
    return f"process {pid} on {socket.gethostname()}" if pid else "another machine's or another user's process"


def _process_with(path: Path) -> int | None:
    """A process of this machine, as far as this user may look, that has the file open."""
    wanted = str(path.resolve())
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if os.readlink(descriptor) == wanted:
                return int(descriptor.parts[2])
        except OSError:
            continue
    return None


def _is_local(path: Path) -> bool:
    """Whether the file lies on a disk that no other machine writes to."""
    mounts = {part.mountpoint: part.fstype for part in psutil.disk_partitions(all=True)}
    nearest = next((mounts[str(folder)] for folder in path.resolve().parents if str(folder) in mounts), "")
    return nearest in LOCAL_FILE_SYSTEMS


def _identity(path: Path) -> tuple[int, Owner | float] | None:
    """What distinguishes this lock from a later one of the same name; None where there is none."""
    try:
        owner, stat = owner_of(path), path.stat()
    except OSError:
        return None
    return stat.st_ino, owner or stat.st_mtime  # heartbeats change the time


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One process at a time: the lock that one of several waiting ranks takes over must not be replaced by the next."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without such locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _say(line: str) -> None:
    print(f"dsft: {socket.gethostname()}: {line}", file=sys.stderr, flush=True)
