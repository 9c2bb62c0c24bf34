"""Checks whether folders are writable, their free bytes, and locks a run's folder."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import filelock

from dsft.errors import UserError


def user_cache() -> Path:
    """Return the folder `dsft` in the user's cache (XDG_CACHE_HOME)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dsft"


def existing_parent(path: Path) -> Path:
    """Return `path`, or the nearest folder above it that exists, even as a broken link."""
    absolute = path.expanduser().absolute()
    return next(parent for parent in (absolute, *absolute.parents) if os.path.lexists(parent))


def free_bytes(folder: str | Path) -> int | None:
    """Return the free bytes of the disk of `folder`, which may not exist yet; None if they cannot be read."""
    try:
        return shutil.disk_usage(existing_parent(Path(folder))).free
    except OSError:
        return None


PROBE = ".probe-"
"""Prefix of the files that test a folder."""


def check_writable(output_dir: str, problems: list[str]) -> None:
    """Check that `output_dir` is a folder, or can be created, on a disk with some free bytes."""
    path = Path(output_dir)
    if os.path.lexists(path) and not path.is_dir():
        problems.append(f"output_dir={path}: is not a folder; name a new one")
        return
    if error := write_error(existing_parent(path)):
        problems.append(f"output_dir={path}: cannot be written ({error})")


def write_error(folder: Path) -> str:
    """Return why no file can be written and renamed in a folder, as a save does; empty if one can."""
    try:
        descriptor, name = tempfile.mkstemp(prefix=PROBE, dir=folder)
        with os.fdopen(descriptor, "wb") as probe:
            probe.write(bytes(4096))
            probe.flush()
            os.fsync(descriptor)
        os.rename(name, f"{name}.renamed")
        os.unlink(f"{name}.renamed")
    except OSError as error:
        return error.strerror or str(error)
    return ""


LOCK = ".lock"
"""Name of a run's lock in its folder. The system releases it when the locking process exits."""


def is_held(folder: Path) -> bool:
    """Return whether a run is writing to `folder` now."""
    if not (folder / LOCK).exists():
        return False
    try:
        with filelock.FileLock(folder / LOCK, timeout=0):
            return False
    except filelock.Timeout:
        return True
    except OSError:  # no permission to write
        return False


def in_use(folder: Path) -> str:
    """Return the message for a folder that a running run has locked."""
    return (
        f"output_dir={folder}: another process is writing there now; wait until it finishes, or choose another folder"
    )


@contextlib.contextmanager
def hold_folder(folder: Path) -> Iterator[None]:
    """Lock `folder`, unless it is not writable. Raises UserError if another run is writing to it."""
    is_new = not folder.exists()
    lock = filelock.FileLock(folder / LOCK)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except filelock.Timeout:
        raise UserError(in_use(folder)) from None
    except OSError:
        pass
    try:
        yield
    finally:
        if lock.is_locked:
            (folder / LOCK).unlink(missing_ok=True)
            lock.release()
        if is_new:
            with contextlib.suppress(OSError):  # the run wrote files into it
                folder.rmdir()
