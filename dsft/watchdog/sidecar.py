"""The process beside one rank: sees it die, freeze or stall, reports that, and terminates it when the job ends.

Started by `client.py`; standard library and psutil only, so that 128 of them cost little. It reads its rank's messages
from standard input, whose end means that the rank is gone, however it died.
"""

import contextlib
import json
import os
import signal
import socket
import sys
import time
from enum import Enum, auto
from pathlib import Path
from typing import Any

from dsft.watchdog.coordinator import Coordinator
from dsft.watchdog.messages import (
    CONNECT_SECONDS,
    POLL_SECONDS,
    VARIABLE,
    Connection,
    Failure,
    Poller,
    Report,
    Server,
    connect,
    connect_to_launcher,
    heartbeat_seconds,
    raise_file_limit,
    say,
)
from dsft.watchdog.processes import Process, descendants, end, is_dsft, program_at

IMPORT_SECONDS = 60.0  # for a rank to import its libraries, from a slow disk, before it tries to meet the others
EXIT_SECONDS = 60.0  # for a rank to exit after it has said that it ends in order; it is believed so far
STACKS_SECONDS = 2.0  # for a rank to write its stacks
TERMINATE_SECONDS = 3.0  # between SIGTERM and SIGKILL
KILL_SECONDS = 1.0  # for a process to be gone after SIGKILL
LAUNCHER_SECONDS = 15.0  # for a launcher to end after its ranks

MOVES_FILES = ("loading", "saving")  # phases in which reading or writing files is progress, in one call without beats
PROGRESS_BYTES = 2**20  # read or written at least, to be progress: what a waiting rank says to others is less
LONGEST_STACKS = 20_000  # characters, from their end
LARGEST_STACKS_BYTES = 1 << 20
LAUNCHER_GONE = f"was started by a dsft launch that is gone; if it is an old one's, unset {VARIABLE} (.deepspeed_env)"


class RankState(Enum):
    """What the sidecar knows of its rank. It watches a rank that has not LEFT or ENDED."""

    RUNNING = auto()
    REPORTED = auto()  # it has failed; the coordinator will say when it ends
    LEAVING = auto()  # it said that it ends in order; that is believed when it has exited
    LEFT = auto()  # it has ended by itself, or said that it does with an error
    ENDED = auto()  # it has been ended from here


