"""Messages of the watchdog: one JSON object a line, over sockets that never block, each proven by a token; and the
connections between `dsft launch` and its job.

The standard library's `multiprocessing.connection` waits for a peer that does not read and unpickles what it gets, and
asyncio's streams wait where a sidecar must end its rank. Here nothing waits, and a stranger on the port is not
believed: each line carries the HMAC-SHA256 of the job's token over the connection's random session, the direction, the
line's number and its text, so that nobody without the token can add, repeat, reorder or send back a line.

    client                                         server
    SESSION\\n                                      (32 random hexadecimal digits, accepted once)
    HMAC {"type": "hello", ...}\\n                  the first line that is proven makes the stranger a client
                                                   HMAC {"type": "heartbeat"}\\n
"""

import contextlib
import errno
import hmac
import json
import os
import re
import resource
import secrets
import selectors
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from dsft.units import in_columns

POLL_SECONDS = 0.5  # how often a sidecar looks at its rank; also the least time between two heartbeats of a rank
CONNECT_SECONDS = 20.0  # for a sidecar to reach the coordinator, at most
CONNECT_LAUNCHER_SECONDS = 5.0  # for a sidecar to reach `dsft launch`
STRANGER_SECONDS = 10.0  # for a connection to prove that it is of the job

LARGEST_BYTES = 1 << 20  # of a line, and of what waits to be sent
LARGEST_HELLO_BYTES = 1 << 12  # of all that is read from a stranger
MOST_STRANGERS = 256  # connections that have proven nothing yet; the oldest makes room
MOST_ACCEPTED = 256  # new connections taken in one go, so that a flood of them holds nothing else up


VARIABLE = "DSFT_LAUNCHER"
"""ADDRESS[,ADDRESS ...]:PORT:TOKEN of the launch, in the environment of its ranks. In the place of the token stands
@FILE where command lines carry the variable, which every user of a node can read."""
TOKEN_FOLDER = "~/.cache/dsft"
"""On each node: holds FILE-HOST of mode 0600 with the token, until the first sidecar there has read it."""

CONSEQUENCES = re.compile(
    r"connection (closed|reset|refused)|closed by peer|broken pipe|timed out waiting|socket ?timeout|nccl|"
    r"DistBackendError|DistNetworkError|gloo|remote process exited|unhandled system error",
    re.IGNORECASE,
)
"""In the last line of a traceback: how a rank notices that another one is gone."""


class Failure(StrEnum):
    ERROR = "error"  # a Python exception that nobody caught
    DIED = "died"
    STALLED = "stalled"  # no progress within the limit of its phase
    STOPPED = "stopped"  # held by SIGSTOP
    LAUNCHER_GONE = "launcher gone"
    LOST = "lost"  # no heartbeat of its node or sidecar


@dataclass(frozen=True)
class Report:  # of one rank's failure
    rank: int
    host: str
    failure: Failure
    text: str  # one sentence without its subject; for `Failure.ERROR` a traceback

    @property
    def last_line(self) -> str:
        """The last line that is not empty: of a traceback, the exception itself."""
        return next((line.strip() for line in reversed(self.text.splitlines()) if line.strip()), "")

    @property
    def is_consequence(self) -> bool:
        """Whether another rank's end may well have caused this."""
        if self.failure is Failure.ERROR:
            return bool(CONSEQUENCES.search(self.last_line))
        return self.failure is Failure.STALLED

    def sentence(self) -> str:
        """Name the rank, its host and what happened, in one line."""
        text = f": {self.last_line}" if self.failure is Failure.ERROR else f" {self.text}"
        return f"rank {self.rank} on {self.host}{text}"


def heartbeat_seconds(lost_timeout: float) -> float:
    """Return the time between two heartbeats of a sidecar or the coordinator."""
    return min(2.0, lost_timeout / 4)


