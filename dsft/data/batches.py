"""Makes an epoch of prepared tokens, or a stream without end: sequences, their order, and the tensors of a batch.

Sequences are slices of prepared tokens, of one or several sources mixed by weight, in an order that is the same on any
number of ranks. Epochs are full optimizer steps: where the last one has too few items, accelerate would repeat some
from the epoch's beginning, and which ones depends on the number of ranks. Here blank items, which train nothing, fill
it instead.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import KW_ONLY, asdict, dataclass, field, replace
from itertools import chain, islice, pairwise
from os.path import getsize
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from dsft.config.options import TrainConfig, shuffle_seed
from dsft.data.formats import FormattedSource
from dsft.data.prepare import Store
from dsft.data.tokenization import tokenise
from dsft.errors import UserError
from dsft.models.sequence_parallel import share_of
from dsft.models.tiles import next_tokens
from dsft.models.trials import NO_RULES, RowRules, positions
from dsft.units import IGNORED, describe_value

Sequence = dict[str, np.ndarray]
"""input_ids and labels, both [T] int64; weights, [T] float32, where a label's loss is multiplied by other than 1; and
sources, [T] int64, which source each label is of, where there are several.
"""
BLANK: Sequence = {"input_ids": np.zeros(1, np.int64), "labels": np.full(1, IGNORED)}


def sequence(ids: np.ndarray, trained: np.ndarray, weights: np.ndarray | None = None) -> Sequence:
    ids = np.asarray(ids, np.int64)
    labels = np.where(trained, ids, IGNORED)
    labels[:1] = IGNORED  # nothing stands before the first token
    return {"input_ids": ids, "labels": labels} | ({} if weights is None else {"weights": np.array(weights)})


def sequences_in(items: Iterable[Sequence | list[Sequence]]) -> list[Sequence]:
    return [sequence for item in items for sequence in (item if isinstance(item, list) else [item])]


class Items(torch.utils.data.Dataset):
    """What an epoch is made of: sequences, or lists of sequences that share a row or a batch."""

    lengths: np.ndarray  # tokens of each
    stores: list[Store]  # that they are read from

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def identity(self) -> dict[str, Any]:
        """Number of items, and a digest of their lengths and of all tokens that they are made of."""
        content = hashlib.sha256(np.asarray(self.lengths, np.int64).tobytes())
        for store in self.stores:
            content.update(store.facts["tokens_hash"].encode())
        return {"sequences of data": len(self), "content of data": content.hexdigest()[:16]}


@dataclass(eq=False, repr=False)
class Sequences(Items):
    """N sequences, read when asked for."""

    stores: list[Store]
    places: np.ndarray  # [N], which of `stores` each is in; from `starts` [N] to `ends` [N] there
    starts: np.ndarray
    ends: np.ndarray
    sources: tuple[str, ...] = ()  # names of those whose losses are told apart
    numbers: tuple[np.ndarray, ...] = ()
    """Of each store: numbers of `sources` by those that the store has; of all of it where it has none."""

    @property
    def lengths(self) -> np.ndarray:
        """[N]. Takes a pass over all: ask once, not for each item."""
        return self.ends - self.starts

    @property
    def document_ends(self) -> np.ndarray:
        """[D] where documents, or samples, end in the tokens of all stores laid end to end."""
        before = np.cumsum([0, *(len(store.tokens) for store in self.stores)])[: len(self.stores)]
        return np.concatenate([store.ends + first for store, first in zip(self.stores, before, strict=True)])

    def __len__(self) -> int:
        return len(self.places)  # without `lengths`, which takes a pass over all: it is asked for with each item

    def __getitem__(self, index: int) -> Sequence:
        place, start, end = self.places[index], self.starts[index], self.ends[index]
        store, span = self.stores[place], slice(start, end)
        weights = None if store.weights is None else store.weights[span]
        made = sequence(store.tokens[span], store.trained[span], weights)
        if len(self.sources) > 1:
            of_store, numbers = 0, self.numbers[place]
            if len(store.sources):  # a window of text may hold several documents
                first, last = np.searchsorted(store.ends, [start, end - 1], side="right")
                ends = np.minimum(store.ends[first : last + 1], end)
                of_store = np.repeat(store.sources[first : last + 1], np.diff(ends, prepend=start))
            made["sources"] = np.broadcast_to(numbers[of_store], end - start)
        return made


class PackedRows(Items):
    """Items that are lists of sequences: those of a packed row, or of a batch within a token budget."""

    def __init__(self, sequences: Sequences, groups: list[np.ndarray]):
        self.sequences, self.groups, self.stores = sequences, groups, sequences.stores
        lengths = sequences.lengths
        self.lengths = np.array([lengths[group].sum() for group in groups])

    def __getitem__(self, index: int) -> list[Sequence]:
        return [self.sequences[i] for i in self.groups[index]]


def sequences_of(stores: list[Store], *, seq_len: int, keep_documents: bool) -> Sequences:
    """Makes all sequences of `stores`, in order. Text is laid end to end and cut into windows of `seq_len` tokens; with
    `keep_documents`, for packing, a text is a sequence of its own, cut only where it is longer.
    """
    parts = []
    for place, store in enumerate(stores):
        if store.is_text:
            ends = store.ends if keep_documents else np.array([len(store.tokens)])
            starts, ends = cut(ends, seq_len)
        else:
            starts, ends = np.r_[0, store.ends][:-1], store.ends
        parts.append((np.full(len(starts), place, np.int16), starts, ends))
    return Sequences(stores, *(np.concatenate(columns) for columns in zip(*parts, strict=True)))


def cut(ends: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Cuts documents that end at `ends` into pieces of at most `length` tokens, as (starts, ends)."""
    begins = np.r_[0, ends][:-1]
    pieces = -(-(ends - begins) // length)
    within = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    starts = np.repeat(begins, pieces) + within * length
    return starts, np.minimum(starts + length, np.repeat(ends, pieces))


def mix(sequences: Sequences, weights: list[float], *, seed: int) -> tuple[Sequences, list[float]]:
    """Draws as many sequences as there are, of each source its share by weight, each time without repetition until it
    is used up. Returns (sequences, epochs per source).
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
    chosen = np.concatenate(drawn)
    columns = {name: getattr(sequences, name)[chosen] for name in ("places", "starts", "ends")}
    return replace(sequences, **columns), epochs


def describe_counts(counts: dict[str, Any]) -> str:
    words = []
    for name, value in counts.items():
        text = name.replace("_", " ")
        if isinstance(value, list | float):
            words.append(f"{text} {describe_value(value)}")
        elif value:
            share = f" ({value / counts['rows']:.1%})" if name == "dropped_long" and counts.get("rows") else ""
            words.append(f"{describe_value(value)} {text}{share}")
    return ", ".join(words)


def count(sequences: Sequences) -> dict[str, Any]:
    """Counts all sources together for run.json."""
    stores = sequences.stores
    names = stores[0].counts.keys()
    counts: dict[str, Any] = {name: sum(store.counts[name] for store in stores) for name in names}
    # The first token of each window of text is context only.
    texts = [place for place, store in enumerate(stores) if store.is_text]
    counts["trained_tokens"] -= int(np.isin(sequences.places, texts).sum())
    return counts | {"sequences": len(sequences)}


# Which sequences share a row, or a batch, so that it is full


def best_fit(lengths: np.ndarray, room: int) -> list[np.ndarray]:
    """Forms rows of indices with at most `room` tokens each; no length may be more.

    The longest first, and into each row what fills it best (after best-fit decreasing; Ding et al., "Fewer Truncations
    Improve Language Modeling", arXiv 2404.10830, section 3). Works on the counts of each length, so that its time grows
    with the number of different lengths (after Krell et al., arXiv 2107.02027, section 3).
    """
    order = np.argsort(lengths, kind="stable")
    sizes, used, counts = np.unique(lengths[order], return_index=True, return_counts=True)
    left, rows = counts.copy(), []
    while left.any():
        fullest = _fullest_row(sizes, left.copy(), room)
        kinds = np.flatnonzero(fullest)
        assert len(kinds), "a sequence is longer than a row"  # else no round would take one, without end
        for _ in range(int((left[kinds] // fullest[kinds]).min())):
            rows.append(np.concatenate([order[used[kind] : used[kind] + fullest[kind]] for kind in kinds[::-1]]))
            used[kinds] += fullest[kinds]
            left[kinds] -= fullest[kinds]
    return rows


def _fullest_row(sizes: np.ndarray, left: np.ndarray, room: int) -> np.ndarray:
    """Fills one row from `left` (changed) of each of `sizes` (in order); returns how many of each it takes: the
    largest, then always the largest that fits, but the two that fit best where these fill the row better.
    """
    row = np.zeros_like(left)
    while len(fitting := np.flatnonzero((left > 0) & (sizes <= room))):
        fitting_sizes = sizes[fitting]
        chosen = [fitting[-1]]
        if row.any() and 2 * fitting_sizes[-1] >= room:
            partner = np.searchsorted(fitting_sizes, room - fitting_sizes, side="right") - 1
            partner -= (partner == np.arange(len(fitting_sizes))) & (left[fitting] == 1)
            pairs = np.where(partner >= 0, fitting_sizes + fitting_sizes[partner], 0)
            if pairs.max() > fitting_sizes[-1]:
                best = int(pairs.argmax())
                chosen = [fitting[best], fitting[partner[best]]]
        for kind in chosen:
            row[kind] += 1
            left[kind] -= 1
            room -= sizes[kind]
    return row


def form_batches(lengths: np.ndarray, batch_tokens: int, rules: RowRules) -> list[list[int]]:
    """Groups sequences, longest first, into batches of up to `batch_tokens` tokens with padding; a longer one is a
    batch of its own. Depends on lengths and model alone.
    """
    batches: list[list[int]] = []
    order = np.argsort(-lengths, kind="stable")
    rows, longest = 0, 0  # that the last batch may still take; its longest
    for index, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        if rows > 0 and rules.share(longest, length):
            batches[-1].append(index)
        else:
            batches.append([index])
            rows, longest = batch_tokens // rules.width(length), length
        rows -= 1
    return batches


# Order


class PaddedToFullSteps(Items):
    """`items` (sequences, or groups of them) and after them blank ones up to a multiple of `per_step`."""

    def __init__(self, items: Items, per_step: int):
        self.items, self.per_step = items, per_step
        self.blank = [BLANK] if isinstance(items, PackedRows) else BLANK
        self.lengths = np.append(items.lengths, np.zeros(-len(items) % per_step, np.int64))

    def __getitem__(self, index: int) -> Any:
        return self.items[index] if index < len(self.items) else self.blank


def repeated(items: Iterable[Any], micro_batch: int, ranks: int) -> Iterator[Any]:
    """Yields each `micro_batch` of `items` that follow `ranks` times: accelerate gives a batch to each rank in turn,
    and so many neighbours share one.
    """
    items = iter(items)
    while batch := list(islice(items, micro_batch)):
        for _ in range(ranks):
            yield from batch


@dataclass(eq=False)
class EpochSampler(torch.utils.data.Sampler):
    """Yields a permutation of the items for each epoch, then the blank ones."""

    data: PaddedToFullSteps
    _: KW_ONLY
    seed: int
    step: Callable[[], int]
    """The optimizer steps already done; asked at the beginning of each epoch, also of one resumed in its middle."""
    drop_last: bool = False  # leave out what does not fill a step
    strategy: str = "random"
    """train_sampling_strategy. By default ("batch_rebalance") batches of a step are of like length, and the step holds
    the same items as with "random". "group_by_length": steps are of like length, beginning with the longest, which pads
    least, but makes steps that differ. "sequential": every epoch takes the items as they stand in the data.
    """
    micro_batch: int = 1
    shared_by: int = 1  # both as `repeated` takes them

    @property
    def steps(self) -> int:
        """Of an epoch."""
        items, per_step = len(self.data.items), self.data.per_step
        return items // per_step if self.drop_last else -(-items // per_step)

    def __len__(self) -> int:
        return self.steps * self.data.per_step * self.shared_by

    def __iter__(self) -> Iterator[int]:
        order = self.order(self.step() // max(1, self.steps))
        return repeated(order, self.micro_batch, self.shared_by)

    def order(self, epoch: int) -> list[int]:
        generator = torch.Generator().manual_seed(self.seed + epoch)
        real = torch.randperm(len(self.data.items), generator=generator).numpy()
        lengths, per_step = self.data.items.lengths, self.data.per_step

        def longest_first(size: int) -> np.ndarray:  # of each `size` items that follow each other
            groups = [real[start : start + size] for start in range(0, len(real), size)]
            return np.concatenate([group[np.argsort(-lengths[group], kind="stable")] for group in groups or [real]])

        if self.strategy == "sequential":
            real = np.arange(len(real))
        elif self.strategy == "batch_rebalance":
            real = longest_first(per_step)
        elif self.strategy == "group_by_length":
            # Looked for among those of 50 steps, as transformers' own LengthGroupedSampler does (trainer_pt_utils.py).
            by_length = longest_first(50 * per_step)
            num_full = len(by_length) // per_step
            rest = by_length[num_full * per_step :]
            steps = by_length[: num_full * per_step].reshape(num_full, per_step)
            steps = steps[torch.randperm(num_full, generator=generator).numpy()]
            if len(steps):  # what does not fit into memory should fail at once
                longest = int(lengths[steps].max(1).argmax())
                steps[[0, longest]] = steps[[longest, 0]]
            real = np.concatenate([steps.reshape(-1), rest])
        return [*real.tolist(), *range(len(real), len(self.data))][: self.steps * per_step]


def padding_share(order: list[int], lengths: np.ndarray, batch: int, rules: RowRules) -> float:
    """Returns the share of computed positions without a token, in batches of `batch` items that follow in `order`."""
    lengths_of_batches = lengths[order].reshape(-1, batch)
    longest, of_batches = np.unique(lengths_of_batches.max(1), return_inverse=True)
    widths = np.array([rules.width(length) for length in longest])[of_batches]
    return float(1 - lengths_of_batches.sum() / (widths * batch).sum())


# Streams


@dataclass(eq=False)
class Stream(torch.utils.data.IterableDataset):
    """Sequences, or packed rows of them, of sources that are tokenised while training; nothing is kept.

    The sources are drawn from by weight (by default as often as each other), each begun again at its end. Every rank
    reads the full stream and takes its part (accelerate's IterableDatasetShard), so that the order is the same on any
    number of ranks. The Trainer of a resumed run reads from the beginning up to its place.
    """

    # Mixing and shuffling are done here: `datasets.interleave_datasets` reads the first five rows of each source once
    # more to infer columns, so that the counts of what was read would be wrong, and it turns arrays into lists.

    sources: list[FormattedSource]
    tokenizer: PreTrainedTokenizerBase
    config: TrainConfig
    _: KW_ONLY
    counts: Counter = field(default_factory=Counter)  # as of prepared data, of what this process has read so far
    micro_batch: int = 1  # as `repeated` takes them; the Trainer sets both
    shared_by: int = 1

    @property
    def identity(self) -> dict[str, Any]:
        """A digest of what the order depends on."""
        facts = [
            [formatted.source.name, [*map(getsize, formatted.source.files)], asdict(formatted.rules)]
            for formatted in self.sources
        ]
        config = self.config
        order = json.dumps([*facts, config.data_weights, config.packing, config.shuffle_buffer], sort_keys=True)
        return {"content of data": hashlib.sha256(order.encode()).hexdigest()[:16]}

    def __iter__(self) -> Iterator[Sequence | list[Sequence]]:
        return repeated(self._items(), self.micro_batch, self.shared_by)

    def _items(self) -> Iterator[Sequence | list[Sequence]]:
        parts = [self._sequences(each, number) for number, each in enumerate(self.sources)]
        share = np.array(self.config.data_weights or [1.0] * len(parts))
        buffered, seed = self.config.shuffle_buffer, shuffle_seed(self.config.training)
        of_sources, of_buffer = np.random.default_rng(seed), np.random.default_rng(seed)

        def draw() -> Sequence:
            return next(parts[of_sources.choice(len(parts), p=share / share.sum())])

        def shuffled() -> Iterator[Sequence]:
            buffer = [draw() for _ in range(buffered)]
            while True:
                index = int(of_buffer.integers(buffered))
                yield buffer[index]
                buffer[index] = draw()

        sequences = shuffled()
        if not self.config.packing:
            yield from sequences  # without end
        waiting: list[Sequence] = []
        while True:  # best fit among a thousand sequences at hand; those of the emptiest row wait for more
            waiting += islice(sequences, 1000)
            lengths = np.array([len(each["input_ids"]) for each in waiting])
            *full, emptiest = sorted(best_fit(lengths, self.config.seq_len), key=lambda row: -lengths[row].sum())
            yield from ([waiting[index] for index in row] for row in full)
            waiting = [waiting[index] for index in emptiest]

    def _sequences(self, formatted: FormattedSource, number: int) -> Iterator[Sequence]:
        """Yields the sequences of a source, again from its beginning at its end."""
        source, rest, seq_len = formatted.source, np.zeros(0, np.int32), self.config.seq_len
        while True:
            before = self.counts["tokens"]
            for batch in source.batches():
                tokens = tokenise(batch, formatted.rules, self.tokenizer)
                self.counts += tokens.counts
                ids, trained, spans = tokens.ids, tokens.trained, list(pairwise([0, *tokens.ends]))
                if formatted.rules.is_text:
                    ids, trained = np.concatenate([rest, ids]), np.ones(len(rest) + len(ids), bool)
                    # With packing it is cut into its documents, which may share a row; else it is laid end to end.
                    complete = tokens.ends + len(rest) if self.config.packing else np.zeros(0, np.int64)
                    spans = list(zip(*(bounds.tolist() for bounds in cut(complete, seq_len)), strict=True))
                    starts = range(spans[-1][1] if spans else 0, len(ids) - seq_len + 1, seq_len)
                    spans += [(start, start + seq_len) for start in starts]
                    rest = ids[spans[-1][1] if spans else 0 :]
                first_tokens = len(spans) if formatted.rules.is_text else 0  # of windows of text: context only
                trained_tokens = int(tokens.trained.sum()) - first_tokens
                self.counts += Counter(tokens=len(tokens.ids), trained_tokens=trained_tokens)
                weights = tokens.weights
                for start, end in spans:
                    made = sequence(ids[start:end], trained[start:end], None if weights is None else weights[start:end])
                    yield made | ({"sources": np.full(end - start, number)} if len(self.sources) > 1 else {})
            if self.counts["tokens"] == before:
                counts = describe_counts(self.counts)
                raise UserError(f"{source.key}: {source.name} gives no token to train on ({counts})")


# Tensors


@dataclass(frozen=True, kw_only=True)
class Part:
    """Which positions of a batch this rank computes: all, or its share of those of the ranks that share each batch."""

    place: int = 0
    size: int = 1


WHOLE = Part()


@dataclass(eq=False)
class Collator:
    """Lays sequences out as a batch, and takes this rank's part of it, [B, T / size].

    Each sequence, also of lists, is a row, padded on the right to the longest, rounded up to a multiple of 8. `packed`:
    each list is a row, its sequences end to end; the rest of a row is a sequence of its own.

    Returns input_ids, and labels: -100 in padding, so the choice of the pad token changes no loss. For the Trainer, not
    for the model: weights, where any sequence has them, and sources, where there are several; num_tokens, [3]: without
    padding and blank sequences, those trained, computed positions, and after them the trained ones of each of several
    sources. In a share the next token may be another rank's, so labels, weights and sources are moved to the positions
    that predict them, as shift_labels, shift_weights and shift_sources; row_positions are those of full packed rows.

    Padded rows have an attention_mask. Packed rows have none, but position_ids that restart with each sequence:
    transformers makes its block mask from them only where no mask is given. Where each row is one sequence there are no
    position_ids either: a causal model needs no mask then. With flash attention packed rows too are laid end to end,
    [1, B * T], with the bounds of all sequences beside them.
    """

    pad_token_id: int
    rules: RowRules = NO_RULES  # with the lengths that padding does not go beyond
    masked: bool = True
    """False leaves attention_mask out, for models in which no token sees the padding after it. A batch without padding
    has none either: transformers would read it back from the GPU to see that it is of ones.
    """
    packed: bool = False
    flash: bool = False
    num_sources: int = 1
    part: Part = WHOLE

    def __call__(self, items: list[Sequence] | list[list[Sequence]]) -> dict[str, Any]:
        groups = items if self.packed else [[each] for each in sequences_in(items)]
        lengths = [[len(each["input_ids"]) for each in group] for group in groups]
        filled = [sum(row) for row in lengths]
        shape = len(groups), replace(self.rules, multiple=self.part.size).width(max(filled))
        batch = {
            "input_ids": torch.full(shape, self.pad_token_id, dtype=torch.long),
            "labels": torch.full(shape, IGNORED, dtype=torch.long),
        }
        if any("weights" in each for group in groups for each in group):
            batch["weights"] = torch.ones(shape)
        if self.num_sources > 1:
            batch["sources"] = torch.zeros(shape, dtype=torch.long)
        is_token_BT = torch.zeros(shape, dtype=torch.bool)
        for row, group in enumerate(groups):
            end = 0
            for each in group:
                start, end = end, end + len(each["input_ids"])
                for name in each.keys() & batch.keys():
                    batch[name][row, start:end] = torch.tensor(each[name])
                is_token_BT[row, start:end] = each is not BLANK
        batch["is_token"] = is_token_BT

        if self.packed:
            lengths = [
                [*row, shape[1] - end] if end < shape[1] else row for row, end in zip(lengths, filled, strict=True)
            ]
            if self.flash:
                flat = {name: each.view(1, -1) for name, each in batch.items()}
                batch = flat | positions([*chain(*lengths)], flash=True)
            elif any(len(row) > 1 for row in lengths):
                batch["position_ids"] = torch.cat([positions(row)["position_ids"] for row in lengths])
        elif self.masked and min(filled) < shape[1]:
            batch["attention_mask"] = (torch.arange(shape[1]) < torch.tensor(filled)[:, None]).long()

        shifted = ""
        if self.part.size > 1:
            shifted, rows = "shift_", {}
            if self.packed and not self.flash and "position_ids" in batch:
                rows["row_positions"] = batch["position_ids"]
            for name, last in (("labels", IGNORED), ("weights", 0), ("sources", 0)):
                if name in batch:
                    batch[f"shift_{name}"] = next_tokens(batch.pop(name), last)
            batch = share_of(batch, self.part.place, self.part.size) | rows
        is_token_BT, is_trained_BT = batch.pop("is_token"), batch[f"{shifted}labels"] != IGNORED
        num_tokens = torch.stack([is_token_BT.sum(), is_trained_BT.sum(), torch.tensor(is_token_BT.numel())])
        if self.num_sources > 1:
            of_sources = batch[f"{shifted}sources"][is_trained_BT].bincount(minlength=self.num_sources)
            num_tokens = torch.cat([num_tokens, of_sources])
        return batch | {"num_tokens": num_tokens}
