"""Processes of this machine: who started a rank, whether it lives, its end, and the guard beside `dsft launch`."""

import contextlib
import fcntl
import itertools
import os
import re
import select
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil

LAUNCHERS = {
    "deepspeed": ("deepspeed", "deepspeed.pt", "ds", "deepspeed.launcher", "dsft.launch.launchers", "pdsh"),
    "torchrun": ("torchrun", "torch.distributed"),
    "accelerate": ("accelerate", "accelerate-launch", "accelerate.commands"),
    "srun": ("srun", "slurmstepd"),
    "mpirun": ("mpirun", "mpiexec", "orterun", "prterun", "orted", "prted", "mpiexec.hydra", "hydra_pmi_proxy"),
    "dsft": ("dsft", "dsft.cli.main"),
}
"""Launcher -> its programs, and modules or packages that `python -m` runs, of which some stand above each rank."""
VARIABLE = "DSFT_LAUNCHER_PROCESSES"
"""The same of the launcher that `dsft launch` has started (launch/launchers.py), with commas between."""
SHELLS = ("sh", "bash", "dash", "zsh", "ksh", "fish", "csh", "tcsh")
FLAGS_WITH_VALUES = ("-W", "-X", "--check-hash-based-pycs")  # of Python's interpreter
PIDFD_GET_INFO, PIDFD_INFO_EXIT = 0xC040FF0B, 1 << 3
"""Of include/uapi/linux/pidfd.h, which Python does not name: _IOWR(0xFF, 11, the 64 bytes of struct pidfd_info), whose
first field is a mask and whose last is the exit status."""


def boot_id() -> str:
    """What tells this start of this machine from others, and from those of other machines."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()


def _stat(pid: int) -> list[str] | None:
    """Fields of /proc/PID/stat from the third (state) on; None where there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None


def start_time(pid: int) -> str | None:
    """When the process started, in clock ticks; None when it has ended, also where it still is a zombie."""
    fields = _stat(pid)
    # psutil's create_time moves with the system's clock, and would not identify a process to another one.
    return fields[19] if fields and fields[0] not in ("Z", "X") else None


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

    def exit_code(self, pidfd: int | None = None) -> int | None:
        """Its exit code, or minus the signal that killed it; None before its end, and where nobody knows it any more.

        A pidfd that was opened while it lived keeps the code after the parent has reaped the process, since Linux 6.15;
        an older kernel shows the code in /proc alone, until then.
        """
        fields = _stat(self.pid)
        if fields and fields[0] == "Z" and fields[19] == self.started:
            return os.waitstatus_to_exitcode(int(fields[49]))
        if pidfd is None:
            return None
        info = bytearray(struct.pack("Q56x", PIDFD_INFO_EXIT))
        try:
            fcntl.ioctl(pidfd, PIDFD_GET_INFO, info)
        except OSError:
            return None  # an older kernel: before 6.15 a reaped process has no information, before 6.13 none has
        answered, status = struct.unpack("Q52xi", info)
        return os.waitstatus_to_exitcode(status) if answered & PIDFD_INFO_EXIT else None

    def is_stopped(self) -> bool:
        """Whether SIGSTOP holds it."""
        fields = _stat(self.pid)
        return fields is not None and fields[0] == "T"

    def moved_bytes(self) -> int:
        """Bytes that it has read and written so far, mapped files included; 0 where the system does not tell."""
        try:
            counts = psutil.Process(self.pid).io_counters()
        except (psutil.Error, OSError, AttributeError):  # on a kernel that does not count psutil has no such method
            return 0
        # The first two count calls, the others pages that came from a disk and that were made to go there.
        return counts.read_chars + counts.write_chars + counts.read_bytes + counts.write_bytes

    def signal(self, number: int) -> None:
        """Send it a signal, where it still lives."""
        if self.is_alive():
            # It ended just now, or is another user's: slurmstepd is root's.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, number)


def end(
    processes: Sequence[Process], steps: Sequence[tuple[int, float]], *, meanwhile: Callable[[], None] = lambda: None
) -> None:
    """Send each signal of `steps` to those of `processes` that live, and wait so many seconds for them to end, calling
    `meanwhile` about ten times a second. Signal 0 only waits.
    """
    for number, seconds in steps:
        for process in processes:
            process.signal(number)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and any(process.is_alive() for process in processes):
            meanwhile()
            time.sleep(0.1)


def descendants(pid: int) -> list[int]:
    """Children of a process and theirs, each before its parent."""
    children: dict[int, list[int]] = {}
    for other in psutil.pids():  # psutil's `children` raises where /proc hides processes of other users
        if fields := _stat(other):
            children.setdefault(int(fields[1]), []).append(other)
    family = [pid]
    for member in family:
        family += children.get(member, [])
    return family[:0:-1]


def program_of(words: Sequence[str]) -> str:
    """The name of what a command line runs, without folders and options: the program, with Python script or module."""
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


