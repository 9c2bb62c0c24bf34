"""A prediction, or what became of it, as one row of a table with a hash over it: what was said, and when, cannot be
changed later without a trace. For `dsft plan --record`, docs/predictions.md and the checks on GPUs.
"""

import datetime
import hashlib
from collections.abc import Sequence

from dsft.planner.plans import MEMORY_ERROR, Plan
from dsft.runtime.software import code_hash, version_of
from dsft.units import GiB

COLUMNS = ("job", "plan", "GiB of a GPU", "seconds of a step", "tokens/s of a GPU", "versions", "date", "hash")
NAMED = ("torch", "deepspeed", "transformers")
"""Packages whose versions stand in a row, beside dsft's."""


def record(job: str, plan: str, memory: str, seconds: str, speed: str) -> str:
    """The row as Markdown: what is given, versions, today, and the hash."""
    installed = [
        "dsft " + version_of("dsft"),
        "code " + code_hash()[:8],
        *(f"{name} {version_of(name)}" for name in NAMED),
    ]
    versions = ", ".join(installed)
    cells = [job, plan, memory, seconds, speed, versions, datetime.date.today().isoformat()]
    cells = [" ".join(cell.replace("|", "/").split()) for cell in cells]
    return f"| {' | '.join([*cells, hash_of(cells)])} |"


def hash_of(cells: Sequence[str]) -> str:
    """16 hexadecimal digits of the SHA-256 of the cells before it, with a line feed between them, in UTF-8."""
    return hashlib.sha256("\n".join(cells).encode()).hexdigest()[:16]


def predicted(command: str, plan: Plan, *, ranks: int) -> str:
    """The row of a plan: memory and time with their ranges, as published figures of that kind lie about the plan's."""
    gib = plan.device_bytes / GiB
    memory = f"{gib:.1f} ({gib * (1 - MEMORY_ERROR):.1f} to {gib * (1 + MEMORY_ERROR):.1f})"
    seconds = f"{plan.time.step_seconds:.3g}"
    if plan.time.range_seconds:
        seconds += " ({:.3g} to {:.3g})".format(*plan.time.range_seconds)
    else:
        seconds += f" (no range: {plan.time.kind})"
    if not plan.fits:
        memory += ", does not fit"
    return record(f"`{command}`", plan.label, memory, seconds, f"{plan.time.tokens_per_second / ranks:,.0f}")
