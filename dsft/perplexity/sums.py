"""Computes a result from the sums of the windows, and 95 % intervals of ratios of sums, such as nats per token.

Tokens of one document depend on each other, so intervals are over whole documents. The interval is the ratio plus and
minus its jackknife standard error (Efron and Tibshirani, An Introduction to the Bootstrap, 1993, chapter 11) times the
quantile of Student's t. If few documents contain most tokens, the degrees of freedom are one less than the effective
number of documents, 1 / sum of squared shares (Kish, Survey Sampling, 1965, section 11.7).
If a single document is scored, the units are blocks of neighbouring windows (batch means), with a length that follows
from their measured autocorrelation; below 60 windows there is no interval.

Shape suffixes: D documents, W windows, B blocks, U units, K sums of each.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np
from scipy.special import bdtr, stdtrit

from dsft.errors import TrainingStopped
from dsft.perplexity.modes import Windows
from dsft.units import JsonObject, in_digits

STEPS = 2.0**28  # per nat; fp32 logits above 1/32 are no finer
FEWEST_DOCUMENTS = 2  # with fewer scored documents, intervals are over blocks of windows
FEWEST_BLOCKS = 60  # of a single document: with fewer the autocorrelation cannot be measured
MOST_BLOCKS = 1_000
FEWEST_MERGED = 5
LEVEL = 0.95
ONE_DOCUMENT = "one document"
LONG_SHARE = 0.2  # of the tokens, above which the longest document is reported

Interval = tuple[float, float]


@dataclass(frozen=True)
class Estimate:
    """A number with its 95 % interval; NaN if there is none."""

    value: float
    low: float
    high: float

    def __format__(self, spec: str) -> str:
        value = f"{self.value:{spec}}"
        if math.isnan(self.low):
            return value
        return f"{value} ({self.low:{spec}} to {self.high:{spec}})"

    def mapped(self, function: Callable[[float], float]) -> "Estimate":
        return Estimate(function(self.value), function(self.low), function(self.high))


@dataclass(frozen=True, kw_only=True)
class Perplexity:
    """The result of one evaluation, over all ranks."""

    nats: float  # sum of negative log-likelihoods of the scored tokens
    tokens: int  # number of scored tokens
    document_nats: np.ndarray  # [D] float64
    document_tokens: np.ndarray  # [D] int64: scored tokens of each document
    document_bytes: np.ndarray
    """[D] int64: UTF-8 bytes of each document's scored tokens; 0 if there is no text (token sequences)."""
    document_words: np.ndarray  # [D] int64
    document_pairs: np.ndarray
    """[K - 1, D] float64: with a reference, the sums of COLUMNS of `results.py` after the first; else [0, D]."""
    block_nats: np.ndarray
    """[B] float64: of blocks of neighbouring windows, in text order; empty if enough documents are scored."""
    block_tokens: np.ndarray  # [B] int64
    fed_tokens: int  # tokens fed to the model in this run, over all ranks; less than in all windows if it was resumed
    reported_loss: float  # mean nats with the protocol's weights; without a protocol the same as `loss`
    reference_loss: float = math.nan  # the same for the reference; NaN without one

    @property
    def documents(self) -> int:
        return len(self.document_nats)

    @property
    def bytes(self) -> int:
        return int(self.document_bytes.sum())

    @property
    def words(self) -> int:
        return int(self.document_words.sum())

    @property
    def unscored_documents(self) -> int:
        return int((self.document_tokens == 0).sum())

    @property
    def longest_share(self) -> float:
        """Share of the scored tokens in the document with most."""
        return float(self.document_tokens.max() / self.tokens)

    def of_documents(self, wanted_D: np.ndarray) -> "Perplexity":
        """Return the result as if only these documents had been scored; the others remain, without tokens."""
        wanted_D = wanted_D & (self.document_tokens > 0)
        nats_D = np.where(wanted_D, self.document_nats, 0.0)
        tokens_D = np.where(wanted_D, self.document_tokens, 0)
        nats = math.fsum(nats_D)
        tokens = int(tokens_D.sum())
        return replace(
            self,
            nats=nats,
            tokens=tokens,
            document_nats=nats_D,
            document_tokens=tokens_D,
            document_bytes=np.where(wanted_D, self.document_bytes, 0),
            document_words=np.where(wanted_D, self.document_words, 0),
            document_pairs=self.document_pairs[:0],
            block_nats=self.block_nats[:0],
            block_tokens=self.block_tokens[:0],
            reported_loss=nats / max(tokens, 1),
        )

    @property
    def loss(self) -> float:
        """Mean nats per token."""
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float:
        """The reported value: exp of `reported_loss`."""
        return exp(self.reported_loss)

    @property
    def word_perplexity(self) -> float:
        if not self.words:
            return math.nan
        return exp(self.nats / self.words)

    @property
    def byte_perplexity(self) -> float:
        if not self.bytes:
            return math.nan
        return exp(self.nats / self.bytes)

    @property
    def bits_per_byte(self) -> float:
        if not self.bytes:
            return math.nan
        return self.nats / self.bytes / math.log(2)


