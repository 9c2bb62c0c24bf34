"""Disks: whether a folder can be written and has room, where this user's cache lies, and JSON that is complete or not
there.
"""

import json
import os
import shutil
import socket
import tempfile
from pathlib import Path
from typing import Any


def user_cache() -> Path:
    """The folder `dsft` in the user's cache; XDG_CACHE_HOME is followed."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dsft"


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write beside and rename, so that a reader or a crash never sees part of a file."""
    beside = path.with_name(f"{path.name}.{socket.gethostname()}.{os.getpid()}.tmp")
    try:
        beside.write_text(json.dumps(content, indent=2, default=str) + "\n", encoding="utf-8")
        os.replace(beside, path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise


def existing_parent(path: Path) -> Path:
    """Return `path`, or the nearest folder above it that exists."""
    absolute = path.expanduser().absolute()
    return next(parent for parent in (absolute, *absolute.parents) if parent.exists())


def free_bytes(folder: str | Path) -> int | None:
    """Return the free bytes of the disk that holds `folder`, or will; None where it cannot be asked."""
    try:
        return shutil.disk_usage(existing_parent(Path(folder))).free
    except (OSError, StopIteration):
        return None


def check_writable(output_dir: str, problems: list[str]) -> None:
    """Check that `output_dir` is a folder, or one that can be made, on a disk that takes a few bytes."""
    path = Path(output_dir)
    if path.exists() and not path.is_dir():
        problems.append(f"output_dir={path}: is a file, not a folder")
        return
    try:
        with tempfile.TemporaryFile(dir=existing_parent(path)) as probe:
            probe.write(b"\0" * 4096)
            probe.flush()
            os.fsync(probe.fileno())
    except OSError as error:
        problems.append(f"output_dir={path}: cannot be written ({error.strerror})")
