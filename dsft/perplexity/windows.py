"""What perplexity is computed over: a data set as one row of tokens, which ranks map from a store on disk, and the
windows in which a model sees it, 24 bytes each. `modes.py` defines which windows there are. A piece is what one window
scores of one document.
"""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from dsft.units import IGNORED

if TYPE_CHECKING:  # options are checked against the modes before torch and transformers load
    from dsft.data.batches import Sequence

WINDOWS_AT_ONCE = 1 << 12


@dataclass(kw_only=True)
class Windows:
    """The tokens of all documents one after the other, and slices of them.

    Window w feeds tokens[start : end - 1] and predicts tokens[scored_from : end], of which those with `scorable` count.
    """

    tokens: np.ndarray  # [F] uint16 or int32, mapped where they come from a store
    scorable: np.ndarray  # [F] bool; false for prefix tokens and what is masked in training
    document_ends: np.ndarray  # [D] int64: where each document ends in `tokens`
    spans: np.ndarray  # [W, 3] int64: start, end, scored_from
    document_bytes: np.ndarray  # [D] int64: UTF-8 bytes of each document's text, or of the part that may be scored
    document_words: np.ndarray  # [D] int64
    document_hashes: np.ndarray  # [D] uint64, of the texts, whatever the tokenizer; empty in training
    mode: str = "training"
    truncated_documents: int = 0  # answers cut to seq_len; their cut-off tokens are not scored
    first_token: int | None = None  # fed in place of the first token of every window
    known_hashes: dict[str, str] = field(default_factory=dict)
    """Of `hashes()`, what the store knows since it was made; a corpus is not read for them."""
    unscored_bytes: np.ndarray | int = 0  # [D] int64: of `document_bytes`, those of tokens that no window scores
    weights: np.ndarray | None = None
    """[W] float64: how a protocol weighs the tokens of each window; None for all alike."""

    @property
    def lengths(self) -> np.ndarray:
        """[W]: tokens that each window feeds to the model."""
        return self.spans[:, 1] - self.spans[:, 0] - 1

    @property
    def document_starts(self) -> np.ndarray:
        return np.concatenate([[0], self.document_ends])[:-1]

    def documents_of(self, places: np.ndarray) -> np.ndarray:
        """Return which documents hold these places in `tokens`."""
        return np.searchsorted(self.document_ends, places, side="right")

    def inputs_and_targets(self, window: int) -> tuple[np.ndarray, np.ndarray]:
        """Return ([T], [T]) of a window: fed tokens, and for each position the token to predict or -100."""
        start, end, scored_from = self.spans[window]
        tokens = np.asarray(self.tokens[start:end], dtype=np.int64)
        targets = np.where(self.scorable[start + 1 : end], tokens[1:], IGNORED)
        targets[: scored_from - start - 1] = IGNORED
        if self.first_token is not None:
            tokens[0] = self.first_token
        return tokens[:-1], targets

    def hashes(self) -> dict[str, str]:
        """Hash the texts, their tokens, and the windows over these: together all that a result depends on."""
        hashes = {}
        for name, arrays in {
            "texts": (self.document_hashes,),  # not what a tokenizer lets be scored of them
            "tokens": (self.tokens, self.scorable, self.document_ends),
            "windows": (self.spans, np.array([-1 if self.first_token is None else self.first_token])),
        }.items():
            digest = hashlib.sha256()
            for values in arrays if name not in self.known_hashes else ():
                digest.update(np.ascontiguousarray(values))
            hashes[name] = self.known_hashes.get(name) or digest.hexdigest()
        return hashes

    def leave_out_bytes(self, bytes_V: np.ndarray, blank: int) -> None:
        """Find `unscored_bytes`: of the tokens between what one window scores and what the next one does. Args:
        `bytes_V`: UTF-8 bytes of the text that each token stands for; `blank`: how many more a document's first token
        has there.
        """
        begins = np.concatenate([[0], self.spans[:, 1]])
        numbers = np.concatenate([self.spans[:, 2], [len(self.tokens)]]) - begins
        places = np.repeat(begins - (np.cumsum(numbers) - numbers), numbers) + np.arange(numbers.sum())
        documents = self.documents_of(places)
        is_first_P = places == self.document_starts[documents]
        bytes_P = np.maximum(bytes_V[self.tokens[places]] - blank * is_first_P, 0)
        unscored_D = np.bincount(documents, bytes_P, len(self.document_ends)).astype(np.int64)
        self.unscored_bytes = np.minimum(unscored_D, self.document_bytes)

    def scored_places(self, window: int) -> np.ndarray:
        """Return the places in `tokens` of the scored tokens of a window, in order."""
        _, end, scored_from = self.spans[window]
        return np.arange(scored_from, end)[self.scorable[scored_from:end]]

    def pieces(self) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Yield (windows, documents, scored tokens) of the pieces of windows, [P] each, in their order.

        A piece is the scored part of a window within one document; what has no token that counts is no piece. They come
        for WINDOWS_AT_ONCE windows at a time: finding pieces takes more memory than they do.
        """
        starts = self.document_starts
        for at in range(0, max(len(self.spans), 1), WINDOWS_AT_ONCE):
            _, stops_W, begins_W = self.spans[at : at + WINDOWS_AT_ONCE].T
            # Each window is cut where documents end: a piece for each document from its first token to its last.
            first_W, last_W = (self.documents_of(at_W) for at_W in (begins_W, stops_W - 1))
            per_window = np.where(begins_W < stops_W, last_W - first_W + 1, 0)
            windows_P = np.repeat(np.arange(len(begins_W)), per_window)
            before_W = np.cumsum(per_window) - per_window
            documents_P = np.arange(len(windows_P)) + np.repeat(first_W - before_W, per_window)
            begins_P = np.maximum(begins_W[windows_P], starts[documents_P])
            stops_P = np.minimum(stops_W[windows_P], self.document_ends[documents_P])
            counts_P = np.zeros(len(windows_P), dtype=np.int64)
            filled = begins_P < stops_P
            counts_P[filled] = count_true(self.scorable, begins_P[filled], stops_P[filled])
            counted = counts_P > 0
            yield windows_P[counted] + at, documents_P[counted], counts_P[counted]


def count_true(flags: np.ndarray, begins: np.ndarray, stops: np.ndarray) -> np.ndarray:
    """Count what is true in each flags[begin:stop], none of which is empty; about a million flags at a time."""
    counts, parts = [], np.flatnonzero(np.diff(begins >> 20)) + 1
    for part_begins, part_stops in zip(np.split(begins, parts), np.split(stops, parts), strict=True):
        if len(part_begins):
            low, high = part_begins.min(), part_stops.max()
            part = np.append(flags[low:high], False)  # so that a stop at the end has a place
            bounds = np.stack([part_begins, part_stops], axis=1).ravel() - low
            counts.append(np.add.reduceat(part, bounds, dtype=np.int64)[::2])
    return np.concatenate([np.zeros(0, np.int64), *counts])


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """Where the pieces of all windows belong, window after window."""

    windows: np.ndarray  # [P] int64
    documents: np.ndarray  # [P] int64
    tokens: np.ndarray  # [P] int64: scored tokens
    begins: np.ndarray  # [W + 1] int64: place of the first piece of each window

    def of(self, batch: list[int]) -> np.ndarray:
        """Return the places of the pieces of these windows."""
        return np.concatenate([np.arange(*self.begins[window : window + 2]) for window in batch])


def pieces_of(windows: Windows) -> Pieces:
    numbers, documents, tokens = map(np.concatenate, zip(*windows.pieces(), strict=True))
    begins = np.searchsorted(numbers, np.arange(len(windows.spans) + 1))
    return Pieces(windows=numbers, documents=documents, tokens=tokens, begins=begins)


def windows_of_sequences(sequences: "Iterable[Sequence]", document_ends: np.ndarray | None = None) -> Windows:
    """Make a window of each sequence, as training has them. Args: `document_ends`: where documents end in the sequences
    laid end to end; by default each sequence is one.
    """
    sequences = list(sequences)
    tokens = np.concatenate([np.zeros(0, np.int32), *(item["input_ids"].astype(np.int32) for item in sequences)])
    scorable = np.concatenate([np.zeros(0, bool), *(item["labels"] != IGNORED for item in sequences)])
    lengths = np.array([len(item["input_ids"]) for item in sequences], dtype=np.int64)
    starts = (ends := np.cumsum(lengths)) - lengths
    scorable[starts] = False  # no token is before it
    document_ends = ends if document_ends is None else document_ends
    zeros = np.zeros(len(document_ends), dtype=np.int64)
    return Windows(
        tokens=tokens,
        scorable=scorable,
        document_ends=document_ends,
        spans=np.stack([starts, ends, np.minimum(starts + 1, ends)], axis=1),
        document_bytes=zeros,
        document_words=zeros,
        document_hashes=np.zeros(0, dtype=np.uint64),
    )
