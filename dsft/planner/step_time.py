"""Predicts the time of one optimizer step. Pure arithmetic.

Products of matrices per token: 2 x active parameters forward, twice that backward (once with LoRA, whose base needs no
weight gradients), once more forward with activation checkpointing. Attention is slower than these, and its backward
multiplies five times where its forward does twice (FlashAttention-2, arXiv 2307.08691).

Traffic of ZeRO (ZeRO paper, section 7; with LoRA the gradients are the adapters'):
    stage 0, 1  gradients reduced and weights gathered once per step
    stage 2     gradients reduced in each micro step
    stage 3     weights gathered for forward and backward of each micro step, gradients scattered

Operators other than products move memory: their bytes are counted in the trace of activations. Python launches every
kernel, which a short micro batch waits for.

Left out: data loading, logging, stragglers, an uneven network.
"""

from dataclasses import dataclass

from dsft.models.size import ModelSize
from dsft.planner.speeds import Speeds
from dsft.planner.zero_layout import ZeroLayout
from dsft.runtime.hardware import Machine

GATHERS_PER_LAYER = 8
"""Modules with weights of their own in a transformer layer, each a collective of ZeRO-3: q, k, v, o, gate, up, down and
the norms.
"""
LAUNCH_SECONDS = 5e-4
"""Time that Python takes to launch one pass (forward, recompute, backward) over one layer."""
LAUNCH_SECONDS_LORA = 1.5e-3
"""The same with adapters at all linear layers: Qwen 7B and 14B take 5 ms per layer for three passes over 256 tokens on
an A100 (github.com/QwenLM/Qwen, README.md).
"""
OVERLAP_LOSS = 0.5
"""Share of the shorter of computing and communicating that overlap does not hide: NCCL's kernels take multiprocessors
and memory bandwidth. Published steps of 13 B on 8 H100 hide none of it, others all.
"""
TIME_RANGE = (0.85, 1.1)
"""Measured over predicted seconds, from the fastest to the slowest of the published steps (tests/planner)."""


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of one optimizer step: all its micro steps and the update."""

    compute_seconds: float
    """Products, attention and all other operators."""
    communication_seconds: float
    """As if it stood alone; what overlaps with computing is hidden in `step_seconds`."""
    offload_seconds: float
    """Transfers between device, host and NVMe."""
    optimizer_seconds: float
    step_seconds: float
    tokens_per_step: int
    """Over all ranks."""

    @property
    def range_seconds(self) -> tuple[float, float]:
        """Between which `step_seconds` lies, as far as the published steps did."""
        least, most = TIME_RANGE
        return least * self.step_seconds, most * self.step_seconds

    @property
    def tokens_per_second(self) -> float:
        """Over all ranks."""
        return self.tokens_per_step / self.step_seconds


def attention_flops_per_token(size: ModelSize, seq_len: int) -> float:
    """Floating-point operations of one forward's attention on one token of a causal sequence."""
    return 2 * seq_len * size.num_heads * size.head_dim * size.num_layers  # causal: half of 4 s h L


def flops_per_token(size: ModelSize, seq_len: int, *, checkpointing: bool) -> float:
    """Floating-point operations of training on one token, as they are counted for a share of the data sheet's rate."""
    passes = (2 if size.lora_r else 3) + checkpointing
    return passes * (2 * size.active_params + attention_flops_per_token(size, seq_len))


def forward_seconds_per_token(size: ModelSize, seq_len: int, speeds: Speeds) -> float:
    """Predict products and attention of one forward on one token."""
    return 2 * size.active_params / speeds.flops + attention_flops_per_token(size, seq_len) / speeds.attention_flops


def _training_seconds_per_token(size: ModelSize, seq_len: int, speeds: Speeds, *, checkpointing: bool) -> float:
    """Predict products and attention of forward, recompute and backward on one token."""
    passes = (2 if size.lora_r else 3) + checkpointing
    attention_passes = 3.5 + checkpointing
    attention = attention_flops_per_token(size, seq_len) / speeds.attention_flops
    return passes * 2 * size.active_params / speeds.flops + attention_passes * attention


