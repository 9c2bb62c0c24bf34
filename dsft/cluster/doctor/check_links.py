"""Findings from the smoke test: wrong sums, slow links, nodes and ranks, ranks that did not answer. Pure."""

from typing import Any

from dsft.cluster.doctor.findings import Finding, finding, join
from dsft.cluster.doctor.links import Measured, pair_rates, slow_keys, slow_nodes

BELOW_ASSUMED = 0.5


def check_measured(
    found: Measured, names: list[str], nodes: list[list[int]], facts: dict[str, dict[str, Any]], used: dict[str, str]
) -> list[Finding]:
    """What stands out among links, nodes and ranks.

    Args:
        names: of the nodes, in the order of `nodes`.
        nodes: ranks of each node.
        used: interface that each node uses.
    """
    findings = []
    if found.wrong:
        findings.append(
            finding(
                "wrong-sum",
                join([_rank(rank, names, nodes) for rank in found.wrong]),
                "an all-reduce over all ranks gave a wrong sum",
                "take out one node after another (--exclude) until it is right, then test that one's memory, GPU (dcgmi"
                " diag -r 3) and cards; another NCCL (pip install nvidia-nccl-cu12==...)",
            )
        )
    rates = pair_rates(found)
    slow = slow_nodes(rates)
    best = max(rates.values(), default=0.0)
    for node in slow:
        own = max(rate for pair, rate in rates.items() if node in pair)
        findings.append(
            finding(
                "slow-node",
                names[node],
                f"{in_rate(own)} to its fastest neighbour, others reach {in_rate(best)} among each other",
                _look_at(names[node], used),
            )
        )
    for a, b in slow_keys(rates):
        if (a, b) in found.again and a not in slow and b not in slow:
            findings.append(
                finding(
                    "slow-link",
                    f"{names[a]} - {names[b]}",
                    f"{in_rate(rates[a, b])}, {found.pairs[a, b]['seconds'] * 1e6:.0f} µs; the fastest link has"
                    f" {in_rate(best)}",
                    _look_at(names[b], used),
                )
            )
    for node in slow_keys(found.inside):
        findings.append(
            finding(
                "slow-inside",
                names[node],
                f"{in_rate(found.inside[node])} among its ranks, {in_rate(max(found.inside.values()))} in the fastest"
                " node",
                f"ssh {names[node]} nvidia-smi topo -m; compare it with another node's (NVLink, PCIe, NUMA), and top"
                " for other programs",
            )
        )
    for rank in slow_keys(found.flops):
        findings.append(
            finding(
                "slow-rank",
                _rank(rank, names, nodes),
                f"{found.flops[rank] / 1e12:.3g} TFLOP/s in a product of matrices,"
                f" {max(found.flops.values()) / 1e12:.3g} on the fastest rank",
                _look_at_rank(rank, names, nodes, facts),
            )
        )
    return findings


def check_assumed(found: Measured, names: list[str], assumed: Any, source: str) -> list[Finding]:
    """What was measured against `assumed` (the planner's `Speeds`): data sheets of GPUs; of CPU ranks only rules of
    thumb are known.
    """
    findings: list[Finding] = []
    if not assumed.overlaps:
        return findings
    if found.pairs and found.network_bytes < BELOW_ASSUMED * assumed.network_bytes:
        a, b = min(found.pairs, key=lambda pair: found.pairs[pair]["bytes_per_second"])
        findings.append(
            finding(
                "below-assumed",
                f"{names[a]} - {names[b]}",
                f"{in_rate(found.network_bytes)} between nodes, {in_rate(assumed.network_bytes)} assumed ({source})",
                "right if the network is what it is; else the wrong interface (NCCL_SOCKET_IFNAME), InfiniBand not used"
                " (NCCL_DEBUG=INFO shows it), or a card that negotiated a lower speed (ethtool)",
            )
        )
    slowest = min(found.inside, key=lambda node: found.inside[node], default=None)
    if slowest is not None and found.inside[slowest] < BELOW_ASSUMED * assumed.all_reduce_bytes:
        findings.append(
            finding(
                "below-assumed",
                names[slowest],
                f"{in_rate(found.inside[slowest])} inside the node, {in_rate(assumed.all_reduce_bytes)} assumed"
                f" ({source})",
                f"ssh {names[slowest]} nvidia-smi topo -m; NCCL_DEBUG=INFO shows the path taken (P2P, SHM, NET)",
            )
        )
    return findings


