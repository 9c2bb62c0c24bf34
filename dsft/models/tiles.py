"""Computes the head of any causal language model of transformers in tiles: logits of all positions never exist at once.

The backbone runs once, then the model's own `forward` is called over a shallow copy, in which the backbone returns
given hidden states and the head is another one. So the architecture's softcap, scale and bias apply.

    model            shell (copy.copy)
    |- backbone      |- FixedHiddenStates   returns the hidden states that the real backbone computed
    |- lm_head       |- BareLinear          scoring: multiplies with the weight rows of one tile
    |                |  Identity            training: is given the product
    forward() -----> forward()              the model's own: softcap, scale, bias

- Scoring (`ChunkedHead`): some rows of hidden states, one tile of the vocabulary at a time. A model that is built
  otherwise, such as BERT, is taken at its output layer: that gets one position, and its inputs are kept. Either way is
  compared once with the plain forward; where they differ, plain logits are used.
- Training (`tile_loss`): all of the vocabulary for some rows at a time, and each tile's gradients right after its
  logits, in the forward (as in Liger and DeepSpeed's TiledFusedLogitsLoss). The plain loss holds logits, their softmax
  and its gradient in fp32, 12 bytes per token and entry of the vocabulary. The head is called once as a module, with
  ZeRO-3's hooks: its weight is gathered once, whatever the number of tiles.

Shape suffixes: B batch, T time, N positions, H hidden, R rows of one tile, V vocab, W one tile of the vocabulary.
"""

import contextlib
import copy
import functools
import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from peft.utils.integrations import gather_params_ctx
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from dsft.config.user_code import failed, name_of
from dsft.errors import UserError
from dsft.models.trained import unwrapped
from dsft.runtime import distributed
from dsft.runtime.hardware import which_memory
from dsft.units import IGNORED

ROW_TILE, VOCAB_TILE = {"cpu": 2048, "cuda": 16384}, {"cpu": 1024, "cuda": 4096}
"""Logits that exist at once, by kind of device: scored positions by entries of the vocabulary (8 MiB and 256 MiB in
fp32). On a CPU a tile stays in its cache, and the head's weight is read once per 2,048 positions. Measured with 50,257
entries of width 256 on one core: 0.17 ms per position for product and softmax, where 64 rows of the full vocabulary
took 0.24. A GPU wants large products.
"""


class BackboneOutput(tuple):
    """(hidden states,), also by name. Whatever else an architecture asks for (caches, router logits) is None."""

    def __getattr__(self, name: str):
        return self[0] if name == "last_hidden_state" else None


class FixedHiddenStates(nn.Module):
    """Replaces the backbone and returns the hidden states it was given, whatever it is called with."""

    def __init__(self, backbone: nn.Module):
        super().__init__()
        self.hidden, self.substituted = None, (backbone,)  # in a tuple, which registers no module

    def __getattr__(self, name: str):
        try:
            return super().__getattr__(name)
        except AttributeError:  # Falcon-H1 reads the head's multiplier there
            return getattr(self.substituted[0], name)

    @property
    def decoder(self) -> "FixedHiddenStates":
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
    """Replace fp32 values by their exponentials."""
    # On a CPU torch.exp is MKL's, which takes four times as long on an AMD one as exp2, which is SLEEF's.
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
    """What computes the hidden states: the base model, or, where that is the model itself (Llama 4), its part beside
    the head.
    """
    parts = [part for part in inner.children() if part is not inner.get_output_embeddings()]
    return parts[0] if inner.base_model is inner and len(parts) == 1 else inner.base_model


