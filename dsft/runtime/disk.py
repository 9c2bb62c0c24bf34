"""Files: whether a folder can be written and has room, what killed jobs leave behind, and locks, which exist while a
process holds them and name it for others on this machine and elsewhere.

`RunLock` keeps two runs, trainings or evaluations, out of one folder. `OperatorLock` keeps two processes from compiling
one of DeepSpeed's operators. On the same machine the owner's process is looked at. From another one only the heartbeat
can be: the time of the file, by the clock of the file system that both see.
"""

import contextlib
import fcntl
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from dsft.errors import UserError
from dsft.runtime import patches
from dsft.runtime.console import say, show_text
from dsft.watchdog.processes import Process, boot_id


def user_cache() -> Path:
    """The folder `dsft` in the user's cache; XDG_CACHE_HOME is followed."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dsft"


def existing_parent(path: Path) -> Path:
    """Return `path`, or the nearest folder above it that exists, be it a link to nowhere."""
    absolute = path.expanduser().absolute()
    return next(parent for parent in (absolute, *absolute.parents) if os.path.lexists(parent))


def free_bytes(folder: str | Path) -> int | None:
    """Return the free bytes of the disk that holds `folder`, or will; None where it cannot be asked."""
    try:
        return shutil.disk_usage(existing_parent(Path(folder))).free
    except OSError:
        return None


def check_writable(output_dir: str, problems: list[str]) -> None:
    """Check that `output_dir` is a folder, or one that can be made, on a disk that takes a few bytes."""
    path = Path(output_dir)
    if os.path.lexists(path) and not path.is_dir():
        problems.append(f"output_dir={path}: is {'a file' if path.exists() else 'a link to nowhere'}, not a folder")
        return
    try:
        with tempfile.TemporaryFile(dir=existing_parent(path)) as probe:
            probe.write(b"\0" * 4096)
            probe.flush()
            os.fsync(probe.fileno())
    except OSError as error:
        problems.append(f"output_dir={path}: cannot be written ({error.strerror})")


CPU_BUFFER = "deepspeed_allreduce_buffer_"  # in /dev/shm, 66 MiB a rank (deepspeed/ops/csrc/cpu/comm/shm.cpp)
ENV_FILE = "dsft-env-"  # how the names of files of variables in /tmp begin


def remove_leftovers() -> None:
    """Remove this user's files of dead jobs. Never raises: it is no part of the job that calls it.

    A file goes only where the kernel grants a write lease (fcntl(2), F_SETLEASE): no process has it open or mapped, in
    no container either, where process ids prove nothing.
    """
    for folder, begin in (("/dev/shm", CPU_BUFFER), (tempfile.gettempdir(), ENV_FILE)):
        for file in Path(folder).glob(f"{begin}*"):
            with contextlib.suppress(OSError):
                if file.lstat().st_uid != os.geteuid():
                    continue
                descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
                try:
                    # Whoever opens the file from now on signals this process; SIGIO, the default, would end it.
                    fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)
                    fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)  # raises where a process has it
                    file.unlink()
                finally:
                    os.close(descriptor)


LOCK = ".lock"  # name of a run's lock in its folder
BEAT_SECONDS = 5.0  # between two heartbeats of an owner
STALE_SECONDS = 30.0  # a run elsewhere that gave no heartbeat for so long is taken for dead
SILENT_OWNER_SECONDS = 120.0  # the same of a compilation elsewhere
OLD_SECONDS = 300  # so old an operator's lock without a name is left behind: torch's gives no heartbeat
SILENT_SECONDS = 10.0  # of waiting or compiling before a line says so
LOOK_SECONDS = 1.0  # between two looks at an operator's lock, which its owner may just be closing
LOCAL_FILE_SYSTEMS = ("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "tmpfs", "overlay")
"""Of one machine: who holds a lock there runs here."""


@dataclass(frozen=True)
class Owner(Process):
    """The process that holds a lock, as it wrote it into the file."""

    host: str
    boot: str  # of its machine: hosts may share a name, and process ids start from scratch
    processes: str  # the namespace of its id: containers of one machine count their processes each for itself

    @classmethod
    def this_process(cls) -> "Owner":
        mine = Process.of(os.getpid())
        return cls(mine.pid, mine.started, socket.gethostname(), boot_id(), os.readlink("/proc/self/ns/pid"))

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
    """The age of a lock's heartbeat by the clock of its file system, which machines that share it see alike. Raises
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

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._descriptor: int | None = None
        self._is_released = threading.Event()

    def create(self, path: Path | None = None) -> bool:
        """Make the lock, or the file `path` that will replace it; False where it exists."""
        try:
            self._descriptor = descriptor = os.open(path or self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            return False

        def beat() -> None:
            while not self._is_released.wait(BEAT_SECONDS):
                with contextlib.suppress(OSError):  # a file system that is away: the next one may get through
                    os.utime(descriptor)  # the file system's own time

        self._beating = threading.Thread(target=beat, daemon=True)
        self._beating.start()
        os.write(descriptor, json.dumps(asdict(Owner.this_process())).encode())
        os.fsync(descriptor)  # else NFS shows other machines an empty file, which stays open
        return True

    def release(self) -> None:
        """Remove the lock, if this process has it."""
        if self._descriptor is None:
            return
        self._is_released.set()
        self._beating.join()  # it writes to the descriptor
        with contextlib.suppress(OSError):
            # Another process may have taken the lock over, from an owner that was stopped or cut off for too long.
            if os.path.samestat(self.path.stat(), os.fstat(self._descriptor)):
                self.path.unlink()
        with contextlib.suppress(OSError):  # of a file that another machine has removed
            os.close(self._descriptor)
        self._descriptor = None


def _modified(file: Path) -> float:
    return file.stat().st_mtime if file.exists() else 0.0


def is_held(folder: Path) -> bool:
    """Whether a living run holds `folder`; one on another machine may have been killed less than STALE_SECONDS ago."""
    file = folder / LOCK
    if (owner := owner_of(file)) and owner.is_here():
        return owner.is_alive()
    try:
        age = seconds_since_heartbeat(file)
    except OSError:  # a reader may not write there
        age = time.time() - _modified(file)
    return age <= STALE_SECONDS


def in_use(folder: Path, owner: Owner | None, *, option: str = "output_dir") -> str:
    """The problem where a living run holds `folder`."""
    who = f"process {owner.pid} on {owner.host}" if owner else "another process"
    return f"{option}={folder}: {who} is writing there now; wait for its end, or choose another folder"


class RunLock(HeldFile):
    """Holds one folder for this process; `option` names it in a message."""

    def __init__(self, folder: Path, *, option: str = "output_dir"):
        super().__init__(folder / LOCK)
        self.option = option
        self._made_folder = False

    def acquire(self) -> bool:
        """Take the lock, over a stale one where there is one; returns whether there was. A folder that cannot be
        written is not held. Raises UserError: its owner, who is named, is alive.
        """
        folder, was_stale = self.path.parent, False
        try:
            self._made_folder = not folder.exists()
            folder.mkdir(parents=True, exist_ok=True)
            while not self.create():
                owner, beat, lives = owner_of(self.path), _modified(self.path), is_held(folder)
                if lives and not (owner and owner.is_here()):
                    waiting = f"waiting up to {STALE_SECONDS:.0f} s for its heartbeat"
                    say(f"{self.path} is of a run on another machine; {waiting}")
                    until = time.monotonic() + STALE_SECONDS
                    while time.monotonic() < until and _modified(self.path) == beat:
                        time.sleep(0.2)
                    lives = _modified(self.path) not in (beat, 0.0)  # 0: that run has ended, and removed it
                if lives:
                    raise UserError(in_use(folder, owner, option=self.option))
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
    """torch's lock on an operator's build folder (torch/utils/file_baton.py), with an owner: torch waits in silence and
    for ever, also where its owner was killed while it compiled; here a line says for whom, and a dead owner's lock is
    taken over. It stays a file that exists as long as it is held, which processes without dsft respect.
    """

    def try_acquire(self) -> bool:
        """Returns whether this process has the lock, and has to build. False once another has built and released it:
        all waiting is done here, since torch builds only what it acquires at once.
        """
        start, is_said, suspect = time.monotonic(), False, None
        if self.create():
            return True
        while lock := _identity(self.path):
            reason = left_behind(self.path)
            # Looked at twice: its owner may be closing it.
            if reason and lock == suspect and self.take_over(lock, reason):
                return True
            suspect = lock if reason else None
            if not is_said and time.monotonic() - start > SILENT_SECONDS and not _is_of_this_launch(self.path):
                is_said = True
                holder = f"held by {_holder(self.path)}; if that is wrong, remove the file"
                say_from_any_rank(f"waiting for {self.path}, {holder}")
            time.sleep(LOOK_SECONDS)
        return False

    def create(self, path: Path | None = None) -> bool:
        """As `HeldFile`; a line says after a while that this process compiles."""
        if not super().create(path):
            return False
        operator = self.path.parent.name
        text = f"compiling DeepSpeed's operator {operator}, once for this machine; it takes a minute or two"
        self._timer = threading.Timer(SILENT_SECONDS, say_from_any_rank, [text])
        self._timer.daemon = True
        self._timer.start()
        return True

    def take_over(self, lock: tuple[int, Owner | float], reason: str) -> bool:
        """Replace a lock that was left behind, unless another process was faster. At no moment is there no lock, which
        others would take for the end of the build.
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
    is_of_before = owner is None or (owner.host == socket.gethostname() and owner.boot != boot_id())
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


def _is_of_this_launch(path: Path) -> bool:
    """Whether another rank of this node holds an operator's lock, which itself prints that it compiles."""
    owner = owner_of(path)
    with contextlib.suppress(psutil.Error):
        return owner is not None and owner.is_here() and psutil.Process(owner.pid).ppid() == os.getppid()
    return False


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
