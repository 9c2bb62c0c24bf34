"""Where all sidecars report, in the sidecar of rank 0: decides what failed first, says it once, and ends every rank."""

import math
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import Any

from dsft.watchdog.deadlines import (
    COLLECT_SECONDS,
    COLLECT_STACKS_SECONDS,
    END_SECONDS,
    LEAVE_SECONDS,
    RANK_0_FIRST_SECONDS,
    heartbeat_seconds,
)
from dsft.watchdog.messages import Connection, Server
from dsft.watchdog.root_cause import Failure, Report, first_cause

SHOWN_FRAMES = 5
"""Of a rank's main thread, on the screen."""


class JobState(Enum):
    """What the job does. A state other than RUNNING has a deadline, and leads to ENDING."""

    RUNNING = auto()
    COLLECTING = auto()
    """A rank has failed: other reports may name the cause."""
    LEAVING = auto()
    """A rank has ended by itself with an error, which it printed: the others do the same, or wait for it in vain."""
    ENDING = auto()
    """All ranks are being ended."""


@dataclass
class Member:
    """A sidecar, its connection and what it said of its rank."""

    connection: Connection
    rank: int
    host: str
    last_heard: float
    log: str = ""
    is_gone: bool = False
    """It left in order, or was reported as lost."""
    stacks: dict[str, Any] | None = None


@dataclass(frozen=True)
class ErrorLine:
    """A message with which a rank other than 0 has ended."""

    member: Member
    text: str
    due: float
    """When to print it, unless rank 0 has ended with the same message."""