class Poller(selectors.EpollSelector):
    """Sockets of which the readable ones are found in one call, whatever their number; may lie in another Poller, and
    takes whatever has a `fileno`. It keeps its one descriptor from the start, and so needs none of a full table.
    """

    def add(self, source: Any) -> None:
        if isinstance(source, Connection):
            if source.closed:
                return
            source.poller = self
        self.register(source, selectors.EVENT_READ)

    def remove(self, source: Any) -> None:
        self.unregister(source)
        if isinstance(source, Connection):
            source.poller = None

    def ready(self, seconds: float = 0.0) -> list[Any]:
        """Those that can be read, after waiting so long for the first."""
        return [key.fileobj for key, _ in self.select(timeout=seconds)]

    def count_silence_from(self, now: float) -> None:
        """This process was stopped, perhaps with the others: what they send next counts."""
        for key in self.get_map().values():
            if isinstance(key.fileobj, Connection):
                key.fileobj.last_heard = now
            elif isinstance(key.fileobj, Poller):
                key.fileobj.count_silence_from(now)

    def close(self) -> None:
        for key in list(self.get_map().values()):
            self.remove(key.fileobj)
        super().close()


class Connection:
    """One end of a socket. `closed` is set once the other side is gone or breaks the protocol; `last_heard` is the time
    (monotonic) of its last bytes.

    Args:
        token: proves every line; None for a pair of sockets: of a rank and its sidecar, or in rank 0's.
        session: the client's; None on the server's side, where it comes with the first line.
    """

    def __init__(self, connection: socket.socket, token: str | None = None, session: str | None = None):
        connection.setblocking(False)
        self.connection, self.session, self.closed = connection, session, False
        self.last_heard = time.monotonic()
        self.poller: Poller | None = None  # that looks at it
        self.largest_bytes = LARGEST_BYTES
        self._token = token.encode() if token is not None else None
        self._directions = (b">", b"<") if session else (b"<", b">")  # of what is sent and of what is read
        self._sent = self._read = 0
        self._received, self._unsent = b"", f"{session}\n".encode() if session else b""

    def fileno(self) -> int:
        return self.connection.fileno()

    def send(self, kind: str, **fields: Any) -> None:
        """Send now what the socket takes, and the rest with the next messages."""
        if self.closed:
            return
        text = json.dumps({"type": kind, **fields}).encode()
        self._unsent += self._proof(self._directions[0], self._sent, text) + text + b"\n"
        self._sent += 1
        try:
            while self._unsent:
                self._unsent = self._unsent[self.connection.send(self._unsent) :]
        except BlockingIOError:
            if len(self._unsent) > LARGEST_BYTES:  # the other side has not read for long
                self.close()
        except OSError:
            self._receive()  # its last words
            self.close()

    def _proof(self, direction: bytes, number: int, text: bytes) -> bytes:
        if self._token is None:
            return b""
        signed = b"%s%s%d:%s" % (self.session.encode(), direction, number, text)
        return hmac.digest(self._token, signed, "sha256").hex().encode() + b" "

    def read(self) -> Iterator[dict[str, Any]]:
        """Give the messages that have arrived complete; what is not taken stays for the next call."""
        if not self.closed:
            self._receive()
        while b"\n" in self._received:
            line, _, self._received = self._received.partition(b"\n")
            if self._token is not None and self.session is None:
                if not re.fullmatch(rb"[0-9a-f]{32}", line):
                    self._break()
                    return
                self.session = line.decode()
                continue
            text, message = line if self._token is None else line.partition(b" ")[2], None
            if hmac.compare_digest(self._proof(self._directions[1], self._read, text) + text, line):
                self._read += 1
                with contextlib.suppress(ValueError, RecursionError):
                    message = json.loads(text)
            if not isinstance(message, dict):  # not proven, or no message
                self._break()
                return
            yield message

    def _receive(self) -> None:
        try:
            while len(self._received) < self.largest_bytes:
                piece = self.connection.recv(1 << 16)
                if not piece:
                    self.close()
                    return
                self._received += piece
                self.last_heard = time.monotonic()
            if b"\n" not in self._received:
                self._break()  # no message is that long
        except BlockingIOError:
            pass
        except OSError:
            self.close()

    def _break(self) -> None:
        self._received = b""
        self.close()

    def close(self) -> None:
        """Hang up; what has been received stays to be read."""
        self.closed = True
        if self.poller:
            self.poller.remove(self)
        self.connection.close()


