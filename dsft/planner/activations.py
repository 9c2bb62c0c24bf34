"""Bytes that activations take on one GPU, from a trace of the real model over fake tensors (activation_trace.py).

A trace takes seconds, so it is kept: in this process, and on disk in `~/.cache/dsft/activations/` (XDG_CACHE_HOME is
followed) under a hash of everything that it depends on. Weights and gradients are not counted, nor is workspace of
matrix products.
"""

import dataclasses
import functools
import hashlib
import importlib.metadata
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from peft import LoraConfig
from transformers import LlamaConfig, PreTrainedConfig

from dsft.errors import one_line
from dsft.models.chunked_head import ROW_TILE, VOCAB_TILE
from dsft.models.size import ModelSize
from dsft.models.tiled_loss import tile_rows
from dsft.planner.activation_trace import EvaluationTrace, TrainingTrace, trace_evaluation, trace_training
from dsft.planner.fake_model import Attention
from dsft.planner.terms import Term
from dsft.runtime.disk import user_cache, write_json
from dsft.units import DTYPE_BYTES

Loss = Literal["hf", "tiled", "fused"]
"""hf: transformers' ForCausalLMLoss, over all logits in fp32. tiled: logits of some tokens at a time
(models/tiled_loss.py). fused: Liger's fused_linear_cross_entropy, which does the same.
"""
BATCHES = (1, 4)
"""Sequences of the two micro batches that are traced: what a batch takes is a line through them."""
UNTRACEABLE = (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError)
"""What a model's own code raises where it does not run over fake tensors."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Bytes that grow with the micro batch."""

    per_token: float = 0.0
    """At the length of sequences that was traced: where attention makes a matrix, a longer sequence takes more."""
    fixed: float = 0.0
    """Whatever the micro batch."""
    tiled_vocab: int = 0
    """Entries of a vocabulary whose logits are made in tiles: the fixed bytes are then those of each row of a tile."""

    def num_bytes(self, num_tokens: int) -> int:
        return int(self._rows(num_tokens) * self.fixed + num_tokens * self.per_token)

    def formula(self, num_tokens: int) -> str:
        parts = [f"{num_tokens:,} tokens x {self.per_token:,.0f} B"] if self.per_token else []
        rows = f"{self._rows(num_tokens):,} rows of a tile x " if self.tiled_vocab else ""
        return " + ".join(parts + ([f"{rows}{self.fixed:,.0f} B"] if self.fixed >= 1 else []))

    def _rows(self, num_tokens: int) -> int:
        return tile_rows(self.tiled_vocab, num_tokens) if self.tiled_vocab else 1


@dataclass(frozen=True, kw_only=True)
class TrainingActivations:
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
    traffic: Cost
    """Read and written by a forward and backward in operators other than products (norms, rotations, activations)."""
    traffic_checkpointed: Cost
    """The same with checkpointing, recompute included."""
    source: str
    """"fake-tensor trace", or of what other model and why."""

    def terms(self, num_tokens: int, checkpointing: bool) -> list[Term]:
        """List what is alive at the peak.

        The head's peak and that of a layer's backward come at different moments, both while all layers hold theirs.

        Args:
            num_tokens: of one micro batch on one rank, padding included.
        """
        layer, layer_name = (
            (self.layer_input, "layer inputs (checkpointing)")
            if checkpointing
            else (self.layer_saved, "saved activations")
        )
        backward = self.layer_transient if checkpointing else self.layer_backward
        last, last_name = max(
            (self.head, "logits and loss"),
            (backward, "backward of one layer"),
            key=lambda pair: pair[0].num_bytes(num_tokens),
        )
        layers_bytes = int(self.num_layers * (layer.fixed + num_tokens * layer.per_token))
        parts = [
            ("rotary angles and masks", self.once.num_bytes(num_tokens), self.once.formula(num_tokens)),
            (layer_name, layers_bytes, f"{self.num_layers} layers x ({layer.formula(num_tokens)})"),
            (last_name, last.num_bytes(num_tokens), last.formula(num_tokens)),
        ]
        return [
            Term(name=name, num_bytes=num_bytes, formula=formula, phase="compute") for name, num_bytes, formula in parts
        ]

    def peak_bytes(self, num_tokens: int, checkpointing: bool) -> int:
        return sum(term.num_bytes for term in self.terms(num_tokens, checkpointing))

    def traffic_bytes(self, num_tokens: int, checkpointing: bool) -> int:
        return (self.traffic_checkpointed if checkpointing else self.traffic).num_bytes(num_tokens)