def make_shell(inner: nn.Module, backbone: nn.Module, head: nn.Module) -> nn.Module | None:
    """Make a shallow copy of a model with another backbone and head; None where it has not the usual parts: a backbone
    and a plain linear head in the same module.
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
    shell.__dict__.pop("forward", None)  # tile_loss, DeepSpeed and accelerate may wrap the instance's forward
    return shell


class ChunkedHead:
    """Splits a forward: `hidden = run_backbone(...)`, then `logits(rows of hidden)` within `weights()`.
    `vocab_tile`: entries of the vocabulary in one matrix product.
    """

    def __init__(self, model: nn.Module, vocab_tile: int):
        self.model, self.vocab_tile = model, vocab_tile
        self.inner = unwrapped(model)
        self.backbone = backbone_of(self.inner)
        self.fixed, self.linear = FixedHiddenStates(self.backbone), self.inner.get_output_embeddings()
        self.usable = type(self.linear) is nn.Linear
        if self.usable:
            self.bare = BareLinear(self.linear)
            # None where logits are what its output layer makes of its inputs: a model that is built otherwise.
            self.shell = make_shell(self.inner, self.fixed, self.bare)

    def run_backbone(self, **inputs: torch.Tensor) -> torch.Tensor:
        """Return hidden states [B, T, H]. The model itself is called, so every hook runs; the head does one row."""
        kept, options = [], {}
        with contextlib.ExitStack() as hooks:
            if self.shell is None:
                keep_inputs = lambda _, args: kept.append(args[0]) or (args[0][:, -1:],)  # noqa: E731
                hooks.enter_context(self.linear.register_forward_pre_hook(keep_inputs))
            else:
                options["logits_to_keep"] = 1
                for part in filter(None, (self.backbone, getattr(self.backbone, "decoder", None))):
                    keep_outputs = lambda module, args, output: kept.append(output[0])  # noqa: E731
                    hooks.enter_context(part.register_forward_hook(keep_outputs))
            self.model(**inputs, use_cache=False, **options)
        return kept[-1]  # the backbone's comes last; IndexError where this architecture calls none of them

    def weights(self) -> contextlib.AbstractContextManager[None]:
        """Gather the head's weights on every rank under ZeRO-3. Collective: every rank enters once per batch."""
        return gather_params_ctx(list(self.linear.parameters()), modifier_rank=None)

    def logits(self, hidden_NH: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield [N, W] in fp32, after the architecture's softcap or scale, tile by tile; the next overwrites it."""
        self.fixed.hidden = hidden_NH[None]
        fp32, fp32_like = Reused(), hidden_NH.new_empty(0, dtype=torch.float32)
        for start in range(0, self.linear.out_features, self.vocab_tile):
            self.bare.tile = slice(start, start + self.vocab_tile)
            if self.shell is None:
                logits_NW = self.bare(hidden_NH[None])[0]
            else:
                logits_NW = self.shell(inputs_embeds=hidden_NH[None], use_cache=False).logits[0]
            if logits_NW.dtype != torch.float32:
                logits_NW = fp32.of(logits_NW.shape, fp32_like).copy_(logits_NW)
            yield logits_NW

    @torch.no_grad()
    def agrees(self, ids_BT: torch.Tensor) -> bool:
        """Compare the head on hidden states with the plain forward. Collective: the verdict is that of all ranks
        together, since under ZeRO-3 the two ways run other collectives.
        """
        if not self.usable:
            return False
        plain = self.model(input_ids=ids_BT, use_cache=False).logits[0]
        try:
            hidden = self.run_backbone(input_ids=ids_BT)[0]
            with self.weights():
                chunked = torch.cat([part.clone() for part in self.logits(hidden)], dim=1)
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
            if which_memory(error):
                raise  # of this rank alone, perhaps
            return False  # built in a way of its own; the same on every rank, since the code is
        return all(distributed.from_all([are_same_logits(plain, chunked)]))


def are_same_logits(plain_NV: torch.Tensor, other_NV: torch.Tensor) -> bool:
    """Whether two computations of the same logits differ by roundings alone: by four of the dtype's steps at the
    largest logit of the row. Kernels that add up otherwise differ by one or two, and by many at logits around 0.
    """
    if plain_NV.shape != other_NV.shape:
        return False
    tolerance = max(4 * torch.finfo(plain_NV.dtype).eps, 1e-4)
    plain_NV, other_NV = plain_NV.float(), other_NV.float()
    return bool(((plain_NV - other_NV).abs() <= tolerance * plain_NV.abs().amax(dim=1, keepdim=True)).all())


LEAST_VOCAB = 32_000
"""Entries of the vocabulary from which the loss is tiled by default."""
TILE_LOGITS = 2**25
"""Logits of one tile at least: 128 MiB in fp32."""
MOST_TILES = 16
"""Of one micro batch. In bf16 each tile rounds the sum of the head's gradient: for 8,192 tokens it was 0.58 % off that
of fp32 in 16 tiles, 1.7 % in 128 and 0.35 % plainly (a Llama of width 64 with 4,000 entries, CPU).
"""


def tile_rows(vocab_size: int, positions: int) -> int:
    """Returns how many of a micro batch's positions one tile has."""
    return min(positions, max(1, TILE_LOGITS // vocab_size, math.ceil(positions / MOST_TILES)))


def next_tokens(of_tokens_BT: torch.Tensor, last: float = 0) -> torch.Tensor:
    """Moves labels or weights of tokens to the positions that predict these; `last` ends a row."""
    return functional.pad(of_tokens_BT, (0, 1), value=last)[:, 1:].contiguous()


def sums_of_nats(
    logits_NV: torch.Tensor,
    targets_N: torch.Tensor,
    weights_N: torch.Tensor | None = None,
    *,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Returns sums over all targets, [2]: what is trained, their negative log-likelihood with weights and label
    smoothing; and their negative log-likelihood alone, without a gradient.
    """
    cross_entropy = functools.partial(functional.cross_entropy, logits_NV, targets_N, ignore_index=IGNORED)
    if weights_N is None and not label_smoothing:
        return cross_entropy(reduction="sum").expand(2)
    trained_N = cross_entropy(reduction="none", label_smoothing=label_smoothing)
    nats_N = trained_N.detach()
    if label_smoothing:
        with torch.no_grad():
            nats_N = cross_entropy(reduction="none")
    if weights_N is not None:
        trained_N = trained_N * weights_N
    return torch.stack([trained_N.sum(), nats_N.sum()])


def own_nats_of(
    compute_loss: Callable,
    logits_NV: torch.Tensor,
    targets_N: torch.Tensor,
    weights_N: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `sums_of_nats`, with a loss of the user's own in the first sum.
    Raises UserError if `compute_loss` fails, or does not return the loss of each label.
    """
    name = f"compute_loss={name_of(compute_loss)}"
    with torch.no_grad():
        nats = sums_of_nats(logits_NV, targets_N)[1]
    try:
        losses_N = compute_loss(logits_NV, targets_N)
    except Exception as error:
        if which_memory(error):
            raise
        raise failed(name, error) from None
    if not torch.is_tensor(losses_N) or losses_N.shape != targets_N.shape or not losses_N.is_floating_point():
        returned = f"a tensor {[*losses_N.shape]}" if torch.is_tensor(losses_N) else type(losses_N).__name__
        raise UserError(f"{name} returned {returned}; expected the loss of each label, {[*targets_N.shape]}")
    losses_N = losses_N.float()
    if weights_N is not None:
        losses_N = losses_N * weights_N
    return torch.stack([losses_N.sum(), nats])


def own_loss_problems(compute_loss: Callable, vocab_size: int) -> tuple[list[str], list[str]]:
    """Tries a loss of the user's own on a few random logits; returns problems, and notes on what it makes of them."""
    name = f"compute_loss={name_of(compute_loss)}"
    generator = torch.Generator().manual_seed(0)
    logits_NV = torch.randn(6, vocab_size, generator=generator).requires_grad_()
    targets_N = torch.randint(vocab_size, (6,), generator=generator)
    try:
        total = own_nats_of(compute_loss, logits_NV, targets_N)[0]
        first = own_nats_of(compute_loss, logits_NV[:2], targets_N[:2])[0]
        second = own_nats_of(compute_loss, logits_NV[2:], targets_N[2:])[0]
    except UserError as error:
        return error.problems, []
    if not total.requires_grad:
        return [f"{name} returned losses without gradients: nothing would be trained"], []
    if torch.allclose(total, first + second, rtol=1e-4):
        return [], []
    return [], [
        f"{name}: the loss of a token depends on the other tokens that it is called with: accumulation, ranks and"
        " packing then change what is trained"
    ]


class _Nats(torch.autograd.Function):
    """`sums_of_nats` in tiles, with gradients of the first sum alone: these are kept until the backward, not logits."""

    @staticmethod
    def forward(ctx, hidden_NH, weight_VH, bias_V, targets_N, weights_N, logits_of, rows):
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden_NH = torch.zeros_like(hidden_NH) if needs_hidden else None
        grad_weight_VH = torch.zeros_like(weight_VH) if needs_weight else None
        grad_bias_V = torch.zeros_like(bias_V) if needs_bias else None
        sums = hidden_NH.new_zeros(2, dtype=torch.float32)
        for start in range(0, len(targets_N), rows):
            tile = slice(start, start + rows)
            hidden_RH = hidden_NH[tile]
            weights_R = None if weights_N is None else weights_N[tile]
            product_RV = functional.linear(hidden_RH, weight_VH, bias_V).requires_grad_()
            with torch.enable_grad():
                # Without a name, the float32 logits are freed before their gradient is made.
                tile_sums = sums_of_nats(logits_of(product_RV).float(), targets_N[tile], weights_R)
                sums += tile_sums.detach()
                (grad_RV,) = torch.autograd.grad(tile_sums[0], product_RV)
            del product_RV, tile_sums
            if needs_hidden:
                torch.mm(grad_RV, weight_VH, out=grad_hidden_NH[tile])
            if needs_weight:
                grad_weight_VH.addmm_(grad_RV.T, hidden_RH)
            if needs_bias:
                grad_bias_V += grad_RV.sum(0)
            del grad_RV  # before the next tile
        ctx.save_for_backward(grad_hidden_NH, grad_weight_VH, grad_bias_V)
        return sums

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        # In place: a second copy of the head's gradient would be the largest tensor here.
        grads = (tensor if tensor is None else tensor.mul_(grad[0]) for tensor in ctx.saved_tensors)
        return *grads, None, None, None, None


def tile_loss(model: nn.Module, rows: int | None = None) -> bool:
    """Lets `model(targets=..., label_weights=...)` return `sums` (`sums_of_nats`) of tiles, and no logits. Targets and
    weights stand at the positions that predict them. Without targets it computes as before.
    Returns False, and leaves the model as it is, if it is not built of a backbone and a plain linear head.
    `rows`: of one tile; by default as many as `tile_rows` returns.
    """
    inner = unwrapped(model)
    backbone, head = backbone_of(inner), inner.get_output_embeddings()
    fixed = FixedHiddenStates(backbone)
    shell = make_shell(inner, fixed, nn.Identity())
    if shell is None:
        return False
    plain_forward, plain_head = inner.forward, head.forward

    def logits_of(product_RV: torch.Tensor) -> torch.Tensor:
        fixed.hidden = product_RV[None]  # what comes out of the backbone goes through no head
        logits_RV = shell(inputs_embeds=fixed.hidden, use_cache=False).logits[0]
        fixed.hidden = None
        return logits_RV

    @functools.wraps(plain_head)
    def head_forward(hidden_BTH: torch.Tensor, *targets: torch.Tensor | None) -> torch.Tensor:
        return tiles(hidden_BTH, *targets) if targets else plain_head(hidden_BTH)

    @torch.compiler.disable  # torch.compile cannot trace a gradient inside of a forward, and would break at each tile
    def tiles(hidden_BTH: torch.Tensor, targets_N: torch.Tensor, weights_N: torch.Tensor | None) -> torch.Tensor:
        vocab_size, hidden_size = head.weight.shape
        hidden_NH = hidden_BTH.reshape(-1, hidden_size)
        tile = rows or tile_rows(vocab_size, len(targets_N))
        return _Nats.apply(hidden_NH, head.weight, head.bias, targets_N, weights_N, logits_of, tile)

    @functools.wraps(plain_forward)
    def forward(
        *args: Any, targets: torch.Tensor | None = None, label_weights: torch.Tensor | None = None, **inputs: Any
    ):
        if targets is None:
            return plain_forward(*args, **inputs)
        hidden_BTH = backbone(*args, **inputs)[0]
        weights_N = None if label_weights is None else label_weights.reshape(-1)
        return {"sums": head(hidden_BTH, targets.reshape(-1), weights_N)}

    inner.forward, head.forward, inner.accepts_label_weights = forward, head_forward, True
    return True
