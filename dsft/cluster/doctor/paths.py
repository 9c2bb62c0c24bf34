"""Files of a run as one node sees them: whether they are there and with which content, and whether a folder is writable
and shared.
"""

import glob
import hashlib
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from dsft.cluster.doctor.facts import cache_folders
from dsft.units import MiB

END_BYTES = MiB
"""Hashed of each end of a file: whole files of hundreds of GB would take minutes."""
SEEN_SECONDS = 4.0
"""How long a file made on another node may take to show: network file systems keep what they know of a folder for
seconds.
"""


def contents(sources: list[str]) -> dict[str, dict[str, Any] | None]:
    """For each file, folder or glob: number of files, their bytes and a hash over names, sizes and both ends; None
    where nothing is there.
    """
    return {source: _content(source) for source in sources}


def _content(source: str) -> dict[str, Any] | None:
    path = Path(source).expanduser()
    if path.is_dir():
        files = sorted(
            file
            for file in path.rglob("*")
            if file.is_file()
            and not any(part.startswith((".", "checkpoint-")) for part in file.relative_to(path).parts)
        )
    else:
        files = (
            [path]
            if path.is_file()
            else sorted(Path(found) for found in glob.glob(str(path), recursive=True) if os.path.isfile(found))
        )
    if not files:
        return None
    total, num_bytes = hashlib.sha256(), 0
    for file in files:
        size = file.stat().st_size
        num_bytes += size
        total.update(f"{file.relative_to(path) if path.is_dir() else file.name}\0{size}\0".encode())
        with file.open("rb") as opened:
            total.update(opened.read(END_BYTES))
            if size > END_BYTES:
                opened.seek(max(END_BYTES, size - END_BYTES))
                total.update(opened.read(END_BYTES))
    return {"files": len(files), "bytes": num_bytes, "hash": total.hexdigest()[:12]}


def existing_parent(path: str) -> str:
    """`path`, or the nearest folder above it that exists."""
    absolute = Path(path).expanduser().absolute()
    return str(next(parent for parent in (absolute, *absolute.parents) if parent.exists()))


def try_writing(folder: str) -> str:
    """Why no file can be written there; empty where it can."""
    try:
        with tempfile.TemporaryFile(dir=existing_parent(folder)) as probe:
            probe.write(b"\0" * 65536)
            probe.flush()
            os.fsync(probe.fileno())
        return ""
    except OSError as error:
        return error.strerror or str(error)


def leave_probe(folder: str, name: str) -> str:
    """Make an empty file in the existing part of `folder`; its path, or an empty string where that fails."""
    path = Path(existing_parent(folder), name)
    try:
        path.touch()
    except OSError:
        return ""
    return str(path)


def sees(path: str) -> bool:
    """Whether this node sees the file that another has made, now or in a few seconds."""
    deadline = time.monotonic() + SEEN_SECONDS
    while True:
        try:
            os.listdir(os.path.dirname(path))  # makes NFS ask its server again
        except OSError:
            return False  # not even the folder
        if os.path.exists(path):
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)


def cached(names: list[str]) -> dict[str, bool]:
    """Whether each hub repository (model or data set) is in this node's cache, in whichever revision."""
    folder = Path(cache_folders()["hub"])
    return {
        name: any(
            any(folder.glob(f"{kind}--{name.replace('/', '--')}/snapshots/*/*")) for kind in ("models", "datasets")
        )
        for name in names
    }
