"""Models over meta tensors (shapes without memory), cut down to few layers, with attention as a GPU allocates it, and
with what Liger's kernels keep: liger_kernel/ops (rms_norm.py, swiglu.py, geglu.py) and transformers/monkey_patch.py of
Liger-Kernel 0.6. Shape suffixes: B batch, N heads, T time, D head dim.
"""

import contextlib
import copy
import math
from collections.abc import Iterator
from typing import Literal

import torch
from peft import LoraConfig
from torch import nn
from torch.fx.experimental import _config as fx_config
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AttentionInterface,
    AttentionMaskInterface,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.masking_utils import sdpa_mask

from dsft.models.package import from_config
from dsft.models.size import ModelFacts, decoder_layers, without_zero_init
from dsft.models.tiles import tile_feed_forwards, tile_loss
from dsft.models.trained import adapted_for_a_look, select_trained, unwrapped
from dsft.runtime import patches

Attention = Literal["flash", "sdpa", "eager"]
"""flash: flash_attention_2, or sdpa where no mask is given. sdpa: sdpa with a mask (padding, sliding window). eager:
plain products.
"""


def attention_of(facts: ModelFacts, *, seq_len: int, masked: bool) -> Attention:
    """Returns what attention holds: transformers leaves sdpa's mask out only where a batch asks for none and no sliding
    window is reached.
    """
    if facts.attn_implementation != "sdpa":
        return "eager" if facts.attn_implementation == "eager" else "flash"
    window = getattr(facts.config.get_text_config(), "sliding_window", None)
    return "sdpa" if masked or (window and seq_len >= window) else "flash"


class FusedAttention(torch.autograd.Function):
    """Allocates what the CUDA kernels behind scaled_dot_product_attention allocate, and computes nothing.

    flash: aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp (mha_bwd: dq_accum in fp32, dk and dv for
    all query heads where heads share keys). With a mask, and in fp32, the memory-efficient kernel, which has no such
    buffers (attention_backward.cu).
    """

    @staticmethod
    def forward(ctx, query_BNTD, key_BNTD, value_BNTD, bias_B1TT):
        batch, heads, time, _ = query_BNTD.shape
        output_BTND = query_BNTD.new_zeros(batch, time, heads, value_BNTD.shape[-1])
        log_sums_BNT = query_BNTD.new_zeros(batch, heads, time, dtype=torch.float32)
        ctx.save_for_backward(query_BNTD, key_BNTD, value_BNTD, bias_B1TT, output_BTND, log_sums_BNT)
        return output_BTND

    @staticmethod
    def backward(ctx, gradient_BTND):
        query, key, value, bias, _output, log_sums = ctx.saved_tensors
        gradients = [torch.zeros_like(tensor) for tensor in (query, key, value)]
        workspace = [torch.zeros_like(log_sums)]
        if bias is None and query.dtype != torch.float32:
            workspace.append(torch.zeros_like(query, dtype=torch.float32))
            if key.shape[1] != query.shape[1]:
                workspace += [query.new_zeros((*query.shape[:-1], tensor.shape[-1])) for tensor in (key, value)]
        del workspace
        return *gradients, None


def _fused_attention(module, query, key, value, attention_mask, **_):
    """Do as transformers/integrations/sdpa_attention.py: a mask repeats keys and values, and is a bias."""
    groups = query.shape[1] // key.shape[1]
    if groups > 1 and attention_mask is not None:
        key, value = (
            tensor[:, :, None].expand(-1, -1, groups, -1, -1).reshape(tensor.shape[0], -1, *tensor.shape[2:])
            for tensor in (key, value)
        )
    bias = None
    if attention_mask is not None:
        bias = torch.zeros_like(attention_mask, dtype=query.dtype).masked_fill_(attention_mask.logical_not(), -math.inf)
    return FusedAttention.apply(query, key, value, bias), None


