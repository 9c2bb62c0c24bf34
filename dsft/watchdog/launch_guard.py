"""The process beside `dsft launch`: where that is killed, it ends the launcher, which would stay behind.

The ranks end by themselves (`launcher_link.py`), but a launcher also waits for nodes, or for an ssh.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from dsft.watchdog.deadlines import END_LAUNCHER_SECONDS

ROOT = Path(__file__).resolve().parent.parent.parent
GUARD = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from dsft.watchdog.launch_guard import main; main()"
DONE = b"done"


class LaunchGuard:
    """Args: `group`: the process group of the launcher."""

    def __init__(self, group: int):
        command = [sys.executable, "-S", "-E", "-c", GUARD, str(group)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
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
    group, deadline = int(sys.argv[1]), time.monotonic() + END_LAUNCHER_SECONDS
    signal_group(group, signal.SIGTERM)
    while time.monotonic() < deadline and signal_group(group, 0):
        time.sleep(0.1)
    signal_group(group, signal.SIGKILL)
