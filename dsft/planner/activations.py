"""Bytes that activations take on one GPU: closed formulas for common architectures, a trace over fake tensors for all
others.

The coefficients were read off what autograd holds in transformers 5.23, tensor by tensor; tests hold every component
against the trace
of the real model (trace.py). Weights and gradients are not counted, nor is workspace of matrix products.

Widths in formulas: h hidden, q heads x head_dim, kv key-value heads x head_dim, i feed-forward, V vocabulary, r rank of
the adapters,
e bytes of one number (2 in bf16, 4 in fp32).
"""

from dataclasses import dataclass
from typing import Literal

import torch
from peft import LoraConfig
from transformers import PreTrainedConfig

from dsft.models.chunked_head import ROW_TILE, VOCAB_TILE
from dsft.models.size import ModelSize
from dsft.planner.activation_trace import Attention, trace_model
from dsft.planner.terms import Term

Loss = Literal["hf", "fused"]
"""hf: transformers' ForCausalLMLoss, over all logits in fp32. fused: logits in stretches that are never whole (Liger's
fused_linear_cross_entropy).
"""

RMS_NORM_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe")
GEMMA_FAMILIES = ("gemma2", "gemma3_text")
QK_NORM_FAMILIES = ("qwen3", "qwen3_moe", "gemma3_text")
MOE_FAMILIES = ("mixtral", "qwen3_moe")


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Bytes that grow with the micro batch."""

    per_token: float = 0.0
    per_pair: float = 0.0
    """For each token and each position of its sequence, where attention makes such a matrix."""
    fixed: float = 0.0
    """Whatever the micro batch."""

    def num_bytes(self, num_tokens: int, seq_len: int) -> int:
        return int(self.fixed + num_tokens * (self.per_token + self.per_pair * seq_len))

    def formula(self, num_tokens: int, seq_len: int) -> str:
        parts = [f"{num_tokens:,} tokens x {self.per_token:,.0f} B"] if self.per_token else []
        parts += [f"{num_tokens:,} tokens x {seq_len:,} positions x {self.per_pair:,.6g} B"] if self.per_pair else []
        parts += [f"{self.fixed:,.0f} B"] if self.fixed >= 1 else []
        return " + ".join(parts)


@dataclass(frozen=True, kw_only=True)
class ActivationBytes:
    """What a forward and backward of one micro batch holds on one GPU besides weights and gradients."""

    num_layers: int
    once: Cost
    """Held from the first layer to the last: rotary angles, masks."""
    layer_saved: Cost
    """What the backward of one layer needs; all layers keep it where there is no checkpointing. A mean where layers
    differ.
    """
    layer_input: Cost
    """What checkpointing keeps of one layer."""
    layer_transient: Cost
    """With checkpointing: the most one layer takes in its recompute and backward, its input left out."""
    layer_backward: Cost
    """Without: the most one layer's backward takes above what is saved."""
    head: Cost
    """Final norm, logits, loss and their backward, at their most."""
    eval_backbone: Cost
    """Peak of the model without its head and without gradients, with the same attention (dsft's evaluation feeds no
    mask).
    """
    eval_hidden: Cost
    """Hidden states of all positions, and of the scored ones once more."""
    eval_logit_bytes: int
    """Of one element of the logits that evaluation makes at once (models/chunked_head.py: ROW_TILE by VOCAB_TILE)."""
    vocab_size: int
    source: str
    """"formula of <family>" or "fake-tensor trace"."""

    def terms(self, num_tokens: int, seq_len: int, checkpointing: bool) -> list[Term]:
        """What is alive at the peak.

        The head's peak and that of a layer's backward come at different moments, both while all layers hold theirs.

        Args:
            num_tokens: of one micro batch on one rank, padding included.
            seq_len: the length its sequences are padded to.
        """
        layer, layer_name = (
            (self.layer_input, "layer inputs (checkpointing)")
            if checkpointing
            else (self.layer_saved, "saved activations")
        )
        backward = self.layer_transient if checkpointing else self.layer_backward
        size = (num_tokens, seq_len)
        last, last_name = max(
            (self.head, "logits and loss"),
            (backward, "backward of one layer"),
            key=lambda pair: pair[0].num_bytes(*size),
        )
        kept = Cost(
            per_token=self.num_layers * layer.per_token,
            per_pair=self.num_layers * layer.per_pair,
            fixed=self.num_layers * layer.fixed,
        )
        return [
            Term(
                name="rotary angles and masks",
                num_bytes=self.once.num_bytes(*size),
                formula=self.once.formula(*size),
                phase="compute",
            ),
            Term(
                name=layer_name,
                num_bytes=kept.num_bytes(*size),
                formula=f"{self.num_layers} layers x ({layer.formula(*size)})",
                phase="compute",
            ),
            Term(name=last_name, num_bytes=last.num_bytes(*size), formula=last.formula(*size), phase="compute"),
        ]

    def eval_peak_bytes(self, num_tokens: int, seq_len: int, device: Literal["cpu", "cuda"]) -> int:
        """Of one batch of an evaluation: the backbone, then logits tile by tile over its hidden states."""
        tile = min(num_tokens, ROW_TILE[device]) * min(self.vocab_size, VOCAB_TILE[device]) * self.eval_logit_bytes
        return max(
            self.eval_backbone.num_bytes(num_tokens, seq_len), self.eval_hidden.num_bytes(num_tokens, seq_len) + tile
        )

    def peak_bytes(self, num_tokens: int, seq_len: int, checkpointing: bool) -> int:
        return sum(term.num_bytes for term in self.terms(num_tokens, seq_len, checkpointing))


