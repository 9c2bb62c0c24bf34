"""The connections between `dsft launch` and the sidecars of its job, one from each node, made before the ranks meet.

The death of either end ends the job, and the launch learns how the job went. After the rendezvous, the coordinator
speaks for all of them through rank 0's connection.

A process beside the launch, its guard, ends the launcher where the launch is killed: the ranks end by themselves, but a
launcher also waits for nodes, or for an ssh.
"""

import contextlib
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Any

from dsft.watchdog.messages import Connection, Poller, Server, connect, listen, raise_file_limit

CONNECT_LAUNCHER_SECONDS = 5.0  # for a sidecar to reach `dsft launch`
END_LAUNCHER_SECONDS = 10.0  # between SIGTERM and SIGKILL for a launcher, which may be ending other nodes
VARIABLE = "DSFT_LAUNCHER"
"""ADDRESS[,ADDRESS ...]:PORT:TOKEN of the launch, in the environment of its ranks. In the place of the token stands
@FILE where command lines carry the variable, which every user of a node can read."""
TOKEN_FOLDER = "~/.cache/dsft"
"""On each node: holds FILE-HOST of mode 0600 with the token, until the first sidecar there has read it."""


def connect_to_launcher(rank: int, host: str) -> Connection | None:
    """Connect a sidecar with the `dsft launch` that started this job; None without one, or where it cannot be reached.

    Raises:
        ConnectionRefusedError: its machine answers, but nobody listens there any more: the launch is gone.
    """
    if not (value := os.environ.get(VARIABLE)):
        return None
    addresses, port, token = value.rsplit(":", 2)
    if token.startswith("@"):
        file = Path(TOKEN_FOLDER).expanduser() / f"{token[1:]}-{socket.gethostname()}"
        try:
            with file.open(errors="replace") as opened:
                facts, token = os.fstat(opened.fileno()), opened.read().strip()
            file.unlink()
        except OSError:
            return None
        if facts.st_uid != os.getuid() or facts.st_mode & 0o077 or not token:  # others may have written or read it
            return None
    errors: list[OSError] = []
    for address in addresses.split(","):
        try:
            connection = connect((address, int(port)), token, seconds=CONNECT_LAUNCHER_SECONDS)
        except OSError as error:
            errors.append(error)
        else:
            connection.send("hello", rank=rank, host=host)
            return connection
    if all(isinstance(error, ConnectionRefusedError) for error in errors):
        raise errors[0]
    return None


class LauncherLink:
    """In `dsft launch`: the connections from its job."""

    def __init__(self):
        raise_file_limit()
        self.server = Server(listen(), secrets.token_hex(16))
        self.poller = Poller()
        self.poller.add(self.server.poller)
        self.sidecars: dict[int, Connection] = {}  # by rank: the first one of each node
        self.coordinator: Connection | None = None  # rank 0's connection, after the rendezvous
        self.is_ending = False
        self.failure: str | None = None  # what failed first, once that is known
        self.lost: list[str] = []  # host names of the nodes that gave no heartbeat then
        self.exit_code: int | None = None
        """The largest of the ranks' own exit codes, once all have ended by themselves, or one before they met."""

    def variable(self, addresses: list[str], *, token_file: str | None = None) -> dict[str, str]:
        """Return what the ranks need in their environment: the addresses at which the nodes reach this machine, and the
        token, or the name under which they have it.
        """
        port = self.server.listener.getsockname()[1]
        token = f"@{token_file}" if token_file else self.server.token
        return {VARIABLE: f"{','.join(addresses)}:{port}:{token}"}

    def read(self, *, wait_seconds: float = 0.0) -> None:
        """Take the sidecars' messages, after waiting for some."""
        self.poller.ready(wait_seconds)
        for connection, hello in self.server.accept():
            before = self.sidecars.get(hello["rank"])
            if before and not before.closed:  # the place of a rank is taken once; a restart comes after its end
                connection.close()
                continue
            self.sidecars[hello["rank"]] = connection
            self.poller.add(connection)
            if self.is_ending:
                connection.send("end")
        for connection in self.sidecars.values():
            for message in connection.read():
                match message:
                    case {"type": "met"}:
                        self.coordinator = connection
                    case {"type": "failed", "cause": cause}:
                        self.failure = self.failure or cause
                        self.lost = self.lost or message.get("lost", [])
                    case {"type": "done", "exit_code": exit_code}:
                        self.exit_code = max(exit_code, self.exit_code or 0)

    @property
    def speaks(self) -> bool:
        """Whether a node of the job can still say how it goes."""
        return any(not connection.closed for connection in self.sidecars.values())

    def tell(self, kind: str, **fields: Any) -> None:
        """Ask all ranks to "end", also those that come later, or for a "signal"."""
        self.is_ending |= kind == "end"
        speaks_for_all = self.coordinator is not None and not self.coordinator.closed
        for connection in [self.coordinator] if speaks_for_all else self.sidecars.values():
            connection.send(kind, **fields)

    def close(self) -> None:
        for source in (self.poller, *self.sidecars.values(), self.server):
            source.close()


ROOT = Path(__file__).resolve().parent.parent.parent
GUARD = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from dsft.watchdog.launch_link import guard; guard()"
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