class Coordinator:
    """Args: `server` for sidecars that know its token, `say` what prints a line on the screen, `launcher` rank 0's
    connection to `dsft launch`.
    """

    def __init__(
        self,
        server: Server,
        world_size: int,
        lost_timeout: float,
        *,
        say: Callable[[str], None],
        launcher: Connection | None = None,
    ):
        self.server, self.world_size, self.lost_timeout, self.say = server, world_size, lost_timeout, say
        self.state, self.deadline = JobState.RUNNING, math.inf
        self.members: list[Member] = []
        self.reports: list[Report] = []
        self.exit_codes: list[int] = []
        self.printed: set[str] = set()
        self.unprinted: list[ErrorLine] = []
        self.last_sent = 0.0
        self.launcher = launcher
        if launcher:
            launcher.send("met")

    def sources(self) -> list[Connection | Server | None]:
        """Everything that a message may come from."""
        return [self.server, self.launcher, *(member.connection for member in self.members)]

    def is_over(self) -> bool:
        """Whether nobody needs the coordinator any more."""
        return self._all_left() or (
            self.state is JobState.ENDING
            and (time.monotonic() > self.deadline or all(member.connection.closed for member in self.members))
        )

    def finish(self) -> None:
        """Print what is still unprinted, and tell `dsft launch` the exit code, where the ranks themselves had one."""
        self._print_errors_of_others(time.monotonic())
        if self.launcher and (self._all_left() or any(self.exit_codes)):
            self.launcher.send("done", exit_code=max(self.exit_codes))

    def step(self, now: float) -> None:
        """Read what has come and do what is due; never waits."""
        for connection, hello in self.server.accept():
            self.members.append(Member(connection, hello["rank"], hello["host"], last_heard=now))
        for member in self.members:
            if not member.is_gone:
                self._read(member, now)
        self._print_errors_of_others(now)
        self._read_launcher(now)
        if now >= self.deadline and self.state is JobState.COLLECTING:
            self._end_ranks(self._announce_cause(), now)
        elif now >= self.deadline and self.state is JobState.LEAVING:
            self._end_ranks("a rank ended", now)
        if now - self.last_sent > heartbeat_seconds(self.lost_timeout):
            self.last_sent = now
            self._tell_all("heartbeat")

    def _read(self, member: Member, now: float) -> None:
        for message in member.connection.read():
            member.last_heard = now
            match message:
                case {"type": "failed", "failure": failure, "text": text, "log": log}:
                    member.log = log
                    self._failed(Report(member.rank, member.host, Failure(failure), text), now)
                case {"type": "stacks", "log": log}:
                    member.stacks, member.log = message, log
                case {"type": "close", "exit_code": exit_code, "lines": lines}:
                    member.is_gone = True
                    member.connection.close()
                    self._left(member, exit_code, lines, now)
        if member.is_gone or self.state is JobState.ENDING:
            return
        if member.connection.closed:
            text = "is gone with its watchdog: the node went down, or something there kills all processes"
        elif now - member.last_heard > self.lost_timeout:
            causes = f"the node is down, frozen or cut off from {socket.gethostname()}"
            text = f"gave no sign of life for {self.lost_timeout:.0f} s: {causes}"
        else:
            return
        member.is_gone = True
        member.connection.close()
        self._failed(Report(member.rank, member.host, Failure.LOST, text), now)

    def _left(self, member: Member, exit_code: int, lines: list[str], now: float) -> None:
        self.exit_codes.append(exit_code)
        if exit_code and self.state is JobState.RUNNING:
            self.state, self.deadline = JobState.LEAVING, now + LEAVE_SECONDS
        if member.rank == 0:
            self.printed |= set(lines)
        else:
            self.unprinted += [ErrorLine(member, line, due=now + RANK_0_FIRST_SECONDS) for line in lines]

    def _print_errors_of_others(self, now: float) -> None:
        """Print what other ranks ended with and rank 0 has not printed itself: the fault is theirs alone."""
        due = [line for line in self.unprinted if now > line.due or self._all_left()]
        self.unprinted = [line for line in self.unprinted if line not in due]
        for line in due:
            if line.text not in self.printed:
                self.printed.add(line.text)
                self.say(f"error: rank {line.member.rank} on {line.member.host}: {line.text}")

    def _all_left(self) -> bool:
        return len(self.exit_codes) == self.world_size

    def _failed(self, report: Report, now: float) -> None:
        if any(self.exit_codes):
            return  # the consequence of an end that has been explained
        self.reports.append(report)
        if self.state is JobState.RUNNING:
            is_stall = report.failure is Failure.STALLED
            self.state = JobState.COLLECTING
            self.deadline = now + (COLLECT_STACKS_SECONDS if is_stall else COLLECT_SECONDS)
            if is_stall:
                self._tell_all("write stacks")

    def _announce_cause(self) -> str:
        """Print what failed first, with its traceback or all stacks; returns the sentence."""
        frozen = [member for member in self.members if member.stacks and member.stacks["is_stopped"]]
        cause = first_cause(self.reports)
        if cause.is_consequence and frozen:
            text = f"is stopped (SIGSTOP), in phase {frozen[0].stacks['phase']}"
            cause = Report(frozen[0].rank, frozen[0].host, Failure.STOPPED, text)
        self.say(f"error: {cause.sentence()}")
        if cause.failure is Failure.ERROR:
            self.say(f"what it said:\n{cause.text.rstrip()}")
        self._print_stacks()
        others = {report.rank for report in self.reports} - {cause.rank}
        log = next((member.log for member in self.members if member.rank == cause.rank), "")
        self.say(
            f"all {self.world_size} ranks are being ended"
            + (f"; {len(others)} more failed after it" if others else "")
            + (f"; its log: {log} on {cause.host}" if log else "")
        )
        if self.launcher:
            self.launcher.send("failed", cause=cause.sentence())
        return cause.sentence()

    def _print_stacks(self) -> None:
        """Print the last frames of each rank's main thread, and write everything to a file beside rank 0's log."""
        texts = []
        for member in sorted(self.members, key=lambda member: member.rank):
            if not (stacks := member.stacks):
                continue
            idle = f"no progress for {stacks['idle_seconds']:.0f} s"
            title = f"rank {member.rank} on {member.host}, {stacks['phase']}, {idle}"
            texts.append(f"{title}\n{stacks['text']}")
            main_thread = stacks["text"].rpartition("Current thread")[2]
            frames = [line for line in main_thread.splitlines() if line.startswith("  File")][:SHOWN_FRAMES]
            reason = "stopped" if stacks["is_stopped"] else "it does not answer"
            self.say("\n".join([title, *(frames or [f"  (no stack: {reason})"])]))
        log = next((member.log for member in self.members if member.rank == 0), "")
        if texts and log and Path(log).parent.is_dir():
            path = Path(log).parent / "stacks.txt"
            path.write_text("\n\n".join(texts))
            self.say(f"all stacks: {path}")

    def _read_launcher(self, now: float) -> None:
        """Do what `dsft launch` asks; where it is gone nobody waits for this job."""
        if self.launcher is None or self.state is JobState.ENDING:
            return
        reason = None
        for message in self.launcher.read():
            match message:
                case {"type": "signal", "number": number}:
                    self._tell_all("signal", number=number)
                case {"type": "end"}:
                    reason = "dsft launch ends them"
        if self.launcher.closed and not reason:
            reason = "dsft launch is gone"
            self.say(f"{reason}: all {self.world_size} ranks are being ended")
        if reason:
            self._end_ranks(reason, now)

    def _end_ranks(self, reason: str, now: float) -> None:
        self._tell_all("end", reason=reason)
        self.state, self.deadline = JobState.ENDING, now + END_SECONDS

    def _tell_all(self, kind: str, **fields: Any) -> None:
        for member in self.members:
            if not member.connection.closed:
                member.connection.send(kind, **fields)
