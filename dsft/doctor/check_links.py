"""Findings from the smoke test: wrong sums, slow links, nodes and ranks, ranks that did not answer. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dsft.doctor.facts import NodeFacts
from dsft.doctor.findings import Finding, finding, join
from dsft.doctor.links import Measured, pair_rates, slow_keys, slow_nodes

BELOW_ASSUMED = 0.5
LOST = 0.02
"""Of the segments; a sound network between nodes loses less than one in thousands."""


@dataclass(frozen=True, kw_only=True)
class RanksOfNodes:
    """Who sits where: `ranks` of each node of `names`, in order."""

    names: list[str]
    ranks: list[list[int]]

    def node(self, rank: int) -> str:
        return next(name for name, ranks in zip(self.names, self.ranks, strict=True) if rank in ranks)

    def place(self, rank: int) -> str:
        return f"rank {rank} on {self.node(rank)}"

    def local(self, rank: int) -> int:
        return self.ranks[self.names.index(self.node(rank))].index(rank)


def check_measured(
    measured: Measured, where: RanksOfNodes, facts: dict[str, NodeFacts], used: dict[str, str]
) -> Iterator[Finding]:
    """What stands out among links, nodes and ranks (`used`: interface of each node)."""
    names = where.names
    if measured.wrong:
        yield finding(
            "wrong-sum",
            join([where.place(rank) for rank in measured.wrong]),
            "an all-reduce over all ranks gave a wrong sum",
            "take out one node after another (--exclude) until it is right, then test that one's memory, GPU (dcgmi"
            " diag -r 3) and cards; another NCCL (pip install nvidia-nccl-cu12==...)",
        )
    yield from _check_pairs(measured, names, used)
    for node in [node for node, share in measured.lost.items() if share > LOST]:
        message = f"{measured.lost[node]:.1%} of its TCP segments were sent again: packets from it get lost"
        yield finding("packet-loss", names[node], message, _look_at(names[node], used))
    for node in slow_keys(measured.inside):
        fastest = in_rate(max(measured.inside.values()))
        yield finding(
            "slow-inside",
            names[node],
            f"{in_rate(measured.inside[node])} among its ranks, {fastest} in the fastest node",
            f"ssh {names[node]} nvidia-smi topo -m; compare it with another node's (NVLink, PCIe, NUMA), and top for"
            " other programs",
        )
    for rank in slow_keys(measured.flops):
        rate, fastest = measured.flops[rank] / 1e12, max(measured.flops.values()) / 1e12
        message = f"{rate:.3g} TFLOP/s in a product of matrices, {fastest:.3g} on the fastest rank"
        yield finding("slow-rank", where.place(rank), message, _look_at_rank(rank, where, facts))


def _check_pairs(measured: Measured, names: list[str], used: dict[str, str]) -> Iterator[Finding]:
    rates = pair_rates(measured)
    fastest = max(rates.values(), default=0.0)
    best, cleared = in_rate(fastest), measured.again - measured.slow
    alone = {pair: fastest if pair in cleared else rate for pair, rate in rates.items()}
    slow = [node for node in slow_nodes(alone) if any(node in pair for pair in measured.slow)]
    for node in slow:
        fastest = in_rate(max(rate for pair, rate in rates.items() if node in pair))
        message = f"{fastest} to its fastest neighbour, others reach {best} among each other"
        yield finding("slow-node", names[node], message, _look_at(names[node], used))
    for a, b in slow_keys(rates):
        if (a, b) in measured.slow and a not in slow and b not in slow:
            microseconds = measured.pairs[a, b]["seconds"] * 1e6
            message = f"{in_rate(rates[a, b])}, {microseconds:.0f} µs; the fastest link has {best}"
            yield finding("slow-link", f"{names[a]} - {names[b]}", message, _look_at(names[b], used))


def check_assumed(measured: Measured, names: list[str], assumed: Any) -> Iterator[Finding]:
    """What was measured against `assumed` (the planner's `Speeds`): data sheets of GPUs; of CPU ranks only rules of
    thumb are known.
    """
    if not assumed.overlaps:
        return
    if measured.pairs and measured.network_bytes < BELOW_ASSUMED * assumed.network_bytes:
        a, b = min(measured.pairs, key=lambda pair: measured.pairs[pair]["bytes_per_second"])
        yield finding(
            "below-assumed",
            f"{names[a]} - {names[b]}",
            f"{in_rate(measured.network_bytes)} between nodes, {in_rate(assumed.network_bytes)} assumed"
            f" ({assumed.source})",
            "right if the network is what it is; else the wrong interface (NCCL_SOCKET_IFNAME), InfiniBand not used"
            " (NCCL_DEBUG=INFO shows it), or a card that negotiated a lower speed (ethtool)",
        )
    node, rate = min(measured.inside.items(), key=lambda item: item[1], default=(0, float("inf")))
    if rate < BELOW_ASSUMED * assumed.all_reduce_bytes:
        yield finding(
            "below-assumed",
            names[node],
            f"{in_rate(rate)} inside the node, {in_rate(assumed.all_reduce_bytes)} assumed ({assumed.source})",
            f"ssh {names[node]} nvidia-smi topo -m; NCCL_DEBUG=INFO shows the path taken (P2P, SHM, NET)",
        )


def check_answers(
    stages: dict[int, str], failures: list[tuple[int, str]], where: RanksOfNodes, not_started: dict[str, str]
) -> list[Finding]:
    """Ranks that did not come to the end.

    Args:
        stages: rank -> the last it said; "done" at the end.
        failures: (rank, error) in the order they came.
        not_started: last words of nodes whose process ended before its ranks spoke.
    """
    findings = []
    for name, words in not_started.items():
        message = f"its ranks did not start: {(words.strip().splitlines() or ['no words'])[-1][:300]}"
        fix = f"ssh {name}, and there: python -c 'import torch, torch.distributed'"
        findings.append(finding("smoke-failed", name, message, fix))
    silent: dict[str, list[int]] = {}
    for rank in [rank for ranks in where.ranks for rank in ranks]:
        if stages.get(rank) != "done" and rank not in dict(failures) and where.node(rank) not in not_started:
            silent.setdefault(stages.get(rank, "nothing"), []).append(rank)
    for stage, ranks in silent.items():
        places, message = join([where.place(rank) for rank in ranks]), f"did not answer; the last it said: {stage}"
        fix = f"ssh {where.node(ranks[0])} ps aux; is the node overloaded, or its network cut?"
        findings.append(finding("smoke-silent", places, message, fix))
    if failures and not findings:  # where a rank is silent, the others' errors only follow from it
        rank, error = failures[0]
        fix = (
            "read the message: the address or interface in it is what the ranks tried (NCCL_SOCKET_IFNAME,"
            " GLOO_SOCKET_IFNAME); NCCL_DEBUG=INFO says more"
        )
        message = f"while {stages.get(rank, 'starting')}: {error}"
        findings.append(finding("smoke-failed", where.place(rank), message, fix))
    return findings


def in_rate(rate: float) -> str:
    """ "1.23 GB/s" or "45.6 MB/s"."""
    return f"{rate / 1e9:.3g} GB/s" if rate >= 1e9 else f"{rate / 1e6:.3g} MB/s"


def _look_at(name: str, used: dict[str, str]) -> str:
    card = used.get(name) or "eth0"
    return (
        f"ssh {name} 'ethtool {card}; ip -s link show {card}; tc qdisc show dev {card}': a lower negotiated speed,"
        f" errors, a limit; then cable and switch port; or leave it out: --exclude {name}"
    )


def _look_at_rank(rank: int, where: RanksOfNodes, facts: dict[str, NodeFacts]) -> str:
    name, local = where.node(rank), where.local(rank)
    if facts[name].gpus.cards and not facts[name].cpu_only:
        return (
            f"ssh {name} nvidia-smi -q -i {local} -d CLOCK,PERFORMANCE,TEMPERATURE: throttled, hot or shared; or leave"
            f" it out: --exclude {name}:{local}"
        )
    return f"ssh {name} top: other programs on its cores, or fewer or slower cores than elsewhere"
