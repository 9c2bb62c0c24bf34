"""What a node is: typed facts, and how it gathers them about itself in about a tenth of a second, without torch,
transformers or deepspeed, and without a context on a GPU. They travel as JSON: `dataclasses.asdict` there, `from_json`
here.
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from dsft.errors import one_line
from dsft.runtime.disk import free_bytes
from dsft.runtime.hardware import active_ports, cpu_count, free_host_bytes, host_memory_bytes
from dsft.runtime.operators import compile_error, compiler_words
from dsft.runtime.versions import PACKAGES, code_folder, code_hash, git_commit, version_of
from dsft.units import MiB

NCCL_WHEELS = ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11")
GPU_QUERY = "index,name,memory.total,memory.used,driver_version,ecc.errors.uncorrected.volatile.total,temperature.gpu"
TIME_ERROR = 5
"""adjtimex: the clock is not synchronized."""
SOCKET_VARIABLES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_IB_DISABLE", "NCCL_IB_HCA")


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU as nvidia-smi prints it."""

    index: int
    name: str
    memory_bytes: int
    used_bytes: int
    ecc_errors: int
    """Uncorrectable memory errors since the driver was loaded."""
    celsius: int


@dataclass(frozen=True, kw_only=True)
class Gpus:
    """The GPUs of a node and their driver."""

    driver: str = ""
    error: str = ""
    """What nvidia-smi complains about; empty where it works, or where there is no GPU."""
    cards: list[Gpu] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Interface:
    """A network interface with an IPv4 address."""

    addresses: list[str]
    mtu: int
    mbit: int
    """Negotiated speed in Mbit/s; 0 where the card does not say."""


@dataclass(frozen=True, kw_only=True)
class Network:
    """How a node is connected."""

    addresses: list[str]
    """As `hostname -I` orders them: DeepSpeed takes the first host's first as master address."""
    interfaces: dict[str, Interface]
    own_name: list[str]
    """Addresses that the host's own name resolves to there."""
    infiniband: list[str]
    """Cards with an active port."""
    variables: dict[str, str]
    """NCCL_SOCKET_IFNAME and the like, where they are set."""


@dataclass(frozen=True, kw_only=True)
class NodeFacts:
    """Everything about one node that a launch depends on."""

    host: str
    python_path: str
    code_folder: str
    slots: int
    """Ranks there: as the host file says, else one per GPU, else up to 2 CPU processes."""
    ranks: list[int] = field(default_factory=list)
    """Numbers of the ranks that a launcher has started there; empty: the doctor starts its own."""
    versions: dict[str, str]
    """Of Python, packages ("missing" where not installed), dsft's own code, GPU driver and type ("none")."""
    gpus: Gpus
    torch_cuda: str
    """CUDA that the installed torch is built for; empty for a CPU build or without torch."""
    cpu_only: bool
    """DS_ACCELERATOR=cpu."""
    visible_gpus: str | None
    """CUDA_VISIBLE_DEVICES."""
    cores: int
    host_bytes: int
    available_bytes: int
    shm_bytes: int | None
    """Free in /dev/shm."""
    open_files: int | None
    """Soft limit of a process; None without one."""
    locked_bytes: int | None
    """How much memory a process may lock; None without a limit."""
    tools: dict[str, str]
    """What DeepSpeed compiles its operators with, by name: where it is, or empty."""
    compile_error: str = ""
    """Why a program of one line does not compile; empty where it does, or was not tried."""
    disks: dict[str, int | None]
    """Free bytes by folder; None where they cannot be asked."""
    caches: dict[str, str]
    """Folders of the hub's models, data sets, and compiled operators."""
    hub_offline: bool
    clock_synchronized: bool
    """A time service keeps the clock, as the kernel says."""
    network: Network
    open_port: int = 0
    """A freely chosen port that the node listens on during the examination."""
    master_port_taken: str = ""
    """Who has the master's port there; empty where it is free or was not asked for."""
    output_error: str = ""
    """Why no file can be written to the run's output folder."""
    probe: str = ""
    """A file made there, for the other nodes to look for; gone at the end of the examination."""

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

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "NodeFacts":
        """Raises: KeyError, TypeError: of another version of dsft."""
        gpus, network = values["gpus"], values["network"]
        interfaces = {name: Interface(**card) for name, card in network["interfaces"].items()}
        typed = {
            "gpus": Gpus(**gpus | {"cards": [Gpu(**card) for card in gpus["cards"]]}),
            "network": Network(**network | {"interfaces": interfaces}),
        }
        return cls(**values | typed)


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
    gpus, cuda = gpu_facts(), _torch_cuda()
    files, locked = (resource.getrlimit(limit)[0] for limit in (resource.RLIMIT_NOFILE, resource.RLIMIT_MEMLOCK))
    facts = NodeFacts(
        host=socket.gethostname(),
        python_path=sys.executable,
        code_folder=str(code_folder()),
        slots=slots or 0,
        ranks=list(ranks),
        versions=_versions(gpus, cuda),
        gpus=gpus,
        torch_cuda=cuda,
        cpu_only=os.environ.get("DS_ACCELERATOR") == "cpu",
        visible_gpus=os.environ.get("CUDA_VISIBLE_DEVICES"),
        cores=cpu_count(),
        host_bytes=host_memory_bytes(),
        available_bytes=free_host_bytes(),
        shm_bytes=free_bytes("/dev/shm"),
        open_files=None if files == resource.RLIM_INFINITY else files,
        locked_bytes=None if locked == resource.RLIM_INFINITY else locked,
        tools=_tools(),
        compile_error=compile_error() if compiles else "",
        disks={folder: free_bytes(folder) for folder in {*folders, *cache_folders().values()}},
        caches=cache_folders(),
        hub_offline=os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"),
        # adjtimex(2), as timedatectl asks it; a buffer of zeros changes nothing.
        clock_synchronized=ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(512)) not in (-1, TIME_ERROR),
        network=network_facts(),
    )
    return facts if slots else dataclasses.replace(facts, slots=len(facts.usable_gpus) or min(2, facts.cores))


