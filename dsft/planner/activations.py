"""Activation bytes per token that autograd saves, layer by layer: the real model runs forward over torch's fake tensors
(shapes without memory), and saved_tensors_hooks record each storage that the backward would need.

Identical layers run once. Temporary memory of a backward, and that of the head, are formulas in memory.py.

Shape suffixes: B batch, N heads, T time, D head dim, L layers.
"""

import contextlib
import copy
import functools
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from dsft.models.adapters import adapted_for_a_look, select_trained
from dsft.models.measure import ModelFacts, decoder_layers, empty_model
from dsft.planner.memory import Job

Attention = Literal["flash", "sdpa", "eager"]
"""flash: flash_attention_2, or sdpa without a mask. sdpa: sdpa with a mask (padding, sliding window). eager: plain
matrix products.
"""
MEASURED_BATCHES = (1, 3)  # sequences of the two micro batches that run: bytes are linear in the batch
MEASURED_TOKENS = 256
"""Of a sequence if attention materialises no matrix: bytes are linear in tokens, longer ones only cost time."""
SCANNED = ("falcon_mamba", "jamba", "mamba", "rwkv", "zamba")
"""Architectures that process one position after the other."""
SCANNED_TOKENS = 16
UNMEASURABLE = (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError)
"""Raised by models whose code does not run over fake tensors."""
LIGER_MODELS = {
    *("exaone4", "falcon_h1", "gemma", "gemma2", "gemma3_text", "glm4", "gpt_oss", "granite", "hunyuan_v1_dense"),
    *("hunyuan_v1_moe", "llama", "llama4_text", "mistral", "mixtral", "olmo2", "olmo3", "phi3", "qwen2"),
    *("qwen3", "qwen3_moe", "qwen3_next", "smollm3"),
}
"""Language models with Liger kernels (MODEL_TYPE_TO_APPLY_LIGER_FN); in others it changes nothing."""


@dataclass(frozen=True, kw_only=True)
class Activations:
    """Bytes of one token on one GPU."""

    layers: tuple[float, ...]  # saved by each layer that is not checkpointed
    layers_zero_3: tuple[float, ...]
    """The same with DeepSpeed's linear layers of ZeRO-3, which also save the inputs of frozen weights."""
    layers_fixed: tuple[float, ...]  # saved for a micro batch of any size: weights merged with adapters
    is_measured: bool = True
    """False if the model's code does not run over fake tensors, and a Llama of its widths is used instead."""


def attention_of(facts: ModelFacts, *, seq_len: int, masked: bool) -> Attention:
    """Return how attention uses memory: sdpa has a mask if a batch has one, or reaches a sliding window."""
    if facts.attn_implementation != "sdpa":
        return "eager" if facts.attn_implementation == "eager" else "flash"
    window = getattr(facts.config.get_text_config(), "sliding_window", None)
    reaches_window = window and seq_len >= window
    return "sdpa" if masked or reaches_window else "flash"


class _FusedAttention(torch.autograd.Function):
    """Saves what the CUDA kernels behind scaled_dot_product_attention save, and computes nothing."""

    @staticmethod
    def forward(ctx, query_BNTD, key_BNTD, value_BNTD, bias_B1TT):
        batch, heads, time, _ = query_BNTD.shape
        output_BTND = query_BNTD.new_empty(batch, time, heads, value_BNTD.shape[-1])
        log_sums_BNT = query_BNTD.new_empty(batch, heads, time, dtype=torch.float32)
        ctx.save_for_backward(query_BNTD, key_BNTD, value_BNTD, bias_B1TT, output_BTND, log_sums_BNT)
        return output_BTND


def _fused_attention(module, query, key, value, attention_mask, **_):
    """As transformers/integrations/sdpa_attention.py: a mask repeats keys and values, and is a bias."""
    bias = None
    if attention_mask is not None:
        groups = query.shape[1] // key.shape[1]
        if groups > 1:
            key = key.repeat_interleave(groups, dim=1)
            value = value.repeat_interleave(groups, dim=1)
        bias = torch.empty_like(attention_mask, dtype=query.dtype)
    return _FusedAttention.apply(query, key, value, bias), None


