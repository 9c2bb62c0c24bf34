"""Where all sidecars report: the coordinator, in the sidecar of rank 0. It decides what failed first, says it once, and
ends every rank. Its work is done for those sidecars alone that have sent something.
"""

import contextlib
import json
import math
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import Any

from dsft.units import write_json
from dsft.watchdog.messages import (
    CONNECT_SECONDS,
    Connection,
    Failure,
    Poller,
    Report,
    Server,
    heartbeat_seconds,
)

SHOWN_FRAMES = 5  # of a rank's main thread, on the screen

# They follow each other when a rank fails: its sidecar reports it, the coordinator collects what else fails, says what
# came first, and has all ranks ended (sidecar.py).
SILENCE_SECONDS = 1.0  # how often the silence of all sidecars is looked at
RANK_0_FIRST_SECONDS = 1.5  # for rank 0 to end with the same message as another rank, which it prints itself
LEAVE_SECONDS = 8.0  # from the first rank that ends with a message of its own to the end of those that did not
COLLECT_SECONDS = 2.0  # after the first report: its causes and consequences reach the coordinator within this time
COLLECT_STACKS_SECONDS = 6.0  # the same where stacks are asked for
END_SECONDS = 15.0  # for sidecars to end their ranks and hang up, before the coordinator stops waiting


class JobState(Enum):
    """What the job does. A state other than RUNNING has a deadline, and leads to ENDING."""

    RUNNING = auto()
    COLLECTING = auto()  # a rank has failed: other reports may name the cause
    LEAVING = auto()  # a rank ended with an error that it printed: the others do the same, or wait for it in vain
    ENDING = auto()  # all ranks are being terminated


def first_cause(reports: list[Report]) -> Report:
    """Return the earliest report that no other explains; `reports` come in the order of arrival."""
    return next((report for report in reports if not report.is_consequence), reports[0])


@dataclass(eq=False)
class Member:  # a rank, and what its sidecar said of it
    rank: int
    host: str
    log: str = ""
    is_gone: bool = False  # it left in order, or was reported as lost
    stacks: dict[str, Any] | None = None


