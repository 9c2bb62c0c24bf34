"""What sidecars report about a failed rank, and which of several reports is the cause. Pure: no sockets, no clock."""

import re
from dataclasses import dataclass
from enum import StrEnum

CONSEQUENCES = re.compile(
    r"connection (closed|reset|refused)|closed by peer|broken pipe|timed out waiting|socket ?timeout|nccl|"
    r"DistBackendError|DistNetworkError|gloo|remote process exited|unhandled system error",
    re.IGNORECASE,
)
"""In the last line of a traceback: how a rank notices that another one is gone."""


class Failure(StrEnum):
    """The ways in which a rank fails."""

    ERROR = "error"  # a Python exception that nobody caught
    DIED = "died"
    STALLED = "stalled"  # no progress within the limit of its phase
    STOPPED = "stopped"  # held by SIGSTOP
    LAUNCHER_GONE = "launcher gone"
    LOST = "lost"  # no heartbeat of its node or sidecar


@dataclass(frozen=True)
class Report:
    """One rank's failure."""

    rank: int
    host: str
    failure: Failure
    text: str  # one sentence without its subject; for `Failure.ERROR` a traceback

    @property
    def is_consequence(self) -> bool:
        """Whether another rank's end may well have caused this."""
        if self.failure is Failure.ERROR:
            return bool(CONSEQUENCES.search(last_line(self.text)))
        return self.failure is Failure.STALLED

    def sentence(self) -> str:
        """Name the rank, its host and what happened, in one line."""
        text = f": {last_line(self.text)}" if self.failure is Failure.ERROR else f" {self.text}"
        return f"rank {self.rank} on {self.host}{text}"


def last_line(traceback: str) -> str:
    """Return the last line that is not empty: of a traceback, the exception itself."""
    return next((line.strip() for line in reversed(traceback.splitlines()) if line.strip()), "")


def first_cause(reports: list[Report]) -> Report:
    """Return the earliest report that no other explains; `reports` come in the order of arrival."""
    return next((report for report in reports if not report.is_consequence), reports[0])
