"""Keeps room on the disk for the final model while a training runs, so that a full disk does not lose it."""

import contextlib
import ctypes
import errno
import os
from pathlib import Path

from dsft.errors import UserError

RESERVED = ".room_for_final"


def reserve_room(output_dir: str, num_bytes: int) -> None:
    """Hold `num_bytes` in a file of `output_dir`, until `give_room`: let the file system allocate them, fallocate(2).

    Where it cannot (NFS before 4.2) nothing is held: posix_fallocate(3) would write into every block.

    Raises:
        UserError: where there is no room for the final model.
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
        give_room(output_dir)
        raise UserError(
            [
                f"output_dir={output_dir}: has no room for the final model ({num_bytes / 1e9:.3g} GB); choose another"
                " disk"
            ]
        )


def give_room(output_dir: str) -> None:
    """Free what was held, for the final model to be written; on a disk that is read-only now it stays."""
    with contextlib.suppress(OSError):
        (Path(output_dir) / RESERVED).unlink()