def exp(value: float) -> float:
    """Return math.exp, infinite beyond float64 (exp(709.8)); NaN stays NaN."""
    return math.inf if value > 709 else math.exp(value)


def add_up(windows: Windows, sums_KC: np.ndarray, *, fed_tokens: int) -> Perplexity:
    """Return the result. Args: `sums_KC`: from `scoring.sum_tokens`, for all documents, then for all windows.
    Raises TrainingStopped if a document's loss is NaN or infinite.
    """
    number = len(windows.document_ends)
    *steps_KD, tokens_D, unsound_D = sums_KC[:, :number]
    *steps_KW, tokens_W, _ = sums_KC[:, number:]
    if unsound_D.any():
        raise TrainingStopped(
            f"the loss of document {(unsound_D > 0).argmax() + 1} of {number} is NaN or infinite: the model's weights"
            " are broken, or its numbers overflow in this dtype"
        )
    block_starts = np.zeros(0, np.int64)
    if (tokens_D > 0).sum() < FEWEST_DOCUMENTS:
        block_starts = np.arange(0, len(tokens_W), math.ceil(len(tokens_W) / MOST_BLOCKS))
    weights_W = windows.weights
    if weights_W is None:
        weights_W = np.ones(len(tokens_W))
    weighted_tokens = math.fsum(tokens_W * weights_W)
    loss, *of_reference = (math.fsum(steps_W / STEPS * weights_W) / weighted_tokens for steps_W in steps_KW[:2])
    return Perplexity(
        nats=float(steps_KD[0].sum() / STEPS),
        tokens=int(tokens_D.sum()),
        document_nats=steps_KD[0] / STEPS,
        document_tokens=tokens_D,
        document_bytes=windows.document_bytes,
        document_words=windows.document_words,
        document_pairs=np.array(steps_KD[1:]).reshape(-1, number) / STEPS,
        block_nats=np.add.reduceat(steps_KW[0], block_starts) / STEPS,
        block_tokens=np.add.reduceat(tokens_W, block_starts),
        fed_tokens=fed_tokens,
        reported_loss=loss,
        reference_loss=of_reference[0] if of_reference else math.nan,
    )


