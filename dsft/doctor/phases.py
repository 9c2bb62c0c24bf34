"""The examination on one node: `python -m dsft.doctor.phases facts|reach|measure`, the same through ssh and alone. The
ranks that a launcher has started call the same functions.

    facts    what this node is, in about a tenth of a second; until the end it listens on its open ports, and its probe
             file stays
    reach    connects to the open ports of all other nodes, and looks at the run's files
    measure  this node's ranks of the smoke test, which report their progress (smoke.py)

Each reads a line of JSON, answers with a line of JSON that begins with MARK (login scripts may print too), and exits
when its input ends: the head closes it, or the connection is gone. Imports neither torch, transformers nor deepspeed
(`measure` starts a process that does), and makes no context on a GPU.
"""

import contextlib
import ctypes
import ctypes.util
import errno
import glob
import hashlib
import importlib.util
import itertools
import json
import os
import queue
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import typing
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import yaml

from dsft.errors import one_line
from dsft.models.model_folder import CHECKPOINT
from dsft.runtime.disk import existing_parent, free_bytes, user_cache
from dsft.runtime.hardware import active_ports, cpu_count, free_host_bytes, host_memory_bytes, read_interconnect
from dsft.runtime.launcher_env import outgoing_address, port_owner
from dsft.runtime.software import (
    PACKAGES,
    code_folder,
    code_hash,
    compile_error,
    compiler_words,
    git_commit,
    numeric_versions,
    version_of,
)
from dsft.units import MiB

try:
    from huggingface_hub import constants
except ImportError:  # a node without packages answers all the same; where they would be kept by default
    kept = "~/.cache/huggingface"
    constants = SimpleNamespace(HF_HUB_OFFLINE=False, HF_HOME=kept, HF_HUB_CACHE=f"{kept}/hub")

