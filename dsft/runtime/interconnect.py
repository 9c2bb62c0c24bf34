"""How the GPUs of a node and its network are connected, as `--interconnect` takes it: read from nvidia-smi and the
kernel. What cannot be read is left out, and then assumed by the planner (planner/step_time.py).
"""

import os
import re
import subprocess
from pathlib import Path

SYSFS = Path("/sys/class")


def read_interconnect() -> str:
    """Return "nvlink+8xib400", "pcie+eth25", "nvlink" ...; empty where nothing can be read."""
    return "+".join(filter(None, [_read_links(), read_network()]))


def _read_links() -> str:
    try:
        links = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return links_between_all(links, os.environ.get("CUDA_VISIBLE_DEVICES", "")) if links else ""


def links_between_all(matrix: str, visible: str = "") -> str:
    """Return what joins every GPU of a node with every other, by the matrix of `nvidia-smi topo -m`.

    Bridges that join pairs of more GPUs count as PCIe, over which a collective goes as well.

    Args:
        visible: numbers of the GPUs that count, as CUDA_VISIBLE_DEVICES has them; all where it has something else.
    """
    rows = [line.split() for line in matrix.splitlines() if re.match(r"GPU\d+\s", line)]
    numbers = [int(number) for number in visible.split(",")] if re.fullmatch(r"\d+(,\d+)*", visible) else []
    count = [number for number in numbers if number < len(rows)] or range(len(rows))
    others = [rows[number][1 + other] for number in count for other in count if other != number]
    return "nvlink" if others and all(re.fullmatch(r"NV\d+", cell) for cell in others) else "pcie"


def read_network(sysfs: Path = SYSFS) -> str:
    """Return the cards that carry a node's traffic to others, with their Gbit/s: the fastest InfiniBand or RoCE ports,
    all of them; without any, the fastest network interface, one. Empty where no rate can be read: many virtual machines
    tell none.

    Args:
        sysfs: where the kernel shows them (Documentation/ABI/stable/sysfs-class-infiniband, testing/sysfs-class-net).
    """
    ports = [
        (_number(rate), "roce" if _read(rate.with_name("link_layer")) == "Ethernet" else "ib")
        for rate in sysfs.glob("infiniband/*/ports/*/rate")
        if "ACTIVE" in _read(rate.with_name("state"))
    ]
    if fastest := max(ports, default=(0, ""))[0]:
        kinds = [kind for number, kind in ports if number == fastest]
        return f"{len(kinds)}x{kinds[0]}{fastest}"
    # lo, bridges, docker's and virtual pairs have no device; of a bond, its cards have
    interfaces = [path for path in sysfs.glob("net/*") if (path / "device").exists()]
    megabits = max((_number(path / "speed") for path in interfaces if _read(path / "operstate") == "up"), default=0)
    return f"eth{max(1, megabits // 1000)}" if megabits else ""


def _number(path: Path) -> int:
    """Read the whole number that a file begins with ("400 Gb/sec (4X NDR)"); 0 where there is none."""
    digits = re.match(r"\d+", _read(path))
    return int(digits[0]) if digits else 0


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # of an interface without a link, the kernel refuses to tell the speed
        return ""
