"""Tries out whether a model can keep the samples of one row apart, and with which attention.

The trial runs a small model of the same architecture with random weights; it loads no weight.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.utils import is_flash_attn_2_available

from dsft.config.options import TrainConfig
from dsft.errors import one_line
from dsft.models.build import DTYPES
from dsft.models.small_model import TooLarge, one_thread, small_model
from dsft.runtime import distributed
from dsft.runtime.hardware import has_gpu


@dataclass(frozen=True, kw_only=True)
class Packing:
    """Whether and how samples share rows."""

    problem: str | None
    """Why they cannot, in this architecture."""
    attn_implementation: str | None
    """That can keep them apart; None for what transformers picks."""

    @property
    def flash(self) -> bool:
        return "flash" in (self.attn_implementation or "")


def try_packing(config: TrainConfig, model_config: PreTrainedConfig) -> Packing:
    """Picks flash attention where it is installed and keeps samples apart, else what options or transformers say."""
    asked = config.attn_implementation
    tries_flash = asked is None and has_gpu() and config.dtype != "float32" and is_flash_attn_2_available()
    for implementation in ["flash_attention_2", asked] if tries_flash else [asked]:
        on_gpu = "flash" in (implementation or "")
        problem = isolation_problem(
            model_config,
            attn_implementation=implementation,
            device=distributed.device() if on_gpu else torch.device("cpu"),
            dtype=DTYPES[config.dtype] if on_gpu else torch.float32,
            trust_remote_code=config.trust_remote_code,
        )
        if problem is None:
            break
    return Packing(problem=problem, attn_implementation=implementation)


@one_thread()
@torch.no_grad()
def isolation_problem(
    config: PreTrainedConfig,
    *,
    attn_implementation: str | None,
    device: torch.device,
    dtype: torch.dtype,
    trust_remote_code: bool = False,
) -> str | None:
    """Says why samples in one row would see each other in a model of this architecture; None where they do not.

    Tried out on a small model with random weights and as many layers as show every kind: changed tokens of a first
    sample must not change the logits of a second one in the same row, and those must be what the second gives alone.
    """
    options = {"attn_implementation": attn_implementation} if attn_implementation else {}
    try:
        model = small_model(config, dtype=dtype, trust_remote_code=trust_remote_code, **options)
        first, second, alone = _try_row(model.to(device).eval())
    except TooLarge as error:
        return f"it cannot be tried with a small model of this architecture, which would have {error}"
    except Exception as error:  # whatever an architecture's own code makes of sizes or positions it was not made for
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


def _try_row(model: nn.Module) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Computes logits of a second sample: after a first one, after the same with other tokens, and alone."""
    vocab_size = model.config.get_text_config().vocab_size
    ids = torch.randint(vocab_size, (1, 48), generator=torch.Generator().manual_seed(0)).to(model.device)
    other = torch.cat([ids[:, 1:20].flip(1), ids[:, :1], ids[:, 20:]], 1)
    first, second = (_packed_logits(model, tokens, [20, 28])[20:] for tokens in (ids, other))
    return first, second, _packed_logits(model, ids[:, 20:], [28])


def _packed_logits(model: nn.Module, ids: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """Computes logits [T, V] float64 of one row."""
    flash = "flash" in model.config._attn_implementation
    return model(input_ids=ids, use_cache=False, **positions(lengths, ids.device, flash=flash)).logits[0].double()


def positions(lengths: list[int], device: torch.device | str = "cpu", *, flash: bool = False) -> dict[str, Any]:
    """Makes what tells a model where the sequences of one row are.

    position_ids [1, T] restart at each; from them transformers makes its block mask
    (masking_utils.find_packed_sequence_indices). Flash attention also gets the bounds, for its varlen form.
    """
    position_ids = torch.cat([torch.arange(length) for length in lengths])[None].to(device)
    if not flash:
        return {"position_ids": position_ids}
    bounds, longest = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device=device), max(lengths)
    return {
        "position_ids": position_ids,
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds,
        "max_length_q": longest,
        "max_length_k": longest,
    }
