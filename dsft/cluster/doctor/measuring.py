"""Times of matrix products, collectives, and exchanges between two ranks, in a process group that stands."""

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from dsft.units import MiB

EXCHANGE_SECONDS = 0.12
"""Aimed at for one timed exchange; its size follows from a first small one, so that slow links do not take minutes."""
FEWEST_BYTES, MOST_BYTES = MiB // 4, 32 * MiB
MOST_GPU_BYTES = 128 * MiB


def exchange_rate(peer: int, device: torch.device) -> tuple[float, float]:
    """(bytes per second received while as much is sent, seconds of the smallest message) with one other rank.

    With gloo, whose sends torch waits for in steps of milliseconds, the latter says nothing of the network.
    """
    small = (torch.zeros(16, device=device), torch.zeros(16, device=device))
    _exchange(peer, *small)  # connects, and waits until the other is there
    latency = median_seconds(lambda: _exchange(peer, *small), device)
    most = _most_bytes(device)
    sent, received = torch.ones(most // 4, device=device), torch.zeros(most // 4, device=device)
    few = FEWEST_BYTES // 4
    first = _seconds(lambda: _exchange(peer, sent[:few], received[:few]), device)
    wanted = torch.tensor([EXCHANGE_SECONDS * FEWEST_BYTES / first], dtype=torch.float64)
    peer_wants = torch.zeros(1, dtype=torch.float64)
    _exchange(peer, wanted, peer_wants)
    count = int(min(most, max(FEWEST_BYTES, min(wanted.item(), peer_wants.item())))) // 4
    best = min(_seconds(lambda: _exchange(peer, sent[:count], received[:count]), device) for _ in range(3))
    return 4 * count / best, latency


def _exchange(peer: int, sent: torch.Tensor, received: torch.Tensor) -> None:
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, sent, peer), dist.P2POp(dist.irecv, received, peer)]):
        work.wait()


def _most_bytes(device: torch.device) -> int:
    return MOST_GPU_BYTES if device.type == "cuda" else MOST_BYTES


def all_reduce_bytes(device: torch.device, group: dist.ProcessGroup | None = None) -> float:
    """Bytes per second that a rank gets in an all-reduce over its group, everything twice."""
    ranks = dist.get_world_size(group)
    numbers = torch.ones(_most_bytes(device) // 4, device=device)
    dist.all_reduce(numbers[:16], group=group)
    best = min(_seconds(lambda: dist.all_reduce(numbers, group=group), device) for _ in range(3))
    return 2 * 4 * numbers.numel() * (ranks - 1) / ranks / best


def matmul_flops(device: torch.device) -> float:
    """Best of some matrix products, short ones on a CPU: that its cores are taken away for a moment is no fault of this
    rank.
    """
    size, dtype, times = (8192, torch.bfloat16, 5) if device.type == "cuda" else (512, torch.float32, 20)
    matrix = torch.ones(size, size, device=device, dtype=dtype)
    _seconds(lambda: matrix @ matrix, device)
    return 2 * size**3 / min(_seconds(lambda: matrix @ matrix, device) for _ in range(times))


def median_seconds(run: Callable[[], object], device: torch.device) -> float:
    """Median of ten runs, after one that warms up: the latency of a small message."""
    run()
    return statistics.median(_seconds(run, device) for _ in range(10))


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    start = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start
