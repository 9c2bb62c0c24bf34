"""What the memory formulas read of model, DeepSpeed configuration and machine, and the counts they share."""

import functools
import json
import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

from dsft.config.deepspeed import get_value, stage
from dsft.models.quantization import Quantization
from dsft.models.size import ModelSize
from dsft.planner.optimizers import OptimizerMemory, optimizer_memory
from dsft.units import DTYPE_BYTES

UNMODELLED = {
    "zero_optimization.zero_quantized_weights": "gathers of 8-bit weights",
    "zero_optimization.zero_quantized_gradients": "4-bit gradients",
    "torch_autocast.enabled": "torch autocast",
    "fp16.fp16_master_weights_and_grads": "fp16 master weights",
    "bf16.bf16_master_weights_and_grads": "bfloat16 master weights",
    "compression_training": "compression",
    "compile.deepcompile": "DeepCompile",
}
"""Settings of a DeepSpeed JSON that change memory or time and are not counted."""
FP32 = ("fp32", "float32")
"""As a DeepSpeed JSON names the type."""


def unmodelled_settings(deepspeed_config: dict[str, Any]) -> list[str]:
    """What this configuration asks for and the plan does not count, a sentence each."""
    asked = [key for key in UNMODELLED if (get_value(deepspeed_config, key) or -1) != -1]
    notes = [f"{key} is not modelled: planned without {UNMODELLED[key]}." for key in asked]
    if sums_in_fp32(deepspeed_config) and stage(deepspeed_config) == 1:
        notes.append("data_types.grad_accum_dtype under stage 1 is not modelled: each GPU holds all gradients in fp32.")
    return notes


def sums_in_fp32(deepspeed_config: dict[str, Any]) -> bool:
    """Whether the gradients of micro batches are added up in fp32."""
    return get_value(deepspeed_config, "data_types.grad_accum_dtype") in FP32


def resolve_auto(zero_section: dict[str, Any], size: ModelSize) -> dict[str, Any]:
    """Read the section zero_optimization as DeepSpeed will: "auto" filled from the hidden size, defaults for what is
    missing.

    Source: HfTrainerDeepSpeedConfig.trainer_config_finalize (transformers/integrations/deepspeed.py) and
        DeepSpeedZeroConfig.
    """
    return json.loads(_resolved(json.dumps(zero_section), size.hidden_size))


@functools.cache
def _resolved(zero_section: str, hidden: int) -> str:
    """Fill a section, as JSON: a plan asks for the same one for each micro batch."""
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    filled = {
        "reduce_bucket_size": hidden * hidden,
        "stage3_prefetch_bucket_size": int(0.9 * hidden * hidden),
        "stage3_param_persistence_threshold": 10 * hidden,
    }
    section = {key: filled.get(key) if value == "auto" else value for key, value in json.loads(zero_section).items()}
    given = DeepSpeedZeroConfig(**{key: value for key, value in section.items() if value is not None})
    return json.dumps(given.model_dump(mode="json", by_alias=True))


@dataclass(frozen=True, kw_only=True)
class ZeroLayout:
    """How ZeRO spreads a model over the ranks, as far as memory depends on it."""

    size: ModelSize
    zero: dict[str, Any]
    """The section zero_optimization, resolved."""
    stage: int
    world_size: int
    ranks_per_node: int
    dtype: str
    has_gpu: bool
    accumulates: bool
    """More than one micro batch per optimizer step, or not known."""
    optimizer: OptimizerMemory
    sums_in_fp32: bool
    """Whether gradients of micro batches are added up in fp32 whatever the model's dtype; stages 2 and 3 can."""
    reduces_in_fp32: bool
    """Whether gradients are sent to other ranks in fp32, likewise."""

    @property
    def weight_bytes(self) -> int:
        """Of a weight, a gradient and a bucket's element: adapters have the base's dtype (models/lora.py), and
        DeepSpeed accumulates and communicates in the model's unless it is set otherwise.
        """
        return DTYPE_BYTES[self.dtype]

    @property
    def sum_bytes(self) -> int:
        """Of a gradient summed over micro batches."""
        return 4 if self.sums_in_fp32 and self.stage >= 2 else self.weight_bytes

    @property
    def keeps_fp32_share(self) -> bool:
        """Whether stage 2 adds what is reduced into an fp32 buffer of this rank's share, on the device with offload too
        (`_build_compact_grad_partition_buffer` in stage_1_and_2.py).
        """
        return self.stage == 2 and self.sum_bytes > self.weight_bytes

    @property
    def sent_bytes(self) -> int:
        """Of a gradient as other ranks get it."""
        return 4 if self.reduces_in_fp32 else self.weight_bytes

    @property
    def copy_to_send_bytes(self) -> int:
        """Of a gradient's copies while it is reduced under stages 0 to 2: a flat one, and one as it is sent."""
        return self.weight_bytes + (self.sent_bytes if self.sent_bytes > self.weight_bytes else 0)

    @property
    def has_fp32_master(self) -> bool:
        """Whether the optimizer updates fp32 copies of the weights: in bf16 and fp16."""
        return self.dtype != "float32"

    @property
    def flat_gradient_bytes(self) -> int:
        """Of a gradient on its way into the optimizer: a flat copy and one in the master's type (where that is the
        weights' the flat copy is it), and the optimizer's own copies.
        """
        flat = self.sum_bytes if self.optimizer.master_bytes != self.sum_bytes else 0
        return flat + self.optimizer.master_bytes + self.optimizer.step_bytes

    @property
    def packed(self) -> Quantization | None:
        """Format of the base where its weights stay in it on this device."""
        quantization, device = self.size.quantization, "cuda" if self.has_gpu else "cpu"
        return quantization if quantization and device not in quantization.unpacked_on else None

    @property
    def num_trainable(self) -> int:
        return self.size.num_trainable

    @property
    def num_frozen(self) -> int:
        return self.size.num_params - self.size.num_trainable

    @property
    def share(self) -> int:
        """Trained parameters whose optimizer states this rank holds."""
        return math.ceil(self.size.num_trainable / self.world_size)

    @property
    def num_buckets(self) -> int:
        """Buffers of reduce_bucket_size that stages 1 and 2 allocate."""
        if not self.zero["contiguous_gradients"] and self.optimizer_device == "none":
            return 0
        return 2 if self.zero["overlap_comm"] else 1

    @property
    def largest_trained(self) -> int:
        return max(self.trained_numels)

    @property
    def largest_inner(self) -> int:
        """The largest trained parameter between embedding and head, which come first and last."""
        ends = {self.size.embedding_params, self.size.head_params}
        return max((numel for numel in self.trained_numels if numel not in ends), default=0)

    @property
    def optimizer_device(self) -> str:
        return (self.zero["offload_optimizer"] or {}).get("device", "none")

    @property
    def param_device(self) -> str:
        return (self.zero["offload_param"] or {}).get("device", "none")

    @property
    def trained_numels(self) -> Counter[int]:
        return Counter(dict(self.size.trainable_numels))

    @property
    def frozen_numels(self) -> Counter[int]:
        return Counter(dict(self.size.numels)) - self.trained_numels

    @property
    def sub_groups(self) -> list[int]:
        """Elements of each of this rank's sub-groups under ZeRO-3; each is closed by the parameter that fills it
        (`_create_fp16_sub_groups`).
        """
        full = self.zero["sub_group_size"]
        if full >= self.share or full == 0:
            return [self.share]
        number, rest = divmod(self.share, full)
        return [full] * number + ([rest] if rest else [])

    @property
    def device_sub_groups(self) -> list[int]:
        """Sub-groups that the device updates: all, or with offload the first int((1 - ratio) x their number)."""
        groups = self.sub_groups
        if self.optimizer_device == "none":
            return groups
        return groups[: int((1 - self.zero["offload_optimizer"]["ratio"]) * len(groups))]

    @property
    def gathers(self) -> bool:
        """Whether ZeRO-3 builds full parameters beside its partitions (`NoGatherHandle` on one rank)."""
        return self.world_size > 1 or self.param_device != "none"

    @property
    def communicators(self) -> int:
        """NCCL's on one GPU: of all ranks, of ZeRO (`groups._clone_world_group`) and of hpZ."""
        if self.world_size == 1:
            return 0
        return 2 + (self.zero["zero_hpz_partition_size"] > 1)