class Server:
    """Accepts connections whose first message is proven by `token`. Others get STRANGER_SECONDS and MOST_STRANGERS
    places: no number of them ends it.
    """

    def __init__(self, listener: socket.socket, token: str):
        listener.setblocking(False)
        self.listener, self.token = listener, token
        self.strangers: dict[Connection, float] = {}  # connection -> when it is closed, the oldest first
        self.sessions: set[str] = set()  # those that were accepted, of which none comes twice
        self.poller = Poller()
        self.poller.add(listener)
        self._resume_at: float | None = None

    def accept(self) -> Iterator[tuple[Connection, dict[str, Any]]]:
        """Give each new connection that has proven its first message, with that; further ones may be there already."""
        now = time.monotonic()
        if self._resume_at is not None and now >= self._resume_at:
            self._resume_at = None
            self.poller.add(self.listener)
        for source in self.poller.ready():
            if source is not self.listener:
                if source in self.strangers:  # its place may have been taken in this pass
                    yield from self._greet(source)
                continue
            for _ in range(MOST_ACCEPTED):
                try:
                    connection = Connection(self.listener.accept()[0], self.token)
                except OSError as error:
                    if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                        for stranger in list(self.strangers):
                            self._refuse(stranger)
                        self.poller.remove(self.listener)  # it would be ready without end
                        self._resume_at = now + 1.0
                    break
                connection.largest_bytes = LARGEST_HELLO_BYTES
                self.strangers[connection] = now + STRANGER_SECONDS
                self.poller.add(connection)
                yield from self._greet(connection)  # it mostly speaks at once
                while len(self.strangers) > MOST_STRANGERS:
                    self._refuse(next(iter(self.strangers)))
        for connection in [each for each, until in self.strangers.items() if now >= until]:
            self._refuse(connection)

    def _greet(self, connection: Connection) -> Iterator[tuple[Connection, dict[str, Any]]]:
        message = next(connection.read(), None)
        if message is None and not connection.closed:
            return  # not yet
        if message is None or message.get("type") != "hello" or connection.session in self.sessions:
            self._refuse(connection)
            return
        self.sessions.add(connection.session)
        del self.strangers[connection]
        if not connection.closed:
            self.poller.remove(connection)
        connection.largest_bytes = LARGEST_BYTES
        yield connection, message

    def _refuse(self, connection: Connection) -> None:
        del self.strangers[connection]
        connection.close()

    def close(self) -> None:
        for source in (self.poller, self.listener, *self.strangers):
            source.close()


def listen() -> socket.socket:
    """Open a free port that other machines reach by IPv4 and, where there is IPv6, by that."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("::", 0), family=socket.AF_INET6, backlog=4096, dualstack_ipv6=True)
    return socket.create_server(("", 0), backlog=4096)


def connect(address: tuple[str, int], token: str, *, seconds: float = CONNECT_SECONDS) -> Connection:
    """Return a connection to (host, port). Raises OSError: nobody answers in time."""
    connection = socket.create_connection(address, timeout=seconds)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Connection(connection, token, secrets.token_hex(16))


def say(line: str) -> None:
    """Write a line to standard error, also inside a signal's handler, where `print` may not be called, and where the
    launcher that would show it is gone.
    """
    with contextlib.suppress(OSError):
        os.write(2, f"{in_columns(f'dsft: {line}', is_terminal=os.isatty(2))}\n".encode(errors="replace"))


def raise_file_limit() -> None:
    """Let this process have as many open files as it may: a connection is one, and the usual soft limit is 1024."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def connect_to_launcher(rank: int, host: str) -> Connection | None:
    """Connect a sidecar with the `dsft launch` that started this job; None without one, or where it cannot be reached.
    Raises ConnectionRefusedError where its machine answers, but nobody listens there any more: the launch is gone.
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
    """In `dsft launch`: the connections from its job, one from each node, made before the ranks meet. The death of
    either end ends the job, and the launch learns how the job went. After the rendezvous, the coordinator speaks for
    all of them through rank 0's connection.
    """

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
