"""Sequences, or packed rows of them, from sources that are read and tokenised while training, without end and with
nothing kept.

Every rank reads the whole stream and takes its own part (accelerate's IterableDatasetShard), so that the order is the
same on any number of ranks; a resumed
run reads on from the beginning up to its place, which the Trainer does.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from dsft.data.packing import best_fit
from dsft.data.readers import raw_size
from dsft.data.sequences import Sequence, cut, sequence, shown
from dsft.data.sources import Source
from dsft.data.tokenization import FormatRules, tokenise
from dsft.errors import UserError

PACKED_AT_ONCE = 1000
"""Sequences among which those that share rows are looked for."""


class Stream(torch.utils.data.IterableDataset):
    """Sources drawn from by weight (by default as often as each other), each begun again at its end."""

    def __init__(
        self,
        sources: list[tuple[Source, FormatRules]],
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
            [[source.name, [raw_size(file) for file in source.files], asdict(rules)] for source, rules in self.sources]
            + [self.weights, self.pack, self.shuffle_buffer],
            sort_keys=True,
        )
        return {"stream": hashlib.sha256(order.encode()).hexdigest()[:16]}

    def __iter__(self) -> Iterator[Sequence | list[Sequence]]:
        sequences = _shuffled(self._mixed(), self.shuffle_buffer, np.random.default_rng(self.seed))
        return _packed(sequences, self.seq_len) if self.pack else sequences

    def _mixed(self) -> Iterator[Sequence]:
        parts = [self._sequences(source, rules) for source, rules in self.sources]
        generator, share = np.random.default_rng(self.seed), np.array(self.weights or [1.0] * len(parts))
        while True:
            yield next(parts[generator.choice(len(parts), p=share / share.sum())])

    def _sequences(self, source: Source, rules: FormatRules) -> Iterator[Sequence]:
        left = np.zeros(0, np.int32)
        while True:
            before = self.counts["tokens"]
            for batch in source.batches():
                made = tokenise(batch, rules, self.tokenizer)
                self.counts += made.counts + Counter(tokens=len(made.ids), trained_tokens=int(made.trained.sum()))
                if not rules.is_text:
                    starts = [0, *made.ends][: len(made.ends)]
                    yield from (
                        sequence(made.ids[start:end], made.trained[start:end])
                        for start, end in zip(starts, made.ends, strict=True)
                    )
                    continue
                tokens = np.concatenate([left, made.ids])
                whole = (
                    made.ends + len(left) if self.pack else np.zeros(0, np.int64)
                )  # documents that may share a row; else all is laid end to end
                rest = int(whole[-1]) if len(whole) else 0
                starts, ends = cut(whole, self.seq_len)
                more = np.arange(rest, len(tokens) - self.seq_len + 1, self.seq_len)
                starts, ends = np.concatenate([starts, more]), np.concatenate([ends, more + self.seq_len])
                yield from (
                    sequence(tokens[start:end], np.ones(end - start, bool))
                    for start, end in zip(starts, ends, strict=True)
                )
                left = tokens[ends[-1] if len(ends) else 0 :]
            if self.counts["tokens"] == before:
                raise UserError([f"{source.key}: {source.name} gives no token to train on ({shown(self.counts)})"])


def _shuffled(sequences: Iterator[Sequence], room: int, generator: np.random.Generator) -> Iterator[Sequence]:
    """Each time one of the next `room` sequences, drawn at random."""
    held = [next(sequences) for _ in range(room)]
    while True:
        index = int(generator.integers(room))
        yield held[index]
        held[index] = next(sequences)


def _packed(sequences: Iterator[Sequence], room: int) -> Iterator[list[Sequence]]:
    """Best fit among the sequences at hand; those of the emptiest row wait for more."""
    held: list[Sequence] = []
    while True:
        held += [next(sequences) for _ in range(PACKED_AT_ONCE)]
        rows = best_fit(np.array([len(one["input_ids"]) for one in held]), room)
        *full, rest = sorted(rows, key=lambda row: -sum(len(held[index]["input_ids"]) for index in row))
        yield from ([held[index] for index in row] for row in full)
        held = [held[index] for index in rest]
