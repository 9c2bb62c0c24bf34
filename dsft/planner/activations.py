"""The job that is planned, and the bytes that its activations take on one GPU, from traces of the real model
(traced_model.py). A trace is kept in this process, and on disk in `~/.cache/dsft/activations/` (XDG_CACHE_HOME is
followed) under a hash of everything that it depends on.
"""

import contextlib
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from peft import LoraConfig
from transformers import LlamaConfig, PreTrainedConfig

from dsft.config.user_code import digest
from dsft.errors import one_line
from dsft.models.size import ModelSize
from dsft.models.tiles import ROW_TILE, VOCAB_TILE, tile_rows
from dsft.planner.traced_model import (
    LIGER_MODELS,
    Attention,
    TooManyOperators,
    meta_model,
    trace_evaluation,
    trace_training,
)
from dsft.planner.zero_layout import DEFAULT_OPTIMIZER, Term, pinned_bytes
from dsft.runtime.disk import user_cache
from dsft.runtime.hardware import Machine
from dsft.runtime.software import version_of
from dsft.units import DTYPE_BYTES, Batch, write_json

LAYER_INPUTS, SAVED = "layer inputs (checkpointing)", "saved activations"
BATCHES = (1, 4)
"""Sequences of the two micro batches that are traced: what a batch takes is a line through them."""
MOST_OPERATORS, SHORTER = 2000, (256, 64)
"""Operators of a trace from which on shorter sequences are traced, and in the end a single layer of each kind: such
code computes chunks of 64 (gated delta rule) or 256 positions (Mamba 2) one after the other where its kernels are
missing. Where attention makes no matrix, bytes per token do not grow with the length; the time of a trace does. The
kernels would keep less than the code that is traced.
"""
SCANNED, SCANNED_LENGTH = ("falcon_mamba", "jamba", "mamba", "rwkv", "zamba"), 16
"""Architectures that compute one position after the other, and the length that is traced of them."""
UNTRACEABLE = (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError)
"""What a model's own code raises where it does not run over meta tensors."""


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
        rows = tile_rows(self.tiled_vocab, num_tokens) if self.tiled_vocab else 1
        return int(rows * self.fixed + num_tokens * self.per_token)

    def formula(self, num_tokens: int) -> str:
        parts = [f"{num_tokens:,} tokens x {self.per_token:,.0f} B"] if self.per_token else []
        rows = f"{tile_rows(self.tiled_vocab, num_tokens):,} rows of a tile x " if self.tiled_vocab else ""
        return " + ".join(parts + ([f"{rows}{self.fixed:,.0f} B"] if self.fixed >= 1 else []))


def mean(costs: Sequence[Cost]) -> Cost:
    """Of layers that may differ."""
    per_token, fixed = (sum(getattr(cost, name) for cost in costs) / len(costs) for name in ("per_token", "fixed"))
    return Cost(per_token=per_token, fixed=fixed)


