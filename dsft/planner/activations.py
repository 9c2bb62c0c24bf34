r"""Bytes that activations take on one GPU, from one forward and backward of the real model over fake tensors: shapes
only, no memory, no GPU.

One and two layers are traced and the rest is extrapolated (every layer of a kind keeps the same bytes), so a model of
any size takes seconds. Storages are counted as autograd and the Python code hold and free them. Weights, their
gradients and the token ids are left out. What a CUDA kernel needs inside (workspace of a matrix product, a rounded-up
length) is left out too, but for attention (fake_model.py).

    bytes                                  head                 What a step holds without checkpointing, over time.
      |                                   /\    backward        `kept`: what the layers saved. `head`: the most above
      |                       kept ______/  \   of a layer      it between the last layer's output and its gradient.
      |                    _______/          \/\_              `layers`: the most above it before and after: the
      |            _______/                      \/\_          backward of the last layer, when all others still
      |    _______/                                  \/\_      hold theirs.
      +-----------------------------------------------------> time
         layer 1   layer 2    layer 3   loss   3   2   1

A trace is kept: in this process, and on disk in `~/.cache/dsft/activations/` (XDG_CACHE_HOME is followed) under a hash
of everything that it depends on.
"""

import contextlib
import functools
import hashlib
import json
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import peft
import torch
import transformers
from peft import LoraConfig
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, PreTrainedConfig, PreTrainedModel

from dsft.config.user_code import digest
from dsft.errors import one_line
from dsft.models.head import ROW_TILE, VOCAB_TILE, own_nats_of, tile_rows
from dsft.models.size import ModelSize
from dsft.planner.fake_model import (
    Attention,
    decoder_layers,
    fake_model,
    layer_kinds,
    meta_model,
)
from dsft.planner.zero_layout import Term, pinned_bytes
from dsft.runtime.disk import user_cache
from dsft.units import DTYPE_BYTES, write_json

aten = torch.ops.aten
PRODUCTS = {aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten._grouped_mm}
"""Products of matrices: their time is that of their arithmetic, not of the memory they read."""


