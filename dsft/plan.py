"""Chooses the DeepSpeed configuration: by parameter count, method, ranks, GPU memory and host memory. Pure arithmetic.

The formulas count what DeepSpeed 0.19.8 holds with fp32 master weights; their terms were checked against it with 16 simulated
ranks. Time is not predicted: candidates stand in the order in which they are usually fastest, and the first that fits is taken.
"""

import dataclasses
from dataclasses import dataclass

from dsft.machine import GB, GiB, Machine
from dsft.model_size import ModelSize

RESERVED_BYTES = int(1.5 * GiB)
"""CUDA context, NCCL buffers and allocator fragmentation on one GPU."""
BUCKET_ELEMENTS = 200_000_000
"""reduce_bucket_size and allgather_bucket_size of ds_configs/zero1.json and zero2.json."""
MAX_LIVE_PARAMS = 1_000_000_000
"""stage3_max_live_parameters and sub_group_size of ds_configs/zero3*.json."""


@dataclass(frozen=True, kw_only=True)
class ZeroPlan:
    """One DeepSpeed configuration and the memory it needs."""

    zero: str
    """Name as the option `zero` takes it: 0, 1, 2, 3, 2-offload, 3-offload-optimizer, 3-offload, 3-hpz, 3-nvme or a path."""
    activation_checkpointing: bool
    state_bytes: int
    """Weights, gradients, Adam state and DeepSpeed's buffers on one GPU, during the backward pass."""
    step_bytes: int
    """Transient of the optimizer step on one GPU; not alive together with activations."""
    activation_bytes: int
    """Activations and logits of one micro batch on one GPU."""
    device_bytes: int
    """Peak on one GPU, reserve included."""
    host_bytes: int
    """Host memory of one node, all its ranks together."""
    fits: bool
    binds: str
    """"GPU memory" or "host memory" where that is too small; empty where it fits."""
    reason: str = ""
    """One sentence; printed at start and kept in run.json."""


def choose_plan(size: ModelSize, machine: Machine, *, micro_batch_tokens: int, half: bool, zero: str = "auto",
                activation_checkpointing: bool | None = None) -> ZeroPlan:
    """The first candidate that fits, or, with `zero` given, that one.

    Args:
        micro_batch_tokens: tokens of one forward on one rank, padding included.
        half: bf16 or fp16 computation with fp32 master weights; else everything is fp32.
        activation_checkpointing: as the user set it; None lets the plan decide.

    Returns a plan with `fits=False` and the resource that binds where nothing fits.
    """
    candidates = all_plans(size, machine, micro_batch_tokens=micro_batch_tokens, half=half, zero=zero,
                           activation_checkpointing=activation_checkpointing)
    fitting = [plan for plan in candidates if plan.fits]
    if fitting:
        chosen = fitting[0]
        passed = candidates[: candidates.index(chosen)]
        reason = f"{_describe(chosen)} is the fastest that fits"
        if zero != "auto":
            reason = f"zero={zero} was asked for, and {_describe(chosen)} fits"
        elif passed:
            last = passed[-1]
            reason += f"; {_describe(last)} would need {_need(last)}"
    else:
        chosen = min(candidates, key=lambda plan: (plan.device_bytes, plan.host_bytes))
        reason = f"nothing fits; the smallest is {_describe(chosen)}, which needs {_need(chosen)}"
        if zero != "auto":
            reason = f"zero={zero} was asked for, but {_describe(chosen)} needs {_need(chosen)}"
    have = f"{machine.device_bytes / GiB:.0f} GiB per {'GPU' if machine.has_gpu else 'rank'} and {machine.host_bytes / GiB:.0f} GiB per host are there"
    return dataclasses.replace(chosen, reason=f"{reason}; {have}.")


def all_plans(size: ModelSize, machine: Machine, *, micro_batch_tokens: int, half: bool, zero: str = "auto",
              activation_checkpointing: bool | None = None) -> list[ZeroPlan]:
    """Every candidate, usually-fastest first."""
    names = [zero]
    if zero == "auto":
        sharded = ["3"] + (["3-hpz"] if machine.nodes > 1 else [])
        # A quantised base is neither sharded by ZeRO-3 nor offloaded (transformers skips zero.Init for it).
        names = ["1", "2"] + ([] if size.quantized_bits else [*sharded, "2-offload", "3-offload-optimizer", "3-offload"])
        if machine.nodes > 1 and "3-hpz" in names:
            # Across nodes, gathering inside a node is faster (DeepSpeed#6889).
            names.remove("3-hpz")
            names.insert(names.index("3"), "3-hpz")
    choices = [False, True] if activation_checkpointing is None else [activation_checkpointing]
    # Checkpointing costs a third more computation, offloading several times as much: so offload comes last, least of it first.
    order = [(name, choice) for choice in choices for name in names if "offload" not in name]
    order += [(name, choice) for name in names if "offload" in name for choice in choices]
    return [_plan(name, size, machine, micro_batch_tokens, half, checkpointing) for name, checkpointing in order]


