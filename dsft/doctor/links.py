"""Measured rates between nodes, inside them and of each rank: which pairs exchange, which rates stand out, and the
findings about them. Plain data and arithmetic, no torch.
"""

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from dsft.doctor.findings import Finding, finding, join
from dsft.doctor.phases import NodeFacts

MIN_SEGMENTS = 1000  # of fewer, a share says little
MOST_ROUNDS = 19  # of exchanges between pairs: one takes 0.5 s where links are healthy, and ranks live for 40 s
ALL_CONNECT = 8  # up to so many nodes each connects to each
BELOW_ASSUMED = 0.5
LOST = 0.02  # of the segments; a sound network between nodes loses less than one in thousands
SLOW = 0.7  # of the median: slower than this, a link or rank is named


@dataclass(kw_only=True)
class Measured:
    """What the smoke test measured. Nodes and ranks by number, in the order of the host file."""

    pairs: dict[tuple[int, int], dict[str, float]] = field(default_factory=dict)
    """(lower node, higher node) -> {"bytes_per_second": what one node gets from the other while it sends as much, over
    all ranks, in the slower direction; "seconds": of the smallest message}."""
    again: set[tuple[int, int]] = field(default_factory=set)  # of these, the slowest, which were measured again, alone
    slow: set[tuple[int, int]] = field(default_factory=set)  # of these, those that stayed slower than the fastest pair
    inside: dict[int, float] = field(default_factory=dict)
    """Node with several ranks -> bytes per second of one of them in an all-reduce (as `Speeds.all_reduce_bytes`)."""
    flops: dict[int, float] = field(default_factory=dict)  # rank -> operations per second of a matrix product
    wrong: list[int] = field(default_factory=list)  # ranks that got a wrong sum
    lost: dict[int, float] = field(default_factory=dict)  # node -> share of its TCP segments that were sent again
    collective_seconds: float = 0.0  # of the smallest all-reduce over all ranks

    @property
    def pair_rates(self) -> dict[tuple[int, int], float]:
        """Bytes per second of each pair of nodes."""
        return {key: pair["bytes_per_second"] for key, pair in self.pairs.items()}

    @property
    def network_bytes(self) -> float:
        """Of the slowest pair, as it is alone: a collective waits for it. 0 where nothing was measured."""
        return min((self.pair_rates[pair] for pair in self.again or self.pairs), default=0.0)


def combine(of_ranks: list[dict[str, Any]], nodes: list[list[int]]) -> Measured:
    """The measurements of all ranks (`smoke.measure_all`), ordered by rank, as one value; rates of a node's ranks
    (`nodes`: of each, in order) side by side add up.
    """
    total, node_of = Measured(), {rank: node for node, ranks in enumerate(nodes) for rank in ranks}
    received: dict[tuple[int, int], float] = {}  # (from, to): one direction may be slow alone
    for rank, measured in enumerate(of_ranks):
        node = node_of[rank]
        for name, (rate, seconds) in measured["pairs"].items():
            other = int(name)
            key = (min(node, other), max(node, other))
            total.again |= {key} if other in measured["again"] else set()
            total.slow |= {key} if other in measured["slow"] else set()
            received[other, node] = received.get((other, node), 0.0) + rate
            pair = total.pairs.setdefault(key, {"bytes_per_second": 0.0, "seconds": 0.0})
            pair["seconds"] = max(pair["seconds"], seconds)
        if measured["inside"]:
            total.inside[node] = min(total.inside.get(node, measured["inside"]), measured["inside"])
        total.lost[node] = max(total.lost.get(node, 0.0), measured["sent_again"] / max(measured["sent"], MIN_SEGMENTS))
        total.flops[rank] = measured["flops"]
        total.wrong += [rank] if measured["wrong"] else []
        total.collective_seconds = max(total.collective_seconds, measured["collective_seconds"])
    for a, b in total.pairs:
        total.pairs[a, b]["bytes_per_second"] = min(received[a, b], received[b, a])
    return total


