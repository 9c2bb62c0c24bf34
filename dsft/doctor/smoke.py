"""The smoke test's ranks: a sum that must be right, then rates of links and ranks.

    python -m dsft.doctor.smoke      the ranks of one node, started by the phase `measure`

imports torch, then waits for a line of JSON with the ranks, the master's address and the pairs; forks a process per
slot (torch is imported once, CUDA not yet touched) and writes a line for each stage of each rank, so that whoever does
not answer can be named. Ranks that a launcher has started call `take_part` themselves.
"""

import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dsft.doctor.links import SLOW, combine, slow_keys
from dsft.doctor.phases import say
from dsft.planner.calibration import all_reduce_bytes, exchange_rate, matmul_flops, seconds_of

LIFE_SECONDS = 40  # a rank that has not finished by then ends, wherever it waits; the head names it by the last it said
CHECKED = 2**18  # numbers in the sum that must be right
SUSPECTS = 4  # so many outliers are measured again, alone: next to others a link or a core may just have been busy
AGAIN = 5  # chances that an outlier is given; one that is slow takes 4 s


def main() -> None:
    say(event={"ready": True})
    line = sys.stdin.readline()
    if not line:
        return  # the test is not wanted
    options = json.loads(line)
    if options["devices"]:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, options["devices"]))
    children = []
    for local, rank in enumerate(options["nodes"][options["node"]]):
        if pid := os.fork():
            children.append(pid)
            continue
        signal.alarm(LIFE_SECONDS)
        os.environ |= {
            "RANK": str(rank),
            "WORLD_SIZE": str(sum(map(len, options["nodes"]))),
            "LOCAL_RANK": str(local),
            "MASTER_ADDR": options["master"],
            "MASTER_PORT": str(options["port"]),
        }
        is_done = take_part(local, rank, options, lambda **event: say(event=event))
        os._exit(0 if is_done else 1)  # no shutdown of the interpreter: other ranks may be gone already
    sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0 for pid in children))


def take_part(
    local: int, rank: int, options: dict[str, Any], report: Callable[..., None], *, store: dist.Store | None = None
) -> bool:
    """Join the process group as one rank and measure with the others. Returns whether it came to the end.

    Args:
        local: number of the GPU, and place among the node's ranks.
        report: gets each stage as it begins, with the last one what was measured, or why it failed.
        store: where the ranks meet; by default at MASTER_ADDR and MASTER_PORT.
    """
    try:
        if options["interface"]:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", options["interface"])
        report(rank=rank, stage="starting")
        if options["gpu"]:
            torch.cuda.set_device(local)
        torch.set_num_threads(1)  # cores are compared, not how many of them the slots leave to each rank
        report(rank=rank, stage="joining the others")
        world = sum(map(len, options["nodes"]))
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if options["gpu"] else "gloo",
            timeout=timedelta(seconds=options["group_seconds"]),
            **({"store": store, "rank": rank, "world_size": world} if store else {}),
        )
        place = Place(
            rank=rank,
            node=options["node"],
            nodes=options["nodes"],
            rounds=[[tuple(pair) for pair in pairs] for pairs in options["rounds"]],
            device=torch.device("cuda", local) if options["gpu"] else torch.device("cpu"),
        )
        everyone = measure_all(place, lambda stage: report(rank=rank, stage=stage))
        report(rank=rank, stage="done", measured=everyone[rank])
        dist.barrier()
    except (RuntimeError, ValueError, OSError) as error:  # torch's errors of the network and of CUDA are RuntimeErrors
        report(rank=rank, failed=" ".join(f"{type(error).__name__}: {error}".split())[:600])
        return False
    return True


@dataclass(frozen=True, kw_only=True)
class Place:
    """This rank among the others, and who sits where."""

    rank: int
    node: int
    nodes: list[list[int]]  # ranks of each node
    rounds: list[list[tuple[int, int]]]  # pairs of nodes that exchange side by side, round after round
    device: torch.device