class StorageLog(TorchDispatchMode):
    """Notes when storages appear and vanish while it is active; works on fake and on real tensors.

    A storage is known by the address of its C++ object (`_cdata`), since fake tensors have no data to point at. An
    address is used again once its storage is gone, so each storage gets a number of its own when it appears.

    Args:
        known: tensors that are not counted (weights, buffers, inputs).
        gradient_shape: a tensor of this shape made after `mark("head")` is a gradient of embedding or head, and is not
            counted.
    """

    def __init__(self, known: list[torch.Tensor], gradient_shape: torch.Size | None = None):
        super().__init__()
        self.gradient_shape = gradient_shape
        self.indices: dict[int, int] = {tensor.untyped_storage()._cdata: -1 for tensor in known}
        """Living storage -> its number, in order of appearance; -1 where it is not counted."""
        self.events: list[tuple[int, int]] = []
        """(number of a storage, bytes that appeared; negative where they vanished)."""
        self.gradients: set[int] = set()
        self.marks: dict[str, int] = {}
        self.references: dict[int, weakref.ref] = {}
        self.traffic = 0
        """Bytes that operators other than products have read and written."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.prim.device.default:  # most calls: autograd asks fake tensors again and again
            return func(*args)
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
        """Note that a storage has vanished: torch calls this."""
        self.events.append((index, -num_bytes))
        del self.indices[address], self.references[address]

    def mark(self, name: str) -> None:
        """Call this moment `name`; the first time counts."""
        self.marks.setdefault(name, len(self.events))

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
    traffic: int = field(compare=False)
    """Read and written by all operators but products; real tensors may take other ones than fake tensors."""


def trace_step(
    model: PreTrainedModel, inputs: dict[str, torch.Tensor], compute_loss: Callable | None = None
) -> StepTrace:
    """Trace one training step of `model` as the Trainer runs it: outputs are dropped before the backward.

    `model` holds fake tensors where this is called within `fake_model`'s context, and may as well be real.
    """
    known = [*model.parameters(), *model.buffers(), *inputs.values()]
    log = StorageLog(known, gradient_shape=model.get_input_embeddings().weight.shape)
    last_output = []

    def at_last_layer(module, args, output):
        hidden_BTH = output[0] if isinstance(output, tuple) else output
        last_output.append(log.indices[hidden_BTH.untyped_storage()._cdata])
        log.mark("head")
        hidden_BTH.register_hook(lambda gradient: log.mark("layers"))

    def leave_out(gradient):  # what arrives at a parameter is no activation
        log.gradients.add(log.indices[gradient.untyped_storage()._cdata])

    handles = [decoder_layers(model)[-1].register_forward_hook(at_last_layer)]
    handles += [parameter.register_hook(leave_out) for parameter in model.parameters() if parameter.requires_grad]
    with log:
        if compute_loss is None:
            loss = model(**inputs, labels=inputs["input_ids"], use_cache=False).loss
        else:
            logits_NV = model(**inputs, use_cache=False).logits.flatten(0, 1).float()
            loss = own_nats_of(compute_loss, logits_NV, inputs["input_ids"].flatten())[0]
            del logits_NV
        log.mark("loss")
        loss.backward()
    for handle in handles:
        handle.remove()
    model.zero_grad()
    live, head, layers = log.live_bytes(), log.marks["head"], log.marks["layers"]
    kept = sum(change for index, change in log.events[: log.marks["loss"]] if index < head and index not in last_output)
    return StepTrace(
        kept=kept,
        head=max(live[head : layers + 1]) - kept,
        layers=max(live[:head] + live[layers:]) - kept,
        traffic=log.traffic,
    )


def inputs_of(batch: int, seq_len: int, attention: Attention) -> dict[str, torch.Tensor]:
    ids_BT = torch.zeros(batch, seq_len, dtype=torch.long)
    return {"input_ids": ids_BT} | ({} if attention == "flash" else {"attention_mask": torch.ones_like(ids_BT)})


def trace_training(
    model_config: PreTrainedConfig,
    *,
    batches: tuple[int, ...],
    seq_len: int,
    dtype: torch.dtype,
    attention: Attention,
    adapters: LoraConfig | None = None,
    patterns: tuple[tuple[str, ...], tuple[str, ...]] = ((), ()),
    liger: bool = False,
    tiled: bool = False,
    compute_loss: Callable | None = None,
) -> list[dict[str, int]]:
    """Trace one and two layers of each kind and add up as many as there are.

    Args:
        tiled: the loss is of tiles, each of one sequence.

    Returns:
        for each size of batch, the bytes of one micro batch as `TrainingActivations` names them, but for `layers_saved`
        and `layers_input`, which are those of all layers.
    """
    blueprint = meta_model(model_config, dtype=dtype, attention=attention, adapters=adapters, patterns=patterns)
    totals: list[Counter[str]] = [Counter() for _ in batches]
    for layers in layer_kinds(blueprint):
        steps: dict[tuple[int, bool, int], StepTrace] = {}
        for number in (1, 2):
            parts = {"layers": layers[:1] * number, "liger": liger, "tile_rows": seq_len if tiled else None}
            with fake_model(blueprint, **parts) as model:
                for checkpointing in (False, True):
                    if checkpointing:
                        model.activation_checkpointing_enable({"use_reentrant": False})  # as the Trainer does
                    for batch in batches:
                        inputs = inputs_of(batch, seq_len, attention)
                        steps[number, checkpointing, batch] = trace_step(model, inputs, compute_loss)
        for batch, total in zip(batches, totals, strict=True):
            plain, checkpointed = steps[2, False, batch], steps[2, True, batch]
            layer_input = checkpointed.kept - steps[1, True, batch].kept
            total["once"] += checkpointed.kept - 2 * layer_input  # rotary angles and masks are a kind's own
            total["layers_saved"] += len(layers) * (plain.kept - steps[1, False, batch].kept)
            total["layers_input"] += len(layers) * layer_input
            total["layer_transient"] = max(total["layer_transient"], checkpointed.layers)
            total["layer_backward"] = max(total["layer_backward"], plain.layers)
            total["head"] = max(total["head"], checkpointed.head)
            for checkpointing, name in ((False, "traffic"), (True, "traffic_checkpointed")):
                layer = steps[2, checkpointing, batch].traffic - steps[1, checkpointing, batch].traffic
                if not total[name]:  # of the first kind also embedding, norm, head and loss
                    total[name] = steps[1, checkpointing, batch].traffic - layer
                total[name] += len(layers) * layer
    return [dict(total) for total in totals]


def trace_evaluation(
    model_config: PreTrainedConfig,
    *,
    batches: tuple[int, ...],
    seq_len: int,
    dtype: torch.dtype,
    attention: Attention,
    adapters: LoraConfig | None = None,
) -> list[dict[str, int]]:
    """Trace three layers of each kind without gradients, as scoring calls them: the head on one position only. Returns
    for each size of batch the peak of the `backbone`.
    """
    peaks = [0] * len(batches)
    blueprint = meta_model(model_config, dtype=dtype, attention=attention, adapters=adapters)
    for layers in layer_kinds(blueprint):
        with fake_model(blueprint, layers=layers[:1] * 3) as model:
            model.eval()
            for number, batch in enumerate(batches):
                inputs = inputs_of(batch, seq_len, attention)
                log = StorageLog([*model.parameters(), *model.buffers(), *inputs.values()])
                with torch.no_grad(), log:
                    model(**inputs, use_cache=False, logits_to_keep=1)
                peaks[number] = max(peaks[number], max(log.live_bytes()))
    return [{"backbone": peak} for peak in peaks]


Loss = Literal["hf", "tiled", "fused"]
"""hf: transformers' ForCausalLMLoss, over all logits in fp32. tiled: logits of some tokens at a time
(models/head.py). fused: Liger's fused_linear_cross_entropy, which does the same.
"""
BATCHES = (1, 4)
"""Sequences of the two micro batches that are traced: what a batch takes is a line through them."""
SCANNED, SCANNED_LENGTH = ("jamba", "mamba", "falcon_mamba"), 16
"""Architectures whose code computes one position after the other where their kernels are missing, and the length of
sequences that is traced of them: bytes per token do not grow with it, the time of a trace does, to minutes. Their
kernels would keep less than the code that is traced.
"""
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
        rows = tile_rows(self.tiled_vocab, num_tokens) if self.tiled_vocab else 1
        return int(rows * self.fixed + num_tokens * self.per_token)

    def formula(self, num_tokens: int) -> str:
        parts = [f"{num_tokens:,} tokens x {self.per_token:,.0f} B"] if self.per_token else []
        rows = f"{tile_rows(self.tiled_vocab, num_tokens):,} rows of a tile x " if self.tiled_vocab else ""
        return " + ".join(parts + ([f"{rows}{self.fixed:,.0f} B"] if self.fixed >= 1 else []))


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

    def checkpointed_layers(self, every: int) -> int:
        """Counts the layers that are computed again where only each so manieth is, from the first on."""
        return -(-self.num_layers // every)

    def terms(self, num_tokens: int, checkpointing: bool, every: int = 1, *, offloading_ranks: int = 0) -> list[Term]:
        """List what is alive at the peak.

        The head's peak and that of a layer's backward come at different moments, both while all layers hold theirs.

        Args:
            num_tokens: of one micro batch on one rank, padding included.
            every: each so manieth layer is checkpointed, and the others keep what they saved.
            offloading_ranks: of a node, whose layer inputs lie in pinned host memory; 0 leaves them on the device.
        """
        again = self.checkpointed_layers(every) if checkpointing else 0
        terms = [
            Term("rotary angles and masks", self.once.num_bytes(num_tokens), self.once.formula(num_tokens), "compute")
        ]
        peaks = [("logits and loss", self.head)]
        for name, layers, cost, backward in (
            ("layer inputs (checkpointing)", again, self.layer_input, self.layer_transient),
            ("saved activations", self.num_layers - again, self.layer_saved, self.layer_backward),
        ):
            if not layers:
                continue
            num_bytes, how = int(layers * (cost.fixed + num_tokens * cost.per_token)), f"({cost.formula(num_tokens)})"
            if offloading_ranks and cost is self.layer_input:
                num_bytes = offloading_ranks * layers * pinned_bytes(cost.num_bytes(num_tokens))
                how = f"{offloading_ranks} ranks x {layers} layers x {how}, pinned"
                terms.append(Term(name, num_bytes, how, "compute", "host"))
            else:
                terms.append(Term(name, num_bytes, f"{layers} layers x {how}", "compute"))
            peaks.append(("backward of one layer", backward))
        name, cost = max(peaks, key=lambda peak: peak[1].num_bytes(num_tokens))
        return [*terms, Term(name, cost.num_bytes(num_tokens), cost.formula(num_tokens), "compute")]


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


def _line(traces: list[dict[str, int]], name: str, seq_len: int, divisor: int = 1) -> Cost:
    """Return the cost that gives this field of the traces at BATCHES, divided by `divisor`."""
    (few, many), (less, more) = BATCHES, (trace[name] / divisor for trace in traces)
    per_sequence = (more - less) / (many - few)
    return Cost(fixed=less - few * per_sequence, per_token=per_sequence / seq_len)


def training_activations(
    size: ModelSize,
    model_config: PreTrainedConfig,
    *,
    dtype: str,
    attention: Attention,
    loss: Loss,
    seq_len: int,
    adapters: LoraConfig | None = None,
    patterns: tuple[tuple[str, ...], tuple[str, ...]] = ((), ()),
    liger: bool = False,
    compute_loss: Callable | None = None,
) -> TrainingActivations:
    """Trace a model's training, or that of a Llama of the same widths where its code does not run over fake tensors.

    Args:
        dtype: float32, bfloat16 or float16.
        adapters: with lora and qlora.
        patterns: of the parameters that are trained, and of those that are frozen.
        seq_len: the length that sequences are padded to.
        liger: with Liger's norms and feed-forwards; its own loss is "fused".
        compute_loss: the user's own; planned as nats where it does not run over fake tensors.
    """
    if size.model_type in SCANNED and attention != "eager":  # which makes a matrix
        seq_len = min(seq_len, SCANNED_LENGTH)
    options = {"seq_len": seq_len, "dtype": dtype, "adapters": adapters} | ({"liger": True} if liger else {})
    options |= {"patterns": patterns} if any(patterns) else {}
    options |= {"tiled": True} if loss == "tiled" else {}
    options |= {"compute_loss": compute_loss} if compute_loss else {}
    traces, source = _traced(trace_training, size, model_config, attention=attention, **options)

    kept, inputs = (_line(traces, name, seq_len, size.num_layers) for name in ("layers_saved", "layers_input"))
    head = _line(traces, "head", seq_len)
    if loss == "fused":
        # What Liger's loss takes, which no CPU can trace (liger_kernel/ops/fused_linear_cross_entropy.py): the final
        # norm's input and output; the gradient of the hidden states; logits of as many tokens as take up to twice that.
        head = Cost(per_token=5 * DTYPE_BYTES[dtype] * size.hidden_size)
    if loss == "tiled":
        head = replace(head, fixed=head.fixed / seq_len, tiled_vocab=size.vocab_size)  # a traced tile is one sequence
    names = ("once", "layer_transient", "layer_backward", "traffic", "traffic_checkpointed")
    return TrainingActivations(
        num_layers=size.num_layers,
        layer_saved=kept,
        layer_input=inputs,
        head=head,
        source=source,
        **{name: _line(traces, name, seq_len) for name in names},
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
    if size.model_type in SCANNED and attention != "eager":
        seq_len = min(seq_len, SCANNED_LENGTH)
    options = {"seq_len": seq_len, "dtype": dtype, "adapters": adapters}
    traces, _ = _traced(trace_evaluation, size, model_config, attention=attention, **options)
    itemsize = DTYPE_BYTES[dtype]
    softcap = getattr(model_config.get_text_config(), "final_logit_softcapping", None)
    return EvaluationActivations(
        backbone=_line(traces, "backbone", seq_len),
        hidden=Cost(per_token=2 * itemsize * size.hidden_size),
        logit_bytes=4 + itemsize * (2 if softcap else 1),
        vocab_size=size.vocab_size,
    )


_known: dict[str, list] = {}
"""Traces of this process, by key."""


def _traced(
    trace: Callable[..., list[dict[str, int]]],
    size: ModelSize,
    model_config: PreTrainedConfig,
    *,
    attention: Attention,
    **options: Any,
) -> tuple[list[dict[str, int]], str]:
    """Trace this model, or a Llama of its widths where its code does not run over fake tensors. Returns also
    the source."""
    try:
        return _cached(trace, model_config, attention=attention, **options), "fake-tensor trace"
    except UNTRACEABLE as error:
        reason = f"since {size.model_type} could not be traced ({one_line(error)[:100]})"
    if options.pop("compute_loss", None):
        traces, source = _traced(trace, size, model_config, attention=attention, **options)
        return traces, f"{source}, with nats in place of compute_loss, {reason.partition(' ')[2]}"
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
    if options["adapters"]:
        rank, alpha = options["adapters"].r, options["adapters"].lora_alpha
        options["adapters"] = LoraConfig(r=rank, lora_alpha=alpha, target_modules="all-linear", task_type="CAUSAL_LM")
    traces = _cached(trace, llama, attention="flash", **options)
    return traces, f"fake-tensor trace of llama, {reason}"


def _cached(
    trace: Callable[..., list[dict[str, int]]],
    model_config: PreTrainedConfig,
    *,
    dtype: str,
    adapters: LoraConfig | None,
    **options: Any,
) -> list[dict[str, int]]:
    """Trace this model at BATCHES, or take it from this process or from disk; what is new is kept in both."""
    # A hash of the tracing code itself, and the versions of what it runs through.
    folder, files = Path(__file__).parent, ("activations.py", "fake_model.py", "../models/head.py")
    source = hashlib.sha256(b"".join((folder / name).read_bytes() for name in files)).hexdigest()
    facts = {
        "trace": trace.__name__,
        "model": model_config.get_text_config().to_dict(),
        "adapters": adapters and adapters.to_dict(),
        "dtype": dtype,
        "code": [torch.__version__, transformers.__version__, peft.__version__, source, str(BATCHES)],
    }
    own_loss = {"compute_loss": digest(options["compute_loss"])} if "compute_loss" in options else {}
    text = json.dumps(
        facts | options | own_loss,
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
        are_numbers = all(type(number) is int for result in results for number in result.values())
        is_whole = len(results) == len(BATCHES) and are_numbers
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # there is none, or it is damaged
        is_whole = False
    if not is_whole:
        results = trace(model_config, batches=BATCHES, dtype=getattr(torch, dtype), adapters=adapters, **options)
        with contextlib.suppress(OSError):  # without a cache the next plan is only slower
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, {"results": results})
    _known[key] = results
    return results
