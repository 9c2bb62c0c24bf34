"""The connection between `dsft launch` and the hub: either end's death ends the job, and the launch learns how it
went.
"""

import os
import secrets

from dsft.watchdog.messages import Lines, connect, listen

VARIABLE = "DSFT_LIFELINE"
REACH_SECONDS = 5.0


def reach_front() -> Lines | None:
    """In the hub: the connection to the `dsft launch` that started this job; None without one, or where it cannot be
    reached.
    """
    value = os.environ.get(VARIABLE)
    if not value:
        return None
    address, port, token = value.rsplit(":", 2)
    lines = connect(address, int(port), seconds=REACH_SECONDS)
    if lines:
        lines.send(token=token)
    return lines


class Lifeline:
    """In `dsft launch`: waits for the hub of its job; `failed` and `done` hold what that said."""

    def __init__(self):
        self.listener = listen()
        self.listener.setblocking(False)
        self.token = secrets.token_hex(16)
        self.hub: Lines | None = None
        self._strangers: list[Lines] = []
        self.failed: str | None = None
        self.done: int | None = None

    def variable(self, address: str) -> dict[str, str]:
        """For the environment of the ranks. Args: `address` where rank 0's node reaches this machine."""
        return {VARIABLE: f"{address}:{self.listener.getsockname()[1]}:{self.token}"}

    def read(self) -> None:
        try:
            self._strangers.append(Lines(self.listener.accept()[0]))
        except OSError:
            pass
        for lines in list(self._strangers):
            for message in lines.read():
                if message.get("token") == self.token:
                    self.hub = lines
                    self._strangers.remove(lines)
                    break
        for message in self.hub.read() if self.hub else ():
            self.failed = message.get("failed", self.failed)
            self.done = message.get("done", self.done)

    def tell(self, **message) -> None:
        if self.hub:
            self.hub.send(**message)

    def close(self) -> None:
        for lines in filter(None, (self.hub, *self._strangers)):
            lines.close()
        self.listener.close()