def cache_folders() -> dict[str, str]:
    """Where models and data sets of the hub, and compiled operators, are kept."""
    home = os.path.expanduser(
        os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    )
    return {
        "hub": os.path.expanduser(os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub")),
        "data sets": os.path.expanduser(os.environ.get("HF_DATASETS_CACHE") or os.path.join(home, "datasets")),
        "operators": os.path.expanduser(os.environ.get("TORCH_EXTENSIONS_DIR") or "~/.cache/torch_extensions"),
    }


def network_facts() -> Network:
    """Addresses, interfaces, and what the host's own name resolves to."""
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
    return Network(
        addresses=words or known,
        interfaces=interfaces,
        own_name=addresses_of(socket.gethostname()),
        infiniband=sorted({card for card, _, _ in active_ports()}),
        variables={name: os.environ[name] for name in SOCKET_VARIABLES if name in os.environ},
    )


def addresses_of(name: str) -> list[str]:
    """Addresses that a host name resolves to here; none where it does not."""
    try:
        return sorted({info[4][0] for info in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)})
    except OSError:
        return []


def _versions(gpus: Gpus, cuda: str) -> dict[str, str]:
    """Of Python, packages, dsft's own code, and what the GPUs run with."""
    return {
        "python": platform.python_version(),
        **{name: version_of(name, missing="missing") for name in PACKAGES},
        "dsft commit": git_commit() or "no checkout",
        "dsft code": code_hash(),
        "NCCL": next(filter(None, (version_of(wheel, missing="") for wheel in NCCL_WHEELS)), "none"),
        "torch's CUDA": cuda or "none",
        "GPU driver": gpus.driver or "none",
        "GPU type": ", ".join(sorted({gpu.name for gpu in gpus.cards})) or "none",
    }


def _torch_cuda() -> str:
    """CUDA of the installed torch, read from its version.py; empty for a CPU build or without torch."""
    spec = importlib.util.find_spec("torch")
    path = Path(spec.origin).with_name("version.py") if spec and spec.origin else None
    if not path or not path.is_file():
        return ""
    match = re.search(r"^cuda\b[^=]*=\s*['\"]([\d.]+)['\"]", path.read_text(encoding="utf-8"), re.MULTILINE)
    return match[1] if match else ""


def _tools() -> dict[str, str]:
    """What DeepSpeed compiles its operators with at first use; empty where it is missing."""

    def first(*paths: str) -> str:
        return next((path for path in paths if os.path.isfile(path)), "")

    cuda = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    return {
        "c++": shutil.which(compiler_words()[0]) or "",
        "ninja": shutil.which("ninja") or (importlib.util.find_spec("ninja") and "package") or "",
        "Python.h": first(f"{sysconfig.get_paths()['include']}/Python.h"),
        "libaio": ctypes.util.find_library("aio") or "",
        "libaio.h": first("/usr/include/libaio.h", "/usr/local/include/libaio.h"),
        "nvcc": first(f"{cuda}/bin/nvcc" if cuda else "", shutil.which("nvcc") or "", "/usr/local/cuda/bin/nvcc"),
    }


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
        index, name, total, used, driver, errors, celsius = (part.strip() for part in line.split(","))
        card = Gpu(
            index=_number(index),
            name=name,
            memory_bytes=_number(total) * MiB,
            used_bytes=_number(used) * MiB,
            ecc_errors=_number(errors),
            celsius=_number(celsius),
        )
        cards.append(card)
    return Gpus(driver=driver, cards=cards)


def _number(text: str) -> int:
    return int(text) if text.isdigit() else 0