def describe_layout(
    size: ModelSize,
    deepspeed_config: dict[str, Any],
    *,
    world_size: int,
    ranks_per_node: int,
    dtype: str,
    has_gpu: bool,
    optimizer: str | None = None,
) -> ZeroLayout:
    """Describe how this configuration spreads a model over the ranks.

    Args:
        deepspeed_config: complete; "auto" is understood in the numbers that transformers fills.
        dtype: of the computation; bfloat16 and float16 have fp32 master weights.
        has_gpu: without, terms of place "device" are what one rank holds in host memory, and nothing is pinned.
        optimizer: as transformers names it; None for its default. With offload it is DeepSpeed's CPUAdam, which makes
            no copies.

    Raises:
        ValueError: where ZeRO-3 is asked for with a quantised base, which transformers does not shard.
    """
    zero = resolve_auto(deepspeed_config.get("zero_optimization", {}), size)
    if size.quantization and zero["stage"] == 3:
        raise ValueError(
            "a quantised base is not sharded by ZeRO-3: transformers loads all of it on every GPU first (DeepSpeed"
            " issue 5637); use stage 0, 1 or 2"
        )
    return ZeroLayout(
        size=size,
        zero=zero,
        stage=zero["stage"],
        world_size=world_size,
        ranks_per_node=ranks_per_node,
        dtype=dtype,
        has_gpu=has_gpu,
        accumulates=deepspeed_config.get("gradient_accumulation_steps", 1) != 1,
        optimizer=optimizer_memory(deepspeed_config, optimizer),
        sums_in_fp32=sums_in_fp32(deepspeed_config),
        reduces_in_fp32=get_value(deepspeed_config, "communication_data_type") in FP32,
    )


def frozen_bytes(layout: ZeroLayout) -> tuple[int, str]:
    """Return the bytes of the base that adapters stand on, unsharded, and their arithmetic.

    Quantised, only linear layers are; bitsandbytes leaves embedding and head.
    """
    weight_bytes, quantization = layout.weight_bytes, layout.packed
    if not quantization:
        return weight_bytes * layout.num_frozen, f"{weight_bytes} x {layout.num_frozen:,} frozen"
    if quantization.disk_bytes:
        return quantization.disk_bytes, f"{quantization.format} files of the weights"
    plain = layout.size.embedding_params + layout.size.head_params
    quantized = layout.num_frozen - plain
    per_weight = quantization.weight_bytes
    return (
        int(weight_bytes * plain + per_weight * quantized),
        f"{weight_bytes} x {plain:,} embedding and head + {per_weight:.3f} x {quantized:,} quantised",
    )


def partition_gradients(layout: ZeroLayout) -> int:
    """Count the elements of the parameters that lie in one rank's share, each in full, on the rank that has most
    (`copy_grads_in_partition`).

    The embedding comes first: a rank that ends it holds all of it, and what follows. Any other parameter may lie across
    the share's border.
    """
    share = layout.share
    first = 0 if layout.size.lora_r else layout.size.embedding_params
    before = first - first % share if first > share else 0  # of the embedding, in the shares before
    return min(layout.num_trainable, before + share + layout.largest_inner)
