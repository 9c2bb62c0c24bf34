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
import dataclasses
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
from collections.abc import Callable
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
LIFE_SECONDS = 180
"""A phase that is older exits, whatever the connection does."""
SLOWEST_LINK = 0.5e6
"""Bytes per second (4 Mbit/s) below which a link is broken for any training."""
CONNECT_SECONDS = 3.0
"""A connection in a cluster takes milliseconds; a firewall that drops packets answers never."""
ROUND_TRIPS = 5
BLOCK_BYTES, BLOCK_TRIES = 128 * 1024, 3
"""Sent to measure a link: 0.3 s at SLOWEST_LINK. What a busy host delays once is tried again."""
TURNS, TURNS_SECONDS = 2, 8.0
"""Number of times that a slow link is measured again, and seconds after which none is: each time takes 3 s."""
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


@dataclass(frozen=True, kw_only=True)
class Target:
    """An address that a node is to connect to."""

    kind: str
    """"master": rank 0's port; "open": another node's open port, by its address; "name": the same by its name."""
    name: str
    """Of the node that should answer."""
    address: str
    port: int


@dataclass(frozen=True, kw_only=True)
class Connection(Target):
    """What came of it."""

    host: str = ""
    """The host name that answered there; empty where none did."""
    error: str = ""
    """Why none did: timeout, refused, unresolved, closed, or the system's words."""
    seconds: float = 0.0
    """Of a small message one way."""
    clock_ahead: float = 0.0
    """Seconds by which the other node's clock is ahead."""
    bytes_per_second: float = 0.0
    """Of a block from there, of kind "open"; 0 where none was sent."""


@dataclass(frozen=True, kw_only=True)
class FileContent:
    """A file, folder or glob as one node sees it."""

    files: int
    bytes: int
    hash: str
    """Over names, sizes and the ends of each file."""


@dataclass(frozen=True, kw_only=True)
class Reached:
    """What one node reaches: other nodes, and the files of the run."""

    connections: list[Connection]
    names: dict[str, list[str]]
    """Addresses of the other nodes' names as this node resolves them; none where it does not."""
    outgoing: str
    """This node's address on the way to the master; empty without a way."""
    contents: dict[str, FileContent | None]
    """The run's data and models; None where nothing is there."""
    cached: dict[str, bool]
    """Whether each name on the hub is in this node's cache."""
    config: dict[str, str] | None
    """The keys of the run's configuration file with their values; None where there is no such file, or none was asked
    for."""
    sees_probe: bool | None
    """Whether the file that the first node has made shows here; None where it was not asked."""

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Reached":
        """Raises: KeyError, TypeError: of another version of dsft."""
        contents = values["contents"].items()
        typed = {
            "connections": [Connection(**connection) for connection in values["connections"]],
            "contents": {source: content and FileContent(**content) for source, content in contents},
        }
        return cls(**values | typed)


def facts(
    held: ExitStack,
    *,
    slots: int | None,
    ranks: list[int] = (),
    master_port: int | None,
    output_dir: str,
    compiles: bool,
) -> NodeFacts:
    """What this node is. What it opens stays open as long as `held` does.

    Args:
        master_port: to be listened on as well; None: no port is to be tried.
        output_dir: of the run, where a probe file is made; empty: none.
        compiles: whether to try the compiler.
    """
    folders = [output_dir] if output_dir else []
    gathered = node_facts(slots=slots, ranks=ranks, folders=folders, compiles=compiles)
    listener, taken = Listener(), ""
    held.callback(listener.close)
    if master_port:
        try:
            held.callback(Listener(master_port).close)
        except OSError as error:
            taken = f"in use by {port_owner(master_port)}" if error.errno == errno.EADDRINUSE else str(error)
    probe, error = make_probe(output_dir, held) if output_dir else ("", "")
    return replace(gathered, open_port=listener.port, master_port_taken=taken, probe=probe, output_error=error)


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
    return Reached(
        connections=connect_all(targets),
        names=resolved,
        outgoing=outgoing_address(master) or "",
        contents={source: file_content(source) for source in sources},
        cached={name: is_cached(name) for name in hub_names},
        config=config_values(config) if config else None,
        sees_probe=sees(probe) if probe else None,
    )


def answer(phase: str, held: ExitStack, values: dict[str, Any]) -> dict[str, Any]:
    """{"answer"} of `facts` or `reach` as JSON, or {"failed"}, which becomes a finding."""
    try:
        return {"answer": dataclasses.asdict({"facts": facts, "reach": reach}[phase](held, **values))}
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {error}"}


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


def say(**content: Any) -> None:
    """One line for the head: {"answer"}, {"failed"}, or an {"event"} of the smoke test's ranks. One write, so that
    lines of several processes do not mix.
    """
    os.write(1, (MARK + json.dumps(content) + "\n").encode())


def main() -> None:
    phase, held, inputs = sys.argv[1], ExitStack(), queue.Queue()

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
    try:
        said = {"answer": measure(held, inputs.get)} if phase == "measure" else answer(phase, held, inputs.get())
    except Exception as error:  # the head reports it as a finding
        said = {"failed": f"{type(error).__name__}: {error}"}
    say(**said)
    threading.Event().wait()  # until the input ends


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


if __name__ == "__main__":
    main()
