"""Locks that a killed process left on DeepSpeed's compiled operators: torch would wait for them for ever in silence."""

import os
import time
from pathlib import Path

OLD_SECONDS = 300
"""A compilation takes a minute or two. Another node's lock on a shared home folder is not open in a process here."""


def remove_old_locks() -> list[Path]:
    """Remove and return the locks that no process of this machine holds and that are too old for another's.

    The lock is a file that its owner keeps open (FileBaton in torch/utils/file_baton.py), beside the operator's build.
    """
    import torch.utils.cpp_extension as cpp_extension

    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root())
    removed = []
    for lock in [*root.glob("*/lock"), *root.glob("*/*/lock")]:
        try:
            if time.time() - lock.stat().st_mtime > OLD_SECONDS and not _is_open(lock):
                lock.unlink()
                removed.append(lock)
        except OSError:
            continue  # another rank was faster, or it is not ours to remove
    return removed


def _is_open(path: Path) -> bool:
    """Whether a process of this machine, as far as this user may look, has the file open."""
    wanted = str(path.resolve())
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if os.readlink(descriptor) == wanted:
                return True
        except OSError:
            continue
    return False
