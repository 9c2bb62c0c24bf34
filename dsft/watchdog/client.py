"""What a rank tells the process beside it: its phase, its progress, its errors, and that it leaves in order.

    watchdog.start(config)      before the process group, where a launcher started this process
    watchdog.connect()             after it: the guards of all ranks know each other from now on. Collective.
    with watchdog.phase("saving"): ...
    watchdog.heartbeat(step)         at each step
    watchdog.close()            at the end

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

from dsft.watchdog.messages import listen

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


class _Sidecar:
    """The connection of this rank to its sidecar."""

    def __init__(self, timeouts: Any, connection: socket.socket, listener: socket.socket | None):
        self.timeouts, self.connection, self.listener = timeouts, connection, listener
        self.phase, self.ticked, self.log = "starting", 0.0, None

    def send(self, **message: Any) -> None:
        try:
            self.connection.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            pass  # the sidecar is full or gone; the job can do without


_sidecar: _Sidecar | None = None


def start(timeouts: Any) -> None:
    """Start the sidecar of this rank. Errors that nobody catches are reported from now on.

    Args:
        timeouts: anything with the fields of `config.TimeoutFields`, such as a TrainConfig or EvalConfig.
    """
    global _sidecar
    if "RANK" not in os.environ or _sidecar is not None:
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
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from dsft.watchdog.sidecar import main; main()"
    subprocess.Popen(
        [sys.executable, "-S", "-E", "-c", code, json.dumps(options)],
        stdin=theirs,
        stdout=subprocess.DEVNULL,
        pass_fds=[listener.fileno()] if listener else [],
        start_new_session=True,
    )
    theirs.close()
    ours.settimeout(1.0)
    _sidecar = _Sidecar(timeouts, ours, listener)
    sys.excepthook = _report_error


def connect() -> None:
    """Tell the sidecars of all ranks where the hub is. Collective, once the process group stands."""
    import torch.distributed as dist

    if _sidecar is None:
        return
    place: list[Any] = [[_sidecar.listener.getsockname()[1], secrets.token_hex(16)] if _sidecar.listener else None]
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(place, src=0)
    _sidecar.send(hub=[os.environ["MASTER_ADDR"], *place[0]])
    set_phase("loading")
    if _sidecar.listener:
        _sidecar.listener.close()  # the sidecar has its own


def heartbeat(step: int = -1) -> None:
    """Progress was made; costs nothing when called often."""
    if _sidecar is not None and time.monotonic() - _sidecar.ticked > TICK_SECONDS:
        _sidecar.ticked = time.monotonic()
        _sidecar.send(**({"step": step} if step >= 0 else {"tick": True}))


def set_phase(phase: str) -> None:
    """From now on the limit of `phase` holds."""
    if _sidecar is not None:
        _sidecar.phase = phase
        _sidecar.send(phase=phase, limit=getattr(_sidecar.timeouts, LIMITS[phase]))


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """The limit of phase `name` inside a `with`, then the earlier one again."""
    before = _sidecar.phase if _sidecar is not None else ""
    set_phase(name)
    yield
    set_phase(before)


def set_log(path: Path) -> None:
    """Where this rank's output goes, for messages."""
    if _sidecar is not None:
        _sidecar.log = path
        _sidecar.send(log=str(path.resolve()))


def close(code: int = 0, lines: list[str] | None = None) -> None:
    """This rank is about to end by itself with exit code `code`, having said `lines`."""
    global _sidecar
    if _sidecar is not None:
        _sidecar.send(leaves=code, lines=lines or [])
        _sidecar.connection.close()
        _sidecar = None


def _report_error(kind: type[BaseException], error: BaseException, trace) -> None:
    """An error that nobody caught: into this rank's log; on the screen it comes from the hub, if it was the first."""
    text = "".join(traceback.format_exception(kind, error, trace))
    if _sidecar is not None:
        if _sidecar.log:
            with _sidecar.log.open("a", encoding="utf-8") as file:
                file.write(text)
        _sidecar.send(
            **(
                {"failed": "interrupted", "text": "was interrupted (Ctrl-C)"}
                if issubclass(kind, KeyboardInterrupt)
                else {"failed": "error", "text": text[-20_000:]}
            )
        )
        time.sleep(VERDICT_SECONDS)
    sys.stderr.write(text)  # nobody has ended this rank: then it speaks for itself
