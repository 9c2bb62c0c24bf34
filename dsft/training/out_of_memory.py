"""What a user needs to know when memory runs out: the plan, what was measured, and the next smaller plan."""

import contextlib
import re
import traceback
from collections.abc import Iterator
from typing import Literal

import torch

from dsft.errors import UserError, one_line
from dsft.planner.plan import Plan
from dsft.run_setup.plan import smaller_plan
from dsft.run_setup.resolve import ResolvedRun
from dsft.runtime.hardware import peak_memory_bytes
from dsft.units import GiB

Memory = Literal["GPU", "host", "pinned host"]

SAID_OF_HOST = re.compile(r"can't allocate memory|not enough memory")
"""What torch says of host memory (c10/core/CPUAllocator.cpp)."""
SAID_OF_GPU = re.compile(
    r"(CUDA|HIP)( driver)? error: out of memory"  # torch.AcceleratorError; the driver's with expandable segments
    r"|CU\w+_STATUS_ALLOC_FAILED"  # workspace of cuBLAS, cuDNN ...
    r"|(Cuda|HIP) failure (\d+ )?'out of memory'|Failed to CUDA \w+"  # NCCL's buffers (NCCL, src/include/alloc.h)
)
"""What libraries say of GPU memory that torch's own allocator did not ask for; no OutOfMemoryError comes of it."""


@contextlib.contextmanager
def out_of_memory_explained(run: ResolvedRun, when: str) -> Iterator[None]:
    """Turns a failed allocation inside a `with`, on a GPU or the host, into one clear error on this rank.

    Args:
        when: in words, for the message.

    Raises:
        UserError: so that a restart, which would fail again, is not tried.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if (memory := which_memory(error)) is None:
            raise
        raise UserError([_explanation(run, when, error, memory)]) from error


def _explanation(run: ResolvedRun, when: str, error: BaseException, memory: Memory) -> str:
    plan, machine = run.plan, run.machine
    on_gpu = machine.has_gpu and memory == "GPU"
    measured = peak_memory_bytes()["gpu" if on_gpu else "host"]
    predicted, there = (
        (plan.device_bytes, machine.device_bytes)
        if on_gpu
        else (plan.host_bytes / plan.ranks_per_node, machine.host_bytes / machine.ranks_per_node)
    )
    where = "GPU" if on_gpu else f"rank's {memory} memory"
    smaller = smaller_plan(run.job, machine, plan)
    way_out = (
        f"the next smaller plan is {smaller.label}, by prediction {smaller.device_bytes / GiB:.3g} GiB:"
        f" {flags_of(smaller)}"
        if smaller
        else "no smaller plan is known: use more GPUs or nodes, method lora, or a smaller seq_len"
    )
    return (
        f"out of memory {when} ({one_line(error)}): the plan is {plan.label}, {predicted / GiB:.3g} GiB were"
        f" predicted for this {where}, {measured / GiB:.3g} GiB were taken at most, {there / GiB:.3g} GiB are its"
        f" share; {way_out}"
    )


def which_memory(error: BaseException) -> Memory | None:
    """Tell which memory ran out; None for another error.

    The driver pins host memory, and reports a lack of it as it does for a GPU's: where it was asked for tells.
    """
    if isinstance(error, torch.OutOfMemoryError):
        return "GPU"
    if isinstance(error, MemoryError) or SAID_OF_HOST.search(str(error)):
        return "host"
    if not SAID_OF_GPU.search(str(error)):
        return None
    frames = traceback.extract_tb(error.__traceback__)[-1:]
    is_pinning = any("pin_memory" in frame.name or "pin_memory" in (frame.line or "") for frame in frames)
    return "pinned host" if is_pinning or "pin memory thread" in str(error) else "GPU"


def flags_of(plan: Plan) -> str:
    """The options that ask for a plan."""
    return (
        f"--zero {plan.zero} --per_device_train_batch_size {plan.micro_batch} --gradient_accumulation_steps"
        f" {plan.accumulation} --activation_checkpointing {plan.activation_checkpointing}"
    )
