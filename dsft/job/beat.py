"""Ends a job on all nodes when one of its ranks fails, hangs or is lost, and names that rank.

Each rank has one thread. Once a second it writes the rank's entry to torch's TCPStore and checks there whether the job
has failed. Rank 0 checks the ages of all entries by its own clock, the others that of rank 0. The thread of a stopped
process, or one that waits for a store behind a cut link, cannot act: the rank's guard (guard.py) kills the process.

    watchdog.start(options)                 before the process group, if a launcher started this process
    watchdog.connect()                      after it, on every rank
    with watchdog.phase("saving"): ...
    watchdog.heartbeat(step)                at each step
    watchdog.close()                        at the end

Without a launcher all of this does nothing.
"""

import contextlib
import dataclasses
import faulthandler
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from dsft.job import guard
from dsft.units import write_json

if TYPE_CHECKING:
    from torch.distributed import Store

CONSEQUENCES = re.compile(
    r"connection (closed|reset|refused)|closed by peer|broken pipe|timed out waiting|socket ?timeout|nccl|"
    r"DistBackendError|DistNetworkError|DistStoreError|gloo|remote process exited|unhandled system error",
    re.IGNORECASE,
)
"""In the last line of a traceback: errors of a rank whose peer has exited."""


@dataclass(frozen=True, kw_only=True)
class Cause:
    """The failure of one rank, or what another rank observed of it."""

    rank: int
    host: str
    text: str
    """One sentence, without the rank."""
    exit_code: int = 1
    printed_by: int = 0
    """The rank that prints it."""
    lines: list[str] = field(default_factory=list)
    """Messages of a rank that exits with one of dsft's own errors; printed instead of the sentence."""
    traceback: str = ""

    def sentence(self) -> str:
        return f"rank {self.rank} on {self.host} {self.text}"

    def named_lines(self) -> list[str]:
        """Return the lines with the rank's name, for rank 0 to print: it has not found the same error itself."""
        if self.rank == 0:
            return self.lines
        return [line.replace("error: ", f"error: rank {self.rank} on {self.host}: ", 1) for line in self.lines]

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> "Cause":
        return cls(**json.loads(text))


def is_consequence(error: str) -> bool:
    """Return whether another rank's exit probably caused this error, by its last line."""
    last_line = error.strip().rpartition("\n")[2]
    return CONSEQUENCES.search(last_line) is not None


def record_failure(file: Path, error: str, *, replaces: bool = False) -> None:
    """Record that a run has failed, if its run.json is here. A cause also `replaces` an earlier failure."""
    with contextlib.suppress(OSError, ValueError):
        content = json.loads(file.read_text(encoding="utf-8"))
        replaced = ("running", "failed") if replaces else ("running",)
        if content.get("status") in replaced:
            write_json(file, content | {"status": "failed", "error": error})


BEAT_SECONDS = 1.0
IMPORT_SECONDS = 60.0  # beside the rendezvous, which has its own limit and message
STORE_SECONDS = 20.0  # for an answer of the store
COLLECT_SECONDS = 3.0  # from the first stalled rank to the choice among all
LEAVE_SECONDS = 3.0  # for a rank to exit on its own with the same error as another
SPREAD_SECONDS = 2.5  # for all ranks to read the cause, and one to print it, before the first exit
PROGRESS_BYTES = 1 << 20  # read or written: this much counts as progress in the phases of MOVES_FILES
MOVES_FILES = ("loading", "saving")
COLLECTIVES = ("/torch/distributed/", "/deepspeed/comm/")  # in the path of a frame's file
LONGEST_TRACEBACK = 20_000  # characters, from its end
PHASE_LIMITS = {
    "loading": "load_timeout",
    "compiling": "compile_timeout",
    "training": "step_timeout",
    "evaluating": "step_timeout",
    "saving": "save_timeout",
}
"""Phase of a rank -> the option that limits it (`config.TimeoutFields`), in seconds without progress."""
# Keys of the store that `dsft launch` writes.
LAUNCHER_BEAT = "launcher"
SAVE = "save"
CAUSE = "cause"
CONSEQUENCE = "consequence"
STARTED_BY = os.getpid(), os.getppid()  # the launcher, or its shell; a forked rank has another parent
BYE = b"bye"
KILLED = (
    "exited without an error of its own: it was killed from outside (out of memory, kill -9) or crashed in native code"
)


