"""Computes the training loss from hidden states, for some rows of logits at a time: those of all rows never exist.

The plain way holds logits, their softmax and its gradient in fp32, 12 bytes per token and entry of the vocabulary. Here
each tile's gradients are made right after its logits, in the forward (as Liger and DeepSpeed's TiledFusedLogitsLoss
do), so that nothing is computed twice. What an architecture does to its logits (softcap, scale) stands in its own
`forward`, which is called for each tile over a shallow copy (chunked_head.py).

    backbone -> hidden_BTH -> head(hidden_BTH, labels_BT, weights_BT) -> two numbers

The head is called once as a module, with ZeRO-3's hooks: its weight is gathered once, whatever the number of tiles.

Shape suffixes: B batch, T time, N = B x T positions, H hidden, R rows of one tile, V vocab.
"""

import functools
import itertools
import math
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from transformers import PreTrainedConfig
from transformers.modeling_outputs import CausalLMOutput

from dsft.models.chunked_head import HandOut, backbone_of, make_shell
from dsft.models.small_model import one_thread, small_model
from dsft.units import IGNORED

LEAST_VOCAB = 32_000
"""Entries of the vocabulary from which the loss is tiled where nothing is said."""
TILE_LOGITS = 2**25
"""Logits of one tile at least: 128 MiB in fp32."""
MOST_TILES = 16
"""Of one micro batch. In bf16 each tile rounds the sum of the head's gradient: for 8,192 tokens it was 0.58 % off that
of fp32 in 16 tiles, 1.7 % in 128 and 0.35 % plainly (a Llama of width 64 with 4,000 entries, CPU).
"""
NOISE = 1e-5
"""Of loss and gradients: tiles are added up in another order."""