NCCL_WHEELS = ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11")
GPU_QUERY = "index,name,memory.total,memory.used,driver_version,ecc.errors.uncorrected.volatile.total"
TIME_ERROR = 5  # adjtimex: the clock is not synchronized
SOCKET_VARIABLES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_IB_DISABLE", "NCCL_IB_HCA")
MARK = "dsft-doctor:"
LIFE_SECONDS = 180  # a phase that is older exits, whatever the connection does
SLOWEST_LINK = 0.5e6  # bytes per second (4 Mbit/s) below which a link is broken for any training
CONNECT_SECONDS = 3.0  # a connection in a cluster takes milliseconds; a firewall that drops packets answers never
ROUND_TRIPS = 5
BLOCK_BYTES, BLOCK_TRIES, BLOCK_SECONDS = 128 * 1024, 3, 2.0
"""Sent to measure a link: 0.3 s at SLOWEST_LINK. What a busy host delays once is tried again; of a block that takes
longer, what has come tells the rate.
"""
TURNS, TURNS_SECONDS = 2, 8.0
"""Number of times that a slow link is measured again, and seconds after which none is: each time takes 3 s."""
BUSY_BYTES = 10 * SLOWEST_LINK  # per second, below which a host's blocks to itself show that it is busy
END_BYTES = 1024**2  # hashed of each end of a file: full files of hundreds of GB would take minutes
SEEN_SECONDS = 4.0  # that a file of another node may take to show: network file systems keep what they know for seconds


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU as nvidia-smi prints it."""

    index: int
    name: str
    memory_bytes: int
    used_bytes: int
    ecc_errors: int  # uncorrectable memory errors since the driver was loaded


@dataclass(frozen=True, kw_only=True)
class Gpus:
    driver: str = ""
    error: str = ""  # what nvidia-smi complains about; empty where it works, or where there is no GPU
    cards: list[Gpu] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Interface:
    """A network interface with an IPv4 address."""

    addresses: list[str]
    mtu: int
    mbit: int  # negotiated speed in Mbit/s; 0 where the card does not say


@dataclass(frozen=True, kw_only=True)
class Network:
    addresses: list[str]  # as `hostname -I` orders them: DeepSpeed takes the first host's first as master address
    interfaces: dict[str, Interface]
    own_name: list[str]  # addresses that the host's own name resolves to there
    infiniband: list[str]  # cards with an active port
    variables: dict[str, str]  # NCCL_SOCKET_IFNAME and the like, where they are set


@dataclass(frozen=True, kw_only=True)
class NodeFacts:
    """Everything about one node that a launch depends on."""

    host: str
    python_path: str
    code_folder: str
    slots: int  # ranks there: as the host file says, else one per GPU, else up to 2 CPU processes
    devices: list[int] = field(default_factory=list)  # numbers of their GPUs in the host file; empty: the first ones
    ranks: list[int] = field(default_factory=list)  # numbers of those that a launcher started; empty: the doctor does
    versions: dict[str, str]
    """Of Python, packages ("missing" where not installed), dsft's own code, GPU driver and type ("none")."""
    gpus: Gpus
    interconnect: str = ""  # of its GPUs and its network, as `--interconnect` takes it; empty in the quick part
    torch_cuda: str  # CUDA that the installed torch is built for; empty for a CPU build or without torch
    cpu_only: bool  # DS_ACCELERATOR=cpu
    visible_gpus: str | None  # CUDA_VISIBLE_DEVICES
    cores: int
    host_bytes: int
    available_bytes: int
    shm_bytes: int | None  # free in /dev/shm
    open_files: int | None  # soft limit of a process; None without one
    locked_bytes: int | None  # how much memory a process may lock; None without a limit
    tools: dict[str, str]  # what DeepSpeed compiles its operators with, by name: where it is, or empty
    compile_error: str = ""  # why a program of one line does not compile; empty where it does, or was not tried
    disks: dict[str, int | None]  # free bytes by folder; None where they cannot be asked
    caches: dict[str, str]  # folders of the hub's models, data sets, and compiled operators
    hub_offline: bool  # by HF_HUB_OFFLINE, else by TRANSFORMERS_OFFLINE
    clock_synchronized: bool  # a time service keeps the clock, as the kernel says
    network: Network
    open_port: int = 0  # a freely chosen port that the node listens on during the examination
    master_port_taken: str = ""  # who has the master's port there; empty where it is free or was not asked for
    output_error: str = ""  # why no file can be written to the run's output folder
    probe: str = ""  # a file made there, for the other nodes to look for; gone at the end of the examination

    @property
    def usable_gpus(self) -> list[Gpu]:
        """The GPUs that ranks may use."""
        if self.cpu_only or not self.torch_cuda:
            return []
        if self.visible_gpus is None:
            return self.gpus.cards
        cards, words = {str(gpu.index): gpu for gpu in self.gpus.cards}, re.split(r"\s*,\s*", self.visible_gpus.strip())
        if words[0].startswith(("GPU-", "MIG-")):  # names, for which nvidia-smi was not asked
            return self.gpus.cards[: len(words)]
        return [cards[word] for word in itertools.takewhile(cards.__contains__, words)]  # CUDA looks no further either

    @property
    def rank_gpus(self) -> list[Gpu]:
        """Those of them that its ranks do use, in their order."""
        return [gpu for gpu in self.usable_gpus if gpu.index in self.devices] or self.usable_gpus[: self.slots]

    def interface_of(self, address: str) -> str:
        """The interface that has `address`; empty where none has."""
        cards = self.network.interfaces.items()
        return next((name for name, card in cards if address in card.addresses), "")

    @property
    def address(self) -> str:
        return next(iter(self.network.addresses), "")


def typed(kind: Any, value: Any) -> Any:
    """A JSON value as `kind`: a dataclass (its fields too), a list or dict of values, X | None, or what it is. Raises
    TypeError: fields are missing or unknown, of another version of dsft.
    """
    inner = [argument for argument in typing.get_args(kind) if argument is not type(None)]
    if is_dataclass(kind):
        kinds = typing.get_type_hints(kind)
        return kind(**{name: typed(kinds.get(name), field) for name, field in value.items()})
    if isinstance(value, list) and inner:
        return [typed(inner[0], item) for item in value]
    if isinstance(value, dict) and len(inner) == 2:
        return {key: typed(inner[1], item) for key, item in value.items()}
    return typed(inner[0], value) if inner and value is not None else value


