"""The configurations that are tried for a job: ZeRO files, numbers in them, micro batches."""

from collections.abc import Iterator
from typing import Any

from dsft.config.deepspeed import AUTO, compose, get_value, read_zero_file, stage
from dsft.models.size import ModelSize
from dsft.planner.activations import Job
from dsft.planner.step_time import GPUS, gpu_name, parse_interconnect
from dsft.planner.traced_model import LIGER_MODELS
from dsft.planner.zero_layout import (
    DEEPSPEED_OPTIMIZERS,
    OPTIMIZERS,
    PLANNED_AS,
    optimizer_memory,
    sums_in_fp32,
)
from dsft.runtime.hardware import Machine
from dsft.units import Batch

SEQUENCES_PER_RANK = 8
"""Sequences of one optimizer step on each rank where no option sets them: TrainingArguments' own
per_device_train_batch_size. The plan cuts them into micro batches.
"""
LARGEST_MICRO_BATCH = 64
CHECKPOINT_EVERY = (8, 4, 3, 2)
"""Which layers are computed again (each so manieth) where computing all again fits and computing none does not: the
fewest first. Published beside all layers: steps of Llama 7B took 4.55 s instead of 4.91 (by operation,
github.com/pytorch/torchtitan/pull/97); of IBM's Llamas every other layer gave most (torchtitan/pull/125). By counting
passes every other layer saves up to 1/6 of a step with LoRA, 1/8 in full; no run of 70B was found.
"""
MANY_MICRO_BATCHES = 4
"""From which on their gradients are added up in fp32: in bf16 the sum of 4 is off by 0.3 %, of 64 by 0.8 % (measured,
docs/planner.md).
"""
SMALL_LIVE_PARAMS = 50_000_000
"""stage3_max_live_parameters and stage3_max_reuse_distance, lowered together (one alone changes nothing), where 1e9
would not fit.
"""
LEAST_BUCKET = 2**25
"""Elements of ZeRO-3's buckets, at least, where all that passes through them is as much: transformers' "auto" is the
hidden size squared, 65,536 at a width of 256, and gradients then go in hundreds of small collectives.
"""
MOST_PREFETCHED = 2**28
"""Elements that ZeRO-3 fetches ahead at most: half a GiB in bf16. A layer of 8B has 218 M, whose gather should lie
behind the layer before it; transformers' "auto" fetches a parameter of it.
"""
LEAST_REDUCED = 2**25
"""Elements of a rank's share from which on ZeRO 1 and 2 reduce a gradient to the rank that keeps it, over slow links.
64 MiB in bf16 take longer than the hops from rank to rank; less is reduced to all ranks, in fewer calls.
"""
FAST_LINK_BYTES = 1e11
"""Bytes per second of a rank's links within a node, from which on half as many gain little: NVLink through a switch."""
LEAST_PERSISTENT = 100_000
"""Elements up to which ZeRO-3 keeps a parameter gathered, at least: DeepSpeed's own default."""
PERSISTENT_SHARE = 0.05
"""Of a model's parameters that may stay gathered so that its adapters are."""
NO_FP32_SUMS = ("0", "1")
"""Candidates that add up gradients in the model's type alone (`gradient_types`)."""
NAMES = (
    *("0", "1", "2", "3", "3-hpz", "2-offload", "3-offload-partial", "3-offload-optimizer", "3-offload-param"),
    *("3-offload", "3-nvme"),
)
"""Candidates, simplest first: of two that are equally fast, the first is taken."""
OFFLOADED_PARTS = ("offload_optimizer", "offload_param")
UNMODELLED = {
    "zero_optimization.zero_quantized_weights": "gathers of 8-bit weights",
    "zero_optimization.zero_quantized_gradients": "4-bit gradients",
    "torch_autocast.enabled": "torch autocast",
    "fp16.fp16_master_weights_and_grads": "fp16 master weights",
    "bf16.bf16_master_weights_and_grads": "bfloat16 master weights",
    "compression_training": "compression",
    "compile.deepcompile": "DeepCompile",
    "zero_optimization.offload_optimizer.super_offload": "SuperOffload, as offload of the optimizer without it",
}
"""Settings of a DeepSpeed JSON that change memory or time and are not counted."""


