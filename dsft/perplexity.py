"""Perplexity on any number of ranks: each token scored once, the same bits whatever the number of ranks.

Batches are formed from the data alone; ranks are dealt whole batches; the sums of the sequences come together in one fixed
order. Definition: perplexity = exp(nats / tokens), where nats is the sum of -ln p(token | tokens before it in its sequence)
over all scored tokens, log-softmax in fp32 whatever the model's dtype, sums in float64.

Shape suffixes: B batch, T time, V vocabulary, N scored tokens of a batch.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from datasets import Dataset
from torch import nn
from tqdm.auto import tqdm

from dsft.problems import TrainingStopped
from dsft.ranks import sum_over_ranks
from dsft.samples import IGNORED, Collator

ROWS_PER_CHUNK = 512
"""Scored positions whose fp32 log-softmax exists at once."""


@dataclass(frozen=True, kw_only=True)
class Perplexity:
    """The result of one evaluation, over all ranks."""

    nats: float
    """Sum of negative log-likelihoods of the scored tokens."""
    tokens: int
    """Number of scored tokens."""
    sequences: int
    unscored_sequences: int
    """Sequences without a token to score: a window of one token, for example."""

    @property
    def loss(self) -> float:
        """Mean nats per token."""
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss) if self.loss < 700 else math.inf  # exp(709.8) is float64's end


def form_batches(lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Indices of sequences, longest first, filled up to `batch_tokens` tokens with padding. Depends on the data alone."""
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    batches: list[list[int]] = []
    for index in order:
        if batches and lengths[batches[-1][0]] * (len(batches[-1]) + 1) <= batch_tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


@torch.no_grad()
def evaluate_sequences(model: nn.Module, sequences: Dataset, *, pad_token_id: int, batch_tokens: int, device: torch.device,
                       collective_forward: bool, progress: bool = False) -> Perplexity:
    """Perplexity of `model` on `sequences` (columns input_ids and labels). Collective: every rank must call it.

    Args:
        batch_tokens: tokens of one forward, padding included; a longer sequence is a batch of its own.
        collective_forward: the model is sharded (ZeRO-3), so ranks without work must take part in every forward.

    Raises:
        TrainingStopped: where a sequence's loss is NaN or infinite, naming the first such sequence.
    """
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    ids = sequences["input_ids"]
    batches = form_batches([len(one) for one in ids], batch_tokens)
    mine = batches[rank::world]
    rounds = -(-len(batches) // world)
    collate = Collator(pad_token_id)
    # Each sequence is scored on one rank and 0 on all others, so summing over ranks adds only zeros: no rounding.
    sums = torch.zeros(len(ids), 2, dtype=torch.float64)
    was_training = model.training
    model.eval()
    for turn in tqdm(range(rounds), desc="Perplexity", unit="batch", disable=not progress, leave=False):
        if turn < len(mine):
            indices = mine[turn]
            batch = collate([sequences[index] for index in indices])
            sums[indices] = score_batch(model, {name: tensor.to(device) for name, tensor in batch.items()})
        elif collective_forward:
            model(input_ids=torch.full((1, 8), pad_token_id, device=device), use_cache=False)
    model.train(was_training)
    sums = sum_over_ranks(sums)
    bad = (~sums[:, 0].isfinite()).nonzero()
    if len(bad):
        raise TrainingStopped(f"the loss of evaluation sequence {bad[0].item() + 1} of {len(ids)} is {sums[bad[0], 0].item()}: the model's weights or its numbers have overflowed")
    return Perplexity(
        nats=math.fsum(sums[:, 0].tolist()),
        tokens=int(sums[:, 1].sum()),
        sequences=len(ids),
        unscored_sequences=int((sums[:, 1] == 0).sum()),
    )


def score_batch(forward: Callable, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """[B, 2] in float64 on the CPU: nats and scored tokens of each sequence of a collated batch."""
    logits_BTV = forward(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False).logits
    targets_BT = batch["labels"][:, 1:]
    where_BT = targets_BT != IGNORED
    rows_N, times_N = where_BT.nonzero(as_tuple=True)
    targets_N = targets_BT[where_BT]
    nats_N = torch.cat([
        nn.functional.cross_entropy(logits_BTV[rows, times].float(), targets, reduction="none")
        for rows, times, targets in zip(*(t.split(ROWS_PER_CHUNK) for t in (rows_N, times_N, targets_N)), strict=True)
    ])
    nats_BT = torch.zeros(targets_BT.shape, dtype=torch.float64)
    nats_BT[where_BT.cpu()] = nats_N.double().cpu()
    return torch.stack([nats_BT.sum(dim=1), where_BT.sum(dim=1).cpu().double()], dim=1)