# A name with "flash" in it would make transformers look for that library.
_IMPLEMENTATIONS = {"flash": "dsft_traced_unmasked", "sdpa": "dsft_traced_masked", "eager": "eager"}
AttentionInterface.register(_IMPLEMENTATIONS["flash"], _fused_attention)
AttentionMaskInterface.register(_IMPLEMENTATIONS["flash"], lambda *args, **kwargs: None)
AttentionInterface.register(_IMPLEMENTATIONS["sdpa"], _fused_attention)
AttentionMaskInterface.register(_IMPLEMENTATIONS["sdpa"], sdpa_mask)


def meta_model(
    model_config: PreTrainedConfig,
    *,
    dtype: torch.dtype,
    attention: Attention,
    adapters: LoraConfig | None = None,
    patterns: tuple[tuple[str, ...], tuple[str, ...]] = ((), ()),
) -> PreTrainedModel:
    """Build the model on the meta device, adapted and frozen as dsft/models/build.py does, with the operators that
    `traced_model` traces; without towers where its language model has a class of its own.

    Args:
        patterns: of what is trained, and of what is frozen.
    """
    text = model_config.get_text_config()
    traced = copy.deepcopy(text if type(text) in MODEL_FOR_CAUSAL_LM_MAPPING else model_config)
    with without_zero_init(), torch.device("meta"):
        try:
            model = from_config(copy.deepcopy(traced), dtype=dtype, attn_implementation=_IMPLEMENTATIONS[attention])
        except KeyError:  # Falcon has a class of its own for each of transformers' names
            model = from_config(traced, dtype=dtype, attn_implementation="eager" if attention == "eager" else "sdpa")
        if adapters is not None:
            model = adapted_for_a_look(model, adapters)
    select_trained(model, *patterns)
    return model


def _autocast_as_on_a_cpu(autocast):
    return lambda device_type, **options: autocast("cpu" if device_type == "meta" else device_type, **options)


@contextlib.contextmanager
def traced_model(
    blueprint: PreTrainedModel,
    *,
    layers: list[int] | None = None,
    liger: bool = False,
    tile_rows: int | None = None,
    tiled_mlp: bool = False,
    zero_3: bool = False,
) -> Iterator[PreTrainedModel]:
    """Copy a `meta_model` for a trace, within what it needs to run.

    Args:
        layers: only these, a number twice being two layers alike; by default all.
        liger: with Liger's norms and feed-forwards of gate, up and down: what all architectures share of it.
        tile_rows: with the loss of tiles of so many rows.
        tiled_mlp: with the feed-forwards of some tokens at a time.
        zero_3: with the linear layers of ZeRO-3, which keep the inputs of frozen weights too (deepspeed/runtime/zero:
            linear.py; partition_parameters.py, _enable_mem_efficient_linear).
    """
    dtype, linear = blueprint.dtype, torch._C._nn.linear
    if zero_3:
        from deepspeed.runtime.zero.linear import zero3_linear_wrap as linear  # takes seconds
    if layers is None:
        model = copy.deepcopy(blueprint)
    else:  # the others are not copied
        there = decoder_layers(blueprint)
        kept = nn.ModuleList(copy.deepcopy(there[index]) for index in layers)
        for place, index in enumerate(layers):
            for module in kept[place].modules():
                if hasattr(module, "layer_dic"):  # Zamba 2 looks up its adapters by the layer's number
                    module.layer_dic = {place: module.layer_dic[index]}
        whole = [part for part in blueprint.modules() if isinstance(part, nn.ModuleList) and part[0] is there[0]]
        model = copy.deepcopy(blueprint, {id(part): kept for part in whole})  # which takes `kept` for a copy of them
        text = model.config.get_text_config()
        for name, values in _per_layer_lists(text).items():
            setattr(text, name, [values[index] for index in layers])
        text.num_hidden_layers = len(layers)
    if not model.get_input_embeddings().weight.requires_grad:
        # Only the first layer's input has no gradient (without checkpointing): all are counted as the others are.
        model.enable_input_require_grads()
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.device("meta"))
        stack.enter_context(patches.replaced("meta_is_traced", lambda _: lambda tensor: True))
        if unwrapped(blueprint).__module__.startswith("transformers."):
            # A mask chooses every position, the most that it can (GLM-5's pools of keys). A repository's own code may
            # choose the tokens of each expert so, and each would get all of them: it is not traced.
            stack.enter_context(fx_config.patch(meta_nonzero_assume_all_nonzero=True))
        stack.enter_context(patches.replaced("autocast_of_meta", _autocast_as_on_a_cpu))
        if dtype != torch.bfloat16:
            # transformers' own operator for where there are no grouped products keeps the same tensors.
            stack.enter_context(patches.replaced("grouped_products", lambda _: lambda *_: False))
        for parameter in model.parameters():  # as DeepSpeed gives it to adapters too
            parameter.data = parameter.data.to(dtype)
        for module in model.modules():
            if type(module) is nn.Linear:
                # Named here, since DeepSpeed leaves its own in torch.nn.functional of a process that has trained.
                module.forward = lambda hidden, *, layer=module: linear(hidden, layer.weight, layer.bias)
            elif isinstance(module, nn.Dropout):
                # As on a GPU, which keeps a mask of bools; a CPU keeps one in the activations' dtype.
                module.forward = lambda tensor, *, drop=module: (
                    torch.native_dropout(tensor, drop.p, drop.training)[0] if drop.p else tensor
                )
            elif liger and type(module).__name__.endswith("RMSNorm"):
                module.forward = lambda hidden, *, norm=module: _RMSNorm.apply(hidden, norm.weight)
            elif liger and all(hasattr(module, name) for name in ("gate_proj", "up_proj", "down_proj", "act_fn")):
                module.forward = lambda hidden, *, mlp=module: mlp.down_proj(
                    _GatedProduct.apply(mlp.gate_proj(hidden), mlp.up_proj(hidden))
                )
        if tile_rows and not tile_loss(model, rows=tile_rows):
            raise ValueError("its loss cannot be tiled")
        if tiled_mlp and not tile_feed_forwards(model):
            raise ValueError("it has no feed-forward that can be tiled")
        yield model.train()


