"""The parts of a prediction: what they add up to on a machine, and which of its resources is too small for that."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar, get_args

from dsft.runtime.hardware import COMMUNICATOR_BYTES, CONTEXT_BYTES, Machine
from dsft.units import GiB, plural

Phase = Literal["always", "compute", "step", "save", "load"]
"""always: from the first step to the last. compute: forward and backward of a micro batch. step: the optimizer's. save:
while a checkpoint is written. load: before training.
"""


@dataclass(frozen=True, kw_only=True)
class Term:
    """Memory of one kind."""

    name: str
    """What it holds: "bf16 weights", "gathered parameters", "logits and loss" ..."""
    num_bytes: int
    """place device: on one GPU (one rank, where ranks run on CPU). place host, nvme: on one node, all its ranks
    together.
    """
    formula: str
    """The arithmetic with its numbers, for `dsft plan --explain`."""
    phase: Phase = "always"
    place: Literal["device", "host", "nvme"] = "device"


def bytes_by_phase(terms: Iterable[Term], place: str) -> dict[Phase, int]:
    """The sums of the terms of each phase in one place."""
    sums: dict[Phase, int] = dict.fromkeys(get_args(Phase), 0)
    for term in terms:
        if term.place == place:
            sums[term.phase] += term.num_bytes
    return sums


def peak_bytes(terms: Iterable[Term], place: str) -> int:
    """The largest sum of what is alive together: the terms of "always" and those of one other phase."""
    sums = bytes_by_phase(terms, place)
    # Loading comes before optimizer states and buffers exist, so it stands alone.
    return max(sums["always"] + max(sums["compute"], sums["step"], sums["save"]), sums["load"])


HOST_SHARE = 0.95
"""Of a node's memory; the rest is the system's."""
FRAGMENTATION = 0.03
"""Of what torch allocates, what its allocator holds beyond it where memory is short (with expandable segments)."""
ZERO_3_FRAGMENTATION = 0.07
"""The same under ZeRO-3 while memory lasts: gathered parameters of many sizes come and go."""
RESERVE_BYTES = 2**29
"""Left free on a GPU, where a plan can be had that does."""
MEMORY_ERROR = 0.1
"""Largest difference of a published peak from its prediction (tests/planner/test_published.py)."""
OVERHEAD = "context, NCCL and fragmentation"
FULL_TRAINING = "over the full training"
"""The comparison of a plan with what was measured at the end, in `plan_check` of run.json."""


@dataclass(frozen=True, kw_only=True)
class OutsideMemory:
    """Bytes that one GPU holds outside of torch's allocator: assumed (docs/planner.md has the sources), until
    `dsft plan --calibrate` has measured them.
    """

    context_bytes: int = CONTEXT_BYTES
    """CUDA's context with the libraries' kernels."""
    communicators_bytes: tuple[int, ...] = tuple(number * COMMUNICATOR_BYTES for number in (1, 2, 3))
    """NCCL's buffers with one communicator, two, and three."""
    measured: bool = False

    def total_bytes(self, communicators: int) -> int:
        return self.context_bytes + self.of_communicators(communicators)

    def of_communicators(self, number: int) -> int:
        return self.communicators_bytes[number - 1] if number else 0


ASSUMED = OutsideMemory()


@dataclass(frozen=True, kw_only=True)
class Needs:
    """Peaks by place."""

    device_bytes: int
    """On one GPU (one rank, on CPU), context and communication buffers included."""
    host_bytes: int
    """Of one node, all its ranks together; on CPU what the ranks hold is in it."""
    nvme_bytes: int
    low_headroom: bool
    """Whether it fits, but leaves less on the GPU than fragmentation under ZeRO-3 and the reserve may take."""
    limiting_resource: str
    """Of "GPU memory", "host memory", "NVMe" and "locked memory" what is too small, joined by " and "; empty where it
    fits.
    """


def add_up(
    terms: list[Term], machine: Machine, outside: OutsideMemory, *, communicators: int, stage: int
) -> tuple[list[Term], Needs]:
    """Return the terms with what a GPU holds beyond them, and their peaks beside what the machine has.

    Args:
        communicators: of NCCL, that the GPUs of a run make; 0 with one GPU.
        stage: of ZeRO.
    """
    allocated = peak_bytes(terms, "device")
    if machine.has_gpu:
        known = "measured" if outside.measured else "assumed"
        num_bytes = outside.total_bytes(communicators) + int(FRAGMENTATION * allocated)
        formula = (
            f"{outside.context_bytes / GiB:.1f} GiB context + {outside.of_communicators(communicators) / GiB:.1f} GiB"
            f" for {plural(communicators, 'communicator')} of NCCL, {known} + {FRAGMENTATION:.0%} of what is allocated"
        )
        terms = [*terms, Term(name=OVERHEAD, num_bytes=num_bytes, formula=formula)]
    device, host, nvme = (peak_bytes(terms, place) for place in ("device", "host", "nvme"))
    if not machine.has_gpu:
        host += machine.ranks_per_node * device  # CPU ranks hold everything in host memory
    locked = sum(term.num_bytes for term in terms if term.name.startswith("swap buffers")) // machine.ranks_per_node
    limit = machine.memlock_bytes
    missing = {
        "GPU memory": machine.has_gpu and device > machine.device_bytes,
        "host memory": host > HOST_SHARE * machine.host_bytes,
        "NVMe": nvme > machine.nvme_bytes,
        "locked memory": bool(nvme) and limit is not None and locked > limit,  # of one rank, for transfers to NVMe
    }
    limiting_resource = " and ".join(name for name, is_missing in missing.items() if is_missing)
    reserve = RESERVE_BYTES + (int((ZERO_3_FRAGMENTATION - FRAGMENTATION) * allocated) if stage == 3 else 0)
    low_headroom = machine.has_gpu and not limiting_resource and device + reserve > machine.device_bytes
    return terms, Needs(
        device_bytes=device,
        host_bytes=host,
        nvme_bytes=nvme,
        low_headroom=low_headroom,
        limiting_resource=limiting_resource,
    )


class Fitting(Protocol):
    """A plan, of training or of evaluation."""

    fits: bool
    low_headroom: bool


P = TypeVar("P", bound=Fitting)


def with_room(plans: Iterable[P]) -> list[P]:
    """Return the plans that fit and leave the reserve; where none does, those that fit."""
    fitting = [plan for plan in plans if plan.fits]
    return [plan for plan in fitting if not plan.low_headroom] or fitting
