"""What a rank tells the process beside it: its phase, its progress, its errors, and that it leaves in order.

    watch.start(config)      before the process group, where a launcher started this process
    watch.meet()             after it: the guards of all ranks know each other from now on. Collective.
    with watch.phase("saving"): ...
    watch.tick(step)         at each step
    watch.leave()            at the end

Without a launcher all of them do nothing.
"""

import contextlib
import faulthandler
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dsft.guard.lines import listen

ROOT = Path(__file__).resolve().parent.parent.parent
TICK_SECONDS = 0.5
VERDICT_SECONDS = 20
"""A rank with an error waits so long to be ended, so that what failed first is said first."""


LIMITS = {
    "starting": "start_timeout",
    "loading": "load_timeout",
    "training": "step_timeout",
    "evaluating": "step_timeout",
    "saving": "save_timeout",
}
"""Phase -> the field of `config.TimeoutFields` that limits it, in seconds without progress."""


class _Watch:
    """The connection of this rank to its sidecar."""

    def __init__(self, timeouts: Any, connection: socket.socket, listener: socket.socket | None):
        self.timeouts, self.connection, self.listener = timeouts, connection, listener
        self.phase, self.ticked, self.log = "starting", 0.0, None

    def send(self, **message: Any) -> None:
        try:
            self.connection.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            pass  # the sidecar is full or gone; the job can do without


_watch: _Watch | None = None


def start(timeouts: Any) -> None:
    """Start the sidecar of this rank. Errors that nobody catches are reported from now on.

    Args:
        timeouts: anything with the fields of `config.TimeoutFields`, such as a TrainConfig or EvalConfig.
    """
    global _watch
    if "RANK" not in os.environ or _watch is not None:
        return
    rank = int(os.environ["RANK"])
    ours, theirs = socket.socketpair()
    listener = listen() if rank == 0 else None
    descriptor, stacks_file = tempfile.mkstemp(prefix="dsft-stacks-")
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR2, file=descriptor, all_threads=True)
    options = {
        "rank": rank,
        "local_rank": int(os.environ.get("LOCAL_RANK", "0")),
        "world_size": int(os.environ.get("WORLD_SIZE", "1")),
        "pid": os.getpid(),
        "lost_after_seconds": timeouts.lost_timeout,
        "start_seconds": 2 * timeouts.start_timeout,
        "listener": listener and listener.fileno(),
        "stacks_file": stacks_file,
    }
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from dsft.guard.sidecar import main; main()"
    subprocess.Popen(
        [sys.executable, "-S", "-E", "-c", code, json.dumps(options)],
        stdin=theirs,
        stdout=subprocess.DEVNULL,
        pass_fds=[listener.fileno()] if listener else [],
        start_new_session=True,
    )
    theirs.close()
    ours.settimeout(1.0)
    _watch = _Watch(timeouts, ours, listener)
    sys.excepthook = _report_error


def meet() -> None:
    """Tell the sidecars of all ranks where the hub is. Collective, once the process group stands."""
    import torch.distributed as dist

    if _watch is None:
        return
    place: list[Any] = [[_watch.listener.getsockname()[1], secrets.token_hex(16)] if _watch.listener else None]
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(place, src=0)
    _watch.send(hub=[os.environ["MASTER_ADDR"], *place[0]])
    enter("loading")
    if _watch.listener:
        _watch.listener.close()  # the sidecar has its own


def tick(step: int = -1) -> None:
    """Progress was made; costs nothing when called often."""
    if _watch is not None and time.monotonic() - _watch.ticked > TICK_SECONDS:
        _watch.ticked = time.monotonic()
        _watch.send(**({"step": step} if step >= 0 else {"tick": True}))


def enter(phase: str) -> None:
    """From now on the limit of `phase` holds."""
    if _watch is not None:
        _watch.phase = phase
        _watch.send(phase=phase, limit=getattr(_watch.timeouts, LIMITS[phase]))


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """The limit of phase `name` inside a `with`, then the earlier one again."""
    before = _watch.phase if _watch is not None else ""
    enter(name)
    yield
    enter(before)


def set_log(path: Path) -> None:
    """Where this rank's output goes, for messages."""
    if _watch is not None:
        _watch.log = path
        _watch.send(log=str(path.resolve()))


def leave(code: int = 0, lines: list[str] | None = None) -> None:
    """This rank is about to end by itself with exit code `code`, having said `lines`."""
    global _watch
    if _watch is not None:
        _watch.send(leaves=code, lines=lines or [])
        _watch.connection.close()
        _watch = None


def _report_error(kind: type[BaseException], error: BaseException, trace) -> None:
    """An error that nobody caught: into this rank's log; on the screen it comes from the hub, if it was the first."""
    text = "".join(traceback.format_exception(kind, error, trace))
    if _watch is not None:
        if _watch.log:
            with _watch.log.open("a", encoding="utf-8") as file:
                file.write(text)
        _watch.send(
            **(
                {"failed": "interrupted", "text": "was interrupted (Ctrl-C)"}
                if issubclass(kind, KeyboardInterrupt)
                else {"failed": "error", "text": text[-20_000:]}
            )
        )
        time.sleep(VERDICT_SECONDS)
    sys.stderr.write(text)  # nobody has ended this rank: then it speaks for itself
