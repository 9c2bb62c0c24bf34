"""Gathers what a node says of itself, in about a tenth of a second: imports neither torch nor transformers nor
deepspeed, and makes no context on a GPU.
"""

import ctypes
import ctypes.util
import dataclasses
import importlib.metadata
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
from pathlib import Path

import psutil

from dsft.doctor.facts import Gpu, Gpus, Interface, Network, NodeFacts
from dsft.errors import one_line
from dsft.runtime.disk import free_bytes
from dsft.runtime.hardware import active_ports, cpu_count, free_host_bytes, host_memory_bytes
from dsft.runtime.operators import compile_error, compiler_words
from dsft.runtime.versions import PACKAGES, code_folder, code_hash, git_commit
from dsft.units import MiB

NCCL_WHEELS = ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11")
GPU_QUERY = "index,name,memory.total,memory.used,driver_version,ecc.errors.uncorrected.volatile.total,temperature.gpu"
TIME_ERROR = 5
"""adjtimex: the clock is not synchronized."""
SOCKET_VARIABLES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_IB_DISABLE", "NCCL_IB_HCA")


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
        versions=_versions() | _gpu_versions(gpus, cuda),
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
        clock_synchronized=clock_synchronized(),
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


def clock_synchronized() -> bool:
    """Whether a time service keeps this machine's clock: what `timedatectl` asks, adjtimex(2)."""
    timex = ctypes.create_string_buffer(512)  # of zeros: read only
    return ctypes.CDLL(None).adjtimex(timex) not in (-1, TIME_ERROR)


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


def _versions() -> dict[str, str]:
    """Of Python, the packages and dsft's own code; "missing" for a package that is not installed."""
    packages = {name: _version(name) or "missing" for name in PACKAGES}
    return {
        "python": platform.python_version(),
        **packages,
        "dsft commit": git_commit() or "no checkout",
        "dsft code": code_hash(),
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _gpu_versions(gpus: Gpus, cuda: str) -> dict[str, str]:
    versions = {
        "NCCL": next(filter(None, map(_version, NCCL_WHEELS)), ""),
        "torch's CUDA": cuda,
        "GPU driver": gpus.driver,
        "GPU type": ", ".join(sorted({gpu.name for gpu in gpus.cards})),
    }
    return {name: version or "none" for name, version in versions.items()}


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
    cuda = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    headers = [f"{folder}/libaio.h" for folder in ("/usr/include", "/usr/local/include")]
    compilers = [f"{cuda}/bin/nvcc" if cuda else "", shutil.which("nvcc") or "", "/usr/local/cuda/bin/nvcc"]
    return {
        "c++": shutil.which(compiler_words()[0]) or "",
        "ninja": shutil.which("ninja") or (importlib.util.find_spec("ninja") and "package") or "",
        "Python.h": _first_file([f"{sysconfig.get_paths()['include']}/Python.h"]),
        "libaio": ctypes.util.find_library("aio") or "",
        "libaio.h": _first_file(headers),
        "nvcc": _first_file(compilers),
    }


def _first_file(paths: list[str]) -> str:
    return next((path for path in paths if os.path.isfile(path)), "")


def gpu_facts() -> Gpus:
    """GPUs and their driver as nvidia-smi tells them."""
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
