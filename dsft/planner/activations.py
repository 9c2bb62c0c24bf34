r"""Bytes that activations take on one GPU, from one forward and backward of the real model over meta tensors: shapes
only, no memory, no GPU.

Two layers of each kind are traced, and the second is counted as often as there are some, so a model of any size takes
seconds. Storages are counted as autograd and the Python code hold and free them. Left out: weights, their gradients,
token ids, and what a CUDA kernel needs inside, but for attention (traced_model.py). A trace is kept in this process,
and on disk in `~/.cache/dsft/activations/` (XDG_CACHE_HOME is followed) under a hash of everything that it depends on.
"""

import contextlib
import functools
import hashlib
import json
import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
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
from dsft.models.size import ModelSize, decoder_layers
from dsft.models.tiles import ROW_TILE, VOCAB_TILE, own_nats_of, tile_rows
from dsft.planner.traced_model import Attention, layer_kinds, meta_model, traced_model
from dsft.planner.zero_layout import Term, pinned_bytes
from dsft.runtime.disk import user_cache
from dsft.runtime.software import version_of
from dsft.units import DTYPE_BYTES, write_json

aten = torch.ops.aten
LAYER_INPUTS, SAVED = "layer inputs (checkpointing)", "saved activations"
PRODUCTS = {aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten._grouped_mm}
"""Products of matrices: their time is that of their arithmetic, not of the memory they read."""


class TooManyOperators(Exception):
    """A trace takes more operators than it may."""


class StorageLog(TorchDispatchMode):
    """Notes when storages appear and vanish while it is active; works on meta and on real tensors.

    Args:
        known: tensors that are not counted (weights, buffers, inputs).
        gradient_shape: a tensor of this shape made after `mark("head")` is a gradient of embedding or head.
        most_operators: more raise TooManyOperators.
    """

    def __init__(
        self, known: list[torch.Tensor], gradient_shape: torch.Size | None = None, most_operators: float = math.inf
    ):
        super().__init__()
        self.gradient_shape, self.operators_left = gradient_shape, most_operators
        self.indices: dict[int, int] = {tensor.untyped_storage()._cdata: -1 for tensor in known}
        """Living storage -> its number, in order of appearance; -1 where it is not counted."""
        self.events: list[tuple[int, int]] = []
        """(number of a storage, bytes that appeared; negative where they vanished)."""
        self.gradients: set[int] = set()
        self.marks: dict[str, int] = {}
        self.traffic_at: dict[str, int] = {}
        self.waiting: str | None = None
        """What the moment of the next operator is to be called."""
        self.references: dict[int, weakref.ref] = {}
        self.traffic = 0
        """Bytes that operators other than products have read and written."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if self.waiting:
            self.mark(self.waiting)
            self.waiting = None
        self.operators_left -= 1
        if self.operators_left < 0:
            raise TooManyOperators
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
        self.events.append((index, -num_bytes))
        del self.indices[address], self.references[address]

    def mark(self, name: str) -> None:
        """Call this moment `name`; the first time counts."""
        self.marks.setdefault(name, len(self.events))
        self.traffic_at.setdefault(name, self.traffic)

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
    kept_by_layer: int
    """What of `kept` the last layer made, and its input."""
    backward: int
    """With checkpointing: the most from the last layer's recompute on, above `kept` and what this recompute keeps."""
    traffic: int = field(compare=False)
    """Read and written by all operators but products; real tensors may take other ones than meta tensors."""
    traffic_of_layer: int = field(compare=False)
    """What of it is the last layer's."""
    traffic_again: int = field(compare=False)
    """What of that is its recompute's."""


