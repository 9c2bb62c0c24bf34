"""What a node is: typed facts, and how it gathers them about itself in about a tenth of a second, without torch,
transformers or deepspeed, and without a context on a GPU. They travel as JSON: `asdict` there, `typed` here.
"""

import ctypes
import ctypes.util
import dataclasses
import importlib.util
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
import sysconfig
import typing
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil

from dsft.errors import one_line
from dsft.runtime.disk import free_bytes
from dsft.runtime.hardware import active_ports, cpu_count, free_host_bytes, host_memory_bytes
from dsft.runtime.operators import compile_error, compiler_words
from dsft.runtime.versions import PACKAGES, code_folder, code_hash, git_commit, version_of
from dsft.units import MiB

try:
    from huggingface_hub import constants
except ImportError:  # a node without packages answers all the same; where they would be kept by default
    kept = "~/.cache/huggingface"
    constants = SimpleNamespace(HF_HUB_OFFLINE=False, HF_HOME=kept, HF_HUB_CACHE=f"{kept}/hub")

NCCL_WHEELS = ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11")
GPU_QUERY = "index,name,memory.total,memory.used,driver_version,ecc.errors.uncorrected.volatile.total,temperature.gpu"
TIME_ERROR = 5  # adjtimex: the clock is not synchronized
SOCKET_VARIABLES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_IB_DISABLE", "NCCL_IB_HCA")


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU as nvidia-smi prints it."""

    index: int
    name: str
    memory_bytes: int
    used_bytes: int
    ecc_errors: int  # uncorrectable memory errors since the driver was loaded
    celsius: int


@dataclass(frozen=True, kw_only=True)
class Gpus:
    """The GPUs of a node and their driver."""

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
    """How a node is connected."""

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
    ranks: list[int] = field(default_factory=list)
    """Numbers of the ranks that a launcher has started there; empty: the doctor starts its own."""
    versions: dict[str, str]
    """Of Python, packages ("missing" where not installed), dsft's own code, GPU driver and type ("none")."""
    gpus: Gpus
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
        """The GPUs that ranks would use: none with DS_ACCELERATOR=cpu or a torch without CUDA, those of
        CUDA_VISIBLE_DEVICES where that is set.
        """
        if self.cpu_only or not self.torch_cuda:
            return []
        if self.visible_gpus is None:
            return self.gpus.cards
        words = [word for word in self.visible_gpus.split(",") if word.strip()]
        if all(word.isdigit() for word in words):
            return [gpu for gpu in self.gpus.cards if str(gpu.index) in words]
        return self.gpus.cards[: len(words)]

    def interface_of(self, address: str) -> str:
        """The interface that has `address`; empty where none has."""
        cards = self.network.interfaces.items()
        return next((name for name, card in cards if address in card.addresses), "")

    @property
    def address(self) -> str:
        """The first address; empty without one."""
        return next(iter(self.network.addresses), "")


def typed(kind: Any, value: Any) -> Any:
    """A JSON value as `kind`: a dataclass (its fields too), a list or dict of values, X | None, or what it is.

    Raises:
        TypeError: fields are missing or unknown: of another version of dsft.
    """
    inner = [argument for argument in typing.get_args(kind) if argument is not type(None)]
    if dataclasses.is_dataclass(kind):
        kinds = typing.get_type_hints(kind)
        return kind(**{name: typed(kinds.get(name), field) for name, field in value.items()})
    if isinstance(value, list) and inner:
        return [typed(inner[0], item) for item in value]
    if isinstance(value, dict) and len(inner) == 2:
        return {key: typed(inner[1], item) for key, item in value.items()}
    return typed(inner[0], value) if inner and value is not None else value


def node_facts(
    *, slots: int | None = None, ranks: list[int] = (), folders: list[str] = (), compiles: bool = False
) -> NodeFacts:
    """Everything about this machine that a launch depends on.

    Args:
        slots: ranks that start here; None: one per GPU, else up to 2 CPU processes (as `hardware.default_ranks`).
        ranks: their numbers, where a launcher has started them.
        folders: more folders whose free space is asked, such as the run's.
        compiles: whether to try the compiler, which takes a second.
    """

    def first(*paths: str) -> str:
        return next((path for path in paths if os.path.isfile(path)), "")

    gpus, caches = gpu_facts(), cache_folders()
    # CUDA of the installed torch, from its version.py: empty for a CPU build or without torch.
    torch = importlib.util.find_spec("torch")
    about = Path(torch.origin).with_name("version.py") if torch and torch.origin else None
    source = about.read_text(encoding="utf-8") if about and about.is_file() else ""
    match = re.search(r"^cuda\b[^=]*=\s*['\"]([\d.]+)['\"]", source, re.MULTILINE)
    torch_cuda = match[1] if match else ""
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
    toolkit = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    files, locked = (resource.getrlimit(limit)[0] for limit in (resource.RLIMIT_NOFILE, resource.RLIMIT_MEMLOCK))
    facts = NodeFacts(
        host=socket.gethostname(),
        python_path=sys.executable,
        code_folder=str(code_folder()),
        slots=slots or 0,
        ranks=list(ranks),
        versions={
            "python": platform.python_version(),
            **{name: version_of(name, missing="missing") for name in PACKAGES},
            "dsft commit": git_commit() or "no checkout",
            "dsft code": code_hash(),
            "NCCL": next(filter(None, (version_of(wheel, missing="") for wheel in NCCL_WHEELS)), "none"),
            "torch's CUDA": torch_cuda or "none",
            "GPU driver": gpus.driver or "none",
            "GPU type": ", ".join(sorted({gpu.name for gpu in gpus.cards})) or "none",
        },
        gpus=gpus,
        torch_cuda=torch_cuda,
        cpu_only=os.environ.get("DS_ACCELERATOR") == "cpu",
        visible_gpus=os.environ.get("CUDA_VISIBLE_DEVICES"),
        cores=cpu_count(),
        host_bytes=host_memory_bytes(),
        available_bytes=free_host_bytes(),
        shm_bytes=free_bytes("/dev/shm"),
        open_files=None if files == resource.RLIM_INFINITY else files,
        locked_bytes=None if locked == resource.RLIM_INFINITY else locked,
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
        compile_error=compile_error() if compiles else "",
        disks={folder: free_bytes(folder) for folder in {*folders, *caches.values()}},
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
    )
    return facts if slots else dataclasses.replace(facts, slots=len(facts.usable_gpus) or min(2, facts.cores))


def cache_folders() -> dict[str, str]:
    """Where models and data sets of the hub, and compiled operators, are kept."""
    data = os.environ.get("HF_DATASETS_CACHE") or os.path.join(constants.HF_HOME, "datasets")
    operators = os.environ.get("TORCH_EXTENSIONS_DIR") or "~/.cache/torch_extensions"
    folders = {"hub": constants.HF_HUB_CACHE, "data sets": data, "operators": operators}
    return {name: os.path.expanduser(folder) for name, folder in folders.items()}


def addresses_of(name: str) -> list[str]:
    """Addresses that a host name resolves to here; none where it does not."""
    try:
        return sorted({info[4][0] for info in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)})
    except OSError:
        return []


def gpu_facts() -> Gpus:
    """GPUs and their driver as nvidia-smi prints them."""
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
        index, _, total, used, _, errors, celsius = (int(part) if part.isdigit() else 0 for part in parts)
        name, driver = parts[1], parts[4]
        memory = {"memory_bytes": total * MiB, "used_bytes": used * MiB}
        cards.append(Gpu(index=index, name=name, **memory, ecc_errors=errors, celsius=celsius))
    return Gpus(driver=driver, cards=cards)
