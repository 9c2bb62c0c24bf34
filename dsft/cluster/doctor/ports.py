"""Listening and connecting, on a node: who reaches whom on which port. A listener answers with its host's name, so that
a wrong machine is noticed.
"""

import contextlib
import errno
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil

CONNECT_SECONDS = 3.0
"""A connection in a cluster takes milliseconds; a firewall that drops packets answers never."""
ROUND_TRIPS = 5


class Listener:
    """Listens on a port (0: any free one) of all addresses until closed, and tells each caller this host's name."""

    def __init__(self, port: int = 0):
        """Raises OSError: EADDRINUSE where something else listens there."""
        if socket.has_dualstack_ipv6():
            self._socket = socket.create_server(
                ("::", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=64
            )  # as torch's TCPStore listens
        else:
            self._socket = socket.create_server(("", port), backlog=64)
        self.port: int = self._socket.getsockname()[1]
        threading.Thread(target=self._answer, daemon=True).start()

    def _answer(self) -> None:
        name = socket.gethostname().encode()
        while True:
            try:
                caller, _ = self._socket.accept()
            except OSError:
                if self._socket.fileno() < 0:
                    return
                continue
            threading.Thread(target=_serve, args=(caller, name), daemon=True).start()

    def close(self) -> None:
        try:
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits in accept
        except OSError:
            pass
        self._socket.close()


def _serve(caller: socket.socket, name: bytes) -> None:
    """Say the name, then send back what comes."""
    with caller, contextlib.suppress(OSError):
        caller.settimeout(CONNECT_SECONDS)
        caller.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        caller.sendall(name + b"\n")
        while word := caller.recv(64):
            caller.sendall(word)


def listen(port: int) -> tuple[Listener | None, str]:
    """(listener, "") or (None, why not: who has the port)."""
    try:
        return Listener(port), ""
    except OSError as error:
        return None, f"in use by {_owner(port)}" if error.errno == errno.EADDRINUSE else str(error)


def _owner(port: int) -> str:
    """The process that listens there, as far as this user may know."""
    try:
        found = [
            one.pid
            for one in psutil.net_connections("inet")
            if one.status == psutil.CONN_LISTEN and one.laddr.port == port
        ]
        process = psutil.Process(found[0]) if found and found[0] else None
        return (
            f"process {process.pid} ({' '.join(process.cmdline())[:120]})" if process else "a process of another user"
        )
    except (psutil.Error, OSError):
        return "another process"


def connect_all(targets: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Try each target {"name", "address", "port"}, all at once. Adds "result": the host's name that answered, or "!"
    and why none did, and "seconds" of a message one way.
    """
    with ThreadPoolExecutor(max_workers=max(1, len(targets))) as pool:
        results = list(pool.map(_connect, targets))
    return [
        target | {"result": result, "seconds": seconds}
        for target, (result, seconds) in zip(targets, results, strict=True)
    ]


def _connect(target: dict[str, Any]) -> tuple[str, float]:
    try:
        with socket.create_connection((target["address"], target["port"]), timeout=CONNECT_SECONDS) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            name = connection.makefile("rb").readline().strip().decode(errors="replace")
            return name or "!closed", min(_round_trip(connection) for _ in range(ROUND_TRIPS)) / 2 if name else 0.0
    except socket.gaierror:
        return "!unresolved", 0.0
    except TimeoutError:
        return "!timeout", 0.0
    except ConnectionRefusedError:
        return "!refused", 0.0
    except OSError as error:
        return f"!{error.strerror or error}", 0.0


def _round_trip(connection: socket.socket) -> float:
    start = time.perf_counter()
    connection.sendall(b"?")
    connection.recv(64)
    return time.perf_counter() - start


def outgoing_address(towards: str) -> str:
    """This node's address on the way to `towards` (no packet is sent); empty without a way."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in towards else socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((towards, 9))
            return probe.getsockname()[0]
    except OSError:
        return ""


def resolve(names: list[str]) -> dict[str, list[str]]:
    """Addresses of each name as this node sees them; none where it does not resolve."""

    def addresses(name: str) -> list[str]:
        try:
            return sorted({info[4][0] for info in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)})
        except OSError:
            return []

    with ThreadPoolExecutor(max_workers=max(1, len(names))) as pool:
        return dict(zip(names, pool.map(addresses, names), strict=True))
