"""Measured speeds for the time model of later plans: one file, `dsft/speeds.json` in the user's cache (XDG_CACHE_HOME).

`dsft plan --calibrate` writes what this machine's ranks reach (under host, CPU, GPU, number of ranks and precision) and
what its GPUs hold outside of torch, `dsft doctor` what the links between a set of hosts do, and a plan what a GPU
multiplies whose name is in no table. A plan for another machine or other hosts sees none of it, unless `--machine`
brings it along (`Machine.carried`). Other memory predictions are never fitted. Remove the file to go
back to data sheets. Imports no torch: the doctor's quick part writes here too. What measures is measuring.py.
"""

import contextlib
import dataclasses
import json
import platform
import socket
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsft.runtime.disk import user_cache, write_json
from dsft.units import DTYPE_BYTES

if TYPE_CHECKING:
    from dsft.planner.speeds import Speeds
    from dsft.runtime.hardware import Machine


def speeds_file() -> Path:
    return user_cache() / "speeds.json"


def calibrated(speeds: "Speeds", machine: "Machine", *, dtype: str) -> "Speeds":
    """Put what was measured in the place of what was assumed: this machine's ranks in this precision, and the links
    between its nodes. A GPU that is in no table multiplies once for it.
    """
    speeds = _with_product(_with_ranks(speeds, machine, dtype=dtype), machine, dtype=dtype)
    return with_links(_with_outside(speeds, machine), machine)


def keep_ranks(machine: "Machine", measured: dict[str, float], *, dtype: str) -> Path:
    """Keep what the ranks of this machine reach: fields of `Speeds` by name. Returns the file."""
    return _keep("ranks", _ranks_key(machine, dtype), measured)


def keep_outside(machine: "Machine", *, context_bytes: int, communicators_bytes: Iterable[int]) -> Path:
    """Keep what this machine's GPUs hold outside of torch: fields of `OutsideMemory`. Returns the file."""
    measured = {"context_bytes": context_bytes, "communicators_bytes": list(communicators_bytes)}
    return _keep("outside", _outside_key(machine), measured)


def keep_links(
    host_names: Iterable[str], *, network_bytes: float, link_bytes: float, collective_seconds: float
) -> None:
    """Keep what was measured between these hosts.

    Args:
        network_bytes: bytes per second that a node gets from another over the slowest link.
        link_bytes: bytes per second that a rank gets inside its node, in the slowest node; 0 with one rank per node.
    """
    measured = {
        "network_bytes": network_bytes,
        "link_bytes": link_bytes,
        "collective_seconds": collective_seconds,
    }
    _keep("links", _links_key(host_names), measured)


def with_links(speeds: "Speeds", machine: "Machine") -> "Speeds":
    """Put in the rates measured between the nodes of `machine`, where they were; a single node keeps its own."""
    if machine.nodes == 1 or not machine.host_names:
        return speeds
    measured = _look_up("links", _links_key(machine.host_names))
    try:
        values = {name: float(measured[name]) for name in ("network_bytes", "collective_seconds")}
        if measured["link_bytes"] > 0 and machine.ranks_per_node > 1:
            values |= dict.fromkeys(("link_bytes", "reduce_bytes", "all_reduce_bytes"), float(measured["link_bytes"]))
        source = f"{speeds.source}; links between these nodes measured by dsft doctor on {measured['date']}"
    except (KeyError, TypeError, ValueError):  # nothing measured, or a damaged entry
        return speeds
    return dataclasses.replace(speeds, **values, source=source)


def to_carry(machine: "Machine", *, dtype: str) -> dict[str, Any]:
    """Return what is kept of this machine, without its name: `Machine.carried` on another."""
    ranks = _look_up("ranks", _ranks_key(machine, dtype))
    return {"bits": 8 * DTYPE_BYTES[dtype], "ranks": ranks, "outside": _look_up("outside", _outside_key(machine))}