@dataclass
class _Progress:
    """Progress of this rank. The main thread writes it, also without a launcher; the thread of `_Beat` reads it."""

    timeouts: Any = None
    """An object with the fields of `config.TimeoutFields`."""
    phase: str = "starting"
    step: int = -1
    last_time: float = field(default_factory=time.monotonic)
    """Time of the last progress."""
    log: Path | None = None
    """The file that this rank logs to."""
    run_file: Path | None = None
    """The run.json in which a failure is recorded."""

    @property
    def limit(self) -> float:
        """Seconds without progress."""
        if self.phase == "starting":
            return 2 * self.timeouts.start_timeout + IMPORT_SECONDS
        return getattr(self.timeouts, PHASE_LIMITS[self.phase])

    @property
    def place(self) -> str:
        return f"in phase {self.phase}" + (f", step {self.step}" if self.step >= 0 else "")


progress = _Progress()


@dataclass
class _Entry:
    """A rank's last entry, and when it was seen to change."""

    text: bytes
    changed: float


class _Beat(threading.Thread):
    def __init__(self, lost_timeout: float):
        super().__init__(name="dsft-beat", daemon=True)
        self.lost_timeout = lost_timeout
        self.rank = int(os.environ["RANK"])
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self.host = socket.gethostname()
        self.parent = STARTED_BY[1] if STARTED_BY[0] == os.getpid() else os.getppid()
        self.moved_bytes = 0
        self.screen = os.dup(2)  # standard error before it is redirected to the log; torch also replaces sys.stderr
        self.store: Store | None = None
        self.hosts: list[str] = []
        self.beats = 0
        self.entries: dict[str, _Entry] = {}
        self.siblings = select.poll()  # ranks of this node: readable when they exit
        self.rank_of_sibling: dict[int, int] = {}
        self.stalled_since: float | None = None
        self.consequence_since: float | None = None
        self.has_asked_to_save = False
        self.is_closed = threading.Event()
        self.is_leaving = False  # whether the main thread prints its own error and exits
        self.guard = self._start_guard() if self.world_size > 1 else None

    def _start_guard(self) -> subprocess.Popen:
        name = f"dsft: error: rank {self.rank} on {self.host}"
        seconds = f"for {self.lost_timeout:.0f} s"
        stopped = ""
        lost = ""
        if self.rank == 0:  # reports all others
            stopped = lost = f"{name} was stopped (SIGSTOP), or hung in native code, {seconds}"
        elif os.environ.get("LOCAL_RANK", "0") == "0":
            address = os.environ.get("MASTER_ADDR", "")
            lost = f"{name} has lost rank 0 at {address} {seconds}: it was stopped, or its node is down or cut off"
        restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
        launcher = self.parent if "TORCHELASTIC_RUN_ID" in os.environ and not restarts else 0
        words = [os.getpid(), launcher, self.lost_timeout + 2 * BEAT_SECONDS, stopped, lost]
        process = subprocess.Popen(
            [sys.executable, "-S", "-E", guard.__file__, *map(str, words)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        process.wait()  # it has forked
        os.set_blocking(process.stdin.fileno(), False)
        return process

    def tell_guard(self, word: bytes) -> None:
        if self.guard is not None:
            with contextlib.suppress(OSError):
                os.write(self.guard.stdin.fileno(), word)

    # The thread

    def run(self) -> None:
        last_pass = time.monotonic()
        while not self.is_closed.is_set():
            now = time.monotonic()
            if now - last_pass > self.lost_timeout / 2:  # this process was stopped, perhaps with all the others
                progress.last_time = now
                for entry in self.entries.values():
                    entry.changed = now
            last_pass = now
            try:
                self._look_at_this_rank(now)
                if self.store is not None:
                    self._look_at_job(now)
            except RuntimeError:  # from torch's store
                self._lose_store()
            except Exception:  # of this thread itself: without it the guard would take the rank for hung
                self._print(f"error: the watchdog of rank {self.rank} failed\n{traceback.format_exc()}")
                self._exit(1)
            self.tell_guard(b".")
            self._wait_for_siblings()

    def _look_at_this_rank(self, now: float) -> None:
        if os.getppid() != self.parent:
            self.fail(f"lost its launcher: process {self.parent} exited")
        if progress.phase in MOVES_FILES:
            moved = _moved_bytes()
            if moved >= self.moved_bytes + PROGRESS_BYTES:
                progress.last_time = now
                self.moved_bytes = moved
        is_stalled = now - progress.last_time > progress.limit
        if is_stalled and self.store is None:
            self.fail(f"made no progress for {progress.limit:.0f} s, {progress.place}", shows_stacks=True)

    def entry(self) -> str:
        """Return this rank's state for the others; the text differs each time."""
        self.beats += 1
        idle = time.monotonic() - progress.last_time
        entry = {
            "beat": self.beats,
            "step": progress.step,
            "place": progress.place,
            "idle": idle,
            "limit": progress.limit,
            "waits": idle > progress.limit and _waits_for_others(),
        }
        return json.dumps(entry)

    def _look_at_job(self, now: float) -> None:
        self.store.set(f"rank {self.rank}", self.entry())
        if self.store.check([CAUSE]):
            self._end(Cause.from_json(self.store.get(CAUSE)))
        if self.store.check([CONSEQUENCE]):
            # Its cause may still show: an entry that no longer changes.
            self.consequence_since = self.consequence_since or now
            if now - self.consequence_since > self.lost_timeout + COLLECT_SECONDS:
                self._end(Cause.from_json(self.store.get(CONSEQUENCE)))
        if not self.has_asked_to_save and self.store.check([SAVE]):
            self.has_asked_to_save = True
            os.kill(os.getpid(), signal.SIGUSR1)
        self._look_at_entries(now)

    def _look_at_entries(self, now: float) -> None:
        """Check the ages of entries: rank 0 those of all ranks and `dsft launch`, every other rank that of rank 0."""
        num_ranks = self.world_size if self.rank == 0 else 1
        keys = [f"rank {rank}" for rank in range(num_ranks)]
        if self.rank == 0 and self.store.check([LAUNCHER_BEAT]):
            keys.append(LAUNCHER_BEAT)
        for key, text in zip(keys, self.store.multi_get(keys), strict=True):
            entry = self.entries.get(key)
            if entry is None or entry.text != text:
                self.entries[key] = _Entry(text, now)
            elif text != BYE and now - entry.changed > self.lost_timeout:
                if key == LAUNCHER_BEAT:
                    self.fail("lost dsft launch, which exited or is cut off")
                elif self._is_cut_off(now):
                    self.fail("has lost all other nodes: its node is cut off")
                else:
                    causes = "it was killed or stopped, or its node is down or cut off"
                    rank = int(key.removeprefix("rank "))
                    self.fail(f"gave no heartbeat for {self.lost_timeout:.0f} s: {causes}", rank=rank)
        if self.rank == 0:
            self._look_for_stall(now)

    def _is_cut_off(self, now: float) -> bool:
        """Return whether the ranks of all other nodes, at least two, are silent."""
        hosts = set()
        last_change = 0.0
        for rank, host in enumerate(self.hosts):
            entry = self.entries.get(f"rank {rank}")
            if host != self.host and entry is not None:
                hosts.add(host)
                last_change = max(last_change, entry.changed)
        return len(hosts) > 1 and now - last_change >= self.lost_timeout / 2

    def _look_for_stall(self, now: float) -> None:
        """Find the rank with least progress: all ranks wait for one that hangs, and reach their limits together."""
        states = {}
        for rank in range(self.world_size):
            entry = self.entries[f"rank {rank}"]
            if entry.text != BYE:
                states[rank] = json.loads(entry.text) | {"silent": now - entry.changed}
        if not any(state["idle"] > state["limit"] for state in states.values()):
            self.stalled_since = None
            return
        self.stalled_since = self.stalled_since or now
        if now - self.stalled_since < COLLECT_SECONDS:
            return

        def came_far(rank):
            state = states[rank]
            is_silent = state["silent"] > COLLECT_SECONDS
            return state["step"], not is_silent, state["waits"], -state["idle"]

        rank = min(states, key=came_far)
        state = states[rank]
        idle = state["idle"] + state["silent"]
        self.fail(f"made no progress for {idle:.0f} s, {state['place']}", rank=rank, shows_stacks=True)

    def _wait_for_siblings(self) -> None:
        """Pause between two passes, until another rank of this node exits."""
        for pidfd, _ in self.siblings.poll(BEAT_SECONDS * 1000):
            self.siblings.unregister(pidfd)
            rank = self.rank_of_sibling[pidfd]
            try:
                if self.store.get(f"rank {rank}") != BYE:
                    self.fail(KILLED, rank=rank)
            except RuntimeError:
                self._lose_store()

    def _lose_store(self) -> None:
        """Report that the process with the store has exited without a message: rank 0, or torchrun's agent."""
        if self.is_leaving:
            return
        is_agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        if os.environ.get("LOCAL_RANK", "0") == "0" or (self.rank == 1 and not is_agents):  # one rank per node
            text = f"rank 0 on {self.hosts[0]} {KILLED}"
            if is_agents:
                text = f"torchrun's agent at {os.environ['MASTER_ADDR']} exited or was killed"
            elif progress.run_file:
                record_failure(progress.run_file, text, replaces=True)
            self._print(f"error: {text}")
        self._exit(1)

    def fail(
        self, text: str, *, rank: int | None = None, shows_stacks: bool = False, is_later: bool = False, **details: Any
    ) -> None:
        """Report a failure, by default of this rank. The first cause counts, else a consequence (`is_later`)."""
        rank = self.rank if rank is None else rank
        # Rank 0 prints, since users watch its screen; if rank 0 failed, the rank that noticed prints.
        printed_by = self.rank if rank == 0 else 0
        host = self.hosts[rank] if self.hosts else self.host
        if shows_stacks:
            text += "; the stacks of all ranks are in their logs"
        cause = Cause(rank=rank, host=host, text=text, printed_by=printed_by, **details)
        if self.store is None:
            self._end(cause)
        self.store.compare_set(CONSEQUENCE if is_later else CAUSE, "", cause.to_json())

    def _end(self, cause: Cause) -> None:
        """Print the cause, on one rank, and exit."""
        if self.is_leaving:
            return
        if cause.lines and threading.main_thread().is_alive():
            self.is_closed.wait(LEAVE_SECONDS)  # the main thread may have found the same error
            if self.is_leaving:
                return
        if self.store is None or cause.printed_by == self.rank:
            lines = cause.named_lines() or [f"error: {cause.sentence()}"]
            for line in lines:
                self._print(line)
            if cause.traceback:
                self._print(cause.traceback.rstrip())
            if progress.log:
                self._print(f"logs of all ranks, each on its node: {progress.log.parent}")
            if progress.run_file:
                record_failure(progress.run_file, "\n".join(lines).replace("error: ", ""), replaces=True)
        self._write_log(cause)
        if self.store is not None:
            time.sleep(SPREAD_SECONDS)
        self._exit(cause.exit_code)

    def _print(self, line: str) -> None:
        with contextlib.suppress(OSError):
            os.write(self.screen, f"dsft: {line}\n".encode())

    def _write_log(self, cause: Cause) -> None:
        """Write the cause and the stacks of all threads to this rank's log."""
        if progress.log:
            with contextlib.suppress(OSError), progress.log.open("a", encoding="utf-8") as file:
                print(f"dsft: ended by: {cause.sentence()}", file=file, flush=True)
                faulthandler.dump_traceback(file)

    def _exit(self, code: int) -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # a full disk, a closed terminal
                stream.flush()
        os._exit(code)


def _moved_bytes() -> int:
    """Return the bytes that this process has read and written."""
    with contextlib.suppress(psutil.Error):
        counters = psutil.Process().io_counters()
        return counters.read_chars + counters.write_chars
    return 0


def _waits_for_others() -> bool:
    """Return whether the main thread is inside a collective."""
    newest = sys._current_frames().get(threading.main_thread().ident)
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_stack(newest)]
    return any(folder in file for file in files for folder in COLLECTIVES)


_beat: _Beat | None = None


def start(timeouts: Any) -> None:
    """Start the thread of this rank, with the limits of `config.TimeoutFields`, and report uncaught errors."""
    global _beat, progress
    if "RANK" not in os.environ or _beat is not None:
        return
    faulthandler.enable()
    progress = _Progress(timeouts)
    _beat = _Beat(timeouts.lost_timeout)
    _beat.start()
    sys.excepthook = _report_error


def connect() -> None:
    """Connect this rank's thread with those of the others, and begin the phase "loading". Collective."""
    if _beat is None:
        return
    if _beat.world_size > 1:
        import torch.distributed as dist

        address = os.environ["MASTER_ADDR"]
        port = int(os.environ["MASTER_PORT"])
        # A separate client: the process group's may wait, and blocks other threads meanwhile.
        client = dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=STORE_SECONDS))
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun's store outlives a restart
        store = dist.PrefixStore(f"dsft/beat/{restart}", client)
        store.set(f"rank {_beat.rank}", _beat.entry())
        node = [_beat.host, os.readlink("/proc/self/ns/pid"), Path("/proc/sys/kernel/random/boot_id").read_text()]
        places = [None] * _beat.world_size
        dist.all_gather_object(places, [node, os.getpid()])
        _beat.hosts = [place[0] for place, _ in places]
        for rank, (place, pid) in enumerate(places):
            if place == node and rank != _beat.rank:
                with contextlib.suppress(ProcessLookupError):
                    pidfd = os.pidfd_open(pid)
                    _beat.rank_of_sibling[pidfd] = rank
                    _beat.siblings.register(pidfd, select.POLLIN)
        _beat.store = store
    set_phase("loading")


