"""Streams sequences, or packed rows of them, from sources that are tokenised while training, without end.

Nothing is kept. Every rank reads the full stream and takes its part (accelerate's IterableDatasetShard), so that the
order is the same on any number of ranks. The Trainer of a resumed run reads from the beginning up to its place.

Mixing and shuffling are done here, not by `datasets`: `interleave_datasets` reads the first five rows of each source
once more to infer columns, so that the counts of what was read would be wrong, and it turns arrays into lists.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from dsft.data.formats import FormatRules
from dsft.data.packing import best_fit
from dsft.data.readers import raw_size
from dsft.data.sequences import Sequence, cut, describe_counts, sequence
from dsft.data.sources import FormattedSource, Source
from dsft.data.tokenization import tokenise
from dsft.errors import UserError

PACKED_AT_ONCE = 1000
"""Sequences among which those that share rows are looked for."""


class Stream(torch.utils.data.IterableDataset):
    """Sources drawn from by weight (by default as often as each other), each begun again at its end."""

    def __init__(
        self,
        sources: list[FormattedSource],
        tokenizer: PreTrainedTokenizerBase,
        *,
        seq_len: int,
        pack: bool,
        weights: list[float],
        seed: int,
        shuffle_buffer: int,
    ):
        self.sources, self.tokenizer, self.seq_len, self.pack = sources, tokenizer, seq_len, pack
        self.weights, self.seed, self.shuffle_buffer = weights, seed, shuffle_buffer
        self.counts: Counter = Counter()
        """As of prepared data, of what this process has read so far."""

    @property
    def identity(self) -> dict[str, Any]:
        """A digest of what the order depends on, for resuming."""
        order = json.dumps(
            [
                [formatted.source.name, [*map(raw_size, formatted.source.files)], asdict(formatted.rules)]
                for formatted in self.sources
            ]
            + [self.weights, self.pack, self.shuffle_buffer],
            sort_keys=True,
        )
        return {"stream": hashlib.sha256(order.encode()).hexdigest()[:16]}

    def __iter__(self) -> Iterator[Sequence | list[Sequence]]:
        sequences = _shuffled(self._mixed(), self.shuffle_buffer, np.random.default_rng(self.seed))
        return _packed(sequences, self.seq_len) if self.pack else sequences

    def may_mix(self, batch: int) -> bool:
        """Tell whether batches of `batch` items may hold sequences of several lengths."""
        return self.pack or (batch > 1 and not all(formatted.rules.is_text for formatted in self.sources))

    def _mixed(self) -> Iterator[Sequence]:
        parts = [self._sequences(formatted.source, formatted.rules) for formatted in self.sources]
        generator, share = np.random.default_rng(self.seed), np.array(self.weights or [1.0] * len(parts))
        while True:
            yield next(parts[generator.choice(len(parts), p=share / share.sum())])

    def _sequences(self, source: Source, rules: FormatRules) -> Iterator[Sequence]:
        rest = np.zeros(0, np.int32)
        while True:
            before = self.counts["tokens"]
            for batch in source.batches():
                tokens = tokenise(batch, rules, self.tokenizer)
                self.counts += tokens.counts
                self.counts += Counter(tokens=len(tokens.ids), trained_tokens=int(tokens.trained.sum()))
                if rules.is_text:
                    ids, trained = np.concatenate([rest, tokens.ids]), np.ones(len(rest) + len(tokens.ids), bool)
                    spans = self._spans_of_text(len(ids), tokens.ends + len(rest))
                    rest = ids[spans[-1][1] if spans else 0 :]
                else:
                    ids, trained, spans = tokens.ids, tokens.trained, pairwise([0, *tokens.ends])
                weights = tokens.weights
                yield from (
                    sequence(ids[start:end], trained[start:end], None if weights is None else weights[start:end])
                    for start, end in spans
                )
            if self.counts["tokens"] == before:
                counts = describe_counts(self.counts)
                raise UserError([f"{source.key}: {source.name} gives no token to train on ({counts})"])

    def _spans_of_text(self, num_tokens: int, document_ends: np.ndarray) -> list[tuple[int, int]]:
        """Cuts text: with packing into its documents, which may share a row; else it is laid end to end."""
        complete = document_ends if self.pack else np.zeros(0, np.int64)
        spans = list(zip(*(bounds.tolist() for bounds in cut(complete, self.seq_len)), strict=True))
        starts = range(spans[-1][1] if spans else 0, num_tokens - self.seq_len + 1, self.seq_len)
        return spans + [(start, start + self.seq_len) for start in starts]


def _shuffled(sequences: Iterator[Sequence], buffer_size: int, generator: np.random.Generator) -> Iterator[Sequence]:
    """Yields each time one of the next `buffer_size` sequences, drawn at random."""
    buffer = [next(sequences) for _ in range(buffer_size)]
    while True:
        index = int(generator.integers(buffer_size))
        yield buffer[index]
        buffer[index] = next(sequences)


def _packed(sequences: Iterator[Sequence], room: int) -> Iterator[list[Sequence]]:
    """Packs by best fit among the sequences at hand; those of the emptiest row wait for more."""
    waiting: list[Sequence] = []
    while True:
        waiting += [next(sequences) for _ in range(PACKED_AT_ONCE)]
        lengths = np.array([len(sequence["input_ids"]) for sequence in waiting])
        *full, emptiest = sorted(best_fit(lengths, room), key=lambda row: -lengths[row].sum())
        yield from ([waiting[index] for index in row] for row in full)
        waiting = [waiting[index] for index in emptiest]
