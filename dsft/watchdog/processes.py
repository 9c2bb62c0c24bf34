"""Processes as Linux' /proc shows them (man 5 proc), without a library."""

import os
import re
from pathlib import Path

LAUNCHERS = {
    "deepspeed": ("deepspeed",),
    "torchrun": ("torchrun", "torch.distributed", "torch/distributed"),
    "accelerate": ("accelerate",),
    "srun": ("srun", "slurmstepd"),
    "mpirun": ("mpirun", "mpiexec", "orted", "prted", "hydra"),
    "dsft": ("dsft",),
}
"""Launcher -> what the command lines of its processes contain, of which one or more stand above each rank. The ways of
`dsft launch` (cluster/launch/commands.py) name these launchers.
"""
_LAUNCHER = re.compile("|".join(re.escape(text) for texts in LAUNCHERS.values() for text in texts))


def _stat(pid: int) -> list[str] | None:
    """Fields of /proc/PID/stat from the third (state) on; None where there is no such process, or only its remains (a
    zombie).
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in ("Z", "X") else fields


def state(pid: int) -> str | None:
    """R, S, D, T (stopped), t (traced) ...; None when it has ended."""
    fields = _stat(pid)
    return fields and fields[0]


def start_time(pid: int) -> str | None:
    """When the process started, in clock ticks: with the pid, its identity. None when it has ended."""
    fields = _stat(pid)
    return fields and fields[19]


def parent(pid: int) -> int:
    fields = _stat(pid)
    return int(fields[1]) if fields else 0


def is_launcher(command: str) -> bool:
    """Whether a command line is that of a launcher's process."""
    return bool(_LAUNCHER.search(command))


def launchers_of(pid: int) -> list[int]:
    """The unbroken line of launchers above a rank, nearest first; a shell or session above them may end without
    harm.
    """
    found = []
    while (pid := parent(pid)) > 1:
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            break
        if not is_launcher(command):
            break
        found.append(pid)
    return found


def descendants(pid: int) -> list[int]:
    """Children of a process and theirs, deepest first."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            children.setdefault(parent(int(name)), []).append(int(name))
    found, waiting = [], [pid]
    while waiting:
        waiting += children.get(waiting[0], [])
        found.append(waiting.pop(0))
    return found[:0:-1]