@dataclass(frozen=True, kw_only=True)
class Connection:
    """What came of an address that a node was to connect to."""

    kind: str  # "master": rank 0's port; "open": another node's open port, by its address; "name": the same by its name
    name: str  # of the node that should answer
    address: str
    port: int
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
    connections: list[Connection]
    names: dict[str, list[str]]
    """Addresses of the other nodes' names as this node resolves them, if any."""
    outgoing: str  # this node's address on the way to the master; empty without a way
    contents: dict[str, FileContent | None]  # the run's data and models; None where nothing is there
    cached: dict[str, bool]  # whether each name on the hub is in this node's cache
    config: dict[str, str] | None
    """Keys and values of the run's configuration file; None where there is none, or none was asked for."""
    sees_probe: bool | None  # whether the file that the first node has made shows here; None where it was not asked


def facts(
    held: ExitStack,
    *,
    slots: int | None = None,
    devices: list[int] = (),
    ranks: list[int] = (),
    master_port: int | None = None,
    output_dir: str = "",
    is_full: bool = False,
) -> NodeFacts:
    """What this node is. What it opens stays open as long as `held` does: a port, the master's (None: not tried), and a
    probe file in the run's output folder (empty: none). `slots`: ranks that start here, None: one per GPU, else up to 2
    CPU processes (as `hardware.default_ranks`); `devices`: numbers of their GPUs in the host file; `ranks`: their own,
    where a launcher has started them; `is_full`: with what takes seconds, the compiler and how GPUs are connected.
    """

    def first(*paths: str) -> str:
        return next((path for path in paths if os.path.isfile(path)), "")

    # CUDA of the installed torch, from its version.py: empty for a CPU build or without torch.
    torch = importlib.util.find_spec("torch")
    about = Path(torch.origin).with_name("version.py") if torch and torch.origin else None
    source = about.read_text(encoding="utf-8") if about and about.is_file() else ""
    match = re.search(r"^cuda\b[^=]*=\s*['\"]([\d.]+)['\"]", source, re.MULTILINE)
    torch_cuda, gpus, caches = match[1] if match else "", gpu_facts(), cache_folders()
    toolkit = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")

    interfaces, stats = {}, psutil.net_if_stats()
    for name, addresses in psutil.net_if_addrs().items():
        ipv4 = [entry.address for entry in addresses if entry.family == socket.AF_INET]
        if ipv4 and name in stats:
            interfaces[name] = Interface(addresses=ipv4, mtu=stats[name].mtu, mbit=stats[name].speed)
    try:
        words = subprocess.run(["hostname", "-I"], capture_output=True, text=True, timeout=5).stdout.split()
    except (OSError, subprocess.TimeoutExpired):
        words = []
    known = [address for card in interfaces.values() for address in card.addresses if not address.startswith("127.")]
    limits = [resource.getrlimit(limit)[0] for limit in (resource.RLIMIT_NOFILE, resource.RLIMIT_MEMLOCK)]
    files, locked = (None if limit == resource.RLIM_INFINITY else limit for limit in limits)

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
    gathered = NodeFacts(
        host=socket.gethostname(),
        python_path=sys.executable,
        code_folder=str(code_folder()),
        slots=slots or 0,
        devices=list(devices),
        ranks=list(ranks),
        versions={
            **numeric_versions(),  # those that a training compares
            **{name: version_of(name, missing="missing") for name in PACKAGES},
            "dsft commit": git_commit() or "no checkout",
            "dsft code": code_hash(),
            "NCCL": next(filter(None, (version_of(wheel, missing="") for wheel in NCCL_WHEELS)), "none"),
            "torch's CUDA": torch_cuda or "none",
            "GPU driver": gpus.driver or "none",
            "GPU type": ", ".join(sorted({gpu.name for gpu in gpus.cards})) or "none",
        },
        gpus=gpus,
        interconnect=read_interconnect() if is_full and gpus.cards else "",
        torch_cuda=torch_cuda,
        cpu_only=os.environ.get("DS_ACCELERATOR") == "cpu",
        visible_gpus=os.environ.get("CUDA_VISIBLE_DEVICES"),
        cores=cpu_count(),
        host_bytes=host_memory_bytes(),
        available_bytes=free_host_bytes(),
        shm_bytes=free_bytes("/dev/shm"),
        open_files=files,
        locked_bytes=locked,
        tools={
            "c++": shutil.which(compiler_words()[0]) or "",
            "ninja": shutil.which("ninja") or (importlib.util.find_spec("ninja") and "package") or "",
            "Python.h": first(f"{sysconfig.get_paths()['include']}/Python.h"),
            "libaio": ctypes.util.find_library("aio") or "",
            "libaio.h": first("/usr/include/libaio.h", "/usr/local/include/libaio.h"),
            "nvcc": first(
                f"{toolkit}/bin/nvcc" if toolkit else "", shutil.which("nvcc") or "", "/usr/local/cuda/bin/nvcc"
            ),
        },
        compile_error=compile_error() if is_full else "",
        disks={folder: free_bytes(folder) for folder in {*caches.values(), *filter(None, [output_dir])}},
        caches=caches,
        hub_offline=constants.HF_HUB_OFFLINE,
        # adjtimex(2), as timedatectl asks it; a buffer of zeros changes nothing.
        clock_synchronized=ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(512)) not in (-1, TIME_ERROR),
        network=Network(
            addresses=words or known,
            interfaces=interfaces,
            own_name=addresses_of(socket.gethostname()),
            infiniband=sorted({card for card, _, _ in active_ports()}),
            variables={name: os.environ[name] for name in SOCKET_VARIABLES if name in os.environ},
        ),
        open_port=open_port,
        master_port_taken=taken,
        probe=probe,
        output_error=no_output,
    )
    return gathered if slots else replace(gathered, slots=len(gathered.usable_gpus) or min(2, gathered.cores))


