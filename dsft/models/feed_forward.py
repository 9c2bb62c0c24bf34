"""Computes the feed-forward of each layer for some tokens at a time (`tiled_mlp`), in the forward and in the backward.

Its activations are the largest of a layer: up to three times as wide as the hidden states or more, each held several
times in a backward. A tile's are computed again in its own backward, by torch's checkpointing, so those of one tile
exist at a time. Weights, gradients and what the layer returns stay as they are. DeepSpeed's TiledMLP does the same by
a backward of its own, which takes the names of three linear layers, and tells ZeRO of each tile's gradients; autograd
adds them up before ZeRO sees any.
"""

import functools

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from dsft.models.size import feed_forwards
from dsft.models.trained import unwrapped
from dsft.units import MLP_TILES


def tile_feed_forwards(model: nn.Module) -> bool:
    """Lets each feed-forward of `model` compute MLP_TILES parts of its tokens in turn; returns False where it has none.

    Under ZeRO-3 each is gathered as a whole: ranks whose rows have other lengths would else wait for one another.
    """
    modules = feed_forwards(unwrapped(model))
    for module in modules:
        if is_deepspeed_zero3_enabled():
            from deepspeed.utils import set_z3_leaf_module

            set_z3_leaf_module(module, True)
        plain = module.forward

        @functools.wraps(plain)
        def forward(*tensors_TH: torch.Tensor, plain=plain) -> torch.Tensor:
            """Of the hidden states [..., T, H], and of the residual where an architecture passes it along."""
            tiles = zip(*(tensor.flatten(0, -2)[None].chunk(MLP_TILES, dim=1) for tensor in tensors_TH), strict=True)
            parts = [checkpoint(plain, *tile, use_reentrant=False) for tile in tiles]
            return torch.cat(parts, dim=1).view(*tensors_TH[0].shape[:-1], -1)

        module.forward = forward
    return bool(modules)