@dataclass(eq=False)
class Coordinator:
    """Decides for all ranks; in the sidecar of rank 0."""

    server: Server  # for sidecars that know its token
    world_size: int
    lost_timeout: float
    say: Callable[[str], None]  # prints a line on the screen
    launcher: Connection | None = None  # rank 0's connection to `dsft launch`

    def __post_init__(self):
        self.state, self.deadline = JobState.RUNNING, math.inf
        self.sidecars: dict[Connection, Member] = {}
        self.members: dict[int, Member] = {}  # the same by rank
        self.reports: list[Report] = []
        self.exit_codes: list[int] = []
        self.printed: set[str] = set()
        self.unprinted: list[tuple[Member, str, float]] = []
        """A rank other than 0, its last message, and when to print that, unless rank 0 has ended with the same."""
        self.run_file: Path | None = None  # run.json, on the disk of this node, once the run has begun it
        self.first_error = ""  # of a rank that has ended with a message of its own
        self.started, self.last_sent, self.last_look = time.monotonic(), 0.0, 0.0
        self.poller = Poller()  # readable where any message has come
        self.poller.add(self.server.poller)
        if self.launcher:
            self.launcher.send("met")
            self.poller.add(self.launcher)

    def is_over(self) -> bool:
        now = time.monotonic()
        if self.state is JobState.ENDING:
            return now > self.deadline or all(connection.closed for connection in self.sidecars)
        # One that has not come by then could not reach this node.
        all_have_come = len(self.members) == self.world_size or now > self.started + 2 * CONNECT_SECONDS
        all_are_gone = bool(self.members) and all(member.is_gone for member in self.members.values())
        is_explained = self.state is not JobState.COLLECTING  # else the cause is still to be printed
        return self._all_left() or (all_have_come and all_are_gone and is_explained)

    def finish(self) -> None:
        """Print what is unprinted, and tell `dsft launch` the exit code, where the ranks themselves had one."""
        self._print_errors_of_others(time.monotonic())
        if self.run_file and any(self.exit_codes):
            record_failure(self.run_file, self.first_error)  # where rank 0 could not
        if self.launcher and (self._all_left() or any(self.exit_codes)):
            self.launcher.send("done", exit_code=max(self.exit_codes))

    def _all_left(self) -> bool:
        return len(self.exit_codes) == self.world_size

    def step(self, now: float) -> None:
        """Read what has come and do what is due; never waits."""
        for connection, hello in self.server.accept():
            rank = hello.get("rank")
            if rank in self.members:  # the place of a rank is taken once
                connection.close()
                continue
            self.join(connection, rank, str(hello.get("host")))
            self._read(connection, now)
        for source in self.poller.ready():
            if source in self.sidecars:
                self._read(source, now)
        if self.state is not JobState.ENDING and now - self.last_look > SILENCE_SECONDS:
            self.last_look = now
            for connection, member in self.sidecars.items():
                if not connection.closed and now - connection.last_heard > self.lost_timeout:
                    connection.close()
                    causes = f"the node is down, frozen or cut off from {socket.gethostname()}"
                    self._lose(member, f"gave no heartbeat for {self.lost_timeout:.0f} s: {causes}", now)
        self._print_errors_of_others(now)
        if self.launcher and self.state is not JobState.ENDING:
            reason = None
            for message in self.launcher.read():
                match message:
                    case {"type": "signal", "number": number}:
                        self._tell_all("signal", number=number)
                    case {"type": "end"}:
                        reason = "ended by dsft launch"
            if self.launcher.closed and not reason:  # then nobody waits for this job
                reason = "dsft launch is gone"
                self.say(f"{reason}: terminating all {self.world_size} ranks")
            if reason:
                if self.run_file:
                    record_failure(self.run_file, self.first_error or reason)
                self._end_ranks(now)
        if now >= self.deadline and self.state is not JobState.ENDING:
            # A rank that printed why it ended explains connections that broke, also those that were reported sooner.
            is_explained = self.first_error and all(report.is_consequence for report in self.reports)
            if self.state is JobState.COLLECTING and not is_explained:
                self._announce_cause()
            self._end_ranks(now)
        if now - self.last_sent > heartbeat_seconds(self.lost_timeout):
            self.last_sent = now
            self._tell_all("heartbeat")

    def join(self, connection: Connection, rank: int, host: str) -> None:
        """Take the sidecar of a rank."""
        self.members[rank] = self.sidecars[connection] = Member(rank, host)
        self.poller.add(connection)
        connection.send("end" if self.state is JobState.ENDING else "heartbeat")  # it has come to the right place

    def _read(self, connection: Connection, now: float) -> None:
        member = self.sidecars[connection]
        try:
            for message in connection.read():
                if member.is_gone:
                    continue
                match message:
                    case {"type": "failed", "failure": failure, "text": text, "log": log}:
                        member.log = log
                        self._failed(Report(member.rank, member.host, Failure(failure), text), now)
                    case {"type": "stacks", "log": log}:
                        member.stacks, member.log = message, log
                    case {"type": "close", "exit_code": int(exit_code), "lines": list(lines)}:
                        member.is_gone = True
                        self.exit_codes.append(exit_code)
                        if exit_code and lines and not self.first_error:
                            self.first_error = f"rank {member.rank} on {member.host}: {lines[0]}"
                        if exit_code and self.state is JobState.RUNNING:
                            self.state, self.deadline = JobState.LEAVING, now + LEAVE_SECONDS
                        if member.rank == 0:
                            self.printed |= set(lines)
                        else:
                            self.unprinted += [(member, line, now + RANK_0_FIRST_SECONDS) for line in lines]
        except (TypeError, ValueError):  # what one sidecar sends is no reason to leave the others alone
            connection.close()
        if connection.closed:
            text = "is gone with its watchdog: the node went down, or something there kills all processes"
            self._lose(member, text, now)

    def _lose(self, member: Member, text: str, now: float) -> None:
        if not member.is_gone and self.state is not JobState.ENDING:
            member.is_gone = True
            self._failed(Report(member.rank, member.host, Failure.LOST, text), now)

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

    def _print_errors_of_others(self, now: float) -> None:
        """Print what other ranks ended with and rank 0 has not printed itself: the fault is theirs alone."""
        due = [line for line in self.unprinted if now > line[2] or self._all_left()]
        self.unprinted = [line for line in self.unprinted if line not in due]
        for member, text, _ in due:
            if text not in self.printed:
                self.printed.add(text)
                self.say(f"error: rank {member.rank} on {member.host}: {text}")

    def _announce_cause(self) -> None:
        """Print what failed first, with its traceback or all stacks, which go to a file beside rank 0's log too."""
        stacks = {member: member.stacks for _, member in sorted(self.members.items()) if member.stacks}
        frozen = [member for member in stacks if stacks[member]["is_stopped"]]
        cause = first_cause(self.reports)
        if cause.is_consequence and frozen:
            text = f"is stopped (SIGSTOP), in phase {stacks[frozen[0]]['phase']}"
            cause = Report(frozen[0].rank, frozen[0].host, Failure.STOPPED, text)
        self.say(f"error: {cause.sentence()}")
        if cause.failure is Failure.ERROR:
            self.say(f"what it said:\n{cause.text.rstrip()}")
        texts = []
        for member, of_rank in stacks.items():
            idle = f"no progress for {of_rank['idle_seconds']:.0f} s"
            title = f"rank {member.rank} on {member.host}, {of_rank['phase']}, {idle}"
            texts.append(f"{title}\n{of_rank['text']}")
            main_thread = of_rank["text"].rpartition("Current thread")[2]
            frames = [line for line in main_thread.splitlines() if line.startswith("  File")][:SHOWN_FRAMES]
            reason = "stopped" if of_rank["is_stopped"] else "it does not answer"
            self.say("\n".join([title, *(frames or [f"  (no stack: {reason})"])]))
        log_of_0 = self.members[0].log if 0 in self.members else ""
        if texts and log_of_0:
            path = Path(log_of_0).parent / "stacks.txt"
            with contextlib.suppress(OSError):  # a full disk may be what the ranks wait for
                path.write_text("\n\n".join(texts))
                self.say(f"all stacks: {path}")
        others = {report.rank for report in self.reports} - {cause.rank}
        log = self.members[cause.rank].log
        self.say(
            f"terminating all {self.world_size} ranks"
            + (f"; {len(others)} more failed after it" if others else "")
            + (f"; its log: {log} on {cause.host}" if log else "")
        )
        if self.run_file:  # before the launch knows, which may start the next attempt
            record_failure(self.run_file, cause.sentence(), replaces=True)
        if self.launcher:
            lost = sorted({report.host for report in self.reports if report.failure is Failure.LOST})
            self.launcher.send("failed", cause=cause.sentence(), lost=lost)

    def _end_ranks(self, now: float) -> None:
        self._tell_all("end")
        self.state, self.deadline = JobState.ENDING, now + END_SECONDS

    def _tell_all(self, kind: str, **fields: Any) -> None:
        for connection in self.sidecars:
            connection.send(kind, **fields)


def record_failure(file: Path, error: str, *, replaces: bool = False) -> None:
    """Write into run.json that the run there has failed; one that has ended otherwise stays as it is, and so does one
    that is not there, as on a node whose disk is not rank 0's. A cause `replaces` an earlier failure as well.
    """
    with contextlib.suppress(OSError, ValueError):
        content = json.loads(file.read_text(encoding="utf-8"))
        if content.get("status") in ("running", "failed")[: 1 + replaces]:
            write_json(file, content | {"status": "failed", "error": error})