def layer_kinds(blueprint: PreTrainedModel) -> list[list[int]]:
    """Group the layers that have, and train, the same parameters and of which the config's lists (layer_types ...) say
    the same.
    """
    lists = _per_layer_lists(blueprint.config.get_text_config())
    kinds: dict[tuple, list[int]] = {}
    for index, layer in enumerate(decoder_layers(blueprint)):
        shapes = tuple((name, tuple(p.shape), p.requires_grad) for name, p in layer.named_parameters())
        kinds.setdefault((shapes, *(str(values[index]) for values in lists.values())), []).append(index)
    if not kinds:
        raise ValueError("it has no layers that can be checkpointed")
    return list(kinds.values())


def _per_layer_lists(text: PreTrainedConfig) -> dict[str, list]:
    number = text.num_hidden_layers
    return {
        name: value
        for name, value in vars(text).items()
        # Llama 4's `moe_layers` names layers by their numbers: all of them in Scout.
        if isinstance(value, list) and len(value) == number and value != list(range(number))
    }


LIGER_MODELS = {
    *("exaone4", "falcon_h1", "gemma", "gemma2", "gemma3_text", "glm4", "gpt_oss", "granite", "hunyuan_v1_dense"),
    *("hunyuan_v1_moe", "llama", "llama4_text", "mistral", "mixtral", "olmo2", "olmo3", "phi3", "qwen2"),
    *("qwen3", "qwen3_moe", "qwen3_next", "smollm3"),
}
"""Language models that Liger has kernels for (MODEL_TYPE_TO_APPLY_LIGER_FN); in others it changes nothing."""


class _RMSNorm(torch.autograd.Function):
    """Keeps its input and one fp32 number per row; the gradient takes the place of the one that came, beside that of
    the norm's weight, which Liger makes in its backward.
    """

    @staticmethod
    def forward(ctx, hidden, weight):
        ctx.save_for_backward(hidden, hidden.new_zeros(hidden.shape[:-1], dtype=torch.float32))
        ctx.weight = weight
        return torch.empty_like(hidden)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, torch.empty_like(ctx.weight) if ctx.weight.requires_grad else None


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
