"""The connection between `dsft launch` and the coordinator of its job.

The death of either end ends the job, and the launch learns how the job went.
"""

import os
import secrets

from dsft.watchdog.deadlines import CONNECT_LAUNCHER_SECONDS
from dsft.watchdog.messages import Connection, Server, connect, listen, wait_for_messages

VARIABLE = "DSFT_LAUNCHER"
"""ADDRESS:PORT:TOKEN of the launch, in the environment of its ranks."""


def connect_to_launcher() -> Connection | None:
    """Connect the coordinator with the `dsft launch` that started this job; None without one, or where it cannot be
    reached.
    """
    if not (value := os.environ.get(VARIABLE)):
        return None
    address, port, token = value.rsplit(":", 2)
    connection = connect(address, int(port), seconds=CONNECT_LAUNCHER_SECONDS)
    if connection:
        connection.send("hello", token=token)
    return connection


class LauncherLink:
    """In `dsft launch`: waits for the coordinator of its job."""

    def __init__(self):
        self.server = Server(listen(), secrets.token_hex(16))
        self.coordinator: Connection | None = None
        self.failure: str | None = None
        """What failed first, once that is known."""
        self.exit_code: int | None = None
        """The largest of the ranks' own exit codes, once all have ended by themselves."""

    def variable(self, address: str) -> dict[str, str]:
        """Return what the ranks need in their environment. Args: `address` where rank 0's node reaches this machine."""
        return {VARIABLE: f"{address}:{self.server.listener.getsockname()[1]}:{self.server.token}"}

    def read(self, *, wait_seconds: float = 0.0) -> None:
        """Take the coordinator's messages, after waiting for some."""
        wait_for_messages([self.server, self.coordinator], wait_seconds)
        for connection, _ in self.server.accept():
            self.coordinator = connection
        for message in self.coordinator.read() if self.coordinator else ():
            match message:
                case {"type": "failed", "cause": cause}:
                    self.failure = cause
                case {"type": "done", "exit_code": exit_code}:
                    self.exit_code = exit_code

    def end_ranks(self, reason: str) -> None:
        """Ask for the end of all ranks."""
        if self.coordinator:
            self.coordinator.send("end", reason=reason)

    def signal_ranks(self, number: int) -> None:
        """Ask for a signal to all ranks."""
        if self.coordinator:
            self.coordinator.send("signal", number=number)

    def close(self) -> None:
        if self.coordinator:
            self.coordinator.close()
        self.server.close()
