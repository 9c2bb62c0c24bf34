"""One forward and backward of the real model over meta tensors: shapes only, no memory, no GPU. Which bytes are alive?

Two layers of each kind are traced, and the second is counted as often as there are some, so a model of any size takes
seconds. Storages are counted as autograd and the Python code hold and free them. Left out: weights, their gradients,
token ids, and what a CUDA kernel needs inside, but for attention, which allocates here as it does on a GPU, and for
what Liger's kernels keep: liger_kernel/ops (rms_norm.py, swiglu.py, geglu.py) and transformers/monkey_patch.py of
Liger-Kernel 0.6. Shape suffixes: B batch, N heads or rows, T time, D head dim, H hidden, V vocab.
"""

import contextlib
import copy
import functools
import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from peft import LoraConfig
from torch import nn
from torch.fx.experimental import _config as fx_config
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
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
from dsft.models.tiles import own_nats_of, tile_feed_forwards, tile_loss
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
    layers: Sequence[int],
    *,
    liger: bool = False,
    tile_rows: int | None = None,
    tiled_mlp: bool = False,
    zero_3: bool = False,
) -> Iterator[PreTrainedModel]:
    """Copy a `meta_model` for a trace, within what it needs to run.

    Args:
        layers: only these, a number twice being two layers alike.
        liger: with Liger's norms and feed-forwards of gate, up and down: what all architectures share of it.
        tile_rows: with the loss of tiles of so many rows.
        tiled_mlp: with the feed-forwards of some tokens at a time.
        zero_3: with the linear layers of ZeRO-3, which keep the inputs of frozen weights too (deepspeed/runtime/zero:
            linear.py; partition_parameters.py, _enable_mem_efficient_linear).
    """
    dtype, linear = blueprint.dtype, torch._C._nn.linear
    if zero_3:
        from deepspeed.runtime.zero.linear import zero3_linear_wrap as linear  # takes seconds
    # The other layers are not copied.
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


aten = torch.ops.aten
PRODUCTS = {aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten._grouped_mm}
"""Products of matrices: their time is that of their arithmetic, not of the memory they read."""


class TooManyOperators(Exception):
    """A trace takes more operators than it may."""


class StorageLog(TorchDispatchMode):
    """Notes when storages appear and vanish while it is active; works on meta and on real tensors.

    Args:
        known: tensors that are not counted (weights, buffers, inputs).
        gradient_shape: a tensor of this shape made after `mark("head")` is a gradient of embedding or head.
        most_operators: more raise TooManyOperators.
    """

    def __init__(
        self, known: list[torch.Tensor], gradient_shape: torch.Size | None = None, most_operators: float = math.inf
    ):
        super().__init__()
        self.gradient_shape, self.operators_left = gradient_shape, most_operators
        self.indices: dict[int, int] = {tensor.untyped_storage()._cdata: -1 for tensor in known}
        """Living storage -> its number, in order of appearance; -1 where it is not counted."""
        self.events: list[tuple[int, int]] = []
        """(number of a storage, bytes that appeared; negative where they vanished)."""
        self.gradients: set[int] = set()
        self.marks: dict[str, int] = {}
        self.traffic_at: dict[str, int] = {}
        self.waiting: str | None = None
        """What the moment of the next operator is to be called."""
        self.references: dict[int, weakref.ref] = {}
        self.traffic = 0
        """Bytes that operators other than products have read and written."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if self.waiting:
            self.mark(self.waiting)
            self.waiting = None
        self.operators_left -= 1
        if self.operators_left < 0:
            raise TooManyOperators
        output = func(*args, **(kwargs or {}))
        outputs = [tensor for tensor in tree_leaves(output) if isinstance(tensor, torch.Tensor)]
        inputs = [tensor for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, torch.Tensor)]
        # What an operator reads and writes; a view moves nothing.
        read = {tensor.untyped_storage()._cdata for tensor in inputs}
        is_view = not func._schema.is_mutable and all(out.untyped_storage()._cdata in read for out in outputs)
        if func.overloadpacket not in PRODUCTS and not is_view:
            for tensor in inputs + outputs:
                self.traffic += min(tensor.numel() * tensor.itemsize, tensor.untyped_storage().nbytes())
        for tensor in outputs:
            storage = tensor.untyped_storage()
            address, num_bytes, index = storage._cdata, storage.nbytes(), len(self.events)
            if address not in self.indices:
                self.indices[address] = index
                self.events.append((index, num_bytes))
                if "head" in self.marks and tensor.shape == self.gradient_shape:
                    self.gradients.add(index)
                gone = functools.partial(self._forget, address, index, num_bytes)
                self.references[address] = weakref.ref(storage, gone)
        return output

    def _forget(self, address: int, index: int, num_bytes: int, reference: weakref.ref) -> None:
        self.events.append((index, -num_bytes))
        del self.indices[address], self.references[address]

    def mark(self, name: str) -> None:
        """Call this moment `name`; the first time counts."""
        self.marks.setdefault(name, len(self.events))
        self.traffic_at.setdefault(name, self.traffic)

    def live_bytes(self) -> list[int]:
        """Return the bytes alive after each event, without gradients."""
        alive, series = 0, [0]
        for index, change in self.events:
            alive += 0 if index in self.gradients else change
            series.append(alive)
        return series


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
    kept_by_layer: int
    """What of `kept` the last layer made, and its input."""
    backward: int
    """With checkpointing: the most from the last layer's recompute on, above `kept` and what this recompute keeps."""
    traffic: int = field(compare=False)
    """Read and written by all operators but products; real tensors may take other ones than meta tensors."""
    traffic_of_layer: int = field(compare=False)
    """What of it is the last layer's."""
    traffic_again: int = field(compare=False)
    """What of that is its recompute's."""


