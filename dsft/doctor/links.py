"""Measured rates between nodes, inside them and of each rank: which pairs exchange, and which rates stand out. Plain
data and arithmetic, no torch.
"""

import statistics
from dataclasses import dataclass, field
from typing import Any

MIN_SEGMENTS = 1000  # of fewer, a share says little
MOST_ROUNDS = 19
"""Of exchanges between pairs: a round takes 0.5 s where links are healthy, and ranks end themselves after 40 s."""
ALL_CONNECT = 8  # up to so many nodes each connects to each
SLOW = 0.7  # of the median: slower than this, a link or rank is named


@dataclass(kw_only=True)
class Measured:
    """What the smoke test measured. Nodes and ranks by number, in the order of the host file."""

    pairs: dict[tuple[int, int], dict[str, float]] = field(default_factory=dict)
    """(lower node, higher node) -> {"bytes_per_second": what one node gets from the other while it sends as much, over
    all ranks, in the slower direction; "seconds": of the smallest message}.
    """
    again: set[tuple[int, int]] = field(default_factory=set)  # of these, the slowest, which were measured again, alone
    slow: set[tuple[int, int]] = field(default_factory=set)
    """Of these, those that stayed slower than the fastest pair, measured in turns with it."""
    inside: dict[int, float] = field(default_factory=dict)
    """Node with several ranks -> bytes per second that one of them gets in an all-reduce (everything twice, as
    `Speeds.all_reduce_bytes`).
    """
    flops: dict[int, float] = field(default_factory=dict)
    """Rank -> floating-point operations per second of a matrix product."""
    wrong: list[int] = field(default_factory=list)  # ranks that got a wrong sum
    lost: dict[int, float] = field(default_factory=dict)
    """Node -> share of the TCP segments of the measurement that it had to send again."""
    collective_seconds: float = 0.0  # of the smallest all-reduce over all ranks

    @property
    def pair_rates(self) -> dict[tuple[int, int], float]:
        """Bytes per second of each pair of nodes."""
        return {key: pair["bytes_per_second"] for key, pair in self.pairs.items()}

    @property
    def network_bytes(self) -> float:
        """Of the slowest pair, as it is alone: a collective waits for it. 0 where nothing was measured."""
        return min((self.pairs[pair]["bytes_per_second"] for pair in self.again or self.pairs), default=0.0)


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
    return sorted((key for key, rate in rates.items() if rate < SLOW * typical), key=lambda key: rates[key])


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
    seats: list[int | None] = [*range(number), *([None] if number % 2 else [])]
    rounds = []
    for _ in range(len(seats) - 1):  # circle method
        half = len(seats) // 2
        pairs = zip(seats[:half], reversed(seats[half:]), strict=True)
        rounds.append([(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None])
        seats = [seats[0], seats[-1], *seats[1:-1]]
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
    edges = sorted({(min(i, (i + 1) % number), max(i, (i + 1) % number)) for i in range(number)} - {(0, 0)})
    rounds: list[list[tuple[int, int]]] = []
    for edge in edges:
        free = next((pairs for pairs in rounds if not {*edge} & {node for pair in pairs for node in pair}), None)
        if free is None:
            rounds.append(free := [])
        free.append(edge)
    return rounds
