"""What the hardware offers: measured on this machine, or as the user writes it (`8x80GB`, two nodes).

Reads only. To ask a GPU for its free memory makes a context on it. torch, which takes seconds to import, is imported
where a GPU is asked.
"""

import contextlib
import ctypes
import errno
import glob
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
    """The hardware a plan is made for; all nodes alike."""

    nodes: int
    ranks_per_node: int
    """One per GPU; without GPUs, CPU processes. The most of any node, where they are uneven."""
    device_bytes: int
    """Memory of one GPU; without GPUs, one rank's share of the host's."""
    host_bytes: int
    """Host memory of one node that processes may use (the cgroup's limit where there is one)."""
    has_gpu: bool
    gpu_type: str = ""
    """Name of the GPU, as its driver or the user says; empty where only its memory is known."""
    interconnect: str = ""
    """As `--interconnect` takes it: "nvlink+ib400" ...; empty where it is not known."""
    num_ranks: int = 0
    """On all nodes; 0: as many on each."""
    measured: bool = False
    """Whether this is the machine dsft runs on, not one on paper."""

    @property
    def world_size(self) -> int:
        return self.num_ranks or self.nodes * self.ranks_per_node

    @property
    def place(self) -> str:
        """What has `device_bytes`, in a word."""
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
    """Bytes in "80GB", "80GiB", "1.5TB". Raises UserError: it is anything else; a unit is required."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)", text.strip())
    if not match or match[2] not in BYTES or not 0 < float(match[1]) < 1e12:
        raise UserError(f"{text!r} is not a size; write a number and one of {', '.join(BYTES)}, for example 80GB")
    return int(float(match[1]) * BYTES[match[2]])


def split_gpus(text: str) -> tuple[int, str]:
    """ "8x80GB" -> (8, "80GB"), "8xH100" -> (8, "H100"). Raises UserError: it has another form or names no GPU."""
    match = re.fullmatch(r"(\d+)\s*x\s*(.+)", text.strip())
    if not match or int(match[1]) < 1:
        raise UserError(
            f"--gpus {text!r}: write the number of GPUs of one node and the card or its memory, for example 8x80GB"
        )
    return int(match[1]), match[2]


CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")


def _cgroups(controller: str) -> Iterator[tuple[Path, bool]]:
    """Yield the folders of this process's cgroup and of those above it, and whether they are of version 1. A container
    sees its own as the root; that of a SLURM job or a systemd unit is below.
    """
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
    """Yield (limit, bytes that are taken, but for caches of files) of each cgroup."""
    for folder, is_old in _cgroups("memory"):
        files = ("memory.limit_in_bytes", "memory.usage_in_bytes") if is_old else ("memory.max", "memory.current")
        limit, taken = [_read(folder / name) for name in files]
        if limit.isdigit():  # else "max", or no such folder in this container
            prefix = "total_" if is_old else ""
            kept = re.findall(rf"^{prefix}(?:in)?active_file (\d+)", _read(folder / "memory.stat"), re.MULTILINE)
            yield int(limit), max(0, int(taken or 0) - sum(map(int, kept)))


def host_memory_bytes() -> int:
    """Memory that this process may use: the host's, or the least limit of its cgroups where that is smaller."""
    return min([psutil.virtual_memory().total, *(limit for limit, _ in _memory_limits())])


def free_host_bytes() -> int:
    """Memory of this host that a run may still take, caches of files included."""
    return min([psutil.virtual_memory().available, *(max(0, limit - taken) for limit, taken in _memory_limits())])


def gpu_utilization() -> float | None:
    """Share of the last moments in which this rank's GPU was at work, as NVML has it; None without a GPU or the package
    nvidia-ml-py.
    """
    if not has_gpu():
        return None
    import torch

    try:
        return torch.cuda.utilization() / 100
    except Exception:  # without the package, and of NVML's own classes: not every container, nor a part of a GPU (MIG)
        return None


def has_gpu() -> bool:
    """Whether ranks run on GPUs: where torch sees one, unless DS_ACCELERATOR=cpu asks for CPU ranks."""
    if os.environ.get("DS_ACCELERATOR") == "cpu" or ("torch" not in sys.modules and not _has_driver()):
        return False
    import torch

    return torch.cuda.is_available()


GPU_FILES = "/dev/nvidia[0-9]*"
"""What NVIDIA's driver shows of each GPU."""


def _has_driver() -> bool:
    """Whether torch could find a GPU: it takes a second to import, for a machine that has none."""
    if glob.glob(GPU_FILES):
        return True
    try:
        ctypes.CDLL("libcuda.so.1")  # of NVIDIA's driver; CUDA's own libraries look for it by this name
    except OSError:
        return False
    return True


def require_seen_gpus() -> None:
    """Refuse to run on CPUs beside GPUs that torch does not see, unless CPU ranks are asked for (UserError)."""
    hides_gpus = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if hides_gpus or os.environ.get("DS_ACCELERATOR") == "cpu" or not glob.glob(GPU_FILES) or has_gpu():
        return
    import torch

    build = f"is built for CUDA {torch.version.cuda}" if torch.version.cuda else "is a build for CPUs"
    raise UserError(
        f"this machine has GPUs ({GPU_FILES}) that torch {torch.__version__} does not see; it {build}. Install a torch"
        " for the CUDA version that nvidia-smi names, or ask for CPU ranks with DS_ACCELERATOR=cpu"
    )


