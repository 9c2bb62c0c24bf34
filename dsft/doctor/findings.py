"""What the doctor reports: each kind of finding has one entry in MESSAGES, with its severity and why it matters, and
one line in docs/doctor.md.
"""

from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning", "note"]

MESSAGES: dict[str, tuple[Severity, str]] = {
    # Reaching the nodes.
    "unknown-host": ("error", "no rank can be started on a host whose name does not resolve"),
    "mtu-path": ("error", "ssh, NCCL and gloo stop at the first large packet, without an error"),
    "host-unreachable": ("error", "no rank can be started on a host that does not answer"),
    "ssh-refused": ("error", "DeepSpeed starts the ranks of every node through ssh"),
    "ssh-password": ("error", "DeepSpeed's launcher cannot type a password; it would fail or wait for ever"),
    "ssh-host-key": ("error", "ssh would ask whether to trust the host, and the launcher cannot answer"),
    "ssh-failed": ("error", "DeepSpeed starts the ranks of every node through ssh"),
    "no-folder": ("error", "ranks start in the same folder as the launcher, on every node"),
    "no-python": ("error", "ranks start with the same path of Python as the launcher, on every node"),
    "no-dsft": ("error", "every rank runs the same dsft; here it cannot be imported, or is an older one"),
    "node-silent": ("error", "a node that does not answer now will hold up every collective"),
    "node-failed": ("error", "what cannot be examined may not work either"),
    "missing-ranks": ("error", "all ranks wait for the missing ones"),
    # Each node by itself.
    "gpu-driver": ("error", "without its driver no GPU can be used"),
    "torch-without-cuda": ("error", "this torch cannot see the GPUs: ranks would run on the CPU"),
    "driver-too-old": ("error", "torch's CUDA cannot start on an older driver"),
    "package-missing": ("error", "every rank imports it"),
    "slots": ("error", "ranks without a GPU or core of their own fail or slow each other down"),
    "idle-gpus": ("note", "GPUs beyond the slots stay idle"),
    "gpu-busy": ("warning", "the plan counts on that memory, and the slowest GPU sets everyone's pace"),
    "gpu-errors": ("warning", "a GPU with memory errors corrupts results or falls out of the run"),
    "memory-low": ("warning", "loading and offload need host memory; without it the kernel kills a rank"),
    "shared-memory": (
        "warning",
        "NCCL, gloo and data loaders exchange through /dev/shm; too little ends in a bus error",
    ),
    "open-files": ("warning", "each rank holds a connection to every other, and its data files"),
    "locked-memory": ("warning", "InfiniBand, NCCL and NVMe offload lock their buffers"),
    "compiler": ("warning", "DeepSpeed compiles its operators at first use (CPU ranks' collectives, offload, NVMe)"),
    "nvcc": (
        "note",
        "DeepSpeed's CUDA operators are compiled with the toolkit of torch's CUDA; plain training needs none",
    ),
    "libaio": ("note", "offload to NVMe needs it; nothing else does"),
    "cache-disk": ("warning", "models, data sets and compiled operators are written there"),
    "hub-offline": ("error", "nothing is downloaded then, and the ranks of this node need the files"),
    "hub-download": ("note", "each node downloads by itself, at the same time"),
    "patch-refused": ("error", "dsft mends a fault of that library there, and a training without it would be wrong"),
    "patch-changed": ("warning", "dsft replaces that code of the library; what it saves in time or memory may be lost"),
    # Between nodes.
    "versions": (
        "error",
        "ranks of different code compute differently, or wait for collectives that the others do not call",
    ),
    "driver-versions": (
        "warning",
        "different drivers and GPU types work together, but not always, and at the slowest one's pace",
    ),
    "code": (
        "error",
        "ranks of different code compute differently, or wait for collectives that the others do not call",
    ),
    "clocks": ("warning", "logs of nodes cannot be compared, file times on shared folders lie, and time-outs misjudge"),
    "own-name": (
        "warning",
        (
            "gloo tells the others the address of the node's own name, where they do not reach it; dsft names an"
            " interface itself, other programs do not"
        ),
    ),
    "name-unresolved": ("warning", "accelerate, mpirun and your own ssh from there go by names"),
    "master-port-busy": ("error", "rank 0 listens there for all others; the launch fails at once"),
    "default-port-busy": (
        "warning",
        "`deepspeed` takes this port by default and would fail; dsft train takes a free one",
    ),
    "port-blocked": ("error", "ranks connect to that port; where a firewall drops them they wait until they time out"),
    "network-blocked": ("error", "NCCL and gloo connect every node with every other on ports of their choice"),
    "master-address": ("error", "all ranks connect to that address first"),
    "wrong-machine": ("error", "two machines share an address or name: ranks would talk to the wrong one"),
    "mtu": (
        "warning",
        "larger packets get lost on the way to the node that takes smaller ones: connections that stand, then hang",
    ),
    "interface": ("error", "NCCL or gloo cannot start on an interface that is not there"),
    "interface-speed": ("warning", "the slowest card sets the pace of every collective"),
    "infiniband": ("warning", "NCCL falls back to plain sockets on all nodes, or fails to connect"),
    # Files.
    "config-differs": (
        "error",
        "a rank with other options computes something else; training compares them and exits at its start",
    ),
    "data-missing": ("error", "every node reads the data itself"),
    "data-differs": ("error", "ranks would train on different data, or disagree about the number of steps and hang"),
    "model-missing": ("error", "every node reads the model and tokenizer itself"),
    "model-differs": ("error", "ranks would start from different weights or tokens"),
    "output-not-writable": ("error", "checkpoints are written there from every node: each rank saves its own shard"),
    "output-not-shared": (
        "error",
        "a checkpoint's shards would lie scattered over the nodes, and no run could resume from it",
    ),
    "disk": ("error", "a checkpoint that does not fit ends the run while it is written"),
    # The plan.
    "configuration": ("error", "training would refuse it with the same message"),
    "plan": ("error", "by prediction it runs out of memory"),
    "plan-unknown": ("note", "memory and disk were not checked against the run"),
    # The smoke test.
    "smoke-skipped": ("note", "nothing was measured"),
    "smoke-failed": ("error", "training joins and adds up in the same way"),
    "smoke-silent": ("error", "every collective of the training would wait for it"),
    "wrong-sum": ("error", "gradients would be wrong without an error"),
    "packet-loss": ("warning", "each lost packet holds a collective up until it is sent again"),
    "slow-link": ("warning", "every collective waits for the slowest link"),
    "slow-node": ("warning", "every collective waits for the slowest link, and all of this node's are slow"),
    "slow-inside": ("warning", "every collective waits for the slowest node"),
    "slow-rank": ("warning", "every step waits for the slowest rank"),
    "below-assumed": (
        "warning",
        "the planner's data sheets assume more; what was measured is kept, and plans for these nodes use it",
    ),
}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing the doctor noticed."""

    code: str  # key of MESSAGES and of docs/doctor.md
    severity: Severity
    message: str
    where: str  # node names, or "here" for the machine that dsft doctor runs on
    why: str
    fix: str  # the command that helps, or what to change


def finding(code: str, where: str, message: str, fix: str, *, severity: Severity | None = None) -> Finding:
    """A finding with its kind's reason, and severity where no other is given."""
    usual, why = MESSAGES[code]
    return Finding(code=code, severity=severity or usual, message=message, where=where, why=why, fix=fix)


def join(names: list[str]) -> str:
    """Node names for a message."""
    return ", ".join(names) if len(names) <= 6 else f"{', '.join(names[:5])} and {len(names) - 5} more"
