"""Findings about each node by itself. Pure: facts in, findings out."""

from collections.abc import Iterator

from dsft.doctor.facts import NodeFacts
from dsft.doctor.findings import Finding, finding
from dsft.runtime.versions import PACKAGES
from dsft.units import GiB, MiB, plural

SHARED_BYTES_PER_RANK = 256 * MiB
"""DeepSpeed's collectives on CPU take 66 MiB per rank, NCCL some 10 MiB per pair of GPUs, data loaders what a batch
takes; Docker's default is 64 MiB in all.
"""
FEWEST_FILES = 4096
FREE_CACHE_BYTES = 5 * GiB
OLDEST_DRIVER = {11: 450, 12: 525, 13: 580}
"""NVIDIA's lowest driver for each CUDA (CUDA compatibility guide, minor version compatibility)."""


def check_node(node: str, facts: NodeFacts, *, quick: bool, nvme: bool = False) -> list[Finding]:
    """Everything that one node's facts show.

    Args:
        quick: leave out what only compiling operators needs.
        nvme: whether the run offloads to NVMe.
    """
    findings = [*_driver(node, facts), *_gpus(node, facts), *_slots(node, facts), *_memory(node, facts)]
    findings += _limits(node, facts)
    missing = [name for name in PACKAGES if facts.versions.get(name) == "missing"]
    if missing:
        fix = f"on {node}: {facts.python_path} -m pip install -c constraints.txt -e ."
        findings.append(finding("package-missing", node, f"not installed: {', '.join(missing)}", fix))
    return findings if quick else [*findings, *_tools(node, facts, nvme), *_caches(node, facts)]


def _driver(node: str, facts: NodeFacts) -> Iterator[Finding]:
    gpus = facts.gpus
    if gpus.error:
        fix = "load the driver's module or reboot after an update: sudo modprobe nvidia; nvidia-smi"
        yield finding("gpu-driver", node, gpus.error, fix)
    if facts.cpu_only or not gpus.cards:
        return
    if not facts.torch_cuda:
        torch = facts.versions["torch"]
        yield finding(
            "torch-without-cuda",
            node,
            f"{len(gpus.cards)} x {gpus.cards[0].name}, but torch {torch} is built without CUDA",
            f"{facts.python_path} -m pip install torch --index-url https://download.pytorch.org/whl/cu128; or ask for"
            " CPU ranks: export DS_ACCELERATOR=cpu",
        )
    oldest = OLDEST_DRIVER.get(_major(facts.torch_cuda), 0)
    if 0 < _major(gpus.driver) < oldest:
        message = f"driver {gpus.driver}, and torch's CUDA {facts.torch_cuda} needs {oldest} or newer"
        fix = f"install driver {oldest} or newer, or a torch for an older CUDA"
        yield finding("driver-too-old", node, message, fix)


def _gpus(node: str, facts: NodeFacts) -> Iterator[Finding]:
    for gpu in facts.usable_gpus:
        if gpu.used_bytes > 0.05 * gpu.memory_bytes:
            used, memory = gpu.used_bytes / GiB, gpu.memory_bytes / GiB
            message = f"GPU {gpu.index} holds {used:.1f} of {memory:.0f} GiB of other programs"
            yield finding("gpu-busy", node, message, f"ssh {node} nvidia-smi, and end what should not run")
        if gpu.ecc_errors:
            yield finding(
                "gpu-errors",
                node,
                f"GPU {gpu.index}: {gpu.ecc_errors} uncorrectable memory errors since the driver was loaded",
                f"ssh {node} nvidia-smi -q -d ECC,ROW_REMAPPER; reset or replace it, or leave it out: --exclude"
                f" {node}:{gpu.index}",
            )


def _slots(node: str, facts: NodeFacts) -> Iterator[Finding]:
    slots, gpus, cores = facts.slots, len(facts.usable_gpus), facts.cores
    fix = f"write `{node} slots={gpus or cores}` into the host file"
    if gpus and slots > gpus:
        yield finding("slots", node, f"slots={slots}, but there are {gpus} GPUs", fix)
    elif gpus > slots:
        yield finding("idle-gpus", node, f"slots={slots} of {gpus} GPUs", f"{fix} to use them")
    elif not gpus and slots > cores:
        message = f"slots={slots}, but there is no GPU and {plural(cores, 'CPU core')}"
        yield finding("slots", node, message, fix.replace(" into", " or fewer into"))


