"""Removes what killed jobs left on this machine: files of variables, and DeepSpeed's buffers in /dev/shm, 66 MiB of
memory for each rank.

A file goes only where the kernel proves that no process has it open or mapped: it grants a write lease on no other
(fcntl(2), F_SETLEASE). That holds across containers that share a folder, where process ids prove nothing.
"""

import contextlib
import fcntl
import os
import signal
import tempfile
from pathlib import Path

BUFFER = "deepspeed_allreduce_buffer_"
VARIABLES = "dsft-env-"
"""How the names of these files begin."""


def remove_leftovers() -> None:
    """Remove this user's files of dead jobs. Never raises: it is no part of the job that calls it."""
    for folder, begin in (("/dev/shm", BUFFER), (tempfile.gettempdir(), VARIABLES)):
        for file in Path(folder).glob(f"{begin}*"):
            with contextlib.suppress(OSError):
                if file.lstat().st_uid == os.geteuid():
                    _remove_if_unused(file)


def _remove_if_unused(file: Path) -> None:
    """Raises OSError: a process has it, or the file system cannot tell."""
    descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        # Whoever opens the file from now on signals this process, by default with SIGIO, which would end it.
        fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        file.unlink()
    finally:
        os.close(descriptor)
