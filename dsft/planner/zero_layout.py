"""What the memory formulas share: what an optimizer keeps of each trained parameter (one entry of OPTIMIZERS for each
that is planned), the terms of a prediction, and how ZeRO spreads a model over the ranks.
"""

import dataclasses
import functools
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from dsft.config.deepspeed import get_value
from dsft.runtime.hardware import Machine
from dsft.units import DTYPE_BYTES

if TYPE_CHECKING:  # they import transformers, which the report would wait for
    from dsft.models.quantization import Quantization
    from dsft.models.size import ModelSize


@dataclass(frozen=True, kw_only=True)
class OptimizerMemory:
    """Bytes per trained parameter that an optimizer takes beside weight and gradient."""

    state_bytes: float
    """Its moments."""
    master_bytes: int = 4
    """The fp32 copy of the weight that is updated."""
    step_bytes: int
    """Copies that it makes for a moment while it updates."""
    needs_orthogonalization: bool = False
    """Whether matrices have one moment in place of Adam's two, and their updates are made orthogonal (Muon)."""
    counts_steps: bool = False
    """Whether it averages weights over the steps that it has counted for a group of parameters (schedule-free). A step
    that DeepSpeed makes to set states up, or one for each piece of a group, would then count too.
    """

    @property
    def checkpoint_bytes(self) -> float:
        """Master and moments: what stays between two steps, and what a checkpoint has of it."""
        return self.master_bytes + self.state_bytes

    @property
    def update_bytes(self) -> float:
        """What one update moves: gradient 4, master and moments are read; master, moments and bf16 weight 2 written."""
        return 4 + 2 * self.checkpoint_bytes + 2

    @property
    def formula(self) -> str:
        return f"master {self.master_bytes} + moments {self.state_bytes:g}"


EIGHT_BIT_BYTES = 1 + 4 / 256
"""A moment of bitsandbytes: a byte, and an fp32 scale for 256 of them (bitsandbytes/optim/optimizer.py). Its kernels
update in place; paged states are planned as if they stayed.
"""
OPTIMIZERS = {
    # m 4 + v 4 in fp32 (ZeRO paper, table 1)
    "adamw_torch_fused": OptimizerMemory(state_bytes=8, step_bytes=0),
    # two fp32 copies (torch/optim/adamw.py, _multi_tensor_adamw)
    "adamw_torch": OptimizerMemory(state_bytes=8, step_bytes=8),
    **dict.fromkeys(
        ("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit"),
        OptimizerMemory(state_bytes=2 * EIGHT_BIT_BYTES, step_bytes=0),
    ),
    "paged_adamw_32bit": OptimizerMemory(state_bytes=8, step_bytes=0),
    **dict.fromkeys(("lion_8bit", "paged_lion_8bit"), OptimizerMemory(state_bytes=EIGHT_BIT_BYTES, step_bytes=0)),
    **dict.fromkeys(("lion_32bit", "paged_lion_32bit"), OptimizerMemory(state_bytes=4, step_bytes=0)),
    # One moment or none; copies as in torch/optim (_multi_tensor_sgd with weight decay, _multi_tensor_adagrad ...).
    "sgd": OptimizerMemory(state_bytes=0, step_bytes=4),
    "adagrad": OptimizerMemory(state_bytes=4, step_bytes=8),
    "rmsprop": OptimizerMemory(state_bytes=4, step_bytes=8),
    "adafactor": OptimizerMemory(state_bytes=4, step_bytes=8),  # of ZeRO's flat shards nothing can be factored
    # z 4 + v 4, and a denominator while it updates; SGD keeps z alone, and works in the gradient (schedulefree 1.4.1).
    **dict.fromkeys(
        ("schedule_free_adamw", "schedule_free_radam"),
        OptimizerMemory(state_bytes=8, step_bytes=4, counts_steps=True),
    ),
    "schedule_free_sgd": OptimizerMemory(state_bytes=4, step_bytes=0, counts_steps=True),
}
"""By transformers' name (the option `optim`)."""
DEEPSPEED_OPTIMIZERS = {
    **dict.fromkeys(("adam", "adamw"), OPTIMIZERS["adamw_torch_fused"]),  # FusedAdam, and CPUAdam with offload
    "lion": OPTIMIZERS["lion_32bit"],
    "muon": OptimizerMemory(state_bytes=4, step_bytes=0, needs_orthogonalization=True),
    # torch.optim's, by the class's name
    **{name: OPTIMIZERS[name] for name in ("sgd", "adagrad", "rmsprop")},
    "adadelta": OptimizerMemory(state_bytes=8, step_bytes=8),
    **dict.fromkeys(("adamax", "nadam", "radam"), OptimizerMemory(state_bytes=8, step_bytes=4)),
    **dict.fromkeys(("asgd", "adafactor"), OptimizerMemory(state_bytes=4, step_bytes=4)),
}
"""By the type that a DeepSpeed JSON names (`optimizer.type`), in small letters."""
OWN_TYPES = ("adafactor", *(name for name in OPTIMIZERS if "bit" in name))
"""Those of OPTIMIZERS whose moments have types of their own, also where what is updated is bfloat16: bitsandbytes', and
transformers' Adafactor.
"""
ONE_MORE_MOMENT = {
    "sgd": ("momentum",),
    "rmsprop": ("momentum", "centered"),
    "adam": ("amsgrad",),
    "adamw": ("amsgrad",),
}
"""Type -> its parameters (`optimizer.params`) each of which, where it is set, takes 4 bytes more."""
DEFAULT_OPTIMIZER = "adamw_torch_fused"
"""Where the user names none: transformers' own."""
PLANNED_AS = "adamw_torch"
"""As which an optimizer is planned that is not in OPTIMIZERS; the plan notes it (`candidates.unmodelled`)."""


