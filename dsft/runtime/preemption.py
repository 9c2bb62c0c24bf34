"""SIGUSR1, SIGTERM or a first Ctrl-C asks a training to save and end, so that it can resume later: SLURM and Kubernetes
send the signals before they take a node.

SIGUSR1 counts from the start, since SLURM may send it while the model loads (`--signal=USR1@300`). The others count
only while training runs; before, they end the process as usual. In a notebook Ctrl-C stays what it is.
"""

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator

from dsft.watchdog.messages import say

_asked = False
_is_listening = False


def listen() -> None:
    """Note SIGUSR1 from now on. It is enough that a single rank gets it: the trainer lets all ranks agree."""
    global _is_listening, _asked
    _is_listening, _asked = "ipykernel" not in sys.modules, False
    if threading.current_thread() is not threading.main_thread():
        return
    signal.signal(signal.SIGUSR1, _note)


@contextlib.contextmanager
def signals_save() -> Iterator[None]:
    """Note SIGTERM, and Ctrl-C where `listen` was called, as well inside a `with`. In the main thread only; elsewhere
    (a notebook's) nothing changes.
    """
    with contextlib.ExitStack() as stack:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT) if _is_listening else (signal.SIGTERM,):
                stack.callback(signal.signal, number, signal.signal(number, _note))
        yield


def is_asked() -> bool:
    """Return whether this rank got a signal."""
    return _asked


def _note(number: int, frame: object) -> None:
    global _asked
    if number == signal.SIGINT:
        if _asked:
            raise KeyboardInterrupt
        say("Ctrl-C: saves and exits after the next step; a second one exits at once")
    _asked = True