def program_at(pid: int) -> str:
    """`program_of` a process; empty where it has ended or this user may not ask."""
    with contextlib.suppress(psutil.Error, OSError):
        return program_of(psutil.Process(pid).cmdline())
    return ""


def is_dsft(pid: int) -> bool:
    """Whether a process is `dsft train`, `eval` or `launch`, as far as this user may know."""
    return program_at(pid) in LAUNCHERS["dsft"]


def is_launcher(words: Sequence[str]) -> bool:
    """Whether a command line is that of a launcher's process."""
    program = program_of(words)
    names = (*itertools.chain(*LAUNCHERS.values()), *filter(None, os.environ.get(VARIABLE, "").split(",")))
    return any(program == name or (program.startswith(f"{name}.") and "." in name) for name in names)


def launchers_of(pid: int) -> tuple[list[Process], psutil.Process | None]:
    """The unbroken line of launchers above a process, nearest first, and the process above them: a shell or session,
    which may end without harm. A shell between them runs just the command that it was given.
    """
    launchers = []
    with contextlib.suppress(psutil.Error, OSError):  # one of them has ended just now
        process = psutil.Process(pid)
        while (process := process.parent()) is not None:  # `parents` raises where /proc hides those of other users
            words = process.cmdline()
            if process.pid > 1 and is_launcher(words):
                launchers.append(Process.of(process.pid))
                continue
            is_shell = len(words) > 2 and program_of(words) in SHELLS
            if process.pid == 1 or not (is_shell and words[1].startswith("-") and words[1].endswith("c")):
                return launchers, process
    return launchers, None


@dataclass(frozen=True)
class StartedBy:
    """Those that have started a rank; asked when it begins, before one of them is killed while its libraries load."""

    pid: int  # of the rank
    launchers: list[Process]
    ssh_session: Process | None  # the sshd above them; None where that was no ssh
    launchers_over_ssh: list[Process]  # of this machine, that opened this session: pdsh and `deepspeed` on node 1

    @classmethod
    def now(cls) -> "StartedBy":
        launchers, above = launchers_of(os.getpid())
        if not launchers or above is None or not program_at(above.pid).startswith("sshd"):
            return cls(os.getpid(), launchers, None, [])
        client = None  # the ssh in whose session this process is, where that is one of this machine
        match os.environ.get("SSH_CONNECTION", "").split():
            case [client_address, client_port, server_address, server_port] if client_address == server_address:
                ports = (int(client_port), int(server_port))
                ends = [end for end in psutil.net_connections("tcp") if end.raddr]
                client = next((end.pid for end in ends if (end.laddr.port, end.raddr.port) == ports), None)
        return cls(os.getpid(), launchers, Process.of(above.pid), launchers_of(client)[0] if client else [])

    @property
    def programs(self) -> list[str]:
        """Names of the launchers' programs that live, nearest first."""
        return [*filter(None, (program_at(launcher.pid) for launcher in self.launchers))]


def command_of(code: str) -> list[str]:
    """The command of a Python that runs `code` of dsft.watchdog, with psutil and the standard library alone."""
    here, beside = Path(__file__).resolve().parents[2], Path(psutil.__file__).parents[1]
    paths = f"import os, sys; sys.path[:0] = {[str(here)]}; sys.path += {[str(beside)]}"
    return [sys.executable, "-S", "-E", "-c", f"{paths}; {code}"]


END_LAUNCHER_SECONDS = 10.0  # between SIGTERM and SIGKILL for a launcher, which may be ending other nodes
DONE = b"done"


class LaunchGuard:
    """A process beside `dsft launch` that ends the launcher where the launch is killed: the ranks end by themselves,
    but a launcher also waits for nodes, or for an ssh.

    Args: `group`: the process group of the launcher; `first_signal`: asks it to end, 0 waits for that; `words`: what
    it writes to standard error, where `dsft launch` reads that.
    """

    def __init__(self, group: int, first_signal: int, words: IO[bytes] | None = None):
        shown = [words.fileno()] if words else []
        command = command_of("from dsft.watchdog.processes import guard; guard()")
        command += map(str, [group, int(first_signal), *shown])
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, pass_fds=shown, start_new_session=True
        )

    def close(self) -> None:
        """The launcher has ended: there is nothing to guard."""
        self._process.communicate(DONE)


def signal_group(group: int, number: int) -> bool:
    """Send a signal to all processes of a group. Returns whether there is one."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def guard() -> None:
    """Run as a process of its own, with the group on the command line; the end of standard input is the launch's."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    if sys.stdin.buffer.read() == DONE:
        return
    group, first_signal, *shown = map(int, sys.argv[1:])
    deadline = time.monotonic() + END_LAUNCHER_SECONDS
    signal_group(group, first_signal)
    while time.monotonic() < deadline and signal_group(group, 0):
        ready, _, _ = select.select(shown, [], [], 0.1)
        if ready and (words := os.read(shown[0], 1 << 16)):
            with contextlib.suppress(OSError):  # nobody is there to be shown anything
                os.write(2, words)
        elif ready:
            shown = []  # all has been said
    signal_group(group, signal.SIGKILL)