def unmodelled(job: Job, deepspeed_config: dict[str, Any]) -> list[str]:
    """What a job and its configuration ask for and the plan does not count, a sentence each."""
    notes = []
    kind = get_value(deepspeed_config, "optimizer.type")
    if kind and str(kind).lower() not in DEEPSPEED_OPTIMIZERS:
        notes.append(f"optimizer.type {kind} is not modelled: planned with the states of {PLANNED_AS}.")
    elif not kind and job.optimizer not in OPTIMIZERS:
        notes.append(f"optim {job.optimizer} is not modelled: planned with the states of {PLANNED_AS}.")
    if optimizer_memory(deepspeed_config, job.optimizer).needs_orthogonalization:
        notes.append("Muon's products of matrices are not modelled: a step takes longer than planned.")
    if job.liger and job.size.model_type not in LIGER_MODELS:
        notes.append(f"use_liger_kernel changes nothing: Liger has no kernels for {job.size.model_type}.")
    if job.compiled:
        notes.append("torch.compile is not modelled: a compiled model is faster and holds less than planned.")
    if job.size.unadapted_expert_params:
        number = f"{job.size.unadapted_expert_params:,} parameters of experts"
        notes.append(f"{number} get no adapters: lora_target_modules does not reach them.")
    if left := job.size.plain_expert_params:
        notes.append(f"{left / 1e9:,.1f} B parameters of experts are not quantised: only linear layers are.")
    aio, devices = (
        deepspeed_config.get("aio"),
        {get_value(deepspeed_config, f"zero_optimization.{part}.device") for part in OFFLOADED_PARTS},
    )
    if "nvme" in devices and aio in (None, read_zero_file("3-nvme", [])["aio"]):
        notes.append("aio has DeepSpeed's own numbers: ds_nvme_tune --nvme_dir FOLDER finds those of a disk.")
    asked = [key for key in UNMODELLED if (get_value(deepspeed_config, key) or -1) != -1]
    if get_value(deepspeed_config, "bf16.bf16_optimizer_states"):  # what is planned, else CPUAdam's fp32 moments
        asked = [key for key in asked if not key.startswith("bf16.")]
    notes += [f"{key} is not modelled: planned without {UNMODELLED[key]}." for key in asked]
    if sums_in_fp32(deepspeed_config) and stage(deepspeed_config) == 1:
        notes.append("data_types.grad_accum_dtype under stage 1 is not modelled: each GPU holds all gradients in fp32.")
    return notes


def candidate_names(job: Job, machine: Machine) -> list[str]:
    """List the configurations that make sense for this model and machine."""
    left_out = set()
    if optimizer_memory({}, job.optimizer).counts_steps:
        in_fp32, sums = job.dtype == "float32", job.fp32_accumulation
        return ["0", "1", "2"] if in_fp32 else ["2"] if sums else ["1", "2"]  # arguments.py has the reason
    if job.fp32_accumulation and job.dtype != "float32":
        left_out |= set(NO_FP32_SUMS)
    elif machine.world_size == 1:
        # There is nothing to shard. 1 is 2 with fewer buffers, and without fp32 sums; in fp32 it has a second copy of
        # the weights.
        left_out |= {"1", "2"} if job.dtype == "float32" else {"0"}
    if machine.nodes == 1 or machine.ranks_per_node == 1 or machine.num_ranks:  # uneven nodes share no size
        left_out.add("3-hpz")
    if not machine.has_gpu:
        left_out |= {name for name in NAMES if "offload" in name}  # device and host are the same memory
    if not machine.nvme_bytes:
        left_out.add("3-nvme")
    if job.liger and not job.tiled_loss:  # its loss reads the head past ZeRO-3's hooks
        left_out |= {name for name in NAMES if name.startswith("3")}
    if job.bf16_states:  # DeepSpeed has none in stage 0; through NVMe they were not tried
        left_out |= {"0", "3-nvme"}
    if job.size.quantization:  # neither sharded by ZeRO-3 nor offloaded: transformers skips zero.Init for such a base
        left_out |= {name for name in NAMES if name not in ("0", "1", "2")}
    return [name for name in NAMES if name not in left_out]