_IMPLEMENTATIONS = {"flash": "dsft_unmasked", "sdpa": "dsft_masked", "eager": "eager"}
AttentionInterface.register("dsft_unmasked", _fused_attention)
AttentionMaskInterface.register("dsft_unmasked", lambda *args, **kwargs: None)
AttentionInterface.register("dsft_masked", _fused_attention)
AttentionMaskInterface.register("dsft_masked", sdpa_mask)


def measure_or_assume(job: Job) -> Activations:
    """Measure the activations of a job; if the model's code does not run over fake tensors, assume a Llama as wide."""
    size = job.size
    is_fp32_mixture = job.dtype == "float32" and size.expert_params > 0  # torch has grouped products in bf16 alone
    if not is_fp32_mixture:
        with contextlib.suppress(*UNMEASURABLE):
            return measure_activations(job)
    width = 11 * size.hidden_size + 4 * size.ffn_size
    if job.attention == "eager":
        width += 3 * size.num_heads * job.seq_len
    layers = (float(job.weight_bytes * width),) * size.num_layers
    fixed = (0.0,) * size.num_layers
    return Activations(layers=layers, layers_zero_3=layers, layers_fixed=fixed, is_measured=False)


def measure_activations(job: Job) -> Activations:
    """Run one forward without weights and count the bytes that its backward would need."""
    config = job.model_config
    try:
        model = empty_model(copy.deepcopy(config), attn_implementation=_IMPLEMENTATIONS[job.attention])
    except KeyError:  # Falcon has its own class for each of transformers' names
        name = "eager" if job.attention == "eager" else "sdpa"
        model = empty_model(copy.deepcopy(config), attn_implementation=name)
    if job.adapters is not None:
        with torch.device("meta"):
            model = adapted_for_a_look(model, job.adapters)
    select_trained(model, job.trainable, job.frozen)
    for parameter in model.parameters():  # DeepSpeed casts adapters to the model's dtype
        parameter.data = parameter.data.to(getattr(torch, job.dtype))
    if not model.get_input_embeddings().weight.requires_grad:
        model.enable_input_require_grads()

    layers = decoder_layers(model)
    first_alike = _first_alike(model, layers)
    tokens = job.seq_len
    if job.attention == "flash":
        is_scanned = config.get_text_config().model_type in SCANNED
        tokens = min(tokens, SCANNED_TOKENS if is_scanned else MEASURED_TOKENS)
    counter = _SavedBytes(layers, first_alike)
    runs = []
    # transformers reads no values of fake tensors, and they have a CPU's operators.
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device="cpu").train()
        counter.attach(model, liger=job.liger and job.size.model_type in LIGER_MODELS)
        for batch in MEASURED_BATCHES:
            counter.start([*model.parameters(), *model.buffers()])
            ids_BT = torch.zeros(batch, tokens, dtype=torch.long)
            inputs = {"input_ids": ids_BT, "use_cache": False, "logits_to_keep": 1}
            if job.attention != "flash":
                inputs["attention_mask"] = torch.ones_like(ids_BT)
            with torch.autograd.graph.saved_tensors_hooks(counter.save, lambda tensor: tensor):
                model(**inputs)
            runs.append((counter.layer_bytes, counter.linear_bytes()))
    (few_bytes_L, _), (many_bytes_L, linear_bytes_L) = runs
    few_tokens, many_tokens = (number * tokens for number in MEASURED_BATCHES)
    kept_L = (many_bytes_L - few_bytes_L) / (many_tokens - few_tokens)
    zero_3_L = kept_L + linear_bytes_L / many_tokens
    fixed_L = few_bytes_L - few_tokens * kept_L
    return Activations(
        layers=tuple(kept_L[first_alike].tolist()),
        layers_zero_3=tuple(zero_3_L[first_alike].tolist()),
        layers_fixed=tuple(fixed_L[first_alike].tolist()),
    )


