"""Findings about each node by itself. Pure: facts in, findings out."""

from typing import Any

from dsft.cluster.doctor.facts import usable_gpus
from dsft.cluster.doctor.findings import Finding, finding
from dsft.runtime.versions import PACKAGES
from dsft.units import GiB, KiB, MiB, plural

SHARED_BYTES_PER_RANK = 256 * MiB
"""DeepSpeed's collectives on CPU take 66 MiB per rank, NCCL some 10 MiB per pair of GPUs, data loaders what a batch
takes; Docker's default is 64 MiB in all.
"""
FEWEST_FILES = 4096
FREE_CACHE_BYTES = 5 * GiB
OLDEST_DRIVER = {11: 450, 12: 525, 13: 580}
"""NVIDIA's lowest driver for each CUDA (CUDA compatibility guide, minor version compatibility)."""


def check_node(node: str, facts: dict[str, Any], slots: int, *, quick: bool, nvme: bool = False) -> list[Finding]:
    """Everything that one node's facts show.

    Args:
        quick: leave out what only compiling operators needs.
        nvme: whether the run offloads to NVMe.
    """
    found = [*_gpus(node, facts), *_slots(node, facts, slots), *_memory(node, facts, slots), *_limits(node, facts)]
    missing = [name for name in PACKAGES if facts["versions"].get(name) == "missing"]
    if missing:
        found.append(
            finding(
                "package-missing",
                node,
                f"not installed: {', '.join(missing)}",
                f"on {node}: {facts['python_path']} -m pip install -c constraints.txt -e .",
            )
        )
    return found if quick else [*found, *_tools(node, facts, nvme), *_caches(node, facts)]


def _gpus(node: str, facts: dict[str, Any]) -> list[Finding]:
    gpus, found = facts["gpus"], []
    if gpus["error"]:
        found.append(
            finding(
                "gpu-driver",
                node,
                gpus["error"],
                "load the driver's module or reboot after an update: sudo modprobe nvidia; nvidia-smi",
            )
        )
    if facts["cpu_only"] or not gpus["list"]:
        return found
    if not facts["torch_cuda"]:
        found.append(
            finding(
                "torch-without-cuda",
                node,
                f"{len(gpus['list'])} x {gpus['list'][0]['name']}, but torch {facts['versions']['torch']} is built"
                " without CUDA",
                f"{facts['python_path']} -m pip install torch --index-url https://download.pytorch.org/whl/cu128; or"
                " ask for CPU ranks: export DS_ACCELERATOR=cpu",
            )
        )
    oldest = OLDEST_DRIVER.get(_major(facts["torch_cuda"]), 0)
    if 0 < _major(gpus["driver"]) < oldest:
        found.append(
            finding(
                "driver-too-old",
                node,
                f"driver {gpus['driver']}, and torch's CUDA {facts['torch_cuda']} needs {oldest} or newer",
                f"install driver {oldest} or newer, or a torch for an older CUDA",
            )
        )
    for gpu in usable_gpus(facts):
        if gpu["used_bytes"] > 0.05 * gpu["memory_bytes"]:
            found.append(
                finding(
                    "gpu-busy",
                    node,
                    f"GPU {gpu['index']} holds {gpu['used_bytes'] / GiB:.1f} of {gpu['memory_bytes'] / GiB:.0f} GiB of"
                    " other programs",
                    f"ssh {node} nvidia-smi, and end what should not run",
                )
            )
        if gpu["ecc_errors"]:
            found.append(
                finding(
                    "gpu-errors",
                    node,
                    f"GPU {gpu['index']}: {gpu['ecc_errors']} uncorrectable memory errors since the driver was loaded",
                    f"ssh {node} nvidia-smi -q -d ECC,ROW_REMAPPER; reset or replace it, or leave it out: --exclude"
                    f" {node}:{gpu['index']}",
                )
            )
    return found


def _slots(node: str, facts: dict[str, Any], slots: int) -> list[Finding]:
    gpus, cores = len(usable_gpus(facts)), facts["cores"]
    if gpus and slots > gpus:
        return [
            finding(
                "slots",
                node,
                f"slots={slots}, but there are {gpus} GPUs",
                f"write `{node} slots={gpus}` into the host file",
            )
        ]
    if gpus > slots:
        return [
            finding(
                "idle-gpus",
                node,
                f"slots={slots} of {gpus} GPUs",
                f"write `{node} slots={gpus}` into the host file to use them",
            )
        ]
    if not gpus and slots > cores:
        return [
            finding(
                "slots",
                node,
                f"slots={slots}, but there is no GPU and {plural(cores, 'CPU core')}",
                f"write `{node} slots={cores}` or fewer into the host file",
            )
        ]
    return []


