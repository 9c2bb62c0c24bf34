"""Orders an epoch, the same on any number of ranks, and makes the tensors of a batch.

Epochs are full optimizer steps: where the last one has too few items, accelerate would repeat some from the epoch's
beginning, and which ones depends on the number of ranks. Here blank items, which train nothing, fill it instead.
"""

from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any

import numpy as np
import torch

from dsft.data.packing import PackedRows
from dsft.data.sequences import Items, Sequence, sequences_in
from dsft.models.packing_probe import positions
from dsft.models.row_rules import NO_RULES, RowRules
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
        if self.grouping is LengthGrouping.IN_ORDER:
            real = np.arange(len(real))
        elif self.grouping is LengthGrouping.ACROSS_STEPS:
            real = self._by_length(real, generator)
        elif self.grouping is LengthGrouping.WITHIN_STEP:
            lengths, per_step = self.data.items.lengths, self.data.per_step
            steps = [real[start : start + per_step] for start in range(0, len(real), per_step)]
            real = np.concatenate([step[np.argsort(-lengths[step], kind="stable")] for step in steps])
        return [*real.tolist(), *range(len(real), len(self.data))][: self.number]

    def _by_length(self, order: np.ndarray, generator: torch.Generator) -> np.ndarray:
        lengths, per_step = self.data.items.lengths, self.data.per_step
        chunks = [
            order[start : start + GROUPED_STEPS * per_step] for start in range(0, len(order), GROUPED_STEPS * per_step)
        ]
        chunks = [chunk[np.argsort(-lengths[chunk], kind="stable")] for chunk in chunks]
        by_length = np.concatenate(chunks) if chunks else order
        num_full = len(by_length) // per_step
        rest = by_length[num_full * per_step :]
        steps = by_length[: num_full * per_step].reshape(num_full, per_step)
        steps = steps[torch.randperm(num_full, generator=generator).numpy()]
        if len(steps):  # what does not fit into memory should fail at once
            longest = int(lengths[steps].max(1).argmax())
            steps[[0, longest]] = steps[[longest, 0]]
        return np.concatenate([steps.reshape(-1), rest])


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
        for sequence, end in zip(group, ends, strict=True):
            if "weights" in sequence:
                weights_BT[row, end - len(sequence["labels"]) : end] = torch.as_tensor(sequence["weights"])
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
        for row, (sequence, length) in enumerate(zip(sequences, lengths, strict=True)):
            ids_BT[row, :length] = torch.as_tensor(sequence["input_ids"])
            mask_BT[row, :length] = 1
            labels_BT[row, :length] = torch.as_tensor(sequence["labels"])
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