def batches(job: Job, machine: Machine) -> Iterator[Batch]:
    """Yield those to try, smallest micro batch first; each makes up the sequences of a step on all ranks (where they
    cannot be shared evenly, as many as can, and at least one on each).
    """
    if job.micro_batch or job.accumulation:
        micro = job.micro_batch or SEQUENCES_PER_RANK
        at_once = job.batch(micro, 1, machine).sequences
        accumulation = job.accumulation or max(1, (job.sequences_per_step or at_once) // at_once)
        yield job.batch(micro, accumulation, machine)
        return
    at_once = job.batch(1, 1, machine).sequences
    per_rank = max(1, job.sequences_per_step // at_once) if job.sequences_per_step else SEQUENCES_PER_RANK
    for micro in range(1, min(per_rank, LARGEST_MICRO_BATCH) + 1):
        if per_rank % micro == 0:
            yield job.batch(micro, per_rank // micro, machine)


def settings(
    name: str, zero_file: dict[str, Any] | None, job: Job, machine: Machine
) -> Iterator[tuple[dict[str, Any], tuple[str, ...]]]:
    """Yield the configuration with numbers for this model, then with less memory, and what was changed for that; of a
    JSON of the user's only what stands there at "auto" is chosen.
    """
    config = compose(
        zero_file or read_zero_file(name, []),
        hpz_ranks=None if zero_file else machine.ranks_per_node,
        bf16_states=job.bf16_states,
    )
    zero, ranks, size = config["zero_optimization"], machine.world_size, job.size
    fit_nvme_buffers(zero, size, ranks)
    on_nvme = get_value(zero, "offload_param.device") == "nvme"
    if zero_file is not None:
        if zero.get("stage") == 3 and (numbers := stage_3_buckets(zero, size)):
            yield config | {"zero_optimization": zero | numbers}, ()
        yield config, ()
        return
    read, changes = dict(zero), ()
    for part in OFFLOADED_PARTS:
        if machine.nvme_path and get_value(zero, f"{part}.nvme_path"):
            zero[part]["nvme_path"] = machine.nvme_path
    largest_trained = max(numel for numel, _ in size.trainable_numels)
    for key in ("reduce_bucket_size", "allgather_bucket_size"):
        if isinstance(zero.get(key), int):  # allocated in full; some buckets per step are enough to overlap
            enough = max(size.num_trainable // 8, largest_trained)
            zero[key] = min(zero[key], -(-enough // 1024) * 1024)  # DeepSpeed wants an even number
    if name in ("1", "2") and machine.has_gpu and ranks > 1 and size.num_trainable >= LEAST_REDUCED * ranks:
        link = parse_interconnect(machine.interconnect, GPUS[gpu_name(machine)])[0]
        if machine.nodes > 1 or link < FAST_LINK_BYTES:
            # DeepSpeed's default all-reduces every gradient (stage_1_and_2.py, average_tensor): twice the bytes.
            zero["use_multi_rank_bucket_allreduce"] = False
    if ranks == 1 and zero.get("stage") in (1, 2) and "offload_optimizer" not in zero:
        zero["overlap_comm"] = False  # there is nothing to overlap, and a second bucket is copied to
    if zero.get("stage") == 3:
        # A rank's shard is updated in sub-groups that just about fill a power of two, which pinned memory is rounded up
        # to. DeepSpeed closes one once it has reached the number: the largest shard of a parameter is left as margin.
        margin, power_of_two = -(-largest_trained // ranks), 2**28
        while power_of_two < 4 * margin:
            power_of_two *= 2
        zero["sub_group_size"] = power_of_two - margin
        zero |= stage_3_buckets(zero, size)
    if "ratio" in (zero.get("offload_optimizer") or {}):
        # full sub-groups go to one side
        zero["sub_group_size"] = min(zero["sub_group_size"], max(1, size.num_trainable // ranks // 10))
        for ratio in (0.2, 0.4, 0.6, 0.8):
            zero = zero | {"offload_optimizer": zero["offload_optimizer"] | {"ratio": ratio}}
            changes = (f"{ratio:.0%} of the optimizer offloaded",)
            yield config | {"zero_optimization": zero}, changes
    else:
        yield config | {"zero_optimization": zero}, changes
    if zero.get("stage") == 3 and not on_nvme:
        small = dict.fromkeys(("stage3_max_live_parameters", "stage3_max_reuse_distance"), SMALL_LIVE_PARAMS)
        zero = zero | dict.fromkeys(stage_3_buckets(read, size), "auto") | small
        changes = ("fewer live parameters", *changes)
        yield config | {"zero_optimization": zero}, changes
    offloaded = [part for part in OFFLOADED_PARTS if get_value(zero, f"{part}.pin_memory")]
    if offloaded:  # pinned memory is rounded up to powers of two, pageable memory is not
        zero = zero | {part: zero[part] | {"pin_memory": False} for part in offloaded}
        yield config | {"zero_optimization": zero}, (*changes, "memory not pinned")


def fit_nvme_buffers(zero: dict[str, Any], size: ModelSize, ranks: int) -> None:
    """Let a section of stage 3 that offloads weights to NVMe have buffers there that are large enough, and take no more
    of them at once than there are.
    """
    offload = zero.get("offload_param") or {}
    if offload.get("device") != "nvme":
        return
    # DeepSpeed asserts that the shard of the largest parameter fits (swap_tensor/partitioned_param_swapper.py).
    shard = -(-max(numel for numel, _ in size.numels) // ranks)
    given = offload.get("buffer_size")
    offload["buffer_size"] = max(given if isinstance(given, int) else 0, -(-shard // 1024) * 1024)
    # And that a buffer is free for each weight: it holds one until it is released. What is kept for the backward, or
    # was fetched ahead, would be more than a layer's weights, and DeepSpeed has five by default.
    if zero.get("stage3_prefetch_bucket_size", AUTO) == AUTO:
        zero["stage3_prefetch_bucket_size"] = 0
    has_few = offload.get("buffer_count", AUTO) in (AUTO, *range(6))
    if has_few or zero.get("stage3_max_reuse_distance", AUTO) == AUTO:
        zero["stage3_max_reuse_distance"] = 0


def gradient_types(config: dict[str, Any], job: Job, accumulation: int, *, decides: bool) -> Iterator[dict[str, Any]]:
    """Yield the configuration with the types in which gradients are sent and added up, the better one first.

    Stage 0 refuses to add up in another type than the model's, and stage 1 would hold all gradients in full on every
    GPU, in an optimizer of its own (deepspeed/runtime/engine.py, _do_optimizer_sanity_check; bf16_optimizer.py).

    Args:
        decides: whether what the user left open is decided: not over a JSON of the user's.
    """
    if job.dtype == "float32":
        yield config
        return
    if job.fp32_reduction:
        config = config | {"communication_data_type": "fp32"}
    asked = job.fp32_accumulation
    # with NVMe it is not proven
    decides = decides and get_value(config, "zero_optimization.offload_optimizer.device") != "nvme"
    if stage(config) >= 2 and (asked or (decides and wants_fp32_sums(job, accumulation))):
        yield config | {"data_types": (config.get("data_types") or {}) | {"grad_accum_dtype": "fp32"}}
    if not asked or stage(config) < 2:
        yield config


def wants_fp32_sums(job: Job, accumulation: int) -> bool:
    """Tell whether gradients should be added up in fp32 where the user left it open."""
    return job.dtype == "bfloat16" and job.fp32_accumulation is None and accumulation >= MANY_MICRO_BATCHES


def stage_3_buckets(zero: dict[str, Any], size: ModelSize) -> dict[str, int]:
    """Choose what stands at "auto" in a section of stage 3: transformers' numbers, but none so small that collectives
    take longer to begin than to run.

    With NVMe transformers' own stay, but for what `fit_nvme_buffers` sets.
    """
    if get_value(zero, "offload_param.device") == "nvme":
        return {}
    # The largest adapter that stays gathered: each would be a collective of its own in every forward and backward,
    # over a few thousand elements. 0 in full finetuning.
    adapters = next(
        (
            numel
            for numel, _ in reversed(size.trainable_numels if size.lora_r else ())
            if sum(n * count for n, count in size.numels if n <= numel) <= PERSISTENT_SHARE * size.num_params
        ),
        0,
    )
    square = size.hidden_size**2
    bucket = min(max(square, LEAST_BUCKET), size.num_trainable)
    layer = min(size.num_params // size.num_layers, MOST_PREFETCHED)
    numbers = {
        # allocated in full
        "reduce_bucket_size": bucket + bucket % 2,
        "stage3_prefetch_bucket_size": min(max(int(0.9 * square), LEAST_BUCKET, layer), size.num_params),
        "stage3_param_persistence_threshold": max(10 * size.hidden_size, LEAST_PERSISTENT, adapters),
    }
    return {key: number for key, number in numbers.items() if zero.get(key) == "auto"}
