"""Tries out whether padding on the right must be masked in a model.

In a causal model no token sees the padding after it, and labels leave it out of the loss. Without a mask
scaled_dot_product_attention takes its fast kernels and does not copy grouped keys. Some architectures need the mask all
the same: where it decides positions, or how experts are balanced.

The trial runs a small model of the same architecture with random weights; it loads no weight.
"""

import torch
from torch import nn
from transformers import PreTrainedConfig

from dsft.models.row_rules import length_limits
from dsft.models.size import ModelFacts
from dsft.models.small_model import one_thread, small_model
from dsft.units import IGNORED

LENGTHS = (16, 11, 5)
"""Tokens of the rows of the trial, which are padded to the longest."""
NOISE = 1e-5
"""Of loss and gradients: with a mask gradients of grouped keys are added in another order, and with other padding those
of experts."""


def needs_mask(facts: ModelFacts, *, trust_remote_code: bool = False) -> bool:
    """Tells whether a training of this model is given an attention mask with padded batches.

    Flash attention is, since it leaves padding out. Other kinds than sdpa have nothing to gain.
    """
    if facts.attn_implementation != "sdpa":
        return True
    return not ignores_padding(facts.config, trust_remote_code=trust_remote_code)


@one_thread()
def ignores_padding(
    config: PreTrainedConfig,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    noise: float = NOISE,
    trust_remote_code: bool = False,
) -> bool:
    """Tells whether loss and all gradients are the same with a mask, and without one whatever stands in the padding."""
    options = {"dtype": dtype, "trust_remote_code": trust_remote_code, "attn_implementation": "sdpa"}
    try:
        model = small_model(config, **options).to(device).eval()
        masked, unmasked, other = (
            _loss_and_gradients(model, pad=pad, masked=masked) for pad, masked in ((1, True), (1, False), (2, False))
        )
    except Exception:  # whatever an architecture's own code makes of sizes that it was not made for
        return False
    runs = zip(masked, unmasked, other, strict=True)
    return all(_close(tensor, reference, noise) for reference, *others in runs for tensor in others)


def _close(tensor: torch.Tensor, reference: torch.Tensor, noise: float) -> bool:
    return bool((tensor - reference).abs().max() <= noise * reference.abs().max())


def _loss_and_gradients(model: nn.Module, *, pad: int, masked: bool) -> list[torch.Tensor]:
    """Computes the loss of padded rows and the gradients of all parameters."""
    lengths = torch.tensor(LENGTHS).clamp(max=min([max(LENGTHS), *length_limits(model.config)]))[:, None]
    shape = (len(lengths), int(lengths.max()))
    vocab_size = model.config.get_text_config().vocab_size
    ids_BT = torch.randint(3, vocab_size, shape, generator=torch.Generator().manual_seed(0))
    padding_BT = torch.arange(shape[1]) >= lengths
    ids_BT, padding_BT = ids_BT.to(model.device), padding_BT.to(model.device)
    mask = {"attention_mask": (~padding_BT).long()} if masked else {}
    model.zero_grad()
    loss = model(
        input_ids=ids_BT.masked_fill(padding_BT, pad),
        labels=ids_BT.masked_fill(padding_BT, IGNORED),
        use_cache=False,
        **mask,
    ).loss
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