def measure_all(place: Place, report: Callable[[str], None]) -> list[dict[str, Any]]:
    """Every rank's measurements, on every rank, for `links.combine`. `report` gets each stage as it begins. Like all
    functions below it is collective.
    """
    before = tcp_segments()
    report("adding up numbers of all ranks")
    mine: dict[str, Any] = {"pairs": {}, "again": [], "slow": [], "sent": 0, "sent_again": 0, "inside": 0.0}
    # An all-reduce against plain arithmetic: whole numbers below 2^24 are exact in fp32.
    numbers = torch.arange(CHECKED, dtype=torch.int64)
    expected = sum((numbers * (rank + 1)) % 97 for rank in range(dist.get_world_size()))
    total = ((numbers * (place.rank + 1)) % 97).to(place.device, torch.float32)
    dist.all_reduce(total)
    mine["wrong"] = not torch.equal(total.cpu().to(torch.int64), expected)
    few = torch.zeros(16, device=place.device)
    mine["collective_seconds"] = statistics.median(seconds_of(lambda: dist.all_reduce(few), place.device, 10))
    report("exchanging with other nodes")
    for pair in (pair for pairs in place.rounds for pair in pairs if place.node in pair):
        _measure_pair(place, pair, mine)
    report("exchanging inside the node")
    ranks = place.nodes[place.node]
    if len(ranks) > 1:
        # The only groups that are made: torch names such a group by how many a rank has, which must be the same for all
        # its members.
        mine["inside"] = all_reduce_bytes(place.device, dist.new_group(ranks, use_local_synchronization=True))
    report("multiplying matrices")
    dist.barrier()
    mine["flops"] = matmul_flops(place.device)
    report("measuring outliers again")
    total = combine(_gather(mine), place.nodes)
    rates = total.pair_rates
    reference = max(rates, key=rates.__getitem__, default=(0, 0))
    for pair in slow_keys(rates, reference=rates.get(reference, 0.0))[:SUSPECTS]:
        stays_slow = _stays_slow(place, pair, reference, mine)
        if place.node in pair:
            other = pair[pair[0] == place.node]
            mine["again"].append(other)
            mine["slow"] += [other] * stays_slow
    for rank in slow_keys(total.flops)[:SUSPECTS]:
        for _ in range(AGAIN if rank == place.rank else 0):
            time.sleep(0.05)
            mine["flops"] = max(mine["flops"], matmul_flops(place.device))
        dist.barrier()
    mine["sent"], mine["sent_again"] = (now - then for now, then in zip(tcp_segments(), before, strict=True))
    return _gather(mine)


def tcp_segments(proc: Path = Path("/proc/net")) -> tuple[int, int]:
    """(sent, lost and sent again) of TCP by this machine so far: OutSegs and RetransSegs (RFC 4022), without those that
    the other side had already (duplicate SACKs, RFC 3708): a busy machine answers late, and loses nothing.
    """
    counts: dict[str, int] = {}
    for file, protocol in (("snmp", "Tcp:"), ("netstat", "TcpExt:")):
        lines = (proc / file).read_text(encoding="utf-8").splitlines()
        names, values = (line.split()[1:] for line in lines if line.startswith(f"{protocol} "))
        counts |= zip(names, map(int, values), strict=True)
    return counts["OutSegs"], max(0, counts["RetransSegs"] - counts["TCPDSACKRecv"])


def _gather(mine: Any) -> list[Any]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def _measure_pair(place: Place, pair: tuple[int, int], mine: dict[str, Any]) -> float:
    """Exchange with the rank of the same number on the pair's other node, if it has one; keeps the better of this and
    an earlier time. Returns the bytes per second that this rank got.
    """
    other, local = pair[pair[0] == place.node], place.nodes[place.node].index(place.rank)
    if local >= len(place.nodes[other]):
        return 0.0
    rate, seconds = exchange_rate(place.nodes[other][local], place.device)
    before = mine["pairs"].get(other, (0.0, seconds))
    mine["pairs"][other] = (max(rate, before[0]), min(seconds, before[1]))
    return rate


def _stays_slow(place: Place, pair: tuple[int, int], reference: tuple[int, int], mine: dict[str, Any]) -> bool:
    """Whether a pair of nodes stays slower than a reference pair, measured in turns while all others wait: what keeps
    the cores of all nodes busy makes both slow.
    """

    def rate_alone(pair: tuple[int, int]) -> float:
        """In the slower direction, over all ranks of the pair; the same on every rank."""
        rates = _gather(_measure_pair(place, pair, mine) if place.node in pair else 0.0)
        return min(sum(rates[rank] for rank in place.nodes[node]) for node in pair)

    fastest, references = 0.0, []
    for _ in range(AGAIN):
        references.append(rate_alone(reference))
        fastest = max(fastest, rate_alone(pair))
        if fastest >= SLOW * statistics.median(references):
            return False
    return True


if __name__ == "__main__":
    main()