def _first_alike(model: PreTrainedModel, layers: list[nn.Module]) -> list[int]:
    """Return, for each layer, the first with the same parameters, trained alike, and config (layer_types ...)."""
    lists = []
    for values in vars(model.config.get_text_config()).values():
        if isinstance(values, list) and len(values) == len(layers):
            lists.append(values)
    firsts = {}
    first_alike = []
    for index, layer in enumerate(layers):
        kind = [str(values[index]) for values in lists]
        for name, parameter in layer.named_parameters():
            kind.append((name, tuple(parameter.shape), parameter.requires_grad))
        first_alike.append(firsts.setdefault(tuple(kind), index))
    return first_alike


class _SavedBytes:
    """Counts the storages that autograd saves, each once, for the layer that saves it first."""

    def __init__(self, layers: list[nn.Module], first_alike: list[int]):
        self.layers = layers
        self.outputs = {}
        for index, first in enumerate(first_alike):
            if index != first:  # it returns the output of the first one of its kind
                layer = layers[index]
                for name, _ in list(layer.named_children()):
                    delattr(layer, name)
                layer.forward = lambda *args, first=first, **kwargs: self.outputs[first]

    def start(self, known: list[torch.Tensor]) -> None:
        self.layer_bytes = np.zeros(len(self.layers), np.int64)
        self.linear_inputs = {}  # address -> layer whose linear layer read the storage first, storage
        self.seen = {}  # address -> storage; a reference keeps the address from being reused
        self.layer = None  # index of the one that runs now
        self.is_paused = False
        self.ignore(known)

    def ignore(self, tensors: list[torch.Tensor]) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self.seen[storage._cdata] = storage

    def save(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if not self.is_paused and storage._cdata not in self.seen:
            self.seen[storage._cdata] = storage
            if self.layer is not None:
                self.layer_bytes[self.layer] += storage.nbytes()
        return tensor

    def linear_bytes(self) -> np.ndarray:
        """Return [L] bytes that linear layers read and no backward needs otherwise."""
        layer_bytes = np.zeros_like(self.layer_bytes)
        for address, (layer, storage) in self.linear_inputs.items():
            if address not in self.seen:
                layer_bytes[layer] += storage.nbytes()
        return layer_bytes

    def attach(self, model: nn.Module, *, liger: bool) -> None:
        for index, layer in enumerate(self.layers):
            layer.register_forward_pre_hook(functools.partial(self._entering, index), with_kwargs=True)
            layer.register_forward_hook(self._left)
        for module in model.modules():
            is_gated = all(hasattr(module, name) for name in ("gate_proj", "up_proj", "down_proj", "act_fn"))
            if type(module) is nn.Linear:
                module.register_forward_pre_hook(self._entering_linear)
            if isinstance(module, nn.Dropout) and module.p:  # a GPU saves a mask of bools, a CPU of the tensor's dtype
                module.forward = functools.partial(_dropout_of_gpu, module.p)
            if liger and type(module).__name__.endswith("RMSNorm"):
                module.register_forward_pre_hook(self._entering_norm)
                module.register_forward_hook(self._left_norm)
            if liger and is_gated:  # the activation is recomputed
                module.act_fn.register_forward_hook(lambda function, args, output: self.ignore([output]))

    def _entering(self, index: int, layer, args, kwargs):
        self.layer = index
        if index == 0:
            # Rotary angles and masks exist once for all layers: little beside each layer's activations.
            hidden = args[0] if args else kwargs["hidden_states"]
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            self.ignore([tensor for tensor in tensors if tensor is not hidden])

    def _left(self, layer, args, output):
        self.outputs[self.layer] = output
        self.layer = None

    def _entering_linear(self, linear, args):
        storage = args[0].untyped_storage()
        if self.layer is not None:
            self.linear_inputs.setdefault(storage._cdata, (self.layer, storage))

    def _entering_norm(self, norm, args):
        self.save(args[0])
        self.is_paused = True

    def _left_norm(self, norm, args, output):
        self.is_paused = False


def _dropout_of_gpu(probability: float, tensor: torch.Tensor) -> torch.Tensor:
    return torch.native_dropout(tensor, probability, True)[0]
