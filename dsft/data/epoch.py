"""Builds an epoch from prepared tokens: sequences, their order, and the tensors of a batch.

Sequences are slices of prepared tokens, in an order that is the same on any number of ranks. Epochs consist of full
optimizer steps: if the last one has too few items, accelerate would repeat some from the beginning of the epoch, which
depend on the number of ranks. Here blank items, which train nothing, fill it instead.
"""

import array
import hashlib
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import KW_ONLY, dataclass
from itertools import chain, islice, pairwise
from typing import Any

import numpy as np
import torch
from transformers.trainer_pt_utils import get_length_grouped_indices

from dsft.data.tokens import Store
from dsft.models.chunked_head import next_tokens
from dsft.models.probes import RowRules, positions
from dsft.models.sequence_parallel import share_of
from dsft.units import IGNORED, padded_width

# input_ids and labels, both [T] int64; optionally weights, [T] float32, factors of each label's loss.
Sequence = dict[str, np.ndarray]
Counts = dict[str, Any]  # of rows, sequences and tokens, by name
BLANK = {"input_ids": np.zeros(1, np.int64), "labels": np.full(1, IGNORED)}


def sequence(ids: np.ndarray, trained: np.ndarray, weights: np.ndarray | None = None) -> Sequence:
    ids = np.asarray(ids, np.int64)
    labels = np.where(trained, ids, IGNORED)
    labels[:1] = IGNORED  # nothing precedes the first token
    item = {"input_ids": ids, "labels": labels}
    if weights is not None:
        item["weights"] = np.array(weights)
    return item