def optimizer_memory(
    deepspeed_config: dict[str, Any], name: str | None, *, size: "ModelSize | None" = None
) -> OptimizerMemory:
    """Return what the optimizer takes that the configuration names, where it does (FusedAdam, CPUAdam ...), else that
    of `name`; with bf16_optimizer_states the moments and what is updated are bf16.

    Args:
        size: of the model, where Muon is to be told from the Adam that trains the embedding and an untied head.
    """
    memory = OPTIMIZERS.get(name or DEFAULT_OPTIMIZER, OPTIMIZERS[PLANNED_AS])
    if kind := str(get_value(deepspeed_config, "optimizer.type") or "").lower():
        given = get_value(deepspeed_config, "optimizer.params") or {}
        memory = DEEPSPEED_OPTIMIZERS.get(kind, OPTIMIZERS[PLANNED_AS])
        if kind in ("adam", "adamw") and given.get("torch_adam"):
            memory = OPTIMIZERS["adamw_torch"]
        more = 4 * sum(bool(given.get(key)) for key in ONE_MORE_MOMENT.get(kind, ()))
        if memory.needs_orthogonalization and size and not size.lora_r and size.num_trainable:
            # deepspeed/__init__.py, set_optimizer_flags: Adam for what is called embed or lm_head, and for vectors
            of_adam = size.embedding_params * size.trains_embedding + size.head_params
            more = memory.state_bytes * min(1, of_adam / size.num_trainable)  # a pattern may leave the head out
        memory = dataclasses.replace(memory, state_bytes=memory.state_bytes + more)
    if get_value(deepspeed_config, "bf16.bf16_optimizer_states"):
        part = 1 if not kind and name in OWN_TYPES else 2
        halved = {"state_bytes": memory.state_bytes / part, "step_bytes": memory.step_bytes // part}
        return dataclasses.replace(memory, **halved, master_bytes=2)
    if get_value(deepspeed_config, "bf16.bf16_master_weights_and_grads"):
        return dataclasses.replace(memory, master_bytes=2)
    return memory


def checkpoint_parts(
    size: "ModelSize", optimizer: OptimizerMemory, *, stage: int, weight_bytes: int
) -> tuple[int, int, int]:
    """Count the bytes of a checkpoint over all ranks: (weights as safetensors, DeepSpeed's own copies of these, states
    of the optimizer).
    """
    in_module = size.num_trainable if size.lora_r else size.num_params
    # Stages 0 to 2 write the module again, stages 2 and 3 what of it is frozen (engine.py, frozen_param_fragments); of
    # adapters none writes the base. ZeRO 0 in fp32 trains the weights themselves, without a master.
    copied = (in_module if stage < 3 else 0) + (in_module - size.num_trainable if stage >= 2 else 0)
    states = optimizer.state_bytes if stage == 0 and weight_bytes == 4 else optimizer.checkpoint_bytes
    return weight_bytes * size.saved_params, weight_bytes * copied, int(states * size.num_trainable)


Phase = Literal["always", "compute", "step", "sample", "save", "load"]
"""always: from the first step to the last. compute: forward and backward of a micro batch. step: the optimizer's.
sample: while samples are generated. save: while a checkpoint is written. load: before training.
"""
OVERHEAD = "context, NCCL and fragmentation"
"""Name of the term that a GPU holds beyond what torch allocates."""
FULL_TRAINING = "over the full training"
"""The comparison of a plan with what was measured at the end, in `plan_check` of run.json."""


@dataclass(frozen=True)
class Term:
    """Memory of one kind."""

    name: str
    """What it holds: "bf16 weights", "gathered parameters", "logits and loss" ..."""
    num_bytes: int
    """place device: on one GPU (one rank, where ranks run on CPU). place host, nvme: on one node, all its ranks
    together.
    """
    formula: str
    """The arithmetic with its numbers, for `dsft plan --explain`."""
    phase: Phase = "always"
    place: Literal["device", "host", "nvme"] = "device"


def pinned_bytes(num_bytes: int) -> int:
    """Round up to a power of two, as torch's allocator of pinned memory does."""
    return 1 << (num_bytes - 1).bit_length() if num_bytes else 0


def bytes_by_phase(terms: Iterable[Term], place: str) -> dict[Phase, int]:
    """The sums of the terms of each phase in one place."""
    sums: dict[Phase, int] = dict.fromkeys(get_args(Phase), 0)
    for term in terms:
        if term.place == place:
            sums[term.phase] += term.num_bytes
    return sums


def phases_at_peak(sums: dict[Phase, int]) -> tuple[Phase, ...]:
    """The phases whose terms are alive together at the peak: "always" and one other, or loading."""
    other = max(("compute", "step", "sample", "save"), key=sums.get)
    # Loading comes before optimizer states and buffers exist, so it stands alone.
    return ("load",) if sums["load"] > sums["always"] + sums[other] else ("always", other)


def peak_bytes(terms: Iterable[Term], place: str) -> int:
    """The sum of what is alive together at the peak."""
    sums = bytes_by_phase(terms, place)
    return sum(sums[phase] for phase in phases_at_peak(sums))


FP32 = ("fp32", "float32")
"""As a DeepSpeed JSON names the type."""


def sums_in_fp32(deepspeed_config: dict[str, Any]) -> bool:
    """Whether the gradients of micro batches are added up in fp32."""
    return get_value(deepspeed_config, "data_types.grad_accum_dtype") in FP32


def resolve_auto(zero_section: dict[str, Any], hidden_size: int) -> dict[str, Any]:
    """Read the section zero_optimization as DeepSpeed will: "auto" filled from the hidden size, defaults for what is
    missing. The result is shared, and not to be changed.

    Source: HfTrainerDeepSpeedConfig.trainer_config_finalize (transformers/integrations/deepspeed.py) and
        DeepSpeedZeroConfig.
    """
    return _resolved(json.dumps(zero_section), hidden_size)


@functools.cache  # a plan asks for the same section for each micro batch
def _resolved(zero_section: str, hidden_size: int) -> dict[str, Any]:
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig  # takes seconds

    filled = {
        "reduce_bucket_size": hidden_size * hidden_size,
        "stage3_prefetch_bucket_size": int(0.9 * hidden_size * hidden_size),
        "stage3_param_persistence_threshold": 10 * hidden_size,
    }
    section = {name: filled.get(name) if value == "auto" else value for name, value in json.loads(zero_section).items()}
    given = DeepSpeedZeroConfig(**{name: value for name, value in section.items() if value is not None})
    return given.model_dump(mode="json", by_alias=True)


class ZeroLayout:
    """How ZeRO spreads a model over the ranks, as far as memory and time depend on it.

    Args:
        deepspeed_config: complete; "auto" is understood in the numbers that transformers fills.
        machine: without GPUs, terms of place "device" are what one rank holds in host memory, and nothing is pinned.
        dtype: of the computation; bfloat16 and float16 have fp32 master weights.
        optimizer: as transformers names it; None for its default. With offload it is DeepSpeed's CPUAdam, which makes
            no copies.

    Raises:
        ValueError: where ZeRO-3 is asked for with a quantised base, which transformers does not shard.
    """

    def __init__(
        self,
        size: "ModelSize",
        deepspeed_config: dict[str, Any],
        machine: Machine,
        *,
        dtype: str,
        optimizer: str | None = None,
    ):
        self.size, self.machine, ranks = size, machine, machine.world_size
        self.zero = zero = resolve_auto(deepspeed_config.get("zero_optimization", {}), size.hidden_size)  # the section
        self.stage: int = zero["stage"]
        if size.quantization and self.stage == 3:
            raise ValueError(
                "a quantised base is not sharded by ZeRO-3: transformers loads all of it on every GPU first (DeepSpeed"
                " issue 5637); use stage 0, 1 or 2"
            )
        # More than one micro batch per optimizer step, or not known.
        self.accumulates = deepspeed_config.get("gradient_accumulation_steps", 1) != 1
        self.optimizer = memory = optimizer_memory(deepspeed_config, optimizer, size=size)
        # Where offload puts optimizer states and weights: cpu or nvme; none without offload.
        self.optimizer_device, self.param_device = (
            (zero[part] or {}).get("device", "none") for part in ("offload_optimizer", "offload_param")
        )
        if self.stage < 3:  # there DeepSpeed takes host memory for either, and offloads no weights (stage_1_and_2.py)
            self.optimizer_device, self.param_device = self.optimizer_device.replace("nvme", "cpu"), "none"
        # Format of the base where its weights stay in it on this device.
        is_packed = size.quantization and ("cuda" if machine.has_gpu else "cpu") not in size.quantization.unpacked_on
        self.packed: Quantization | None = size.quantization if is_packed else None

        # Bytes of a weight, a gradient and a bucket's element: adapters have the base's dtype (models/trained.py), and
        # DeepSpeed accumulates and communicates in the model's unless it is set otherwise.
        self.weight_bytes = DTYPE_BYTES[dtype]
        # Of a gradient summed over micro batches, which stages 2 and 3 can do in fp32 whatever the model's dtype.
        self.sum_bytes = 4 if sums_in_fp32(deepspeed_config) and self.stage >= 2 else self.weight_bytes
        # Whether stage 2 adds what is reduced into an fp32 buffer of this rank's share, on the device with offload too
        # (`_build_compact_grad_partition_buffer` in stage_1_and_2.py).
        self.keeps_fp32_share = self.stage == 2 and self.sum_bytes > self.weight_bytes
        # Of a gradient as other ranks get it.
        self.sent_bytes = 4 if get_value(deepspeed_config, "communication_data_type") in FP32 else self.weight_bytes
        # Of a gradient's copies while it is reduced under stages 0 to 2: a flat one, and one as it is sent.
        self.reduced_bytes = self.weight_bytes + (self.sent_bytes if self.sent_bytes > self.weight_bytes else 0)
        # Of a gradient on its way into the optimizer of stages 1 to 3: a flat copy and one in the master's type (where
        # that is the weights' the flat copy is it), and the optimizer's own copies.
        flat_bytes = self.sum_bytes if memory.master_bytes != self.sum_bytes else 0
        self.carried_bytes = flat_bytes + memory.master_bytes + memory.step_bytes

        self.num_frozen = size.num_params - size.num_trainable
        # Trained parameters whose optimizer states this rank holds.
        self.share = share = math.ceil(size.num_trainable / ranks)
        # Elements of the largest trained parameter, and of the largest between embedding and head, which come first and
        # last.
        trained, ends = [numel for numel, _ in size.trainable_numels], (size.embedding_params, size.head_params)
        self.largest_trained = max(trained, default=0)
        self.largest_inner = max((numel for numel in trained if numel not in ends), default=0)
        # Elements of each of this rank's sub-groups under ZeRO-3; each is closed by the parameter that fills it
        # (`_create_fp16_sub_groups`). The device updates all, or with offload the first.
        full, self.sub_groups = zero["sub_group_size"], [share]
        if 0 < full < share:
            self.sub_groups = [full] * (share // full) + ([share % full] if share % full else [])
        on_device = len(self.sub_groups)
        if self.optimizer_device != "none":
            on_device = int((1 - zero["offload_optimizer"]["ratio"]) * on_device)
        self.device_sub_groups = self.sub_groups[:on_device]
        # Ranks over which hpZ's second partition lies, at most all (groups.py, _create_zero_param_parallel_group); 0
        # without.
        hpz_ranks = zero["zero_hpz_partition_size"] if self.stage == 3 else 0
        self.hpz_ranks = min(hpz_ranks, ranks) if hpz_ranks > 1 else 0
        # NCCL's on one GPU: of all ranks, of ZeRO (`groups._clone_world_group`) and of hpZ.
        self.communicators = 0 if ranks == 1 else 2 + (self.hpz_ranks > 0)
