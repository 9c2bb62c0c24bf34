"""SIGUSR1 or SIGTERM asks a training to save and end, so that it can resume later: SLURM and Kubernetes send them
before they take a node.

SIGUSR1 counts from the start, since SLURM may send it while the model loads (`--signal=USR1@300`). SIGTERM counts only
while training runs; before, it ends the process as usual.
"""

import contextlib
import signal
from collections.abc import Iterator

_asked = False


def listen() -> None:
    """Note SIGUSR1 from now on. It is enough that a single rank gets it: the trainer lets all ranks agree."""
    signal.signal(signal.SIGUSR1, _note)


@contextlib.contextmanager
def sigterm_saves() -> Iterator[None]:
    """Note SIGTERM as well inside a `with`. In the main thread only; elsewhere (a notebook's) nothing changes."""
    try:
        before = signal.signal(signal.SIGTERM, _note)
    except ValueError:
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def is_asked() -> bool:
    """Return whether this rank got a signal."""
    return _asked


def _note(number: int, frame: object) -> None:
    global _asked
    _asked = True
