"""What a rank reports to the sidecar beside it: its phase, its progress, its errors, and that it exits in order.
Without a launcher all of this does nothing.

    watchdog.start(config)                  before the process group, where a launcher started this process
    watchdog.connect(endpoint)              after it, with the `endpoint()` of rank 0: the sidecars meet
    with watchdog.phase("saving"): ...
    watchdog.heartbeat(step)                at each step
    watchdog.close()                        at the end
"""

import contextlib
import dataclasses
import faulthandler
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

from dsft.watchdog.messages import POLL_SECONDS, Connection, Failure, listen
from dsft.watchdog.processes import StartedBy, command_of

SIDECAR = command_of("os.fork() and os._exit(0); from dsft.watchdog.sidecar import main; main()")
"""Leaves the process tree of the rank: DeepSpeed's launcher, which ends that tree, would wait 30 s for the sidecar."""
STARTED_BY = StartedBy.now()
LONGEST_TRACEBACK = 20_000  # characters, from its end
VERDICT_SECONDS = 20.0  # a rank with an error waits so long to be ended, so that what failed first is said first
PHASE_LIMITS = {
    "starting": "start_timeout",
    "loading": "load_timeout",
    "compiling": "compile_timeout",
    "training": "step_timeout",
    "evaluating": "step_timeout",
    "saving": "save_timeout",
}
"""Phase of a rank -> the option that limits it (`config.TimeoutFields`), in seconds without progress."""


class Endpoint(NamedTuple):  # of the coordinator, which rank 0 knows
    port: int | None
    token: str | None  # what proves a message


@dataclasses.dataclass
class _Client:
    timeouts: Any
    sidecar: Connection
    endpoint: Endpoint | None = None
    last_heartbeat: float = 0.0
    log: Path | None = None
    has_met: bool = False


_client: _Client | None = None
current_phase = "starting"  # of this rank, also without a sidecar


def start(timeouts: Any) -> None:
    """Start the sidecar of this rank, with the limits of `config.TimeoutFields`, and report errors nobody catches."""
    global _client
    if "RANK" not in os.environ or _client is not None:
        return
    rank = int(os.environ["RANK"])
    to_sidecar, to_rank = socket.socketpair()
    listener = listen() if rank == 0 else None
    stacks = os.memfd_create("dsft-stacks")  # no file that a killed job would leave behind
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR2, file=stacks, all_threads=True)
    # One that was forked from another, as in a notebook, has been started by other processes.
    started_by = STARTED_BY if STARTED_BY.pid == os.getpid() else StartedBy.now()
    options = {
        "rank": rank,
        "local_rank": int(os.environ.get("LOCAL_RANK", "0")),
        "world_size": int(os.environ.get("WORLD_SIZE", "1")),
        "pid": os.getpid(),
        "started_by": dataclasses.asdict(started_by),
        "lost_timeout": timeouts.lost_timeout,
        "start_timeout": timeouts.start_timeout,
        "listener": listener and listener.fileno(),
        "stacks": stacks,
    }
    subprocess.Popen(
        [*SIDECAR, json.dumps(options)],
        stdin=to_rank,
        stdout=subprocess.DEVNULL,
        pass_fds=[stacks, *([listener.fileno()] if listener else [])],
        start_new_session=True,
    ).wait()
    endpoint = Endpoint(None, None)
    to_rank.close()  # the sidecar has its own
    if listener:
        endpoint = Endpoint(listener.getsockname()[1], secrets.token_hex(16))
        listener.close()
    _client = _Client(timeouts, Connection(to_sidecar), endpoint)
    sys.excepthook = _report_error


def endpoint() -> Endpoint | None:
    """Of rank 0 for `connect` on all ranks; None without a sidecar."""
    return _client and _client.endpoint


def connect(endpoint: Endpoint | None) -> None:
    """Let this rank's sidecar report to the coordinator on rank 0's node from now on. The phase is "loading"."""
    if _client is None:
        return
    _client.sidecar.send("connect", address=os.environ["MASTER_ADDR"], **endpoint._asdict())
    _client.has_met = True
    set_phase("loading")


def heartbeat(step: int | None = None) -> None:
    """Report that progress was made, of training after step number `step`; costs nothing when called often."""
    if _client is not None and time.monotonic() - _client.last_heartbeat > POLL_SECONDS:
        _client.last_heartbeat = time.monotonic()
        _client.sidecar.send("heartbeat", step=step)


def set_limits(timeouts: Any) -> None:
    """Let these limits hold from the next phase on: a run that is planned may need longer steps."""
    if _client is not None:
        _client.timeouts = timeouts


def set_phase(phase: str) -> None:
    """Let the limit of `phase` hold from now on."""
    global current_phase
    current_phase = phase
    if _client is not None:
        _client.sidecar.send("phase", name=phase, limit=getattr(_client.timeouts, PHASE_LIMITS[phase]))


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """Let the limit of phase `name` hold inside a `with`, then the earlier one again; after an error it stays."""
    before = current_phase
    set_phase(name)
    yield
    set_phase(before)


def set_file(kind: Literal["log", "run"], path: Path) -> None:
    """Report where this rank's output goes; or, on rank 0, the run.json in which the coordinator records a failure."""
    if _client is not None:
        if kind == "log":
            _client.log = path
        _client.sidecar.send(kind, path=str(path.resolve()))


def close(exit_code: int = 0, lines: list[str] | None = None) -> bool:
    """Report that this rank is about to exit with `exit_code` and these messages; returns whether the coordinator will
    print them.
    """
    global _client
    if _client is None:
        return False
    has_met = _client.has_met
    _client.sidecar.send("close", exit_code=exit_code, lines=lines or [])
    _client.sidecar.close()
    _client = None
    return has_met


def _report_error(kind: type[BaseException], error: BaseException, trace) -> None:
    # Goes into this rank's log; the coordinator prints it, if it was the first.
    text = "".join(traceback.format_exception(kind, error, trace))
    if _client is not None:
        with contextlib.suppress(OSError):  # a full disk must not hide the error
            if _client.log:
                with _client.log.open("a", encoding="utf-8") as file:
                    file.write(text)
        _client.sidecar.send("failed", failure=Failure.ERROR, text=text[-LONGEST_TRACEBACK:])
        time.sleep(VERDICT_SECONDS)
    sys.stderr.write(text)  # nobody has ended this rank: then it speaks for itself
