"""Which pairs of nodes exchange, and which rates stand out."""

import pytest

from dsft.doctor.links import (
    combine,
    neighbours,
    ring_rounds,
    slow_keys,
    slow_nodes,
    some_rounds,
)


@pytest.mark.parametrize("number", range(2, 18))
def test_rounds_pair_every_node_with_every_other_once_and_nobody_twice_at_a_time(number):
    for rounds, wanted in (
        (some_rounds(number), number * (number - 1) // 2),
        (ring_rounds(number), number if number > 2 else 1),
    ):
        pairs = [pair for pairs in rounds for pair in pairs]
        assert len(pairs) == len(set(pairs)) == wanted and all(a < b for a, b in pairs)
        assert all(len({node for pair in pairs for node in pair}) == 2 * len(pairs) for pairs in rounds)
    assert len(some_rounds(number)) == number - 1 + number % 2 and len(ring_rounds(number)) <= 3


def test_many_nodes_try_a_sample_that_joins_all_and_grows_slowly():
    for number in (2, 9, 16, 128, 1024):
        tried = {node: neighbours(number, node) for node in range(number)}
        assert all(node not in others and others for node, others in tried.items())
        assert all(node in tried[other] for node, others in tried.items() for other in others)  # both directions
        met, rounds = {0}, some_rounds(number)
        while more := {other for node in met for other in tried[node]} - met:
            met |= more
        assert len(met) == number
        assert max(map(len, tried.values())) <= max(7, 2 * number.bit_length())
        assert len(rounds) <= 19 and {node for pairs in rounds for pair in pairs for node in pair} == set(range(number))
        pairs = {pair for pairs in rounds for pair in pairs}
        assert number > 16 or len(pairs) == number * (number - 1) // 2


def test_outliers():
    assert slow_keys({"a": 1.0}) == [] == slow_keys({"a": 1.0, "b": 0.71}) and slow_keys({"a": 1.0, "b": 0.69}) == ["b"]
    assert slow_nodes({(0, 1): 1.0}) == [] and slow_nodes({(0, 1): 1.0, (0, 2): 0.1, (1, 2): 0.2}) == [2]
    assert slow_nodes({(0, 1): 1.0, (0, 2): 0.1, (1, 2): 1.0}) == []


def test_rates_of_ranks_side_by_side_add_up_and_the_slower_direction_counts():
    rank = {"inside": 0.0, "flops": 1.0, "wrong": False, "collective_seconds": 1e-4, "again": [], "slow": []} | {
        "sent": 10_000,
        "sent_again": 0,
    }
    total = combine(
        [
            rank | {"pairs": {1: (5.0, 1e-5)}},
            rank | {"pairs": {1: (6.0, 3e-5)}},
            rank | {"pairs": {0: (1.0, 1e-5)}},
            rank | {"pairs": {0: (2.0, 2e-5)}, "wrong": True},
        ],
        [[0, 1], [2, 3]],
    )
    assert (
        total.pairs == {(0, 1): {"bytes_per_second": 3.0, "seconds": 3e-5}}
        and total.wrong == [3]
        and total.network_bytes == 3.0
        and not total.again
    )