def trace_step(
    model: PreTrainedModel,
    inputs: dict[str, torch.Tensor],
    compute_loss: Callable | None = None,
    *,
    checkpointing: bool = False,
    backward: bool = True,
    most_operators: float = math.inf,
) -> StepTrace:
    """Trace one training step of `model` as the Trainer runs it: outputs are dropped before the backward. Without
    `backward` its forward alone.

    `model` holds meta tensors where this is called within `traced_model`'s context, and may as well be real.
    """
    known = [*model.parameters(), *model.buffers(), *inputs.values()]
    log = StorageLog(known, model.get_input_embeddings().weight.shape, most_operators / 4)
    last_input, last_output = [], []

    def before_last_layer(module, args, options):
        hidden_BTH = args[0] if args else options["hidden_states"]
        # Autograd holds a leaf in any case, as the end of a gradient; inputs of other layers it does not.
        if hidden_BTH.is_leaf:
            log.gradients.add(log.indices[hidden_BTH.untyped_storage()._cdata])
            hidden_BTH = hidden_BTH + 0
        last_input.append(log.indices[hidden_BTH.untyped_storage()._cdata])
        log.mark("layer")
        hidden_BTH.register_hook(lambda gradient: log.mark("below"))
        return ((hidden_BTH, *args[1:]), options) if args else ((), options | {"hidden_states": hidden_BTH})

    def at_last_layer(module, args, output):
        hidden_BTH = output[0] if isinstance(output, tuple) else output
        last_output.append(log.indices[hidden_BTH.untyped_storage()._cdata])
        log.mark("head")
        log.operators_left += 3 * most_operators / 4  # of recompute and backward
        hidden_BTH.register_hook(lambda gradient: log.mark("layers"))

    def leave_out(gradient):  # what arrives at a parameter is no activation
        log.gradients.add(log.indices[gradient.untyped_storage()._cdata])

    @contextlib.contextmanager
    def computing_again():
        log.mark("again")
        try:
            yield  # ends with an exception of torch's, once all is there that the backward needs
        finally:
            log.waiting = "backward"  # what the recompute alone held goes before the next operator

    if checkpointing:
        contexts = lambda: (contextlib.nullcontext(), computing_again())  # noqa: E731
        model.activation_checkpointing_enable({"use_reentrant": False, "context_fn": contexts})
    last = decoder_layers(model)[-1]
    handles = [
        last.register_forward_pre_hook(before_last_layer, with_kwargs=True),
        last.register_forward_hook(at_last_layer),
    ]
    handles += [parameter.register_hook(leave_out) for parameter in model.parameters() if parameter.requires_grad]
    with log:
        if compute_loss is None:
            loss = model(**inputs, labels=inputs["input_ids"], use_cache=False).loss
        else:
            logits_NV = model(**inputs, use_cache=False).logits.flatten(0, 1).float()
            loss = own_nats_of(compute_loss, logits_NV, inputs["input_ids"].flatten())[0]
            del logits_NV
        log.mark("loss")
        if backward:
            loss.backward()
        for name in ("layers", "again", "backward", "below"):
            log.mark(name)
    for handle in handles:
        handle.remove()
    model.zero_grad()
    if checkpointing:
        model.activation_checkpointing_disable()
    live, head, layers = log.live_bytes(), log.marks["head"], log.marks["layers"]
    held = Counter()
    for index, change in log.events[: log.marks["loss"]]:
        if index < head and index not in last_output and index not in log.gradients:
            held[index >= log.marks["layer"] or index in last_input] += change
    kept, at, again = sum(held.values()), log.traffic_at, range(log.marks["again"], log.marks["backward"])
    held_again = sum(
        change for index, change in log.events[: again.stop] if index in again and index not in log.gradients
    )
    return StepTrace(
        kept=kept,
        head=max(live[head : layers + 1]) - kept,
        layers=max(live[:head] + (live[layers:] if backward else [])) - kept,
        kept_by_layer=held[True],
        backward=max(live[again.start :]) - kept - held_again,
        traffic=log.traffic,
        traffic_of_layer=at["head"] - at["layer"] + at["below"] - at["layers"],
        traffic_again=at["backward"] - at["again"],
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
    tiled_mlp: bool = False,
    zero_3: bool = False,
    compute_loss: Callable | None = None,
    layers_of_kind: int = 2,
    most_operators: float = math.inf,
) -> list[dict[str, Any]]:
    """Trace a model with layers of one kind after another, and add up as many as there are.

    Args:
        layers_of_kind: that are traced one after the other; the last is counted. While the second computes, Python may
            still hold what the first returned.
        tiled: the loss is of tiles, each of one sequence.
        tiled_mlp: feed-forwards compute some tokens at a time.
        zero_3: linear layers are DeepSpeed's.
        most_operators: of one forward and backward; more raise TooManyOperators.

    Returns:
        for each size of batch, the bytes of one micro batch as `TrainingActivations` names them.
    """
    blueprint = meta_model(model_config, dtype=dtype, attention=attention, adapters=adapters, patterns=patterns)
    totals: list[Counter[str]] = [Counter() for _ in batches]
    saved: list[dict[int, int]] = [{} for _ in batches]
    kept_inputs: list[dict[int, int]] = [{} for _ in batches]
    for layers in layer_kinds(blueprint):
        parts = {"liger": liger, "tile_rows": seq_len if tiled else None, "tiled_mlp": tiled_mlp, "zero_3": zero_3}
        with traced_model(blueprint, layers=layers[:1] * layers_of_kind, **parts) as model:
            steps = [
                [
                    trace_step(model, inputs_of(batch, seq_len, attention), compute_loss, **how)
                    for how in (
                        {"checkpointing": True, "most_operators": most_operators},
                        {"backward": False},  # that without checkpointing is the same as after a recompute
                    )
                ]
                for batch in batches
            ]
        for place, ((checkpointed, plain), total) in enumerate(zip(steps, totals, strict=True)):
            # Rotary angles and masks are a kind's own.
            total["once"] += checkpointed.kept - layers_of_kind * checkpointed.kept_by_layer
            saved[place] |= dict.fromkeys(layers, plain.kept_by_layer)
            kept_inputs[place] |= dict.fromkeys(layers, checkpointed.kept_by_layer)
            total["layer_transient"] = max(total["layer_transient"], checkpointed.layers)
            total["layer_backward"] = max(total["layer_backward"], plain.layers, checkpointed.backward)
            total["head"] = max(total["head"], checkpointed.head)
            traffic = checkpointed.traffic_of_layer
            once_less = traffic - checkpointed.traffic_again
            for name, of_layer in (("traffic", once_less), ("traffic_checkpointed", traffic)):
                if not total[name]:  # of the first kind also embedding, norm, head and loss
                    total[name] = checkpointed.traffic - layers_of_kind * traffic
                total[name] += len(layers) * of_layer
    return [
        dict(total)
        | {"layers_saved": [of_layer[index] for index in sorted(of_layer)]}
        | {"layers_input": [inputs[index] for index in sorted(inputs)]}
        for total, of_layer, inputs in zip(totals, saved, kept_inputs, strict=True)
    ]


