"""Which sequences share a row, so that rows are full; and whether a model can keep them apart in it.

Best fit: the longest first, and into each row what fills it best (after best-fit decreasing; Ding et al., "Fewer
Truncations Improve Language Modeling",
arXiv 2404.10830, section 3).
"""

import copy
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig

from dsft.data.sequences import Items, Sequence, Sequences
from dsft.errors import one_line
from dsft.models.size import empty_model
from dsft.units import padded_width


def best_fit(lengths: np.ndarray, room: int) -> list[np.ndarray]:
    """Rows of indices with at most `room` tokens each. Every length must be at most `room`.

    Works on the counts of each length, so that its time grows with the number of different lengths (after Krell et al.,
    arXiv 2107.02027, section 3).
    """
    order = np.argsort(lengths, kind="stable")
    sizes, used, counts = np.unique(lengths[order], return_index=True, return_counts=True)
    left, rows = counts.copy(), []
    while left.any():
        fullest = _fullest_row(sizes, left.copy(), room)
        kinds = np.flatnonzero(fullest)
        for _ in range(int((left[kinds] // fullest[kinds]).min())):
            rows.append(np.concatenate([order[used[kind] : used[kind] + fullest[kind]] for kind in kinds[::-1]]))
            used[kinds] += fullest[kinds]
            left[kinds] -= fullest[kinds]
    return rows


def _fullest_row(sizes: np.ndarray, left: np.ndarray, room: int) -> np.ndarray:
    """How many of each size: the largest that is left; then again and again the largest that fits, but the two that fit
    best where these fill the row better.

    Args:
        sizes: in order; `left` of each, which is changed.
    """
    row = np.zeros_like(left)
    while len(fitting := np.flatnonzero((left > 0) & (sizes <= room))):
        found = sizes[fitting]
        chosen = [fitting[-1]]
        if len(row.nonzero()[0]) and 2 * found[-1] >= room:
            partner = np.searchsorted(found, room - found, side="right") - 1
            partner -= (partner == np.arange(len(found))) & (left[fitting] == 1)
            pairs = np.where(partner >= 0, found + found[partner], 0)
            if pairs.max() > found[-1]:
                best = int(pairs.argmax())
                chosen = [fitting[best], fitting[partner[best]]]
        for kind in chosen:
            row[kind] += 1
            left[kind] -= 1
            room -= sizes[kind]
    return row


def batches_by_token_budget(lengths: np.ndarray, tokens: int) -> list[np.ndarray]:
    """Batches of sequences of like length that take, padded to a multiple of 8, at most `tokens`; a longer sequence is
    a batch of its own.
    """
    batches: list[list[int]] = []
    width = 0
    for index in np.argsort(-lengths, kind="stable").tolist():
        if not batches or (len(batches[-1]) + 1) * width > tokens:
            batches.append([])
            width = padded_width(int(lengths[index]))
        batches[-1].append(index)
    return [np.array(batch) for batch in batches]


class PackedRows(Items):
    """Items that are lists of sequences: those of a packed row, or of a batch filled by tokens."""

    def __init__(self, sequences: Sequences, groups: list[np.ndarray]):
        self.sequences, self.groups = sequences, groups
        self.lengths = np.array([sequences.lengths[group].sum() for group in groups])

    def __getitem__(self, index: int) -> list[Sequence]:
        return [self.sequences[i] for i in self.groups[index]]


@torch.no_grad()
def isolation_problem(
    config: PreTrainedConfig,
    *,
    attn_implementation: str | None,
    device: torch.device,
    dtype: torch.dtype,
    trust_remote_code: bool = False,
) -> str | None:
    """Why samples in one row would see each other in a model of this architecture; None where they do not.

    Tried out on a small model with random weights and as many layers as show every kind: changed tokens of a first
    sample must not change the logits of a
    second one in the same row, and those must be what the second sample gives alone.
    """
    options = {"attn_implementation": attn_implementation} if attn_implementation else {}
    try:
        small = _small(config)
        if (
            size := sum(
                parameter.numel() for parameter in empty_model(small, trust_remote_code=trust_remote_code).parameters()
            )
        ) > LARGEST_TRIED:
            return f"it cannot be tried with a small model of this architecture, which would have {size:,} parameters"
        model = (
            AutoModelForCausalLM.from_config(small, trust_remote_code=trust_remote_code, dtype=dtype, **options)
            .to(device)
            .eval()
        )
        first, second, alone = _tried(model)
    except (
        Exception
    ) as error:  # whatever an architecture's own code makes of sizes, or of positions, that it was not made for
        return (
            f"it cannot be tried with a small model of this architecture ({type(error).__name__}:"
            f" {one_line(error)[:200]})"
        )
    leaked, differs = (
        (first - other).abs().max().item() / max(alone.abs().max().item(), 1e-12) for other in (second, alone)
    )
    # Experts get other batches with other tokens, which changes the last bits.
    if not leaked <= (1e-5 if dtype == torch.float32 else 0):
        return f"tokens of one sample change the logits of the next one in the row (by {leaked:.1e} of the largest)"
    if not differs < (1e-4 if dtype == torch.float32 else 5e-2):
        return f"a sample's logits in a row differ from those alone by {differs:.1e} of the largest"
    return None


def _tried(model: nn.Module) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits of a second sample: after a first one, after the same with other tokens, and alone."""
    ids = torch.randint(
        model.config.get_text_config().vocab_size, (1, 48), generator=torch.Generator().manual_seed(0)
    ).to(model.device)
    other = torch.cat([ids[:, 1:20].flip(1), ids[:, :1], ids[:, 20:]], 1)
    first, second = (_packed_logits(model, tokens, [20, 28])[20:] for tokens in (ids, other))
    return first, second, _packed_logits(model, ids[:, 20:], [28])


def _packed_logits(model: nn.Module, ids: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """[T, V] float64."""
    return (
        model(
            input_ids=ids,
            use_cache=False,
            **positions(lengths, ids.device, flash="flash" in model.config._attn_implementation),
        )
        .logits[0]
        .double()
    )


def positions(lengths: list[int], device: torch.device | str = "cpu", *, flash: bool = False) -> dict[str, Any]:
    """What tells a model where the sequences of one row are: position_ids [1, T] that begin anew, from which
    transformers makes its block mask
    (masking_utils.find_packed_sequence_indices); with flash attention also the bounds, for its varlen form."""
    found: dict[str, Any] = {"position_ids": torch.cat([torch.arange(length) for length in lengths])[None].to(device)}
    if flash:
        bounds = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device=device)
        found |= {
            "cu_seq_lens_q": bounds,
            "cu_seq_lens_k": bounds,
            "max_length_q": max(lengths),
            "max_length_k": max(lengths),
        }
    return found


SMALL = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "n_embd": 64,
    "n_head": 4,
    "n_inner": None,
    "head_dim": 16,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "ffn_dim": 64,
    "word_embed_proj_dim": 64,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "rotary_dim": 16,
    "vocab_size_per_layer_input": 128,
}
LARGEST_TRIED = 100_000_000
"""Parameters; no architecture that SMALL knows comes near."""
LAYER_NAMES = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")


def _small(config: PreTrainedConfig) -> PreTrainedConfig:
    """The same architecture with narrow layers, few enough of them but one of each kind."""
    small = copy.deepcopy(config.get_text_config())
    heads = getattr(small, "num_attention_heads", None)
    key_heads = {1: 1, heads: SMALL["num_attention_heads"]}.get(
        getattr(small, "num_key_value_heads", None), SMALL["num_key_value_heads"]
    )
    kept = ["head_dim"] * hasattr(small, "qk_rope_head_dim")  # latent attention: it is derived
    for name, value in (SMALL | {"num_key_value_heads": key_heads}).items():
        if isinstance(vars(small).get(name), int) and name not in kept:
            setattr(small, name, value)
    small.pad_token_id = 0
    kinds = vars(small).get("layer_types")
    layers = max(2, *(kinds.index(kind) + 1 for kind in set(kinds))) if kinds else 2
    for name in LAYER_NAMES:
        if isinstance(getattr(small, name, None), int):
            setattr(small, name, min(layers, getattr(small, name)))
    if kinds:
        small.layer_types = kinds[:layers]
    return small
