"""The process beside `dsft launch`: where that is killed, it ends the launcher, which would stay behind, and shows its
last words.

The ranks end by themselves (`launcher_link.py`), but a launcher also waits for nodes, or for an ssh.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

from dsft.watchdog.deadlines import END_LAUNCHER_SECONDS

ROOT = Path(__file__).resolve().parent.parent.parent
GUARD = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from dsft.watchdog.launch_guard import main; main()"
DONE = b"done"


class LaunchGuard:
    """Args: `group`: the process group of the launcher; `first_signal`: asks it to end, 0 waits for that; `words`: what
    it writes to standard error, where `dsft launch` reads that.
    """

    def __init__(self, group: int, first_signal: int, words: IO[bytes] | None = None):
        shown = [words.fileno()] if words else []
        command = [sys.executable, "-S", "-E", "-c", GUARD, *map(str, [group, int(first_signal), *shown])]
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


def main() -> None:
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
