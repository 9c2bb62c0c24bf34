"""Writes that fail as on a bad disk: of Python, torch and safetensors alike, in the ranks of tests (tests/ranks.py)."""

import atexit
import ctypes
import functools
import shutil
import subprocess
import tempfile
from pathlib import Path


@functools.cache
def library() -> str | None:
    """Compile what ranks have preloaded; None without a compiler, or where nothing can be preloaded."""
    if not shutil.which("gcc"):
        return None
    folder = Path(tempfile.mkdtemp(prefix="failing-writes-"))
    atexit.register(shutil.rmtree, folder)  # ranks exit by os._exit, which runs no such function
    source = Path(__file__).with_suffix(".c")
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", folder / "library.so", source, "-ldl"], check=True)
    return str(folder / "library.so")


class Disk:
    """The disk of this rank, as it sees files whose path holds `part`."""

    def __init__(self, part: str):
        self._calls, self._part = ctypes.CDLL(None), ctypes.c_char_p(part.encode())
        self._calls.failed_write.restype = ctypes.c_char_p

    def fail(self, number: int, error: int) -> None:
        """Let write number `number` from now on fail with `error`; with 0 writes are counted only."""
        self._calls.fail_write(self._part, number, error)

    def heal(self) -> tuple[int, str]:
        """Return (writes since `fail`, the call and file that failed, or "")."""
        seen = self._calls.counted_writes(), self._calls.failed_write().decode()
        self._calls.fail_write(None, 0, 0)
        return seen
