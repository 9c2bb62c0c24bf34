"""Adds up what the windows scored: to documents, to blocks of windows, and to the total.

A piece is what one window scores of one document. Sums are exactly rounded, so they depend on no order.
"""

import math
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import TYPE_CHECKING

import numpy as np

from dsft.errors import TrainingStopped

if TYPE_CHECKING:  # results are read without torch
    from dsft.perplexity.windows import Windows

FEWEST_DOCUMENTS = 2
"""With fewer scored documents, blocks of windows are kept too: intervals are computed over them."""
MOST_BLOCKS = 1_000


@dataclass(frozen=True, kw_only=True)
class Perplexity:
    """Holds the result of one evaluation, over all ranks."""

    nats: float
    """Sum of negative log-likelihoods of the scored tokens."""
    tokens: int
    """Number of scored tokens."""
    document_nats: np.ndarray
    """[D] float64."""
    document_tokens: np.ndarray
    """[D] int64: scored tokens of each document."""
    document_bytes: np.ndarray
    """[D] int64: UTF-8 bytes of each document's scored tokens; 0 where there is no text (token sequences)."""
    document_words: np.ndarray
    """[D] int64."""
    document_pairs: np.ndarray
    """[K - 1, D] float64: with a reference, the sums of COLUMNS of `results.py` after the first; else [0, D]."""
    block_nats: np.ndarray
    """[B] float64: of neighbouring windows, in the order of the text; empty where enough documents are scored."""
    block_tokens: np.ndarray
    """[B] int64."""
    windows_per_block: int
    """0 where there are no blocks."""
    fed_tokens: int
    """Tokens fed to the model now, over all ranks; less than all windows hold where a part was known already."""
    reported_loss: float
    """Mean of nats as the protocol weighs them; without a protocol the same as `loss`."""
    rows_alone: bool = False
    """Whether each window was a batch of its own, since rows change each other's logits in this architecture."""

    def __repr__(self) -> str:
        """Without the arrays of documents and blocks."""
        numbers = {name: getattr(self, name) for name in ("perplexity", "nats", "tokens", "documents")}
        return f"Perplexity({', '.join(f'{name}={value!r}' for name, value in numbers.items())})"

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
        """Count documents without a token to score: of one token, for example."""
        return int((self.document_tokens == 0).sum())

    @property
    def loss(self) -> float:
        """Return the mean of nats per token."""
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float:
        """Return what is reported: exp of `reported_loss`."""
        return exp(self.reported_loss)

    @property
    def word_perplexity(self) -> float:
        return exp(self.nats / self.words) if self.words else math.nan

    @property
    def byte_perplexity(self) -> float:
        return exp(self.nats / self.bytes) if self.bytes else math.nan

    @property
    def bits_per_byte(self) -> float:
        return self.nats / self.bytes / math.log(2) if self.bytes else math.nan


def exp(value: float) -> float:
    """Return math.exp, infinite where float64 ends (exp(709.8)); NaN stays NaN."""
    return math.inf if value > 709 else math.exp(value)


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """Holds where the pieces of all batches belong, batch after batch."""

    documents: np.ndarray
    """[P] int64."""
    windows: np.ndarray
    """[P] int64."""
    tokens: np.ndarray
    """[P] int64: scored tokens."""
    of_batches: list[slice]
    """Which pieces those of each batch are."""


def pieces_of(windows: "Windows", batches: list[list[int]]) -> Pieces:
    """Find the pieces of batches, which are lists of windows."""
    numbers, documents, tokens = map(np.concatenate, zip(*windows.pieces(), strict=True))
    per_window = np.bincount(numbers, minlength=len(windows.spans))
    first_of_window = np.cumsum(per_window) - per_window
    order = np.fromiter(chain.from_iterable(batches), dtype=np.int64)
    counts = per_window[order]
    ends = np.concatenate([[0], np.cumsum(counts)])
    places = np.arange(ends[-1]) + np.repeat(first_of_window[order] - ends[:-1], counts)
    bounds = ends[np.cumsum([0, *map(len, batches)])].tolist()
    return Pieces(
        documents=documents[places],
        windows=numbers[places],
        tokens=tokens[places],
        of_batches=[slice(start, end) for start, end in pairwise(bounds)],
    )


def add_up(windows: "Windows", pieces: Pieces, sums_KP: np.ndarray, *, fed_tokens: int, rows_alone: bool) -> Perplexity:
    """Add pieces up to documents, blocks and the total.

    Args:
        sums_KP: nats of each piece, then with a reference the other columns.

    Raises:
        TrainingStopped: where some are NaN or infinite.
    """
    documents, nats = len(windows.document_ends), sums_KP[0]
    bad = pieces.documents[~np.isfinite(sums_KP).all(axis=0)]
    if len(bad):
        raise TrainingStopped(
            f"the loss of document {bad.min() + 1} of {documents} is NaN or infinite: the model's weights are broken,"
            " or its numbers overflow in this dtype"
        )
    tokens = np.zeros(documents, dtype=np.int64)
    np.add.at(tokens, pieces.documents, pieces.tokens)
    per_block = num_blocks = 0
    if (tokens > 0).sum() < FEWEST_DOCUMENTS:
        per_block = block_length(len(windows.spans))
        num_blocks = -(-len(windows.spans) // per_block)
    blocks = pieces.windows // max(per_block, 1)
    block_tokens = np.bincount(blocks, weights=pieces.tokens, minlength=num_blocks)[:num_blocks].astype(np.int64)
    weights = np.ones(len(nats)) if windows.weights is None else windows.weights[pieces.windows]
    return Perplexity(
        nats=math.fsum(nats),
        tokens=int(tokens.sum()),
        document_nats=sums_by(pieces.documents, nats, documents),
        document_tokens=tokens,
        document_bytes=windows.document_bytes - windows.unscored_bytes,
        document_words=windows.document_words,
        document_pairs=np.array(
            [sums_by(pieces.documents, row_P, documents) for row_P in sums_KP[1:]], dtype=np.float64
        ).reshape(-1, documents),
        block_nats=sums_by(blocks, nats, num_blocks),
        block_tokens=block_tokens,
        windows_per_block=per_block,
        fed_tokens=fed_tokens,
        reported_loss=math.fsum(nats * weights) / math.fsum(pieces.tokens * weights),
        rows_alone=rows_alone,
    )


def block_length(windows: int) -> int:
    """Return how many neighbouring windows, which depend on each other, make a block.

    It is the cube root of their number, the usual order for means of dependent data (Lahiri, Resampling Methods for
    Dependent Data, 2003, chapter 5), but there are at least 30 blocks where there are as many windows, and at most
    1,000.
    """
    return max(1, min(round(windows ** (1 / 3)), windows // 30), -(-windows // MOST_BLOCKS))


def sums_by(groups: np.ndarray, values: np.ndarray, number: int) -> np.ndarray:
    """Return [number] exactly rounded sums of the values of each group; none where `number` is 0."""
    if not number:
        return np.zeros(0)
    sorted_values = values[np.argsort(groups, kind="stable")]
    bounds = np.cumsum([0, *np.bincount(groups, minlength=number)]).tolist()
    return np.array([math.fsum(sorted_values[start:end]) for start, end in pairwise(bounds)])
