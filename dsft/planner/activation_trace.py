"""Activation bytes of a model that transformers builds, from one forward and backward over fake tensors: shapes only,
no memory, no GPU.

Few layers are traced and the rest is extrapolated (every layer of a kind keeps the same bytes), so a model of any size
takes seconds.
Storages are counted as autograd and the Python code hold and free them. Weights, their gradients and the token ids are
left out. What a
CUDA kernel needs inside (workspace of a matrix product, a rounded-up length) is left out too, but for attention, whose
kernels are
stood in for by `FusedAttention`, since a CPU build of torch has none of them.

Shape suffixes: B batch, N heads, T time, D head dim.
"""

import contextlib
import copy
import functools
import math
import weakref
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Literal
from unittest import mock

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.integrations import moe
from transformers.masking_utils import sdpa_mask
from transformers.modeling_layers import GradientCheckpointingLayer

Attention = Literal["flash", "sdpa", "eager"]
"""flash: flash_attention_2, or sdpa where no mask is given. sdpa: sdpa with a mask (padding, sliding window). eager:
plain products.
"""


class StorageLog(TorchDispatchMode):
    """Notes when storages appear and vanish while it is active; works on fake and on real tensors.

    Args:
        known: tensors that are not counted (weights, buffers, inputs).
        gradient_shape: a tensor of this shape made after `mark("loss")` is a gradient of the (tied) embedding, and is
            not counted.
    """

    def __init__(self, known: list[torch.Tensor], gradient_shape: torch.Size):
        super().__init__()
        self.gradient_shape = gradient_shape
        self.indices: dict[int, int] = {tensor.untyped_storage()._cdata: -1 for tensor in known}
        """Living storage -> its number, in order of appearance; -1 where it is not counted."""
        self.events: list[tuple[int, int]] = []
        """(number of a storage, bytes that appeared; negative where they vanished)."""
        self.gradients: set[int] = set()
        self.marks: dict[str, int] = {}
        self.references: dict[int, weakref.ref] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor):
                self._see(tensor)
        return output

    def _see(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address in self.indices:
            return
        index, num_bytes = len(self.events), storage.nbytes()
        self.indices[address] = index
        self.events.append((index, num_bytes))
        if "loss" in self.marks and tensor.shape == self.gradient_shape:
            self.gradients.add(index)
        self.references[address] = weakref.ref(storage, lambda _: self._forget(address, index, num_bytes))

    def _forget(self, address: int, index: int, num_bytes: int) -> None:
        self.events.append((index, -num_bytes))
        del self.indices[address], self.references[address]

    def mark(self, name: str) -> None:
        """The moment is called `name`; the first time counts."""
        self.marks.setdefault(name, len(self.events))

    def leave_out(self, gradient: torch.Tensor) -> None:
        """Hook for parameters: what arrives there is a gradient, not an activation."""
        self.gradients.add(self.indices[gradient.untyped_storage()._cdata])

    def bytes_of(self, numbers: Collection[int], *, alive_at: str) -> int:
        """Bytes of these storages at the mark."""
        return sum(change for index, change in self.events[: self.marks[alive_at]] if index in numbers)

    def live_bytes(self) -> list[int]:
        """Bytes alive after each event, without gradients."""
        alive, series = 0, [0]
        for index, change in self.events:
            alive += 0 if index in self.gradients else change
            series.append(alive)
        return series


class FusedAttention(torch.autograd.Function):
    """Allocates what the CUDA kernels behind scaled_dot_product_attention allocate, and computes nothing.

    flash: aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp (mha_bwd: dq_accum in fp32, dk and dv for all
        query heads where
    heads share keys). With a mask, and in fp32, the memory-efficient kernel, which has no such buffers
    (attention_backward.cu).
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


def _flash_attention(module, query, key, value, attention_mask, **_):
    return FusedAttention.apply(query, key, value, None), None


def _masked_attention(module, query, key, value, attention_mask, **_):
    """transformers/integrations/sdpa_attention.py repeats keys and values where there is a mask; torch turns a bool
    mask into one of the query's dtype, in every layer.
    """
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
AttentionInterface.register(_IMPLEMENTATIONS["flash"], _flash_attention)
AttentionMaskInterface.register(_IMPLEMENTATIONS["flash"], lambda *args, **kwargs: None)
AttentionInterface.register(_IMPLEMENTATIONS["sdpa"], _masked_attention)
AttentionMaskInterface.register(_IMPLEMENTATIONS["sdpa"], sdpa_mask)


def _dropout_of_cuda(dropout: nn.Dropout, tensor: torch.Tensor) -> torch.Tensor:
    """Keeps a mask of bools, as on a GPU; a CPU keeps one in the activations' dtype."""
    return torch.native_dropout(tensor, dropout.p, dropout.training)[0] if dropout.p else tensor


@dataclass(frozen=True, kw_only=True)
class StepTrace:
    """Bytes of one forward and backward of a micro batch, above weights, gradients and token ids."""

    kept: int
    """What embedding and layers made and autograd still holds when the loss is known, without the last layer's output
    (that is `head`'s).
    """
    head: int
    """The most above `kept` from the last layer's output until its gradient is there: final norm, logits, loss and
    their backward.
    """
    layers: int
    """The most above `kept` before and after that: the forward of a layer, or its (recompute and) backward."""


def trace_step(model: PreTrainedModel, *, batch: int, seq_len: int, attention: Attention) -> StepTrace:
    """One training step of `model` as the Trainer runs it: outputs are dropped before the backward.

    `model` holds fake tensors where this is called within `fake_model`'s context, and may as well be real.
    """
    ids_BT = torch.zeros(batch, seq_len, dtype=torch.long)
    mask_BT = None if attention == "flash" else torch.ones_like(ids_BT)
    embedding = model.get_input_embeddings().weight
    log = StorageLog(
        [*model.parameters(), *model.buffers(), ids_BT, *([] if mask_BT is None else [mask_BT])], embedding.shape
    )
    last_layer = _layers(model)[-1]
    last_output = []

    def at_last_layer(module, args, output):
        hidden_BTH = output[0] if isinstance(output, tuple) else output
        last_output.append(log.indices[hidden_BTH.untyped_storage()._cdata])
        log.mark("head")
        hidden_BTH.register_hook(lambda gradient: log.mark("layers"))

    handles = [last_layer.register_forward_hook(at_last_layer)]
    handles += [parameter.register_hook(log.leave_out) for parameter in model.parameters() if parameter.requires_grad]
    with log:
        loss = model(input_ids=ids_BT, attention_mask=mask_BT, labels=ids_BT, use_cache=False).loss
        log.mark("loss")
        loss.backward()
    for handle in handles:
        handle.remove()
    model.zero_grad()
    live = log.live_bytes()
    head, layers = log.marks["head"], log.marks["layers"]
    kept = log.bytes_of(range(head), alive_at="loss") - log.bytes_of(last_output, alive_at="loss")
    return StepTrace(
        kept=kept, head=max(live[head : layers + 1]) - kept, layers=max(live[:head] + live[layers:]) - kept
    )


def trace_forward(model: PreTrainedModel, *, batch: int, seq_len: int, attention: Attention) -> int:
    """Peak bytes of the backbone without gradients, as `perplexity.score` calls it (the head on one position only)."""
    ids_BT = torch.zeros(batch, seq_len, dtype=torch.long)
    mask_BT = None if attention == "flash" else torch.ones_like(ids_BT)
    log = StorageLog(
        [*model.parameters(), *model.buffers(), ids_BT, *([] if mask_BT is None else [mask_BT])], torch.Size()
    )
    model.eval()
    with torch.no_grad(), log:
        model(input_ids=ids_BT, attention_mask=mask_BT, use_cache=False, logits_to_keep=1)
    model.train()
    return max(log.live_bytes())


def _layers(model: PreTrainedModel) -> list[nn.Module]:
    """The decoder layers: transformers makes all of them of this class."""
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


@contextlib.contextmanager
def fake_model(
    model_config: PreTrainedConfig,
    *,
    dtype: torch.dtype,
    attention: Attention,
    adapters: LoraConfig | None = None,
    checkpointing: bool = False,
    layers: list[int] | None = None,
) -> Iterator[PreTrainedModel]:
    """The model over fake tensors, set up as dsft/models/build.py and the Trainer do, within the mode that it runs in.

    Args:
        layers: only these, a number twice being two layers alike; by default all.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            copy.deepcopy(model_config.get_text_config()), dtype=dtype, attn_implementation=_IMPLEMENTATIONS[attention]
        )
        if layers is not None:
            _keep_layers(model, layers)
        if adapters is not None:
            model = get_peft_model(model, copy.deepcopy(adapters))
            model.enable_input_require_grads()
    if checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    with contextlib.ExitStack() as stack:
        stack.enter_context(FakeTensorMode())
        if dtype != torch.bfloat16:
            # torch knows the shapes of grouped products in bf16 only; transformers' own operator for where there are
            # none keeps the same tensors.
            stack.enter_context(mock.patch.object(moe, "_can_use_grouped_mm", lambda *_: False))
        _leave_meta(model, dtype)
        yield model.train()


def _leave_meta(model: nn.Module, dtype: torch.dtype) -> None:
    """Meta tensors become fake ones "on a CPU", tied weights staying tied: transformers asks meta tensors for values,
    and peft cannot move fake parameters.

    Parameters get `dtype`, as DeepSpeed gives it to all of them, adapters included.
    """
    made: dict[int, torch.Tensor] = {}
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.forward = functools.partial(_dropout_of_cuda, module)
        for name, parameter in module._parameters.items():
            if parameter is not None:
                fake = made.setdefault(
                    id(parameter),
                    nn.Parameter(torch.empty(parameter.shape, dtype=dtype), requires_grad=parameter.requires_grad),
                )
                module._parameters[name] = fake
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)


def layer_kinds(model_config: PreTrainedConfig) -> list[list[int]]:
    """The layers, those together that have the same parameters and of which the config's lists (layer_types ...) say
    the same.
    """
    text = copy.deepcopy(model_config.get_text_config())
    with torch.device("meta"):
        layers = _layers(AutoModelForCausalLM.from_config(text))
    lists = _per_layer_lists(text)
    kinds: dict[tuple, list[int]] = {}
    for index, layer in enumerate(layers):
        shapes = tuple((name, tuple(parameter.shape)) for name, parameter in layer.named_parameters())
        kinds.setdefault((shapes, *(str(values[index]) for values in lists.values())), []).append(index)
    return list(kinds.values())


def _keep_layers(model: PreTrainedModel, layers: list[int]) -> None:
    """Cut `model` and its config down to these layers."""
    there, text = _layers(model), model.config.get_text_config()
    kept = nn.ModuleList(copy.deepcopy(there[index]) for index in layers)
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if isinstance(child, nn.ModuleList) and child[0] is there[0]:
                parent._modules[name] = kept
    for name, values in _per_layer_lists(text).items():
        setattr(text, name, [values[index] for index in layers])
    text.num_hidden_layers = len(layers)


def _per_layer_lists(text: PreTrainedConfig) -> dict[str, list]:
    return {
        name: value
        for name, value in vars(text).items()
        if isinstance(value, list) and len(value) == text.num_hidden_layers
    }


@dataclass(frozen=True, kw_only=True)
class ModelTrace:
    """Bytes of one micro batch, for the whole model."""

    once: int
    """Held besides the layers' own: embedding output, rotary angles, mask."""
    layers_saved: int
    """Saved by all layers without checkpointing."""
    layers_input: int
    """Kept by all layers with checkpointing."""
    layer_transient: int
    """The most that one layer needs in its recompute and backward, with checkpointing."""
    layer_backward: int
    """The most that one layer needs in its backward without checkpointing, above what is saved."""
    head: int
    forward: int
    """Peak of the backbone without gradients."""

    def peak_bytes(self, checkpointing: bool) -> int:
        """The head's peak and that of a layer's backward come at different moments, both while all layers hold
        theirs.
        """
        if checkpointing:
            return self.once + self.layers_input + max(self.head, self.layer_transient)
        return self.once + self.layers_saved + max(self.head, self.layer_backward)


def trace_model(
    model_config: PreTrainedConfig,
    *,
    batch: int,
    seq_len: int,
    dtype: torch.dtype,
    attention: Attention,
    adapters: LoraConfig | None = None,
) -> ModelTrace:
    """Traces two and three layers of each kind and adds up as many as there are."""
    saved = kept_inputs = transient = backward = head = once = forward = 0
    options = {"dtype": dtype, "attention": attention, "adapters": adapters}
    shape = {"batch": batch, "seq_len": seq_len, "attention": attention}
    for layers in layer_kinds(model_config):
        steps = {}
        for number in (2, 3):
            for checkpointing in (False, True):
                with fake_model(
                    model_config, layers=layers[:1] * number, checkpointing=checkpointing, **options
                ) as model:
                    steps[number, checkpointing] = trace_step(model, **shape)
                    if number == 3 and not checkpointing:
                        forward = max(forward, trace_forward(model, **shape))
        one_saved, one_input = (steps[3, choice].kept - steps[2, choice].kept for choice in (False, True))
        saved += len(layers) * one_saved
        kept_inputs += len(layers) * one_input
        once += steps[2, True].kept - 2 * one_input  # rotary angles and masks are a kind's own
        transient = max(transient, steps[2, True].layers)
        backward = max(backward, steps[2, False].layers)
        head = max(head, steps[2, True].head)
    return ModelTrace(
        once=once,
        layers_saved=saved,
        layers_input=kept_inputs,
        layer_transient=transient,
        layer_backward=backward,
        head=head,
        forward=forward,
    )