def check_answers(
    stages: dict[int, str],
    failures: list[tuple[int, str]],
    names: list[str],
    nodes: list[list[int]],
    code: dict[str, str],
) -> list[Finding]:
    """Ranks that did not come to the end.

    Args:
        stages: rank -> the last it said; "done" at the end.
        failures: (rank, error) in the order they came.
        code: last words of nodes whose process ended before its ranks spoke.
    """
    silent = [rank for ranks in nodes for rank in ranks if stages.get(rank) != "done" and rank not in dict(failures)]
    by_stage: dict[str, list[int]] = {}
    for rank in silent:
        by_stage.setdefault(stages.get(rank, "nothing"), []).append(rank)
    findings = []
    for name, words in code.items():
        findings.append(
            finding(
                "smoke-failed",
                name,
                f"its ranks did not start: {(words.strip().splitlines() or ['no words'])[-1][:300]}",
                f"ssh {name}, and there: python -c 'import torch, torch.distributed'",
            )
        )
    for stage, ranks in by_stage.items():
        ranks = [rank for rank in ranks if _node(rank, names, nodes) not in code]
        if ranks:
            findings.append(
                finding(
                    "smoke-silent",
                    join([_rank(rank, names, nodes) for rank in ranks]),
                    f"did not answer; the last it said: {stage}",
                    f"ssh {_node(ranks[0], names, nodes)} ps aux; is the node overloaded, or its network cut?",
                )
            )
    if failures and not findings:  # where a rank is silent, the others' errors only follow from it
        rank, error = failures[0]
        findings.append(
            finding(
                "smoke-failed",
                _rank(rank, names, nodes),
                f"while {stages.get(rank, 'starting')}: {error}",
                "read the message: the address or interface in it is what the ranks tried (NCCL_SOCKET_IFNAME,"
                " GLOO_SOCKET_IFNAME); NCCL_DEBUG=INFO says more",
            )
        )
    return findings


def in_rate(rate: float) -> str:
    """ "1.23 GB/s" or "45.6 MB/s"."""
    return f"{rate / 1e9:.3g} GB/s" if rate >= 1e9 else f"{rate / 1e6:.3g} MB/s"


def _node(rank: int, names: list[str], nodes: list[list[int]]) -> str:
    return next(name for name, ranks in zip(names, nodes, strict=True) if rank in ranks)


def _rank(rank: int, names: list[str], nodes: list[list[int]]) -> str:
    return f"rank {rank} on {_node(rank, names, nodes)}"


def _look_at(name: str, used: dict[str, str]) -> str:
    card = used.get(name) or "eth0"
    return (
        f"ssh {name} 'ethtool {card}; ip -s link show {card}; tc qdisc show dev {card}': a lower negotiated speed,"
        f" errors, a limit; then cable and switch port; or leave it out: --exclude {name}"
    )


def _look_at_rank(rank: int, names: list[str], nodes: list[list[int]], facts: dict[str, dict[str, Any]]) -> str:
    name = _node(rank, names, nodes)
    local = next(ranks for ranks in nodes if rank in ranks).index(rank)
    if facts[name]["gpus"]["list"] and not facts[name]["cpu_only"]:
        return (
            f"ssh {name} nvidia-smi -q -i {local} -d CLOCK,PERFORMANCE,TEMPERATURE: throttled, hot or shared; or leave"
            f" it out: --exclude {name}:{local}"
        )
    return f"ssh {name} top: other programs on its cores, or fewer or slower cores than elsewhere"
