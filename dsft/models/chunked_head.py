"""Computes logits of chosen positions and of part of the vocabulary, for any causal language model of transformers.

The backbone runs once. The head runs on rows of its hidden states, for one tile of the vocabulary at a time. It keeps
the architecture's own softcap, scale or bias, which stand in the model's `forward`: that is called over a shallow copy,
in which the backbone hands out given hidden states and the head has only some rows of its weight.

    model            shell (copy.copy)
    |- backbone      |- HandOut       returns the hidden states that run_backbone() got
    |- lm_head       |- BareLinear    multiplies with the weight rows of one tile
    forward() -----> forward()        the model's own: softcap, scale, bias

A model that is built otherwise, such as BERT, is taken at its output layer: that gets one position, and the hidden
states that come to it are kept. A probe compares either way once with the plain forward. Where they differ, plain
logits are used.

Shape suffixes: B batch, T time, H hidden, N scored positions, W one tile of the vocabulary.
"""

import contextlib
import copy
import inspect
import math
from collections.abc import Iterator

import torch
from peft import PeftModel
from torch import nn
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.modeling_outputs import CausalLMOutput

from dsft.runtime import distributed

ROW_TILE, VOCAB_TILE = {"cpu": 2048, "cuda": 16384}, {"cpu": 1024, "cuda": 4096}
"""Logits that exist at once, by kind of device: scored positions by entries of the vocabulary (8 MiB and 256 MiB in
fp32). On a CPU a tile stays in its cache, and the head's weight is read once per 2,048 positions. Measured with 50,257
entries of width 256 on one core: 0.17 ms per position for product and softmax, where 64 rows of the full vocabulary
took 0.24. A GPU wants large products.
"""


class BackboneOutput(tuple):
    """Holds (hidden states,), also by name. Whatever else an architecture asks for (caches, router logits) is None."""

    def __getattr__(self, name: str):
        return self[0] if name == "last_hidden_state" else None


class HandOut(nn.Module):
    """Stands for the backbone and returns the hidden states it was given, whatever it is called with."""

    def __init__(self, backbone: nn.Module):
        super().__init__()
        self.hidden, self.stood_for = None, (backbone,)  # in a tuple, which registers no module

    def __getattr__(self, name: str):
        try:
            return super().__getattr__(name)
        except AttributeError:  # Falcon-H1 reads the head's multiplier there
            return getattr(self.stood_for[0], name)

    @property
    def decoder(self) -> "HandOut":
        """OPT and BART call their decoder past the backbone."""
        return self

    def forward(self, *_, **__):
        return BackboneOutput((self.hidden,))


class Reused:
    """Keeps the memory of one tensor, since new memory from the system costs a CPU more than the arithmetic on it."""

    def __init__(self):
        self.tensor = torch.empty(0)

    def of(self, shape: tuple[int, int], like: torch.Tensor) -> torch.Tensor:
        if (self.tensor.shape, self.tensor.dtype, self.tensor.device) != (shape, like.dtype, like.device):
            self.tensor = like.new_empty(shape)
        return self.tensor


def exp_in_place(tile: torch.Tensor) -> torch.Tensor:
    """Replace fp32 values by their exponentials.

    On a CPU torch.exp is MKL's, which takes four times as long on an AMD one as exp2, which is SLEEF's.
    """
    return tile.exp_() if tile.is_cuda else tile.mul_(math.log2(math.e)).exp2_()