def slow_keys(rates: dict[Any, float], *, reference: float | None = None) -> list[Any]:
    """Keys whose rate is below SLOW of the median (of `reference`, where given), slowest first; with one alone there is
    no telling.
    """
    if len(rates) < 2:
        return []
    # The upper of two middles: with two rates the slower one is compared with the faster.
    typical = statistics.median_high(rates.values()) if reference is None else reference
    return sorted((key for key, rate in rates.items() if rate < SLOW * typical), key=rates.get)


def slow_nodes(rates: dict[tuple[int, int], float]) -> list[int]:
    """Nodes all of whose links are slow while links without them are not: the fault is the node's, not a link's. Needs
    three nodes or more.
    """
    nodes = {node for key in rates for node in key}
    if len(nodes) < 3:
        return []
    # With few nodes the slow links of one are half of all, or more, and make the median: then the fastest link is the
    # measure.
    for reference in (None, max(rates.values())):
        slow = slow_keys(rates, reference=reference)
        at_fault = [node for node in sorted(nodes) if slow and all((key in slow) == (node in key) for key in rates)]
        if at_fault:
            return at_fault
    return []


def some_rounds(number: int) -> list[list[tuple[int, int]]]:
    """Rounds in which each of `number` nodes meets another: until all pairs of up to MOST_ROUNDS + 1 nodes have met; of
    more, rounds evenly out of all, so that every node meets so many others, and a ring of all.
    """
    seats, rounds = number - 1 + number % 2, []
    for total in range(seats):
        # Those meet whose numbers add up to it, modulo the seats. Of an even number, whom that leaves meets the last.
        others = ((a, (total - a) % seats) for a in range(seats))
        pairs = ((a, seats if a == b else b) for a, b in others)
        rounds.append([(a, b) for a, b in pairs if a < b < number])
    if len(rounds) <= MOST_ROUNDS:
        return rounds
    ring = ring_rounds(number)
    sample = MOST_ROUNDS - len(ring)
    return [*ring, *(rounds[i * len(rounds) // sample] for i in range(sample))]


def neighbours(number: int, node: int) -> list[int]:
    """Whom a node tries to reach: all others of up to ALL_CONNECT; of more, those 1, 2, 4 ... places before and after
    it, so that the tries grow with the logarithm.
    """
    if number <= ALL_CONNECT:
        return [other for other in range(number) if other != node]
    steps = [sign * 2**power for power in range((number - 1).bit_length()) for sign in (1, -1)]
    return sorted({(node + step) % number for step in steps} - {node})


def ring_rounds(number: int) -> list[list[tuple[int, int]]]:
    """Neighbours only, as a ring collective uses them: two rounds, three for an odd number of nodes."""
    edges, closing = [(i, i + 1) for i in range(number - 1)], [(0, number - 1)] if number > 2 else []
    rounds = [edges[::2], edges[1::2], closing] if number % 2 else [edges[::2], edges[1::2] + closing]
    return [pairs for pairs in rounds if pairs]


def check_measured(
    measured: Measured, node_of: dict[int, str], facts: dict[str, NodeFacts], used: dict[str, str]
) -> Iterator[Finding]:
    """What stands out among links, nodes and ranks. `node_of`: each rank's node; `used`: each node's interface."""
    names = list(facts)
    if measured.wrong:
        yield finding(
            "wrong-sum",
            join([f"rank {rank} on {node_of[rank]}" for rank in measured.wrong]),
            "an all-reduce over all ranks gave a wrong sum",
            "take out one node after another (--exclude) until it is right, then test that one's memory, GPU (dcgmi"
            " diag -r 3) and cards; another NCCL (pip install nvidia-nccl-cu12==...)",
        )
    rates = measured.pair_rates
    fastest = max(rates.values(), default=0.0)
    best, cleared = in_rate(fastest), measured.again - measured.slow
    alone = {pair: fastest if pair in cleared else rate for pair, rate in rates.items()}
    slow = [node for node in slow_nodes(alone) if any(node in pair for pair in measured.slow)]
    for node in slow:
        neighbour = in_rate(max(rate for pair, rate in rates.items() if node in pair))
        message = f"{neighbour} to its fastest neighbour, others reach {best} among each other"
        yield finding("slow-node", names[node], message, _look_at(names[node], used))
    for a, b in slow_keys(rates):
        if (a, b) in measured.slow and a not in slow and b not in slow:
            microseconds = measured.pairs[a, b]["seconds"] * 1e6
            message = f"{in_rate(rates[a, b])}, {microseconds:.0f} µs; the fastest link has {best}"
            yield finding("slow-link", f"{names[a]} - {names[b]}", message, _look_at(names[b], used))
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
        name = node_of[rank]
        fix = f"ssh {name} top: other programs on its cores, or fewer or slower cores than elsewhere"
        if facts[name].gpus.cards and not facts[name].cpu_only:
            local = [other for other in node_of if node_of[other] == name].index(rank)
            numbers = {place: gpu.index for place, gpu in enumerate(facts[name].rank_gpus)}
            gpu = numbers.get(local, local)  # a task of srun --gpus-per-task has told of its own GPU alone
            look = f"ssh {name} nvidia-smi -q -i {gpu} -d CLOCK,PERFORMANCE,TEMPERATURE: throttled, hot or shared"
            fix = f"{look}; or leave it out: --exclude {name}:{gpu}"
        yield finding("slow-rank", f"rank {rank} on {name}", message, fix)


def check_assumed(measured: Measured, names: list[str], assumed: Any) -> Iterator[Finding]:
    """What was measured against `assumed` (the planner's `Speeds`): data sheets of GPUs; of CPU ranks only rules of
    thumb are known.
    """
    if not assumed.overlaps:
        return
    if measured.pairs and measured.network_bytes < BELOW_ASSUMED * assumed.network_bytes:
        a, b = min(measured.pairs, key=measured.pair_rates.get)
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
    stages: dict[int, str], failures: list[tuple[int, str]], node_of: dict[int, str], not_started: dict[str, str]
) -> list[Finding]:
    """Ranks that did not come to the end. `stages`: rank -> the last it said, "done" at the end; `failures`: (rank,
    error) in the order they came; `not_started`: last words of nodes whose process exited before its ranks spoke.
    """
    findings = []
    for name, words in not_started.items():
        message = f"its ranks did not start: {(words.strip().splitlines() or ['no words'])[-1][:300]}"
        fix = f"ssh {name}, and there: python -c 'import torch, torch.distributed'"
        findings.append(finding("smoke-failed", name, message, fix))
    silent: dict[str, list[int]] = {}
    for rank, node in node_of.items():
        if stages.get(rank) != "done" and rank not in dict(failures) and node not in not_started:
            silent.setdefault(stages.get(rank, "nothing"), []).append(rank)
    for stage, ranks in silent.items():
        places = join([f"rank {rank} on {node_of[rank]}" for rank in ranks])
        fix = f"ssh {node_of[ranks[0]]} ps aux; is the node overloaded, or its network cut?"
        findings.append(finding("smoke-silent", places, f"did not answer; the last it said: {stage}", fix))
    if failures and not findings:  # where a rank is silent, the others' errors only follow from it
        rank, error = failures[0]
        message = f"while {stages.get(rank, 'starting')}: {error}"
        fix = (
            "read the message: the address or interface in it is what the ranks tried (NCCL_SOCKET_IFNAME,"
            " GLOO_SOCKET_IFNAME); NCCL_DEBUG=INFO says more"
        )
        findings.append(finding("smoke-failed", f"rank {rank} on {node_of[rank]}", message, fix))
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
