"""What guards tell each other about a failure, and which of several reports is the cause."""

import re
from dataclasses import dataclass

CONSEQUENCES = re.compile(
    r"connection (closed|reset|refused)|closed by peer|broken pipe|timed out waiting|socket"
    r" ?timeout|nccl|DistBackendError|DistNetworkError|gloo|"
    r"remote process exited|unhandled system error",
    re.IGNORECASE,
)
"""In the last line of a traceback: how a rank notices that another one is gone."""


@dataclass(frozen=True)
class Report:
    """One rank's failure."""

    rank: int
    host: str
    kind: str
    """error (a Python exception), died, stopped (SIGSTOP), launcher (it is gone), lost (no sign of life), stalled,
    interrupted.
    """
    text: str
    """One sentence, or a traceback."""

    @property
    def is_consequence(self) -> bool:
        """Whether another rank's end may well have caused this."""
        return self.kind == "stalled" or (self.kind == "error" and bool(CONSEQUENCES.search(last_line(self.text))))

    def sentence(self) -> str:
        return (
            f"rank {self.rank} on {self.host} {self.text}"
            if self.kind != "error"
            else f"rank {self.rank} on {self.host}: {last_line(self.text)}"
        )


def last_line(text: str) -> str:
    """Of a traceback: the exception itself."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def first_cause(reports: list[Report]) -> Report:
    """The earliest report that no other explains; `reports` come in the order of arrival."""
    return next((report for report in reports if not report.is_consequence), reports[0])