def activation_bytes(
    size: ModelSize,
    model_config: PreTrainedConfig,
    *,
    method: str,
    half: bool,
    attention: Attention,
    loss: Loss,
    adapters: LoraConfig | None = None,
    seq_len: int = 2048,
) -> ActivationBytes:
    """The formula of the model's family, or the trace where there is none.

    Args:
        method: full, lora or qlora.
        half: bf16 or fp16 activations, else fp32.
        attention: see trace.py. Only "flash" and "sdpa" have formulas.
        adapters: with lora and qlora; the formulas know all linear layers without dropout, others are traced.
        seq_len: where a trace is needed, it is exact at this length (and fitted through shorter ones).

    Raises:
        Whatever the model's own code raises under the trace (where it asks tensors for their values, say).
    """
    text = model_config.get_text_config()
    usual_adapters = adapters is None or (
        adapters.target_modules == "all-linear"
        and not adapters.lora_dropout
        and not adapters.use_dora
        and not adapters.modules_to_save
    )
    family = text.model_type
    if family == "gpt2" and text.activation_function != "gelu_new":
        known = False
    elif family in MOE_FAMILIES:
        known = method == "full" and not getattr(
            text, "mlp_only_layers", None
        )  # peft merges adapters of fused experts: bytes of the weights' size
    else:
        known = family in RMS_NORM_FAMILIES + GEMMA_FAMILIES + ("gpt2",)
    if known and usual_adapters and attention != "eager":
        shape = _Shape(
            h=size.hidden_size,
            q=size.num_heads * size.head_dim,
            kv=size.kv_size,
            heads=size.num_heads,
            i=size.ffn_size,
            r=size.lora_r,
            e=2 if half else 4,
            full=method == "full",
            repeats_kv=attention == "sdpa" and size.kv_size != size.num_heads * size.head_dim,
            masked=attention == "sdpa",
            head_dim=size.head_dim,
            vocab=size.vocab_size,
        )
        return _formula(shape, text, size, loss)
    if method != "full" and adapters is None:
        adapters = LoraConfig(task_type="CAUSAL_LM", r=size.lora_r, target_modules="all-linear")
    return _traced(model_config, size, half=half, attention=attention, loss=loss, adapters=adapters, seq_len=seq_len)


@dataclass(frozen=True, kw_only=True)
class _Shape:
    h: int
    q: int
    kv: int
    heads: int
    i: int
    r: int
    e: int
    full: bool
    repeats_kv: bool
    masked: bool
    head_dim: int
    vocab: int


def _norm(s: _Shape, text: PreTrainedConfig, width: int, rows: int, *, output_kept: bool) -> int:
    """Saved by an RMSNorm over `rows` rows of a token, `width` numbers together."""
    if text.model_type in GEMMA_FAMILIES:
        saved = 4 * width + (
            4 * width if s.full else 0
        )  # fp32 input; fp32 normalised (the gradient of the weight needs it)
    else:
        saved = 4 * width + (s.e * width if s.full else 0)  # fp32 input; normalised, in the model's dtype
    return (
        saved + 4 * rows + (s.e * width if output_kept else 0)
    )  # 1 / rms; the output, where a linear layer needs its input


def _attention(s: _Shape, text: PreTrainedConfig) -> int:
    """Saved by attention, its input left out."""
    saved = (
        s.e * (2 * s.q + 2 * (s.q if s.repeats_kv else s.kv)) + 4 * s.heads
    )  # rotated query, output; key, value; log-sums in fp32
    if text.model_type == "gpt2":
        return s.e * 4 * s.h + 4 * s.heads  # query, key and value in one; output
    if text.model_type in QK_NORM_FAMILIES:
        saved += _norm(s, text, s.q, s.heads, output_kept=False) + _norm(
            s, text, s.kv, s.kv // s.head_dim, output_kept=False
        )
    return saved


