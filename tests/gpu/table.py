"""The results as a Markdown table to paste into an issue, and as JSON; rows `without_names` tell no host or folder."""

import dataclasses
import json
import re
import socket
from pathlib import Path
from typing import Any

from dsft.runtime.software import OPTIONAL_PACKAGES, git_commit, versions
from dsft.units import GiB
from gpu.check import Row, Setting

Results = dict[str, list[Row]]
"""Name of a check -> its rows."""
WORDS = {True: "yes", False: "**no**", None: ""}


def line(check: str, row: Row) -> str:
    """Compose one line of the table."""
    cells = (check, row.claim, row.predicted, row.measured, WORDS[row.ok])
    return f"| {' | '.join(' '.join(cell.replace('|', '/').split()) for cell in cells)} |"


def table(results: Results) -> str:
    """Compose the table."""
    rows = [line(check, row) for check, rows in results.items() for row in rows]
    return "\n".join(["| check | claim | predicted | measured | ok |", "|---|---|---|---|---|", *rows]) + "\n"


def measured_rows(results: Results) -> str:
    """The trainings among the results as lines: planned and measured, for the issue form."""
    lines = []
    for check, rows in results.items():
        details = next((row.details for row in rows if "plan_check" in row.details), None)
        if not details:
            continue
        figures = details["plan_check"]
        memory = next(figures[name] for name in ("GPU memory allocated", "host memory of a node") if name in figures)
        step = figures.get("time of a step")  # without one where no time is planned
        texts = (
            f"{memory['predicted'] / GiB:.2f} planned, {memory['measured'] / GiB:.2f} measured",
            f"{step['predicted']:.3g} planned, {step['measured']:.3g} measured" if step else "no time is planned",
        )
        job = f"`scripts/test --gpu --only {check}` on {details['machine']}"
        lines.append(f"| {' | '.join((job, details['plan'].partition(';')[0], *texts))} |")
    return "\n".join(lines)


def content(results: Results, setting: Setting) -> dict[str, Any]:
    """Make what the JSON holds."""
    return {
        "ranks": setting.ranks,
        "share": setting.share,
        "gpu": setting.has_gpu,
        "tiny": setting.tiny,
        "versions": versions(*OPTIONAL_PACKAGES),
        "commit": git_commit(),
        "checks": {check: [dataclasses.asdict(row) for row in rows] for check, rows in results.items()},
    }


def without_names(row: Row, setting: Setting) -> Row:
    """Take the names of the host, of the folder of the checks, and of the user's home out of what was measured."""
    return dataclasses.replace(row, measured=_nameless(row.measured, setting), details=_nameless(row.details, setting))


def _nameless(value: Any, setting: Setting) -> Any:
    """Take these names, as whole words, out of every text in a value; keys stay."""
    if isinstance(value, dict):
        return {key: _nameless(item, setting) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_nameless(item, setting) for item in value]
    if not isinstance(value, str):
        return value
    host = socket.gethostname()  # NCCL writes it up to its first dot
    names = {setting.folder: "FOLDER", str(Path.home()): "~"}
    names |= dict.fromkeys((socket.getfqdn(), host, host.partition(".")[0]), "HOST")
    for name in sorted(filter(None, names), key=len, reverse=True):
        value = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", names[name], value)
    return value


def write_results(results: Results, setting: Setting, out: Path) -> None:
    """Write `gpu-check.md` and `gpu-check.json`."""
    as_json = json.dumps(content(results, setting), indent=1, default=str) + "\n"
    for name, text in (("gpu-check.md", table(results)), ("gpu-check.json", as_json)):
        (out / name).write_text(text, encoding="utf-8")


def has_failures(results: Results) -> bool:
    return any(row.ok is False for rows in results.values() for row in rows)
