"""Messages between guards: one JSON object a line, over a socket that never blocks."""

import json
import socket
from typing import Any

LARGEST_LINE_BYTES = 1 << 20


class Lines:
    """One connection. `closed` is set once the other side is gone or breaks the protocol."""

    def __init__(self, connection: socket.socket):
        connection.setblocking(False)
        self.connection = connection
        self.closed = False
        self._received, self._waiting = b"", b""

    def fileno(self) -> int:
        return self.connection.fileno()

    def send(self, **message: Any) -> None:
        """Send now what the socket takes, and the rest with the next messages."""
        self._waiting += json.dumps(message).encode() + b"\n"
        try:
            while self._waiting and not self.closed:
                self._waiting = self._waiting[self.connection.send(self._waiting) :]
        except BlockingIOError:
            self.closed = len(self._waiting) > LARGEST_LINE_BYTES  # the other side has not read for long
        except OSError:
            self.closed = True

    def read(self) -> list[dict[str, Any]]:
        """The messages that have come whole."""
        try:
            while len(self._received) < LARGEST_LINE_BYTES:
                piece = self.connection.recv(1 << 16)
                if not piece:
                    self.closed = True
                    break
                self._received += piece
            else:
                self.closed = True
        except BlockingIOError:
            pass
        except OSError:
            self.closed = True
        *whole, self._received = self._received.split(b"\n")
        try:
            return [json.loads(line) for line in whole if line]
        except ValueError:
            self.closed = True
            return []

    def close(self) -> None:
        self.closed = True
        self.connection.close()


def listen() -> socket.socket:
    """A socket that other machines reach by IPv4 and, where there is IPv6, by that; on a free port."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("::", 0), family=socket.AF_INET6, backlog=1024, dualstack_ipv6=True)
    return socket.create_server(("", 0), backlog=1024)


def connect(address: str, port: int, *, seconds: float) -> Lines | None:
    """A connection, or None where nobody answers in time."""
    try:
        connection = socket.create_connection((address, port), timeout=seconds)
    except OSError:
        return None
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Lines(connection)
