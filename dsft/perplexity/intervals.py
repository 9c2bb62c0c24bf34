"""Computes 95 % intervals of ratios of sums, such as nats per token, by resampling whole documents.

Tokens of one document depend on each other, so a token is no unit to resample. Each of 10,000 resamples draws as many
units as there are, with replacement, from a fixed seed. The bounds are bias-corrected and accelerated (BCa; Efron and
Tibshirani, An Introduction to the Bootstrap, 1993, section 14.3), as in `scipy.stats.bootstrap`.

A unit is a document. Where fewer than 30 documents are scored it is a block of neighbouring windows; where there are
more than 2,000 it is a group of neighbouring documents, which costs no certainty that matters and bounds the time.

Shape suffixes: U units, R resamples, K sums of each.
"""

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from dsft.perplexity.sums import Perplexity, exp
from dsft.units import plural

LEVEL, RESAMPLES, SEED = 0.95, 10_000, 0
MOST_UNITS = 2_000
"""More documents are resampled in groups of neighbours."""
DRAWS_AT_ONCE = 1 << 20
"""Bounds the memory of resampling."""

Interval = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Units:
    """Holds what is resampled."""

    sums_KU: np.ndarray
    """Sums of each unit, such as nats, tokens, bytes. float64."""
    kind: str
    """For the reader, such as "31 documents" or "43 blocks of 7 windows"."""


@dataclass(frozen=True, kw_only=True)
class ResultIntervals:
    """Holds the 95 % intervals of one result; NaN where there are fewer than two units."""

    nats_per_token: Interval
    bits_per_byte: Interval
    resampled: str
    """What was resampled."""

    @property
    def perplexity(self) -> Interval:
        return exp(self.nats_per_token[0]), exp(self.nats_per_token[1])

    def report(self) -> dict:
        """Return the interval's part of a report."""
        return {
            "level": LEVEL,
            "resampled": self.resampled,
            "perplexity": list(self.perplexity),
            "nats_per_token": list(self.nats_per_token),
            "bits_per_byte": list(self.bits_per_byte),
        }


def result_intervals(result: Perplexity) -> ResultIntervals:
    """Compute the intervals of one result. The same bits wherever numpy is the same."""
    units = units_of(result, [result.document_nats], [result.block_nats])
    per_token, per_byte = ratio_intervals(units, [(0, 1), (0, 2)])
    low, high = (bound / math.log(2) for bound in per_byte)
    return ResultIntervals(nats_per_token=per_token, bits_per_byte=(low, high), resampled=units.kind)


def units_of(result: Perplexity, documents_KD: list[np.ndarray], blocks_KB: list[np.ndarray]) -> Units:
    """Choose the units of a result; their sums are those given, then tokens, then bytes.

    A block has the bytes that its tokens have in the mean: where in the text its windows end is not known.

    Args:
        documents_KD: sums of each document.
        blocks_KB: the same of each block of windows.
    """
    if result.windows_per_block:
        tokens_B = result.block_tokens.astype(np.float64)
        sums_KU = np.stack([*blocks_KB, tokens_B, tokens_B * (result.bytes / max(result.tokens, 1))])
        kind = f"{plural(sums_KU.shape[1], 'block')} of {plural(result.windows_per_block, 'window')}"
        return Units(sums_KU=sums_KU, kind=kind)
    is_scored_D = result.document_tokens > 0
    return grouped(np.stack([*documents_KD, result.document_tokens, result.document_bytes])[:, is_scored_D])


def grouped(sums_KD: np.ndarray) -> Units:
    """Make a unit of each document, or of neighbours where there are very many."""
    documents = sums_KD.shape[1]
    size = -(-documents // MOST_UNITS)
    if size <= 1:
        return Units(sums_KU=sums_KD.astype(np.float64), kind=f"{documents:,} documents")
    starts = np.arange(0, documents, size)
    sums_KU = np.add.reduceat(sums_KD.astype(np.float64), starts, axis=1)
    return Units(sums_KU=sums_KU, kind=f"{len(starts):,} groups of {size} neighbouring documents")


def ratio_intervals(units: Units, ratios: list[tuple[int, int]]) -> list[Interval]:
    """Return the interval of each ratio of two sums over all units.

    Args:
        ratios: (row of the numerator, row of the denominator) in `sums_KU`.
    """
    if units.sums_KU.shape[1] < 2:
        return [(math.nan, math.nan)] * len(ratios)
    drawn_KR = resampled_sums(units.sums_KU)
    totals_K = units.sums_KU.sum(axis=1)
    intervals = []
    for above, below in ratios:
        if not totals_K[below]:
            intervals.append((math.nan, math.nan))
            continue
        without_U = (totals_K[above] - units.sums_KU[above]) / (totals_K[below] - units.sums_KU[below])
        estimate = totals_K[above] / totals_K[below]
        intervals.append(bca_interval(estimate, drawn_KR[above] / drawn_KR[below], without_U))
    return intervals


def resampled_sums(sums_KU: np.ndarray) -> np.ndarray:
    """Return [K, R]: the sums over as many units as there are, drawn with replacement, of each resample."""
    num_units, generator = sums_KU.shape[1], np.random.default_rng(SEED)
    at_once = max(1, DRAWS_AT_ONCE // num_units)
    parts = []
    for start in range(0, RESAMPLES, at_once):
        drawn_RU = generator.integers(num_units, size=(min(at_once, RESAMPLES - start), num_units))
        parts.append(np.stack([row_U[drawn_RU].sum(axis=1) for row_U in sums_KU]))
    return np.concatenate(parts, axis=1)


def bca_interval(estimate: float, drawn_R: np.ndarray, without_U: np.ndarray) -> Interval:
    """Return the BCa interval of an estimate.

    Args:
        drawn_R: the estimate of each resample.
        without_U: the estimate without each unit (jackknife).
    """
    below = ((drawn_R < estimate).mean() + (drawn_R <= estimate).mean()) / 2
    if not 0 < below < 1 or not np.ptp(without_U):  # all units are alike
        return float(drawn_R.min()), float(drawn_R.max())
    normal = NormalDist()
    bias = normal.inv_cdf(below)
    influence_U = without_U.mean() - without_U
    acceleration = (influence_U**3).sum() / (6 * (influence_U**2).sum() ** 1.5)

    def corrected(quantile: float) -> float:
        z = bias + normal.inv_cdf(quantile)
        return normal.cdf(bias + z / (1 - acceleration * z))

    tail = (1 - LEVEL) / 2
    low, high = np.quantile(drawn_R, [corrected(tail), corrected(1 - tail)])
    return float(low), float(high)


def sign_test(better: int, worse: int) -> float:
    """Return the two-sided exact p-value of so many documents better and worse, were both equally likely."""
    number, fewer = better + worse, min(better, worse)
    if not number or better == worse:
        return 1.0
    k = np.arange(1, fewer + 1)
    log_counts = np.concatenate([[0.0], np.cumsum(np.log((number - k + 1) / k))])  # ln of binomial coefficients
    return float(min(1.0, 2 * np.exp(log_counts - number * math.log(2)).sum()))
