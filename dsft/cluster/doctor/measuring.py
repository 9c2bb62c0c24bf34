"""What the ranks of a smoke test do together, in a process group that stands: a sum that must be right, then rates of
links and ranks.

Called by smoke.py (ranks the doctor started) and launched.py (ranks a launcher started). Every function is collective.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from dsft.cluster.doctor.links import combine, pair_rates, partners, slow_keys
from dsft.units import MiB

EXCHANGE_SECONDS = 0.12
"""Aimed at for one timed exchange; its size follows from a first small one, so that slow links do not take minutes."""
FEWEST_BYTES, MOST_BYTES = MiB // 4, 32 * MiB
MOST_GPU_BYTES = 128 * MiB
CHECKED = 2**18
"""Numbers in the sum that must be right."""
SUSPECTS = 6
"""So many outliers are measured again, alone: next to others a link or a core may just have been busy."""
AGAIN = 4
"""Chances that an outlier is given."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """This rank among the others, and who sits where."""

    rank: int
    nodes: list[list[int]]
    """Ranks of each node."""
    rounds: list[list[tuple[int, int]]]
    """Pairs of nodes that exchange side by side, round after round."""
    device: torch.device

    @property
    def node_of(self) -> list[int]:
        return [node for _, node in sorted((rank, node) for node, ranks in enumerate(self.nodes) for rank in ranks)]

    @property
    def node(self) -> int:
        return self.node_of[self.rank]


def measure_all(place: Place, report: Callable[[str], None]) -> list[dict[str, Any]]:
    """Every rank's measurements, on every rank, for `links.combine`. `report` is told each stage as it begins."""
    report("adding up numbers of all ranks")
    mine: dict[str, Any] = {"wrong": _wrong_sum(place), "pairs": {}, "again": [], "inside": 0.0}
    mine["collective_seconds"] = _latency(lambda: dist.all_reduce(torch.zeros(16, device=place.device)), place.device)
    report("exchanging with other nodes")
    for other in partners(place.rounds, place.node):
        _measure_pair(place, other, mine)
    report("exchanging inside the node")
    mine["inside"] = _inside_rate(place)
    report("multiplying matrices")
    dist.barrier()
    mine["flops"] = _flops(place.device)
    report("measuring outliers again")
    everyone = _gather(mine)
    found = combine(everyone, place.node_of)
    rates = pair_rates(found)
    for pair in slow_keys(rates, reference=max(rates.values(), default=0.0))[:SUSPECTS]:
        if place.node in pair:
            mine["again"].append(pair[pair[0] == place.node])
            for _ in range(AGAIN):
                _measure_pair(place, mine["again"][-1], mine)
        dist.barrier()
    for rank in slow_keys(found.flops)[:SUSPECTS]:
        for _ in range(AGAIN if rank == place.rank else 0):
            time.sleep(0.05)
            mine["flops"] = max(mine["flops"], _flops(place.device))
        dist.barrier()
    return _gather(mine)


def _gather(mine: dict[str, Any]) -> list[dict[str, Any]]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def _wrong_sum(place: Place) -> bool:
    """Whether an all-reduce gives another sum than plain arithmetic. Whole numbers below 2^24 are exact in fp32."""
    numbers, world = torch.arange(CHECKED, dtype=torch.int64), dist.get_world_size()
    expected = sum((numbers * (rank + 1)) % 97 for rank in range(world))
    total = ((numbers * (place.rank + 1)) % 97).to(place.device, torch.float32)
    dist.all_reduce(total)
    return not torch.equal(total.cpu().to(torch.int64), expected)


def _measure_pair(place: Place, other: int, mine: dict[str, Any]) -> None:
    """Exchange with the rank of the same number on the other node, if it has one; keeps the better of this and an
    earlier time.
    """
    local = place.nodes[place.node].index(place.rank)
    if local < len(place.nodes[other]):
        rate, seconds = exchange_rate(place.nodes[other][local], place.device)
        before = mine["pairs"].get(other, (0.0, seconds))
        mine["pairs"][other] = (max(rate, before[0]), min(seconds, before[1]))


def exchange_rate(peer: int, device: torch.device) -> tuple[float, float]:
    """(bytes per second received while as much is sent, seconds of the smallest message) with one other rank. With
    gloo, whose sends torch waits for in steps of milliseconds, the latter says nothing of the network."""
    small = (torch.zeros(16, device=device), torch.zeros(16, device=device))
    _exchange(peer, *small)  # connects, and waits until the other is there
    latency = _latency(lambda: _exchange(peer, *small), device)
    most = MOST_GPU_BYTES if device.type == "cuda" else MOST_BYTES
    out, into = torch.ones(most // 4, device=device), torch.zeros(most // 4, device=device)
    first = _seconds(lambda: _exchange(peer, out[: FEWEST_BYTES // 4], into[: FEWEST_BYTES // 4]), device)
    wanted, other_wants = (
        torch.tensor([EXCHANGE_SECONDS * FEWEST_BYTES / first], dtype=torch.float64),
        torch.zeros(1, dtype=torch.float64),
    )
    _exchange(peer, wanted, other_wants)
    numbers = int(min(most, max(FEWEST_BYTES, min(wanted.item(), other_wants.item())))) // 4
    best = min(_seconds(lambda: _exchange(peer, out[:numbers], into[:numbers]), device) for _ in range(3))
    return 4 * numbers / best, latency


def _exchange(peer: int, out: torch.Tensor, into: torch.Tensor) -> None:
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, out, peer), dist.P2POp(dist.irecv, into, peer)]):
        work.wait()


def _inside_rate(place: Place) -> float:
    """Bytes per second that a rank gets in an all-reduce over its node; 0 on a node with one rank."""
    ranks = place.nodes[place.node]
    if len(ranks) == 1:
        return 0.0
    # The only groups that are made: torch names such a group by how many a rank has, which must be the same for all its
    # members.
    group = dist.new_group(ranks, use_local_synchronization=True)
    many = torch.ones((MOST_GPU_BYTES if place.device.type == "cuda" else MOST_BYTES) // 4, device=place.device)
    dist.all_reduce(many[:16], group=group)
    best = min(_seconds(lambda: dist.all_reduce(many, group=group), place.device) for _ in range(3))
    return 2 * 4 * many.numel() * (len(ranks) - 1) / len(ranks) / best


def _flops(device: torch.device) -> float:
    """Best of some matrix products, short ones on a CPU: that its cores are taken away for a moment is no fault of this
    rank.
    """
    size, dtype, times = (8192, torch.bfloat16, 5) if device.type == "cuda" else (512, torch.float32, 20)
    left = torch.ones(size, size, device=device, dtype=dtype)
    _seconds(lambda: left @ left, device)
    return 2 * size**3 / min(_seconds(lambda: left @ left, device) for _ in range(times))


def _latency(run: Callable[[], object], device: torch.device) -> float:
    run()
    return statistics.median(_seconds(run, device) for _ in range(10))


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    start = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start