@dataclass(frozen=True, kw_only=True)
class EvaluationActivations:
    """What scoring one batch holds on one GPU besides weights: the backbone, then logits tile by tile."""

    backbone: Cost
    """Peak of the model without its head and without gradients, with the same attention (dsft feeds no mask)."""
    hidden: Cost
    """Hidden states of all positions, and of the scored ones once more."""
    logit_bytes: int
    """Of one row and word of a tile, ROW_TILE by VOCAB_TILE: in the model's dtype (twice with a softcap, around tanh),
    beside the last tile or its own copy in fp32.
    """
    vocab_size: int

    def peak_bytes(self, num_tokens: int, device: Literal["cpu", "cuda"]) -> int:
        tile = min(num_tokens, ROW_TILE[device]) * min(self.vocab_size, VOCAB_TILE[device]) * self.logit_bytes
        return max(self.backbone.num_bytes(num_tokens), self.hidden.num_bytes(num_tokens) + tile)


def training_activations(
    size: ModelSize,
    model_config: PreTrainedConfig,
    *,
    dtype: str,
    attention: Attention,
    loss: Loss,
    seq_len: int,
    adapters: LoraConfig | None = None,
    liger: bool = False,
) -> TrainingActivations:
    """Trace a model's training, or that of a Llama of the same widths where its code does not run over fake tensors.

    Args:
        dtype: float32, bfloat16 or float16.
        adapters: with lora and qlora.
        seq_len: the length that sequences are padded to.
        liger: with Liger's norms and feed-forwards, whose loss is "fused".
    """
    options = {"seq_len": seq_len, "dtype": dtype, "adapters": adapters} | ({"liger": True} if liger else {})
    options |= {"tiled": True} if loss == "tiled" else {}
    source = "fake-tensor trace"
    try:
        traces = _cached(trace_training, TrainingTrace, model_config, attention=attention, **options)
    except UNTRACEABLE as error:
        traces = _cached(trace_training, TrainingTrace, _like_llama(size), attention="flash", **options)
        source += f" of llama, since {size.model_type} could not be traced ({one_line(error)[:100]})"

    def fit(name: str, divisor: int = 1) -> Cost:
        return _line([getattr(trace, name) / divisor for trace in traces], seq_len)

    head = fit("head") if loss != "fused" else _fused_head(size, dtype)
    if loss == "tiled":
        head = replace(head, fixed=head.fixed / seq_len, tiled_vocab=size.vocab_size)  # a traced tile is one sequence
    return TrainingActivations(
        num_layers=size.num_layers,
        once=fit("once"),
        layer_saved=fit("layers_saved", size.num_layers),
        layer_input=fit("layers_input", size.num_layers),
        layer_transient=fit("layer_transient"),
        layer_backward=fit("layer_backward"),
        head=head,
        traffic=fit("traffic"),
        traffic_checkpointed=fit("traffic_checkpointed"),
        source=source,
    )


def evaluation_activations(
    size: ModelSize,
    model_config: PreTrainedConfig,
    *,
    dtype: str,
    attention: Attention,
    seq_len: int,
    adapters: LoraConfig | None = None,
) -> EvaluationActivations:
    """Trace a model's forward; arguments and fallback as for `training_activations`."""
    options = {"seq_len": seq_len, "dtype": dtype, "adapters": adapters}
    try:
        traces = _cached(trace_evaluation, EvaluationTrace, model_config, attention=attention, **options)
    except UNTRACEABLE:
        traces = _cached(trace_evaluation, EvaluationTrace, _like_llama(size), attention="flash", **options)
    itemsize = DTYPE_BYTES[dtype]
    softcap = getattr(model_config.get_text_config(), "final_logit_softcapping", None)
    return EvaluationActivations(
        backbone=_line([trace.backbone for trace in traces], seq_len),
        hidden=Cost(per_token=2 * itemsize * size.hidden_size),
        logit_bytes=4 + itemsize * (2 if softcap else 1),
        vocab_size=size.vocab_size,
    )