def trace_step(
    model: PreTrainedModel,
    inputs: dict[str, torch.Tensor],
    compute_loss: Callable | None = None,
    *,
    checkpointing: bool = False,
    backward: bool = True,
    most_operators: float = math.inf,
) -> StepTrace:
    """Trace one training step of `model` as the Trainer runs it: outputs are dropped before the backward. Without
    `backward` its forward alone.

    `model` holds meta tensors where this is called within `traced_model`'s context, and may as well be real.
    """
    known = [*model.parameters(), *model.buffers(), *inputs.values()]
    log = StorageLog(known, model.get_input_embeddings().weight.shape, most_operators / 4)
    last_input, last_output = [], []

    def before_last_layer(module, args, options):
        hidden_BTH = args[0] if args else options["hidden_states"]
        # Autograd holds a leaf in any case, as the end of a gradient; inputs of other layers it does not.
        if hidden_BTH.is_leaf:
            log.gradients.add(log.indices[hidden_BTH.untyped_storage()._cdata])
            hidden_BTH = hidden_BTH + 0
        last_input.append(log.indices[hidden_BTH.untyped_storage()._cdata])
        log.mark("layer")
        hidden_BTH.register_hook(lambda gradient: log.mark("below"))
        return ((hidden_BTH, *args[1:]), options) if args else ((), options | {"hidden_states": hidden_BTH})

    def at_last_layer(module, args, output):
        hidden_BTH = output[0] if isinstance(output, tuple) else output
        last_output.append(log.indices[hidden_BTH.untyped_storage()._cdata])
        log.mark("head")
        log.operators_left += 3 * most_operators / 4  # of recompute and backward
        hidden_BTH.register_hook(lambda gradient: log.mark("layers"))

    def leave_out(gradient):  # what arrives at a parameter is no activation
        log.gradients.add(log.indices[gradient.untyped_storage()._cdata])

    @contextlib.contextmanager
    def computing_again():
        log.mark("again")
        try:
            yield  # ends with an exception of torch's, once all is there that the backward needs
        finally:
            log.waiting = "backward"  # what the recompute alone held goes before the next operator

    if checkpointing:
        contexts = lambda: (contextlib.nullcontext(), computing_again())  # noqa: E731
        model.activation_checkpointing_enable({"use_reentrant": False, "context_fn": contexts})
    last = decoder_layers(model)[-1]
    handles = [
        last.register_forward_pre_hook(before_last_layer, with_kwargs=True),
        last.register_forward_hook(at_last_layer),
    ]
    handles += [parameter.register_hook(leave_out) for parameter in model.parameters() if parameter.requires_grad]
    with log:
        if compute_loss is None:
            loss = model(**inputs, labels=inputs["input_ids"], use_cache=False).loss
        else:
            logits_NV = model(**inputs, use_cache=False).logits.flatten(0, 1).float()
            loss = own_nats_of(compute_loss, logits_NV, inputs["input_ids"].flatten())[0]
            del logits_NV
        log.mark("loss")
        if backward:
            loss.backward()
        for name in ("layers", "again", "backward", "below"):
            log.mark(name)
    for handle in handles:
        handle.remove()
    model.zero_grad()
    if checkpointing:
        model.activation_checkpointing_disable()
    live, head, layers = log.live_bytes(), log.marks["head"], log.marks["layers"]
    held = Counter()
    for index, change in log.events[: log.marks["loss"]]:
        if index < head and index not in last_output and index not in log.gradients:
            held[index >= log.marks["layer"] or index in last_input] += change
    kept, at, again = sum(held.values()), log.traffic_at, range(log.marks["again"], log.marks["backward"])
    held_again = sum(
        change for index, change in log.events[: again.stop] if index in again and index not in log.gradients
    )
    return StepTrace(
        kept=kept,
        head=max(live[head : layers + 1]) - kept,
        layers=max(live[:head] + (live[layers:] if backward else [])) - kept,
        kept_by_layer=held[True],
        backward=max(live[again.start :]) - kept - held_again,
        traffic=log.traffic,
        traffic_of_layer=at["head"] - at["layer"] + at["below"] - at["layers"],
        traffic_again=at["backward"] - at["again"],
    )


