"""What one node says of itself, in about a tenth of a second: imports neither torch nor transformers nor deepspeed.

`node_facts` runs on every node (agent.py, launched.py); its answer is plain data, which travels as JSON.
"""

import ctypes.util
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
from typing import Any

import psutil

from dsft.cluster.doctor.gpus import gpu_facts
from dsft.runtime.versions import PACKAGES, code_hash, git_commit

NCCL_WHEELS = ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11")
SOCKET_VARIABLES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_IB_DISABLE", "NCCL_IB_HCA")


def node_facts(*, folders: list[str] = ()) -> dict[str, Any]:
    """Everything about this machine that a launch depends on.

    Args:
        folders: more folders whose free space is asked, such as the run's.
    """
    gpus = gpu_facts()
    torch_version = _torch_version()
    return {
        "host": socket.gethostname(),
        "python_path": sys.executable,
        "folder": os.getcwd(),
        "versions": _versions() | _gpu_versions(gpus, torch_version),
        "gpus": gpus,
        "torch_cuda": torch_version.get("cuda", ""),
        "cpu_only": os.environ.get("DS_ACCELERATOR") == "cpu",
        "visible_gpus": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "cores": len(os.sched_getaffinity(0)),
        "host_bytes": _host_bytes(),
        "available_bytes": min(psutil.virtual_memory().available, _host_bytes()),
        "shm_bytes": _free("/dev/shm"),
        "limits": _limits(),
        "tools": _tools(),
        "disks": {folder: _free(folder) for folder in {*folders, *cache_folders().values()}},
        "caches": cache_folders(),
        "hub_offline": os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"),
        "network": network_facts(),
    }


def slots_here(facts: dict[str, Any]) -> int:
    """Ranks that a launch starts on a node of its own accord: one per GPU, else up to 2 CPU processes (as
    `dsft.runtime.hardware.default_ranks`).
    """
    return len(usable_gpus(facts)) or min(2, facts["cores"])


def usable_gpus(facts: dict[str, Any]) -> list[dict[str, Any]]:
    """The GPUs that ranks would use: none with DS_ACCELERATOR=cpu or a torch without CUDA, those of
    CUDA_VISIBLE_DEVICES where that is set.
    """
    if facts["cpu_only"] or not facts["torch_cuda"]:
        return []
    gpus, chosen = facts["gpus"]["list"], facts["visible_gpus"]
    if chosen is None:
        return gpus
    words = [word for word in chosen.split(",") if word.strip()]
    return (
        [gpu for gpu in gpus if str(gpu["index"]) in words]
        if all(word.isdigit() for word in words)
        else gpus[: len(words)]
    )


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


def network_facts() -> dict[str, Any]:
    """Addresses as `hostname -I` orders them (DeepSpeed takes the first host's first as master address), interfaces,
    and what the own name resolves to.
    """
    interfaces = {}
    stats = psutil.net_if_stats()
    for name, addresses in psutil.net_if_addrs().items():
        found = [one.address for one in addresses if one.family == socket.AF_INET]
        if found and name in stats:
            interfaces[name] = {"addresses": found, "mtu": stats[name].mtu, "mbit": stats[name].speed}
    try:
        own = sorted({info[4][0] for info in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)})
    except OSError:
        own = []
    infiniband = sorted(
        str(path.parents[2].name)
        for path in Path("/sys/class/infiniband").glob("*/ports/1/state")
        if "ACTIVE" in path.read_text()
    )
    return {
        "addresses": _hostname_addresses(interfaces),
        "interfaces": interfaces,
        "own_name": own,
        "infiniband": infiniband,
        "variables": {name: os.environ[name] for name in SOCKET_VARIABLES if name in os.environ},
    }


def _hostname_addresses(interfaces: dict[str, Any]) -> list[str]:
    try:
        words = subprocess.run(["hostname", "-I"], capture_output=True, text=True, timeout=5).stdout.split()
    except (OSError, subprocess.TimeoutExpired):
        words = []
    return words or [
        address for one in interfaces.values() for address in one["addresses"] if not address.startswith("127.")
    ]


def _versions() -> dict[str, str]:
    """Of Python, the packages and dsft's own code; "missing" for a package that is not installed."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "missing"
    return found | {"dsft commit": git_commit() or "no checkout", "dsft code": code_hash()}


def _gpu_versions(gpus: dict[str, Any], torch_version: dict[str, str]) -> dict[str, str]:
    nccl = ""
    for name in NCCL_WHEELS:
        try:
            nccl = nccl or importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            pass
    named = {
        "NCCL": nccl,
        "torch's CUDA": torch_version.get("cuda", ""),
        "GPU driver": gpus["driver"],
        "GPU type": ", ".join(sorted({gpu["name"] for gpu in gpus["list"]})),
    }
    return {name: value or "none" for name, value in named.items()}


def _torch_version() -> dict[str, str]:
    """CUDA of the installed torch, read from its version.py; empty for a CPU build or without torch."""
    spec = importlib.util.find_spec("torch")
    path = Path(spec.origin).with_name("version.py") if spec and spec.origin else None
    if not path or not path.is_file():
        return {}
    found = re.search(r"^cuda\b[^=]*=\s*['\"]([\d.]+)['\"]", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {"cuda": found[1]} if found else {}


def _host_bytes() -> int:
    """As `dsft.runtime.hardware.host_memory_bytes`, which imports torch."""
    limits = [psutil.virtual_memory().total]
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        if Path(path).is_file() and (text := Path(path).read_text().strip()).isdigit():
            limits.append(int(text))
    return min(limits)


def _limits() -> dict[str, int | None]:
    """Soft limits of this process; None without one."""
    names = {
        "open files": resource.RLIMIT_NOFILE,
        "locked memory": resource.RLIMIT_MEMLOCK,
        "processes": resource.RLIMIT_NPROC,
    }
    soft = {name: resource.getrlimit(number)[0] for name, number in names.items()}
    return {name: None if value == resource.RLIM_INFINITY else value for name, value in soft.items()}


def _tools() -> dict[str, str]:
    """What DeepSpeed compiles its operators with at first use; empty where it is missing."""
    ninja = shutil.which("ninja") or (importlib.util.find_spec("ninja") and "package") or ""
    cuda = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or ""
    nvcc = next(
        (
            path
            for path in (
                os.path.join(cuda, "bin", "nvcc") if cuda else "",
                shutil.which("nvcc") or "",
                "/usr/local/cuda/bin/nvcc",
            )
            if path and os.path.exists(path)
        ),
        "",
    )
    include = Path(sysconfig.get_paths()["include"], "Python.h")
    return {
        "c++": shutil.which(os.environ.get("CXX") or "c++") or "",
        "ninja": ninja,
        "Python.h": str(include) if include.is_file() else "",
        "libaio": ctypes.util.find_library("aio") or "",
        "libaio.h": next(
            (path for path in ("/usr/include/libaio.h", "/usr/local/include/libaio.h") if os.path.exists(path)), ""
        ),
        "nvcc": nvcc,
    }


def _free(folder: str) -> int | None:
    """Free bytes of the disk that holds `folder`, or will; None where it cannot be asked."""
    path = Path(folder).absolute()
    try:
        return shutil.disk_usage(next(parent for parent in (path, *path.parents) if parent.exists())).free
    except (OSError, StopIteration):
        return None
