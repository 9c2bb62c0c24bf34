"""What a check is, what it finds out, and the folder it works in. Imports no torch: the parent of all checks holds no
GPU.
"""

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Row:
    """A line of the table."""

    claim: str
    predicted: str = ""
    measured: str
    ok: bool | None = None
    """None where nothing is claimed, or the check was skipped."""
    details: dict[str, Any] = field(default_factory=dict)
    """For the JSON alone."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Where a check runs, and on what."""

    folder: str
    """Of all checks: `base` (a model), `small`, `demo` (data)."""
    check: str = ""
    ranks: int
    has_gpu: bool
    tiny: bool
    share: int = 0
    """Ranks that share GPU 0 (--share); 0 without."""

    def path(self, *names: str) -> Path:
        return Path(self.folder, *names)

    @property
    def log(self) -> Path:
        """Takes what the check and its launches print."""
        return self.path(f"{self.check}.log")

    @property
    def runs(self) -> Path:
        """Folder of the check's own; removed after it."""
        return self.path(f"{self.check}-runs")

    def of(self, check: str) -> "Setting":
        return replace(self, check=check)


@dataclass(frozen=True, kw_only=True)
class Check:
    """One question, asked in a process of its own."""

    name: str
    run: Callable[[Setting], Iterator[Row]]
    seconds: float
    """Its limit on GPUs; CPU ranks get SLOWER times as much."""
    lacks: Callable[[Setting], str] = lambda setting: ""
    """Why it cannot run here; empty where it can."""


SLOWER = 4


class Failed(Exception):
    """A launch ended otherwise than it should."""


def command(setting: Setting, name: str, options: dict[str, Any], *, ranks: int | None = None) -> list[str]:
    """Compose `dsft train` or `dsft eval` as a user would type it."""
    words = [f"--{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in options.items()]
    return [sys.executable, "-m", "dsft.cli.main", name, f"--num_gpus={ranks or setting.ranks}", *words]


def launch(setting: Setting, words: list[str], *, code: int = 0) -> str:
    """Run a command to its end; returns what it printed.

    Raises:
        Failed: where its exit code is another than `code`.
    """
    before = setting.log.stat().st_size
    process = subprocess.run(words, stdout=sys.stdout.fileno(), stderr=subprocess.STDOUT)
    text = setting.log.read_bytes()[before:].decode(errors="replace")
    if process.returncode != code:
        raise Failed(f"exit code {process.returncode} where {code} was expected")
    return text


def needs_gpu(setting: Setting) -> str:
    return "" if setting.has_gpu else "needs a GPU"


def needs_large_model(setting: Setting) -> str:
    return needs_gpu(setting) or ("a tiny model fits always" if setting.tiny else "")
