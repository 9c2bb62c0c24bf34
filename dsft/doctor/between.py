"""Findings of an examination: for each node, and for the differences between nodes. Pure: facts in, findings out."""

import os
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from dsft.units import GiB, MiB

SHARED_BYTES_PER_RANK = 256 * MiB
"""Of /dev/shm. DeepSpeed's CPU collectives need 66 MiB per rank, NCCL 10 MiB per pair of GPUs."""
FREE_DISK_BYTES = GiB
CLOCK_SECONDS = 2.0
SLOW = 0.7
"""A rank whose matrix products run at less than this share of the median rate is a straggler."""
BUSY_SHARE = 0.05
"""Of a GPU's memory, in use by other programs."""
ERRORS = {
    "no-answer": "ssh -v {node} true; it needs a key without a password, and {folder} and Python as they are here",
    "versions": "install the same versions on all nodes: pip install -c constraints.txt -e .",
    "code": "copy the same checkout to all nodes",
    "gpu-driver": "repair the driver: nvidia-smi",
    "torch-without-cuda": "install a CUDA build of torch",
    "slots": "correct slots in the host file, or --num_gpus",
    "output-not-writable": "choose another output_dir, or change its permissions",
    "output-not-shared": "name a folder that all nodes share as output_dir",
    "master-port-busy": "choose another --master_port, or leave it out",
    "network-blocked": "look for a firewall, or name another --master_addr",
    "interface": "correct the variable, or unset it",
    "wrong-sum": "test that GPU and its links",
}
"""Code of a finding that stops a launch -> its fix."""
WARNINGS = {
    "gpu-errors": "reset or replace the GPU",
    "gpu-busy": "nvidia-smi lists them",
    "shared-memory": "raise it: mount -o remount,size=8G /dev/shm, or docker run --shm-size=8g",
    "disk": "free some space, or choose another disk",
    "compiler": "install g++ and Python's headers",
    "driver-versions": "install the same driver on all nodes",
    "clocks": "synchronise it: chronyc makestep",
    "slow-rank": "look for other processes, heat, or a power limit there",
}
CODES = {"dsft code": "code", "GPU driver": "driver-versions", "GPU type": "driver-versions"}
"""Differing fact -> code of its finding; all others have `versions`."""


@dataclass(frozen=True)
class Finding:
    code: str
    where: str
    """Name of the node or nodes."""
    message: str
    fix: str
    severity: Literal["error", "warning"]


def finding(code: str, where: str, message: str) -> Finding:
    """Returns the finding with its severity and its fix."""
    severity = "error" if code in ERRORS else "warning"
    fix = (ERRORS | WARNINGS)[code].format(node=where, folder=os.getcwd())
    return Finding(code, where, message, fix, severity)


def check_node(node: str, facts: dict[str, Any]) -> Iterator[Finding]:
    """Yields the findings of a single node."""
    slots = facts["slots"]
    gpus = facts["gpus"]
    if facts["gpu_error"]:
        yield finding("gpu-driver", node, facts["gpu_error"])
    if gpus and "+cpu" in facts["versions"]["torch"]:
        message = f"torch {facts['versions']['torch']} is a CPU build, but there are {len(gpus)} GPUs"
        yield finding("torch-without-cuda", node, message)
    if gpus and slots > len(gpus):
        yield finding("slots", node, f"{slots} ranks, but {len(gpus)} GPUs")
    for gpu in gpus[:slots]:
        name = f"GPU {gpu['index']} ({gpu['name']})"
        if gpu["ecc_errors"]:
            message = f"{name}: {gpu['ecc_errors']} uncorrectable memory errors since the driver started"
            yield finding("gpu-errors", node, message)
        if gpu["used_bytes"] > BUSY_SHARE * gpu["memory_bytes"]:
            message = f"{name}: {gpu['used_bytes'] / GiB:.1f} of {gpu['memory_bytes'] / GiB:.0f} GiB are in use"
            yield finding("gpu-busy", node, message)
    for folder, free in facts["free_bytes"].items():
        is_shared_memory = folder == "/dev/shm"
        needed = slots * SHARED_BYTES_PER_RANK if is_shared_memory else FREE_DISK_BYTES
        if free is not None and free < needed:
            message = f"{folder}: {free / GiB:.2f} GiB free, {needed / GiB:.2f} GiB needed"
            yield finding("shared-memory" if is_shared_memory else "disk", node, message)
    for code, key in (
        ("output-not-writable", "output_error"),
        ("master-port-busy", "port_error"),
        ("interface", "interface_error"),
        ("compiler", "compile_error"),
    ):
        if facts[key]:
            yield finding(code, node, facts[key])


def check_between(facts: dict[str, dict[str, Any]], clock_offsets: dict[str, float]) -> Iterator[Finding]:
    """Yields the differences between nodes, also of clocks by the seconds that they are ahead of this machine's."""
    if not facts:  # no node has answered
        return
    for name in next(iter(facts.values()))["versions"]:
        if name == "dsft commit":  # the hash of the code decides
            continue
        code = CODES.get(name, "versions")
        values = {node: each["versions"][name] for node, each in facts.items()}
        usual = statistics.mode(values.values())
        for node, value in values.items():
            if value != usual:
                yield finding(code, node, f"{name} {value}; {usual} on other nodes")
    for node, offset in clock_offsets.items():
        ahead = offset - statistics.median(clock_offsets.values())
        if abs(ahead) > CLOCK_SECONDS:
            yield finding("clocks", node, f"its clock is {abs(ahead):.0f} s {'ahead' if ahead > 0 else 'behind'}")


def check_measured(measured: list[dict[str, Any]]) -> Iterator[Finding]:
    """Yields the findings of all ranks' measurements, as measure_rank returns them."""
    hosts = []
    for each in measured:
        if each["is_wrong"]:
            yield finding("wrong-sum", f"rank {each['rank']} on {each['host']}", "an all-reduce returned a wrong sum")
        if not each["sees_output"] and each["host"] not in hosts:
            hosts.append(each["host"])
            yield finding("output-not-shared", each["host"], "does not see the output folder of the first node")
        middle = statistics.median(other["flops"] for other in measured)
        if each["flops"] < SLOW * middle:
            message = f"multiplies matrices at {each['flops'] / middle:.0%} of the median rate: a straggler"
            yield finding("slow-rank", f"rank {each['rank']} on {each['host']}", message)