class BareLinear(nn.Module):
    """Computes the head's matrix product for one `tile` of the vocabulary, without ZeRO-3's hooks on modules."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.tile = slice(None)
        self.out = Reused()

    def forward(self, hidden_1NH: torch.Tensor) -> torch.Tensor:
        weight_WH = self.weight[self.tile]
        out_NW = self.out.of((hidden_1NH.shape[1], len(weight_WH)), weight_WH)
        torch.mm(hidden_1NH[0], weight_WH.T, out=out_NW)
        return (out_NW if self.bias is None else out_NW.add_(self.bias[self.tile]))[None]


def backbone_of(inner: nn.Module) -> nn.Module:
    """Return what computes the hidden states: the base model, or, where that is said to be the model itself (Llama 4),
    its part beside the head.
    """
    parts = [part for part in inner.children() if part is not inner.get_output_embeddings()]
    return parts[0] if inner.base_model is inner and len(parts) == 1 else inner.base_model


def make_shell(inner: nn.Module, backbone: nn.Module, head: nn.Module) -> nn.Module | None:
    """Make a shallow copy of a model with another backbone and head.

    None where it has not the usual parts: a backbone and a plain linear head in the same module.
    """
    names = {module: name for name, module in inner._modules.items()}
    replaced = {backbone_of(inner): backbone, inner.get_output_embeddings(): head}
    parameters = inspect.signature(type(inner).forward).parameters
    is_plain_head = type(inner.get_output_embeddings()) is nn.Linear
    if not is_plain_head or not replaced.keys() <= names.keys() or "logits_to_keep" not in parameters:
        return None
    shell = copy.copy(inner)
    shell.__dict__["_modules"] = inner._modules | {names[module]: other for module, other in replaced.items()}
    for hooks in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
        shell.__dict__[hooks] = {}
    shell.__dict__.pop("forward", None)  # tiled_loss.py, DeepSpeed and accelerate may wrap the instance's forward
    return shell


class HeadAlone:
    """Stands for a model whose logits are what its output layer makes."""

    def __init__(self, head: nn.Module):
        self.head = head

    def __call__(self, inputs_embeds: torch.Tensor, **_) -> CausalLMOutput:
        return CausalLMOutput(logits=self.head(inputs_embeds))


class ChunkedHead:
    """Splits a forward: `hidden = run_backbone(...)`, then `logits(rows of hidden)` within `weights()`.

    Args:
        vocab_tile: entries of the vocabulary in one matrix product.
    """

    def __init__(self, model: nn.Module, vocab_tile: int):
        self.model, self.vocab_tile = model, vocab_tile
        self.inner = model.get_base_model() if isinstance(model, PeftModel) else model
        self.backbone = backbone_of(self.inner)
        self.hand_out, self.linear = HandOut(self.backbone), self.inner.get_output_embeddings()
        self.usable = type(self.linear) is nn.Linear
        if self.usable:
            self.bare = BareLinear(self.linear)
            self.shell = make_shell(self.inner, self.hand_out, self.bare) or HeadAlone(self.bare)

    def run_backbone(self, **inputs: torch.Tensor) -> torch.Tensor:
        """Return hidden states [B, T, H]. The model itself is called, so every hook runs; the head does one row."""
        if isinstance(self.shell, HeadAlone):
            return self._inputs_of_head(**inputs)
        outputs = []
        parts = [part for part in (self.backbone, getattr(self.backbone, "decoder", None)) if part is not None]
        handles = [part.register_forward_hook(lambda module, args, output: outputs.append(output[0])) for part in parts]
        try:
            self.model(**inputs, use_cache=False, logits_to_keep=1)
        finally:
            for handle in handles:
                handle.remove()
        return outputs[-1]  # the backbone's comes last; IndexError where this architecture calls neither

    def _inputs_of_head(self, **inputs: torch.Tensor) -> torch.Tensor:
        taken = []

        def take(module: nn.Module, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
            taken.append(args[0])
            return (args[0][:, -1:],)

        handle = self.linear.register_forward_pre_hook(take)
        try:
            self.model(**inputs, use_cache=False)
        finally:
            handle.remove()
        return taken[-1]  # IndexError where this architecture does not call its output layer

    @contextlib.contextmanager
    def weights(self) -> Iterator[None]:
        """Gather the head's weights on every rank under ZeRO-3. Collective: every rank enters once per batch."""
        if not is_deepspeed_zero3_enabled():
            yield
            return
        import deepspeed

        with deepspeed.zero.GatheredParameters(list(self.linear.parameters())):
            yield

    def logits(self, hidden_NH: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield [N, W] in fp32, after the architecture's softcap or scale, tile by tile; the next overwrites it."""
        self.hand_out.hidden = hidden_NH[None]
        fp32, fp32_like = Reused(), hidden_NH.new_empty(0, dtype=torch.float32)
        for start in range(0, self.linear.out_features, self.vocab_tile):
            self.bare.tile = slice(start, start + self.vocab_tile)
            logits_NW = self.shell(inputs_embeds=hidden_NH[None], use_cache=False).logits[0]
            if logits_NW.dtype != torch.float32:
                logits_NW = fp32.of(logits_NW.shape, fp32_like).copy_(logits_NW)
            yield logits_NW

    @torch.no_grad()
    def agrees(self, ids_BT: torch.Tensor) -> bool:
        """Compare the head on hidden states with the plain forward. Collective.

        The verdict is that of all ranks together: under ZeRO-3 the two ways run other collectives.
        """
        if not self.usable:
            return False
        plain = self.model(input_ids=ids_BT, use_cache=False).logits[0]
        try:
            hidden = self.run_backbone(input_ids=ids_BT)[0]
            with self.weights():
                chunked = torch.cat([part.clone() for part in self.logits(hidden)], dim=1)
        except torch.OutOfMemoryError:
            raise  # of this rank alone, perhaps
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError):
            return False  # built in a way of its own; the same on every rank, since the code is
        return all(distributed.from_all([are_same_logits(plain, chunked)]))


def are_same_logits(plain_NV: torch.Tensor, other_NV: torch.Tensor) -> bool:
    """Tell whether two computations of the same logits differ by roundings alone: by four of the dtype's steps at the
    largest logit of the row. Kernels that add up otherwise differ by one or two, and by many at logits around 0.
    """
    if plain_NV.shape != other_NV.shape:
        return False
    tolerance = max(4 * torch.finfo(plain_NV.dtype).eps, 1e-4)
    plain_NV, other_NV = plain_NV.float(), other_NV.float()
    return bool(((plain_NV - other_NV).abs() <= tolerance * plain_NV.abs().amax(dim=1, keepdim=True)).all())