def _line(values: list[float], seq_len: int) -> Cost:
    """The cost that gives these values at BATCHES."""
    (few, many), (less, more) = BATCHES, values
    per_sequence = (more - less) / (many - few)
    return Cost(fixed=less - few * per_sequence, per_token=per_sequence / seq_len)


def _fused_head(size: ModelSize, dtype: str) -> Cost:
    """What Liger's loss takes, which no CPU can trace (liger_kernel/ops/fused_linear_cross_entropy.py).

    The final norm's input and output; the gradient of the hidden states; logits of a stretch of tokens, so many that
    they take up to twice that.
    """
    return Cost(per_token=5 * DTYPE_BYTES[dtype] * size.hidden_size)


def _like_llama(size: ModelSize) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=size.hidden_size,
        intermediate_size=size.ffn_size,
        num_hidden_layers=size.num_layers,
        num_attention_heads=size.num_heads,
        num_key_value_heads=max(1, size.kv_size // size.head_dim),
        head_dim=size.head_dim,
        vocab_size=size.vocab_size,
    )


Result = TypeVar("Result", TrainingTrace, EvaluationTrace)
_known: dict[str, list] = {}
"""Traces of this process, by key."""


def _cached(
    trace: Callable[..., list[Result]],
    result_type: type[Result],
    model_config: PreTrainedConfig,
    *,
    dtype: str,
    adapters: LoraConfig | None,
    **options: Any,
) -> list[Result]:
    """Trace this model at BATCHES, or take it from this process or from disk; what is new is kept in both."""
    facts = {
        "trace": trace.__name__,
        "model": model_config.get_text_config().to_dict(),
        "adapters": adapters and adapters.to_dict(),
        "dtype": dtype,
        "code": _code_versions(),
    }
    key = hashlib.sha256(json.dumps(facts | options, sort_keys=True, default=_as_text).encode()).hexdigest()[:32]
    path = user_cache() / "activations" / f"{key}.json"
    results = _known.get(key) or _read(path, result_type)
    if results is None:
        results = trace(model_config, batches=BATCHES, dtype=getattr(torch, dtype), adapters=adapters, **options)
        _write(path, results)
    _known[key] = results
    return results


@functools.cache
def _code_versions() -> list[str]:
    """List the versions of what a trace runs through, and a hash of the tracing code itself."""
    folder = Path(__file__).parent
    files = ("activation_trace.py", "fake_model.py", "../models/tiled_loss.py")
    source = b"".join((folder / name).read_bytes() for name in files)
    versions = [importlib.metadata.version(name) for name in ("torch", "transformers", "peft")]
    return [*versions, hashlib.sha256(source).hexdigest(), str(BATCHES)]


def _as_text(value: Any) -> Any:
    """Make JSON of sets, in one order (their own differs from process to process), and text of anything else."""
    return sorted(map(str, value)) if isinstance(value, (set, frozenset)) else str(value)


def _read(path: Path, result_type: type[Result]) -> list[Result] | None:
    """Read traces from this file; None where there is none or it is damaged."""
    try:
        results = [result_type(**values) for values in json.loads(path.read_text(encoding="utf-8"))["results"]]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    are_numbers = all(type(number) is int for result in results for number in vars(result).values())
    return results if len(results) == len(BATCHES) and are_numbers else None


def _write(path: Path, results: list[Result]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {"results": [dataclasses.asdict(result) for result in results]})
    except OSError:
        pass  # without a cache the next plan is only slower