def cpu_count() -> int:
    """Number of cores that this process can keep busy: of those that it may run on, but no more than its cgroups give
    it time for (`docker run --cpus`), rounded up.
    """
    number = len(os.sched_getaffinity(0))
    for folder, is_old in _cgroups("cpu"):  # microseconds in each period; "max" or -1 without a limit
        files = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if is_old else ("cpu.max",)
        match = re.fullmatch(r"(\d+) (\d+)", " ".join(_read(folder / name) for name in files))
        if match:
            number = min(number, -(-int(match[1]) // int(match[2])))
    return number


def default_ranks() -> int:
    """Ranks to start on this machine: one per GPU, else up to 2 CPU processes."""
    if not has_gpu():
        return min(2, cpu_count())
    import torch

    return torch.cuda.device_count()


def cpu_rank_bytes(host_bytes: int, ranks: int) -> int:
    """The device memory of one of a node's CPU ranks: its share of the host's, but 15 % for system and launcher."""
    return int(0.85 * host_bytes / ranks)


def this_machine(*, ranks_per_node: int | None = None) -> Machine:
    """Measure this machine."""
    ranks = ranks_per_node or default_ranks()
    host = host_memory_bytes()
    gpu_type = ""
    device = cpu_rank_bytes(host, ranks)
    if has_gpu():
        import torch

        # A rank of a launch asks only its GPU: each context takes memory there.
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
    """(bytes of a GPU that other programs leave, all its bytes). What this process takes by asking, and by the
    communicator in which ranks have met, counts as left, since plans have it; so does what torch keeps of old tensors.
    """
    import torch
    import torch.distributed as dist

    free, total = torch.cuda.mem_get_info(gpu)
    free += torch.cuda.memory_reserved(gpu) - torch.cuda.memory_allocated(gpu)
    has_met = dist.is_initialized() and dist.get_world_size() > 1
    return min(total, free + CONTEXT_BYTES + (COMMUNICATOR_BYTES if has_met else 0)), total


FREE_SHARE = 0.95  # of a GPU's memory, if no other program uses any
FREED_WITHIN_SECONDS = 60.0


def wait_for_freed_gpu() -> float:
    """Wait until the processes of a killed run have given back the memory of this rank's GPU, for FREED_WITHIN_SECONDS:
    what is taken then is another program's. Returns the seconds that it took.
    """
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
    """This process's peak of resident memory since it was last set back, else since its start (Linux VmHWM)."""
    line = re.search(r"VmHWM:\s*(\d+)", _read(Path("/proc/self/status")))
    kibibytes = int(line[1]) if line else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kibibytes * KiB


def reset_peaks() -> None:
    """Count the peaks of this process from now on."""
    with contextlib.suppress(OSError):  # a container that forbids it: the peak counts from before
        # Sets the peak of resident memory to what is resident now (man 5 proc).
        Path("/proc/self/clear_refs").write_text("5")
    if has_gpu():
        import torch

        torch.cuda.reset_peak_memory_stats()


def peak_memory_bytes() -> dict[str, int]:
    """This rank's peaks since they were reset: device bytes allocated by torch (GPU only) and resident host bytes."""
    peak = {"host": peak_resident_bytes()}
    if has_gpu():
        import torch

        peak["gpu"] = torch.cuda.max_memory_allocated()
    return peak


def _read(path: Path) -> str:
    """The text of a file of the system; empty if it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


Memory = Literal["GPU", "host", "pinned host"]

SAID_OF_HOST = re.compile(
    r"can't allocate memory|not enough memory"  # torch (c10/core/CPUAllocator.cpp)
    r"|(?<!failed with error )Cannot allocate memory"  # mmap, fork; NCCL says "failed with" of too few locked pages
    r"|DataLoader worker .* killed by signal: Killed"  # the kernel takes the largest process of a full cgroup
)
SAID_OF_GPU = re.compile(
    r"(?i:\b(cuda|hip)\b.{0,40}\bout of memory)"  # torch, the driver under expandable segments, NCCL, Triton, and wraps
    r"|(?i:(cuda|hip)_?error_?(out_?of_?memory|memory_?allocation))"  # the name of the code alone
    r"|Failed to CUDA \w+"  # NCCL's buffers (NCCL, src/include/alloc.h)
    # Workspaces of cuBLAS, cuDNN, hipBLAS ...; their handles, which a full GPU has no room for.
    r"|(CU|HIP|ROC)\w+_STATUS_(ALLOC_FAILED|NOT_INITIALIZED)"
    # torch asks NVML who uses the memory only while it reports that none is left (c10/cuda/CUDACachingAllocator.cpp).
    r"|NVML_SUCCESS == .*INTERNAL ASSERT FAILED",
    re.DOTALL,
)
"""What libraries say of GPU memory where no OutOfMemoryError comes of it."""


def which_memory(error: BaseException) -> Memory | None:
    """Tell which memory ran out; None for another error.

    The driver pins host memory, and reports a lack of it as it does for a GPU's: where it was asked for tells.
    """
    import torch

    if isinstance(error, torch.OutOfMemoryError):
        return "GPU"
    is_of_host = isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
    if is_of_host or SAID_OF_HOST.search(str(error)):
        return "host"
    if not SAID_OF_GPU.search(str(error)):
        return None
    frames = traceback.extract_tb(error.__traceback__)[-1:]
    is_pinning = any("pin_memory" in frame.name or "pin_memory" in (frame.line or "") for frame in frames)
    return "pinned host" if is_pinning or "pin memory thread" in str(error) else "GPU"


@contextlib.contextmanager
def memory_errors_explained(explanation: Callable[[BaseException, Memory], str]) -> Iterator[None]:
    """Turn a failed allocation inside a `with`, on a GPU or the host, into one clear error on this rank: "out of
    memory" and the explanation, which says where, and the way out. Without a collective: the other ranks do not come. A
    UserError, so that a restart, which would fail again, is not tried.
    """
    try:
        yield
    except UserError:  # which has its explanation
        raise
    except Exception as error:
        if (memory := which_memory(error)) is None:
            raise
        raise UserError(f"out of memory {explanation(error, memory)}") from error