def trace_evaluation(
    model_config: PreTrainedConfig,
    *,
    batches: tuple[int, ...],
    seq_len: int,
    dtype: torch.dtype,
    attention: Attention,
    adapters: LoraConfig | None = None,
    most_operators: float = math.inf,
) -> list[dict[str, Any]]:
    """Trace three layers of each kind without gradients, as scoring calls them: the head on one position only. Returns
    for each size of batch the peak of the `backbone`.
    """
    peaks = [0] * len(batches)
    blueprint = meta_model(model_config, dtype=dtype, attention=attention, adapters=adapters)
    for layers in layer_kinds(blueprint):
        with traced_model(blueprint, layers=layers[:1] * 3) as model:
            model.eval()
            for number, batch in enumerate(batches):
                inputs = inputs_of(batch, seq_len, attention)
                known = [*model.parameters(), *model.buffers(), *inputs.values()]
                log = StorageLog(known, most_operators=most_operators)
                with torch.no_grad(), log:
                    model(**inputs, use_cache=False, logits_to_keep=1)
                peaks[number] = max(peaks[number], max(log.live_bytes()))
    return [{"backbone": peak} for peak in peaks]


Loss = Literal["hf", "tiled", "fused"]
"""hf: transformers' ForCausalLMLoss, over all logits in fp32. tiled: logits of some tokens at a time
(models/tiles.py). fused: Liger's fused_linear_cross_entropy, which does the same.
"""
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


def _line(numbers: Iterable[int], seq_len: int) -> Cost:
    """Return the cost that gives these bytes at BATCHES."""
    (few, many), (less, more) = BATCHES, numbers
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
    zero_3: bool = False,
    compute_loss: Callable | None = None,
) -> TrainingActivations:
    """Trace a model's training, or that of a Llama of the same widths where its code does not run over meta tensors.

    Args:
        patterns: of the parameters that are trained, and of those that are frozen.
        liger: with Liger's norms and feed-forwards; its own loss is "fused".
        zero_3: with the linear layers of ZeRO-3, which keep the inputs of frozen weights too.
        compute_loss: the user's own; planned as nats where it does not run over meta tensors.
    """
    how = {"liger": liger, "patterns": patterns, "tiled": loss == "tiled", "compute_loss": compute_loss}
    how |= {"tiled_mlp": size.tiled_params > 0, "zero_3": zero_3}
    options = {"attention": attention, "seq_len": seq_len, "dtype": dtype, "adapters": adapters}
    traces, source = _traced(trace_training, size, model_config, **options, **how)
    seq_len = traces[0]["seq_len"]
    names = ("once", "layer_transient", "layer_backward", "head", "traffic", "traffic_checkpointed")
    costs = {name: _line((trace[name] for trace in traces), seq_len) for name in names}
    for name in ("layers_saved", "layers_input"):
        costs[name] = tuple(_line(numbers, seq_len) for numbers in zip(*(trace[name] for trace in traces), strict=True))
    if loss == "fused":
        # What Liger's loss takes, which no CPU can trace (liger_kernel/ops/fused_linear_cross_entropy.py): the final
        # norm's input and output; the gradient of the hidden states; logits of as many tokens as take up to twice that.
        costs["head"] = Cost(per_token=5 * DTYPE_BYTES[dtype] * size.hidden_size)
    if loss == "tiled":  # a traced tile is one sequence
        costs["head"] = replace(costs["head"], fixed=costs["head"].fixed / seq_len, tiled_vocab=size.vocab_size)
    numbers = size.layer_numbers if len(size.layer_numbers) == len(costs["layers_saved"]) else ()
    return TrainingActivations(source=source, layer_numbers=numbers, **costs)


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
    options = {"attention": attention, "seq_len": seq_len, "dtype": dtype, "adapters": adapters}
    traces, _ = _traced(trace_evaluation, size, model_config, **options)
    itemsize = DTYPE_BYTES[dtype]
    softcap = getattr(model_config.get_text_config(), "final_logit_softcapping", None)
    return EvaluationActivations(
        backbone=_line((trace["backbone"] for trace in traces), traces[0]["seq_len"]),
        hidden=Cost(per_token=2 * itemsize * size.hidden_size),
        logit_bytes=4 + itemsize * (2 if softcap else 1),
        vocab_size=size.vocab_size,
    )