def _memory(node: str, facts: dict[str, Any], slots: int) -> list[Finding]:
    found = []
    if facts["available_bytes"] < 0.25 * facts["host_bytes"]:
        found.append(
            finding(
                "memory-low",
                node,
                f"{facts['available_bytes'] / GiB:.1f} of {facts['host_bytes'] / GiB:.0f} GiB of host memory are free",
                f"ssh {node} ps aux --sort=-rss | head",
            )
        )
    shared, needed = facts["shm_bytes"], slots * SHARED_BYTES_PER_RANK
    if shared is not None and shared < needed:
        found.append(
            finding(
                "shared-memory",
                node,
                f"/dev/shm has {shared / MiB:.0f} MiB free; {slots} ranks may take {needed / MiB:.0f}",
                "mount -o remount,size=50% /dev/shm; in a container: docker run --shm-size=16g (or --ipc=host)",
            )
        )
    return found


def _limits(node: str, facts: dict[str, Any]) -> list[Finding]:
    files, locked = facts["limits"]["open files"], facts["limits"]["locked memory"]
    found = []
    if files is not None and files < FEWEST_FILES:
        found.append(
            finding(
                "open-files",
                node,
                f"ulimit -n is {files}, less than {FEWEST_FILES}",
                "echo '* soft nofile 65536' >> /etc/security/limits.conf, and log in again",
            )
        )
    if locked is not None and facts["network"]["infiniband"]:
        found.append(
            finding(
                "locked-memory",
                node,
                f"ulimit -l is {locked // KiB} KiB, with InfiniBand ({', '.join(facts['network']['infiniband'])})",
                "echo '* - memlock unlimited' >> /etc/security/limits.conf, and log in again (sshd and slurmd have"
                " limits of their own)",
            )
        )
    return found


def _tools(node: str, facts: dict[str, Any], nvme: bool) -> list[Finding]:
    tools, gpus, found = facts["tools"], usable_gpus(facts), []
    packages = {"c++": "g++", "ninja": "ninja-build", "Python.h": "python3-dev"}
    missing = [name for name in packages if not tools[name]]
    if missing:
        # Without GPUs DeepSpeed compiles its collectives for the first launch on one node; with GPUs only offload needs
        # compiling.
        found.append(
            finding(
                "compiler",
                node,
                f"missing: {', '.join(missing)}",
                f"apt-get install {' '.join(packages[name] for name in missing)}",
                severity="warning" if gpus else "error",
            )
        )
    elif facts.get("compile_error"):
        found.append(
            finding(
                "compiler",
                node,
                f"a program of one line does not compile: {facts['compile_error']}",
                "apt-get install g++ python3-dev",
                severity="warning" if gpus else "error",
            )
        )
    if nvme and not (tools["libaio"] and tools["libaio.h"]):
        found.append(
            finding(
                "libaio",
                node,
                "libaio and its header are missing, and the run offloads to NVMe",
                "apt-get install libaio-dev",
                severity="error",
            )
        )
    if gpus and not tools["nvcc"]:
        found.append(
            finding(
                "nvcc",
                node,
                "no CUDA toolkit (nvcc)",
                f"install the toolkit of CUDA {facts['torch_cuda']} and export CUDA_HOME, where an operator needs it",
            )
        )
    return found


def _caches(node: str, facts: dict[str, Any]) -> list[Finding]:
    found = []
    for name, folder in facts["caches"].items():
        free = facts["disks"].get(folder)
        if free is not None and free < FREE_CACHE_BYTES:
            variable = {"hub": "HF_HUB_CACHE", "data sets": "HF_DATASETS_CACHE", "operators": "TORCH_EXTENSIONS_DIR"}[
                name
            ]
            found.append(
                finding(
                    "cache-disk",
                    node,
                    f"{free / GiB:.1f} GiB free for {folder} ({name})",
                    f"export {variable}=/a/larger/disk, in .deepspeed_env for all nodes",
                )
            )
    return found


def _major(version: str) -> int:
    head = version.partition(".")[0]
    return int(head) if head.isdigit() else 0
