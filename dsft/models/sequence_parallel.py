"""Splits each row over a team of ranks with DeepSpeed's Ulysses attention, and refuses models for which that fails.

A rank of a team of N has T / N neighbouring tokens of every row, in training and in evaluation. Within attention the
ranks exchange positions for heads, so that each computes H / N heads over all T positions:

    hidden [B, T/N, H] -> q, k, v -> all_to_all -> [B, H/N, T] attention all_to_all -> [B, T/N, H] -> ... -> nats

The exchange is `UlyssesSPAttentionHF` (deepspeed/runtime/sequence_parallel/ulysses_sp.py), also over gloo, with one
instance for each shape of attention. The model gets positions; its masks are dropped, since attention is causal and
packed rows have a separate mask. So a model must mix tokens nowhere else, which is tried on a small one with random
weights before weights are loaded, and its attention must see all earlier tokens.

For DeepSpeed's engine the ranks have different tokens, as in plain data parallelism, and only the exchange is
differentiated across ranks: gradients are right in every ZeRO stage. accelerate's `ParallelismConfig` would inform the
engine, which under ZeRO 1 and 2 then divides by too few ranks (transformers#46775).

Shape suffixes: B batch, T time, N scored tokens of a batch, K columns.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from dsft.models.chunked_head import distance
from dsft.models.measure import ModelFacts
from dsft.models.probes import random_tokens, rope_types, small_model
from dsft.runtime import distributed
from dsft.runtime.hardware import which_memory
from dsft.units import IGNORED


@dataclass(frozen=True, kw_only=True)
class Team:
    """The ranks that share each row: neighbours, so that they are on one node if possible."""

    size: int = 1
    group: Any = None  # process group; None for a team of one

    def position(self) -> tuple[int, int, int]:
        """Return (index of this rank's team, its position in that team, number of teams)."""
        if not dist.is_initialized():  # a launcher's variables alone make no process group to reduce sums over
            return 0, 0, 1
        rank = dist.get_rank()
        return rank // self.size, rank % self.size, dist.get_world_size() // self.size

    def share(self, batch_BT: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return share_of(batch_BT, self.position()[1], self.size)

    def gather(self, columns_KN: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
        """Return the columns of the whole batch, by position, on the CPU. Collective within the team. `columns_KN`: of
        the scored tokens among this rank's positions, row by row; `targets_BT`: of the whole batch.
        """
        is_scored_BT = targets_BT != IGNORED
        place = self.position()[1]
        is_here_BT = is_scored_BT.chunk(self.size, dim=1)[place]
        share_KBT = targets_BT.new_zeros(len(columns_KN), *is_here_BT.shape, dtype=torch.float64)
        share_KBT[:, is_here_BT] = columns_KN.to(targets_BT.device)
        shares = [torch.empty_like(share_KBT) for _ in range(self.size)]
        dist.all_gather(shares, share_KBT, group=self.group)
        return torch.cat(shares, dim=2)[:, is_scored_BT].cpu()

    @contextlib.contextmanager
    def attention(self, model: nn.Module, *, rows_BT: torch.Tensor | None = None) -> Iterator[None]:
        """Exchange positions for heads in every attention of `model`, which is called with `share(batch)`. `rows_BT`:
        position ids of full rows that restart with each sample; flash attention gets the bounds of samples instead.
        """
        mask_B1TT = None
        if rows_BT is not None:
            samples_BT = (rows_BT == 0).cumsum(dim=1)
            is_same_B1TT = samples_BT[:, None, :, None] == samples_BT[:, None, None, :]
            mask_B1TT = is_same_B1TT.tril_()

        name = model.config.get_text_config()._attn_implementation  # key of transformers' table
        function = ALL_ATTENTION_FUNCTIONS[name]

        def exchanging(module, query, key, value, _mask, **options):
            """Computes with query, key and value [B, H, T, D]."""
            rows, heads, _, head_size = query.shape
            ulysses = _ulysses(function, self.group, rows, heads, key.shape[1], head_size)
            # If key heads are repeated for the ranks, Ulysses sets this to the number of its share and leaves it so.
            groups = vars(module).get("num_key_value_groups")
            try:
                output, weights = ulysses(module, query, key, value, mask_B1TT, **options)
                return output.unflatten(-1, (heads, -1)), weights  # [B, T, H, D], as GPT-2 needs it
            finally:
                if groups is not None:
                    module.num_key_value_groups = groups

        ALL_ATTENTION_FUNCTIONS[name] = exchanging
        try:
            yield
        finally:
            ALL_ATTENTION_FUNCTIONS[name] = function


ALONE = Team()


def share_of(batch: dict[str, Any], place: int, size: int) -> dict[str, Any]:
    """Return the positions of a batch for rank `place` of the `size` ranks that share it, [B, T / size], with their
    position_ids. Values that are not [B, T], such as the bounds of samples, stay whole.
    """
    shape = batch["input_ids"].shape
    if "position_ids" not in batch:
        positions_T = torch.arange(shape[1], device=batch["input_ids"].device)
        batch = batch | {"position_ids": positions_T.expand(shape)}
    here = slice(place * shape[1] // size, (place + 1) * shape[1] // size)  # in the order of ranks
    share = {}
    for name, value in batch.items():
        is_by_position = getattr(value, "shape", None) == shape
        share[name] = value[:, here].contiguous() if is_by_position else value
    return share


@functools.cache
def team_of(size: int) -> Team:
    """Split the ranks into teams of `size`, a divisor of their number; return this rank's. First call: collective."""
    if size == 1:
        return ALONE
    number, _, teams = Team(size=size).position()
    groups = []
    for first in range(0, teams * size, size):
        groups.append(dist.new_group([*range(first, first + size)]))
    return Team(size=size, group=groups[number])


@functools.cache
def _ulysses(function: Callable, group: Any, rows: int, heads: int, key_heads: int, head_size: int) -> nn.Module:
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF  # takes seconds, and few need it

    return UlyssesSPAttentionHF(
        attn=function,
        batch_size=rows,
        attn_head_count=heads,
        attn_head_size=head_size,
        kv_head_count=key_heads,
        num_hidden_layers=1,  # read by a debug mode only
        process_group=group,
        seq_length_is_variable=True,
    )


WHOLE_ATTENTION = ("full_attention", "sliding_attention")  # kinds of layers that Ulysses can compute
WAY_OUT = "leave sequence_parallel out, the model works with one rank for each row"
# transformers chooses their angles by the largest position of a rank, which differs between ranks.
MOVING_ROPES = ("longrope", "dynamic")


def refused_model(facts: ModelFacts, *, size: int, world: int, seq_len: int, attention: str, model: str) -> str:
    """Return why rows of `model` cannot be split over `size` ranks, by its config; empty if they can.
    `attention`: from the planner (`attention_of`), for rows without a mask.
    """
    text = facts.config.get_text_config()
    implementation = facts.attn_implementation
    positions = facts.size.max_positions
    key_heads = facts.size.num_key_heads
    why = ""
    others = sorted(set(getattr(text, "layer_types", None) or ()) - set(WHOLE_ATTENTION))
    moving = [kind for kind in MOVING_ROPES if kind in rope_types(text)]
    if others:
        why = f"its layers of kind {', '.join(others)} pass tokens on outside of attention, or need a mask; {WAY_OUT}"
    elif moving:
        why = f"its rotary angles ({moving[0]}) depend on the longest position that a rank sees; {WAY_OUT}"
    elif implementation != "sdpa" and "flash" not in implementation:
        why = f"attn_implementation {implementation} is not supported; use sdpa or flash_attention_2"
    elif world % size:
        why = f"it must divide the number of ranks, which is {world}"
    elif facts.size.num_heads % size or (key_heads % size and size % key_heads):  # key heads may also be repeated
        why = f"its {facts.size.num_heads} heads and {key_heads} key heads cannot be shared by {size} ranks"
    elif attention != "flash":
        why = (
            f"a sliding window of {text.sliding_window:,} tokens needs a mask with sdpa, which Ulysses drops; use"
            f" attn_implementation flash_attention_2, or seq_len below {text.sliding_window:,}"
        )
    elif positions and -(-seq_len // size) * size > positions:
        why = (
            f"rows are padded to a multiple of {size}, and the model has {positions:,} positions; use seq_len"
            f" {positions // size * size:,} or less"
        )
    return f"sequence_parallel={size} for {model}: {why}" if why else ""


@torch.no_grad()
def failed_trial(facts: ModelFacts, *, size: int, model: str, trust_remote_code: bool = False) -> str:
    """Compare the logits of a small model on whole rows with those on shares; return why they differ, empty if they are
    the same or this is a plan without ranks. Collective.
    """
    if not dist.is_initialized():
        return ""
    team = team_of(size)
    reason = f"{facts.size.model_type} computes otherwise when its tokens are spread over ranks"
    try:
        options = {"device": distributed.device(), "attn_implementation": "sdpa", "heads": 2 * size}
        small = small_model(facts.config, trust_remote_code=trust_remote_code, **options).eval()
        ids = random_tokens(small, 2, 4 * size, first=1)
        whole = small(input_ids=ids, use_cache=False).logits
        with team.attention(small):
            shared = small(**team.share({"input_ids": ids}), use_cache=False).logits
    except Exception as error:  # any, from an architecture's own code; the same on every rank
        if which_memory(error):
            raise  # perhaps on this rank alone
        reason += f" ({type(error).__name__})"
    else:
        expected = whole.chunk(size, dim=1)[team.position()[1]]
        if distributed.max_over_ranks(distance(shared, expected)) < 1e-3:  # False for NaN
            return ""
        reason += " (recurrent layers, for example)"
    return f"sequence_parallel={size} for {model}: {reason}; {WAY_OUT}"