def tile_rows(vocab_size: int, positions: int) -> int:
    """Returns how many of a micro batch's positions one tile has."""
    return min(positions, max(1, TILE_LOGITS // vocab_size, math.ceil(positions / MOST_TILES)))


def nats_of(
    logits_NV: torch.Tensor, labels_N: torch.Tensor, weights_N: torch.Tensor | None, *, label_smoothing: float = 0.0
) -> torch.Tensor:
    """Sums the negative log-likelihood of all labels, [2]: times their weights, and without; both are the same where
    there are no weights.
    """
    how = {"ignore_index": IGNORED, "label_smoothing": label_smoothing}
    if weights_N is None:
        return functional.cross_entropy(logits_NV, labels_N, reduction="sum", **how).expand(2)
    nats_N = functional.cross_entropy(logits_NV, labels_N, reduction="none", **how)
    return torch.stack([(nats_N * weights_N).sum(), nats_N.detach().sum()])


def next_weights(weights_BT: torch.Tensor | None) -> torch.Tensor | None:
    """Moves weights of tokens to the positions that predict these."""
    return None if weights_BT is None else functional.pad(weights_BT, (0, 1))[:, 1:]


class _Nats(torch.autograd.Function):
    """Sums the negative log-likelihood of all labels, [2]: times the weights, of which alone there are gradients, and
    without. Holds gradients, no logits, until the backward.
    """

    @staticmethod
    def forward(ctx, hidden_NH, weight_VH, bias_V, labels_N, weights_N, logits_of, rows):
        grads = [
            torch.zeros_like(tensor) if needed else None
            for tensor, needed in zip((hidden_NH, weight_VH, bias_V), ctx.needs_input_grad, strict=False)
        ]
        grad_hidden_NH, grad_weight_VH, grad_bias_V = grads
        sums = hidden_NH.new_zeros(2, dtype=torch.float32)
        for hidden_RH, labels_R, weights_R, grad_RH in zip(
            hidden_NH.split(rows),
            labels_N.split(rows),
            itertools.repeat(None) if weights_N is None else weights_N.split(rows),
            (hidden_NH if grad_hidden_NH is None else grad_hidden_NH).split(rows),
            strict=weights_N is not None,
        ):
            product_RV = functional.linear(hidden_RH, weight_VH, bias_V).requires_grad_()
            with torch.enable_grad():
                tile_sums = nats_of(logits_of(product_RV).float(), labels_R, weights_R)
                sums += tile_sums.detach()
                (grad_RV,) = torch.autograd.grad(tile_sums[0], product_RV)
            del product_RV, tile_sums
            if grad_hidden_NH is not None:
                torch.mm(grad_RV, weight_VH, out=grad_RH)
            if grad_weight_VH is not None:
                grad_weight_VH.addmm_(grad_RV.T, hidden_RH)
            if grad_bias_V is not None:
                grad_bias_V += grad_RV.sum(0)
            del grad_RV  # before the next tile
        ctx.save_for_backward(*grads)
        return sums

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        # in place: a second copy of the head's gradient would be the largest tensor here
        grads = (tensor if tensor is None else tensor.mul_(grad[0]) for tensor in ctx.saved_tensors)
        return *grads, None, None, None, None


def tile_loss(model: nn.Module, rows: int | None = None) -> bool:
    """Lets `model(..., labels=..., num_items_in_batch=..., label_weights=...)` return the loss of tiles, and no logits.

    Without labels it computes as before. `nats` of the outputs are without the weights, and not divided.

    Args:
        rows: of one tile; by default as many as `tile_rows` says.

    Returns:
        False, and leaves the model as it is, where it is not built of a backbone and a plain linear head.
    """
    inner = model.get_base_model() if isinstance(model, PeftModel) else model
    backbone, head = backbone_of(inner), inner.get_output_embeddings()
    hand_out = HandOut(backbone)
    shell = make_shell(inner, hand_out, nn.Identity())
    if shell is None:
        return False
    plain_forward, plain_head = inner.forward, head.forward

    def logits_of(product_RV: torch.Tensor) -> torch.Tensor:
        hand_out.hidden = product_RV[None]  # what comes out of the backbone goes through no head
        logits_RV = shell(inputs_embeds=hand_out.hidden, use_cache=False).logits[0]
        hand_out.hidden = None
        return logits_RV

    @functools.wraps(plain_head)
    def head_forward(
        hidden_BTH: torch.Tensor, labels_BT: torch.Tensor | None = None, weights_BT: torch.Tensor | None = None
    ) -> torch.Tensor:
        if labels_BT is None:
            return plain_head(hidden_BTH)
        vocab_size, hidden_size = head.weight.shape
        hidden_NH, labels_N = hidden_BTH.reshape(-1, hidden_size), labels_BT.reshape(-1)
        tile = rows or tile_rows(vocab_size, len(labels_N))
        weights_N = None if weights_BT is None else weights_BT.reshape(-1)
        return _Nats.apply(hidden_NH, head.weight, head.bias, labels_N, weights_N, logits_of, tile)

    @functools.wraps(plain_forward)
    def forward(
        *args: Any,
        labels: torch.Tensor | None = None,
        num_items_in_batch: Any = None,
        label_weights: torch.Tensor | None = None,
        **inputs: Any,
    ):
        if labels is None:
            return plain_forward(*args, **inputs)
        hidden_BTH = backbone(*args, **{name: value for name, value in inputs.items() if value is not None})[0]
        next_BT = functional.pad(labels, (0, 1), value=IGNORED)[:, 1:]  # position t predicts token t + 1
        if num_items_in_batch is None:
            num_items_in_batch = (next_BT != IGNORED).sum()
        sums = head(hidden_BTH, next_BT, next_weights(label_weights))
        outputs = CausalLMOutput(loss=sums[0] / num_items_in_batch)
        outputs["nats"] = sums[1].detach()
        return outputs

    inner.forward, head.forward, inner.accepts_loss_kwargs = forward, head_forward, True  # the Trainer asks
    return True


@one_thread()
def can_tile_loss(
    config: PreTrainedConfig, *, adapters: LoraConfig | None = None, trust_remote_code: bool = False
) -> bool:
    """Tells whether a small model of this architecture has the same loss and gradients with tiles as without."""
    try:
        model = small_model(config, trust_remote_code=trust_remote_code).eval()
        if adapters:
            model = get_peft_model(model, LoraConfig(**adapters.to_dict()))
        plain = _loss_and_gradients(model)
        if not tile_loss(model, rows=7):
            return False
        tiled = _loss_and_gradients(model)
    except Exception:  # whatever an architecture's own code makes of sizes that it was not made for
        return False
    return all(
        bool((tensor - reference).abs().max() <= NOISE * reference.abs().max())
        for reference, tensor in zip(plain, tiled, strict=True)
    )


def _loss_and_gradients(model: nn.Module) -> list[torch.Tensor]:
    """Computes the loss of two rows, the beginning of one without labels, and the gradients of all parameters."""
    vocab_size = model.config.get_text_config().vocab_size
    ids_BT = torch.randint(3, vocab_size, (2, 16), generator=torch.Generator().manual_seed(0))
    labels_BT = ids_BT.clone()
    labels_BT[0, :9] = IGNORED
    model.zero_grad()
    loss = model(input_ids=ids_BT, labels=labels_BT, use_cache=False).loss
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
