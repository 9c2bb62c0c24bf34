"""Which configurations a plan tries: ZeRO files, the numbers in them, micro batches."""

from collections.abc import Iterator
from typing import Any

from dsft.config.deepspeed import compose, get_value, read_zero_file, stage
from dsft.models.size import ModelSize
from dsft.planner.job import Job
from dsft.planner.optimizers import optimizer_memory
from dsft.runtime.hardware import Machine
from dsft.units import Batch

SEQUENCES_PER_RANK = 8
"""Sequences of one optimizer step on each rank where nothing is said: TrainingArguments' own
per_device_train_batch_size. The plan cuts them into micro batches.
"""
LARGEST_MICRO_BATCH = 64
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
LEAST_PERSISTENT = 100_000
"""Elements up to which ZeRO-3 keeps a parameter gathered, at least: DeepSpeed's own default."""
PERSISTENT_SHARE = 0.05
"""Of a model's parameters that may stay gathered so that its adapters are."""
NO_FP32_SUMS = ("0", "1")
"""Candidates that add up gradients in the model's type alone (`gradient_types`)."""
NAMES = (
    "0",
    "1",
    "2",
    "3",
    "3-hpz",
    "2-offload",
    "3-offload-partial",
    "3-offload-optimizer",
    "3-offload-param",
    "3-offload",
    "3-nvme",
)
"""Candidates, simplest first: of two that are equally fast, the first is taken."""


def candidate_names(job: Job, machine: Machine) -> list[str]:
    """List the configurations that make sense for this model and machine."""
    left_out = set()
    if optimizer_memory({}, job.optimizer).counts_steps:
        in_fp32, sums = job.dtype == "float32", job.fp32_accumulation
        return ["0", "1", "2"] if in_fp32 else ["2"] if sums else ["1", "2"]  # run_setup/arguments.py says why
    if job.fp32_accumulation and job.dtype != "float32":
        left_out |= set(NO_FP32_SUMS)
    elif machine.world_size == 1:
        # There is nothing to shard. 1 is 2 with fewer buffers, and without fp32 sums; in fp32 it has a second copy of
        # the weights.
        left_out |= {"1", "2"} if job.dtype == "float32" else {"0"}
    if machine.nodes == 1 or machine.ranks_per_node == 1:
        left_out.add("3-hpz")
    if not machine.has_gpu:
        left_out |= {name for name in NAMES if "offload" in name}  # device and host are the same memory
    if not machine.nvme_bytes:
        left_out.add("3-nvme")
    if job.liger:  # its loss reads the head past ZeRO-3's hooks
        left_out |= {name for name in NAMES if name.startswith("3")}
    if job.size.quantization:  # neither sharded by ZeRO-3 nor offloaded: transformers skips zero.Init for such a base
        left_out |= {name for name in NAMES if name not in ("0", "1", "2")}
    return [name for name in NAMES if name not in left_out]


def batches_of(name: str, job: Job, machine: Machine) -> list[tuple[int, int]]:
    """List (micro batch, accumulation) to try with one of several candidates: none whose gradients should be added up
    in fp32 where it cannot.
    """
    tried = batches(job, machine.world_size)
    return [pair for pair in tried if name not in NO_FP32_SUMS or not wants_fp32_sums(job, pair[1])]


