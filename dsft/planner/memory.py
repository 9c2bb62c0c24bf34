"""Memory of a training on one GPU and in the host memory of one node, as a list of terms. Pure arithmetic.

Formulas follow DeepSpeed 0.19.8 (deepspeed/runtime/zero: stage_1_and_2.py, stage3.py) to within about 10 %: the peak of
the rank with the highest. Not counted: padding, torch.compile, quantised collectives, offload to NVMe.
"""

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import psutil

from dsft.config.deepspeed import DeepSpeedJson, get_value
from dsft.runtime.hardware import COMMUNICATOR_BYTES, CONTEXT_BYTES, Machine
from dsft.units import DTYPE_BYTES, GB, Batch

if TYPE_CHECKING:  # they import transformers, which a report would wait for
    from peft import PeftConfig
    from transformers import PreTrainedConfig

    from dsft.models.measure import ModelSize
    from dsft.planner.activations import Activations, Attention


# ---- optimizers


@dataclass(frozen=True, kw_only=True)
class OptimizerMemory:
    """Bytes per trained parameter that an optimizer needs beside weight and gradient."""

    state_bytes: float  # its moments
    master_bytes: int = 4  # the fp32 copy of the weight that is updated
    step_bytes: int = 0  # temporary copies during an update

    @property
    def checkpoint_bytes(self) -> float:
        """Master weights and moments: kept between steps and written to checkpoints."""
        return self.master_bytes + self.state_bytes


EIGHT_BIT_BYTES = 1 + 4 / 256
"""A moment of bitsandbytes: a byte, and an fp32 scale for 256 of them (bitsandbytes/optim/optimizer.py)."""
ADAM = OptimizerMemory(state_bytes=8)  # m 4 + v 4 in fp32 (ZeRO paper, table 1)
EIGHT_BIT_ADAM = OptimizerMemory(state_bytes=2 * EIGHT_BIT_BYTES)
LION = OptimizerMemory(state_bytes=4)
COPYING = OptimizerMemory(state_bytes=4, step_bytes=8)
OPTIMIZERS = {
    "adam": ADAM,
    "adamw": ADAM,
    "adamw_torch_fused": ADAM,
    "adamw_32bit": ADAM,
    "adamw_torch": OptimizerMemory(state_bytes=8, step_bytes=8),  # two fp32 copies (_multi_tensor_adamw)
    "adamw_8bit": EIGHT_BIT_ADAM,
    "adamw_bnb_8bit": EIGHT_BIT_ADAM,
    "lion": LION,
    "lion_32bit": LION,
    "lion_8bit": OptimizerMemory(state_bytes=EIGHT_BIT_BYTES),
    "muon": LION,
    "sgd": OptimizerMemory(state_bytes=0, step_bytes=4),
    "adagrad": COPYING,
    "rmsprop": COPYING,
    "adafactor": COPYING,  # of ZeRO's flat shards nothing can be factored
}
"""By the name of the option `optim`, without "paged_", and by a DeepSpeed JSON's `optimizer.type` in small letters."""
DEFAULT_OPTIMIZER = "adamw_torch_fused"  # transformers' default
PLANNED_AS = "adamw_torch"  # stands in for optimizers that are not in the table; the plan notes it


def optimizer_name(deepspeed_config: DeepSpeedJson, optim: str | None) -> str:
    """Return the optimizer that the DeepSpeed configuration names, if it names one, else `optim`."""
    kind = get_value(deepspeed_config, "optimizer.type")
    if kind:
        return str(kind).lower()
    return (optim or DEFAULT_OPTIMIZER).removeprefix("paged_")


