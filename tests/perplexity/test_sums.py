"""What a window scores of each document is found for all windows at once, and for a large corpus in little memory.
Intervals are those of the textbook, and hold the truth as often as they say.
"""

import tracemalloc
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from scipy import stats

from dsft.data.prepare import StoreWriter
from dsft.data.tokenization import Tokens
from dsft.models.trials import RowRules
from dsft.perplexity.modes import cut, disjoint_spans
from dsft.perplexity.scoring import form_batches
from dsft.perplexity.sums import block_length, ratio_interval, sign_test
from dsft.perplexity.windows import Windows, count_true, pieces_of


def windows_over(scorable: np.ndarray, ends: list[int], spans: list[tuple[int, int, int]]) -> Windows:
    size, documents = len(scorable), np.array(ends, dtype=np.int64)
    return Windows(
        tokens=np.zeros(size, np.uint16),
        scorable=scorable,
        document_ends=documents,
        spans=np.array(spans, dtype=np.int64).reshape(-1, 3),
        document_bytes=documents,
        document_words=documents,
        document_hashes=np.zeros(len(documents), np.uint64),
    )


@pytest.mark.parametrize("seed", range(20))
def test_pieces_are_the_scored_tokens_counted_one_by_one(seed, monkeypatch):
    monkeypatch.setattr("dsft.perplexity.windows.WINDOWS_AT_ONCE", 1 + seed % 4)
    rng = np.random.default_rng(seed)
    size = int(rng.integers(1, 200))
    ends = [*np.sort(rng.integers(0, size + 1, int(rng.integers(0, 20)))).tolist(), size]  # some documents are empty
    cuts = [0, *np.unique(rng.integers(0, size, int(rng.integers(0, 20)))).tolist(), size]
    spans = [(a, b, min(a + int(rng.integers(0, 4)), b)) for a, b in pairwise(cuts) if a < b]
    windows = windows_over(rng.random(size) < 0.7, ends, spans)
    counted: dict[tuple[int, int], int] = {}
    for window, (_, end, scored_from) in enumerate(spans):
        for place in range(scored_from, end):
            document = next(number for number, stop in enumerate(ends) if place < stop)
            counted[window, document] = counted.get((window, document), 0) + int(windows.scorable[place])
    expected = [(*key, tokens) for key, tokens in counted.items() if tokens]
    columns = map(np.concatenate, zip(*windows.pieces(), strict=True))
    assert [*zip(*(column.tolist() for column in columns), strict=True)] == expected
    batches = form_batches(windows.lengths, 40, RowRules())
    pieces = pieces_of(windows)
    for batch in batches:
        place = pieces.of(batch)
        wanted = [item for window in batch for item in expected if item[0] == window]
        columns = (pieces.windows[place], pieces.documents[place], pieces.tokens[place])
        assert [*zip(*(column.tolist() for column in columns), strict=True)] == wanted


def test_tokens_are_counted_a_part_at_a_time():
    flags = np.ones(5 << 20, bool)
    flags[:: 1 << 19] = False
    begins = np.arange(0, len(flags), 1024)
    tracemalloc.start()
    counts = count_true(flags, begins, begins + 1024)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert counts.sum() == flags.sum() and counts.min() == 1023
    assert peak < 16 << 20  # bytes; all flags as int64 would be 40 MiB


def test_a_prepared_corpus_is_not_read_again_for_its_hash(tmp_path):
    with StoreWriter(tmp_path / "store", largest_id=383) as writer:
        for seed in range(3):
            ids = np.random.default_rng(seed).integers(0, 384, 30).astype(np.int32)
            ends, sizes = np.array([10, 30]), np.array([40, 80])
            hashes = np.array([seed, seed + 9], np.uint64)
            writer.append(
                Tokens(
                    ids=ids,
                    trained=np.arange(30) % 7 > 0,
                    ends=ends,
                    hashes=hashes,
                    counts=Counter(rows=2),
                    document_bytes=sizes,
                    document_words=sizes,
                )
            )
        store = writer.finish(is_text=True)
    windows = cut(store, lambda start, end: disjoint_spans(start, end, 16))
    known = windows.hashes()
    windows.known_hashes = {}
    assert known == windows.hashes()  # what is read from the tokens themselves
    assert "tokens" in cut(store, lambda start, end: disjoint_spans(start, end, 16)).known_hashes


def interval(nats_D: np.ndarray, tokens_D: np.ndarray) -> tuple[float, float]:
    return ratio_interval(np.stack([nats_D, tokens_D]).astype(np.float64), 1)


def test_of_documents_of_one_length_it_is_the_interval_of_students_t():
    per_token = np.random.default_rng(1).normal(3, 0.4, 7)
    theirs = stats.t.interval(0.95, 6, per_token.mean(), stats.sem(per_token))
    assert interval(per_token * 50, np.full(7, 50)) == pytest.approx(theirs, rel=1e-12)


def test_a_long_document_among_short_ones_makes_it_as_wide_as_few_documents_do():
    generator = np.random.default_rng(2)
    per_token, tokens = generator.normal(3, 0.4, 40), np.full(40, 20)
    even = interval(per_token * tokens, tokens)
    tokens[0] = 20_000
    assert np.ptp(interval(per_token * tokens, tokens)) > np.ptp(even)


LENGTHS = {
    "of one length": lambda generator, number: np.full(number, 400),
    "geometric": lambda generator, number: generator.geometric(0.02, number) + 1,
    "log-normal": lambda generator, number: np.ceil(np.exp(generator.normal(6, 1, number))),
}


@pytest.mark.parametrize("number", [5, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in (10, 20, 29, 60)), 250])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("spread", [0.1, 0.5])
def test_the_interval_holds_the_truth_of_simulated_data_about_95_times_in_100(number, lengths, spread):
    """Documents differ by `spread` nats per token, and their tokens add noise of their own."""
    generator, held, sets = np.random.default_rng(number), 0, 2000
    for _ in range(sets):
        tokens = LENGTHS[lengths](generator, number)
        low, high = interval(tokens * generator.normal(3, np.sqrt(spread**2 + 2.5**2 / tokens)), tokens)
        held += low <= 3 <= high
    # Nominal 95 %, with four standard errors of 2,000 draws (2 %); uneven documents make it wider, never short.
    assert 0.93 <= held / sets <= (0.97 if lengths == "of one length" else 0.99)


@pytest.mark.parametrize("better, worse", [(0, 0), (5, 5), (9, 1), (0, 12), (40, 71), (3000, 3300)])
def test_the_sign_test_is_the_exact_binomial_one(better, worse):
    expected = stats.binomtest(better, better + worse).pvalue if better + worse else 1.0
    assert sign_test(better, worse) == pytest.approx(expected, rel=1e-9)


def test_one_unit_has_no_interval_and_like_units_have_one_of_no_width():
    assert np.isnan(interval(np.array([3.0]), np.array([2]))).all()
    assert np.isnan(interval(np.array([3.0, 0.0]), np.array([2, 0]))).all(), "one unit holds all tokens"
    assert interval(np.full(9, 3.0), np.full(9, 2)) == (1.5, 1.5)


def test_blocks_are_at_least_30_where_there_are_windows_enough_and_at_most_1000():
    for windows in (1, 29, 30, 59, 60, 1000, 27_000, 10**6, 10**7):
        blocks = -(-windows // block_length(windows))
        assert min(windows, 30) <= blocks <= 1000
    assert [block_length(windows) for windows in (29, 1000, 10**6)] == [1, 10, 1000]
