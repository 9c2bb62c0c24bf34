"""Refuses what cannot be scored with windows spread over ranks, before weights are loaded.

Ulysses exchanges tokens in attention alone and drops masks. So a model must let tokens meet nowhere else, which is
tried on a small one with random weights, and its attention must see all tokens before.
"""

import torch
from transformers import PreTrainedConfig

from dsft.models.row_rules import rope_types
from dsft.models.size import ModelFacts
from dsft.models.small_model import small_model
from dsft.perplexity.candidates import Candidate
from dsft.perplexity.sequence_parallel import team_of
from dsft.planner.job import attention_of
from dsft.planner.ulysses import refused_heads
from dsft.runtime import distributed

WHOLE_ATTENTION = ("full_attention", "sliding_attention")
"""Kinds of layers that Ulysses can compute."""
MOVING_ROPES = ("longrope", "dynamic")
"""transformers chooses their angles by the largest position of a rank, which each rank has another of."""


def refused_models(candidates: list[Candidate]) -> list[str]:
    """List why windows of models cannot be spread over ranks, as the options ask. Collective."""
    reasons = [
        refused_model(
            candidate.facts,
            size=candidate.config.sequence_parallel,
            seq_len=max(config.seq_len for config in candidate.configs()),
            model=candidate.config.model,
            trust_remote_code=candidate.config.trust_remote_code,
        )
        for candidate in candidates
        if candidate.config.sequence_parallel > 1
    ]
    return [reason for reason in reasons if reason]


def refused_model(facts: ModelFacts, *, size: int, seq_len: int, model: str, trust_remote_code: bool = False) -> str:
    """Say why windows of `model` cannot be spread over `size` ranks; empty where they can. Collective."""
    text, where = facts.config.get_text_config(), f"sequence_parallel={size} for {model}"
    reason = _other_layers(text) or _tried(facts.config, size, trust_remote_code=trust_remote_code)
    if reason:
        return f"{where}: {reason}; leave sequence_parallel out, the model works with one rank for each window"
    implementation = facts.attn_implementation
    if implementation != "sdpa" and "flash" not in implementation:
        return f"{where}: attn_implementation {implementation} is not supported; use sdpa or flash_attention_2"
    heads = refused_heads(facts.size, size=size, world=distributed.world_size())
    if heads:
        return f"{where}: {heads}"
    if attention_of(facts, seq_len=seq_len, masked=False) != "flash":
        return (
            f"{where}: a sliding window of {text.sliding_window:,} tokens needs a mask with sdpa, which Ulysses drops;"
            f" use attn_implementation flash_attention_2, or seq_len below {text.sliding_window:,}"
        )
    positions = facts.size.max_positions
    if positions and -(-seq_len // size) * size > positions:
        return (
            f"{where}: windows are padded to a multiple of {size}, and the model has {positions:,} positions; use"
            f" seq_len {positions // size * size:,} or less"
        )
    return ""


def _other_layers(text: PreTrainedConfig) -> str:
    others = sorted(set(getattr(text, "layer_types", None) or ()) - set(WHOLE_ATTENTION))
    if others:
        return f"its layers of kind {', '.join(others)} pass tokens on outside of attention, or need a mask"
    moving = [kind for kind in MOVING_ROPES if kind in rope_types(text)]
    return f"its rotary angles ({moving[0]}) depend on the longest position that a rank sees" if moving else ""


@torch.no_grad()
def _tried(config: PreTrainedConfig, size: int, *, trust_remote_code: bool) -> str:
    """Compare a small model's logits on all positions with those of shares; why they differ, else empty."""
    team = team_of(size)
    unlike = f"{config.get_text_config().model_type} computes otherwise when its tokens are spread over ranks"
    try:
        options = {"trust_remote_code": trust_remote_code, "attn_implementation": "sdpa"}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = small_model(config, heads=2 * size, **options).eval()
        ids = torch.randint(1, 100, (2, 4 * size), generator=torch.Generator().manual_seed(0))
        model, ids = model.to(distributed.device()), ids.to(distributed.device())
        whole = model(input_ids=ids, use_cache=False).logits
        with team.attention(model):
            shared = model(**team.share({"input_ids": ids}), use_cache=False).logits
    except torch.OutOfMemoryError:
        raise  # of this rank alone, perhaps
    except Exception as error:  # whatever an architecture's own code makes of it; the same on every rank
        return f"{unlike} ({type(error).__name__})"
    expected = whole.chunk(size, dim=1)[team.place]
    difference = ((shared - expected).abs().max() / whole.abs().max().clamp(min=1e-12)).item()
    is_same = distributed.max_over_ranks(difference) < 1e-3
    return "" if is_same else f"{unlike} (recurrent layers, for example)"
