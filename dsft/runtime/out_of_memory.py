"""Tells which memory ran out, by what torch and its libraries say of it."""

import re
import traceback
from typing import Literal

Memory = Literal["GPU", "host", "pinned host"]

SAID_OF_HOST = re.compile(r"can't allocate memory|not enough memory")
"""What torch says of host memory (c10/core/CPUAllocator.cpp)."""
SAID_OF_GPU = re.compile(
    r"(CUDA|HIP)( driver)? error: out of memory"  # torch.AcceleratorError; the driver's with expandable segments
    r"|CU\w+_STATUS_ALLOC_FAILED"  # workspace of cuBLAS, cuDNN ...
    r"|(Cuda|HIP) failure (\d+ )?'out of memory'|Failed to CUDA \w+"  # NCCL's buffers (NCCL, src/include/alloc.h)
)
"""What libraries say of GPU memory that torch's own allocator did not ask for; no OutOfMemoryError comes of it."""


def which_memory(error: BaseException) -> Memory | None:
    """Tell which memory ran out; None for another error.

    The driver pins host memory, and reports a lack of it as it does for a GPU's: where it was asked for tells.
    """
    import torch

    if isinstance(error, torch.OutOfMemoryError):
        return "GPU"
    if isinstance(error, MemoryError) or SAID_OF_HOST.search(str(error)):
        return "host"
    if not SAID_OF_GPU.search(str(error)):
        return None
    frames = traceback.extract_tb(error.__traceback__)[-1:]
    is_pinning = any("pin_memory" in frame.name or "pin_memory" in (frame.line or "") for frame in frames)
    return "pinned host" if is_pinning or "pin memory thread" in str(error) else "GPU"