def _with_ranks(speeds: "Speeds", machine: "Machine", *, dtype: str) -> "Speeds":
    path = speeds_file()
    if machine.carried:
        measured = machine.carried["ranks"] if machine.carried["bits"] == 8 * DTYPE_BYTES[dtype] else None
    elif not machine.measured or not path.is_file():
        return speeds
    elif not _read(path):
        note = f"{path} cannot be read; remove it, or measure again with --calibrate"
        return dataclasses.replace(speeds, source=f"{speeds.source} ({note})")
    else:
        measured = _look_up("ranks", _ranks_key(machine, dtype))
    try:
        values = {name: float(value) for name, value in measured.items() if name != "date"}
        source = f"measured {'there' if machine.carried else 'on this machine'} on {measured['date']}"
        return dataclasses.replace(speeds, **values, source=source, has_time_estimate=True)
    except (AttributeError, KeyError, TypeError, ValueError):  # nothing measured, or a damaged entry
        return speeds


def _with_product(speeds: "Speeds", machine: "Machine", *, dtype: str) -> "Speeds":
    """Time a product where this machine's GPU is in no table, once: it is kept for later plans. Where it cannot be
    timed, no time is told.
    """
    if speeds.has_time_estimate or not (machine.has_gpu and machine.measured):
        return speeds
    from dsft.planner.measuring import product_flops
    from dsft.planner.speeds import speeds_of

    key = f"{socket.gethostname()}, {machine.gpu_type}"
    try:
        products = float(_look_up("products", key)["matmul_flops"])
    except (KeyError, TypeError, ValueError):  # nothing measured, or a damaged entry
        products = product_flops()
        if products:
            with contextlib.suppress(OSError):  # a cache that cannot be written
                _keep("products", key, {"matmul_flops": products})
    return speeds_of(machine, dtype=dtype, products=products)


def _with_outside(speeds: "Speeds", machine: "Machine") -> "Speeds":
    """Put in the memory measured outside of torch, on one node: between nodes NCCL has other buffers."""
    if not machine.exists or machine.nodes > 1:
        return speeds
    measured = machine.carried["outside"] if machine.carried else _look_up("outside", _outside_key(machine))
    try:
        context_bytes, each = int(measured["context_bytes"]), tuple(map(int, measured["communicators_bytes"]))
    except (KeyError, TypeError, ValueError):  # nothing measured, or a damaged entry
        return speeds
    values = {"communicators_bytes": each} if len(each) == len(speeds.outside.communicators_bytes) else {}
    outside = dataclasses.replace(speeds.outside, context_bytes=context_bytes, measured=True, **values)
    return dataclasses.replace(speeds, outside=outside)


def _outside_key(machine: "Machine") -> str:
    return f"{socket.gethostname()}, {machine.gpu_type}: {machine.ranks_per_node} ranks"


def _ranks_key(machine: "Machine", dtype: str) -> str:
    """Name this host, its CPU, the cores that may be used and GPU, how many ranks share them, and in how many bits they
    compute.
    """
    return (
        f"{socket.gethostname()}, {machine.cores} x {_cpu_name()}, {machine.gpu_type or 'no GPU'}:"
        f" {machine.ranks_per_node} ranks, {8 * DTYPE_BYTES[dtype]} bits"
    )


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _links_key(host_names: Iterable[str]) -> str:
    return ",".join(sorted(set(host_names)))


def _keep(section: str, key: str, measured: dict[str, Any]) -> Path:
    path = speeds_file()
    content = _read(path)
    content[section] = content.get(section, {}) | {key: measured | {"date": datetime.now(UTC).date().isoformat()}}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, content)
    return path


def _look_up(section: str, key: str) -> Any:
    return _read(speeds_file()).get(section, {}).get(key)


def _read(path: Path) -> dict[str, dict[str, Any]]:
    """Read the sections of the file; what is damaged or missing is left out."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    sections = content.items() if isinstance(content, dict) else ()
    return {name: entries for name, entries in sections if isinstance(entries, dict)}
