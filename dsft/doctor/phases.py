"""The examination on one node: `python -m dsft.doctor.phases facts|reach|measure`, the same through ssh and alone. The
ranks that a launcher has started call the same functions.

    facts    what this node is; afterwards it listens on its open ports, and its probe file stays, until the end
    reach    connects to the open ports of all other nodes, and looks at the run's files
    measure  this node's ranks of the smoke test, which report their progress (smoke.py)

Each reads a line of JSON, answers with a line of JSON that begins with MARK (login scripts may print too), and exits
when its input ends: the head closes it, or the connection is gone. Never imports torch; `measure` starts a process that
does.
"""

import contextlib
import errno
import glob
import hashlib
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from dsft.doctor.facts import NodeFacts, addresses_of, cache_folders, node_facts
from dsft.models.model_folder import CHECKPOINT
from dsft.runtime.disk import existing_parent
from dsft.runtime.launcher_env import outgoing_address, port_owner

MARK = "dsft-doctor:"
LIFE_SECONDS = 180  # a phase that is older exits, whatever the connection does
SLOWEST_LINK = 0.5e6  # bytes per second (4 Mbit/s) below which a link is broken for any training
CONNECT_SECONDS = 3.0  # a connection in a cluster takes milliseconds; a firewall that drops packets answers never
ROUND_TRIPS = 5
BLOCK_BYTES, BLOCK_TRIES = 128 * 1024, 3
"""Sent to measure a link: 0.3 s at SLOWEST_LINK. What a busy host delays once is tried again."""
TURNS, TURNS_SECONDS = 2, 8.0
"""Number of times that a slow link is measured again, and seconds after which none is: each time takes 3 s."""
BUSY_BYTES = 10 * SLOWEST_LINK
"""Bytes per second below which blocks of a host to itself show that it is busy; an idle one reaches a thousand times
as many.
"""
END_BYTES = 1024**2  # hashed of each end of a file: full files of hundreds of GB would take minutes
SEEN_SECONDS = 4.0
"""How long a file made on another node may take to show: network file systems keep what they know of a folder for
seconds.
"""


@dataclass(frozen=True, kw_only=True)
class Target:
    """An address that a node is to connect to."""

    kind: str  # "master": rank 0's port; "open": another node's open port, by its address; "name": the same by its name
    name: str  # of the node that should answer
    address: str
    port: int


@dataclass(frozen=True, kw_only=True)
class Connection(Target):
    """What came of it."""

    host: str = ""  # the host name that answered there; empty where none did
    error: str = ""  # why none did: timeout, refused, unresolved, closed, or the system's words
    seconds: float = 0.0  # of a small message one way
    clock_ahead: float = 0.0  # seconds by which the other node's clock is ahead
    bytes_per_second: float = 0.0  # of a block from there, of kind "open"; 0 where none was sent


@dataclass(frozen=True, kw_only=True)
class FileContent:
    """A file, folder or glob as one node sees it."""

    files: int
    bytes: int
    hash: str  # over names, sizes and the ends of each file


@dataclass(frozen=True, kw_only=True)
class Reached:
    """What one node reaches: other nodes, and the files of the run."""

    connections: list[Connection]
    names: dict[str, list[str]]
    """Addresses of the other nodes' names as this node resolves them; none where it does not."""
    outgoing: str  # this node's address on the way to the master; empty without a way
    contents: dict[str, FileContent | None]  # the run's data and models; None where nothing is there
    cached: dict[str, bool]  # whether each name on the hub is in this node's cache
    config: dict[str, str] | None
    """The keys of the run's configuration file with their values; None where there is no such file, or none was asked
    for."""
    sees_probe: bool | None  # whether the file that the first node has made shows here; None where it was not asked