@dataclass(eq=False, repr=False)
class Sequences(torch.utils.data.Dataset):
    """The items of an epoch, read on access: lists of one of the N sequences, or of those of a packed row. An index
    beyond the last item returns a blank one, which fills an epoch's last step.
    """

    stores: list[Store]
    places: np.ndarray  # [N]: index in `stores`, in which the sequence is from `starts` [N] to `ends` [N]
    starts: np.ndarray
    ends: np.ndarray
    groups: list[np.ndarray] | None = None  # indices of the sequences of each packed row; None if rows are not packed

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each item. A pass over all sequences: read it once, not for each item."""
        lengths = self.ends - self.starts
        if self.groups is None:
            return lengths
        return np.array([lengths[group].sum() for group in self.groups])

    @property
    def identity(self) -> dict[str, Any]:
        """Number of items, and a digest of their lengths and of all tokens."""
        lengths = np.asarray(self.lengths, np.int64)
        content = hashlib.sha256(lengths.tobytes())
        for store in self.stores:
            content.update(store.facts["tokens_hash"].encode())
        return {"sequences of data": len(self), "content of data": content.hexdigest()[:16]}

    def __len__(self) -> int:
        return len(self.places if self.groups is None else self.groups)

    def __iter__(self) -> Iterator[list[Sequence]]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int) -> list[Sequence]:
        if index >= len(self):
            return [BLANK]
        item = []
        for number in [index] if self.groups is None else self.groups[index]:
            store = self.stores[self.places[number]]
            span = slice(self.starts[number], self.ends[number])
            weights = None if store.weights is None else store.weights[span]
            item.append(sequence(store.tokens[span], store.trained[span], weights))
        return item


def sequences_of(stores: list[Store], *, seq_len: int, keep_documents: bool) -> Sequences:
    """Returns all sequences of `stores`, in order. Text is concatenated and cut into windows of `seq_len` tokens; with
    `keep_documents`, for packing, each text is a separate sequence, cut only if it is longer.
    """
    table = array.array("q")  # three numbers for each sequence
    for place, store in enumerate(stores):
        ends = map(int, store.ends)
        if store.is_text and not keep_documents:
            ends = [len(store.tokens)]
        for begin, end in pairwise(chain([0], ends)):
            for start in range(begin, end, seq_len):  # a sample is not longer
                table.extend((place, start, min(start + seq_len, end)))
    places, starts, ends = np.array(table).reshape(-1, 3).T
    return Sequences(stores, places, starts, ends)


def describe_counts(counts: Counts) -> str:
    words = []
    for name, value in counts.items():
        name = name.replace("_", " ")
        if isinstance(value, float):
            words.append(f"{name} {value:.1%}")
        elif value:
            words.append(f"{value:,} {name}")
    return ", ".join(words)


def count(sequences: Sequences) -> Counts:
    stores = sequences.stores
    names = stores[0].counts.keys()
    counts = {}
    for name in names:
        counts[name] = sum(store.counts[name] for store in stores)
    # The first token of each window of text is context only.
    texts = [place for place, store in enumerate(stores) if store.is_text]
    counts["trained_tokens"] -= int(np.isin(sequences.places, texts).sum())
    return counts | {"sequences": len(sequences)}


# Filling rows, and batches of an evaluation


def best_fit(lengths: np.ndarray, room: int) -> list[np.ndarray]:
    """Returns rows of indices with at most `room` tokens each; no length may exceed it.

    Best-fit decreasing: the longest first, each into the row that it fills best (Ding et al., "Fewer Truncations
    Improve Language Modeling", arXiv 2404.10830, section 3).
    """
    assert not len(lengths) or lengths.max() <= room, "a sequence is longer than a row"
    rows = []
    rows_by_space = defaultdict(list)
    spaces = []  # sorted keys of `rows_by_space` that have rows
    for index in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[index])
        place = bisect_left(spaces, length)
        if place == len(spaces):
            row = []
            space = room
            rows.append(row)
        else:
            space = spaces[place]
            row = rows_by_space[space].pop()
            if not rows_by_space[space]:
                del spaces[place]
        row.append(index)
        space -= length
        if not rows_by_space[space]:
            insort(spaces, space)
        rows_by_space[space].append(row)
    return [np.array(row) for row in rows]


def form_batches(lengths: np.ndarray, batch_tokens: int, rules: RowRules) -> list[list[int]]:
    """Groups sequences, longest first, into batches of up to `batch_tokens` tokens with padding; a longer one is a
    separate batch. Depends only on lengths and model.
    """
    batches = []
    order = np.argsort(-lengths, kind="stable")
    # Rows that still fit the last batch, and the length of its longest.
    rows = 0
    longest = 0
    for index, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        if rows > 0 and rules.share(longest, length):
            batches[-1].append(index)
        else:
            batches.append([index])
            rows = batch_tokens // rules.width(length)
            longest = length
        rows -= 1
    return batches


# Order


def repeated(items: Iterable[Any], micro_batch: int, ranks: int) -> Iterator[Any]:
    """Yields each `micro_batch` of `items` `ranks` times: accelerate passes batches to ranks in turn."""
    items = iter(items)
    while batch := list(islice(items, micro_batch)):
        for _ in range(ranks):
            yield from batch


@dataclass(eq=False)
class EpochSampler(torch.utils.data.Sampler):
    """Yields a permutation of the items for each epoch, then blank ones."""

    items: Sequences
    _: KW_ONLY
    per_step: int
    seed: int
    step: Callable[[], int]
    """Returns the optimizer steps done, at the beginning of each epoch."""
    drop_last: bool = False  # leave out items that do not fill a step
    strategy: str = "random"
    """train_sampling_strategy. By default ("batch_rebalance") sequences of a batch have similar lengths, and a step has
    the same items as with "random"; "group_by_length" pads least, and steps differ.
    """
    micro_batch: int = 1
    shared_by: int = 1  # both as in `repeated`

    @property
    def steps(self) -> int:
        if self.drop_last:
            return len(self.items) // self.per_step
        return -(-len(self.items) // self.per_step)

    def __len__(self) -> int:
        return self.steps * self.per_step * self.shared_by

    def __iter__(self) -> Iterator[int]:
        order = self.order(self.step() // max(1, self.steps))
        return repeated(order, self.micro_batch, self.shared_by)

    def order(self, epoch: int) -> list[int]:
        generator = torch.Generator().manual_seed(self.seed + epoch)
        real = torch.randperm(len(self.items), generator=generator).numpy()
        lengths = self.items.lengths
        if self.strategy == "sequential":
            real = np.arange(len(real))
        elif self.strategy == "batch_rebalance":  # the longest first within each step
            steps = np.arange(len(real)) // self.per_step
            real = real[np.lexsort((-lengths[real], steps))]
        elif self.strategy == "group_by_length":
            indices = get_length_grouped_indices(lengths.tolist(), self.per_step, generator=generator)
            real = np.array(indices)
        num_items = self.steps * self.per_step
        blank = range(len(real), num_items)
        return [*real.tolist(), *blank][:num_items]


# Tensors


@dataclass(eq=False)
class Collator:
    """Builds a batch from items, and returns this rank's share of it, [B, T / shared_by].

    Each sequence is a row, padded on the right to the longest, rounded up to a multiple of 8. `packed`: each item is a
    row of concatenated sequences; its padding is one more sequence.

    Returns input_ids. For the Trainer, not for the model: shift_labels (-100 in padding) and, if any sequence has
    weights, shift_weights, at the positions that predict them, since the next token may be on another rank; num_tokens,
    [3]: tokens without padding and blank sequences, trained tokens, and computed positions; and for a share
    row_positions, the position_ids of full packed rows.

    Padded rows have an attention_mask. Packed rows have position_ids that restart with each sequence, from which
    transformers builds its block mask if there is no other; rows of one sequence need none. For flash attention packed
    rows are also concatenated, [1, B * T], with the bounds of all sequences.
    """

    pad_token_id: int
    seq_len: int | None = None  # limit of padding
    masked: bool = True
    """False leaves out attention_mask, for models in which no token sees the padding after it. A batch without padding
    has none either: transformers would read it back from the GPU to find that it is all ones.
    """
    packed: bool = False
    flash: bool = False
    place: int = 0  # of this rank among the `shared_by` that share each batch
    shared_by: int = 1

    def __call__(self, items: list[list[Sequence]]) -> dict[str, Any]:
        groups = items
        if not self.packed:
            groups = [[each] for item in items for each in item]
        lengths = [[len(each["input_ids"]) for each in group] for group in groups]
        filled = [sum(row) for row in lengths]
        width = padded_width(max(filled))
        if self.seq_len:
            width = min(width, self.seq_len)
        share = -(-width // self.shared_by)
        shape = len(groups), share * self.shared_by
        fills = {"input_ids": self.pad_token_id, "labels": IGNORED, "is_token": False}
        has_weights = any("weights" in each for group in groups for each in group)
        if has_weights:
            fills["weights"] = 1.0
        batch = {name: torch.full(shape, fill) for name, fill in fills.items()}
        for row, group in enumerate(groups):
            end = 0
            for each in group:
                start = end
                end += len(each["input_ids"])
                for name in each.keys() & batch.keys():
                    batch[name][row, start:end] = torch.tensor(each[name])
                batch["is_token"][row, start:end] = each is not BLANK

        if self.packed:
            for row, end in zip(lengths, filled, strict=True):
                if end < shape[1]:
                    row.append(shape[1] - end)
            if self.flash:
                flat = {name: each.view(1, -1) for name, each in batch.items()}
                batch = flat | positions([*chain(*lengths)], flash=True)
            elif any(len(row) > 1 for row in lengths):
                rows = [positions(row)["position_ids"] for row in lengths]
                batch["position_ids"] = torch.cat(rows)
        elif self.masked and min(filled) < shape[1]:
            ends_B1 = torch.tensor(filled)[:, None]
            is_filled_BT = torch.arange(shape[1]) < ends_B1
            batch["attention_mask"] = is_filled_BT.long()

        batch["shift_labels"] = next_tokens(batch.pop("labels"), IGNORED)
        if has_weights:
            batch["shift_weights"] = next_tokens(batch.pop("weights"))
        if self.shared_by > 1:
            row_positions_BT = batch.get("position_ids")
            batch = share_of(batch, self.place, self.shared_by)
            if row_positions_BT is not None and not self.flash:
                batch["row_positions"] = row_positions_BT
        is_token_BT = batch.pop("is_token")
        num_trained = (batch["shift_labels"] != IGNORED).sum()
        batch["num_tokens"] = torch.tensor([is_token_BT.sum(), num_trained, is_token_BT.numel()])
        return batch