def cache_folders() -> dict[str, str]:
    data = os.environ.get("HF_DATASETS_CACHE") or os.path.join(constants.HF_HOME, "datasets")
    operators = os.environ.get("TORCH_EXTENSIONS_DIR") or str(user_cache().with_name("torch_extensions"))
    folders = {"hub": constants.HF_HUB_CACHE, "data sets": data, "operators": operators}
    return {name: os.path.expanduser(folder) for name, folder in folders.items()}


def addresses_of(name: str) -> list[str]:
    """Addresses that a host name resolves to here; none where it does not."""
    try:
        return sorted({info[4][0] for info in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)})
    except OSError:
        return []


def gpu_facts() -> Gpus:
    if not shutil.which("nvidia-smi"):
        return Gpus()
    command = ["nvidia-smi", f"--query-gpu={GPU_QUERY}", "--format=csv,noheader,nounits"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=15)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Gpus(error=f"nvidia-smi: {one_line(error)[:200]}")
    if result.returncode:
        text = " ".join((result.stdout + result.stderr).split())[:200]
        return Gpus(error="" if "No devices were found" in text else f"nvidia-smi: {text}")
    return parse_gpus(result.stdout)


def parse_gpus(text: str) -> Gpus:
    """The answer to `GPU_QUERY`. Numbers that a GPU does not have ("[N/A]") are 0."""
    cards, driver = [], ""
    for line in filter(None, text.splitlines()):
        parts = [part.strip() for part in line.split(",")]
        index, _, total, used, _, errors = (int(part) if part.isdigit() else 0 for part in parts)
        name, driver = parts[1], parts[4]
        memory = {"memory_bytes": total * MiB, "used_bytes": used * MiB}
        cards.append(Gpu(index=index, name=name, **memory, ecc_errors=errors))
    return Gpus(driver=driver, cards=cards)


def reach(
    *,
    targets: list[dict[str, Any]],
    names: list[str],
    master: str,
    sources: list[str],
    hub_names: list[str],
    config: str,
    probe: str,
) -> Reached:
    """What this node reaches: `targets` (the first fields of `Connection`), `names` of other nodes, the address of rank
    0's node, `sources` (files, folders and globs of the run), `hub_names` (models and data sets that may have to be
    downloaded), the run's YAML file and the probe that the first node has made (empty: none).
    """
    with ThreadPoolExecutor(max_workers=max(1, len(names))) as pool:
        resolved = dict(zip(names, pool.map(addresses_of, names), strict=True))
    with ThreadPoolExecutor(max_workers=max(1, len(targets))) as pool:
        connections = list(pool.map(_connect, targets))
    # Those of which a block came slowly again, one by one, in turns with blocks of this host to itself: of a host that
    # was busy each time, the rate is 0 (not known).
    until = time.monotonic() + TURNS_SECONDS
    for number, target in enumerate(targets):
        if not 0 < connections[number].bytes_per_second < SLOWEST_LINK or time.monotonic() > until:
            continue
        rate = 0.0
        with listening() as port:
            for _ in range(TURNS):
                itself = _connect(target | {"address": "127.0.0.1", "port": port})
                again = _connect(target)
                if itself.bytes_per_second > BUSY_BYTES or again.bytes_per_second > SLOWEST_LINK:
                    rate = max(rate, again.bytes_per_second)
                if rate > SLOWEST_LINK:
                    break
        connections[number] = replace(connections[number], bytes_per_second=rate)

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
    contents = {source: file_content(source) for source in sources}

    is_there, until = False, time.monotonic() + SEEN_SECONDS
    with suppress(OSError):  # not even the folder is there
        while probe and not is_there and time.monotonic() <= until:
            os.listdir(os.path.dirname(probe))  # makes NFS ask its server again
            is_there = os.path.exists(probe)
            time.sleep(0 if is_there else 0.2)
    return Reached(
        connections=connections,
        names=resolved,
        outgoing=outgoing_address(master) or "",
        contents=contents,
        cached=cached,
        config=values,
        sees_probe=is_there if probe else None,
    )


