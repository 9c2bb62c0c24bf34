"""Shared by all packages: formats of units and JSON, a batch, the padded width of rows, the ignored label."""

import contextlib
import json
import os
import re
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KiB = 1024
MiB = 1024**2
GiB = 1024**3
MB = 1000**2
GB = 1000**3
BYTES = {"MB": MB, "GB": GB, "TB": 1000 * GB, "MiB": MiB, "GiB": GiB, "TiB": 1024 * GiB}
"""Unit in user input -> its bytes."""
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""torch's name of a dtype -> bytes of one number."""
JsonObject = dict[str, Any]  # as read from a JSON file, or to be written to one
IGNORED = -100  # label of a token that is not trained or scored, as in transformers
PADDED_MULTIPLE = 8  # rows are padded to a multiple of this, for matrix units

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def printable(text: str) -> str:
    """Replace control characters: foreign texts may contain escape sequences for the terminal."""
    return CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


@dataclass(frozen=True)
class Batch:
    """The distribution of one optimizer step's sequences."""

    micro: int  # sequences of one forward on one rank, or on the ranks that share them
    accumulation: int  # micro batches of one optimizer step
    ranks: int  # all of the training
    sequence_parallel: int = 1  # ranks that share each micro batch

    @property
    def sequences(self) -> int:
        """Sequences of one optimizer step over all ranks."""
        return self.micro * self.accumulation * (self.ranks // self.sequence_parallel)


def padded_width(length: Any) -> Any:
    """Round `length` tokens (a number or an array) up to the computed width of a batch."""
    return -(-length // PADDED_MULTIPLE) * PADDED_MULTIPLE


def in_gib(num_bytes: float) -> str:
    """Format bytes in GiB with three digits, or as a full number from 1,000 GiB on."""
    return f"{num_bytes / GiB:.3g} GiB" if num_bytes < 1000 * GiB else f"{num_bytes / GiB:,.0f} GiB"


def in_time(seconds: float) -> str:
    """Format a duration in the largest unit that it fills: 40 s, 12 min, 2.4 h, 3.1 days."""
    for unit, name in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.2g} {name}"
    return f"{seconds:.2g} s"


def in_digits(value: float) -> str:
    """Format a number with four digits, from 1,000 on in full with separators: 0.002995, 98.2, 4,110."""
    if isinstance(value, int) or 999.95 <= abs(value) < 1e15:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def plural(number: int, noun: str) -> str:
    """Format "1 node", "2,000 nodes"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def one_of(choices: Iterable[Any]) -> str:
    """Format "1", "1 or 2", "1, 2 or 4"."""
    *first, last = map(str, choices)
    return f"{', '.join(first)} or {last}" if first else last


def write_json(path: Path, content: JsonObject) -> None:
    """Write to a file beside `path` and rename it, so that readers and crashes never see a partial file."""
    beside = path.with_name(f"{path.name}.{socket.gethostname()}.{os.getpid()}.tmp")
    try:
        beside.write_text(json.dumps(content, indent=2, default=str) + "\n", encoding="utf-8")
        os.replace(beside, path)
    except OSError as error:
        error.filename = str(path)  # the name that the user knows
        raise
    finally:
        with contextlib.suppress(OSError):  # the write's own error is reported
            beside.unlink(missing_ok=True)
