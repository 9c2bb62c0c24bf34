"""Processes as Linux' /proc shows them (man 5 proc), without a library."""

import itertools
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

LAUNCHERS = {
    "deepspeed": (
        "deepspeed",
        "deepspeed.pt",
        "ds",
        "deepspeed.launcher",
        "dsft.launch.quoted_runner",
        "pdsh",
    ),
    "torchrun": ("torchrun", "torch.distributed"),
    "accelerate": ("accelerate", "accelerate-launch", "accelerate.commands"),
    "srun": ("srun", "slurmstepd"),
    "mpirun": ("mpirun", "mpiexec", "orterun", "prterun", "orted", "prted", "mpiexec.hydra", "hydra_pmi_proxy"),
    "dsft": ("dsft", "dsft.cli.main"),
}
"""Launcher -> the names of its programs, and the modules or packages that `python -m` runs, of which one or more stand
above each rank; known here because ranks are also started without `dsft launch`.
"""
VARIABLE = "DSFT_LAUNCHER_PROCESSES"
"""The same of the launcher that `dsft launch` has started (launch/commands.py), with commas between."""
SHELLS = ("sh", "bash", "dash", "zsh", "ksh", "fish", "csh", "tcsh")
FLAGS_WITH_VALUES = ("-W", "-X", "--check-hash-based-pycs")
"""Of Python's interpreter."""


def _stat(pid: int) -> list[str] | None:
    """Fields of /proc/PID/stat from the third (state) on; None where there is no such process, or only its remains (a
    zombie).
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in ("Z", "X") else fields


def start_time(pid: int) -> str | None:
    """When the process started, in clock ticks; None when it has ended."""
    fields = _stat(pid)
    return fields and fields[19]


def parent(pid: int) -> int:
    """Process id of the parent; 0 where there is none."""
    fields = _stat(pid)
    return int(fields[1]) if fields else 0


@dataclass(frozen=True)
class Process:
    """A process by its id and its start, so that another one that gets its id later is not taken for it."""

    pid: int
    started: str | None

    @classmethod
    def of(cls, pid: int) -> "Process":
        return cls(pid, start_time(pid))

    def is_alive(self) -> bool:
        return self.started is not None and start_time(self.pid) == self.started

    def exit_code(self) -> int | None:
        """Its exit code, or minus the signal that killed it, as its remains show it until its parent takes them; None
        before and after.
        """
        try:
            fields = Path(f"/proc/{self.pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        except OSError:
            return None
        is_left = fields[0] == "Z" and fields[19] == self.started
        return os.waitstatus_to_exitcode(int(fields[49])) if is_left else None

    def is_stopped(self) -> bool:
        """Whether SIGSTOP holds it."""
        fields = _stat(self.pid)
        return bool(fields) and fields[0] == "T"

    def moved_bytes(self) -> int:
        """Bytes that it has read and written so far, mapped files included; 0 where the system does not tell."""
        try:
            counts = dict(line.split(": ") for line in Path(f"/proc/{self.pid}/io").read_text().splitlines())
        except OSError:
            return 0
        # rchar and wchar count calls, the others pages that came from a disk and that were made to go there.
        return sum(int(counts[name]) for name in ("rchar", "wchar", "read_bytes", "write_bytes"))

    def signal(self, number: int) -> None:
        """Send it a signal, where it still lives."""
        if self.is_alive():
            try:
                os.kill(self.pid, number)
            except (ProcessLookupError, PermissionError):
                pass  # it ended just now, or is another user's: slurmstepd is root's


def end(
    processes: Sequence[Process], steps: Sequence[tuple[int, float]], *, meanwhile: Callable[[], None] = lambda: None
) -> None:
    """Send each signal of `steps` to those of `processes` that live, and wait so many seconds for them to end.

    Args:
        steps: (signal, seconds); signal 0 only waits.
        meanwhile: called about ten times a second.
    """
    for number, seconds in steps:
        for process in processes:
            process.signal(number)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and any(process.is_alive() for process in processes):
            meanwhile()
            time.sleep(0.1)


def program_of(words: Sequence[str]) -> str:
    """The name of what a command line runs: the program's own, or with Python that of the script or the module.

    The folders it lies in, its options and their values are no part of that.
    """
    if not words:
        return ""
    name = os.path.basename(words[0].lstrip("-").partition(":")[0])  # "-bash", "slurmstepd: [7.0]"
    if not re.fullmatch(r"(python|pypy)[0-9.]*", name):
        return name
    rest = iter(words[1:])
    for word in rest:
        if word in FLAGS_WITH_VALUES:
            next(rest, None)
        elif module := re.fullmatch(r"-[a-zA-Z]*m(.*)", word):
            return module[1] or next(rest, "")
        elif not word.startswith("-"):
            return os.path.basename(word)
        elif re.fullmatch(r"-[a-zA-Z]*c.*", word):
            return name
    return name


def is_launcher(words: Sequence[str]) -> bool:
    """Whether a command line is that of a launcher's process."""
    program = program_of(words)
    names = (*itertools.chain(*LAUNCHERS.values()), *filter(None, os.environ.get(VARIABLE, "").split(",")))
    return any(program == name or (program.startswith(f"{name}.") and "." in name) for name in names)