def inputs_of(batch: int, seq_len: int, attention: Attention) -> dict[str, torch.Tensor]:
    ids_BT = torch.zeros(batch, seq_len, dtype=torch.long)
    return {"input_ids": ids_BT} | ({} if attention == "flash" else {"attention_mask": torch.ones_like(ids_BT)})


def trace_training(
    blueprint: PreTrainedModel,
    *,
    batch: int,
    seq_len: int,
    attention: Attention,
    tiled: bool = False,
    compute_loss: Callable | None = None,
    layers_of_kind: int = 2,
    most_operators: float = math.inf,
    **parts: bool,
) -> dict[str, Any]:
    """Trace a `meta_model` with layers of one kind after another, and add up as many as there are.

    Args:
        layers_of_kind: that are traced one after the other; the last is counted. While the second computes, Python may
            still hold what the first returned.
        tiled: the loss is of tiles, each of one sequence.
        most_operators: of one forward and backward; more raise TooManyOperators.
        parts: of the model, as `traced_model` takes them.

    Returns:
        the bytes of one micro batch of so many sequences as `TrainingActivations` names them.
    """
    total, saved, kept_inputs = Counter(), {}, {}  # the latter of each layer by its index
    for layers in layer_kinds(blueprint):
        tile_rows = seq_len if tiled else None
        with traced_model(blueprint, layers[:1] * layers_of_kind, tile_rows=tile_rows, **parts) as model:
            inputs, limit = inputs_of(batch, seq_len, attention), {"most_operators": most_operators}
            checkpointed = trace_step(model, inputs, compute_loss, checkpointing=True, **limit)
            plain = trace_step(model, inputs, compute_loss, backward=False)  # whose backward is that after a recompute
        # Rotary angles and masks are a kind's own.
        total["once"] += checkpointed.kept - layers_of_kind * checkpointed.kept_by_layer
        saved |= dict.fromkeys(layers, plain.kept_by_layer)
        kept_inputs |= dict.fromkeys(layers, checkpointed.kept_by_layer)
        total["layer_transient"] = max(total["layer_transient"], checkpointed.layers)
        total["layer_backward"] = max(total["layer_backward"], plain.layers, checkpointed.backward)
        total["head"] = max(total["head"], checkpointed.head)
        traffic = checkpointed.traffic_of_layer
        once_less = traffic - checkpointed.traffic_again
        for name, of_layer in (("traffic", once_less), ("traffic_checkpointed", traffic)):
            if not total[name]:  # of the first kind also embedding, norm, head and loss
                total[name] = checkpointed.traffic - layers_of_kind * traffic
            total[name] += len(layers) * of_layer
    by_layer = {"layers_saved": saved, "layers_input": kept_inputs}
    return dict(total) | {name: [numbers[index] for index in sorted(numbers)] for name, numbers in by_layer.items()}


def trace_evaluation(
    blueprint: PreTrainedModel, *, batch: int, seq_len: int, attention: Attention, most_operators: float = math.inf
) -> dict[str, Any]:
    """Trace three layers of each kind without gradients, as scoring calls them: the head on one position only. Returns
    the peak of the `backbone`.
    """
    peak = 0
    for layers in layer_kinds(blueprint):
        with traced_model(blueprint, layers[:1] * 3) as model:
            model.eval()
            inputs = inputs_of(batch, seq_len, attention)
            log = StorageLog([*model.parameters(), *model.buffers(), *inputs.values()], most_operators=most_operators)
            with torch.no_grad(), log:
                model(**inputs, use_cache=False, logits_to_keep=1)
            peak = max(peak, *log.live_bytes())
    return {"backbone": peak}
