"""Logits of chosen positions and of part of the vocabulary, for any causal language model that transformers builds.

The backbone runs once; the head (with the architecture's own softcap, scale or bias, which stand in its `forward`) runs
on rows of
hidden states, for some words at a time. For that, the model's own `forward` is called over a shallow copy in which the
backbone hands out
given hidden states and the head has only some rows of its weight. A probe compares this with the plain forward once;
where they differ,
or a model is built otherwise, plain logits are used.
"""

import contextlib
import copy
import inspect
from collections.abc import Iterator

import torch
from peft import PeftModel
from torch import nn
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled


class BackboneOutput(tuple):
    """(hidden states,), also by name; every other output that some architecture asks for (caches, router logits ...) is
    None.
    """

    def __getattr__(self, name: str):
        return self[0] if name == "last_hidden_state" else None


class HandOut(nn.Module):
    """Stands for the backbone: whatever it is called with, it returns the hidden states it was given."""

    def __init__(self):
        super().__init__()
        self.hidden = None

    def forward(self, *_, **__):
        return BackboneOutput((self.hidden,))


class Reused:
    """Memory of one tensor, used again and again: new memory from the system costs a CPU more than the arithmetic on
    it.
    """

    def __init__(self):
        self.tensor = torch.empty(0)

    def of(self, shape: tuple[int, int], like: torch.Tensor) -> torch.Tensor:
        if (self.tensor.shape, self.tensor.dtype, self.tensor.device) != (shape, like.dtype, like.device):
            self.tensor = like.new_empty(shape)
        return self.tensor


class BareLinear(nn.Module):
    """The head's matrix product alone, for `words` of the vocabulary, without the hooks that ZeRO-3 puts on modules."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.words = slice(None)
        self.out = Reused()

    def forward(self, hidden_1NH: torch.Tensor) -> torch.Tensor:
        weight_WH = self.weight[self.words]
        out_NW = self.out.of((hidden_1NH.shape[1], len(weight_WH)), weight_WH)
        torch.mm(hidden_1NH[0], weight_WH.T, out=out_NW)
        return (out_NW if self.bias is None else out_NW.add_(self.bias[self.words]))[None]


class ChunkedHead:
    """`hidden = run_backbone(...)`, then `logits(rows of hidden)` within `weights()`.

    Args:
        words_at_once: words of the vocabulary in one matrix product.
    """

    def __init__(self, model: nn.Module, words_at_once: int):
        self.model, self.words_at_once = model, words_at_once
        self.inner = model.get_base_model() if isinstance(model, PeftModel) else model
        self.backbone = self.inner.base_model
        self.usable = self._make_shell()

    def _make_shell(self) -> bool:
        """Whether the model has the usual parts: a backbone of its own and a plain linear head in the same module."""
        inner = self.inner
        names = {module: name for name, module in inner._modules.items()}
        head = inner.get_output_embeddings()
        parameters = inspect.signature(type(inner).forward).parameters
        if (
            self.backbone is inner
            or self.backbone not in names
            or type(head) is not nn.Linear
            or head not in names
            or "logits_to_keep" not in parameters
        ):
            return False
        self.hand_out, self.linear, self.bare = HandOut(), head, BareLinear(head)
        self.shell = copy.copy(inner)
        self.shell.__dict__["_modules"] = inner._modules | {names[self.backbone]: self.hand_out, names[head]: self.bare}
        for hooks in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
            self.shell.__dict__[hooks] = {}
        self.shell.__dict__.pop("forward", None)  # DeepSpeed and accelerate may wrap the instance's forward
        return True

    def run_backbone(self, **inputs: torch.Tensor) -> torch.Tensor:
        """Hidden states [B, T, H]. The whole model is called, so that every hook runs, with the head on one position
        only.
        """
        found = []
        handle = self.backbone.register_forward_hook(lambda module, args, output: found.append(output[0]))
        try:
            self.model(**inputs, use_cache=False, logits_to_keep=1)
        finally:
            handle.remove()
        return found[0]  # IndexError where this architecture does not call its backbone as a module

    @contextlib.contextmanager
    def weights(self) -> Iterator[None]:
        """Under ZeRO-3 the head's weights, gathered on every rank; collective, so every rank enters once per batch."""
        if not is_deepspeed_zero3_enabled():
            yield
            return
        import deepspeed

        with deepspeed.zero.GatheredParameters(list(self.linear.parameters())):
            yield

    def logits(self, hidden_NH: torch.Tensor) -> Iterator[torch.Tensor]:
        """[N, words] in fp32, after the architecture's softcap or scale, for one stretch of the vocabulary after the
        other; the next overwrites it.
        """
        self.hand_out.hidden = hidden_NH[None]
        fp32, fp32_like = Reused(), hidden_NH.new_empty(0, dtype=torch.float32)
        for start in range(0, self.linear.out_features, self.words_at_once):
            self.bare.words = slice(start, start + self.words_at_once)
            logits_NW = self.shell(inputs_embeds=hidden_NH[None], use_cache=False).logits[0]
            yield (
                logits_NW if logits_NW.dtype == torch.float32 else fp32.of(logits_NW.shape, fp32_like).copy_(logits_NW)
            )

    @torch.no_grad()
    def agrees(self, ids_BT: torch.Tensor) -> bool:
        """Whether head on hidden states gives what the plain forward gives. Collective under ZeRO-3."""
        if not self.usable:
            return False
        plain = self.model(input_ids=ids_BT, use_cache=False).logits[0]
        try:
            hidden = self.run_backbone(input_ids=ids_BT)[0]
            with self.weights():
                chunked = torch.cat([part.clone() for part in self.logits(hidden)], dim=1)
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError):
            return False  # built in a way of its own; the same on every rank, since the code is
        return plain.shape == chunked.shape and torch.allclose(plain.float(), chunked.float(), rtol=1e-2, atol=1e-3)