def facts(
    held: ExitStack,
    *,
    slots: int | None,
    ranks: list[int] = (),
    master_port: int | None,
    output_dir: str,
    compiles: bool,
) -> NodeFacts:
    """What this node is. What it opens stays open as long as `held` does: a port, the master's (None: not tried), and a
    probe file in the run's output folder (empty: none).
    """
    folders = [output_dir] if output_dir else []
    gathered = node_facts(slots=slots, ranks=ranks, folders=folders, compiles=compiles)
    open_port, taken, probe, no_output = held.enter_context(listening()), "", "", ""
    if master_port:
        try:
            held.enter_context(listening(master_port))
        except OSError as error:
            taken = f"in use by {port_owner(master_port)}" if error.errno == errno.EADDRINUSE else str(error)
    if output_dir:
        # In the nearest folder above it that exists; the file goes with `held`.
        parent = existing_parent(Path(output_dir))
        try:
            file = held.enter_context(tempfile.NamedTemporaryFile(prefix=".dsft-doctor-", dir=parent))  # noqa: SIM115
            file.write(b"\0" * 65536)
            file.flush()
            os.fsync(file.fileno())
            probe = file.name
        except OSError as error:
            no_output = error.strerror or str(error)
    return replace(gathered, open_port=open_port, master_port_taken=taken, probe=probe, output_error=no_output)


def reach(
    held: ExitStack,
    *,
    targets: list[dict[str, Any]],
    names: list[str],
    master: str,
    sources: list[str],
    hub_names: list[str],
    config: str,
    probe: str,
) -> Reached:
    """What this node reaches.

    Args:
        targets: `Target`s to connect to.
        names: of the other nodes, to be resolved.
        master: address of rank 0's node.
        sources: files, folders and globs of the run.
        hub_names: models and data sets that may have to be downloaded.
        config: of the run, a YAML file; empty: none.
        probe: a file that the first node has made; empty: none.
    """
    with ThreadPoolExecutor(max_workers=max(1, len(names))) as pool:
        resolved = dict(zip(names, pool.map(addresses_of, names), strict=True))
    values = None
    if config:
        with suppress(OSError, UnicodeDecodeError, yaml.YAMLError):
            content = yaml.safe_load(Path(config).read_text(encoding="utf-8"))
            pairs = content.items() if isinstance(content, dict) else ()
            values = {str(key): str(value) for key, value in pairs if not str(key).endswith("_token")}
    hub, cached = Path(cache_folders()["hub"]), {}
    for name in hub_names:  # in whichever revision
        patterns = (f"{kind}--{name.replace('/', '--')}/snapshots/*/*" for kind in ("models", "datasets"))
        cached[name] = any(any(hub.glob(pattern)) for pattern in patterns)
    return Reached(
        connections=connect_all([Target(**target) for target in targets]),
        names=resolved,
        outgoing=outgoing_address(master) or "",
        contents={source: file_content(source) for source in sources},
        cached=cached,
        config=values,
        sees_probe=sees(probe) if probe else None,
    )


