"""The ranks that launches of a check start: which processes they are, and the host memory of their own."""

import contextlib
import os
import threading
from pathlib import Path

import psutil

from dsft.units import KiB

SAMPLE_SECONDS = 0.2
MODULES = (b"dsft.train", b"dsft.eval_ppl")
"""That a rank runs, with a launcher or alone."""


def ranks_below(pid: int) -> list[int]:
    """Find the processes below one that compute. A launcher's words name their module too, but after its own."""
    ranks = []
    for descendant in [process.pid for process in psutil.Process(pid).children(recursive=True)]:
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{descendant}/cmdline").read_bytes().split(b"\0")
            if b"-m" in words and words[words.index(b"-m") + 1] in MODULES:
                ranks.append(descendant)
    return ranks


def anonymous_bytes(pid: int) -> int:
    """Return the memory that a process holds of its own: resident, but of no file (RssAnon, man 5 proc)."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:  # it has ended
        return 0
    return sum(int(line.split()[1]) * KiB for line in lines if line.startswith("RssAnon:"))


class OwnMemory:
    """Samples what the ranks below this process hold together, inside a `with`.

    Pages of mapped files, such as shards that are read, are left out as in the plan: the kernel takes them back.
    """

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "OwnMemory":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(SAMPLE_SECONDS):
            self.sample()

    def sample(self) -> None:
        self.peak_bytes = max(self.peak_bytes, sum(map(anonymous_bytes, ranks_below(os.getpid()))))
