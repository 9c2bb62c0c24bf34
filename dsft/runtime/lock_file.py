"""Files that say who holds something: they name the process, for others on this machine and elsewhere."""

import json
import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path

from dsft.watchdog.processes import Process, start_time


@dataclass(frozen=True)
class Owner(Process):
    """The process that holds a lock, as it wrote it into the file."""

    host: str
    boot: str
    """Of its machine: hosts may share a name, and process ids start from scratch."""
    processes: str
    """The namespace of its id: containers of one machine count their processes each for itself."""

    @classmethod
    def this_process(cls) -> "Owner":
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        pid = os.getpid()
        return cls(pid, start_time(pid), socket.gethostname(), boot, os.readlink("/proc/self/ns/pid"))

    def is_here(self) -> bool:
        """Whether this process could see it run."""
        here = self.this_process()
        return (self.host, self.boot, self.processes) == (here.host, here.boot, here.processes)


def create(path: Path) -> int | None:
    """Write a lock of this process; returns its open descriptor, None where the file exists."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    except FileExistsError:
        return None
    os.write(descriptor, json.dumps(asdict(Owner.this_process())).encode())
    return descriptor


def file_system_time(lock: Path) -> float:
    """The time by the clock of the file system that a lock lies on, which machines that share it see alike.

    Raises:
        OSError: nothing can be written beside it.
    """
    probe = lock.with_name(f"{lock.name}.{socket.gethostname()}.{os.getpid()}.now")
    probe.touch()
    try:
        return probe.stat().st_mtime
    finally:
        probe.unlink(missing_ok=True)


def owner_of(path: Path) -> Owner | None:
    """The owner that a lock names; None where it names none, as torch's own locks, or is not there."""
    try:
        return Owner(**json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError):
        return None
