"""What Liger's kernels keep instead of transformers' own operators, for the trace: no GPU is needed, nothing computed.

Source: liger_kernel/ops (rms_norm.py, swiglu.py, geglu.py) and transformers/monkey_patch.py of Liger-Kernel 0.6.
"""

import functools

import torch
from torch import nn
from transformers import PreTrainedModel

MODEL_TYPES = {
    "exaone4",
    "falcon_h1",
    "gemma",
    "gemma2",
    "gemma3_text",
    "glm4",
    "gpt_oss",
    "granite",
    "hunyuan_v1_dense",
    "hunyuan_v1_moe",
    "llama",
    "llama4_text",
    "mistral",
    "mixtral",
    "olmo2",
    "olmo3",
    "phi3",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "qwen3_next",
    "smollm3",
}
"""Language models that Liger has kernels for (MODEL_TYPE_TO_APPLY_LIGER_FN); in others it changes nothing."""


class _RMSNorm(torch.autograd.Function):
    """Keeps its input and one fp32 number per row; the gradient takes the place of the one that came."""

    @staticmethod
    def forward(ctx, hidden):
        ctx.save_for_backward(hidden, hidden.new_zeros(hidden.shape[:-1], dtype=torch.float32))
        return torch.empty_like(hidden)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class _GatedProduct(torch.autograd.Function):
    """Keeps both factors; their gradients take their place."""

    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        return torch.empty_like(gate)

    @staticmethod
    def backward(ctx, gradient):
        gate, up = ctx.saved_tensors
        return gate, up


class _Scaled(torch.autograd.Function):
    """The gradient of a norm's weight, which Liger makes in its backward."""

    @staticmethod
    def forward(ctx, normalised, weight):
        ctx.weight = weight
        return normalised.view_as(normalised)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, torch.empty_like(ctx.weight) if ctx.weight.requires_grad else None


def _normalise(norm: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    return _Scaled.apply(_RMSNorm.apply(hidden), norm.weight)


def _feed_forward(mlp: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    return mlp.down_proj(_GatedProduct.apply(mlp.gate_proj(hidden), mlp.up_proj(hidden)))


def take_over(model: PreTrainedModel) -> None:
    """Puts these operators into a model over fake tensors, as far as Liger does and all architectures share them: norms
    and feed-forwards of gate, up and down.
    """
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = functools.partial(_normalise, module)
        elif all(hasattr(module, name) for name in ("gate_proj", "up_proj", "down_proj", "act_fn")):
            module.forward = functools.partial(_feed_forward, module)