def _memory(node: str, facts: NodeFacts) -> Iterator[Finding]:
    if facts.available_bytes < 0.25 * facts.host_bytes:
        free, total = facts.available_bytes / GiB, facts.host_bytes / GiB
        message = f"{free:.1f} of {total:.0f} GiB of host memory are free"
        yield finding("memory-low", node, message, f"ssh {node} ps aux --sort=-rss | head")
    shared, needed = facts.shm_bytes, facts.slots * SHARED_BYTES_PER_RANK
    if shared is not None and shared < needed:
        message = f"/dev/shm has {shared / MiB:.0f} MiB free; {facts.slots} ranks may take {needed / MiB:.0f}"
        fix = "mount -o remount,size=50% /dev/shm; in a container: docker run --shm-size=16g (or --ipc=host)"
        yield finding("shared-memory", node, message, fix)


def _limits(node: str, facts: NodeFacts) -> Iterator[Finding]:
    if facts.open_files is not None and facts.open_files < FEWEST_FILES:
        message = f"ulimit -n is {facts.open_files}, less than {FEWEST_FILES}"
        fix = "echo '* soft nofile 65536' >> /etc/security/limits.conf, and log in again"
        yield finding("open-files", node, message, fix)
    if facts.locked_bytes is not None and facts.network.infiniband:
        cards = ", ".join(facts.network.infiniband)
        message = f"ulimit -l is {facts.locked_bytes // 1024} KiB, with InfiniBand ({cards})"
        fix = (
            "echo '* - memlock unlimited' >> /etc/security/limits.conf, and log in again (sshd and slurmd have limits"
            " of their own)"
        )
        yield finding("locked-memory", node, message, fix)


def _tools(node: str, facts: NodeFacts, nvme: bool) -> Iterator[Finding]:
    tools, gpus = facts.tools, facts.usable_gpus
    packages = {"c++": "g++", "ninja": "ninja-build", "Python.h": "python3-dev"}
    missing = [name for name in packages if not tools[name]]
    # Without GPUs DeepSpeed compiles its collectives for the first launch on one node; with GPUs only offload needs
    # compiling.
    severity = "warning" if gpus else "error"
    if missing:
        fix = f"apt-get install {' '.join(packages[name] for name in missing)}"
        yield finding("compiler", node, f"missing: {', '.join(missing)}", fix, severity=severity)
    elif facts.compile_error:
        message = f"a program of one line does not compile: {facts.compile_error}"
        yield finding("compiler", node, message, "apt-get install g++ python3-dev", severity=severity)
    if nvme and not (tools["libaio"] and tools["libaio.h"]):
        message = "libaio and its header are missing, and the run offloads to NVMe"
        yield finding("libaio", node, message, "apt-get install libaio-dev", severity="error")
    if gpus and not tools["nvcc"]:
        fix = f"install the toolkit of CUDA {facts.torch_cuda} and export CUDA_HOME, where an operator needs it"
        yield finding("nvcc", node, "no CUDA toolkit (nvcc)", fix)


def _caches(node: str, facts: NodeFacts) -> Iterator[Finding]:
    variables = {"hub": "HF_HUB_CACHE", "data sets": "HF_DATASETS_CACHE", "operators": "TORCH_EXTENSIONS_DIR"}
    for name, folder in facts.caches.items():
        free = facts.disks.get(folder)
        if free is not None and free < FREE_CACHE_BYTES:
            message = f"{free / GiB:.1f} GiB free for {folder} ({name})"
            fix = f"export {variables[name]}=/a/larger/disk, in .deepspeed_env for all nodes"
            yield finding("cache-disk", node, message, fix)


def _major(version: str) -> int:
    head = version.partition(".")[0]
    return int(head) if head.isdigit() else 0
