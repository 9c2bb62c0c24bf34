"""What a training with `torch_compile` compiles: in a phase of its own for the watchdog, outside of the speed figures,
and no longer than `compile_timeout`. Beyond it this rank goes on as if nothing were compiled; its collectives are the
same.
"""

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from dsft.runtime.console import say
from dsft.watchdog import client as watchdog

AGAIN_SECONDS = 5.0
"""After the limit: a library may have caught the first exception."""


class BeyondLimit(Exception):
    """Compiling has taken too long; torch.compile takes the function as it is."""


@contextlib.contextmanager
def compiling_limited(seconds: float, is_compiled: bool, note: Callable[[float], None]) -> Iterator[None]:
    """Watch what is compiled inside a `with`.

    Args:
        seconds: of all that this rank compiles.
        is_compiled: whether anything is.
        note: gets the seconds of each time.
    """
    if not is_compiled:
        yield
        return
    from torch._dynamo import callback, config  # seconds of imports, which other trainings do without

    # The first step too may wait for a rank that compiles; step_timeout counts with that.
    watchdog.set_phase("training")
    left, started, before, is_compiling = seconds, 0.0, "training", False

    def stop(*_: Any) -> None:
        if not is_compiling:  # it ended while this thread waited for another, as in a backward on a GPU
            return
        config.suppress_errors = True  # what raises in it is computed eagerly
        raise BeyondLimit(f"compiling took longer than compile_timeout={seconds:g} s")

    def begin(_: Any) -> None:
        nonlocal started, before, is_compiling
        started, before, is_compiling = time.perf_counter(), watchdog.current_phase, True
        watchdog.set_phase("compiling")
        signal.setitimer(signal.ITIMER_REAL, max(left, 1e-3), AGAIN_SECONDS)

    def end(_: Any) -> None:
        nonlocal left, is_compiling
        is_compiling = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        taken = time.perf_counter() - started
        note(taken)
        watchdog.set_phase(before)
        watchdog.heartbeat()
        if left > 0 >= left - taken:
            say(
                f"warning: compiling took {seconds - left + taken:.3g} s, longer than compile_timeout={seconds:g} s:"
                " the training goes on without it"
            )
            torch.compiler.set_stance("force_eager")
        left -= taken

    handler = signal.signal(signal.SIGALRM, stop)
    suppressed = config.suppress_errors
    callback.callback_handler.register_start_callback(begin)
    callback.callback_handler.register_end_callback(end)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        callback.callback_handler.remove_start_callback(begin)
        callback.callback_handler.remove_end_callback(end)
        config.suppress_errors = suppressed
        torch.compiler.set_stance("default")
