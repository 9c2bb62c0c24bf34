"""What perplexity is computed over: a data set as one row of tokens, which ranks map from a store on disk, and the
windows in which a model sees it, 24 bytes each. `modes.py` defines which windows there are. A piece is what one window
scores of one document.
"""

import functools
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from dsft.units import IGNORED

if TYPE_CHECKING:  # options are checked against the modes before torch and transformers load
    from dsft.data.epoch import Sequence, Sequences


@dataclass(kw_only=True)
class Windows:
    """The tokens of all documents one after the other, and slices of them.

    Window w feeds tokens[start : end - 1] and predicts tokens[scored_from : end], of which those with `scorable` count.
    """

    tokens: np.ndarray  # [F] uint16 or int32, mapped if they come from a store
    scorable: np.ndarray  # [F] bool; false for prefix tokens and what is masked in training
    document_ends: np.ndarray  # [D] int64: where each document ends in `tokens`
    spans: np.ndarray  # [W, 3] int64: start, end, scored_from
    document_bytes: np.ndarray  # [D] int64: UTF-8 bytes of each document's text, or of the part that may be scored
    document_words: np.ndarray  # [D] int64
    document_hashes: np.ndarray  # [D] uint64, of the texts, whatever the tokenizer; empty in training
    mode: str = "training"
    truncated_documents: int = 0  # answers cut to seq_len; their cut-off tokens are not scored
    first_token: int | None = None  # fed in place of the first token of every window
    tokens_hash: str = ""
    """Of all tokens, as the store has it."""
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
        first_token = -1 if self.first_token is None else self.first_token
        texts = hashlib.sha256(
            np.ascontiguousarray(self.document_hashes)
        )  # not what a tokenizer lets be scored of them
        windows = hashlib.sha256(np.ascontiguousarray(self.spans))
        windows.update(np.array([first_token]))
        return {"texts": texts.hexdigest(), "tokens": self.tokens_hash, "windows": windows.hexdigest()}

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
    """Find the pieces of all windows, in their order: the scored part of a window within one document. What has no
    token that counts is not a piece.
    """
    _, stops_W, begins_W = windows.spans.T
    # Each window is cut where documents end: a piece for each document from its first token to its last.
    first_W = windows.documents_of(begins_W)
    last_W = windows.documents_of(stops_W - 1)
    per_window = np.where(begins_W < stops_W, last_W - first_W + 1, 0)
    windows_P = np.repeat(np.arange(len(begins_W)), per_window)
    before_W = np.cumsum(per_window) - per_window
    documents_P = np.arange(len(windows_P)) + np.repeat(first_W - before_W, per_window)
    begins_P = np.maximum(begins_W[windows_P], windows.document_starts[documents_P])
    stops_P = np.minimum(stops_W[windows_P], windows.document_ends[documents_P])
    left_out = np.flatnonzero(~np.asarray(windows.scorable))
    left_out_P = np.searchsorted(left_out, stops_P) - np.searchsorted(left_out, begins_P)
    tokens_P = stops_P - begins_P - left_out_P
    counted = tokens_P > 0
    return Pieces(
        windows=windows_P[counted],
        documents=documents_P[counted],
        tokens=tokens_P[counted],
        begins=np.searchsorted(windows_P[counted], np.arange(len(windows.spans) + 1)),
    )


@functools.lru_cache(maxsize=1)
def windows_of_held_out(held_out: "Sequences") -> Windows:
    """Make the windows of a training's held-out data, once for all of its evaluations. Intervals are over documents,
    which a window of training may contain several of, or a part of one.
    """
    return windows_of_sequences(held_out, held_out.document_ends)


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