def measure(held: ExitStack, read_input: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Run this node's ranks of the smoke test, in a process that imports torch before the input comes. Its lines go to
    the head as they are.

    Returns:
        Exit code and last words of the process, also where it exited before the input came.
    """
    errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
    process = subprocess.Popen(
        [sys.executable, "-m", "dsft.doctor.smoke"],
        stdin=subprocess.PIPE,
        stderr=errors,
        text=True,
        start_new_session=True,
    )

    def kill() -> None:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # its ranks too

    def pass_on() -> None:
        values = read_input()
        with suppress(BrokenPipeError):  # its exit code and last words say why
            process.stdin.write(json.dumps(values) + "\n")
            process.stdin.flush()

    held.callback(kill)
    threading.Thread(target=pass_on, daemon=True).start()
    code = process.wait()
    errors.seek(0)
    return {"code": code, "last_words": errors.read()[-2000:] or f"exit code {code}"}


def answer(phase: str, held: ExitStack, read_input: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """{"answer"} of a phase as JSON, or {"failed"}, which becomes a finding."""
    try:
        if phase == "measure":
            return {"answer": measure(held, read_input)}
        return {"answer": asdict({"facts": facts, "reach": reach}[phase](held, **read_input()))}
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {error}"}


def say(**content: Any) -> None:
    """One line for the head: {"answer"}, {"failed"}, or an {"event"} of the smoke test's ranks. One write, so that
    lines of several processes do not mix.
    """
    os.write(1, (MARK + json.dumps(content) + "\n").encode())


def main() -> None:
    held, inputs = ExitStack(), queue.Queue()

    def end(*signal_and_frame: Any) -> None:
        held.close()
        os._exit(0)

    def read() -> None:
        for line in sys.stdin:
            inputs.put(json.loads(line))
        end()

    signal.signal(signal.SIGALRM, end)
    signal.alarm(LIFE_SECONDS)
    threading.Thread(target=read, daemon=True).start()
    say(**answer(sys.argv[1], held, inputs.get))
    threading.Event().wait()  # until the input ends


@contextlib.contextmanager
def listening(port: int = 0) -> Iterator[int]:
    """Listens on a port (0: any free one, which it gives) of all addresses; sends its host's name, then for each byte
    that comes its clock, or for a "b" a block of BLOCK_BYTES.

    Raises:
        OSError: EADDRINUSE where something else listens there.
    """

    def serve(caller: socket.socket) -> None:
        with caller, suppress(OSError):
            caller.settimeout(CONNECT_SECONDS)
            caller.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            caller.sendall(f"{socket.gethostname()}\n".encode())
            while asked := caller.recv(1):
                caller.sendall(bytes(BLOCK_BYTES) if asked == b"b" else f"{time.time()}\n".encode())

    def accept() -> None:
        while server.fileno() >= 0:
            with suppress(OSError):
                threading.Thread(target=serve, args=server.accept()[:1], daemon=True).start()

    if socket.has_dualstack_ipv6():  # as torch's TCPStore listens
        server = socket.create_server(("::", port), backlog=64, family=socket.AF_INET6, dualstack_ipv6=True)
    else:
        server = socket.create_server(("", port), backlog=64)
    threading.Thread(target=accept, daemon=True).start()
    try:
        yield server.getsockname()[1]
    finally:
        with suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits in accept
        server.close()


def connect_all(targets: list[Target]) -> list[Connection]:
    """Try each target, all at once; those of which a block came slowly again, one by one, in turns with blocks of this
    host to itself: of a host that was busy each time, the rate is 0 (not known).
    """
    with ThreadPoolExecutor(max_workers=max(1, len(targets))) as pool:
        connections = list(pool.map(_connect, targets))
    until = time.monotonic() + TURNS_SECONDS
    for number, target in enumerate(targets):
        if not 0 < connections[number].bytes_per_second < SLOWEST_LINK or time.monotonic() > until:
            continue
        rate = 0.0
        with listening() as port:
            for _ in range(TURNS):
                itself = _connect(replace(target, address="127.0.0.1", port=port))
                again = _connect(target)
                if itself.bytes_per_second > BUSY_BYTES or again.bytes_per_second > SLOWEST_LINK:
                    rate = max(rate, again.bytes_per_second)
                if rate > SLOWEST_LINK:
                    break
        connections[number] = replace(connections[number], bytes_per_second=rate)
    return connections


def _connect(target: Target) -> Connection:
    """What one target answers, the fastest of few tries; one block is enough where the link is not very slow."""
    try:
        with socket.create_connection((target.address, target.port), timeout=CONNECT_SECONDS) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            lines = connection.makefile("rb")
            host = lines.readline().strip().decode(errors="replace")
            if not host:
                return Connection(**asdict(target), error="closed")
            trips = []
            for _ in range(ROUND_TRIPS):
                start, here = time.perf_counter(), time.time()
                connection.sendall(b"?")
                there = float(lines.readline() or "nan")
                seconds = time.perf_counter() - start
                trips.append((seconds, there - here - seconds / 2))
            seconds, ahead = min(trips)
            rate = 0.0
            for _ in range(BLOCK_TRIES if target.kind == "open" else 0):
                start = time.perf_counter()
                connection.sendall(b"b")
                got = len(lines.read(BLOCK_BYTES))
                rate = max(rate, got / (time.perf_counter() - start))
                if rate > SLOWEST_LINK:
                    break
            return Connection(
                **asdict(target), host=host, seconds=seconds / 2, clock_ahead=ahead, bytes_per_second=rate
            )
    except OSError as error:
        known = {socket.gaierror: "unresolved", TimeoutError: "timeout", ConnectionRefusedError: "refused"}
        return Connection(**asdict(target), error=known.get(type(error)) or error.strerror or str(error))


def file_content(source: str) -> FileContent | None:
    """Number of files, bytes and a hash of a file, folder or glob; None where nothing is there."""
    path = Path(source).expanduser()
    if path.is_dir():
        ignored = (".", f"{CHECKPOINT}-")
        files = sorted(
            file
            for file in path.rglob("*")
            if file.is_file() and not any(part.startswith(ignored) for part in file.relative_to(path).parts)
        )
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


if __name__ == "__main__":
    main()
