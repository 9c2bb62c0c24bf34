"""Says which rows of tokens may share a batch, and finds models in which tokens see later ones.

Perplexity and training need both: no token sees what comes after it, and a row's logits do not depend on its neighbours
in the batch. Some architectures break the first (encoders such as BERT), some the second.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedConfig

from dsft.errors import UserError
from dsft.models.size import max_positions
from dsft.models.small_model import one_thread, small_model, text_problem
from dsft.runtime import distributed
from dsft.runtime.console import say
from dsft.units import padded_width

LONGEST_TRIED = 16
"""Tokens of a trial's rows; the logits of the first half are compared."""


@dataclass(frozen=True, kw_only=True)
class RowRules:
    """Says which rows may share a batch without changing each other's logits."""

    limits: tuple[int, ...] = ()
    """Lengths beyond which the model computes otherwise, or not at all, ascending. A batch lies on one side of each,
    with its padding."""
    alone: bool = False
    """Every row is a batch of its own, without padding."""
    multiple: int = 1
    """Every batch is padded to a multiple of this length, also alone, and beyond a limit where there is no other."""

    def joined(self, other: "RowRules") -> "RowRules":
        """Return the rules of two models that see the same batches."""
        return RowRules(limits=tuple(sorted({*self.limits, *other.limits})), alone=self.alone or other.alone)

    def width(self, longest: int) -> int:
        """Return the padded length of a batch, of at least one token: a document of one token feeds none."""
        longest = max(1, int(longest))
        shortest = -(-longest // self.multiple) * self.multiple
        if self.alone:
            return shortest
        limits = [limit for limit in self.limits if limit >= longest]
        width = min([padded_width(longest), *limits])
        width = -(-width // self.multiple) * self.multiple
        return shortest if any(limit < width for limit in limits) else width

    def share(self, longest: int, length: int) -> bool:
        """Tell whether a row of `length` may join a batch whose longest row has `longest`."""
        return not self.alone and not any(length <= limit < longest for limit in self.limits)

    def sides(self, lengths: np.ndarray) -> np.ndarray:
        """Count the limits below each length: where the numbers are the same, rows may share a batch."""
        return np.searchsorted(self.limits, lengths)


NO_RULES = RowRules()


def length_limits(config: PreTrainedConfig) -> tuple[int, ...]:
    """Return the lengths beyond which a model of `config` computes otherwise, or not at all.

    transformers takes the factors of a longrope by the longest row of a batch, and grows a dynamic RoPE with it
    (modeling_rope_utils.py, dynamic_rope_update).
    """
    text = config.get_text_config()
    limits = {max_positions(text)}
    longrope = rope_types(text).get("longrope")
    if longrope:
        limits.add(longrope.get("original_max_position_embeddings"))
    return tuple(sorted(limit for limit in limits if limit))


def rope_types(text: PreTrainedConfig) -> dict[str, dict]:
    """Return rope_type -> its parameters, of all kinds of layers."""
    rope = getattr(text, "rope_parameters", None) or {}
    sections = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    return {section["rope_type"]: section for section in sections if "rope_type" in section}


@torch.no_grad()
def row_rules(model: nn.Module) -> RowRules:
    """Find the rules of a loaded model, from its config and by a trial. Collective.

    Raises:
        UserError: where its tokens see later ones.
    """
    later, neighbour = (distributed.max_over_ranks(value) for value in _differences(model))
    # Quantised products may round the inputs too (LLM.int8() by the rows of a batch).
    in_full = next(model.parameters()).dtype == torch.float32 and not getattr(model, "is_quantized", False)
    if later > (1e-4 if in_full else 0.2):
        raise UserError([not_causal(model.config.name_or_path or model.config.model_type)])
    noise = 1e-5 if in_full else 5e-2  # rounding, where experts get other batches
    alone = max(later, neighbour) > noise
    if alone:
        say("note: rows of a batch change each other's logits in this architecture; each is a batch of its own")
    return RowRules(limits=length_limits(model.config), alone=alone)


def not_causal(model: str) -> str:
    return (
        f"model={model}: its tokens see later ones, as an encoder's do, so it predicts nothing; a causal language model"
        " is needed (some architectures become one with is_decoder: true in their config)"
    )


def architecture_problems(model: str, config: PreTrainedConfig, *, trust_remote_code: bool = False) -> list[str]:
    """Say why an architecture can be neither trained nor scored on text, by trials of a small model.

    Args:
        model: its name, for the message.
    """
    if why := text_problem(config, trust_remote_code=trust_remote_code):
        return [f"model={model}: {why}"]
    return [not_causal(model)] if sees_later_tokens(config, trust_remote_code=trust_remote_code) else []


@one_thread()
def sees_later_tokens(config: PreTrainedConfig, *, trust_remote_code: bool = False) -> bool:
    """Tell whether tokens see later ones in this architecture, tried out on a small model with random weights.

    False where no small model can be built.
    """
    try:
        model = small_model(config, trust_remote_code=trust_remote_code).eval()
        later, _ = _differences(model)
    except Exception:  # whatever an architecture's own code makes of sizes that it was not made for
        return False
    return later > 1e-5


@torch.no_grad()
def _differences(model: nn.Module) -> tuple[float, float]:
    """Return by how much later tokens, and other rows of a batch, move a row's logits, as parts of the largest."""
    text = model.config.get_text_config()
    length = min([LONGEST_TRIED, *length_limits(model.config)])
    ids = torch.randint(text.vocab_size, (2, length), generator=torch.Generator().manual_seed(0))
    ids = ids.to(next(model.parameters()).device)
    later, neighbour = ids.clone(), ids.clone()
    later[0, length // 2 :] = ids[1, length // 2 :]
    neighbour[1] = ids[1].flip(0)
    first, *others = (
        model(input_ids=rows, use_cache=False).logits[0, : length // 2].double() for rows in (ids, later, neighbour)
    )
    return tuple(((first - other).abs().max() / first.abs().max().clamp(min=1e-12)).item() for other in others)
