"""Computes the head of a causal language model in tiles: logits of all positions never exist at once.

    hidden states --(product with some of the head's weight)--> scale, softcap --> logits of one tile --> nats

A tile is the whole vocabulary for some rows of hidden states.

- Scoring (`ChunkedHead`): the model runs unchanged; a hook keeps the inputs of its output layer, which itself computes
  one position. The result is compared once with the plain forward; if they differ, plain logits are used.
- Training (`tile_loss`): each tile's gradients are computed right after its logits, in the forward (as in Liger and
  DeepSpeed's TiledFusedLogitsLoss). The plain loss keeps logits, their softmax
  and its gradient in fp32, 12 bytes per token and vocabulary entry. The head is called once as a module, with
  ZeRO-3's hooks: its weight is gathered once, whatever the number of tiles. A trial with a small model of the
  architecture decides whether tiles are used (`probes.trains_in_tiles`).

Shape suffixes: B batch, T time, N positions, H hidden, R rows of one tile, V vocab.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator

import torch
from peft.utils.integrations import gather_params_ctx
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from transformers import PreTrainedConfig

from dsft.config.user_code import failed, name_of
from dsft.models.adapters import unwrapped
from dsft.runtime import distributed
from dsft.runtime.hardware import which_memory
from dsft.units import IGNORED

TILE_LOGITS = 2**25  # fewest logits of one tile: 128 MiB in fp32
# Logits that exist at once when one model is scored, by device: positions by vocabulary entries. On a CPU a tile fits
# the cache, and the head's weight is read once per 2,048 positions. A GPU needs large products.
ROW_TILE = {"cpu": 2048, "cuda": 16384}
VOCAB_TILE = {"cpu": 1024, "cuda": 4096}


def scored_rows(vocab_size: int) -> int:
    """Returns for how many positions logits exist at once in an evaluation."""
    return max(1, TILE_LOGITS // vocab_size)


def finish_logits(product: torch.Tensor, config: PreTrainedConfig) -> torch.Tensor:
    """Applies an architecture's scale and softcap to the products of its head, by their names in configs."""
    text = config.get_text_config()
    logits = product
    for name in ("logit_scale", "lm_head_multiplier"):  # Cohere, Falcon-H1
        if factor := getattr(text, name, None):
            logits = logits * factor
    if divisor := getattr(text, "logits_scaling", None):  # Granite
        logits = logits / divisor
    for name in ("final_logit_softcapping", "logits_soft_cap"):  # Gemma, RecurrentGemma
        if cap := getattr(text, name, None):
            logits = torch.tanh(logits / cap) * cap
    return logits