def step_time(
    layout: ZeroLayout,
    machine: Machine,
    speeds: Speeds,
    *,
    micro_batch: int,
    accumulation: int,
    seq_len: int,
    checkpointing: bool,
    traffic_bytes: int,
) -> StepTime:
    """Predict one optimizer step of `accumulation` micro steps of `micro_batch` sequences on every rank.

    Args:
        traffic_bytes: what operators other than products read and write in one micro step.
    """
    tokens = micro_batch * seq_len
    products = tokens * _training_seconds_per_token(layout.size, seq_len, speeds, checkpointing=checkpointing)
    micro_step = products + traffic_bytes / speeds.device_bytes
    if layout.has_gpu:  # else the same cores launch and compute
        per_pass = LAUNCH_SECONDS_LORA if layout.size.lora_r else LAUNCH_SECONDS
        micro_step = max(micro_step, (2 + checkpointing) * layout.size.num_layers * per_pass)
    compute = accumulation * micro_step
    communication = _communication_seconds(layout, machine, speeds, accumulation)
    offload, optimizer = _update_seconds(layout, machine, speeds, accumulation)
    if speeds.overlaps and layout.zero["overlap_comm"]:
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


def _communication_seconds(layout: ZeroLayout, machine: Machine, speeds: Speeds, accumulation: int) -> float:
    size, zero = layout.size, layout.zero
    weights, gradients = layout.weight_bytes * size.num_params, layout.sent_bytes * size.num_trainable
    buckets = size.num_trainable // zero["reduce_bucket_size"] + 1
    if layout.stage == 0:
        return collective_seconds(2 * gradients, 2 * buckets, machine, speeds, speeds.all_reduce_bytes)
    reduce = collective_seconds(gradients, buckets, machine, speeds, speeds.reduce_bytes)
    if layout.stage < 3:
        updated = layout.weight_bytes * size.num_trainable
        gather = collective_seconds(updated, buckets, machine, speeds, speeds.link_bytes)
        return (accumulation if layout.stage == 2 else 1) * reduce + gather
    calls = GATHERS_PER_LAYER * size.num_layers
    forward = collective_seconds(weights, calls, machine, speeds, speeds.link_bytes)
    # With hpZ the forward's gather fills a second partition within the node, which the backward gathers from.
    backward = collective_seconds(
        weights, calls, machine, speeds, speeds.link_bytes, inside_node=zero["zero_hpz_partition_size"] > 1
    )
    return accumulation * (forward + backward + reduce)


def _update_seconds(layout: ZeroLayout, machine: Machine, speeds: Speeds, accumulation: int) -> tuple[float, float]:
    """Predict (transfers, optimizer) of one step. A rank moves only its own shard; stage 0 updates everything on every
    rank.
    """
    size, optimizer = layout.size, layout.optimizer
    updated = size.num_trainable / (machine.world_size if layout.stage else 1)
    ratio = layout.zero["offload_optimizer"]["ratio"] if layout.optimizer_device != "none" else 0.0
    transfers = 0.0
    seconds = (1 - ratio) * updated * optimizer.traffic / speeds.device_bytes
    if ratio:
        on_host = ratio * updated
        if machine.has_gpu:  # gradients down each micro step (once where the device adds them up), weights up once
            gradients = (1 if layout.keeps_fp32_share else accumulation) * layout.sum_bytes
            transfers += (gradients + layout.weight_bytes) * on_host / speeds.host_link_bytes
        seconds = max(seconds, on_host * machine.ranks_per_node / speeds.adam_params)
    if layout.optimizer_device == "nvme":  # master and moments, read and written
        moved = 2 * (optimizer.master + optimizer.state) * updated * machine.ranks_per_node
        transfers += moved / speeds.nvme_bytes
    if layout.param_device != "none":  # this rank's shard, for forward and backward
        moved = 2 * accumulation * layout.weight_bytes * size.num_params / machine.world_size
        if machine.has_gpu:
            transfers += moved / speeds.host_link_bytes
        if layout.param_device == "nvme":
            transfers += moved * machine.ranks_per_node / speeds.nvme_bytes
    return transfers, seconds
