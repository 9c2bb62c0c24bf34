"""Predicts the time of one optimizer step, to rank configurations. Pure arithmetic.

Products of matrices per token: 2 x active parameters forward, twice that backward (once with LoRA, whose base needs no
weight gradients),
once more forward with activation checkpointing. Traffic of ZeRO: stage 0, 1: gradients reduced and weights gathered
once per step;
stage 2: gradients in each micro step; stage 3: weights gathered for forward and backward of each micro step, gradients
scattered
(ZeRO paper, section 7; with LoRA the gradients are the adapters'). Left out: data loading, logging, stragglers, an
uneven network.
"""

from dataclasses import dataclass

from dsft.config.deepspeed_json import get_value
from dsft.models.size import ModelSize
from dsft.planner.speeds import Speeds
from dsft.runtime.hardware import Machine
from dsft.units import DTYPE_BYTES

ADAM_BYTES = 30
"""Memory traffic of AdamW per parameter: read gradient 4 and master 4, m 4, v 4; write master 4, m 4, v 4, bf16 weight
2.
"""
GATHERS_PER_LAYER = 8
"""Modules with weights of their own in a transformer layer, each a collective of ZeRO-3: q, k, v, o, gate, up, down and
the norms.
"""
OVERLAP_LOSS = 0.1
"""Share of the shorter of computing and communicating that overlap does not hide."""


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of one optimizer step: all its micro steps and the update."""

    compute_seconds: float
    communication_seconds: float
    """As if it stood alone; what overlaps with computing is hidden in `step_seconds`."""
    offload_seconds: float
    """Transfers between device, host and NVMe."""
    optimizer_seconds: float
    step_seconds: float
    tokens_per_step: int
    """Over all ranks."""

    @property
    def tokens_per_second(self) -> float:
        """Over all ranks."""
        return self.tokens_per_step / self.step_seconds


def forward_flops_per_token(size: ModelSize, seq_len: int) -> float:
    """Floating-point operations of one forward on one token, attention of a causal sequence included."""
    return (
        2 * size.active_params + 2 * seq_len * size.num_heads * size.head_dim * size.num_layers
    )  # causal: half of 4 s h L


def flops_per_token(size: ModelSize, seq_len: int, *, checkpointing: bool) -> float:
    """Floating-point operations of training on one token."""
    passes = (2 if size.lora_r else 3) + checkpointing
    return passes * forward_flops_per_token(size, seq_len)


def step_time(
    size: ModelSize,
    zero: dict,
    machine: Machine,
    speeds: Speeds,
    *,
    micro_batch: int,
    accumulation: int,
    seq_len: int,
    checkpointing: bool,
    dtype: str,
) -> StepTime:
    """Time of one optimizer step of `accumulation` micro steps of `micro_batch` sequences on every rank.

    Args:
        zero: the section zero_optimization, without "auto" (`resolve_auto`).
    """
    tokens = micro_batch * seq_len
    compute = accumulation * tokens * flops_per_token(size, seq_len, checkpointing=checkpointing) / speeds.flops
    communication = _communication_seconds(size, zero, machine, speeds, accumulation, dtype)
    offload, optimizer = _update_seconds(size, zero, machine, speeds, accumulation, dtype)
    if speeds.overlaps and zero["overlap_comm"]:
        # Parameter transfers of offload are prefetched like gathers.
        moving = communication + offload
        busy = max(compute, moving) + OVERLAP_LOSS * min(compute, moving)
    else:
        busy = compute + communication + offload
    return StepTime(
        compute_seconds=compute,
        communication_seconds=communication,
        offload_seconds=offload,
        optimizer_seconds=optimizer,
        step_seconds=busy + optimizer,
        tokens_per_step=accumulation * tokens * machine.world_size,
    )


def collective_seconds(
    num_bytes: float, calls: float, machine: Machine, speeds: Speeds, link_bytes: float, *, inside_node: bool = False
) -> float:
    """A collective over `num_bytes` in total: each rank gets all but its own share over its links, each node all but
    its own over its cards.

    Args:
        link_bytes: of `speeds`, the rate of this kind of collective within a node.
    """
    ranks = machine.ranks_per_node if inside_node else machine.world_size
    nodes = 1 if inside_node else machine.nodes
    if ranks == 1:
        return 0.0
    inside = num_bytes * (ranks - 1) / ranks / link_bytes if machine.ranks_per_node > 1 else 0.0
    across = num_bytes * (nodes - 1) / nodes / speeds.network_bytes
    return max(inside, across) + calls * speeds.collective_seconds


def _communication_seconds(
    size: ModelSize, zero: dict, machine: Machine, speeds: Speeds, accumulation: int, dtype: str
) -> float:
    width, stage = DTYPE_BYTES[dtype], zero["stage"]
    weights, gradients = width * size.num_params, width * size.num_trainable
    buckets = size.num_trainable // zero["reduce_bucket_size"] + 1
    if stage == 0:
        return collective_seconds(2 * gradients, 2 * buckets, machine, speeds, speeds.all_reduce_bytes)
    reduce = collective_seconds(gradients, buckets, machine, speeds, speeds.reduce_bytes)
    if stage < 3:
        gather = collective_seconds(gradients, buckets, machine, speeds, speeds.link_bytes)
        return (accumulation if stage == 2 else 1) * reduce + gather
    calls = GATHERS_PER_LAYER * size.num_layers
    forward = collective_seconds(weights, calls, machine, speeds, speeds.link_bytes)
    # With hpZ the forward's gather fills a second partition within the node, which the backward gathers from.
    backward = collective_seconds(
        weights, calls, machine, speeds, speeds.link_bytes, inside_node=zero["zero_hpz_partition_size"] > 1
    )
    return accumulation * (forward + backward + reduce)


def _update_seconds(
    size: ModelSize, zero: dict, machine: Machine, speeds: Speeds, accumulation: int, dtype: str
) -> tuple[float, float]:
    """(transfers, optimizer) of one step. A rank moves only its own shard; stages 0 updates everything on every
    rank.
    """
    width = DTYPE_BYTES[dtype]
    shards = machine.world_size if zero["stage"] else 1
    own = size.num_trainable / shards
    offload = 0.0
    where = get_value(zero, "offload_optimizer.device") or "none"
    ratio = zero["offload_optimizer"]["ratio"] if where != "none" else 0.0
    optimizer = (1 - ratio) * own * ADAM_BYTES / speeds.device_bytes
    if ratio:
        on_host = ratio * own
        if machine.has_gpu:
            offload += (
                (accumulation + 1) * width * on_host / speeds.host_link_bytes
            )  # gradients down each micro step, weights up once
        optimizer = max(optimizer, on_host * machine.ranks_per_node / speeds.adam_params)
    if where == "nvme":
        offload += 2 * 12 * own * machine.ranks_per_node / speeds.nvme_bytes  # master, m and v read and written
    params = get_value(zero, "offload_param.device") or "none"
    if params != "none":
        moved = (
            2 * accumulation * width * size.num_params / machine.world_size
        )  # this rank's shard, for forward and backward
        if machine.has_gpu:
            offload += moved / speeds.host_link_bytes
        if params == "nvme":
            offload += moved * machine.ranks_per_node / speeds.nvme_bytes
    return offload, optimizer