def _connect(target: dict[str, Any]) -> Connection:
    """What one target answers, the fastest of few tries; one block is enough where the link is not very slow."""
    try:
        with socket.create_connection((target["address"], target["port"]), timeout=CONNECT_SECONDS) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            lines = connection.makefile("rb")
            host = lines.readline().strip().decode(errors="replace")
            if not host:
                return Connection(**target, error="closed")
            trips = []
            for _ in range(ROUND_TRIPS):
                start, here = time.perf_counter(), time.time()
                connection.sendall(b"?")
                there = float(lines.readline() or "nan")
                seconds = time.perf_counter() - start
                trips.append((seconds, there - here - seconds / 2))
            seconds, ahead = min(trips)
            rate = 0.0
            for _ in range(BLOCK_TRIES if target["kind"] == "open" else 0):
                start, seconds_of_block, left = time.perf_counter(), 0.0, BLOCK_BYTES
                connection.sendall(b"b")
                while left and seconds_of_block < BLOCK_SECONDS and (piece := lines.read1(left)):
                    left -= len(piece)
                    seconds_of_block = time.perf_counter() - start
                rate = max(rate, (BLOCK_BYTES - left) / seconds_of_block if seconds_of_block else 0.0)
                if left or rate > SLOWEST_LINK:
                    break
            return Connection(**target, host=host, seconds=seconds / 2, clock_ahead=ahead, bytes_per_second=rate)
    except OSError as error:
        known = {socket.gaierror: "unresolved", TimeoutError: "timeout", ConnectionRefusedError: "refused"}
        return Connection(**target, error=known.get(type(error)) or error.strerror or str(error))


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


@contextlib.contextmanager
def listening(port: int = 0) -> Iterator[int]:
    """Listens on a port (0: any free one, which it gives) of all addresses; sends its host's name, then for each byte
    that comes its clock, or for a "b" a block of BLOCK_BYTES. Raises OSError: EADDRINUSE where something else listens.
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


def measure(held: ExitStack, read_input: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Run this node's ranks of the smoke test, in a process that imports torch before the input comes, and whose lines
    go to the head as they are. Returns its exit code and last words, also where it exited before the input came.
    """
    errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
    process = subprocess.Popen(
        [sys.executable, "-m", "dsft.doctor.smoke"],
        stdin=subprocess.PIPE,
        stderr=errors,
        text=True,
        start_new_session=True,
    )

    def pass_on() -> None:
        values = read_input()
        with suppress(BrokenPipeError):  # its exit code and last words say why
            process.stdin.write(json.dumps(values) + "\n")
            process.stdin.flush()

    # Its ranks too.
    held.callback(lambda: process.poll() is None and os.killpg(process.pid, signal.SIGKILL))
    threading.Thread(target=pass_on, daemon=True).start()
    code = process.wait()
    errors.seek(0)
    return {"code": code, "last_words": errors.read()[-2000:] or f"exit code {code}"}


def answer(phase: str, held: ExitStack, read_input: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """{"answer"} of a phase as JSON, or {"failed"}, which becomes a finding."""
    try:
        if phase == "measure":
            return {"answer": measure(held, read_input)}
        return {"answer": asdict(facts(held, **read_input()) if phase == "facts" else reach(**read_input()))}
    except Exception as error:
        return {"failed": f"{phase}: {type(error).__name__}: {error}"[:300]}


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


if __name__ == "__main__":
    main()
