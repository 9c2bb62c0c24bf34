"""The operators that DeepSpeed compiles: whether this machine can, and locks on their build folders.

Its AdamW is compiled by nvcc on a GPU and by the C++ compiler with offload. torch waits for a build's lock in silence
and for ever, also where its owner was killed while it compiled; here whoever waits says for whom, and a dead owner's
lock is removed.
"""

import contextlib
import fcntl
import os
import shlex
import shutil
import socket
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from dsft.errors import one_line
from dsft.runtime import patches
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


def say(line: str) -> None:
    print(
        f"dsft: {line}", file=sys.stderr, flush=True
    )  # into a rank's log file too, which descriptor 2 is not on rank 0


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
                holder = f"held by {_holder(self.path)}; if that is wrong, remove the file"
                say(f"{socket.gethostname()}: waiting for {self.path}, {holder}")
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
            f"{socket.gethostname()}: compiling DeepSpeed's operator {self.path.parent.name}, once for this machine; it"
            " takes a minute or two"
        )
        self._timer = threading.Timer(SILENT_SECONDS, say, [text])
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
        say(f"{socket.gethostname()}: took over {self.path}, left behind: {reason}")
        return True


def name_owners_of_operator_locks() -> None:
    """Let every operator that this process loads use `OperatorLock`."""
    patches.replace("operator_lock", lambda _: OperatorLock)


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


PROGRAM = "#include <Python.h>\n#include <omp.h>\nint main() { return omp_get_max_threads() == 0; }\n"
COMPILE_SECONDS = 15


def offload_problems(deepspeed_config: dict[str, Any]) -> list[str]:
    """Say why the optimizer of an offload, which DeepSpeed compiles at its first use, cannot be compiled here."""
    offload = (deepspeed_config.get("zero_optimization") or {}).get("offload_optimizer") or {}
    parameters = (deepspeed_config.get("optimizer") or {}).get("params") or {}
    if offload.get("device", "none") == "none" or parameters.get("torch_adam") or _is_compiled():
        return []
    compiler = compiler_words()[0]
    reason = compile_error() if shutil.which(compiler) else f"{compiler} is not there"
    if not reason:
        return []
    return [
        f"zero: with offload DeepSpeed compiles its CPUAdam, which {socket.gethostname()} cannot ({reason}): apt-get"
        " install g++ python3-dev, or take a zero without offload"
    ]


def _is_compiled() -> bool:
    from deepspeed.git_version_info import installed_ops
    from torch.utils.cpp_extension import _get_build_directory

    name = "cpu_adam"
    if installed_ops.get(name):
        return True
    try:
        return Path(_get_build_directory(name, verbose=False), f"{name}.so").is_file()
    except OSError:  # it makes the folder
        return False


def compiler_words() -> list[str]:
    """Return the command of the C++ compiler, as torch calls it: CXX may hold flags, or ccache before it."""
    return shlex.split(os.environ.get("CXX") or "c++") or ["c++"]


def compile_error() -> str:
    """The compiler's first complaint about a program of one line, with the headers that DeepSpeed's operators need;
    empty where it compiles, where there is no compiler, and where that takes too long to know.
    """
    words = compiler_words()
    if not shutil.which(words[0]):
        return ""
    command = [*words, "-x", "c++", "-fopenmp", f"-I{sysconfig.get_paths()['include']}", "-fsyntax-only", "-"]
    try:
        result = subprocess.run(command, input=PROGRAM, capture_output=True, text=True, timeout=COMPILE_SECONDS)
    except subprocess.TimeoutExpired:  # a busy machine
        return ""
    except OSError as error:
        return one_line(error)[:200]
    if not result.returncode:
        return ""
    lines = [line for line in result.stderr.splitlines() if "error" in line]
    return (lines or [result.stderr.strip() or f"exit code {result.returncode}"])[0][:200]


FUSED = ("adam", "adamw", "lamb", "lion")
OF_FUSED_ADAM_ALONE = {"bias_correction": True, "set_grad_none": None}
"""Parameters that torch's Adam does not have, with the value by which it works; None for any."""


def nvcc_problem() -> str:
    """Return why nvcc cannot compile FusedAdam, or that it need not: empty where it can, or was before."""
    import torch
    from deepspeed.git_version_info import installed_ops
    from deepspeed.ops.op_builder.builder import assert_no_cuda_mismatch

    if installed_ops.get("fused_adam") or torch.version.hip:
        return ""
    try:
        assert_no_cuda_mismatch("fused_adam")
    except Exception as error:  # no toolkit, one of another CUDA, or a compiler whose version cannot be read
        return one_line(error)
    return ""


def fused_optimizer(deepspeed_config: dict[str, Any]) -> str:
    """Name the optimizer that a configuration makes DeepSpeed compile for a GPU; empty for none."""
    optimizer = deepspeed_config.get("optimizer") or {}
    offload = (deepspeed_config.get("zero_optimization") or {}).get("offload_optimizer") or {}
    kind = str(optimizer.get("type")).lower()
    is_torch = (optimizer.get("params") or {}).get("torch_adam", False)
    return kind if kind in FUSED and not is_torch and offload.get("device", "none") == "none" else ""


def with_torch_adam(deepspeed_config: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a configuration that takes torch's Adam instead, with the same parameters."""
    optimizer = deepspeed_config["optimizer"]
    parameters = {
        name: value
        for name, value in (optimizer.get("params") or {}).items()
        if OF_FUSED_ADAM_ALONE.get(name, ...) not in (value, None)
    }
    return deepspeed_config | {"optimizer": optimizer | {"params": parameters | {"torch_adam": True}}}