class ChunkedHead:
    """Splits a forward: `outputs = run(...)`, then `logits(rows of outputs)` within `weights()`."""

    def __init__(self, model: nn.Module):
        self.model = model
        self.is_split = True
        """Whether the outputs are hidden states; else they are logits, of a head that cannot be computed alone."""
        self.config = unwrapped(model).config
        self.linear = unwrapped(model).get_output_embeddings()

    def run(self, **inputs: torch.Tensor) -> torch.Tensor:
        """Return hidden states [B, T, H], or logits [B, T, V] without a split. The model itself is called, so every
        hook runs; a split head computes one position.
        """
        if not self.is_split:
            return self.model(**inputs, use_cache=False).logits
        hidden_states = []

        def keep_inputs(_, args):
            hidden_states.append(args[0])
            return (args[0][:, -1:],)

        with self.linear.register_forward_pre_hook(keep_inputs):
            self.model(**inputs, use_cache=False)
        return hidden_states[0]

    def weights(self) -> contextlib.AbstractContextManager[None]:
        """Gather the head's weights on every rank under ZeRO-3. Collective: every rank enters once per batch."""
        parameters = [*self.linear.parameters()] if self.is_split else []
        return gather_params_ctx(parameters, modifier_rank=None)

    def logits(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return [R, V] in fp32, after the architecture's softcap or scale."""
        if not self.is_split:
            return outputs.float()
        return self._product(outputs, slice(None))

    def tiles(self, outputs: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the same logits in fp32, [R, W] for one part of the vocabulary after the other."""
        width = VOCAB_TILE[outputs.device.type]
        if not self.is_split:
            yield from outputs.float().split(width, dim=1)
            return
        for start in range(0, len(self.linear.weight), width):
            yield self._product(outputs, slice(start, start + width))

    def _product(self, outputs: torch.Tensor, tile: slice) -> torch.Tensor:
        bias_W = None if self.linear.bias is None else self.linear.bias[tile]
        product = functional.linear(outputs, self.linear.weight[tile], bias_W)
        return finish_logits(product, self.config).float()

    @torch.no_grad()
    def agrees(self, ids_BT: torch.Tensor) -> bool:
        """Return whether the head on hidden states matches the plain forward. Collective: all ranks have the same
        answer, since under ZeRO-3 the two ways run different collectives.
        """
        if type(self.linear) is not nn.Linear:
            return False
        plain = self.model(input_ids=ids_BT, use_cache=False).logits[0]
        try:
            hidden = self.run(input_ids=ids_BT)[0]
            with self.weights():
                split = self.logits(hidden)
        except Exception as error:  # any, from an architecture's own code
            if which_memory(error):
                raise  # perhaps on this rank alone
            return False  # the architecture is built differently; the same on every rank
        return all(distributed.from_all([are_same_logits(split, plain)]))


def distance(logits: torch.Tensor, expected: torch.Tensor) -> float:
    """Returns the largest difference, relative to the largest expected value."""
    difference = (logits - expected).abs().max()
    largest = expected.abs().max().clamp(min=1e-12)
    return (difference / largest).item()


def are_same_logits(logits_NV: torch.Tensor, expected_NV: torch.Tensor) -> bool:
    """Whether two computations of the same logits differ by rounding alone: by at most four of the dtype's steps at the
    largest logit of the row. Kernels with another order of additions differ by one or two, and by many near 0.
    """
    if logits_NV.shape != expected_NV.shape:
        return False
    tolerance = max(4 * torch.finfo(expected_NV.dtype).eps, 1e-4)
    expected_NV = expected_NV.float()
    differences_NV = (logits_NV.float() - expected_NV).abs()
    largest_N1 = expected_NV.abs().amax(dim=1, keepdim=True)
    return bool((differences_NV <= tolerance * largest_N1).all())


LEAST_VOCAB = 32_000  # vocabulary size from which the loss is tiled by default
# Of one micro batch. In bf16 each tile rounds the sum of the head's gradient: for 8,192 tokens it was 0.58 % off the
# fp32 one with 16 tiles, 1.7 % with 128 and 0.35 % without tiles (a Llama of width 64 with 4,000 entries, CPU).
MOST_TILES = 16


def tile_rows(vocab_size: int, positions: int) -> int:
    return min(positions, max(scored_rows(vocab_size), math.ceil(positions / MOST_TILES)))


def next_tokens(of_tokens_BT: torch.Tensor, last: float = 0) -> torch.Tensor:
    """Shifts labels or weights of tokens to the positions that predict them; `last` fills the end of a row."""
    return functional.pad(of_tokens_BT, (0, 1), value=last)[:, 1:].contiguous()


def sums_of_nats(
    logits_NV: torch.Tensor,
    targets_N: torch.Tensor,
    weights_N: torch.Tensor | None = None,
    *,
    label_smoothing: float = 0.0,
    compute_loss: Callable | None = None,
) -> torch.Tensor:
    """Returns sums over all targets, [2]: the training loss, which is their negative log-likelihood with weights and
    label smoothing, or the user's own loss; and the plain negative log-likelihood, without a gradient.
    """
    cross_entropy = functools.partial(functional.cross_entropy, logits_NV, targets_N, ignore_index=IGNORED)
    if weights_N is None and not label_smoothing and compute_loss is None:
        return cross_entropy(reduction="sum").expand(2)
    with torch.no_grad():
        nats = cross_entropy(reduction="sum")  # first: the user's own loss may change the logits
    if compute_loss is None:
        trained_N = cross_entropy(reduction="none", label_smoothing=label_smoothing)
    else:
        trained_N = compute_loss(logits_NV, targets_N).float()
    if weights_N is not None:
        trained_N = trained_N * weights_N
    return torch.stack([trained_N.sum(), nats])


def own_loss_problems(compute_loss: Callable, vocab_size: int) -> list[str]:
    name = f"compute_loss={name_of(compute_loss)}"
    generator = torch.Generator().manual_seed(0)
    logits_NV = torch.randn(6, vocab_size, generator=generator).requires_grad_()
    targets_N = torch.randint(vocab_size, (6,), generator=generator)
    try:
        losses_N = compute_loss(logits_NV, targets_N)
    except Exception as error:
        return failed(name, error).problems
    if not torch.is_tensor(losses_N) or losses_N.shape != targets_N.shape or not losses_N.is_floating_point():
        returned = f"a tensor {[*losses_N.shape]}" if torch.is_tensor(losses_N) else type(losses_N).__name__
        return [f"{name} returned {returned}; expected the loss of each label, {[*targets_N.shape]}"]
    if not losses_N.requires_grad:
        return [f"{name} returned losses without gradients: nothing would be trained"]
    return []


class _Nats(torch.autograd.Function):
    """`sums_of_nats` in tiles, with gradients of the first sum only: these are saved for the backward, not logits."""

    @staticmethod
    def forward(ctx, hidden_NH, weight_VH, bias_V, targets_N, weights_N, config, rows):
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
                tile_sums = sums_of_nats(finish_logits(product_RV, config).float(), targets_N[tile], weights_R)
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
        gradients = ctx.saved_tensors
        for gradient in gradients:
            if gradient is not None:
                gradient.mul_(grad[0])
        return *gradients, None, None, None, None


def tile_loss(model: nn.Module, rows: int | None = None) -> bool:
    """Makes `model(targets=..., label_weights=...)` return `sums` (`sums_of_nats`) computed in tiles, and no logits.
    Targets and weights are at the positions that predict them. Without targets the model computes as before.
    Returns False, and leaves the model unchanged, if it does not consist of a backbone and a plain linear head.
    `rows`: of one tile; by default as many as `tile_rows` returns.
    """
    inner = unwrapped(model)
    backbone = inner.base_model
    head = inner.get_output_embeddings()
    beside_head = [part for part in inner.children() if part is not head]
    if backbone is inner and len(beside_head) == 1:  # Llama 4
        backbone = beside_head[0]
    if type(head) is not nn.Linear or backbone is inner:
        return False
    plain_forward = inner.forward
    plain_head = head.forward

    @functools.wraps(plain_head)
    def head_forward(hidden_BTH, *targets):
        if targets:
            return tiles(hidden_BTH, *targets)
        return plain_head(hidden_BTH)

    @torch.compiler.disable  # torch.compile cannot trace a gradient inside a forward: a graph break at each tile
    def tiles(hidden_BTH, targets_N, weights_N):
        vocab_size, hidden_size = head.weight.shape
        hidden_NH = hidden_BTH.reshape(-1, hidden_size)
        tile = rows or tile_rows(vocab_size, len(targets_N))
        return _Nats.apply(hidden_NH, head.weight, head.bias, targets_N, weights_N, inner.config, tile)

    @functools.wraps(plain_forward)
    def forward(*args, targets=None, label_weights=None, **inputs):
        if targets is None:
            return plain_forward(*args, **inputs)
        hidden_BTH = backbone(*args, **inputs)[0]
        weights_N = None if label_weights is None else label_weights.reshape(-1)
        return {"sums": head(hidden_BTH, targets.reshape(-1), weights_N)}

    inner.forward = forward
    head.forward = head_forward
    inner.accepts_label_weights = True
    return True
