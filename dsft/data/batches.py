"""Orders an epoch, or a stream without end, the same on any number of ranks, and makes the tensors of a batch.

Epochs are full optimizer steps: where the last one has too few items, accelerate would repeat some from the epoch's
beginning, and which ones depends on the number of ranks. Here blank items, which train nothing, fill it instead.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict
from enum import Enum
from itertools import pairwise
from os.path import getsize
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from dsft.data.formats import FormatRules, FormattedSource
from dsft.data.packing import PackedRows, best_fit
from dsft.data.sequences import Items, Sequence, cut, describe_counts, sequence, sequences_in
from dsft.data.sources import Source
from dsft.data.tokenization import tokenise
from dsft.errors import UserError
from dsft.models.trials import NO_RULES, RowRules, positions
from dsft.units import IGNORED, padded_width

BLANK: Sequence = {"input_ids": np.zeros(1, np.int64), "labels": np.full(1, IGNORED)}
GROUPED_STEPS = 50
"""Sequences of like length are looked for among those of so many steps, as transformers' own LengthGroupedSampler does
(trainer_pt_utils.py).
"""


class LengthGrouping(Enum):
    """Which sequences of like length go together."""

    NONE = "none"
    IN_ORDER = "in order"
    """Not even drawn: every epoch takes the items as they stand in the data."""
    WITHIN_STEP = "within step"
    """Batches of a step are of like length; the step holds the same items as without."""
    ACROSS_STEPS = "across steps"
    """Steps are of like length, beginning with the longest: that pads least, but makes steps that differ."""


class PaddedToFullSteps(Items):
    """`items` (sequences, or groups of them) and after them blank ones up to a multiple of `per_step`."""

    def __init__(self, items: Items, per_step: int):
        self.items, self.per_step = items, per_step
        self.blank = [BLANK] if isinstance(items, PackedRows) else BLANK
        self.lengths = self._with_blanks(items.lengths)

    @property
    def bounds(self) -> tuple[np.ndarray, np.ndarray]:
        return tuple(map(self._with_blanks, self.items.bounds))

    def _with_blanks(self, lengths: np.ndarray) -> np.ndarray:
        return np.append(lengths, np.zeros(-len(self.items) % self.per_step, np.int64))

    def __getitem__(self, index: int) -> Any:
        return self.items[index] if index < len(self.items) else self.blank


class EpochSampler(torch.utils.data.Sampler):
    """Yields a permutation of the items for each epoch, then the blank ones.

    Args:
        step: the optimizer steps already done; asked at the beginning of each epoch, also of one that is resumed in its
            middle.
        drop_last: leave out what does not fill a step.
    """

    def __init__(
        self,
        data: PaddedToFullSteps,
        *,
        seed: int,
        step: Callable[[], int],
        drop_last: bool = False,
        grouping: LengthGrouping = LengthGrouping.NONE,
    ):
        self.data, self.seed, self.step, self.grouping = data, seed, step, grouping
        self.number = len(data.items) // data.per_step * data.per_step if drop_last else len(data)

    def __len__(self) -> int:
        return self.number

    def __iter__(self) -> Iterator[int]:
        yield from self.order(self.step() // max(1, self.number // self.data.per_step))

    def order(self, epoch: int) -> list[int]:
        """Lists the items of an epoch in their order."""
        generator = torch.Generator().manual_seed(self.seed + epoch)
        real = torch.randperm(len(self.data.items), generator=generator).numpy()
        lengths, per_step = self.data.items.lengths, self.data.per_step

        def longest_first(size: int) -> np.ndarray:
            """Orders each `size` items that follow each other."""
            groups = [real[start : start + size] for start in range(0, len(real), size)]
            return np.concatenate([group[np.argsort(-lengths[group], kind="stable")] for group in groups or [real]])

        if self.grouping is LengthGrouping.IN_ORDER:
            real = np.arange(len(real))
        elif self.grouping is LengthGrouping.WITHIN_STEP:
            real = longest_first(per_step)
        elif self.grouping is LengthGrouping.ACROSS_STEPS:
            by_length = longest_first(GROUPED_STEPS * per_step)
            num_full = len(by_length) // per_step
            rest = by_length[num_full * per_step :]
            steps = by_length[: num_full * per_step].reshape(num_full, per_step)
            steps = steps[torch.randperm(num_full, generator=generator).numpy()]
            if len(steps):  # what does not fit into memory should fail at once
                longest = int(lengths[steps].max(1).argmax())
                steps[[0, longest]] = steps[[longest, 0]]
            real = np.concatenate([steps.reshape(-1), rest])
        return [*real.tolist(), *range(len(real), len(self.data))][: self.number]


PACKED_AT_ONCE = 1000
"""Sequences among which those that share rows are looked for."""


class Stream(torch.utils.data.IterableDataset):
    """Sequences, or packed rows of them, of sources that are tokenised while training; nothing is kept.

    The sources are drawn from by weight (by default as often as each other), each begun again at its end. Every rank
    reads the full stream and takes its part (accelerate's IterableDatasetShard), so that the order is the same on any
    number of ranks. The Trainer of a resumed run reads from the beginning up to its place.
    """

    # Mixing and shuffling are done here: `datasets.interleave_datasets` reads the first five rows of each source once
    # more to infer columns, so that the counts of what was read would be wrong, and it turns arrays into lists.

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
                [formatted.source.name, [*map(getsize, formatted.source.files)], asdict(formatted.rules)]
                for formatted in self.sources
            ]
            + [self.weights, self.pack, self.shuffle_buffer],
            sort_keys=True,
        )
        return {"stream": hashlib.sha256(order.encode()).hexdigest()[:16]}

    def __iter__(self) -> Iterator[Sequence | list[Sequence]]:
        sequences = self._shuffled()
        if not self.pack:
            yield from sequences  # without end
        waiting: list[Sequence] = []
        while True:  # best fit among the sequences at hand; those of the emptiest row wait for more
            waiting += [next(sequences) for _ in range(PACKED_AT_ONCE)]
            lengths = np.array([len(each["input_ids"]) for each in waiting])
            *full, emptiest = sorted(best_fit(lengths, self.seq_len), key=lambda row: -lengths[row].sum())
            yield from ([waiting[index] for index in row] for row in full)
            waiting = [waiting[index] for index in emptiest]

    def may_mix(self, batch: int) -> bool:
        """Tell whether batches of `batch` items may hold sequences of several lengths."""
        return self.pack or (batch > 1 and not all(formatted.rules.is_text for formatted in self.sources))

    def _shuffled(self) -> Iterator[Sequence]:
        """Draws each time one of the next `shuffle_buffer` sequences, each of a source drawn by weight."""
        parts = [self._sequences(each.source, each.rules) for each in self.sources]
        share = np.array(self.weights or [1.0] * len(parts))
        of_sources, of_buffer = np.random.default_rng(self.seed), np.random.default_rng(self.seed)

        def draw() -> Sequence:
            return next(parts[of_sources.choice(len(parts), p=share / share.sum())])

        buffer = [draw() for _ in range(self.shuffle_buffer)]
        while True:
            index = int(of_buffer.integers(self.shuffle_buffer))
            yield buffer[index]
            buffer[index] = draw()

    def _sequences(self, source: Source, rules: FormatRules) -> Iterator[Sequence]:
        """Yields the sequences of a source, again from its beginning at its end."""
        rest = np.zeros(0, np.int32)
        while True:
            before = self.counts["tokens"]
            for batch in source.batches():
                tokens = tokenise(batch, rules, self.tokenizer)
                self.counts += tokens.counts
                self.counts += Counter(tokens=len(tokens.ids), trained_tokens=int(tokens.trained.sum()))
                if rules.is_text:
                    ids, trained = np.concatenate([rest, tokens.ids]), np.ones(len(rest) + len(tokens.ids), bool)
                    # With packing it is cut into its documents, which may share a row; else it is laid end to end.
                    complete = tokens.ends + len(rest) if self.pack else np.zeros(0, np.int64)
                    spans = list(zip(*(bounds.tolist() for bounds in cut(complete, self.seq_len)), strict=True))
                    starts = range(spans[-1][1] if spans else 0, len(ids) - self.seq_len + 1, self.seq_len)
                    spans += [(start, start + self.seq_len) for start in starts]
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
                raise UserError(f"{source.key}: {source.name} gives no token to train on ({counts})")


def num_mixed(order: list[int], items: Items, batch: int, rules: RowRules) -> int:
    """Counts the batches of `batch` items that follow in `order` and hold sequences that may not share one."""
    shortest, longest = (bounds[order].reshape(-1, batch) for bounds in items.bounds)
    shortest = np.where(shortest, shortest, longest.max(1, keepdims=True))  # blank ones train nothing
    return int((rules.sides(shortest.min(1)) != rules.sides(longest.max(1))).sum())


def padding_share(order: list[int], lengths: np.ndarray, batch: int) -> float:
    """Returns the share of computed positions without a token, in batches of `batch` items that follow in `order`."""
    lengths_of_batches = lengths[order].reshape(-1, batch)
    widths = padded_width(np.maximum(lengths_of_batches.max(1), 1))
    return float(1 - lengths_of_batches.sum() / (widths * batch).sum())


def count_tokens(sequences: list[Sequence], *, positions: int) -> torch.Tensor:
    """Counts the tokens of a batch, [3]: without padding and blank sequences, those trained, computed positions."""
    tokens = sum(len(sequence["input_ids"]) for sequence in sequences if sequence is not BLANK)
    trained = sum(np.count_nonzero(np.asarray(sequence["labels"]) != IGNORED) for sequence in sequences)
    return torch.tensor([tokens, trained, positions])


def weights_in(groups: list[list[Sequence]], shape: tuple[int, int]) -> dict[str, torch.Tensor]:
    """Returns weights [B, T] of rows that each hold a group of sequences end to end; nothing where none has any."""
    if not any("weights" in sequence for group in groups for sequence in group):
        return {}
    weights_BT = torch.ones(shape)
    for row, group in enumerate(groups):
        ends = np.cumsum([len(sequence["labels"]) for sequence in group])
        for row_part, end in zip(group, ends, strict=True):
            if "weights" in row_part:
                weights_BT[row, end - len(row_part["labels"]) : end] = torch.as_tensor(row_part["weights"])
    return {"weights": weights_BT}


class Collator:
    """Pads sequences on the right to the longest, rounded up to a multiple of 8.

    Items that are lists of sequences are taken apart.

    Returns input_ids, attention_mask and labels of shape [batch, time]; padding has attention 0 and label -100, so the
    choice of the pad token changes no loss. num_tokens [3] is for the Trainer, not for the model; so are weights
    [batch, time], which are there where any sequence has them.

    Args:
        rules: with the lengths that padding does not go beyond.
        masked: False leaves attention_mask out, for models in which no token sees the padding after it. A batch
            without padding has none either: transformers would read it back from the GPU to see that it is of ones.
    """

    def __init__(self, pad_token_id: int, rules: RowRules = NO_RULES, *, masked: bool = True):
        self.pad_token_id, self.rules, self.masked = pad_token_id, rules, masked

    def __call__(self, items: list[Sequence] | list[list[Sequence]]) -> dict[str, torch.Tensor]:
        sequences = sequences_in(items)
        lengths = [len(sequence["input_ids"]) for sequence in sequences]
        shape = (len(sequences), self.rules.width(max(lengths)))
        ids_BT = torch.full(shape, self.pad_token_id, dtype=torch.long)
        mask_BT = torch.zeros(shape, dtype=torch.long)
        labels_BT = torch.full(shape, IGNORED, dtype=torch.long)
        for row, (item, length) in enumerate(zip(sequences, lengths, strict=True)):
            ids_BT[row, :length] = torch.as_tensor(item["input_ids"])
            mask_BT[row, :length] = 1
            labels_BT[row, :length] = torch.as_tensor(item["labels"])
        mask = {"attention_mask": mask_BT} if self.masked and min(lengths) < shape[1] else {}
        return {
            "input_ids": ids_BT,
            **mask,
            "labels": labels_BT,
            **weights_in([[sequence] for sequence in sequences], shape),
            "num_tokens": count_tokens(sequences, positions=ids_BT.numel()),
        }


class PackedCollator:
    """Makes each group one row, its sequences end to end; the rest of a row is a sequence of its own.

    Returns input_ids, labels and position_ids (restarting with each sequence), of shape [batch, time], and no
    attention_mask: transformers makes its block mask from the positions only where none is given. Where each row is one
    sequence there are no position_ids either: a causal model needs no mask then. With flash attention
    the rows too are laid end to end, [1, batch * time], with the bounds of all sequences beside them. num_tokens and
    weights are as of `Collator`.
    """

    def __init__(self, pad_token_id: int, *, flash: bool):
        self.pad_token_id, self.flash = pad_token_id, flash

    def __call__(self, groups: list[list[Sequence]]) -> dict[str, Any]:
        longest = padded_width(max(sum(len(sequence["input_ids"]) for sequence in group) for group in groups))
        rows = [self._row(group, longest) for group in groups]
        num_tokens = count_tokens(sequences_in(groups), positions=len(groups) * longest)
        weights = weights_in(groups, (len(groups), longest))
        if self.flash:
            lengths = [length for _, _, row_lengths in rows for length in row_lengths]
            return {
                "input_ids": torch.cat([ids for ids, _, _ in rows])[None],
                "labels": torch.cat([labels for _, labels, _ in rows])[None],
                **{name: weights_BT.view(1, -1) for name, weights_BT in weights.items()},
                **positions(lengths, flash=True),
                "num_tokens": num_tokens,
            }
        batch = {
            "input_ids": torch.stack([ids for ids, _, _ in rows]),
            "labels": torch.stack([labels for _, labels, _ in rows]),
            **weights,
            "num_tokens": num_tokens,
        }
        if any(len(lengths) > 1 for _, _, lengths in rows):
            batch["position_ids"] = torch.cat([positions(lengths)["position_ids"] for _, _, lengths in rows])
        return batch

    def _row(self, group: list[Sequence], longest: int) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
        lengths = [len(sequence["input_ids"]) for sequence in group]
        rest = longest - sum(lengths)
        ids = np.concatenate([*(sequence["input_ids"] for sequence in group), np.full(rest, self.pad_token_id)])
        labels = np.concatenate([*(sequence["labels"] for sequence in group), np.full(rest, IGNORED)])
        return torch.from_numpy(ids), torch.from_numpy(labels), [*lengths, rest] if rest else lengths
