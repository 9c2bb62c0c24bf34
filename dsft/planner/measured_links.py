"""Rates between nodes as `dsft doctor` measured them, kept in `~/.cache/dsft/links.json` by the set of hosts, for the
time model of later plans.

Remove the file to go back to data sheets. Imports no torch: the doctor's quick part writes here too.
"""

import dataclasses
import json
import os
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dsft.planner.speeds import Speeds
    from dsft.runtime.hardware import Machine


def links_file() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dsft" / "links.json"


def keep_links(
    host_names: Iterable[str], *, network_bytes: float, link_bytes: float, collective_seconds: float
) -> None:
    """Keep what was measured between these hosts.

    Args:
        network_bytes: bytes per second that a node gets from another over the slowest link.
        link_bytes: bytes per second that a rank gets inside its node, in the slowest node; 0 with one rank per node.
    """
    path = links_file()
    known = _read(path) | {
        _key(host_names): {
            "network_bytes": network_bytes,
            "link_bytes": link_bytes,
            "collective_seconds": collective_seconds,
            "date": datetime.now(UTC).date().isoformat(),
        }
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(f".{os.getpid()}.tmp")
    beside.write_text(json.dumps(known, indent=2) + "\n", encoding="utf-8")
    os.replace(beside, path)


def with_links(speeds: "Speeds", machine: "Machine") -> "Speeds":
    """`speeds` with the rates measured between the nodes of `machine`, where they were; a single node keeps its own
    calibration.
    """
    measured = _read(links_file()).get(_key(machine.host_names)) if machine.nodes > 1 and machine.host_names else None
    try:
        values = {
            "network_bytes": float(measured["network_bytes"]),
            "collective_seconds": float(measured["collective_seconds"]),
        }
        if measured["link_bytes"] > 0 and machine.ranks_per_node > 1:
            values |= dict.fromkeys(("link_bytes", "reduce_bytes", "all_reduce_bytes"), float(measured["link_bytes"]))
        return dataclasses.replace(
            speeds,
            **values,
            source=f"{speeds.source}; links between these nodes measured by dsft doctor on {measured['date']}",
        )
    except (KeyError, TypeError, ValueError):  # nothing measured, or a damaged file
        return speeds


def _key(host_names: Iterable[str]) -> str:
    return ",".join(sorted(set(host_names)))


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