def _feed_forward(s: _Shape, text: PreTrainedConfig) -> int:
    """Saved by the feed-forward layer, its input left out."""
    if text.model_type == "gpt2":
        return s.e * 5 * s.i  # gelu_new in Python: x, x / 2, tanh, 1 + tanh, product
    saved = s.e * 4 * s.i  # gate, act(gate), up, product; with experts, of the active ones together
    if text.model_type in MOE_FAMILIES:
        k = text.num_experts_per_tok
        saved += s.e * 2 * s.h * k  # inputs and outputs of the experts, once per active expert
        saved += 4 * text.num_local_experts + 44 * k  # router's softmax in fp32; indices of int64 and weights in fp32
    return saved


def _formula(s: _Shape, text: PreTrainedConfig, size: ModelSize, loss: Loss) -> ActivationBytes:
    gpt2, gemma = text.model_type == "gpt2", text.model_type in GEMMA_FAMILIES
    if gpt2:
        norms, post_norms = (
            2 * (2 * s.e * s.h) + (2 * s.h if text.resid_pdrop else 0),
            0,
        )  # LayerNorm: input, output; dropout's masks of bools
    else:
        norms = 2 * _norm(s, text, s.h, 1, output_kept=True)
        post_norms = 2 * _norm(s, text, s.h, 1, output_kept=False) if gemma else 0
    attention = _attention(s, text)
    adapters = s.e * s.r * (4 if gpt2 else 7)  # what each A matrix puts out
    saved = norms + post_norms + attention + _feed_forward(s, text) + adapters
    input_shared = (
        s.e * s.h if gpt2 or s.e == 4 else 0
    )  # the first norm saves the layer's input itself, not a copy in fp32
    at_attention = s.e * s.h + (norms + post_norms) / 2 + attention + _attention_backward(s) - saved
    backward = max(*_feed_forward_backward(s, text, post_norms / 2), at_attention)
    kinds = len(set(text.layer_types)) if getattr(text, "layer_types", None) else 1
    masks = kinds if s.masked else 0  # one of bools for each kind of layer
    bias = s.e if s.masked else 0  # the mask in the query's dtype, made anew in every layer
    once = (
        8 if gpt2 else 8 + 2 * s.e * s.head_dim * (kinds if text.model_type == "gemma3_text" else 1)
    )  # positions in int64; sin and cos
    once += s.h if gpt2 and text.embd_pdrop else 0  # mask of dropout
    once += (
        0 if s.full else s.e * s.h
    )  # enable_input_require_grads makes the embedding's output a leaf, which lives as long as the graph
    return ActivationBytes(
        num_layers=size.num_layers,
        once=Cost(per_token=once, per_pair=masks),
        layer_saved=Cost(per_token=saved, per_pair=bias),
        layer_input=Cost(per_token=s.e * s.h),
        layer_transient=Cost(per_token=saved - input_shared + backward, per_pair=bias),
        layer_backward=Cost(per_token=backward),
        head=_head(s, text, loss),
        eval_backbone=Cost(per_token=_forward(s, text), per_pair=masks + bias),
        **_eval_head(s.h, s.e, text),
        source=f"formula of {text.model_type}",
    )


def _feed_forward_backward(s: _Shape, text: PreTrainedConfig, post_norm: float) -> list[int]:
    """Peaks of the feed-forward's backward, above what the layer saves. Each holds the residual's gradient, e h."""
    k = text.num_experts_per_tok if text.model_type in MOE_FAMILIES else 0
    # The gradients of act(gate) x up and of its two factors; the product itself, the experts' output and the norm
    # behind are gone.
    peaks = [s.e * (s.h + 2 * s.i - s.h * k) - post_norm]
    if text.model_type == "gpt2" and text.resid_pdrop:
        peaks[0] -= s.h  # the dropout's mask is gone
    if post_norm:
        peaks.append(
            s.e * s.h + 20 * s.h - (4 * s.h if s.full else 0)
        )  # five gradients in fp32 within the norm behind, whose normalised output is gone
    if k:
        weights = (
            4 if text.model_type == "mixtral" else s.e
        )  # bytes of a routing weight, and so of what it is multiplied with
        peaks.append(
            s.e * s.h + (3 * weights + (s.e if weights != s.e else 0)) * s.h * k
        )  # experts' outputs: put in order, weighted, cast
    return peaks


