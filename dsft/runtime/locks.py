"""Locks: files that exist while a process holds them. They name it, for others on this machine and elsewhere.

`RunLock` keeps two runs, trainings or evaluations, out of one folder. `OperatorLock` keeps two processes from compiling
one of DeepSpeed's operators: torch waits for a build's lock in silence and for ever, also where its owner was killed
while it compiled; here whoever waits says for whom, and a dead owner's lock is removed.

On the same machine the owner's process is looked at. From another one only the heartbeat can be: the time of the file,
by the clock of the file system that both see.
"""

import contextlib
import fcntl
import json
import os
import socket
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from dsft.errors import UserError
from dsft.runtime import patches
from dsft.runtime.console import say, show_text
from dsft.watchdog.processes import Process, start_time

LOCK = ".lock"  # name of a run's lock in its folder
BEAT_SECONDS = 5.0  # between two heartbeats of an owner
STALE_SECONDS = 30.0  # a run elsewhere that gave no heartbeat for so long is taken for dead
SILENT_OWNER_SECONDS = 120.0  # the same of a compilation elsewhere
OLD_SECONDS = 300
"""An operator's lock without a name is taken for left behind: torch's own gives no heartbeat, and a compilation takes a
minute or two."""
SILENT_SECONDS = 10.0  # of waiting or compiling before a line says so
LOOK_SECONDS = 1.0
"""Between two looks at an operator's lock: one that its owner has just closed to remove it is not there at the second.
"""
LOCAL_FILE_SYSTEMS = ("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "tmpfs", "overlay")
"""File systems of one machine: who holds a lock there runs here."""


@dataclass(frozen=True)
class Owner(Process):
    """The process that holds a lock, as it wrote it into the file."""

    host: str
    boot: str  # of its machine: hosts may share a name, and process ids start from scratch
    processes: str  # the namespace of its id: containers of one machine count their processes each for itself

    @classmethod
    def this_process(cls) -> "Owner":
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        pid = os.getpid()
        return cls(pid, start_time(pid), socket.gethostname(), boot, os.readlink("/proc/self/ns/pid"))

    def is_here(self) -> bool:
        """Whether this process could see it run."""
        here = self.this_process()
        return (self.host, self.boot, self.processes) == (here.host, here.boot, here.processes)


def owner_of(path: Path) -> Owner | None:
    """The owner that a lock names; None where it names none, as torch's own locks, or is not there."""
    try:
        return Owner(**json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError):
        return None


def seconds_since_heartbeat(path: Path) -> float:
    """The age of a lock's heartbeat by the clock of the file system that it lies on, which machines that share it see
    alike.

    Raises:
        OSError: the lock is gone, or nothing can be written beside it.
    """
    beat = path.stat().st_mtime
    probe = path.with_name(f"{path.name}.{socket.gethostname()}.{os.getpid()}.now")
    probe.touch()
    try:
        return probe.stat().st_mtime - beat
    finally:
        probe.unlink(missing_ok=True)


class HeldFile:
    """A lock's file while this process holds it: it has the process's name and, from a thread, its heartbeat."""

    def __init__(self, path: Path):
        self.path = path
        self._descriptor: int | None = None
        self._is_released = threading.Event()
        self._beating: threading.Thread | None = None

    def create(self, path: Path | None = None) -> bool:
        """Make the lock, or the file `path` that will replace it; False where it exists."""
        try:
            self._descriptor = os.open(path or self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            return False
        os.write(self._descriptor, json.dumps(asdict(Owner.this_process())).encode())
        os.fsync(self._descriptor)  # else NFS shows other machines an empty file, which stays open
        self._is_released.clear()
        self._beating = threading.Thread(target=self._beat, daemon=True)
        self._beating.start()
        return True

    def _beat(self) -> None:
        while not self._is_released.wait(BEAT_SECONDS):
            with contextlib.suppress(OSError):  # a file system that is away for a while: the next one may get through
                os.utime(self._descriptor)  # the file system's own time

    def release(self) -> None:
        """Remove the lock, if this process has it."""
        if self._descriptor is None:
            return
        self._is_released.set()
        if self._beating:  # None where the disk was too full for the process's name
            self._beating.join()  # it writes to the descriptor
        with contextlib.suppress(OSError):
            # Another process may have taken the lock over, from an owner that was stopped or cut off for too long.
            if os.path.samestat(self.path.stat(), os.fstat(self._descriptor)):
                self.path.unlink()
        with contextlib.suppress(OSError):  # of a file that another machine has removed
            os.close(self._descriptor)
        self._descriptor = None


def is_held(folder: Path) -> bool:
    """Whether a living run holds `folder`, as far as can be told without waiting: one on another machine may have been
    killed less than STALE_SECONDS ago.
    """
    file = folder / LOCK
    if (owner := owner_of(file)) and owner.is_here():
        return owner.is_alive()
    beat = _modified(file)
    try:
        age = seconds_since_heartbeat(file)
    except OSError:  # a reader may not write there
        age = time.time() - beat
    return bool(beat) and age <= STALE_SECONDS


def in_use(folder: Path, owner: Owner | None) -> str:
    """What is wrong where a living run holds `folder`."""
    who = f"process {owner.pid} on {owner.host}" if owner else "another process"
    return f"output_dir={folder}: {who} is writing there now; wait for its end, or choose another folder"


def _modified(file: Path) -> float:
    return file.stat().st_mtime if file.exists() else 0.0


class RunLock(HeldFile):
    """Holds one folder for this process."""

    def __init__(self, folder: Path):
        super().__init__(folder / LOCK)
        self._made_folder = False

    def acquire(self) -> bool:
        """Take the lock, over a stale one where there is one; returns whether there was. A folder that cannot be
        written is not held.

        Raises:
            UserError: naming the owner, where it is alive.
        """
        folder, was_stale = self.path.parent, False
        try:
            self._made_folder = not folder.exists()
            folder.mkdir(parents=True, exist_ok=True)
            while not self.create():
                owner, beat, lives = owner_of(self.path), _modified(self.path), is_held(folder)
                if lives and not (owner and owner.is_here()):
                    say(
                        f"{self.path} is of a run on another machine; waiting up to {STALE_SECONDS:.0f} s for its"
                        " heartbeat"
                    )
                    until = time.monotonic() + STALE_SECONDS
                    while time.monotonic() < until and _modified(self.path) == beat:
                        time.sleep(0.2)
                    lives = _modified(self.path) != beat
                if lives:
                    raise UserError(in_use(folder, owner))
                stale = self.path.with_name(f"{LOCK}.{os.getpid()}")
                with contextlib.suppress(FileNotFoundError):  # another start was faster
                    self.path.rename(stale)
                    if owner_of(stale) != owner:  # it took the lock in between: that is its lock
                        stale.rename(self.path)
                    stale.unlink(missing_ok=True)
                was_stale = True
        except OSError:
            return False
        return was_stale

    def release(self) -> None:
        """Give the folder back; one that was made for the lock alone goes."""
        super().release()
        if self._made_folder:
            with contextlib.suppress(OSError):  # the run wrote into it
                self.path.parent.rmdir()


def say_from_any_rank(line: str) -> None:
    """Print to standard error, and so into a rank's log file too, which descriptor 2 is not on rank 0."""
    show_text(f"dsft: {socket.gethostname()}: {line}", file=sys.stderr)


class OperatorLock(HeldFile):
    """torch's lock on an operator's build folder (torch/utils/file_baton.py), with an owner.

    It stays a file that exists as long as it is held, so that processes without dsft respect it and are respected.
    """

    def __init__(self, lock_file_path: str):
        super().__init__(Path(lock_file_path))

    def try_acquire(self) -> bool:
        """Returns whether this process has the lock, and has to build. False once another has built and released it:
        all waiting is done here, since torch builds only what it acquires at once.
        """
        start, is_said, suspect = time.monotonic(), False, None
        while not self.create():
            lock, reason = _identity(self.path), left_behind(self.path)
            if lock is None:
                return False
            # Looked at twice: its owner may be closing it.
            if reason and lock == suspect and self.take_over(lock, reason):
                return True
            suspect = lock if reason else None
            if not is_said and time.monotonic() - start > SILENT_SECONDS:
                is_said = True
                holder = f"held by {_holder(self.path)}; if that is wrong, remove the file"
                say_from_any_rank(f"waiting for {self.path}, {holder}")
            time.sleep(LOOK_SECONDS)
            if _identity(self.path) is None:
                return False
        return True

    def create(self, path: Path | None = None) -> bool:
        """As `HeldFile`; a line says after a while that this process compiles."""
        if not super().create(path):
            return False
        text = (
            f"compiling DeepSpeed's operator {self.path.parent.name}, once for this machine; it takes a minute or two"
        )
        self._timer = threading.Timer(SILENT_SECONDS, say_from_any_rank, [text])
        self._timer.daemon = True
        self._timer.start()
        return True

    def take_over(self, lock: tuple[int, Owner | float], reason: str) -> bool:
        """Replace a lock that was left behind, unless another process was faster. There is no moment without a lock,
        which other waiting processes would take for the end of the build.
        """
        folder = os.open(self.path.parent, os.O_RDONLY)
        try:
            # One at a time: the lock that one of several waiting ranks takes over must not be replaced by the next.
            with contextlib.suppress(OSError):  # a file system without such locks
                fcntl.flock(folder, fcntl.LOCK_EX)
            mine = self.path.with_name(f"lock.{socket.gethostname()}.{os.getpid()}")
            if _identity(self.path) != lock or not self.create(mine):
                return False
            os.replace(mine, self.path)
        finally:
            os.close(folder)
        say_from_any_rank(f"took over {self.path}, left behind: {reason}")
        return True

    def wait(self) -> None:
        """Nothing: `try_acquire` has waited."""

    def release(self) -> None:
        self._timer.cancel()
        super().release()


def name_owners_of_operator_locks() -> None:
    """Let every operator that this process loads use `OperatorLock`."""
    patches.replace("operator_lock", lambda _: OperatorLock)


def left_behind(path: Path) -> str | None:
    """Why nobody holds an operator's lock any more; None where somebody does, or may."""
    try:
        owner, stat = owner_of(path), path.stat()  # what is opened first is not of NFS's cache
    except OSError:
        return None
    if owner is not None and owner.is_here():
        return None if owner.is_alive() else f"its owner, process {owner.pid}, is gone"
    if _process_with(path) is not None:
        return None
    try:
        age = seconds_since_heartbeat(path)
    except OSError:  # nothing can be written here: no lock either
        return None
    # Of no name, or of a time before this machine was started again.
    is_of_before = owner is None or (owner.host == socket.gethostname() and owner.boot != Owner.this_process().boot)
    mounts = {part.mountpoint: part.fstype for part in psutil.disk_partitions(all=True)}
    file_system = next((mounts[str(folder)] for folder in path.resolve().parents if str(folder) in mounts), "")
    if is_of_before and file_system in LOCAL_FILE_SYSTEMS and os.geteuid() in (0, stat.st_uid):
        return "no process has it open"
    if owner is not None:
        return f"{_holder(path)} gave no heartbeat for {age:.0f} s" if age > SILENT_OWNER_SECONDS else None
    return f"it is {age:.0f} s old, and no process here has it open" if age > OLD_SECONDS else None


def _holder(path: Path) -> str:
    """The process that holds an operator's lock, as far as it can be told."""
    owner, pid = owner_of(path), _process_with(path)
    if owner is not None:
        return f"process {owner.pid} on {owner.host}"
    return f"process {pid} on {socket.gethostname()}" if pid else "another machine's or another user's process"


def _process_with(path: Path) -> int | None:
    """A process of this machine, as far as this user may look, that has the file open."""
    wanted = str(path.resolve())
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if os.readlink(descriptor) == wanted:
                return int(descriptor.parts[2])
    return None


def _identity(path: Path) -> tuple[int, Owner | float] | None:
    """What distinguishes a lock from a later one of the same name; None where there is none."""
    try:
        owner, stat = owner_of(path), path.stat()
    except OSError:
        return None
    return stat.st_ino, owner or stat.st_mtime  # heartbeats change the time
