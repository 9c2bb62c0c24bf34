"""The process beside one rank: sees it die, freeze or stall, tells the hub, and ends it when the job ends.

Started by `watch.py`; standard library only, so that 128 of them cost little. It reads its rank's messages from
standard input,
whose end means that the rank is gone, however it died.
"""

import json
import os
import selectors
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

from dsft.watchdog.coordinator import Hub
from dsft.watchdog.messages import Lines, connect
from dsft.watchdog.processes import descendants, launchers_of, start_time, state
from dsft.watchdog.root_cause import Report

TICK_SECONDS = 0.5
KILL_SECONDS = 3
"""Between SIGTERM and SIGKILL."""
LAUNCHER_SECONDS = 15
"""For a launcher to end after its ranks."""


class Sidecar:
    """Args: `options` as `watch.start` gives them."""

    def __init__(self, options: dict[str, Any]):
        self.rank, self.world_size, self.pid = options["rank"], options["world_size"], options["pid"]
        self.host, self.log = socket.gethostname(), ""
        self.speaks = options["local_rank"] == 0  # for its node, when the hub is out of reach
        self.lost_after: float = options["lost_after_seconds"]
        self.listener = socket.socket(fileno=options["listener"]) if options["listener"] is not None else None
        self.stacks_file = Path(options["stacks_file"])
        self.started = start_time(self.pid)
        self.launchers = {pid: start_time(pid) for pid in launchers_of(self.pid)}
        self.phase, self.step, self.limit, self.last_tick = (
            "starting",
            -1,
            float(options["start_seconds"]),
            time.monotonic(),
        )
        self.rank_lines = Lines(socket.socket(fileno=os.dup(0)))
        self.hub: Hub | None = None
        self.to_hub: Lines | None = None
        self.heard = self.beaten = time.monotonic()
        self.stopped_since: float | None = None
        self.reported = self.left = self.ended = False

    def run(self) -> None:
        before = time.monotonic()
        while not self.ended or (self.hub and not self.hub.is_over()):
            self._wait()
            now = time.monotonic()
            if now - before > self.lost_after / 2:  # this process itself was stopped: what came meanwhile is read first
                self.heard = self.last_tick = now
            before = now
            self._read_rank()
            self._read_hub()
            if not self.left and not self.ended:
                self._look(now)
            if self.hub:
                self.hub.step(now)
        if self.hub:
            self.hub.finish()
        self.stacks_file.unlink(missing_ok=True)
        if not self.left:
            self._see_launcher_off()

    def _wait(self) -> None:
        with selectors.DefaultSelector() as selector:
            for lines in (self.rank_lines, self.to_hub):
                if lines and not lines.closed:
                    selector.register(lines, selectors.EVENT_READ)
            if self.hub:
                self.hub.register(selector)
            selector.select(timeout=TICK_SECONDS)

    def _read_rank(self) -> None:
        if self.left:
            return
        is_gone = (
            start_time(self.pid) != self.started
        )  # asked first: its last words are read below. Its children may hold the connection open.
        for message in self.rank_lines.read():
            self.last_tick = time.monotonic()
            if "phase" in message:
                self.phase, self.limit = message["phase"], message["limit"]
            if "step" in message:
                self.step = message["step"]
            if "log" in message:
                self.log = message["log"]
                if self.hub:
                    self.hub.folder = str(Path(self.log).parent)
            if "hub" in message:
                self._join(*message["hub"])
            if "failed" in message:
                self._report(message["failed"], message["text"])
            if "leaves" in message:
                self._leave(message)
        if not (self.left or self.ended) and (self.rank_lines.closed or is_gone):
            self._report(
                "died",
                "was killed from outside (out of memory, kill -9 or its launcher) or crashed in native code, in phase"
                f" {self._where()}",
            )

    def _join(self, address: str, port: int, token: str) -> None:
        if self.listener is not None:
            self.hub = Hub(self.listener, token, self.world_size, self.lost_after, speak=say)
        self.to_hub = connect(address, port, seconds=min(20.0, self.lost_after))
        if self.to_hub is None:
            say(
                f"note: rank {self.rank} on {self.host} cannot reach {address}:{port}, where faults are reported; a"
                " fault of another node ends this one only by time-outs"
            )
            return
        self.heard = time.monotonic()
        self.to_hub.send(hello=self.rank, host=self.host, token=token)

    def _read_hub(self) -> None:
        if self.to_hub is None or self.left:
            return
        for message in self.to_hub.read():
            self.heard = time.monotonic()
            if "dump" in message:
                self.to_hub.send(
                    stacks=self._stacks(),
                    stopped=self.stopped_since is not None,
                    phase=self._where(),
                    since=time.monotonic() - self.last_tick,
                )
            if "signal" in message:
                self._signal_rank(message["signal"])
            if "end" in message:
                self._end_rank()

    def _look(self, now: float) -> None:
        """What no message tells."""
        is_stopped = state(self.pid) == "T"
        self.stopped_since = (self.stopped_since or now) if is_stopped else None
        if self.stopped_since and now - self.stopped_since > self.lost_after:
            self._report("stopped", f"is stopped (SIGSTOP) for {self.lost_after:.0f} s, in phase {self._where()}")
        gone = [pid for pid, started in self.launchers.items() if start_time(pid) != started]
        if gone:
            self._report("launcher", f"lost its launcher: process {gone[0]} is gone")
        if now - self.last_tick > self.limit and not is_stopped:
            self._report("stalled", f"made no progress for {self.limit:.0f} s, in phase {self._where()}")
        if self.to_hub is None:
            return
        if now - self.beaten > min(2.0, self.lost_after / 4):
            self.beaten = now
            self.to_hub.send(beat=self.step)
        if self.to_hub.closed or now - self.heard > self.lost_after:
            if self.speaks and not self.reported:
                say(
                    f"error: {self.host} has lost rank 0's node (its machine, its link or its guard is gone); the ranks"
                    " here are ended"
                )
            self._end_rank()

    def _report(self, kind: str, text: str) -> None:
        if self.reported:
            return
        self.reported = True
        if self.to_hub and not self.to_hub.closed:
            self.to_hub.send(failed=kind, text=text, log=self.log)
            self.heard = time.monotonic()  # the hub collects for some seconds, then says: end
            return
        if kind != "died" or self.speaks:  # before the ranks have met, a launcher kills those that did nothing wrong
            report = Report(self.rank, self.host, kind, text)
            say(
                f"error: {report.sentence()}"
                + (f"\n{text.rstrip()}" if kind == "error" and not report.is_consequence else "")
            )
        self._end_rank()

    def _leave(self, message: dict[str, Any]) -> None:
        self.left = self.ended = True
        if self.to_hub:
            self.to_hub.send(**message)
            self.to_hub.close()

    def _end_rank(self) -> None:
        """End the rank and all that it started: politely, then not."""
        if self.ended:
            return
        self.ended = True
        family = {pid: start_time(pid) for pid in [*descendants(self.pid), self.pid] if pid != os.getpid()}
        for number, seconds in ((signal.SIGTERM, KILL_SECONDS), (signal.SIGKILL, 1)):
            for pid, started in family.items():
                if started is not None and start_time(pid) == started:
                    send_signal(pid, number)
            until = time.monotonic() + seconds
            while time.monotonic() < until and any(
                started is not None and start_time(pid) == started for pid, started in family.items()
            ):
                if self.hub:
                    self.hub.step(time.monotonic())
                time.sleep(0.1)
        if self.to_hub:
            self.to_hub.close()

    def _see_launcher_off(self) -> None:
        """End the nearest launcher where it stays behind its ranks: torchrun's waits for minutes for nodes that are cut
        off.
        """
        if not self.launchers or os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
            return  # it may be starting the ranks anew
        pid, started = next(iter(self.launchers.items()))
        for number, seconds in ((None, LAUNCHER_SECONDS), (signal.SIGTERM, KILL_SECONDS), (signal.SIGKILL, 0)):
            if number and start_time(pid) == started:
                send_signal(pid, number)
            until = time.monotonic() + seconds
            while time.monotonic() < until and start_time(pid) == started:
                time.sleep(0.2)

    def _signal_rank(self, number: int) -> None:
        if not self.rank_lines.closed:
            send_signal(self.pid, number)

    def _stacks(self) -> str:
        """Of all threads of the rank, written by its faulthandler also while it is inside a library's call; nothing of
        a stopped one.
        """
        self.stacks_file.write_bytes(b"")
        if not self.rank_lines.closed:
            send_signal(self.pid, signal.SIGUSR2)
        until = time.monotonic() + 2
        while time.monotonic() < until and self.stacks_file.stat().st_size == 0 and state(self.pid) != "T":
            time.sleep(0.05)
        time.sleep(0.2)
        return self.stacks_file.read_text(errors="replace")[-20_000:]

    def _where(self) -> str:
        return f"{self.phase}, step {self.step}" if self.step >= 0 else self.phase


def send_signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def say(line: str) -> None:
    """To the screen as the launcher shows it; a launcher that is gone is no reason to fail."""
    try:
        os.write(2, f"dsft: {line}\n".encode(errors="replace"))
    except OSError:
        pass


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)  # it ends when its rank has
    Sidecar(json.loads(sys.argv[1])).run()
