"""Defines what an epoch is made of: slices of prepared tokens, of one or several sources mixed by weight."""

import hashlib
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from dsft.data.store import Store
from dsft.units import IGNORED

Sequence = dict[str, np.ndarray]
"""input_ids and labels, both [T] int64; weights, [T] float32, where a label's loss is multiplied by other than 1."""


def sequence(ids: np.ndarray, trained: np.ndarray, weights: np.ndarray | None = None) -> Sequence:
    """Makes a sequence; its first token is never trained: nothing stands before it."""
    ids = np.asarray(ids, np.int64)
    labels = np.where(trained, ids, IGNORED)
    labels[:1] = IGNORED
    return {"input_ids": ids, "labels": labels} | ({} if weights is None else {"weights": np.array(weights)})


def sequences_in(items: Iterable[Sequence | list[Sequence]]) -> list[Sequence]:
    """Lists the sequences of items, which are sequences or lists of them."""
    return [sequence for item in items for sequence in (item if isinstance(item, list) else [item])]


class Items(torch.utils.data.Dataset):
    """What an epoch is made of: sequences, or lists of sequences that share a row or a batch."""

    lengths: np.ndarray
    """Tokens of each."""

    @property
    def bounds(self) -> tuple[np.ndarray, np.ndarray]:
        """Tokens of the shortest and of the longest sequence of each."""
        return self.lengths, self.lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitems__(self, indices: Iterable[int]) -> list[Any]:
        """Several at once, as torch's loader asks for them."""
        return [self[index] for index in indices]

    @property
    def identity(self) -> dict[str, Any]:
        """Number of items, and a digest of their lengths and of tokens, labels and weights of some evenly spread over
        them.
        """
        content = hashlib.sha256(np.asarray(self.lengths, np.int64).tobytes())
        for sequence in sequences_in(self[index] for index in range(0, len(self), max(1, len(self) // 1000))):
            content.update(sequence["input_ids"].tobytes())
            content.update(sequence["labels"].tobytes())
            content.update(sequence["weights"].tobytes() if "weights" in sequence else b"")
        return {"sequences of data": len(self), "content of data": content.hexdigest()[:16]}


class Sequences(Items):
    """N sequences, read when asked for."""

    def __init__(self, stores: list[Store], places: np.ndarray, starts: np.ndarray, ends: np.ndarray):
        """
        Args:
            places: [N], which of `stores` each is in; from `starts` [N] to `ends` [N] there.
        """
        self.stores, self.places, self.starts, self.ends = stores, places, starts, ends

    @property
    def lengths(self) -> np.ndarray:
        """[N] tokens."""
        return self.ends - self.starts

    def __len__(self) -> int:
        return len(self.places)  # without `lengths`, which takes a pass over all: it is asked for with each item

    def __getitem__(self, index: int) -> Sequence:
        store, span = self.stores[self.places[index]], slice(self.starts[index], self.ends[index])
        return sequence(store.tokens[span], store.trained[span], None if store.weights is None else store.weights[span])

    def select(self, indices: np.ndarray) -> "Sequences":
        return Sequences(self.stores, self.places[indices], self.starts[indices], self.ends[indices])


def sequences_of(stores: list[Store], *, seq_len: int, keep_documents: bool) -> Sequences:
    """Makes all sequences of `stores`, in order.

    Args:
        seq_len: text is laid end to end and cut into windows of so many tokens.
        keep_documents: a text is a sequence of its own, cut only where it is longer (for packing).
    """
    parts = []
    for place, store in enumerate(stores):
        if store.is_text:
            ends = store.ends if keep_documents else np.array([len(store.tokens)])
            starts, ends = cut(ends, seq_len)
        else:
            starts, ends = np.concatenate([np.zeros(1, np.int64), store.ends])[: len(store.ends)], store.ends
        parts.append((np.full(len(starts), place, np.int16), starts, ends))
    return Sequences(stores, *(np.concatenate(columns) for columns in zip(*parts, strict=True)))


def cut(ends: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Cuts documents that end at `ends` into pieces of at most `length` tokens, as (starts, ends)."""
    begins = np.concatenate([np.zeros(1, np.int64), ends])[: len(ends)]
    pieces = -(-(ends - begins) // length)
    within = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    starts = np.repeat(begins, pieces) + within * length
    return starts, np.minimum(starts + length, np.repeat(ends, pieces))


def mix(sequences: Sequences, weights: list[float], *, seed: int) -> tuple[Sequences, list[float]]:
    """Draws as many sequences as there are, of each source its share by weight.

    Each source is drawn without repetition until it is used up, then from its beginning again.

    Returns:
        (sequences, epochs per source).
    """
    total, share = len(sequences), np.array(weights) / sum(weights)
    generator = np.random.default_rng(seed)
    drawn, epochs = [], []
    for place, part in enumerate(share):
        indices = np.flatnonzero(sequences.places == place)
        wanted = round(total * part)
        rounds = [generator.permutation(indices) for _ in range(-(-wanted // len(indices)))]
        drawn.append(np.sort(np.concatenate([indices[:0], *rounds])[:wanted], kind="stable"))
        epochs.append(wanted / len(indices))
    return sequences.select(np.concatenate(drawn)), epochs


def describe_counts(counts: dict[str, Any]) -> str:
    """Writes counts as a sentence's end, without those that are 0."""
    words = []
    for name, value in counts.items():
        text = name.replace("_", " ")
        if isinstance(value, list | float):
            words.append(f"{text} {describe_value(value)}")
        elif value:
            share = f" ({value / counts['rows']:.1%})" if name == "dropped_long" and counts.get("rows") else ""
            words.append(f"{describe_value(value)} {text}{share}")
    return ", ".join(words)


def describe_value(value: int | float | list[float]) -> str:
    """Writes a count, a share or the epochs per source."""
    if isinstance(value, list):
        return ", ".join(f"{number:.3g}" for number in value)
    return f"{value:.1%}" if isinstance(value, float) else f"{value:,}"


def count(sequences: Sequences, stores: list[Store], *, epochs: list[float] | None = None) -> dict[str, Any]:
    """Counts all sources together for run.json, and the epochs per source where they are mixed."""
    names = stores[0].counts.keys()
    counts: dict[str, Any] = {name: sum(store.counts[name] for store in stores) for name in names}
    counts["sequences"] = len(sequences)
    if epochs is None:  # the first token of each window of text is context only
        counts["trained_tokens"] -= sum(
            int((sequences.places == place).sum()) for place, store in enumerate(stores) if store.is_text
        )
    else:
        counts["passes"] = [round(number, 4) for number in epochs]
    return counts
