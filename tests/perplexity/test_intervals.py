"""Intervals are those of the textbook, and hold the truth as often as they say."""

import numpy as np
import pytest
from scipy import stats

from dsft.perplexity import intervals
from dsft.perplexity.intervals import Units, bca_interval, grouped, ratio_intervals, resampled_sums, sign_test
from dsft.perplexity.sums import block_length


def documents(seed: int, number: int = 60) -> np.ndarray:
    """[2, D]: nats and tokens of documents, long ones among them, whose nats per token differ."""
    generator = np.random.default_rng(seed)
    tokens = generator.geometric(0.02, number) + 1
    return np.stack([tokens * generator.gamma(9.0, 1 / 3, number), tokens])


def test_the_interval_is_that_of_scipy_on_the_same_resamples():
    sums_KD = documents(1, number=40)
    ratio = lambda nats, tokens, axis=-1: nats.sum(axis=axis) / tokens.sum(axis=axis)  # noqa: E731
    theirs = stats.bootstrap(
        tuple(sums_KD), ratio, paired=True, vectorized=True, n_resamples=4000, method="BCa", random_state=3, batch=500
    )
    total = sums_KD.sum(axis=1, keepdims=True)
    without = (total - sums_KD)[0] / (total - sums_KD)[1]
    ours = bca_interval(float(ratio(*sums_KD)), theirs.bootstrap_distribution, without)
    assert ours == pytest.approx(tuple(theirs.confidence_interval), rel=1e-12)
    drawn = resampled_sums(sums_KD)
    assert drawn.shape == (2, 10_000) and np.array_equal(drawn, resampled_sums(sums_KD))
    # Resamples of our own: the same interval up to the chance of drawing.
    (whole,) = ratio_intervals(grouped(sums_KD), [(0, 1)])
    assert whole == pytest.approx(ours, abs=0.1 * (ours[1] - ours[0]))
    percentile = tuple(np.quantile(drawn[0] / drawn[1], [0.025, 0.975]))
    assert whole != pytest.approx(percentile, abs=1e-3 * (ours[1] - ours[0])), "not plain percentiles"


@pytest.mark.parametrize("better, worse", [(0, 0), (5, 5), (9, 1), (0, 12), (40, 71), (3000, 3300)])
def test_the_sign_test_is_the_exact_binomial_one(better, worse):
    expected = stats.binomtest(better, better + worse).pvalue if better + worse else 1.0
    assert sign_test(better, worse) == pytest.approx(expected, rel=1e-9)


def coverage(data_sets: int, monkeypatch, *, number: int, resamples: int) -> float:
    monkeypatch.setattr(intervals, "RESAMPLES", resamples)
    truth = 3.0  # tokens and nats per token are independent, so their ratio has the mean of the gamma
    held = 0
    for seed in range(data_sets):
        ((low, high),) = ratio_intervals(grouped(documents(seed, number)), [(0, 1)])
        held += low <= truth <= high
    return held / data_sets


def test_the_interval_holds_the_truth_of_simulated_data_about_95_times_in_100(monkeypatch):
    assert 0.86 <= coverage(200, monkeypatch, number=60, resamples=1000) <= 0.99


@pytest.mark.exhaustive
def test_the_interval_holds_the_truth_of_500_simulated_data_sets(monkeypatch):
    """Of 200 documents, with four standard errors (1 %) of room. The interval is a little short where documents are few
    and uneven: 60 of them, the longest ten times the median, give 91 %."""
    assert 0.91 <= coverage(500, monkeypatch, number=200, resamples=10_000) <= 0.99


def test_very_many_documents_are_drawn_in_groups_with_an_interval_as_wide(monkeypatch):
    monkeypatch.setattr(intervals, "RESAMPLES", 2000)
    sums_KD = documents(2, number=4_500)
    units = grouped(sums_KD)
    assert units.kind == "1,500 groups of 3 neighbouring documents"
    assert units.sums_KU.sum(axis=1) == pytest.approx(sums_KD.sum(axis=1))
    (of_groups,), (of_documents,) = (
        ratio_intervals(each, [(0, 1)]) for each in (units, Units(sums_KU=sums_KD, kind=""))
    )
    assert np.ptp(of_groups) == pytest.approx(np.ptp(of_documents), rel=0.15)


def test_one_unit_has_no_interval_and_like_units_have_one_of_no_width():
    assert np.isnan(ratio_intervals(grouped(np.array([[3.0], [2.0]])), [(0, 1)])[0]).all()
    (interval,) = ratio_intervals(grouped(np.array([[3.0] * 9, [2.0] * 9])), [(0, 1)])
    assert interval == (1.5, 1.5)


def test_blocks_are_at_least_30_where_there_are_windows_enough_and_at_most_1000():
    for windows in (1, 29, 30, 59, 60, 1000, 27_000, 10**6, 10**7):
        blocks = -(-windows // block_length(windows))
        assert min(windows, 30) <= blocks <= 1000
    assert [block_length(windows) for windows in (29, 1000, 10**6)] == [1, 10, 1000]