def _plan(zero: str, size: ModelSize, machine: Machine, tokens: int, half: bool, checkpointing: bool) -> ZeroPlan:
    state, step = state_bytes(zero, size, machine, half=half)
    activations = activation_bytes(size, tokens, checkpointing=checkpointing, half=half)
    device = state + max(activations, step) + (RESERVED_BYTES if machine.has_gpu else 0)
    host = host_bytes(zero, size, machine)
    if not machine.has_gpu:
        host += machine.ranks_per_node * device  # CPU ranks hold everything in host memory
    binds = "GPU memory" if machine.has_gpu and device > machine.device_bytes else ""
    binds = binds or ("host memory" if host > 0.95 * machine.host_bytes else "")
    return ZeroPlan(zero=zero, activation_checkpointing=checkpointing, state_bytes=state, step_bytes=step,
                    activation_bytes=activations, device_bytes=device, host_bytes=host, fits=not binds, binds=binds)


def state_bytes(zero: str, size: ModelSize, machine: Machine, *, half: bool) -> tuple[int, int]:
    """(bytes alive during backward, extra bytes during the optimizer step) on one rank."""
    n = machine.world_size
    w = 2 if half else 4  # weight and gradient bytes
    base = (size.num_params - size.num_trainable) * (size.quantized_bits / 8 if size.quantized_bits else w) + size.num_trainable * w
    t = size.num_trainable
    adam = 12 if half else 8  # fp32 master 4 + Adam m, v 8 (ZeRO paper, table 1)
    bucket = w * min(BUCKET_ELEMENTS, t)
    if zero == "0":
        return int(base + (w + adam) * t), 0
    if zero == "1":
        return int(base + w * t + adam * t / n + 2 * bucket), int(6 * t / n)
    if zero == "2":
        return int(base + (w + adam) * t / n + 2 * bucket), int(6 * t / n)
    if zero == "2-offload":
        return int(base + 2 * bucket), 0
    live = w * min(size.num_params, max(MAX_LIVE_PARAMS, size.largest_module_params)) if n > 1 or "offload" in zero else 0
    buckets = 2 * w * size.hidden_size**2 + 2 * w * size.largest_module_params  # "auto" bucket = hidden_size^2
    if zero in ("3-offload", "3-nvme"):
        return int(live + buckets), 0
    if zero == "3-offload-optimizer":
        return int(base / n + live + buckets), 0
    secondary = base / machine.ranks_per_node if zero == "3-hpz" else 0
    return int(base / n + (w + adam) * t / n + live + buckets + secondary), int(6 * min(MAX_LIVE_PARAMS, t / n))


def activation_bytes(size: ModelSize, tokens: int, *, checkpointing: bool, half: bool) -> int:
    """Activations and logits of `tokens` tokens: fits to traces of Hugging Face Llama and Qwen models, attention without a T x T matrix."""
    h, kv, i, layers = size.hidden_size, size.kv_size, size.ffn_size, size.num_layers
    if size.lora_r:
        per_layer, transient = 16 * h + 4 * kv + 8 * i + 14 * size.lora_r, 14 * h + 4 * kv + 12 * i
    else:
        per_layer, transient = 20 * h + 4 * kv + 8 * i + 4 * size.num_heads, 16 * h + 5.5 * kv + 11 * i
    logits = 14 * size.vocab_size + 8 * h  # bf16 logits 2 + fp32 copy 4 + log-softmax 4 + gradient 4
    if checkpointing:
        total = 2 * h * layers * tokens + max(logits, transient) * tokens
    else:
        total = (per_layer * layers + logits) * tokens
    return int(total * (1 if half else 2))


def host_bytes(zero: str, size: ModelSize, machine: Machine) -> int:
    """Host memory of one node: what is offloaded, with pinned buffers rounded up to powers of two, and 3 GB per process."""
    n, t = machine.world_size, size.num_trainable
    per_rank = 3 * GB if machine.has_gpu else 1 * GB
    if "offload" in zero:
        groups = _split(t / n, MAX_LIVE_PARAMS)
        per_rank += 12 * t / n + sum(_power_of_two(4 * group) for group in groups) + _power_of_two(2 * t / n)
    if zero == "3-offload":
        per_rank += _power_of_two(2 * size.num_params / n) + 2 * size.num_params / n
    return int(machine.ranks_per_node * per_rank)


def _split(total: float, largest: int) -> list[float]:
    full, rest = divmod(total, largest)
    return [largest] * int(full) + ([rest] if rest else [])


def _power_of_two(num_bytes: float) -> int:
    """Pinned memory is rounded up like this (torch/csrc/.../CachingHostAllocator)."""
    return 1 << (max(int(num_bytes), 1) - 1).bit_length()


def _describe(plan: ZeroPlan) -> str:
    checkpointing = " with activation checkpointing" if plan.activation_checkpointing else ""
    return f"ZeRO {plan.zero}{checkpointing}"


def _need(plan: ZeroPlan) -> str:
    if plan.binds == "host memory":
        return f"{plan.host_bytes / GiB:.0f} GiB of host memory per node"
    return f"{plan.device_bytes / GiB:.0f} GiB of GPU memory"
