"""Removes folders of a run in a way that no leftover harms: out of the way first, then from the disk.

A folder may resist (a network file system keeps files that are open, a mount lies in it): what is left stays in
`.removed/`, and the next removal tries again.
"""

import contextlib
import os
import shutil
import time
from pathlib import Path

from dsft.errors import one_line
from dsft.watchdog import client as watchdog

REMOVED = ".removed"


def discard(folder: Path) -> list[str]:
    """Move a folder to `.removed/` beside it and empty that. Returns what could not be removed, with the reason.

    Raises:
        OSError: where it cannot even be moved.
    """
    if folder.exists():
        trash = folder.parent / REMOVED
        trash.mkdir(exist_ok=True)
        folder.rename(trash / f"{folder.name}.{time.time_ns()}")
    return empty_trash(folder.parent)


def empty_trash(output_dir: Path) -> list[str]:
    """Remove what earlier removals left. Returns what still resists, with the reason."""
    errors: list[str] = []
    trash = output_dir / REMOVED
    if trash.exists():
        for folder, _, names in os.walk(trash):
            for name in names:
                with contextlib.suppress(OSError):
                    os.unlink(Path(folder, name))
                watchdog.heartbeat()  # large files take a slow file system its time
        shutil.rmtree(trash, onerror=lambda _, path, error: errors.append(f"{path}: {one_line(error[1])}"))
    return errors[:1]  # the others follow from the first


def discard_if_possible(folder: Path) -> list[str]:
    """As `discard`; a folder that cannot be moved stays and is returned, too."""
    try:
        return discard(folder)
    except OSError as error:
        return [f"{folder}: {one_line(error)}"]