def _attention_backward(s: _Shape) -> int:
    """Gradients in attention's backward kernel: of output, query, key, value, and FlashAttention's buffers
    (flash_api.cpp, mha_bwd).
    """
    gradients = s.e * (2 * s.q + 2 * (s.q if s.repeats_kv else s.kv)) + 4 * s.heads
    if s.e == 2 and not s.masked:
        gradients += 4 * s.q + (
            2 * s.e * s.q if s.kv != s.q else 0
        )  # query's gradient in fp32; key's and value's for all query heads
    return gradients


def _head(s: _Shape, text: PreTrainedConfig, loss: Loss) -> Cost:
    """After the last layer. transformers.loss.loss_utils.ForCausalLMLoss;
    liger_kernel/ops/fused_linear_cross_entropy.py.
    """
    norm = 2 * s.e * s.h if text.model_type == "gpt2" else _norm(s, text, s.h, 1, output_kept=s.full or loss == "fused")
    if loss == "fused":
        # Gradient of the hidden states; logits of a stretch of tokens, so many that they take h to 2 h numbers per
        # token of the batch.
        return Cost(per_token=norm + s.e * s.h + s.e * 2 * s.h)
    # In fp32: log-softmax, its gradient, the logits' gradient. The logits themselves are gone: the Trainer drops the
    # outputs before the backward.
    logits = 12 * s.vocab
    if getattr(text, "final_logit_softcapping", None):
        logits += s.e * s.vocab  # tanh
    return Cost(per_token=norm + logits)


def _forward(s: _Shape, text: PreTrainedConfig) -> int:
    """Peak of a layer's feed-forward without gradients; 4 h: embedding output, layer input, residual, normalised."""
    if text.model_type == "gpt2":
        return s.e * (4 * s.i + 6 * s.h)  # of gelu_new
    if text.model_type in MOE_FAMILIES:
        k, weights = text.num_experts_per_tok, 4 if text.model_type == "mixtral" else s.e
        # gate and up in one, act(gate), product, and the experts' inputs; or inputs, outputs, outputs weighted and put
        # in order
        return s.e * 4 * s.h + max(s.e * (4 * s.i + s.h * k), (2 * s.e + 2 * weights) * s.h * k)
    return s.e * ((3 if s.full else 4) * s.i + 4 * s.h)  # act(gate), up, product, and what an adapter adds


def _eval_head(hidden_size: int, e: int, text: PreTrainedConfig) -> dict:
    softcap = bool(getattr(text, "final_logit_softcapping", None))
    # A tile in the model's dtype (two with a softcap, around tanh) beside the last one or its own copy, both in fp32.
    return {
        "eval_hidden": Cost(per_token=2 * e * hidden_size),
        "eval_logit_bytes": 4 + e * (2 if softcap else 1),
        "vocab_size": text.vocab_size,
    }


def _traced(
    model_config: PreTrainedConfig,
    size: ModelSize,
    *,
    half: bool,
    attention: Attention,
    loss: Loss,
    adapters: LoraConfig | None,
    seq_len: int,
) -> ActivationBytes:
    """Traces of one sequence of two or three lengths give what is fixed, what grows with tokens, and what with pairs of
    them.
    """
    lengths = (seq_len // 2, seq_len) if attention == "flash" else (seq_len // 4, seq_len // 2, seq_len)
    traces = [
        trace_model(
            model_config,
            batch=1,
            seq_len=length,
            dtype=torch.bfloat16 if half else torch.float32,
            attention=attention,
            adapters=adapters,
        )
        for length in lengths
    ]

    def fit(name: str, divisor: int = 1) -> Cost:
        values = [getattr(trace, name) / divisor for trace in traces]
        powers = torch.tensor(
            [[length**power for power in range(len(lengths))] for length in lengths], dtype=torch.float64
        )
        fixed, per_token, *per_pair = torch.linalg.solve(powers, torch.tensor(values, dtype=torch.float64)).tolist()
        return Cost(fixed=fixed, per_token=per_token, per_pair=sum(per_pair))

    text, e = model_config.get_text_config(), 2 if half else 4
    # Fused: as in _head, with an RMSNorm before it.
    head = (
        fit("head")
        if loss == "hf"
        else Cost(per_token=(4 + e * (2 if adapters is None else 1) + 3 * e) * text.hidden_size)
    )
    return ActivationBytes(
        num_layers=size.num_layers,
        once=fit("once"),
        layer_saved=fit("layers_saved", size.num_layers),
        layer_input=fit("layers_input", size.num_layers),
        layer_transient=fit("layer_transient"),
        layer_backward=fit("layer_backward"),
        head=head,
        eval_backbone=fit("forward"),
        **_eval_head(text.hidden_size, e, text),
        source="fake-tensor trace",
    )
