"""Where all sidecars report, in the sidecar of rank 0: decides what failed first, says it once, and ends every rank."""

import os
import selectors
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path

from dsft.watchdog.launcher_link import reach_front
from dsft.watchdog.messages import Lines
from dsft.watchdog.root_cause import Report, first_cause

COLLECT_SECONDS = 2.0
"""After the first report: its causes and consequences reach the hub within this time."""
STACKS_SECONDS = 6.0
"""The same where stacks are asked for."""
HEAR_RANK_0_SECONDS = 1.5
"""For rank 0 to end with the same message, which it prints itself."""
QUIET_SECONDS = 8.0
"""From the first rank that ends with a message of its own to the end of those that did not."""
END_SECONDS = 15.0
"""For sidecars to end their ranks and hang up, before the hub stops waiting."""


@dataclass
class Member:
    """A sidecar's connection."""

    lines: Lines
    rank: int = -1
    host: str = ""
    heard: float = 0.0
    log: str = ""
    has_left: bool = False
    stacks: dict | None = field(default=None)


class Hub:
    """Args: `listener` a listening socket, `token` what a sidecar must know to be heard."""

    def __init__(self, listener: socket.socket, token: str, world_size: int, lost_after: float, *, speak):
        listener.setblocking(False)
        self.listener, self.token, self.world_size, self.lost_after, self.speak = (
            listener,
            token,
            world_size,
            lost_after,
            speak,
        )
        self.members: list[Member] = []
        self.reports: list[Report] = []
        self.decide_at: float | None = None
        self.over_at: float | None = None
        self.quiet_end_at: float | None = None
        self.beaten = 0.0
        self.folder = ""
        self.front = reach_front()
        self.codes: list[int] = []
        self.said: set[str] = set()
        self.unsaid: list[tuple[float, str, Member]] = []

    def register(self, selector: selectors.BaseSelector) -> None:
        for source in (self.listener, self.front, *(member.lines for member in self.members)):
            if source is not None and not (isinstance(source, Lines) and source.closed):
                selector.register(source, selectors.EVENT_READ)

    def is_over(self) -> bool:
        """Whether nobody needs the hub any more."""
        return self._everyone_left() or (
            self.over_at is not None
            and (time.monotonic() > self.over_at or all(member.lines.closed for member in self.members))
        )

    def finish(self) -> None:
        """Say what is still unsaid, and tell `dsft launch` the exit code, where the ranks themselves had one."""
        self._speak_for_others(time.monotonic())
        if self.front and (self._everyone_left() or any(self.codes)):
            self.front.send(done=max(self.codes))

    def step(self, now: float) -> None:
        self._accept(now)
        for member in self.members:
            self._read(member, now)
        self._speak_for_others(now)
        self._read_front()
        if self.over_at is None and self.quiet_end_at is not None and now >= self.quiet_end_at:
            self._tell(end="a rank ended")
            self.over_at = now + END_SECONDS
        if self.over_at is None and self.decide_at is not None and now >= self.decide_at:
            self._decide(now)
        if now - self.beaten > min(2.0, self.lost_after / 4):
            self.beaten = now
            self._tell(beat=True)

    def _accept(self, now: float) -> None:
        try:
            while True:
                connection, _ = self.listener.accept()
                self.members.append(Member(Lines(connection), heard=now))
        except OSError:
            pass

    def _read(self, member: Member, now: float) -> None:
        if member.lines.closed:
            return
        for message in member.lines.read():
            member.heard = now
            if "hello" in message and message.get("token") == self.token:
                member.rank, member.host = message["hello"], message["host"]
            elif member.rank < 0:
                member.lines.close()  # a stranger
                return
            if "failed" in message:
                member.log = message["log"]
                self._failed(Report(member.rank, member.host, message["failed"], message["text"]), now)
            if "stacks" in message:
                member.stacks = message
            if "leaves" in message:
                member.has_left = True
                self._left(member, message)
        if member.rank < 0 or member.has_left or self.over_at is not None:
            return
        if member.lines.closed:
            self._failed(
                Report(
                    member.rank,
                    member.host,
                    "lost",
                    "is gone with its guard: the node went down, or something there kills all processes",
                ),
                now,
            )
        elif now - member.heard > self.lost_after:
            member.lines.close()
            self._failed(
                Report(
                    member.rank,
                    member.host,
                    "lost",
                    f"gave no sign of life for {self.lost_after:.0f} s: the node is down, frozen or cut off from"
                    f" {socket.gethostname()}",
                ),
                now,
            )

    def _left(self, member: Member, message: dict) -> None:
        self.codes.append(message["leaves"])
        if message["leaves"] and self.quiet_end_at is None:  # it has said why; the others may be waiting for it in vain
            self.quiet_end_at = time.monotonic() + QUIET_SECONDS
        if member.rank == 0:
            self.said |= set(message["lines"])
        else:
            self.unsaid += [(time.monotonic() + HEAR_RANK_0_SECONDS, line, member) for line in message["lines"]]

    def _speak_for_others(self, now: float) -> None:
        """What other ranks ended with and rank 0 has not said itself: the fault is theirs alone."""
        due = [one for one in self.unsaid if now > one[0] or self._everyone_left()]
        self.unsaid = [one for one in self.unsaid if one not in due]
        for _, line, member in due:
            if line not in self.said:
                self.said.add(line)
                self.speak(f"error: rank {member.rank} on {member.host}: {line}")

    def _everyone_left(self) -> bool:
        return len(self.codes) == self.world_size

    def _failed(self, report: Report, now: float) -> None:
        if any(self.codes):
            return  # the consequence of an end that has been explained
        self.reports.append(report)
        if self.decide_at is None:
            self.decide_at = now + COLLECT_SECONDS
            if report.kind == "stalled":
                self.decide_at = now + STACKS_SECONDS
                self._tell(dump=True)

    def _decide(self, now: float) -> None:
        frozen = [member for member in self.members if member.stacks and member.stacks["stopped"]]
        cause = first_cause(self.reports)
        if cause.is_consequence and frozen:
            cause = Report(
                frozen[0].rank, frozen[0].host, "stopped", f"is stopped (SIGSTOP), in phase {frozen[0].stacks['phase']}"
            )
        sentence = cause.sentence()
        self.speak(f"error: {sentence}")
        if cause.kind == "error":
            self.speak(f"what it said:\n{cause.text.rstrip()}")
        if any(member.stacks for member in self.members):
            self._show_stacks()
        others = sorted({report.rank for report in self.reports} - {cause.rank})
        logs = [member.log for member in self.members if member.rank == cause.rank and member.log]
        self.speak(
            f"all {self.world_size} ranks are being ended"
            + (f"; {len(others)} more failed after it" if others else "")
            + (f"; its log: {logs[0]} on {cause.host}" if logs else "")
        )
        if self.front:
            self.front.send(failed=sentence)
        self._tell(end=sentence)
        self.over_at = now + END_SECONDS

    def _show_stacks(self) -> None:
        """The last lines of each rank's main thread on the screen, everything in a file."""
        whole = []
        for member in sorted(self.members, key=lambda member: member.rank):
            if not member.stacks:
                continue
            title = (
                f"rank {member.rank} on {member.host}, {member.stacks['phase']}, no progress for"
                f" {member.stacks['since']:.0f} s"
            )
            whole.append(f"{title}\n{member.stacks['stacks']}")
            main_thread = member.stacks["stacks"].rpartition("Current thread")[2] or member.stacks["stacks"]
            frames = [line for line in main_thread.splitlines() if line.startswith("  File")][:5]
            self.speak(
                title
                + (
                    "".join(f"\n{line}" for line in frames)
                    or "\n  (no stack: " + ("stopped)" if member.stacks["stopped"] else "it does not answer)")
                )
            )
        if self.folder and os.path.isdir(self.folder):
            path = Path(self.folder) / "stacks.txt"
            path.write_text("\n\n".join(whole))
            self.speak(f"all stacks: {path}")

    def _read_front(self) -> None:
        """`dsft launch` may ask for the end or for a signal to all ranks; without it nobody waits for this job."""
        if self.front is None or self.over_at is not None:
            return
        for message in self.front.read():
            if "signal" in message:
                self._tell(signal=message["signal"])
            if "end" in message:
                self._end(message["end"])
        if self.front.closed and self.over_at is None:
            self._end("dsft launch is gone")

    def _end(self, why: str) -> None:
        self.speak(f"{why}: all {self.world_size} ranks are being ended")
        self._tell(end=why)
        self.over_at = time.monotonic() + END_SECONDS

    def _tell(self, **message) -> None:
        for member in self.members:
            if not member.lines.closed and member.rank >= 0:
                member.lines.send(**message)