def optimizer_memory(deepspeed_config: DeepSpeedJson, optim: str | None, *, weight_bytes: int) -> OptimizerMemory:
    """Look up an optimizer's memory, as the DeepSpeed configuration changes it. `weight_bytes`: of one weight."""
    name = optimizer_name(deepspeed_config, optim)
    memory = OPTIMIZERS.get(name, OPTIMIZERS[PLANNED_AS])
    has_own_types = "bit" in name or name == "adafactor"  # also with bfloat16 master weights
    if get_value(deepspeed_config, "bf16.bf16_optimizer_states") and not has_own_types:
        memory = dataclasses.replace(memory, state_bytes=memory.state_bytes / 2, step_bytes=memory.step_bytes // 2)
    if get_value(deepspeed_config, "bf16.bf16_master_weights_and_grads"):
        memory = dataclasses.replace(memory, master_bytes=2)
    if weight_bytes == 4 and not get_value(deepspeed_config, "zero_optimization.stage"):  # without copies
        memory = dataclasses.replace(memory, master_bytes=0)
    return memory


# ---- terms

Phase = Literal["always", "gradients", "compute", "step", "between", "outside"]
"""always: from the first step to the last. gradients: from the first backward of a step to its end. compute: forward
and backward of a micro batch. step: the optimizer step. between: samples and saves between steps. outside: always, but
not allocated by torch.
"""


@dataclass(frozen=True)
class Term:
    name: str
    num_bytes: int  # on one GPU (or one CPU rank) for `device`; on one node, all its ranks together, for `host`
    formula: str  # for `dsft plan --explain`
    phase: Phase = "always"
    place: Literal["device", "host"] = "device"


def peak_bytes(terms: Iterable[Term], place: str) -> int:
    """Add up the terms that are alive at the peak."""
    sums = Counter()
    for term in terms:
        if term.place == place:
            sums[term.phase] += term.num_bytes
    one_at_a_time = max(sums["compute"], sums["step"], sums["between"])
    return sums["always"] + sums["gradients"] + sums["outside"] + one_at_a_time


def pinned_bytes(num_bytes: float) -> int:
    """Round up to a power of two, as torch's allocator of pinned memory does."""
    if not num_bytes:
        return 0
    return 1 << (int(num_bytes) - 1).bit_length()


# ---- the job


@dataclass(frozen=True, kw_only=True)
class Job:
    """A training, as far as memory and time depend on it."""

    size: "ModelSize"
    model_config: "PreTrainedConfig"
    dtype: str = "bfloat16"  # of the computation. bfloat16 and float16 have fp32 master weights
    seq_len: int = 1024
    attention: "Attention" = "flash"
    adapters: "PeftConfig | None" = None
    trainable: tuple[str, ...] = ()  # patterns of trained parameters
    frozen: tuple[str, ...] = ()
    optimizer: str = DEFAULT_OPTIMIZER  # as transformers names it (the option `optim`)
    micro_batch: int | None = None  # sequences of one forward on one rank; None lets the plan choose
    accumulation: int | None = None
    sequences_per_step: int | None = None  # sequences of one optimizer step over all ranks
    sequence_parallel: int = 1  # ranks that share each micro batch
    checkpointing: bool | None = None  # as the user set it; None lets the plan decide
    checkpoint_every: int | None = None
    """With checkpointing, every n-th layer is recomputed; None for all, or for the plan to choose."""
    checkpoint_offload: bool = False  # with checkpointing, whether its saved inputs are in pinned host memory
    liger: bool = False
    tiled_loss: bool = False  # whether logits exist for some tokens at a time only
    fp32_accumulation: bool | None = None  # whether gradients are accumulated in fp32; None lets the plan decide
    bf16_states: bool = False  # whether master weights, gradients and moments are bfloat16
    samples: bool = False
    """Whether samples are generated at evaluations: under ZeRO-3 every rank then gathers all weights."""

    @property
    def weight_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    def batch(self, micro_batch: int, accumulation: int, machine: Machine) -> Batch:
        return Batch(micro_batch, accumulation, machine.world_size, self.sequence_parallel)

    @functools.cached_property
    def activations(self) -> "Activations":
        """Measure the activations per token, once for all jobs with the same ones."""
        from dsft.planner.activations import measure_or_assume

        key = (
            self.model_config.to_json_string(),
            self.adapters and str(sorted(self.adapters.to_dict().items(), key=str)),
            self.dtype,
            self.attention,
            None if self.attention == "flash" else self.seq_len,
            (self.trainable, self.frozen, self.liger),
        )
        if key not in _measured:
            _measured[key] = measure_or_assume(self)
        return _measured[key]


_measured: dict[tuple, "Activations"] = {}


# ---- the DeepSpeed configuration

FP32 = ("fp32", "float32")  # as a DeepSpeed JSON names the type


def sums_in_fp32(deepspeed_config: DeepSpeedJson) -> bool:
    return get_value(deepspeed_config, "data_types.grad_accum_dtype") in FP32


def resolve_auto(zero_section: DeepSpeedJson, hidden_size: int) -> DeepSpeedJson:
    """Read the section as DeepSpeed does; "auto" is filled in as by transformers (integrations/deepspeed.py)."""
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig  # takes seconds

    filled = {
        "reduce_bucket_size": hidden_size * hidden_size,
        "stage3_prefetch_bucket_size": int(0.9 * hidden_size * hidden_size),
        "stage3_param_persistence_threshold": 10 * hidden_size,
    }
    section = {}
    for name, value in zero_section.items():
        number = filled.get(name) if value == "auto" else value
        if number is not None:
            section[name] = number
    return DeepSpeedZeroConfig(**section).model_dump(mode="json", by_alias=True)


class ZeroLayout:
    """How ZeRO distributes a model over the ranks, as far as memory and time depend on it."""

    def __init__(self, job: Job, deepspeed_config: DeepSpeedJson, machine: Machine, *, accumulation: int):
        self.job = job
        self.size = size = job.size
        self.machine = machine
        self.accumulation = accumulation
        self.zero = zero = resolve_auto(deepspeed_config.get("zero_optimization", {}), size.hidden_size)
        self.stage = zero["stage"]
        self.optimizer = optimizer_memory(deepspeed_config, job.optimizer, weight_bytes=job.weight_bytes)
        self.optimizer_device = get_value(zero, "offload_optimizer.device") or "none"
        self.param_device = "none"
        self.hpz_ranks = 0
        if self.stage == 3:
            self.param_device = get_value(zero, "offload_param.device") or "none"
            if zero["zero_hpz_partition_size"] > 1:
                self.hpz_ranks = min(zero["zero_hpz_partition_size"], machine.world_size)
        self.packed = size.quantization  # the format of the base, if its weights stay packed
        if self.packed and self.packed.is_unpacked:
            self.packed = None
        self.weight_bytes = job.weight_bytes
        self.sum_bytes = self.sent_bytes = job.weight_bytes
        if sums_in_fp32(deepspeed_config) and self.stage >= 2:
            self.sum_bytes = 4
        if get_value(deepspeed_config, "communication_data_type") in FP32:
            self.sent_bytes = 4
        self.num_frozen = size.num_params - size.num_trainable
        self.share = math.ceil(size.num_trainable / (machine.world_size if self.stage else 1))
        self.largest_trained = max((numel for numel, _ in size.trainable_numels), default=0)
        # Temporary bytes of an updated parameter: its gradient in the master's type (if that differs, also flat in its
        # own type), and the optimizer's copies.
        self.update_bytes = self.optimizer.master_bytes + self.optimizer.step_bytes
        if self.sum_bytes != self.optimizer.master_bytes:
            self.update_bytes += self.sum_bytes

    @property
    def frozen_bytes(self) -> int:
        """Bytes of the frozen base, unsharded."""
        if not self.packed:
            return self.weight_bytes * self.num_frozen
        if self.packed.disk_bytes:
            return self.packed.disk_bytes
        plain = self.size.plain_params
        return int(self.weight_bytes * plain + self.packed.weight_bytes * (self.num_frozen - plain))

    @property
    def persistent_params(self) -> int:
        """Parameters that ZeRO-3 keeps gathered: those up to a threshold (`mark_persistent_parameters`)."""
        threshold = self.zero["stage3_param_persistence_threshold"]
        return sum(numel * count for numel, count in self.size.numels if numel <= threshold)

    @property
    def gathered_params(self) -> int:
        """Parameters that ZeRO-3 has gathered at once: between forward and backward those within half of
        max_reuse_distance stay, and it prefetches up to max_live (PartitionedParameterCoordinator).
        """
        wanted = max(
            self.zero["stage3_max_live_parameters"],
            self.zero["stage3_max_reuse_distance"] // 2,
            self.size.largest_gathered_params,
        )
        return min(self.size.num_params - self.persistent_params, wanted)


# ---- terms of a training

FRAGMENTATION = 0.03
"""Share of allocated memory that torch's allocator reserves in addition when memory is short (expandable segments)."""
GPU_PROCESS_BYTES = 3 * GB
CPU_PROCESS_BYTES = int(0.65 * GB)  # host memory of one rank before it loads a model, on a machine on paper


def training_terms(layout: ZeroLayout, batch: Batch, *, every: int) -> list[Term]:
    """List the terms of a training in which every n-th layer (`every`) is recomputed; 0 is none."""
    activations = activation_terms(layout, batch, every=every)
    states = device_state_terms(layout)
    if layout.stage < 3 and layout.accumulation == 1 and layout.sum_bytes == layout.weight_bytes:
        # Layer by layer, gradients take the place of activations.
        gradients = sum(term.num_bytes for term in states if term.phase == "gradients")
        kept = activations[0]
        num_layers = layout.size.num_layers
        freed = min(gradients, kept.num_bytes * (num_layers - 1) // num_layers)
        activations[0] = dataclasses.replace(kept, num_bytes=kept.num_bytes - freed)
    terms = [*states, *activations, *host_terms(layout)]
    return [*terms, *outside_terms(layout, terms)]


def activation_terms(layout: ZeroLayout, batch: Batch, *, every: int) -> list[Term]:
    """List the activations of one micro batch; first those that layers keep until their backward."""
    job = layout.job
    size = layout.size
    item = layout.weight_bytes
    measured = job.activations
    # A quantised base is not sharded, and keeps its own linear layers.
    layers = measured.layers
    if layout.stage == 3 and not size.quantization:
        layers = measured.layers_zero_3
    tokens = -(-batch.micro * job.seq_len // batch.sequence_parallel)
    input_bytes = tokens * item * size.hidden_size  # of a checkpointed layer
    offloads_inputs = job.checkpoint_offload and layout.machine.has_gpu
    kept = 0.0
    computed_again = 0
    for number, per_token in enumerate(layers):
        if every and number % every == 0:
            computed_again += 1
        else:
            kept += measured.layers_fixed[number] + tokens * per_token
    if not offloads_inputs:
        kept += computed_again * input_bytes
    # Gradients of a layer: of gate and up, and of the hidden states. Liger's overwrite saved activations.
    num_products = 1 if job.liger else 2
    backward = tokens * item * (size.hidden_size + num_products * size.ffn_size)
    if computed_again:
        backward += tokens * max(layers) + max(measured.layers_fixed)
    work = max(int(backward), head_bytes(job, tokens))
    terms = [
        Term("kept by layers", int(kept), "tokens x bytes that autograd keeps", "compute"),
        Term("backward of a layer, or logits and loss", work, "the larger of both", "compute"),
    ]
    if offloads_inputs:
        pinned = layout.machine.ranks_per_node * computed_again * pinned_bytes(input_bytes)
        terms.append(Term("inputs of layers", pinned, "ranks x layers x tokens x bytes, pinned", "compute", "host"))
    if batch.sequence_parallel > 1:
        # Ulysses keeps the result before and after the exchange, and repeated keys and values.
        keys = size.kv_size * max(1, batch.sequence_parallel // size.num_key_heads)
        width = size.num_heads * size.head_dim + 2 * (keys - size.kv_size)
        exchanging = len(layers) - computed_again + (computed_again > 0)
        exchanged = exchanging * tokens * width * item
        terms.append(Term("positions exchanged for heads", exchanged, "layers x tokens x width", "compute"))
    return terms


def head_bytes(job: Job, tokens: int) -> int:
    """Peak of final norm, logits, loss and their backward."""
    hidden = 5 * job.weight_bytes * job.size.hidden_size * tokens
    softcap = getattr(job.model_config.get_text_config(), "final_logit_softcapping", None)
    # logits in fp32, their softmax and gradient; with tiles also the matrix product
    entry = 12
    if job.tiled_loss or softcap:
        entry += job.weight_bytes
    if adapts_head(job.adapters):  # the products of head and adapter, and their gradients
        entry += 4 * job.weight_bytes
    if job.tiled_loss:
        from dsft.models.chunked_head import tile_rows

        return hidden + entry * job.size.vocab_size * tile_rows(job.size.vocab_size, tokens)
    if job.liger:  # liger_kernel/ops/fused_linear_cross_entropy.py
        return hidden
    return hidden + entry * job.size.vocab_size * tokens


def adapts_head(adapters: "PeftConfig | None") -> bool:
    """Whether the output head has an adapter, which rules out the tiled loss."""
    targets = getattr(adapters, "target_modules", None) or ()
    return "lm_head" in targets or "embed_out" in targets


def device_state_terms(layout: ZeroLayout) -> list[Term]:
    """List weights, gradients, states and DeepSpeed's buffers on one GPU."""
    states = 0
    if layout.optimizer_device == "none":
        states = int(layout.optimizer.checkpoint_bytes * layout.share)
    terms = [Term("optimizer state", states, "(master + moments) / ranks")]
    if layout.stage == 3:
        return terms + _stage_3(layout)
    weights = layout.frozen_bytes + layout.weight_bytes * layout.size.num_trainable
    terms.append(Term("weights", weights, "all"))
    return terms + (_stage_1_2(layout) if layout.stage else _stage_0(layout))


def _stage_0(layout: ZeroLayout) -> list[Term]:
    trained = layout.size.num_trainable
    optimizer = layout.optimizer
    # The engine reduces a flat copy of the gradients, and in half precision converts them to fp32.
    copy = layout.sent_bytes if layout.machine.world_size > 1 else 0
    step = max(copy, optimizer.master_bytes + optimizer.step_bytes) * trained
    return [
        Term("gradients", layout.weight_bytes * trained, "trained", "gradients"),
        Term("optimizer step", step, "copy to all-reduce, or fp32 gradients and the optimizer's copies", "step"),
    ]


def _stage_1_2(layout: ZeroLayout) -> list[Term]:
    item = layout.weight_bytes
    trained = layout.size.num_trainable
    share = layout.share
    largest = layout.largest_trained
    offloads = layout.optimizer_device != "none"
    accumulates = layout.accumulation > 1
    bucket = layout.zero["reduce_bucket_size"]
    overlaps = layout.zero["overlap_comm"]
    # Parameters that cross the border of a rank's share are kept in full.
    of_share = item * min(trained, share + largest)
    if layout.sum_bytes > item:
        gradients = 4 * share
        step = layout.optimizer.step_bytes * share
    else:
        gradients = of_share
        if layout.stage == 2 and accumulates:
            gradients *= 2
        if layout.stage == 1 and (accumulates or not overlaps):
            gradients = item * trained
        elif offloads:
            gradients = 0  # copied to host memory at once
        step = max(0, of_share + layout.update_bytes * share - gradients)
    copied = max(min(trained, bucket), min(largest, bucket + share))
    num_buckets = 2 if overlaps else 1
    buckets = item * bucket * num_buckets + layout.sent_bytes * copied
    terms = [
        Term("gradients", gradients, "of this rank's share, or of all until they are reduced", "gradients"),
        Term("reduce buckets", buckets, "buckets and a copy", "compute"),
        Term("gradient not yet reduced", item * largest, "largest parameter", "compute"),
    ]
    if offloads:
        terms.append(Term("gradient's norm, in fp64", 8 * min(largest, share), "largest parameter", "compute"))
    else:
        terms.append(Term("optimizer step", step, "gradients in the master's type, and the optimizer's copies", "step"))
    return terms


def _stage_3(layout: ZeroLayout) -> list[Term]:
    item = layout.weight_bytes
    size = layout.size
    ranks = layout.machine.world_size
    zero = layout.zero
    keeps_weights = layout.param_device == "none"
    bucket = 0
    if zero["contiguous_gradients"] and size.num_trainable:
        bucket = zero["reduce_bucket_size"]
    terms = [Term("reduce bucket", layout.sent_bytes * bucket, "allocated in full")]
    if keeps_weights:
        terms.append(Term("weights", item * size.num_params // ranks, "all / ranks"))
    if layout.optimizer_device == "none":
        step = layout.update_bytes * min(layout.share, zero["sub_group_size"])
        terms += [
            Term("gradient partition", layout.sum_bytes * layout.share, "trained / ranks"),
            Term("optimizer step", step, "gradients of a sub-group flat and in the master's type", "step"),
        ]
    if ranks > 1 or not keeps_weights:  # else nothing is partitioned (`NoGatherHandle`)
        prefetch = zero["stage3_prefetch_bucket_size"]
        copies = 0
        if prefetch:
            copies = item * (prefetch + max(numel for numel, _ in size.numels))
        reduced = item * layout.largest_trained + layout.sent_bytes * min(bucket, size.num_trainable)
        terms += [
            Term("persistent parameters", item * layout.persistent_params, "up to the persistence threshold"),
            Term("gathered parameters", item * layout.gathered_params, "live at once", "compute"),
            Term("prefetch or reduce copies", max(copies, reduced), "one bucket and a parameter", "compute"),
        ]
        if layout.job.samples:
            gathered = size.num_params - layout.persistent_params
            terms.append(Term("weights gathered for samples", item * gathered, "all", "between"))
    if layout.hpz_ranks and keeps_weights:
        partition = item * size.num_params // layout.hpz_ranks
        terms.append(Term("second partition (hpZ)", partition, "all / ranks of a node"))
    return terms


@functools.cache  # ranks compare their plans
def own_process_bytes() -> int:
    """Return the resident memory of this process, which has the imports of a rank."""
    return psutil.Process().memory_info().rss


def host_terms(layout: ZeroLayout) -> list[Term]:
    """List the host memory of a node: processes, offloaded states, weights to be saved."""
    machine = layout.machine
    optimizer = layout.optimizer
    item = layout.weight_bytes
    share = layout.share
    masters = optimizer.master_bytes * share
    is_pinned = machine.has_gpu and get_value(layout.zero, "offload_optimizer.pin_memory")
    pinned = pinned_bytes if is_pinned else int

    def on_node(name, num_bytes, formula):
        return Term(name, int(machine.ranks_per_node * num_bytes), f"ranks x {formula}", "always", "host")

    process = GPU_PROCESS_BYTES if machine.has_gpu else CPU_PROCESS_BYTES
    if machine.measured and not machine.has_gpu:
        process = own_process_bytes()
    terms = [on_node("processes", process, "Python, torch, DeepSpeed")]
    if layout.optimizer_device == "cpu":
        num_bytes = optimizer.state_bytes * share
        if layout.stage < 3:
            # Pinned: master weights, their gradients, and a copy of the updated weights (stage_1_and_2.py).
            num_bytes += 2 * pinned(masters) + pinned(item * share)
            if layout.accumulation > 1 and layout.stage == 2 and layout.sum_bytes == item:
                num_bytes += 1.4 * item * share  # accumulated gradients, pinned one by one
        else:
            # Gradients in the master's type are pinned per sub-group, those in the weights' type at once (stage3.py).
            groups = max(1, share // max(1, layout.zero["sub_group_size"]))
            num_bytes += masters + groups * pinned(masters / groups) + pinned(layout.sum_bytes * share)
        terms.append(on_node("optimizer", num_bytes, "(moments, master, gradients, weights) / all ranks"))
    if layout.param_device == "cpu":
        trained = item * share
        frozen = item * layout.num_frozen / machine.world_size
        if machine.has_gpu:
            # Trained shards move to one flat pinned buffer; the allocator keeps their earlier memory.
            kept = 1.4 if layout.zero["offload_param"]["pin_memory"] else 0.0
            frozen *= max(1.0, kept)
            trained = pinned_bytes(trained) + kept * trained
        num_bytes = trained + frozen
        terms.append(on_node("weights", num_bytes, "shards, pinned, and what was pinned before"))
    if machine.has_gpu:
        saved = item * layout.size.num_trainable
        terms.append(Term("weights to be saved", saved, "trained, on rank 0", "between", "host"))
    return terms


def outside_terms(layout: ZeroLayout, terms: list[Term]) -> list[Term]:
    """List GPU memory beyond torch's allocations: CUDA's context, NCCL's buffers, fragmentation."""
    if not layout.machine.has_gpu:
        return []
    communicators = 0
    if layout.machine.world_size > 1:  # of all ranks, ZeRO, hpZ, and ranks that share sequences
        communicators = 2 + (layout.hpz_ranks > 0) + (layout.job.sequence_parallel > 1)
    fragmented = FRAGMENTATION * peak_bytes(terms, "device")
    num_bytes = CONTEXT_BYTES + communicators * COMMUNICATOR_BYTES + int(fragmented)
    return [Term("context, NCCL and fragmentation", num_bytes, "assumed", "outside")]
