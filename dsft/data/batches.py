"""The order of an epoch, the same on any number of ranks, and the tensors of a batch.

Epochs are whole optimizer steps: where the last one has too few items, accelerate would repeat some from the epoch's
beginning, and which ones depends on
the number of ranks. Here blank items, which train nothing, fill it instead.
"""

from collections.abc import Callable, Iterator
from typing import Any, Literal

import numpy as np
import torch

from dsft.data.packing import PackedRows, positions
from dsft.data.sequences import IGNORED, Items, Sequence
from dsft.units import padded_width

BLANK: Sequence = {"input_ids": np.zeros(1, np.int64), "labels": np.full(1, IGNORED)}
GROUPED_STEPS = 50
"""Sequences of like length are looked for among those of so many steps, as transformers' own LengthGroupedSampler does
(trainer_pt_utils.py).
"""


class PaddedToFullSteps(Items):
    """`items` (sequences, or groups of them) and after them blank ones up to a multiple of `per_step`."""

    def __init__(self, items: Items, per_step: int):
        self.items, self.per_step = items, per_step
        self.blank = [BLANK] if isinstance(items, PackedRows) else BLANK
        self.lengths = np.append(items.lengths, np.zeros(-len(items) % per_step, np.int64))

    def __getitem__(self, index: int) -> Any:
        return self.items[index] if index < len(self.items) else self.blank


class EpochSampler(torch.utils.data.Sampler):
    """A permutation of the items for each epoch, then the blank ones.

    Args:
        step: the optimizer steps already done; asked at the beginning of each epoch, also of one that is gone on with
            in its middle.
        drop_last: leave out what does not fill a step.
        grouped: not; within a step, whose batches then are of like length while it holds the same items as without; or
            among many steps, each of
            like length, beginning with the longest, which pads least but makes steps that differ.
    """

    def __init__(
        self,
        data: PaddedToFullSteps,
        *,
        seed: int,
        step: Callable[[], int],
        drop_last: bool = False,
        grouped: Literal["no", "within steps", "among steps"] = "no",
    ):
        self.data, self.seed, self.step, self.grouped = data, seed, step, grouped
        self.number = len(data.items) // data.per_step * data.per_step if drop_last else len(data)

    def __len__(self) -> int:
        return self.number

    def __iter__(self) -> Iterator[int]:
        yield from self.order(self.step() // max(1, self.number // self.data.per_step))

    def order(self, epoch: int) -> list[int]:
        generator = torch.Generator().manual_seed(self.seed + epoch)
        real = torch.randperm(len(self.data.items), generator=generator).numpy()
        if self.grouped == "among steps":
            real = self._by_length(real, generator)
        elif self.grouped == "within steps":
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
        whole = len(by_length) // per_step * per_step
        steps = by_length[:whole].reshape(-1, per_step)[torch.randperm(whole // per_step, generator=generator).numpy()]
        if len(steps):  # what does not fit into memory should fail at once
            longest = int(lengths[steps].max(1).argmax())
            steps[[0, longest]] = steps[[longest, 0]]
        return np.concatenate([steps.reshape(-1), by_length[whole:]])


def padding_share(order: list[int], lengths: np.ndarray, batch: int) -> float:
    """Of the positions that the model computes, those that hold no token, where `batch` items follow each other in
    `order`.
    """
    held = lengths[order].reshape(-1, batch)
    return float(1 - held.sum() / (padded_width(np.maximum(held.max(1), 1)) * batch).sum())


class Collator:
    """Pads sequences on the right to the longest, rounded up to a multiple of 8. PackedRows are taken apart into their
    sequences.

    Returns input_ids, attention_mask and labels of shape [batch, time]; padding has attention 0 and label -100, so the
    choice of the pad token changes no loss.
    """

    def __init__(self, pad_token_id: int):
        self.pad_token_id = pad_token_id

    def __call__(self, items: list[Sequence] | list[list[Sequence]]) -> dict[str, torch.Tensor]:
        sequences = [one for item in items for one in (item if isinstance(item, list) else [item])]
        shape = (len(sequences), padded_width(max(len(one["input_ids"]) for one in sequences)))
        ids_BT = torch.full(shape, self.pad_token_id, dtype=torch.long)
        mask_BT = torch.zeros(shape, dtype=torch.long)
        labels_BT = torch.full(shape, IGNORED, dtype=torch.long)
        for row, one in enumerate(sequences):
            length = len(one["input_ids"])
            ids_BT[row, :length] = torch.as_tensor(one["input_ids"])
            mask_BT[row, :length] = 1
            labels_BT[row, :length] = torch.as_tensor(one["labels"])
        return {"input_ids": ids_BT, "attention_mask": mask_BT, "labels": labels_BT}


class PackedCollator:
    """Each group becomes one row, its sequences end to end with positions that begin anew; the rest of a row is a
    sequence of its own.

    Returns input_ids, labels and position_ids, of shape [batch, time], and no attention_mask: transformers makes its
    block mask from the positions only where
    none is given. With flash attention the rows too are laid end to end, [1, batch * time], with the bounds of all
    sequences beside them.
    """

    def __init__(self, pad_token_id: int, *, flash: bool):
        self.pad_token_id, self.flash = pad_token_id, flash

    def __call__(self, groups: list[list[Sequence]]) -> dict[str, Any]:
        longest = padded_width(max(sum(len(one["input_ids"]) for one in group) for group in groups))
        rows = [self._row(group, longest) for group in groups]
        if self.flash:
            lengths = [length for _, _, row_lengths in rows for length in row_lengths]
            return {
                "input_ids": torch.cat([ids for ids, _, _ in rows])[None],
                "labels": torch.cat([labels for _, labels, _ in rows])[None],
                **positions(lengths, flash=True),
            }
        return {
            "input_ids": torch.stack([ids for ids, _, _ in rows]),
            "labels": torch.stack([labels for _, labels, _ in rows]),
            "position_ids": torch.cat([positions(lengths)["position_ids"] for _, _, lengths in rows]),
        }

    def _row(self, group: list[Sequence], longest: int) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
        lengths = [len(one["input_ids"]) for one in group]
        rest = longest - sum(lengths)
        ids = np.concatenate([*(one["input_ids"] for one in group), np.full(rest, self.pad_token_id)])
        labels = np.concatenate([*(one["labels"] for one in group), np.full(rest, IGNORED)])
        return torch.from_numpy(ids), torch.from_numpy(labels), lengths + [rest] * (rest > 0)
