"""What a node reaches: other nodes on their ports, and the files of the run.

A listener answers with its host's name and clock, so that a wrong machine is noticed, and a wrong clock.
"""

import contextlib
import errno
import glob
import hashlib
import os
import socket
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import yaml

from dsft.doctor.facts import SLOWEST_LINK, Connection, FileContent, Target
from dsft.doctor.gather import cache_folders
from dsft.models.model_folder import CHECKPOINT
from dsft.runtime.disk import existing_parent
from dsft.runtime.launcher_env import port_owner

CONNECT_SECONDS = 3.0
"""A connection in a cluster takes milliseconds; a firewall that drops packets answers never."""
ROUND_TRIPS = 5
BLOCK_BYTES, BLOCK_TRIES = 128 * 1024, 3
"""Sent to measure a link: 0.3 s at `facts.SLOWEST_LINK`. What a busy host delays once is tried again."""
TURNS, TURNS_SECONDS = 2, 8.0
"""A link that seems slow is measured so often again, and none after so many seconds: a slow one takes 3 s each time."""
BUSY_BYTES = 10 * SLOWEST_LINK
"""Bytes per second below which blocks of a host to itself show that it is busy; an idle one reaches a thousand times
as many.
"""
END_BYTES = 1024**2
"""Hashed of each end of a file: full files of hundreds of GB would take minutes."""
SEEN_SECONDS = 4.0
"""How long a file made on another node may take to show: network file systems keep what they know of a folder for
seconds.
"""


class Listener:
    """Listens on a port (0: any free one) of all addresses until closed; sends its host's name, then for each byte that
    comes its clock, or for a "b" a block of BLOCK_BYTES.
    """

    def __init__(self, port: int = 0):
        """Raises OSError: EADDRINUSE where something else listens there."""
        if socket.has_dualstack_ipv6():  # as torch's TCPStore listens
            family = {"family": socket.AF_INET6, "dualstack_ipv6": True}
            self._socket = socket.create_server(("::", port), backlog=64, **family)
        else:
            self._socket = socket.create_server(("", port), backlog=64)
        self.port: int = self._socket.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while self._socket.fileno() >= 0:
            with contextlib.suppress(OSError):
                caller, _ = self._socket.accept()
                threading.Thread(target=self._serve, args=(caller,), daemon=True).start()

    def _serve(self, caller: socket.socket) -> None:
        with caller, contextlib.suppress(OSError):
            caller.settimeout(CONNECT_SECONDS)
            caller.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            caller.sendall(f"{socket.gethostname()}\n".encode())
            while asked := caller.recv(1):
                caller.sendall(bytes(BLOCK_BYTES) if asked == b"b" else f"{time.time()}\n".encode())

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits in accept
        self._socket.close()


def listen(port: int) -> tuple[Listener | None, str]:
    """(listener, "") or (None, why not: who has the port)."""
    try:
        return Listener(port), ""
    except OSError as error:
        return None, f"in use by {port_owner(port)}" if error.errno == errno.EADDRINUSE else str(error)


def connect_all(targets: list[dict[str, Any]]) -> list[Connection]:
    """Try each target (a `Target` as JSON), all at once; those of which a block came slowly again, one by one."""
    with ThreadPoolExecutor(max_workers=max(1, len(targets))) as pool:
        connections = list(pool.map(_connect, [Target(**target) for target in targets]))
    until = time.monotonic() + TURNS_SECONDS
    for number, seen in enumerate(connections):
        if 0 < seen.bytes_per_second < SLOWEST_LINK and time.monotonic() < until:
            rate = _rate_alone(Target(**targets[number]))
            connections[number] = replace(seen, bytes_per_second=rate)
    return connections


def _rate_alone(target: Target) -> float:
    """Bytes per second of blocks from there, measured in turns with blocks of this host to itself; 0 (not known) where
    it was busy each time.
    """
    listener, rate = Listener(), 0.0
    try:
        for _ in range(TURNS):
            itself = _connect(replace(target, address="127.0.0.1", port=listener.port))
            again = _connect(target)
            if itself.bytes_per_second > BUSY_BYTES or again.bytes_per_second > SLOWEST_LINK:
                rate = max(rate, again.bytes_per_second)
            if rate > SLOWEST_LINK:
                break
    finally:
        listener.close()
    return rate