def merge_blocks(nats_B: np.ndarray, tokens_B: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Merge neighbouring blocks until they are nearly independent: batch means.

    With r the measured lag-1 autocorrelation, a merged block has 3 (2 r / (1 - r^2))^(2/3) B^(1/3) of B blocks. That is
    three times Carlstein's length (The use of subseries values, Annals of Statistics, 1986), since with his the
    interval of a few hundred windows is too short. At least 5 blocks remain.
    """
    number = len(nats_B)
    residual_B = nats_B - tokens_B * (nats_B.sum() / tokens_B.sum())
    variance = (residual_B**2).sum()
    length = 1
    if variance > 0:
        correlation = (residual_B[1:] * residual_B[:-1]).sum() / variance
        correlation += (1 + 4 * correlation) / number  # bias of the estimate (Marriott and Pope, 1954)
        correlation = min(max(correlation, 0.0), 0.97)
        dependence = 2 * correlation / (1 - correlation**2)
        length = math.ceil(3 * dependence ** (2 / 3) * number ** (1 / 3))
    merged = max(number // max(length, 1), FEWEST_MERGED)
    starts = np.arange(merged) * number // merged
    return np.add.reduceat(nats_B, starts), np.add.reduceat(tokens_B, starts)


def result_intervals(result: Perplexity) -> JsonObject:
    """Return the 95 % intervals of one result, as in its report, and their units in words; NaN if there are fewer than
    two units. Bit-identical for the same numpy and scipy.
    """
    sums_KU, units = units_of(result, result.document_nats, result.block_nats, is_scored_D=result.document_tokens > 0)
    low, high = ratio_interval(sums_KU, 1)
    return {
        "level": LEVEL,
        "units": units,
        "perplexity": (exp(low), exp(high)),
        "nats_per_token": (low, high),
        "bits_per_byte": tuple(bound / math.log(2) for bound in ratio_interval(sums_KU, 2)),
    }


def units_of(
    result: Perplexity, documents_D: np.ndarray, blocks_B: np.ndarray | None, *, is_scored_D: np.ndarray
) -> tuple[np.ndarray, str]:
    """Choose the units of a result. Returns [3, U] float64, their sums of the given values, tokens and bytes; and a
    description such as "31 documents" or "43 blocks of neighbouring windows".

    A block has the mean bytes of its tokens, since the position of its windows in the text is unknown.

    Args:
        documents_D: a sum for each document.
        blocks_B: the same for each block of windows; None if there are none to use.
        is_scored_D: which documents count.
    """
    number = int(is_scored_D.sum())
    if number < FEWEST_DOCUMENTS and blocks_B is not None and len(blocks_B) >= FEWEST_BLOCKS:
        nats_B, tokens_B = merge_blocks(blocks_B, result.block_tokens.astype(np.float64))
        bytes_per_token = result.bytes / max(result.tokens, 1)
        sums_KU = np.stack([nats_B, tokens_B, tokens_B * bytes_per_token])
        return sums_KU, f"{len(tokens_B):,} blocks of neighbouring windows"
    sums_KU = np.stack([documents_D, result.document_tokens, result.document_bytes])[:, is_scored_D]
    units = ONE_DOCUMENT if number == 1 else f"{number:,} documents"
    return sums_KU.astype(np.float64), units


def ratio_interval(sums_KU: np.ndarray, below: int, base_KU: np.ndarray | None = None) -> Interval:
    """Return the interval of the first sum over all units, divided by that of row `below`.

    NaN if there are fewer than two units, or nothing to divide by.

    Args:
        base_KU: sums of another result over the same units, whose ratio is subtracted.
    """
    ratio = 0.0
    without_U = np.zeros(sums_KU.shape[1])
    freedom = math.inf
    for of_units, sign in ((sums_KU, 1), (base_KU, -1)):
        if of_units is None:
            continue
        above_U = of_units[0]
        below_U = of_units[below]
        number = len(above_U)
        total = below_U.sum()
        if number < 2 or not total or (below_U == total).any():
            return math.nan, math.nan
        ratio += sign * above_U.sum() / total
        without_U += sign * (above_U.sum() - above_U) / (total - below_U)
        effective_number = 1 / ((below_U / total) ** 2).sum()
        freedom = min(freedom, max(1.0, effective_number - 1))
    deviations_U = without_U - without_U.mean()
    error = math.sqrt((number - 1) / number * (deviations_U**2).sum())
    half = error * stdtrit(freedom, (1 + LEVEL) / 2)
    return float(ratio - half), float(ratio + half)


def in_words(interval: Iterable[float | None], write: Callable[[float], str] = in_digits) -> str:
    """Format an interval as "1,740 to 1,831 (95 %)", or "no interval" if there are too few units."""
    low, high = interval
    if low is None or math.isnan(low):
        return "no interval"
    return f"{write(low)} to {write(high)} ({100 * LEVEL:.0f} %)"


def sign_test(better: int, worse: int) -> float:
    """Return the exact two-sided p-value of these numbers of documents if better and worse are equally likely."""
    return float(min(1.0, 2 * bdtr(min(better, worse), better + worse, 0.5)))
