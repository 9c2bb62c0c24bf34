"""Intervals are those of the textbook, and hold the truth as often as they say."""

import numpy as np
import pytest
import scipy.signal
from scipy import stats

from dsft.perplexity.sums import merge_blocks, ratio_interval, sign_test


def interval(nats_D: np.ndarray, tokens_D: np.ndarray) -> tuple[float, float]:
    return ratio_interval(np.stack([nats_D, tokens_D]).astype(np.float64), 1)


def test_of_documents_of_one_length_it_is_the_interval_of_students_t():
    per_token = np.random.default_rng(1).normal(3, 0.4, 7)
    theirs = stats.t.interval(0.95, 6, per_token.mean(), stats.sem(per_token))
    assert interval(per_token * 50, np.full(7, 50)) == pytest.approx(theirs, rel=1e-12)


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


@pytest.mark.parametrize("number", [60, 250])
@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.8])
def test_the_interval_of_one_document_with_autocorrelated_windows_holds_the_truth(number, correlation):
    generator, sets = np.random.default_rng(number), 1000
    noise = generator.normal(size=(sets, number)) * np.sqrt(1 - correlation**2)
    noise[:, 0] /= np.sqrt(1 - correlation**2)
    windows = scipy.signal.lfilter([1], [1, -correlation], noise, axis=1)
    tokens = np.full(number, 2047.0)
    held = 0
    for window_means in windows:
        low, high = interval(*merge_blocks((3 + 0.3 * window_means) * tokens, tokens))
        held += low <= 3 <= high
    assert 0.90 <= held / sets <= 0.98
