"""The connections between `dsft launch` and the sidecars of its job, one from each node, made before the ranks meet.

The death of either end ends the job, and the launch learns how the job went. Once the ranks have met, the coordinator
speaks for all of them through rank 0's connection.
"""

import os
import secrets
from typing import Any

from dsft.watchdog.deadlines import CONNECT_LAUNCHER_SECONDS
from dsft.watchdog.messages import Connection, Server, connect, listen, wait_for_messages

VARIABLE = "DSFT_LAUNCHER"
"""ADDRESS[,ADDRESS ...]:PORT:TOKEN of the launch, in the environment of its ranks."""


def connect_to_launcher(rank: int, host: str) -> Connection | None:
    """Connect a sidecar with the `dsft launch` that started this job; None without one, or where it cannot be reached.

    Raises:
        ConnectionRefusedError: its machine answers, but nobody listens there any more: the launch is gone.
    """
    if not (value := os.environ.get(VARIABLE)):
        return None
    addresses, port, token = value.rsplit(":", 2)
    errors: list[OSError] = []
    for address in addresses.split(","):
        try:
            connection = connect(address, int(port), seconds=CONNECT_LAUNCHER_SECONDS)
        except OSError as error:
            errors.append(error)
        else:
            connection.send("hello", token=token, rank=rank, host=host)
            return connection
    if all(isinstance(error, ConnectionRefusedError) for error in errors):
        raise errors[0]
    return None


class LauncherLink:
    """In `dsft launch`: the connections from its job."""

    def __init__(self):
        self.server = Server(listen(), secrets.token_hex(16))
        self.sidecars: dict[int, Connection] = {}
        """By rank: the first one of each node."""
        self.coordinator: Connection | None = None
        """Rank 0's connection, once the ranks have met."""
        self.is_ending = False
        self.failure: str | None = None
        """What failed first, once that is known."""
        self.exit_code: int | None = None
        """The largest of the ranks' own exit codes, once all have ended by themselves, or one before they met."""

    def variable(self, addresses: list[str]) -> dict[str, str]:
        """Return what the ranks need in their environment. Args: `addresses` where the nodes reach this machine."""
        port = self.server.listener.getsockname()[1]
        return {VARIABLE: f"{','.join(addresses)}:{port}:{self.server.token}"}

    def read(self, *, wait_seconds: float = 0.0) -> None:
        """Take the sidecars' messages, after waiting for some."""
        wait_for_messages([self.server, *self.sidecars.values()], wait_seconds)
        for connection, hello in self.server.accept():
            self.sidecars[hello["rank"]] = connection
            if self.is_ending:
                connection.send("end")
        for connection in self.sidecars.values():
            for message in connection.read():
                match message:
                    case {"type": "met"}:
                        self.coordinator = connection
                    case {"type": "failed", "cause": cause}:
                        self.failure = self.failure or cause
                    case {"type": "done", "exit_code": exit_code}:
                        self.exit_code = max(exit_code, self.exit_code or 0)

    @property
    def speaks(self) -> bool:
        """Whether a node of the job can still say how it goes."""
        return any(not connection.closed for connection in self.sidecars.values())

    def end_ranks(self) -> None:
        """Ask for the end of all ranks, also of those that come later."""
        self.is_ending = True
        self._tell("end")

    def signal_ranks(self, number: int) -> None:
        """Ask for a signal to all ranks."""
        self._tell("signal", number=number)

    def _tell(self, kind: str, **fields: Any) -> None:
        for connection in [self.coordinator] if self.coordinator else self.sidecars.values():
            connection.send(kind, **fields)

    def close(self) -> None:
        for connection in self.sidecars.values():
            connection.close()
        self.server.close()
