"""Findings of an examination: each node by itself, and the nodes compared. Pure: facts in, findings out."""

import statistics
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from dsft.runtime.software import PACKAGES
from dsft.units import GiB, MiB

SHARED_BYTES_PER_RANK = 256 * MiB
"""Of /dev/shm. DeepSpeed's CPU collectives take 66 MiB a rank, NCCL 10 MiB for a pair of GPUs."""
FREE_DISK_BYTES = GiB
CLOCK_SECONDS = 2.0
SLOW = 0.7
"""A rank that multiplies matrices at less than this share of the median rate is a straggler."""
BUSY_SHARE = 0.05
"""Of a GPU's memory, in use by others."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something that is wrong, where, and what to do."""

    code: str
    where: str
    """Name of a node, or of several."""
    message: str
    fix: str
    severity: Literal["error", "warning"] = "error"


def check_node(node: str, facts: dict[str, Any]) -> Iterator[Finding]:
    """Yields what is wrong with a node by itself."""
    slots = facts["slots"]
    gpus = facts["gpus"]
    if facts["gpu_error"]:
        yield Finding(code="gpu-driver", where=node, message=facts["gpu_error"], fix="repair the driver: nvidia-smi")
    if gpus and "+cpu" in facts["versions"]["torch"]:
        message = f"torch {facts['versions']['torch']} is a CPU build, but there are {len(gpus)} GPUs"
        yield Finding(code="torch-without-cuda", where=node, message=message, fix="install a CUDA build of torch")
    if gpus and slots > len(gpus):
        message = f"{slots} ranks, but {len(gpus)} GPUs"
        yield Finding(code="slots", where=node, message=message, fix="correct slots in the host file, or --num_gpus")
    missing = [name for name in PACKAGES if facts["versions"][name] == "missing"]
    if missing:
        message = f"not installed: {', '.join(missing)}"
        yield Finding(code="package-missing", where=node, message=message, fix=f"pip install {' '.join(missing)}")
    for gpu in gpus[:slots]:
        name = f"GPU {gpu['index']} ({gpu['name']})"
        if gpu["ecc_errors"]:
            message = f"{name}: {gpu['ecc_errors']} uncorrectable memory errors since the driver started"
            yield Finding(
                code="gpu-errors", where=node, message=message, fix="reset or replace the GPU", severity="warning"
            )
        if gpu["used_bytes"] > BUSY_SHARE * gpu["memory_bytes"]:
            message = f"{name}: {gpu['used_bytes'] / GiB:.1f} of {gpu['memory_bytes'] / GiB:.0f} GiB are in use"
            yield Finding(code="gpu-busy", where=node, message=message, fix="nvidia-smi lists them", severity="warning")
    for folder, free in facts["free_bytes"].items():
        if folder == "/dev/shm":
            needed = slots * SHARED_BYTES_PER_RANK
            code = "shared-memory"
            fix = "raise it: mount -o remount,size=8G /dev/shm, or docker run --shm-size=8g"
        else:
            needed = FREE_DISK_BYTES
            code = "disk"
            fix = "free some space, or choose another disk"
        if free is not None and free < needed:
            message = f"{folder}: {free / GiB:.2f} GiB free, {needed / GiB:.2f} GiB needed"
            yield Finding(code=code, where=node, message=message, fix=fix, severity="warning")
    for code, key, fix in (
        ("output-not-writable", "output_error", "choose another output_dir, or change its permissions"),
        ("master-port-busy", "port_error", "choose another --master_port, or leave it out"),
        ("interface", "interface_error", "correct the variable, or unset it"),
    ):
        if facts[key]:
            yield Finding(code=code, where=node, message=facts[key], fix=fix)
    if facts["compile_error"]:
        fix = "install g++ and Python's headers"
        yield Finding(code="compiler", where=node, message=facts["compile_error"], fix=fix, severity="warning")


def check_between(facts: dict[str, dict[str, Any]], clock_offsets: dict[str, float]) -> Iterator[Finding]:
    """Yields how nodes differ.

    Args:
        facts: by node.
        clock_offsets: by node, seconds that its clock is ahead of this machine's.
    """
    for name in next(iter(facts.values()), {"versions": {}})["versions"]:
        if name == "dsft commit":  # the hash of the code decides
            continue
        yield from _differences(name, {node: each["versions"][name] for node, each in facts.items()}, "error")
    for name in ("GPU driver", "GPU type"):
        yield from _differences(name, {node: each["drivers"][name] for node, each in facts.items()}, "warning")
    hosts = Counter(each["host"] for each in facts.values())
    for node, each in facts.items():
        if hosts[each["host"]] > 1:
            message = f"its host name is {each['host']}, as another node's is"
            yield Finding(code="wrong-machine", where=node, message=message, fix="correct the addresses or names")
    if clock_offsets:
        middle = statistics.median(clock_offsets.values())
        for node, offset in clock_offsets.items():
            if abs(offset - middle) > CLOCK_SECONDS:
                message = f"its clock is {abs(offset - middle):.0f} s {'ahead' if offset > middle else 'behind'}"
                yield Finding(
                    code="clocks",
                    where=node,
                    message=message,
                    fix="synchronise it: chronyc makestep",
                    severity="warning",
                )


def _differences(name: str, values: dict[str, str], severity: Literal["error", "warning"]) -> Iterator[Finding]:
    counts = Counter(values.values())
    if len(counts) < 2:
        return
    usual = counts.most_common(1)[0][0]
    for node, value in values.items():
        if value != usual:
            code = "code" if name == "dsft code" else "versions" if severity == "error" else "driver-versions"
            message = f"{name} {value}; {usual} on other nodes"
            fix = "install the same versions on all nodes" if code != "code" else "copy the same checkout to all nodes"
            yield Finding(code=code, where=node, message=message, fix=fix, severity=severity)


def check_measured(measured: list[dict[str, Any]]) -> Iterator[Finding]:
    """Yields what the measurements of all ranks show.

    Args:
        measured: of each rank: rank, host, whether its sum was wrong, whether it sees the output folder, flops of a
            matrix product (0: not measured).
    """
    hosts = []
    for each in measured:
        where = f"rank {each['rank']} on {each['host']}"
        if each["is_wrong"]:
            message = "an all-reduce returned a wrong sum"
            yield Finding(code="wrong-sum", where=where, message=message, fix="test that GPU and its links")
        if not each["sees_output"] and each["host"] not in hosts:
            hosts.append(each["host"])
            message = "does not see the output folder of the first node"
            fix = "name a folder that all nodes share as output_dir"
            yield Finding(code="output-not-shared", where=each["host"], message=message, fix=fix)
    rates = [each["flops"] for each in measured]
    for each in measured:
        if each["flops"] < SLOW * statistics.median(rates):
            where = f"rank {each['rank']} on {each['host']}"
            message = (
                f"multiplies matrices at {each['flops'] / statistics.median(rates):.0%} of the median rate: a straggler"
            )
            fix = "look for other processes, heat, or a power limit there"
            yield Finding(code="slow-rank", where=where, message=message, fix=fix, severity="warning")
