"""Facts of one node as a plain dictionary: host, versions, GPUs, memory, disks, clock. Does not import torch."""

import contextlib
import os
import shutil
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

from dsft.errors import one_line
from dsft.runtime.disk import existing_parent, free_bytes, user_cache, write_error
from dsft.runtime.hardware import cpu_count, free_host_bytes
from dsft.runtime.launcher_env import interface_error, reachable_addresses
from dsft.runtime.software import PACKAGES, code_hash, compile_error, git_commit, numeric_versions, version_of
from dsft.units import MiB

GPU_QUERY = "index,name,memory.total,memory.used,driver_version,ecc.errors.uncorrected.volatile.total"


def node_facts(
    *, slots: int | None, output_dir: str = "", port: int | None = None, quick: bool = True
) -> dict[str, Any]:
    """Returns the facts of this node, in about a second.

    Args:
        slots: ranks that start here; None for one per GPU, or one on a node without GPUs.
        output_dir: the run's folder, whose disk is checked; empty for none.
        port: the port that rank 0 will listen on, if it starts here.
        quick: without compiling a program.
    """
    gpus, gpu_error = read_gpus()
    is_cpu_only = os.environ.get("DS_ACCELERATOR") == "cpu"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and not visible.startswith(("GPU-", "MIG-")):
        chosen = visible.replace(" ", "").split(",")
        gpus = [gpu for gpu in gpus if str(gpu["index"]) in chosen]
    usable = [] if is_cpu_only else gpus
    parent = existing_parent(Path(output_dir)) if output_dir else None
    output_error = write_error(parent) if parent else ""
    folders = {str(folder): free_bytes(folder) for folder in filter(None, (parent, user_cache(), Path("/dev/shm")))}
    return {
        "host": socket.gethostname(),
        "addresses": [address for address in reachable_addresses() if ":" not in address],
        "slots": slots or len(usable) or 1,
        "gpus": usable,
        "gpu_error": "" if is_cpu_only else gpu_error,
        "cores": cpu_count(),
        "available_bytes": free_host_bytes(),
        "free_bytes": folders,
        "versions": {
            **numeric_versions(),
            **{name: version_of(name) for name in PACKAGES},
            "dsft commit": git_commit() or "no checkout",
            "dsft code": code_hash(),
            "GPU driver": next((gpu["driver"] for gpu in usable), "none"),
            "GPU type": ", ".join(sorted({gpu["name"] for gpu in usable})) or "none",
        },
        "output_error": output_error and f"{parent}: {output_error}",
        "port_error": port_error(port) if port else "",
        "interface_error": interface_error(),
        "compile_error": "" if quick else compile_error(),
        "clock": time.time(),
    }


def read_gpus() -> tuple[list[dict[str, Any]], str]:
    """Returns (all GPUs in nvidia-smi's list, its error or an empty text)."""
    if not shutil.which("nvidia-smi"):
        return [], ""
    command = ["nvidia-smi", f"--query-gpu={GPU_QUERY}", "--format=csv,noheader,nounits"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=15)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [], f"nvidia-smi: {one_line(error)}"
    if result.returncode == 0:
        return parse_gpus(result.stdout), ""
    text = result.stdout + result.stderr
    return [], "" if "No devices were found" in text else f"nvidia-smi: {text.strip()}"


def parse_gpus(text: str) -> list[dict[str, Any]]:
    """Returns the GPUs of nvidia-smi's table; memory in bytes, uncorrectable memory errors since the driver started."""
    gpus = []
    for line in text.strip().splitlines():
        index, name, total, used, driver, errors = line.split(", ")
        gpu = {
            "index": int(index),
            "name": name,
            "memory_bytes": _number(total) * MiB,
            "used_bytes": _number(used) * MiB,
            "driver": driver,
            "ecc_errors": _number(errors),
        }
        gpus.append(gpu)
    return gpus


def _number(text: str) -> int:
    """Parses a number of nvidia-smi; 0 for [N/A]."""
    return int(text) if text.isdigit() else 0


def port_error(port: int) -> str:
    """Returns why rank 0 cannot listen on the port; empty if it can."""
    with contextlib.closing(socket.socket()) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("", port))
            listener.listen()
        except OSError as error:
            return f"port {port}: {error.strerror}; ss -ltnp names the process"
    return ""
