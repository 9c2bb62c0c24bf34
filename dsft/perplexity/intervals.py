"""Computes 95 % intervals of ratios of sums, such as nats per token, over whole documents.

Tokens of one document depend on each other, so documents are the units. The interval is the ratio plus and minus its
jackknife standard error (Efron and Tibshirani, An Introduction to the Bootstrap, 1993, chapter 11) times the quantile
of Student's t. Where few documents hold most tokens, the degrees of freedom are one less than the number of documents
of one length that would be as certain, 1 / sum of squared shares (Kish, Survey Sampling, 1965, section 11.7).

Where a single document is scored, blocks of neighbouring windows are the units.

Shape suffixes: U units, K sums of each.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from scipy.special import bdtr, stdtrit

from dsft.perplexity.sums import Perplexity, exp
from dsft.units import in_digits, plural

LEVEL = 0.95

Interval = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Units:
    """Holds what an interval is computed over."""

    sums_KU: np.ndarray
    """Sums of each unit, such as nats, tokens, bytes. float64."""
    kind: str
    """For the reader, such as "31 documents" or "43 blocks of 7 windows"."""


@dataclass(frozen=True, kw_only=True)
class ResultIntervals:
    """Holds the 95 % intervals of one result, as its report has them; NaN where there are fewer than two units."""

    level: float = LEVEL
    units: str
    """Over what they are computed."""
    perplexity: Interval
    nats_per_token: Interval
    bits_per_byte: Interval


def result_intervals(result: Perplexity) -> ResultIntervals:
    """Compute the intervals of one result. Bit-identical wherever numpy and scipy are the same."""
    units = units_of(result, result.document_nats, result.block_nats, is_scored_D=result.document_tokens > 0)
    low, high = ratio_interval(units, 1)
    per_byte = tuple(bound / math.log(2) for bound in ratio_interval(units, 2))
    return ResultIntervals(
        units=units.kind, perplexity=(exp(low), exp(high)), nats_per_token=(low, high), bits_per_byte=per_byte
    )


def units_of(
    result: Perplexity, documents_D: np.ndarray, blocks_B: np.ndarray | None, *, is_scored_D: np.ndarray
) -> Units:
    """Choose the units of a result; their sums are those given, then tokens, then bytes.

    A block has the bytes that its tokens have in the mean: where in the text its windows end is not known.

    Args:
        documents_D: a sum of each document.
        blocks_B: the same of each block of windows; None where there are none to use.
        is_scored_D: which documents count.
    """
    if is_scored_D.sum() < 2 and blocks_B is not None and result.windows_per_block:
        tokens_B = result.block_tokens.astype(np.float64)
        sums_KU = np.stack([blocks_B, tokens_B, tokens_B * (result.bytes / max(result.tokens, 1))])
        kind = f"{plural(sums_KU.shape[1], 'block')} of {plural(result.windows_per_block, 'window')}"
        return Units(sums_KU=sums_KU, kind=kind)
    sums_KU = np.stack([documents_D, result.document_tokens, result.document_bytes])[:, is_scored_D]
    number = sums_KU.shape[1]
    kind = f"{number:,} documents" if number != 1 else "1 document"
    return Units(sums_KU=sums_KU.astype(np.float64), kind=kind)


def ratio_interval(units: Units, below: int, base: Units | None = None) -> Interval:
    """Return the interval of the first sum over all units, divided by that of row `below`.

    NaN where there are fewer than two units, or nothing to divide by.

    Args:
        base: the same units of another result, whose ratio is subtracted.
    """
    ratio, without_U, freedom = 0.0, np.zeros(units.sums_KU.shape[1]), math.inf
    for each, sign in ((units, 1), (base, -1)):
        if each is None:
            continue
        above_U, below_U = each.sums_KU[0], each.sums_KU[below]
        number, total = len(above_U), below_U.sum()
        if number < 2 or not total or (below_U == total).any():
            return math.nan, math.nan
        ratio += sign * above_U.sum() / total
        without_U += sign * (above_U.sum() - above_U) / (total - below_U)
        freedom = min(freedom, max(1.0, 1 / ((below_U / total) ** 2).sum() - 1))
    error = math.sqrt((number - 1) / number * ((without_U - without_U.mean()) ** 2).sum())
    half = error * stdtrit(freedom, (1 + LEVEL) / 2)
    return float(ratio - half), float(ratio + half)


def in_words(interval: Iterable[float | None], write: Callable[[float], str] = in_digits) -> str:
    """Write an interval as "1,740 to 1,831 (95 %)", or "unknown" where there are too few units for one."""
    low, high = interval
    if low is None or math.isnan(low):
        return "unknown"
    return f"{write(low)} to {write(high)} ({100 * LEVEL:.0f} %)"


def sign_test(better: int, worse: int) -> float:
    """Return the two-sided exact p-value of so many documents better and worse, were both equally likely."""
    return float(min(1.0, 2 * bdtr(min(better, worse), better + worse, 0.5)))
