"""One log file per rank, on its node: `logs/rank_3.log` in the run's folder. The screen shows rank 0 alone.

Rank 0 writes to both. The other ranks write to the file, also where a library prints without Python.
"""

import contextlib
import os
import re
import socket
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO

from dsft.runtime.distributed import rank, world_size
from dsft.watchdog import client as watchdog

FOLDER = "logs"
COLOUR = re.compile(r"\033\[[\d;]*m")


class _Both:
    """A text stream that also writes to a file, without progress bars and colours; everything else is the screen's."""

    def __init__(self, screen: TextIO, file: TextIO):
        self.screen, self.file = screen, file

    def write(self, text: str) -> int:
        if "\r" not in text:  # a bar
            with contextlib.suppress(OSError):  # a full disk must not end the run; the screen has it
                self.file.write(COLOUR.sub("", text))
        return self.screen.write(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self.file.flush()
        self.screen.flush()

    def __getattr__(self, name: str):
        return getattr(self.screen, name)


def log_to_files(output_dir: str, *, append: bool) -> None:
    """Give this rank its file from now on. Without other ranks the screen is enough."""
    if world_size() == 1:
        return
    path = Path(output_dir) / FOLDER / f"rank_{rank()}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("a" if append else "w", encoding="utf-8", buffering=1)
    file.write(
        f"# rank {rank()} on {socket.gethostname()}, process {os.getpid()},"
        f" {datetime.now(UTC).isoformat(timespec='seconds')}\n"
    )
    watchdog.set_log(path)
    if rank() == 0:
        # An earlier run in this process may have had another file.
        sys.stdout, sys.stderr = (
            _Both(stream.screen if isinstance(stream, _Both) else stream, file) for stream in (sys.stdout, sys.stderr)
        )
        return
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(file.fileno(), stream.fileno())
        stream.reconfigure(line_buffering=True)