def command_of(pid: int) -> list[str]:
    """The words of a process' command line; none where it has ended, or belongs to the kernel."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []
    return words[:-1]


def launchers_of(pid: int) -> list[Process]:
    """The unbroken line of launchers above a rank, nearest first; a shell or session above them may end without
    harm, and one between them runs no more than the command that it was given.
    """
    launchers = []
    while (pid := parent(pid)) > 1:
        words = command_of(pid)
        if is_launcher(words):
            launchers.append(Process.of(pid))
        elif not _runs_one_command(words):
            break
    return launchers


def _runs_one_command(words: Sequence[str]) -> bool:
    return len(words) > 2 and program_of(words) in SHELLS and words[1].startswith("-") and words[1].endswith("c")


@dataclass(frozen=True)
class StartedBy:
    """Those that have started a rank. To be asked when it begins: one that is killed while its libraries load would be
    missed later.
    """

    pid: int
    """Of the rank."""
    launchers: list[Process]
    ssh_session: Process | None
    """The sshd above them; None where that was no ssh."""
    launchers_over_ssh: list[Process]
    """Those of this machine that opened this session, nearest first: pdsh and `deepspeed` on the first node."""

    @classmethod
    def now(cls) -> "StartedBy":
        launchers = launchers_of(os.getpid())
        above = parent(launchers[-1].pid) if launchers else 0
        while _runs_one_command(command_of(above)):
            above = parent(above)
        if not name_of(above).startswith("sshd"):
            return cls(os.getpid(), launchers, None, [])
        client = ssh_client()
        return cls(os.getpid(), launchers, Process.of(above), launchers_of(client) if client else [])


def name_of(pid: int) -> str:
    """Name of the program; empty where there is no such process."""
    try:
        return Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
    except OSError:
        return ""


def ssh_client() -> int | None:
    """Process id of the ssh in whose session this process is; None where that is another machine's."""
    client, client_port, server, server_port, *_ = [*os.environ.get("SSH_CONNECTION", "").split(), *[""] * 4]
    if not client or client != server:
        return None
    ports = [int(client_port), int(server_port)]
    for table in map(Path, ("/proc/net/tcp", "/proc/net/tcp6")):
        for line in table.read_text().splitlines()[1:] if table.is_file() else ():
            fields = line.split()
            if [int(address.rpartition(":")[2], 16) for address in fields[1:3]] == ports:
                return _owner_of_socket(fields[9])
    return None


def _owner_of_socket(inode: str) -> int | None:
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if any(os.readlink(file.path) == f"socket:[{inode}]" for file in os.scandir(f"/proc/{pid}/fd")):
                return int(pid)
        except OSError:
            pass  # it has ended, or is another user's
    return None


def descendants(pid: int) -> list[int]:
    """Children of a process and theirs, deepest first."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            children.setdefault(parent(int(name)), []).append(int(name))
    family = [pid]
    for member in family:
        family += children.get(member, [])
    return family[:0:-1]
