"""Messages of the watchdog: one JSON object a line, over sockets that never block.

The standard library's `multiprocessing.connection` waits for a peer that does not read and unpickles what it gets.
Here a rank or a sidecar must never wait, and a stranger on the port must not be believed.
"""

import json
import selectors
import socket
from collections.abc import Iterable, Iterator
from typing import Any

from dsft.watchdog.deadlines import CONNECT_SECONDS

LARGEST_BYTES = 1 << 20
"""Of a line, and of what waits to be sent."""


class Connection:
    """One end of a socket. `closed` is set once the other side is gone or breaks the protocol."""

    def __init__(self, connection: socket.socket):
        connection.setblocking(False)
        self.connection = connection
        self.closed = False
        self._received, self._unsent = b"", b""

    def fileno(self) -> int:
        return self.connection.fileno()

    def send(self, kind: str, **fields: Any) -> None:
        """Send now what the socket takes, and the rest with the next messages."""
        self._unsent += json.dumps({"type": kind, **fields}).encode() + b"\n"
        try:
            while self._unsent and not self.closed:
                self._unsent = self._unsent[self.connection.send(self._unsent) :]
        except BlockingIOError:
            self.closed = len(self._unsent) > LARGEST_BYTES  # the other side has not read for long
        except OSError:
            self.closed = True

    def read(self) -> Iterator[dict[str, Any]]:
        """Give the messages that have arrived complete; what is not taken stays for the next call."""
        self._receive()
        while b"\n" in self._received:
            line, _, self._received = self._received.partition(b"\n")
            try:
                message = json.loads(line)
            except ValueError:
                message = None
            if not isinstance(message, dict):
                self.closed, self._received = True, b""
                return
            yield message

    def _receive(self) -> None:
        try:
            while len(self._received) < LARGEST_BYTES:
                piece = self.connection.recv(1 << 16)
                if not piece:
                    self.closed = True
                    return
                self._received += piece
            self.closed = True  # no message is that long
        except BlockingIOError:
            pass
        except OSError:
            self.closed = True

    def close(self) -> None:
        self.closed = True
        self.connection.close()


class Server:
    """Accepts connections whose first message carries `token`, and closes all others."""

    def __init__(self, listener: socket.socket, token: str):
        listener.setblocking(False)
        self.listener, self.token = listener, token
        self.strangers: list[Connection] = []

    def accept(self) -> Iterator[tuple[Connection, dict[str, Any]]]:
        """Give each new connection that has shown the token, with its first message."""
        try:
            while True:
                self.strangers.append(Connection(self.listener.accept()[0]))
        except OSError:
            pass  # nobody else waits
        for connection in list(self.strangers):
            message = next(connection.read(), None)
            if message is None and not connection.closed:
                continue
            self.strangers.remove(connection)
            if message is not None and message.get("token") == self.token:
                yield connection, message
            else:
                connection.close()

    def close(self) -> None:
        for source in (self.listener, *self.strangers):
            source.close()


def listen() -> socket.socket:
    """Open a free port that other machines reach by IPv4 and, where there is IPv6, by that."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("::", 0), family=socket.AF_INET6, backlog=1024, dualstack_ipv6=True)
    return socket.create_server(("", 0), backlog=1024)


def connect(address: str, port: int, *, seconds: float = CONNECT_SECONDS) -> Connection:
    """Return a connection.

    Raises:
        OSError: where nobody answers in time.
    """
    connection = socket.create_connection((address, port), timeout=seconds)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Connection(connection)


def wait_for_messages(sources: Iterable[Connection | Server | None], seconds: float) -> None:
    """Wait until something can be read from one of `sources`, or the time is over."""
    with selectors.DefaultSelector() as selector:
        for source in sources:
            parts = (source.listener, *source.strangers) if isinstance(source, Server) else (source,)
            for part in parts:
                if part is not None and not getattr(part, "closed", False):
                    selector.register(part, selectors.EVENT_READ)
        selector.select(timeout=seconds)
