"""What the memory formulas read of model, DeepSpeed configuration and machine, and the counts they share.

Letters, here and in `states` and `host_states`: psi parameters, psi_t trained ones, N ranks, w bytes of a weight.
"""

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

from dsft.models.size import ModelSize
from dsft.units import DTYPE_BYTES

NF4_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)
"""Of a weight in nf4 with double quantisation: 4 bits, one 8-bit scale per 64 weights, one fp32 scale per 256 of those
(QLoRA paper, section 3).
"""


def resolve_auto(zero_section: dict[str, Any], size: ModelSize) -> dict[str, Any]:
    """The section zero_optimization as DeepSpeed will read it: "auto" filled from the hidden size, defaults for what is
    missing.

    Source: HfTrainerDeepSpeedConfig.trainer_config_finalize (transformers/integrations/deepspeed.py) and
        DeepSpeedZeroConfig.
    """
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    h = size.hidden_size
    filled = {
        "reduce_bucket_size": h * h,
        "stage3_prefetch_bucket_size": int(0.9 * h * h),
        "stage3_param_persistence_threshold": 10 * h,
    }
    section = {key: filled.get(key) if value == "auto" else value for key, value in zero_section.items()}
    given = DeepSpeedZeroConfig(**{key: value for key, value in section.items() if value is not None})
    return given.model_dump(mode="json", by_alias=True)


@dataclass(frozen=True, kw_only=True)
class ZeroJob:
    """What the formulas read of model, configuration and machine."""

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
    fused_optimizer: bool

    @property
    def weight_bytes(self) -> int:
        """w: of a base weight, a gradient and a bucket's element. DeepSpeed accumulates and communicates in the model's
        dtype.
        """
        return DTYPE_BYTES[self.dtype]

    @property
    def has_fp32_master(self) -> bool:
        """Whether the optimizer updates fp32 copies of the weights: in bf16 and fp16."""
        return self.dtype != "float32"

    @property
    def update_bytes(self) -> int:
        """Per updated parameter, two fp32 copies that torch's AdamW makes where it is not fused."""
        return 0 if self.fused_optimizer else 8

    @property
    def trained_bytes(self) -> int:
        """Of a trained weight. peft makes adapters in fp32; engine.py casts them to the model's dtype, but not where
        zero.Init made the base (`_cast_module_mixed_precision`).
        """
        return 4 if self.stage == 3 and self.size.lora_r else self.weight_bytes

    @property
    def frozen(self) -> int:
        return self.size.num_params - self.size.num_trainable

    @property
    def share(self) -> int:
        """psi_t / N: trained parameters whose optimizer states this rank holds."""
        return math.ceil(self.size.num_trainable / self.world_size)

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
        whole, rest = divmod(self.share, full)
        return [full] * whole + ([rest] if rest else [])

    @property
    def gathers(self) -> bool:
        """Whether ZeRO-3 builds whole parameters beside its partitions (`NoGatherHandle` on one rank)."""
        return self.world_size > 1 or self.param_device != "none"


def describe_job(
    size: ModelSize,
    deepspeed_config: dict[str, Any],
    *,
    world_size: int,
    ranks_per_node: int,
    dtype: str,
    has_gpu: bool,
    fused_optimizer: bool = True,
) -> ZeroJob:
    """Raises ValueError where ZeRO-3 or offload of parameters is asked for with a quantised base, which transformers
    does not shard.
    """
    zero = resolve_auto(deepspeed_config.get("zero_optimization", {}), size)
    if size.quantized_bits and zero["stage"] == 3:
        raise ValueError(
            "a quantised base is not sharded by ZeRO-3 (transformers skips zero.Init for it); use stage 0, 1 or 2"
        )
    return ZeroJob(
        size=size,
        zero=zero,
        stage=zero["stage"],
        world_size=world_size,
        ranks_per_node=ranks_per_node,
        dtype=dtype,
        has_gpu=has_gpu,
        accumulates=deepspeed_config.get("gradient_accumulation_steps", 1) != 1,
        fused_optimizer=fused_optimizer,
    )


def frozen_bytes(job: ZeroJob) -> tuple[int, str]:
    """The base that adapters stand on, whole, and its arithmetic. Quantised, only linear layers are; bitsandbytes
    leaves embedding and head.
    """
    w, bits = job.weight_bytes, job.size.quantized_bits
    if not bits:
        return w * job.frozen, f"{w} x {job.frozen:,} frozen"
    plain = job.size.embedding_params + job.size.head_params
    per_weight = NF4_BYTES if bits == 4 else bits / 8
    return (
        int(w * plain + per_weight * (job.frozen - plain)),
        f"{w} x {plain:,} embedding and head + {per_weight:.3f} x {job.frozen - plain:,} quantised",
    )


def partition_gradients(job: ZeroJob) -> int:
    """Elements of the parameters that lie in one rank's share, each whole, on the rank that has most
    (`copy_grads_in_partition`).

    The embedding comes first: a rank that ends it holds all of it, and what follows. Any other parameter may lie across
    the share's border.
    """
    first = 0 if job.size.lora_r else job.size.embedding_params
    beyond = first - first % job.share if first > job.share else 0  # of the embedding, in the shares before
    return min(job.size.num_trainable, beyond + job.share + job.largest_inner)


def device_sub_groups(job: ZeroJob) -> list[int]:
    """Sub-groups that the device updates: all, or with offload the first int((1 - ratio) x their number)."""
    if job.optimizer_device == "none":
        return job.sub_groups
    groups = job.sub_groups
    return groups[: int((1 - job.zero["offload_optimizer"]["ratio"]) * len(groups))]