_known: dict[str, list] = {}
"""Traces of this process, by key."""


def _traced(
    trace: Callable[..., list[dict[str, Any]]],
    size: ModelSize,
    model_config: PreTrainedConfig,
    *,
    attention: Attention,
    **options: Any,
) -> tuple[list[dict[str, Any]], str]:
    """Trace this model, or a Llama of its widths where its code does not run over meta tensors, and name the source."""
    try:
        return _cached(trace, model_config, attention=attention, **options), "trace of its own code"
    except UNTRACEABLE as error:
        reason = f"since {size.model_type} could not be traced ({one_line(error)[:100]})"
    if options.get("compute_loss"):
        options["compute_loss"] = None
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
    return traces, f"trace of llama, {reason}"


def _cached(
    trace: Callable[..., list[dict[str, Any]]],
    model_config: PreTrainedConfig,
    *,
    dtype: str,
    adapters: LoraConfig | None,
    seq_len: int,
    **options: Any,
) -> list[dict[str, Any]]:
    """Trace this model at BATCHES, or take it from this process or from disk; what is new is kept in both. The results
    have the length that was traced, too (`seq_len`).
    """
    # A hash of the tracing code itself, and the versions of what it runs through.
    folder, models = Path(__file__).parent, ("size", "tiles")
    files = ("activations.py", "traced_model.py", *(f"../models/{name}.py" for name in models))
    source = hashlib.sha256(b"".join((folder / name).read_bytes() for name in files)).hexdigest()
    facts = {
        "trace": trace.__name__,
        "model": model_config.get_text_config().to_dict(),
        "adapters": adapters and adapters.to_dict(),
        "dtype": dtype,
        "seq_len": seq_len,
        "code": [
            torch.__version__,
            transformers.__version__,
            peft.__version__,
            version_of("deepspeed"),
            source,
            str((BATCHES, MOST_OPERATORS, SHORTER, SCANNED_LENGTH)),
        ],
    }
    own_loss = {"compute_loss": digest(options["compute_loss"])} if options.get("compute_loss") else {}
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
        are_numbers = all(
            type(number) is int
            for result in results
            for value in result.values()
            for number in (value if isinstance(value, list) else [value])
        )
        is_whole = len(results) == len(BATCHES) and are_numbers
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # there is none, or it is damaged
        is_whole = False
    if not is_whole:
        options |= {"batches": BATCHES, "dtype": getattr(torch, dtype), "adapters": adapters}
        lengths, text_config = [seq_len], model_config.get_text_config()
        attends = hasattr(text_config, "num_attention_heads")
        if text_config.model_type in SCANNED and not (attends and options["attention"] == "eager"):
            lengths = [min(seq_len, SCANNED_LENGTH)]
        elif (
            options["attention"] == "flash" or not attends
        ):  # else each layer has a matrix: of probabilities or the mask
            lengths += [length for length in SHORTER if length < seq_len]
        attempts = [{"seq_len": length, "most_operators": MOST_OPERATORS} for length in lengths]
        fewest = {"layers_of_kind": 1} if trace is trace_training else {}
        attempts.append({"seq_len": lengths[-1]} | fewest)
        for attempt in attempts:
            with contextlib.suppress(TooManyOperators):
                results = trace(model_config, **attempt, **options)
                break
        results = [result | {"seq_len": attempt["seq_len"]} for result in results]
        with contextlib.suppress(OSError):  # without a cache the next plan is only slower
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, {"results": results})
    _known[key] = results
    return results