def heartbeat(step: int | None = None) -> None:
    """Report progress; of training, after step number `step`."""
    progress.last_time = time.monotonic()
    if step is not None:
        progress.step = step


def set_phase(name: str) -> None:
    """Apply the limit of phase `name` from now on."""
    progress.last_time = time.monotonic()
    progress.phase = name


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """Apply the limit of phase `name` inside a `with`, then the earlier one again; not after an error."""
    before = progress.phase
    set_phase(name)
    yield
    set_phase(before)


def close(exit_code: int = 0, lines: list[str] | None = None) -> bool:
    """Report that this rank is about to exit with `exit_code` and these messages; return whether rank 0 prints them."""
    global _beat
    if _beat is None:
        return False
    beat = _beat
    _beat = None
    beat.is_leaving = True
    is_passed_on = beat.store is not None
    if is_passed_on:
        with contextlib.suppress(RuntimeError):
            if exit_code:
                beat.fail("exited", exit_code=exit_code, lines=lines or [])
            beat.store.set(f"rank {beat.rank}", BYE)
            if beat.rank == 0:  # its process may contain the store, in which the others must read the end first
                until = time.monotonic() + SPREAD_SECONDS
                keys = [f"rank {rank}" for rank in range(beat.world_size)]
                while set(beat.store.multi_get(keys)) != {BYE} and time.monotonic() < until:
                    time.sleep(0.02)
    beat.is_closed.set()
    beat.tell_guard(BYE)
    return is_passed_on


def _report_error(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    text = "".join(traceback.format_exception(kind, error, trace))
    beat = _beat
    if beat is None or beat.store is None:
        sys.stderr.write(text)
        return
    if progress.log:
        with contextlib.suppress(OSError), progress.log.open("a", encoding="utf-8") as file:
            file.write(text)
    last_line = text.strip().rpartition("\n")[2]
    with contextlib.suppress(RuntimeError):
        if is_consequence(last_line):
            beat.fail(f"failed: {last_line}", is_later=True)
        else:
            beat.fail(f"failed: {last_line}", traceback=text[-LONGEST_TRACEBACK:])
    beat.join(beat.lost_timeout + 2 * COLLECT_SECONDS)  # the thread exits this process