class Sidecar:
    def __init__(self, options: dict[str, Any]):  # as `client.start` gives them
        self.rank, self.world_size = options["rank"], options["world_size"]
        self.is_first_of_node = options["local_rank"] == 0
        self.lost_timeout: float = options["lost_timeout"]
        self.listener = None if options["listener"] is None else socket.socket(fileno=options["listener"])
        self.stacks: int = options["stacks"]  # descriptor of the file in memory to which the rank writes its stacks
        self.host, self.log = socket.gethostname(), ""
        self.process = Process.of(options["pid"])
        self.exit_code: int | None = None  # of the rank, once it is seen
        started_by = options["started_by"]
        self.launchers = [Process(**launcher) for launcher in started_by["launchers"]]
        self.ssh_session = Process(**started_by["ssh_session"]) if started_by["ssh_session"] else None
        self.launchers_over_ssh = [Process(**launcher) for launcher in started_by["launchers_over_ssh"]]
        self.state = RankState.RUNNING
        self.phase, self.step = "starting", -1
        # The process group gives up after one, with a retry, and says more.
        self.limit = 2.0 * options["start_timeout"] + IMPORT_SECONDS
        self.poller = Poller()
        self.from_rank = Connection(socket.socket(fileno=os.dup(0)))
        self.poller.add(self.from_rank)
        self.exit_notice: int | None = None
        with contextlib.suppress(OSError):  # an old kernel; or the rank is gone
            # Readable at once where the rank exits: a launcher takes its remains, with the exit code, soon after.
            self.exit_notice = os.pidfd_open(self.process.pid)
            self.poller.add(self.exit_notice)
        self.to_coordinator: Connection | None = None
        self.meeting: dict[str, Any] = {}  # where the coordinator is, as `client.connect` gives it
        self.meet_by = 0.0
        self.has_met = False  # until the coordinator says anything the connection is tried again
        self.coordinator: Coordinator | None = None  # in rank 0's
        self.leave_message: dict[str, Any] = {}
        self.leave_by = 0.0
        self.to_launcher: Connection | None = None  # to `dsft launch`, from the first rank of each node
        self.last_progress = self.last_sent = time.monotonic()
        self.moved_bytes = 0  # of the rank's files, when they last showed progress
        self.stopped_since: float | None = None

    def run(self) -> None:
        """Watch until the rank has ended and, where it is here, nobody needs the coordinator."""
        if self.is_first_of_node:
            try:
                self.to_launcher = connect_to_launcher(self.rank, self.host)
            except ConnectionRefusedError:
                self._report(Failure.LAUNCHER_GONE, LAUNCHER_GONE)
            else:
                if self.to_launcher:
                    self.poller.add(self.to_launcher)
                elif VARIABLE in os.environ:
                    say(f"note: {self.host} cannot reach dsft launch, whose end would not end the ranks here")
        last_pass = last_look = time.monotonic()
        while self._is_watching() or (self.coordinator and not self.coordinator.is_over()):
            ready = self.poller.ready(POLL_SECONDS)
            now = time.monotonic()
            if now - last_pass > self.lost_timeout / 2:  # it was stopped, perhaps with all others (a paused job)
                self.last_progress, self.stopped_since = now, None
                self.poller.count_silence_from(now)
            last_pass, looks = now, now - last_look > 0.9 * POLL_SECONDS
            if looks:
                last_look = now
            has_exited = self.exit_notice in ready
            if has_exited:
                self.poller.remove(self.exit_notice)
            if self._is_watching() and (looks or has_exited or self.from_rank in ready):
                self._read_rank()
            if self._is_watching():
                self._read_orders()
            if self._is_watching() and looks:
                self._inspect_rank(now)
            if self._is_watching() and looks and self.to_coordinator:
                if now - self.last_sent > heartbeat_seconds(self.lost_timeout):
                    self.last_sent = now
                    self.to_coordinator.send("heartbeat")
                if self.to_coordinator.closed and not self.has_met and now < self.meet_by:
                    self._meet()
                elif self.to_coordinator.closed or now - self.to_coordinator.last_heard > self.lost_timeout:
                    if self.is_first_of_node and self.state is RankState.RUNNING:
                        say(
                            f"error: {self.host} has lost rank 0's node (its machine, its link or its watchdog is"
                            " gone); the ranks here are terminated"
                        )
                    self._end_rank()
            self._step()
        if self.coordinator:
            self.coordinator.finish()
        # The nearest launcher may stay behind its ranks: torchrun's waits for minutes for nodes that are cut off. pdsh,
        # which waits for every ssh, is left with none, and returns their exit code. One that restarts may be starting
        # the ranks again.
        if self.state is not RankState.LEFT and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") == "0":
            steps = ((0, LAUNCHER_SECONDS), (signal.SIGTERM, TERMINATE_SECONDS), (signal.SIGKILL, 0))
            # `dsft` itself exits by what the ranks report, or starts them again.
            end([launcher for launcher in self.launchers[:1] if not is_dsft(launcher.pid)], steps)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # a session lasts while a process there holds its pipes
            over_ssh = [pid for launcher in self.launchers_over_ssh[:1] for pid in descendants(launcher.pid)]
            end([Process.of(pid) for pid in over_ssh if program_at(pid) == "ssh"], steps)

    def _is_watching(self) -> bool:
        return self.state not in (RankState.LEFT, RankState.ENDED)

    def _step(self) -> None:
        if self.coordinator:
            self.coordinator.step(time.monotonic())

    def _read_rank(self) -> None:
        is_gone = not self.process.is_alive()  # asked before its last words are read; children may keep the socket open
        if is_gone and self.exit_code is None:
            self.exit_code = self.process.exit_code(self.exit_notice)
        for message in self.from_rank.read():
            self.last_progress = time.monotonic()
            match message:
                case {"type": "phase", "name": name, "limit": limit}:
                    self.phase, self.limit = name, limit
                case {"type": "heartbeat", "step": int(step)}:
                    self.step = step
                case {"type": "log", "path": path}:
                    self.log = path
                case {"type": "run", "path": path} if self.coordinator:
                    self.coordinator.run_file = Path(path)
                case {"type": "connect"}:
                    self._connect(message)
                case {"type": "failed", "failure": failure, "text": text}:
                    self._report(Failure(failure), text)
                case {"type": "close", "exit_code": exit_code}:
                    self.leave_message = message
                    self.state, self.leave_by = RankState.LEAVING, time.monotonic() + EXIT_SECONDS * (exit_code == 0)
        if self.state is RankState.LEAVING and self.exit_code and self.leave_message["exit_code"] == 0:
            self.state = RankState.RUNNING
            how = f"was killed by signal {-self.exit_code}" if self.exit_code < 0 else f"exited with {self.exit_code}"
            self._report(Failure.DIED, f"{how} after its work was done, before it had ended in order")
        if self.state is RankState.LEAVING and (is_gone or time.monotonic() >= self.leave_by):
            self.state, code = RankState.LEFT, self.leave_message["exit_code"]
            self.from_rank.close()
            if self.to_coordinator:
                self.to_coordinator.send("close", exit_code=code, lines=self.leave_message["lines"])
                self.to_coordinator.close()
            elif self.to_launcher and code:
                self.to_launcher.send("done", exit_code=code)
        elif self.state is RankState.RUNNING and (self.from_rank.closed or is_gone):
            causes = "out of memory, kill -9 or its launcher"
            text = f"was killed from outside ({causes}) or crashed in native code, in phase {self._where()}"
            self._report(Failure.DIED, text)

    def _connect(self, message: dict[str, Any]) -> None:
        self.meeting, self.meet_by = message, time.monotonic() + CONNECT_SECONDS
        if self.listener is not None:
            if self.to_launcher and not self.to_launcher.closed:
                self.poller.remove(self.to_launcher)
            server = Server(self.listener, message["token"])
            self.coordinator = Coordinator(
                server, self.world_size, self.lost_timeout, say=say, launcher=self.to_launcher
            )
            self.poller.add(self.coordinator.poller)
            self.to_launcher = None
            # Not through its own port: where more ranks than fit wait there, it would wait for itself to accept them.
            here, there = socket.socketpair()
            self.to_coordinator = Connection(here)
            self.poller.add(self.to_coordinator)
            self.coordinator.join(Connection(there), self.rank, self.host)
        else:
            self._meet()

    def _meet(self) -> None:
        """Report to the coordinator from now on."""
        address, seconds = (self.meeting["address"], self.meeting["port"]), min(CONNECT_SECONDS, self.lost_timeout)
        try:
            self.to_coordinator = connect(address, self.meeting["token"], seconds=seconds)
        except OSError:
            self.to_coordinator = None
            if self.is_first_of_node:
                say(
                    f"note: {self.host} cannot reach {address[0]}:{address[1]}, where faults are reported; a fault of"
                    " another node ends the ranks here only by time-outs"
                )
            return
        self.poller.add(self.to_coordinator)
        self.to_coordinator.send("hello", rank=self.rank, host=self.host)

    def _read_orders(self) -> None:
        for message in self.to_coordinator.read() if self.to_coordinator else ():
            self.has_met = True
            match message:
                case {"type": "write stacks"}:
                    self._send_stacks()
                case {"type": "signal", "number": number}:
                    self.process.signal(number)
                case {"type": "end"}:
                    self._end_rank()
                    return
        if self.to_launcher is None:
            return
        for message in self.to_launcher.read():
            match message:
                case {"type": "signal", "number": number}:
                    self.process.signal(number)
                case {"type": "end"} if self.to_coordinator is None:
                    self._end_rank()  # dsft launch has said why
                    return
                case {"type": "end"}:  # of this node alone, where each has a dsft launch of its own
                    self._report(Failure.LAUNCHER_GONE, "was ended by the dsft launch of its node")
        # Before the ranks meet, nobody waits for them where it is gone.
        if self.to_launcher.closed and self.to_coordinator is None:
            self._report(Failure.LAUNCHER_GONE, LAUNCHER_GONE)

    def _inspect_rank(self, now: float) -> None:
        if self.state is RankState.LEAVING:
            return
        is_stopped = self.process.is_stopped()
        self.stopped_since = (self.stopped_since or now) if is_stopped else None
        if self.stopped_since and now - self.stopped_since > self.lost_timeout:
            stopped = f"is stopped (SIGSTOP) for {self.lost_timeout:.0f} s, in phase {self._where()}"
            self._report(Failure.STOPPED, stopped)
        for launcher in (*self.launchers, *self.launchers_over_ssh):
            if not launcher.is_alive():
                self._report(Failure.LAUNCHER_GONE, f"lost its launcher: process {launcher.pid} is gone")
        if self.ssh_session and self.to_coordinator is None and not self.ssh_session.is_alive():
            self._report(Failure.LAUNCHER_GONE, "lost the ssh session that started it, before the rendezvous")
        if self.phase in MOVES_FILES and (moved := self.process.moved_bytes()) >= self.moved_bytes + PROGRESS_BYTES:
            self.last_progress, self.moved_bytes = now, moved
        if now - self.last_progress > self.limit and not is_stopped:
            self._report(Failure.STALLED, f"made no progress for {self.limit:.0f} s, in phase {self._where()}")

    def _report(self, failure: Failure, text: str) -> None:
        """Report the rank's first failure to the coordinator; without one, print it here and terminate the rank."""
        if self.state is not RankState.RUNNING:
            return
        self.state = RankState.REPORTED
        if self.to_coordinator and not self.to_coordinator.closed:
            self.to_coordinator.send("failed", failure=failure, text=text, log=self.log)
            return  # the coordinator collects for some seconds, then says: end
        # Before the rendezvous, a launcher kills those that did nothing wrong.
        if failure is not Failure.DIED or self.is_first_of_node:
            report = Report(self.rank, self.host, failure, text)
            has_traceback = failure is Failure.ERROR and not report.is_consequence
            say(f"error: {report.sentence()}" + (f"\n{text.rstrip()}" if has_traceback else ""))
            if self.to_launcher:
                self.to_launcher.send("failed", cause=report.sentence())
        self._end_rank()

    def _end_rank(self) -> None:
        self.state = RankState.ENDED
        pids = [pid for pid in descendants(self.process.pid) if pid != os.getpid()]
        steps = ((signal.SIGTERM, TERMINATE_SECONDS), (signal.SIGKILL, KILL_SECONDS))
        end([*map(Process.of, pids), self.process], steps, meanwhile=self._step)
        self.from_rank.close()
        if self.to_coordinator:
            self.to_coordinator.close()

    def _send_stacks(self) -> None:
        # The rank's faulthandler writes them also while it is inside a library's call; not while it is stopped.
        os.ftruncate(self.stacks, 0)
        os.lseek(self.stacks, 0, os.SEEK_SET)  # the rank's place in it too
        self.process.signal(signal.SIGUSR2)
        deadline, text = time.monotonic() + STACKS_SECONDS, ""
        while time.monotonic() < deadline and not self.process.is_stopped():
            time.sleep(POLL_SECONDS / 5)
            self._step()
            before, text = text, os.pread(self.stacks, LARGEST_STACKS_BYTES, 0).decode(errors="replace")
            if text and text == before:
                break  # it has been written to its end
        self.to_coordinator.send(
            "stacks",
            text=text[-LONGEST_STACKS:],
            is_stopped=self.stopped_since is not None,
            phase=self._where(),
            idle_seconds=time.monotonic() - self.last_progress,
            log=self.log,
        )

    def _where(self) -> str:
        return f"{self.phase}, step {self.step}" if self.step >= 0 else self.phase


def main() -> None:
    """Run as a process of its own, with the options as JSON on the command line."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)  # it ends when its rank has
    raise_file_limit()
    Sidecar(json.loads(sys.argv[1])).run()
