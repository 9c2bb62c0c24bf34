"""Describes the hardware: measured on this machine, or as the user writes it (`8x80GB`, two nodes). torch, which takes
seconds to import, is imported only for a GPU.
"""

import contextlib
import ctypes
import errno
import glob
import math
import os
import re
import resource
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from dsft.errors import UserError
from dsft.runtime.console import say
from dsft.units import BYTES, GiB, KiB, plural


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The hardware of a plan; all nodes are alike."""

    nodes: int
    ranks_per_node: int
    """One per GPU; without GPUs, CPU processes. The largest number if nodes differ."""
    device_bytes: int
    """Memory of one GPU; without GPUs, one rank's share of the host's."""
    host_bytes: int
    """Host memory of one node that processes may use (the cgroup's limit, if there is one)."""
    has_gpu: bool
    gpu_type: str = ""
    """Name of the GPU, from its driver or the user; empty if only its memory is known."""
    interconnect: str = ""
    """In the form of `--interconnect`: "nvlink+ib400" ...; empty if unknown."""
    num_ranks: int = 0
    """On all nodes; 0: the same number on each."""
    measured: bool = False
    """Whether dsft runs on this machine; False for one on paper."""

    @property
    def world_size(self) -> int:
        return self.num_ranks or self.nodes * self.ranks_per_node

    @property
    def place(self) -> str:
        """Name of the owner of `device_bytes`, for messages."""
        return "GPU" if self.has_gpu else "rank"

    def __str__(self) -> str:
        ranks = plural(self.ranks_per_node, "GPU" if self.has_gpu else "CPU rank")
        if self.num_ranks:
            ranks += f" at most, {self.num_ranks} in all,"
        return (
            f"{plural(self.nodes, 'node')} x {ranks} of {self.device_bytes / GiB:.0f} GiB,"
            f" {self.host_bytes / GiB:.0f} GiB host memory per node"
        )


def parse_bytes(text: str) -> int:
    """Return the bytes in "80GB", "80GiB", "1.5TB". Raises UserError for any other form; a unit is required."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)", text.strip())
    if not match or match[2] not in BYTES or not 0 < float(match[1]) < 1e12:
        raise UserError(f"{text!r} is not a size; write a number and one of {', '.join(BYTES)}, for example 80GB")
    return int(float(match[1]) * BYTES[match[2]])


def split_gpus(text: str) -> tuple[int, str]:
    """ "8x80GB" -> (8, "80GB"), "8xH100" -> (8, "H100"). Raises UserError for any other form."""
    match = re.fullmatch(r"(0*[1-9]\d*)\s*x\s*(.+)", text.strip())
    if not match:
        raise UserError(
            f"--gpus {text!r}: write the number of GPUs of one node and the card or its memory, for example 8x80GB"
        )
    return int(match[1]), match[2]


CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")


def _cgroups(controller: str) -> Iterator[tuple[Path, bool]]:
    """Yield the folders of this process's cgroup and its parents, and whether they are of version 1."""
    for line in _read(OWN_CGROUPS).splitlines():  # 0::/system.slice/slurmstepd.scope/job_7, 4:memory:/slurm/uid_0/job_7
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = CGROUPS / controller if controllers else CGROUPS
        folder = root / path.strip("/")
        while folder.is_relative_to(root):
            yield folder, bool(controllers)
            folder = folder.parent


def _memory_limits() -> Iterator[tuple[int, int]]:
    """Yield (limit, used bytes without file caches) of each cgroup."""
    for folder, is_old in _cgroups("memory"):
        files = ("memory.limit_in_bytes", "memory.usage_in_bytes") if is_old else ("memory.max", "memory.current")
        limit, used = [_read(folder / name) for name in files]
        if limit.isdigit():  # not "max", or a missing folder in this container
            prefix = "total_" if is_old else ""
            caches = re.findall(rf"^{prefix}(?:in)?active_file (\d+)", _read(folder / "memory.stat"), re.MULTILINE)
            cached_bytes = sum(map(int, caches))
            yield int(limit), max(0, int(used or 0) - cached_bytes)


def host_memory_bytes() -> int:
    """Return the memory that this process may use: the host's, or the smallest limit of its cgroups if that is less."""
    limits = [limit for limit, _ in _memory_limits()]
    return min([psutil.virtual_memory().total, *limits])


def free_host_bytes() -> int:
    """Return the host memory that a run may still use, file caches included."""
    free_in_cgroups = [max(0, limit - used) for limit, used in _memory_limits()]
    return min([psutil.virtual_memory().available, *free_in_cgroups])


def gpu_utilization() -> float | None:
    """Return the share of the last moments in which this rank's GPU was busy; None if NVML does not report it."""
    if not has_gpu():
        return None
    import torch

    try:
        return torch.cuda.utilization() / 100
    except Exception:  # no package, or NVML's own classes: some containers, and parts of a GPU (MIG), do not report it
        return None


def has_gpu() -> bool:
    """Return whether ranks run on GPUs: if torch sees one, unless DS_ACCELERATOR=cpu requests CPU ranks."""
    if os.environ.get("DS_ACCELERATOR") == "cpu":
        return False
    if "torch" not in sys.modules and not _has_driver():
        return False
    import torch

    return torch.cuda.is_available()


def _has_driver() -> bool:
    """Return whether torch could find a GPU; saves the second of importing it on a machine without one."""
    try:
        ctypes.CDLL("libcuda.so.1")  # NVIDIA's driver; CUDA's libraries look for it by this name
    except OSError:
        return False
    return True


GPU_FILES = "/dev/nvidia[0-9]*"
"""Device files of NVIDIA's driver, one for each GPU."""


def require_seen_gpus() -> None:
    """Raise UserError if torch does not see the machine's GPUs, unless CPU ranks are requested."""
    hides_gpus = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    is_on_cpu = os.environ.get("DS_ACCELERATOR") == "cpu"
    if hides_gpus or is_on_cpu or not glob.glob(GPU_FILES) or has_gpu():
        return
    import torch

    build = f"is built for CUDA {torch.version.cuda}" if torch.version.cuda else "is a build for CPUs"
    raise UserError(
        f"this machine has GPUs ({GPU_FILES}) that torch {torch.__version__} does not see; it {build}. Install a torch"
        " for the CUDA version that nvidia-smi names, or ask for CPU ranks with DS_ACCELERATOR=cpu"
    )


def cpu_count() -> int:
    """Return the cores that this process can keep busy: its affinity, at most the quota of its cgroups, rounded up."""
    number = len(os.sched_getaffinity(0))
    for folder, is_old in _cgroups("cpu"):  # microseconds in each period; "max" or -1 without a limit
        files = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if is_old else ("cpu.max",)
        match = re.fullmatch(r"(\d+) (\d+)", " ".join(_read(folder / name) for name in files))
        if match:
            quota = int(match[1]) / int(match[2])
            number = min(number, math.ceil(quota))
    return number


def default_ranks() -> int:
    """Return the number of ranks to start on this machine: one per GPU, else up to 2 CPU processes."""
    if not has_gpu():
        return min(2, cpu_count())
    import torch

    return torch.cuda.device_count()


def this_machine(*, ranks_per_node: int | None = None) -> Machine:
    ranks = ranks_per_node or default_ranks()
    host = host_memory_bytes()
    gpu_type = ""
    device = int(0.95 * host / ranks)  # a CPU rank's share, without 5 % for the system
    if has_gpu():
        import torch

        # A launched rank reads only its own GPU: each context uses memory on it.
        rank_gpu = os.environ.get("LOCAL_RANK")
        gpus = [int(rank_gpu)] if rank_gpu else range(torch.cuda.device_count())
        gpu_type = torch.cuda.get_device_name(0)
        device = min(ask_gpu(gpu)[0] for gpu in gpus)
    return Machine(
        nodes=1,
        ranks_per_node=ranks,
        device_bytes=device,
        host_bytes=host,
        has_gpu=has_gpu(),
        measured=True,
        gpu_type=gpu_type,
    )


# On one GPU (assumed; docs/planner.md has the sources): CUDA's context with the libraries' kernels, and NCCL's buffers
# for one communicator.
CONTEXT_BYTES = 2**29
COMMUNICATOR_BYTES = int(1.1 * GiB)


def ask_gpu(gpu: int) -> tuple[int, int]:
    """Return (bytes of a GPU that other programs do not use, its total). Plans contain this process's own buffers."""
    import torch
    import torch.distributed as dist

    free, total = torch.cuda.mem_get_info(gpu)
    free += torch.cuda.memory_reserved(gpu) - torch.cuda.memory_allocated(gpu)
    has_met = dist.is_initialized() and dist.get_world_size() > 1
    return min(total, free + CONTEXT_BYTES + (COMMUNICATOR_BYTES if has_met else 0)), total


FREE_SHARE = 0.95  # of a GPU's memory, if no other program uses any
FREED_WITHIN_SECONDS = 60.0


def wait_for_freed_gpu() -> float:
    """Wait until a killed run's memory on this rank's GPU is free, at most FREED_WITHIN_SECONDS; return the seconds."""
    if not has_gpu():
        return 0.0
    start = time.monotonic()
    seconds = 0.0
    while seconds < FREED_WITHIN_SECONDS:
        left, total = ask_gpu(int(os.environ.get("LOCAL_RANK", "0")))
        if left >= FREE_SHARE * total:
            break
        time.sleep(1)
        seconds = time.monotonic() - start
    if seconds:
        say(f"the earlier run was killed: waited {seconds:.0f} s for the memory of its GPUs")
    return seconds


def peak_resident_bytes() -> int:
    """Return this process's peak resident memory since the last reset, else since its start (Linux VmHWM)."""
    line = re.search(r"VmHWM:\s*(\d+)", _read(Path("/proc/self/status")))
    kibibytes = int(line[1]) if line else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kibibytes * KiB


def reset_peaks() -> None:
    with contextlib.suppress(OSError):  # a container may forbid it: the earlier peak remains
        # Sets the peak of resident memory to its current value (man 5 proc).
        Path("/proc/self/clear_refs").write_text("5")
    if has_gpu():
        import torch

        torch.cuda.reset_peak_memory_stats()


def peak_memory_bytes() -> dict[str, int]:
    """Return this rank's peaks since the last reset: bytes allocated by torch (GPU only), and resident host bytes."""
    peak = {"host": peak_resident_bytes()}
    if has_gpu():
        import torch

        peak["gpu"] = torch.cuda.max_memory_allocated()
    return peak


def _read(path: Path) -> str:
    """Return the text of a system file; empty if it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


Memory = Literal["GPU", "host", "pinned host"]

SAID_OF_HOST = re.compile(
    r"can't allocate memory|not enough memory"  # torch (c10/core/CPUAllocator.cpp)
    r"|(?<!failed with error )Cannot allocate memory"  # mmap, fork; NCCL says "failed with" for too few locked pages
    r"|DataLoader worker .* killed by signal: Killed"  # the kernel kills the largest process of a full cgroup
)
SAID_OF_GPU = re.compile(
    r"(?i:\b(cuda|hip)\b.{0,40}\bout of memory)"  # torch, the driver under expandable segments, NCCL, Triton, wrappers
    r"|(?i:(cuda|hip)_?error_?(out_?of_?memory|memory_?allocation))"  # only the name of the error code
    r"|Failed to CUDA \w+"  # NCCL's buffers (NCCL, src/include/alloc.h)
    # Workspaces of cuBLAS, cuDNN, hipBLAS ..., and their handles, for which a full GPU has no memory.
    r"|(CU|HIP|ROC)\w+_STATUS_(ALLOC_FAILED|NOT_INITIALIZED)"
    # torch calls NVML only while it reports that no memory is left (c10/cuda/CUDACachingAllocator.cpp).
    r"|NVML_SUCCESS == .*INTERNAL ASSERT FAILED",
    re.DOTALL,
)
"""Messages about GPU memory that libraries raise without an OutOfMemoryError."""


def which_memory(error: BaseException) -> Memory | None:
    """Return which memory ran out; None for another error. A lack of pinned memory is known by the traceback alone."""
    import torch

    if isinstance(error, torch.OutOfMemoryError):
        return "GPU"
    is_of_host = isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
    if is_of_host or SAID_OF_HOST.search(str(error)):
        return "host"
    if not SAID_OF_GPU.search(str(error)):
        return None
    frames = traceback.extract_tb(error.__traceback__)[-1:]
    is_pinning = any("pin_memory" in f"{frame.name} {frame.line}" for frame in frames)
    return "pinned host" if is_pinning or "pin memory thread" in str(error) else "GPU"


@contextlib.contextmanager
def memory_errors_explained(explanation: Callable[[BaseException, Memory], str]) -> Iterator[None]:
    """Turn a failed allocation inside a `with` into a UserError, "out of memory" and the explanation, on one rank:
    the others join no collective now, and a restart would fail again.
    """
    try:
        yield
    except UserError:  # already explained
        raise
    except Exception as error:
        if (memory := which_memory(error)) is None:
            raise
        raise UserError(f"out of memory {explanation(error, memory)}") from error
