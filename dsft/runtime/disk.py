"""Disks: whether a folder can be written and has room, where this user's cache lies, JSON that is complete or not
there, and the files that killed jobs leave behind.
"""

import contextlib
import fcntl
import json
import os
import shutil
import signal
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
    except OSError as error:
        error.filename = str(path)  # which the user knows
        raise
    finally:
        with contextlib.suppress(OSError):  # that of writing is reported
            beside.unlink(missing_ok=True)


def existing_parent(path: Path) -> Path:
    """Return `path`, or the nearest folder above it that exists, be it a link to nowhere."""
    absolute = path.expanduser().absolute()
    return next(parent for parent in (absolute, *absolute.parents) if os.path.lexists(parent))


def free_bytes(folder: str | Path) -> int | None:
    """Return the free bytes of the disk that holds `folder`, or will; None where it cannot be asked."""
    try:
        return shutil.disk_usage(existing_parent(Path(folder))).free
    except (OSError, StopIteration):
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


CPU_BUFFER = "deepspeed_allreduce_buffer_"
"""How DeepSpeed names its buffers in /dev/shm (deepspeed/ops/csrc/cpu/comm/shm.cpp), 66 MiB of memory for each rank."""
ENV_FILE = "dsft-env-"  # how the names of files of variables in /tmp begin


def remove_leftovers() -> None:
    """Remove this user's files of dead jobs. Never raises: it is no part of the job that calls it.

    A file goes only where the kernel proves that no process has it open or mapped: it grants a write lease on no other
    (fcntl(2), F_SETLEASE). That holds across containers that share a folder, where process ids prove nothing.
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
