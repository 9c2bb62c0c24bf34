"""What terms add up to on a machine, and which of its resources is too small for that."""

from dataclasses import dataclass

from dsft.planner.terms import Term, peak_bytes
from dsft.runtime.hardware import Machine
from dsft.units import GiB

HOST_SHARE = 0.95
"""Of a node's memory; the rest is the system's."""
CONTEXT_BYTES = 2**29
"""CUDA's context on one GPU: outside of what torch allocates."""
COMMUNICATION_BYTES = 2**29
"""NCCL's buffers on one GPU, where there are several: also outside of torch."""
FRAGMENTATION = 0.03
"""What the allocator holds beyond what is used, with expandable segments."""
MEMORY_ERROR = 0.1
"""Largest difference of a published peak from its prediction (tests/planner/test_published.py)."""
OVERHEAD = "context, NCCL and fragmentation"


@dataclass(frozen=True, kw_only=True)
class Needs:
    """Peaks by place."""

    device_bytes: int
    """On one GPU (one rank, on CPU), context and communication buffers included."""
    host_bytes: int
    """Of one node, all its ranks together; on CPU what the ranks hold is in it."""
    nvme_bytes: int
    binds: str
    """Of "GPU memory", "host memory", "NVMe" and "locked memory" what is too small, joined by " and "; empty where it
    fits.
    """


def add_up(terms: list[Term], machine: Machine) -> tuple[list[Term], Needs]:
    """Return the terms with what a GPU holds beyond them, and their peaks beside what the machine has."""
    if machine.has_gpu:
        terms = [*terms, overhead(peak_bytes(terms, "device"), machine)]
    device, host, nvme = (peak_bytes(terms, place) for place in ("device", "host", "nvme"))
    if not machine.has_gpu:
        host += machine.ranks_per_node * device  # CPU ranks hold everything in host memory
    locked = sum(term.num_bytes for term in terms if term.name.startswith("swap buffers")) // machine.ranks_per_node
    limit = machine.memlock_bytes
    lacking = {
        "GPU memory": machine.has_gpu and device > machine.device_bytes,
        "host memory": host > HOST_SHARE * machine.host_bytes,
        "NVMe": nvme > machine.nvme_bytes,
        "locked memory": bool(nvme) and limit is not None and locked > limit,  # of one rank, for transfers to NVMe
    }
    binds = " and ".join(name for name, lacks in lacking.items() if lacks)
    return terms, Needs(device_bytes=device, host_bytes=host, nvme_bytes=nvme, binds=binds)


def overhead(allocated_bytes: int, machine: Machine) -> Term:
    """Count what one GPU holds beyond torch's allocations."""
    communication = COMMUNICATION_BYTES if machine.world_size > 1 else 0
    return Term(
        name=OVERHEAD,
        num_bytes=CONTEXT_BYTES + communication + int(FRAGMENTATION * allocated_bytes),
        formula=(
            f"{CONTEXT_BYTES / GiB:.1f} GiB context + {communication / GiB:.1f} GiB NCCL + {FRAGMENTATION:.0%} of what"
            " is allocated"
        ),
    )