def batches(job: Job, world_size: int) -> Iterator[tuple[int, int]]:
    """Yield (micro batch, accumulation) to try, smallest micro batch first; each makes up the sequences of a step on
    all ranks (where they cannot be shared evenly, as many as can, and at least one on each).
    """
    if job.micro_batch or job.accumulation:
        micro = job.micro_batch or SEQUENCES_PER_RANK
        at_once = Batch(micro, 1, world_size).sequences
        yield micro, job.accumulation or max(1, (job.sequences_per_step or at_once) // at_once)
        return
    per_rank = max(1, job.sequences_per_step // world_size) if job.sequences_per_step else SEQUENCES_PER_RANK
    for micro in range(1, min(per_rank, LARGEST_MICRO_BATCH) + 1):
        if per_rank % micro == 0:
            yield micro, per_rank // micro


def settings(name: str, zero_file: dict[str, Any] | None, job: Job, machine: Machine) -> Iterator[dict[str, Any]]:
    """Yield the configuration with numbers for this model, then with less memory; of a JSON of the user's only what
    stands there at "auto" is chosen.
    """
    config = compose(zero_file or read_zero_file(name, []), ranks_per_node=machine.ranks_per_node)
    _make_room_for_largest(config, job.size, machine.world_size)
    zero = config["zero_optimization"]
    if zero_file is not None:
        if zero.get("stage") == 3 and (numbers := stage_3_buckets(zero, job.size)):
            yield config | {"zero_optimization": zero | numbers}
        yield config
        return
    read = dict(zero)
    for part in ("offload_optimizer", "offload_param"):
        if machine.nvme_path and get_value(zero, f"{part}.nvme_path"):
            zero[part]["nvme_path"] = machine.nvme_path
    if zero.get("stage") == 3:
        zero["sub_group_size"] = sub_group_size(job.size, machine.world_size)
    if machine.world_size == 1 and zero.get("stage") in (1, 2) and "offload_optimizer" not in zero:
        zero["overlap_comm"] = False  # there is nothing to overlap, and a second bucket is copied to
    for key in ("reduce_bucket_size", "allgather_bucket_size"):
        if isinstance(zero.get(key), int):  # allocated in full; some buckets per step are enough to overlap
            enough = max(job.size.num_trainable // 8, max(numel for numel, _ in job.size.trainable_numels))
            zero[key] = min(zero[key], -(-enough // 1024) * 1024)  # DeepSpeed wants an even number
    if zero.get("stage") == 3:
        zero |= stage_3_buckets(zero, job.size)
    shares = [1.0]
    if "ratio" in (zero.get("offload_optimizer") or {}):
        shares = [0.2, 0.4, 0.6, 0.8]
        zero["sub_group_size"] = min(
            zero["sub_group_size"], max(1, job.size.num_trainable // machine.world_size // 10)
        )  # full sub-groups go to one side
    for share in shares:
        if "ratio" in (zero.get("offload_optimizer") or {}):
            zero = zero | {"offload_optimizer": zero["offload_optimizer"] | {"ratio": share}}
        yield config | {"zero_optimization": zero}
    if zero.get("stage") == 3:
        small = dict.fromkeys(("stage3_max_live_parameters", "stage3_max_reuse_distance"), SMALL_LIVE_PARAMS)
        zero = zero | dict.fromkeys(stage_3_buckets(read, job.size), "auto") | small
        yield config | {"zero_optimization": zero}
    offloaded = [part for part in ("offload_optimizer", "offload_param") if get_value(zero, f"{part}.pin_memory")]
    if offloaded:  # pinned memory is rounded up to powers of two, pageable memory is not
        yield config | {"zero_optimization": zero | {part: zero[part] | {"pin_memory": False} for part in offloaded}}


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

    With NVMe transformers' own stay: what is fetched ahead must fit into the buffers there.
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
    numbers = {
        # allocated in full
        "reduce_bucket_size": bucket + bucket % 2,
        "stage3_prefetch_bucket_size": min(max(int(0.9 * square), LEAST_BUCKET), size.num_params),
        "stage3_param_persistence_threshold": max(10 * size.hidden_size, LEAST_PERSISTENT, adapters),
    }
    return {key: number for key, number in numbers.items() if zero.get(key) == "auto"}


def _make_room_for_largest(config: dict[str, Any], size: ModelSize, world_size: int) -> None:
    """Raise a `buffer_size` of offload to NVMe to the shard of the largest parameter."""
    offload = get_value(config, "zero_optimization.offload_param") or {}
    if offload.get("device") == "nvme":
        # DeepSpeed asserts that it fits (swap_tensor/partitioned_param_swapper.py).
        shard = -(-max(numel for numel, _ in size.numels) // world_size)
        given = offload.get("buffer_size")
        offload["buffer_size"] = max(given if isinstance(given, int) else 0, -(-shard // 1024) * 1024)


def leaner_settings(config: dict[str, Any]) -> str:
    """Say what a configuration changes to fit, besides its name: "" where nothing."""
    zero = config.get("zero_optimization", {})
    changes = []
    if zero.get("stage3_max_live_parameters") == SMALL_LIVE_PARAMS:
        changes.append("fewer live parameters")
    parts = [zero.get(part) or {} for part in ("offload_optimizer", "offload_param")]
    if (share := parts[0].get("ratio", 1)) < 1:
        changes.append(f"{share:.0%} of the optimizer offloaded")
    if any(part.get("device", "none") != "none" and part.get("pin_memory") is False for part in parts):
        changes.append("memory not pinned")
    return f" ({', '.join(changes)})" if changes else ""


def sub_group_size(size: ModelSize, world_size: int) -> int:
    """Choose the elements of the pieces in which a rank's shard is updated: they just about fill a power of two, which
    pinned memory is rounded up to.

    DeepSpeed closes a group once it has reached the number, so the largest shard of one parameter is left as margin.
    """
    margin = -(-max(numel for numel, _ in size.trainable_numels) // world_size)
    power_of_two = 2**28
    while power_of_two < 4 * margin:
        power_of_two *= 2
    return power_of_two - margin
