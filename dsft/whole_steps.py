"""Epochs of whole optimizer steps, in an order that does not depend on how many ranks share them.

Where the last step of an epoch has too few sequences, accelerate repeats some from the epoch's beginning, and which ones depends on the number of
ranks. Here blank sequences, which train nothing, fill it instead.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from datasets import Dataset

from dsft.samples import IGNORED

BLANK = {"input_ids": [0], "labels": [IGNORED]}


class WholeSteps(torch.utils.data.Dataset):
    """`sequences` (columns input_ids, labels) and after them blank ones up to a multiple of `per_step`."""

    def __init__(self, sequences: Dataset, per_step: int):
        self.sequences, self.per_step = sequences, per_step

    def __len__(self) -> int:
        return -(-len(self.sequences) // self.per_step) * self.per_step

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        """Several at once, as torch's loader asks for them."""
        rows = iter(self.sequences.__getitems__([index for index in indices if index < len(self.sequences)]))
        return [next(rows) if index < len(self.sequences) else BLANK for index in indices]


class EpochOrder(torch.utils.data.Sampler):
    """A permutation of the sequences for each epoch, then the blank ones.

    Args:
        step: the optimizer steps already done; asked at the beginning of each epoch, also of one that is gone on with in its middle.
        drop_last: leave out what does not fill a step.
    """

    def __init__(self, data: WholeSteps, *, seed: int, step: Callable[[], int], drop_last: bool = False):
        self.data, self.seed, self.step = data, seed, step
        self.number = len(data.sequences) // data.per_step * data.per_step if drop_last else len(data)

    def __len__(self) -> int:
        return self.number

    def __iter__(self) -> Iterator[int]:
        epoch = self.step() // max(1, self.number // self.data.per_step)
        generator = torch.Generator().manual_seed(self.seed + epoch)
        real = torch.randperm(len(self.data.sequences), generator=generator).tolist()
        yield from [*real, *range(len(real), len(self.data))][: self.number]
