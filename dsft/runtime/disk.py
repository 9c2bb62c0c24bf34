"""Files: whether a folder can be written, its free bytes, what killed jobs leave behind, the lock of a run's folder."""

import contextlib
import fcntl
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import filelock

from dsft.errors import UserError


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


PROBE = ".probe-"
"""How the names of files begin by which a folder is tried."""


def check_writable(output_dir: str, problems: list[str]) -> None:
    """Check that `output_dir` is a folder, or one that can be made, on a disk that takes a few bytes."""
    path = Path(output_dir)
    if os.path.lexists(path) and not path.is_dir():
        problems.append(f"output_dir={path}: is {'a file' if path.exists() else 'a link to nowhere'}, not a folder")
        return
    try:
        descriptor, name = tempfile.mkstemp(prefix=PROBE, dir=existing_parent(path))
        with os.fdopen(descriptor, "wb") as probe:
            probe.write(bytes(4096))
            probe.flush()
            os.fsync(descriptor)
        os.rename(name, f"{name}.renamed")  # as a save is
        os.unlink(f"{name}.renamed")
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


LOCK = ".lock"
"""Name of a run's lock in its folder. The system releases it when the process that holds it exits."""


def is_held(folder: Path) -> bool:
    """Whether a run is writing in `folder` now."""
    if not (folder / LOCK).exists():
        return False
    try:
        with filelock.FileLock(folder / LOCK, timeout=0):
            return False
    except filelock.Timeout:
        return True
    except OSError:  # a reader may not write there
        return False


def in_use(folder: Path) -> str:
    """The problem where a living run holds `folder`."""
    return (
        f"output_dir={folder}: another process is writing there now; wait until it finishes, or choose another folder"
    )


@contextlib.contextmanager
def hold_folder(folder: Path) -> Iterator[None]:
    """Keeps other runs out of `folder`. A folder that cannot be written is left to the checks.

    Raises:
        UserError: another run is writing there.
    """
    is_new = not folder.exists()
    lock = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(folder / LOCK)
        lock.acquire(timeout=0)
    except filelock.Timeout:
        raise UserError(in_use(folder)) from None
    except OSError:
        lock = None
    try:
        yield
    finally:
        if lock:
            (folder / LOCK).unlink(missing_ok=True)
            lock.release()
        if is_new:
            with contextlib.suppress(OSError):  # the run wrote into it
                folder.rmdir()
