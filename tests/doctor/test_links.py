"""Which pairs of nodes exchange, and which rates stand out."""

import random

import pytest

from dsft.doctor.links import (
    MIN_SEGMENTS,
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


@pytest.mark.parametrize("seed", range(20))
def test_what_is_slow_depends_on_neither_the_unit_nor_the_order_of_the_nodes(seed):
    chance = random.Random(seed)
    number = chance.randint(2, 7)
    rates = {(a, b): chance.choice([1.0, 1.0, 1.0, 0.5, 0.1]) for a in range(number) for b in range(a + 1, number)}
    slow, at_fault = slow_keys(rates), slow_nodes(rates)
    assert all(rates[key] < max(rates.values()) for key in slow)
    faster = {key: 1e9 * rate for key, rate in rates.items()}
    assert (slow_keys(faster), slow_nodes(faster)) == (slow, at_fault)
    numbers = chance.sample(range(number), k=number)
    renamed = {tuple(sorted((numbers[a], numbers[b]))): rate for (a, b), rate in rates.items()}
    assert set(slow_nodes(renamed)) == {numbers[node] for node in at_fault}
    assert {tuple(sorted((numbers[a], numbers[b]))) for a, b in slow} == set(slow_keys(renamed))


@pytest.mark.parametrize("number", range(3, 9))
def test_one_slow_node_is_found_whichever_it_is(number):
    for at_fault in range(number):
        rates = {(a, b): 0.1 if at_fault in (a, b) else 1.0 for a in range(number) for b in range(a + 1, number)}
        assert slow_nodes(rates) == [at_fault]


def test_losses_and_inner_rates_are_those_of_the_worst_rank_of_a_node():
    rank = {"pairs": {}, "again": [], "slow": [], "flops": 1.0, "wrong": False, "collective_seconds": 1e-4}
    of_ranks = [
        rank | {"inside": 3.0, "sent": 10_000, "sent_again": 100},
        rank | {"inside": 2.0, "sent": 10_000, "sent_again": 500, "collective_seconds": 3e-4},
        rank | {"inside": 0.0, "sent": 10, "sent_again": 5},
    ]
    total = combine(of_ranks, [[0, 1], [2]])
    assert (total.inside, total.collective_seconds, total.network_bytes) == ({0: 2.0}, 3e-4, 0.0)
    assert total.lost == {0: 0.05, 1: 5 / MIN_SEGMENTS}, "of few segments a share says little"
