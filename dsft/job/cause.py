"""Why a job failed: one rank's failure, as the ranks pass it on in the store, and its record in run.json."""

import contextlib
import dataclasses
import json
import re
from dataclasses import dataclass
from pathlib import Path

from dsft.units import write_json

CONSEQUENCES = re.compile(
    r"connection (closed|reset|refused)|closed by peer|broken pipe|timed out waiting|socket ?timeout|nccl|"
    r"DistBackendError|DistNetworkError|DistStoreError|gloo|remote process exited|unhandled system error",
    re.IGNORECASE,
)
"""In the last line of a traceback: how a rank notices that another one has exited."""


@dataclass(frozen=True, kw_only=True)
class Cause:
    """The failure of one rank, or what another rank observed of it."""

    rank: int
    host: str
    text: str
    """One sentence, without the name of the rank."""
    exit_code: int = 1
    printed_by: int = 0
    """The rank that prints it."""
    lines: tuple[str, ...] = ()
    """What a rank that exits with an error of dsft's own has to say; printed instead of the sentence."""
    traceback: str = ""

    def sentence(self) -> str:
        return f"rank {self.rank} on {self.host} {self.text}"

    def named_lines(self) -> list[str]:
        """The lines with the name of the rank, which rank 0 prints for another: it has not found the same error."""
        name = f"rank {self.rank} on {self.host}"
        if self.rank == 0:
            return list(self.lines)
        return [line if name in line else line.replace("error: ", f"error: {name}: ", 1) for line in self.lines]

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> "Cause":
        values = json.loads(text)
        return cls(**values | {"lines": tuple(values["lines"])})


def is_consequence(error: str) -> bool:
    """Whether another rank's exit may well have caused this error, of which the last line counts."""
    lines = error.strip().splitlines()
    return bool(lines and CONSEQUENCES.search(lines[-1]))


def record_failure(file: Path, error: str, *, replaces: bool = False) -> None:
    """Write into run.json that the run there has failed; one that has ended otherwise stays as it is, and so does one
    that is not there, as on a node whose disk is not rank 0's. A cause `replaces` an earlier failure as well.
    """
    with contextlib.suppress(OSError, ValueError):
        content = json.loads(file.read_text(encoding="utf-8"))
        if content.get("status") == "running" or (replaces and content.get("status") == "failed"):
            write_json(file, content | {"status": "failed", "error": error})