def _connect(target: Target) -> Connection:
    try:
        with socket.create_connection((target.address, target.port), timeout=CONNECT_SECONDS) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            lines = connection.makefile("rb")
            host = lines.readline().strip().decode(errors="replace")
            if not host:
                return Connection(**asdict(target), error="closed")
            seconds, ahead = min(_round_trip(connection, lines) for _ in range(ROUND_TRIPS))
            rate = _block_rate(connection, lines) if target.kind == "open" else 0.0
            return Connection(
                **asdict(target), host=host, seconds=seconds / 2, clock_ahead=ahead, bytes_per_second=rate
            )
    except OSError as error:
        known = {socket.gaierror: "unresolved", TimeoutError: "timeout", ConnectionRefusedError: "refused"}
        return Connection(**asdict(target), error=known.get(type(error)) or error.strerror or str(error))


def _round_trip(connection: socket.socket, lines: Any) -> tuple[float, float]:
    """(seconds there and back, seconds by which the clock there is ahead)."""
    start, here = time.perf_counter(), time.time()
    connection.sendall(b"?")
    there = float(lines.readline() or "nan")
    seconds = time.perf_counter() - start
    return seconds, there - here - seconds / 2


def _block_rate(connection: socket.socket, lines: Any) -> float:
    """Bytes per second of a block, the fastest of few tries; one is enough where the link is not very slow."""
    rate = 0.0
    for _ in range(BLOCK_TRIES):
        start = time.perf_counter()
        connection.sendall(b"b")
        got = len(lines.read(BLOCK_BYTES))
        rate = max(rate, got / (time.perf_counter() - start))
        if rate > SLOWEST_LINK:
            break
    return rate


def file_content(source: str) -> FileContent | None:
    """Number of files, bytes and a hash of a file, folder or glob; None where nothing is there."""
    path = Path(source).expanduser()
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file() and not _is_ignored(file.relative_to(path)))
    else:
        files = sorted(Path(name) for name in {str(path), *glob.glob(str(path), recursive=True)})
        files = [file for file in files if file.is_file()]
    if not files:
        return None
    total, num_bytes = hashlib.sha256(), 0
    for file in files:
        size = file.stat().st_size
        num_bytes += size
        total.update(f"{file.relative_to(path) if path.is_dir() else file.name}\0{size}\0".encode())
        with file.open("rb") as opened:
            total.update(opened.read(END_BYTES))
            if size > END_BYTES:
                opened.seek(max(END_BYTES, size - END_BYTES))
                total.update(opened.read(END_BYTES))
    return FileContent(files=len(files), bytes=num_bytes, hash=total.hexdigest()[:12])


def _is_ignored(path: Path) -> bool:
    return any(part.startswith((".", f"{CHECKPOINT}-")) for part in path.parts)


def config_values(path: str) -> dict[str, str] | None:
    """Keys and values of this node's own YAML file, without tokens; None where it cannot be read."""
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return None
    values = content.items() if isinstance(content, dict) else ()
    return {str(key): str(value) for key, value in values if not str(key).endswith("_token")}


def make_probe(folder: str, held: contextlib.ExitStack) -> tuple[str, str]:
    """Write a file into `folder`, or the nearest folder above it that exists; it goes with `held`.

    Returns:
        (path, "") or ("", why nothing can be written there).
    """
    parent = existing_parent(Path(folder))
    try:
        probe = held.enter_context(tempfile.NamedTemporaryFile(prefix=".dsft-doctor-", dir=parent))  # noqa: SIM115
        probe.write(b"\0" * 65536)
        probe.flush()
        os.fsync(probe.fileno())
        return probe.name, ""
    except OSError as error:
        return "", error.strerror or str(error)


def sees(path: str) -> bool:
    """Whether this node sees the file that another has made, now or in a few seconds."""
    deadline = time.monotonic() + SEEN_SECONDS
    while True:
        try:
            os.listdir(os.path.dirname(path))  # makes NFS ask its server again
        except OSError:
            return False  # not even the folder
        if os.path.exists(path):
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)


def is_cached(name: str) -> bool:
    """Whether a hub repository (model or data set) is in this node's cache, in whichever revision."""
    folder, name = Path(cache_folders()["hub"]), name.replace("/", "--")
    return any(any(folder.glob(f"{kind}--{name}/snapshots/*/*")) for kind in ("models", "datasets"))