@dataclass(frozen=True, kw_only=True)
class TrainingActivations:
    """What a forward and backward of one micro batch holds on one GPU besides weights and gradients."""

    once: Cost
    """Held from the first layer to the last: rotary angles, masks."""
    layers_saved: tuple[Cost, ...]
    """What the backward of each layer needs, and the layer keeps where it is not checkpointed."""
    layers_input: tuple[Cost, ...]
    """What checkpointing keeps of each layer."""
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
    """"trace of its own code", or of what other model and why."""
    layer_numbers: tuple[int, ...] = ()
    """As ModelSize has them; empty where they are those of the layers alone."""

    @property
    def num_layers(self) -> int:
        return len(self.layers_saved)

    def checkpointed_layers(self, every: int) -> list[int]:
        """Indexes of the layers that are computed again: each so manieth, as transformers counts; none with 0."""
        numbers = self.layer_numbers or range(self.num_layers)
        return [index for index, number in enumerate(numbers) if every and number % every == 0]

    def terms(self, num_tokens: int, every: int, *, offloading_ranks: int = 0) -> list[Term]:
        """List what is alive at the peak.

        The head's peak and that of a layer's backward come at different moments, both while all layers hold theirs.

        Args:
            num_tokens: of one micro batch on one rank, padding included.
            every: each so manieth layer is checkpointed; 0 is none. The others keep what they saved.
            offloading_ranks: of a node, whose layer inputs lie in pinned host memory; 0 leaves them on the device.
        """
        terms = [
            Term("rotary angles and masks", self.once.num_bytes(num_tokens), self.once.formula(num_tokens), "compute")
        ]
        peaks = [("logits and loss", self.head)]
        checkpointed = self.checkpointed_layers(every)
        again = [self.layers_input[index] for index in checkpointed]
        plain = [cost for index, cost in enumerate(self.layers_saved) if index not in checkpointed]
        for name, costs, backward in (
            (LAYER_INPUTS, again, self.layer_transient),
            (SAVED, plain, self.layer_backward),
        ):
            if not costs:
                continue
            cost, layers = mean(costs), len(costs)
            num_bytes, how = int(layers * (cost.fixed + num_tokens * cost.per_token)), f"({cost.formula(num_tokens)})"
            if offloading_ranks and costs is again:
                num_bytes = offloading_ranks * layers * pinned_bytes(cost.num_bytes(num_tokens))
                how = f"{offloading_ranks} ranks x {layers} layers x {how}, pinned"
                terms.append(Term(name, num_bytes, how, "compute", "host"))
            else:
                terms.append(Term(name, num_bytes, f"{layers} layers x {how}", "compute"))
            peaks.append(("backward of one layer", backward))
        name, cost = max(peaks, key=lambda peak: peak[1].num_bytes(num_tokens))
        return [*terms, Term(name, cost.num_bytes(num_tokens), cost.formula(num_tokens), "compute")]

    def as_gradients_come(self, terms: list[Term], late: int) -> list[Term]:
        """Take from what layers keep the `late` bytes that come as it goes, layer by layer: the larger of both is the
        peak. The last of the layers keeps its part.
        """
        lessened = []
        for term in terms:
            less = 0
            if term.name in (LAYER_INPUTS, SAVED) and term.place == "device":
                less = min(late, term.num_bytes - term.num_bytes // self.num_layers)
                late -= less
            how = f"{term.formula} - {less:,} that go before as many bytes of gradients come" if less else term.formula
            lessened.append(replace(term, num_bytes=term.num_bytes - less, formula=how))
        return lessened


@dataclass(frozen=True, kw_only=True)
class EvaluationActivations:
    """What scoring one batch holds on one GPU besides weights: the backbone, then logits tile by tile."""

    backbone: Cost
    """Peak of the model without its head and without gradients, with the same attention (dsft feeds no mask)."""
    hidden: Cost
    """Hidden states of all positions, and of the scored ones again."""
    logit_bytes: int
    """Of one row and word of a tile, ROW_TILE by VOCAB_TILE: in the model's dtype (twice with a softcap, around tanh),
    beside the last tile or its own copy in fp32.
    """
    vocab_size: int

    def peak_bytes(self, num_tokens: int, device: Literal["cpu", "cuda"]) -> int:
        tile = min(num_tokens, ROW_TILE[device]) * min(self.vocab_size, VOCAB_TILE[device]) * self.logit_bytes
        return max(self.backbone.num_bytes(num_tokens), self.hidden.num_bytes(num_tokens) + tile)


def exchange_term(size: ModelSize, rank_tokens: int, ranks: int, dtype: str, *, layers: int) -> Term:
    """What Ulysses attention keeps of so many layers in training, beside the activations of one rank's tokens: the
    result once more as it was before its heads came back, and keys and values that are repeated for the ranks. Queries,
    keys and values are kept as they were exchanged, in the place of those that were not.
    """
    queries, keys = size.exchanged_widths(ranks)
    width, itemsize = queries + 2 * (keys - size.kv_size), DTYPE_BYTES[dtype]
    how = f"{layers} layers x {rank_tokens:,} tokens x {width:,} x {itemsize} B"
    return Term("positions exchanged for heads", layers * rank_tokens * width * itemsize, how, "compute")


def _line(numbers: Sequence[Any], seq_len: int) -> Any:
    """Return the cost that gives these bytes at BATCHES; of lists, which have a number for each layer, their costs."""
    if isinstance(numbers[0], list):
        return tuple(_line(of_layer, seq_len) for of_layer in zip(*numbers, strict=True))
    (few, many), (less, more) = BATCHES, numbers
    per_sequence = (more - less) / (many - few)
    return Cost(fixed=less - few * per_sequence, per_token=per_sequence / seq_len)


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is to be trained, as far as memory and time depend on it."""

    size: ModelSize
    model_config: PreTrainedConfig
    dtype: str = "bfloat16"
    """Of the computation. bfloat16 and float16 have fp32 master weights; with float32 everything is fp32."""
    seq_len: int = 1024
    attention: Attention = "flash"
    adapters: LoraConfig | None = None
    patterns: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    """Of the parameters that are trained, and of those that are frozen."""
    optimizer: str = DEFAULT_OPTIMIZER
    """As transformers names it (the option `optim`); a key of OPTIMIZERS."""
    micro_batch: int | None = None
    """Sequences of one forward on one rank; None lets the plan choose."""
    accumulation: int | None = None
    sequences_per_step: int | None = None
    """Of one optimizer step over all ranks."""
    sequence_parallel: int = 1
    """Ranks that share each micro batch."""
    checkpointing: bool | None = None
    """As the user set it; None lets the plan decide."""
    checkpoint_every: int | None = None
    """With checkpointing, of which layers: each so manieth; None for all, or where the plan decides what it chooses."""
    checkpoint_offload: bool = False
    """With checkpointing, whether what it saves lies in pinned host memory."""
    liger: bool = False
    """Whether Liger's kernels are asked for; they change nothing where it has none for the architecture."""
    tiled_loss: bool = False
    """Whether logits of some tokens at a time exist (models/tiles.py)."""
    fp32_accumulation: bool | None = None
    """Whether gradients of micro batches are added up in fp32; None lets the plan decide."""
    fp32_reduction: bool = False
    """Whether gradients are sent in fp32."""
    bf16_states: bool = False
    """Whether the optimizer's copy of the weights, gradients and moments are bfloat16."""
    compiled: bool = False
    """Whether torch.compile is asked for."""
    samples: bool = False
    """Whether samples are generated at evaluations: under ZeRO-3 every rank then holds all weights."""
    async_save: bool = False
    """Whether checkpoints are written of copies in host memory."""
    compute_loss: Callable | None = None
    """A loss of the user's own."""

    def with_same_activations(self, **changes: Any) -> "Job":
        """Return the job with changes on which the bytes of a token do not depend: it takes what is traced of this."""
        other = replace(self, **changes)
        other.__dict__["traced_as"] = self.traced_as  # no field: `replace` would keep it beside other changes
        return other

    @cached_property
    def traced_as(self) -> "Job":
        """The job whose activations are traced."""
        return self

    def batch(self, micro_batch: int, accumulation: int, machine: Machine) -> Batch:
        return Batch(micro_batch, accumulation, machine.world_size, self.sequence_parallel)

    @cached_property
    def activations(self) -> TrainingActivations:
        """Under ZeRO 0 to 2."""
        return self.traced_as._training_activations(zero_3=False)

    @cached_property
    def activations_of_shards(self) -> TrainingActivations:
        """Under ZeRO-3: more where weights are frozen, as a base below adapters is."""
        all_trained = self.size.num_trainable == self.size.num_params - self.size.other_params
        is_alike = all_trained or self.size.quantization  # which is never sharded
        return self.activations if is_alike else self.traced_as._training_activations(zero_3=True)

    def _training_activations(self, *, zero_3: bool) -> TrainingActivations:
        """Args: `zero_3`: with the linear layers of ZeRO-3, which keep the inputs of frozen weights too."""
        size, liger = self.size, self.liger and self.size.model_type in LIGER_MODELS
        traces, source = _traced(
            trace_training,
            self,
            patterns=self.patterns,
            liger=liger,
            tiled=self.tiled_loss,
            tiled_mlp=size.tiled_params > 0,
            compute_loss=self.compute_loss,
            zero_3=zero_3,
        )
        seq_len, names = traces[0]["seq_len"], traces[0].keys() - {"seq_len"}
        costs = {name: _line([trace[name] for trace in traces], seq_len) for name in names}
        if self.tiled_loss:  # a traced tile is one sequence
            costs["head"] = replace(costs["head"], fixed=costs["head"].fixed / seq_len, tiled_vocab=size.vocab_size)
        elif liger and not self.compute_loss:
            # What Liger's loss takes, which no CPU can trace (liger_kernel/ops/fused_linear_cross_entropy.py): the
            # final norm's input and output; the gradient of the hidden states; logits that take up to twice that.
            costs["head"] = Cost(per_token=5 * DTYPE_BYTES[self.dtype] * size.hidden_size)
        numbers = size.layer_numbers if len(size.layer_numbers) == len(costs["layers_saved"]) else ()
        return TrainingActivations(source=source, layer_numbers=numbers, **costs)

    @cached_property
    def evaluation_activations(self) -> EvaluationActivations:
        traces, _ = _traced(trace_evaluation, self)
        itemsize = DTYPE_BYTES[self.dtype]
        softcap = getattr(self.model_config.get_text_config(), "final_logit_softcapping", None)
        return EvaluationActivations(
            backbone=_line([trace["backbone"] for trace in traces], traces[0]["seq_len"]),
            hidden=Cost(per_token=2 * itemsize * self.size.hidden_size),
            logit_bytes=4 + itemsize * (2 if softcap else 1),
            vocab_size=self.size.vocab_size,
        )


_known: dict[str, list] = {}
"""Traces of this process, by key."""


def _traced(trace: Callable[..., dict[str, Any]], job: Job, **options: Any) -> tuple[list[dict[str, Any]], str]:
    """Trace this model, or a Llama of its widths where its code does not run over meta tensors, and name the source."""
    shape = {"dtype": job.dtype, "seq_len": job.seq_len}
    try:
        how = shape | {"attention": job.attention, "adapters": job.adapters}
        return _cached(trace, job.model_config, **how, **options), "trace of its own code"
    except UNTRACEABLE as error:
        untraceable = f"{job.size.model_type} could not be traced ({one_line(error)[:100]})"
    if options.get("compute_loss"):
        traces, source = _traced(trace, job, **options | {"compute_loss": None})
        return traces, f"{source}, with nats in place of compute_loss, {untraceable}"
    size, adapters = job.size, job.adapters
    llama = LlamaConfig(
        hidden_size=size.hidden_size,
        intermediate_size=size.ffn_size,
        num_hidden_layers=size.num_layers,
        num_attention_heads=size.num_heads,
        num_key_value_heads=size.num_key_heads,
        head_dim=size.head_dim,
        vocab_size=size.vocab_size,
    )
    # What names layers and parameters of this model finds nothing there.
    options.pop("patterns", None)
    if adapters:
        how = {"r": adapters.r, "lora_alpha": adapters.lora_alpha}
        adapters = LoraConfig(**how, target_modules="all-linear", task_type="CAUSAL_LM")
    traces = _cached(trace, llama, attention="flash", adapters=adapters, **shape, **options)
    return traces, f"trace of llama, since {untraceable}"


def _cached(
    trace: Callable[..., dict[str, Any]],
    model_config: PreTrainedConfig,
    *,
    dtype: str,
    attention: Attention,
    adapters: LoraConfig | None,
    seq_len: int,
    patterns: tuple[tuple[str, ...], tuple[str, ...]] = ((), ()),
    **options: Any,
) -> list[dict[str, Any]]:
    """Trace this model at BATCHES, or take it from this process or from disk; what is new is kept in both. The results
    have the length that was traced, too (`seq_len`).
    """
    # A hash of the tracing code itself, and the versions of what it runs through.
    folder, models = Path(__file__).parent, ("size", "tiles")
    files = ("activations.py", "traced_model.py", *(f"../models/{name}.py" for name in models))
    facts = options | {
        "trace": trace.__name__,
        "model": model_config.get_text_config().to_dict(),
        "adapters": adapters and adapters.to_dict(),
        "patterns": patterns,
        "dtype": dtype,
        "attention": attention,
        "seq_len": seq_len,
        "compute_loss": options.get("compute_loss") and digest(options["compute_loss"]),
        "code": hashlib.sha256(b"".join((folder / name).read_bytes() for name in files)).hexdigest(),
        "numbers": (BATCHES, MOST_OPERATORS, SHORTER, SCANNED_LENGTH),
        "versions": [version_of(name) for name in ("torch", "transformers", "peft", "deepspeed")],
    }
    text = json.dumps(
        facts,
        sort_keys=True,
        # Sets in one order: their own differs from process to process.
        default=lambda value: sorted(map(str, value)) if isinstance(value, (set, frozenset)) else str(value),
    )
    key = hashlib.sha256(text.encode()).hexdigest()[:32]
    if key in _known:
        return _known[key]
    path = user_cache() / "activations" / f"{key}.json"
    try:
        results = json.loads(path.read_text(encoding="utf-8"))["results"]
        is_whole = len(results) == len(BATCHES) and all(
            type(number) is int
            for result in results
            for value in result.values()
            for number in (value if isinstance(value, list) else [value])
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # there is none, or it is damaged
        is_whole = False
    if not is_whole:
        how = {"dtype": getattr(torch, dtype), "attention": attention}
        blueprint = meta_model(model_config, adapters=adapters, patterns=patterns, **how)
        lengths, text_config = [seq_len], model_config.get_text_config()
        attends = hasattr(text_config, "num_attention_heads")
        if text_config.model_type in SCANNED and not (attends and attention == "eager"):
            lengths = [min(seq_len, SCANNED_LENGTH)]
        elif attention == "flash" or not attends:  # else each layer has a matrix: of probabilities or the mask
            lengths += [length for length in SHORTER if length < seq_len]
        attempts = [{"seq_len": length, "most_operators": MOST_OPERATORS} for length in lengths]
        fewest = {"layers_of_kind": 1} if trace is trace_training else {}
        attempts.append({"seq_len": lengths[-1]} | fewest)
        for attempt in attempts:
            with contextlib.suppress(TooManyOperators):
                results = [
                    trace(blueprint, batch=batch, attention=attention, **attempt, **options)
                    | {"seq_len": attempt["seq_len"]}
                    for batch in BATCHES
                ]
                break
        with contextlib.suppress(OSError):  # without a cache the next plan is only slower
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, {"results": results})
    _known[key] = results
    return results
