"""Host memory of one node that DeepSpeed's offload takes.

Pinned memory is rounded up to powers of two by torch's CachingHostAllocator (c10 `CachingHostAllocator.h`), which keeps
what
is freed. Without a GPU nothing is pinned, and every buffer has its own size.
"""

from collections import Counter

from dsft.planner.terms import Phase, Term
from dsft.planner.zero_layout import ZeroJob, device_sub_groups, partition_gradients
from dsft.units import GB

GPU_PROCESS_BYTES = 3 * GB
"""Of one rank: Python, torch with CUDA, NCCL, DeepSpeed (an estimate)."""
CPU_PROCESS_BYTES = int(0.65 * GB)
"""Of one rank without CUDA: what a rank of a tiny model holds beyond its states (measured: 0.63 to 0.69 GB on two
ranks).
"""


def host_terms(job: ZeroJob) -> list[Term]:
    """Of one node: all its ranks together."""
    terms = [process_term(job, phase="always")]
    if job.stage in (1, 2) and job.optimizer_device != "none":
        terms += _stage_1_2(job)
    if job.stage == 3 and job.optimizer_device != "none":
        terms += _stage_3_nvme(job) if job.optimizer_device == "nvme" else _stage_3_optimizer(job)
    if job.stage == 3 and job.param_device != "none":
        terms += _stage_3_params(job)
    return terms + _files(job)


def _files(job: ZeroJob) -> list[Term]:
    """What offload writes to a node's NVMe: shards of the weights; master, moments and gradients in fp32
    (deepspeed/runtime/swap_tensor; not run here).
    """
    share, w, n = job.share, job.weight_bytes, job.ranks_per_node
    params = w * -(-job.size.num_params // job.world_size) if job.param_device == "nvme" else 0
    optimizer = 16 * share if job.optimizer_device == "nvme" else 0
    return (
        [
            Term(
                name="files",
                num_bytes=n * (params + optimizer),
                place="nvme",
                formula=f"{n} ranks x (weights {params:,} + 16 x {share:,} trained)",
            )
        ]
        if params + optimizer
        else []
    )


def process_term(job: ZeroJob, *, phase: Phase) -> Term:
    """What the ranks of a node take before they hold a model."""
    num_bytes = GPU_PROCESS_BYTES if job.has_gpu else CPU_PROCESS_BYTES
    return Term(
        name="processes",
        num_bytes=job.ranks_per_node * num_bytes,
        phase=phase,
        place="host",
        formula=f"{job.ranks_per_node} ranks x {num_bytes:,}",
    )


def _host(job: ZeroJob, name: str, num_bytes: float, formula: str) -> Term:
    return Term(
        name=name,
        num_bytes=int(job.ranks_per_node * num_bytes),
        place="host",
        formula=f"{job.ranks_per_node} ranks x {formula}",
    )


def _pinned(job: ZeroJob, *sizes: int, pin: bool = True) -> int:
    """Bytes that buffers of these sizes take: each rounded up to a power of two where it is pinned."""
    return sum(1 << (size - 1).bit_length() if size and pin and job.has_gpu else size for size in sizes)


def _stage_1_2(job: ZeroJob) -> list[Term]:
    """Everything but the moments is pinned (stage_1_and_2.py, __init__ and initialize_optimizer_states)."""
    w, share, largest = job.weight_bytes, job.share, job.largest_trained
    pin = job.zero["offload_optimizer"]["pin_memory"]
    terms = [
        _host(job, "Adam moments", 8 * share, f"8 x {share:,}"),
        _host(job, "fp32 master weights", _pinned(job, 4 * share, pin=pin), f"4 x {share:,}, pinned"),
        _host(job, "fp32 gradients", _pinned(job, 4 * share, pin=pin), f"4 x {share:,}, pinned"),
        _host(job, "copy of updated weights", _pinned(job, w * share, pin=pin), f"{w} x {share:,}, pinned"),
        _host(
            job, "gradient buffer", _pinned(job, w * largest, pin=pin), f"{w} x largest parameter {largest:,}, pinned"
        ),
    ]
    if job.accumulates and job.stage == 2:
        # One buffer per parameter of the share, whole (buffer_to_accumulate_to_in_cpu); rounded like the average
        # parameter.
        plain = sum(numel * count for numel, count in job.size.trainable_numels)
        rounding = sum(_pinned(job, w * numel, pin=pin) * count for numel, count in job.size.trainable_numels) / (
            w * plain
        )
        whole = partition_gradients(job)
        terms.append(
            _host(
                job,
                "accumulated gradients",
                w * whole * rounding,
                f"{w} x {whole:,} whole parameters of the share x {rounding:.2f} for pinning each",
            )
        )
    return terms


def _stage_3_optimizer(job: ZeroJob) -> list[Term]:
    """Steady state 4 + 8 + 4 + w bytes per parameter of the share (stage3.py, _create_fp32_partitions,
    initialize_optimizer_states, _setup_for_real_optimizer).
    """
    w, share = job.weight_bytes, job.share
    pin = job.zero["offload_optimizer"]["pin_memory"]
    kept = share - sum(device_sub_groups(job))
    groups = job.sub_groups
    # Buffers of sub-groups that the device updates are made pinned and moved: the allocator keeps them.
    gradients = _pinned(
        job,
        *(4 * group for group in (groups if job.has_gpu and pin else groups[len(device_sub_groups(job)) :])),
        pin=pin,
    )
    return [
        _host(job, "fp32 master weights and Adam moments", 12 * kept, f"(4 + 8) x {kept:,}, pageable"),
        _host(job, "fp32 gradients", gradients, f"4 x each of {len(groups)} sub-groups, pinned"),
        _host(job, "gradient partition", _pinned(job, w * share, pin=pin), f"{w} x {share:,}, pinned"),
    ]


def _stage_3_nvme(job: ZeroJob) -> list[Term]:
    """Swap buffers of OptimizerSwapper (page-locked by the aio library, not rounded), and the gradient partition."""
    offload, w = job.zero["offload_optimizer"], job.weight_bytes
    largest = max(job.sub_groups)
    return [
        _host(
            job,
            "swap buffers of the optimizer",
            4 * largest * offload["buffer_count"],
            f"4 x sub-group {largest:,} x {offload['buffer_count']} buffers",
        ),
        _host(
            job,
            "gradient partition",
            _pinned(job, w * job.share, pin=offload["pin_memory"]),
            f"{w} x {job.share:,}, pinned",
        ),
    ]


def _stage_3_params(job: ZeroJob) -> list[Term]:
    """Shards one by one as zero.Init makes them; trained ones then move to one flat buffer, which is always pinned
    (_create_param_groups_fp16_flat_cpu_memory).
    """
    w, wt, n, share = job.weight_bytes, job.trained_bytes, job.world_size, job.share
    offload = job.zero["offload_param"]
    if offload["device"] == "nvme":
        in_memory = min(share, offload["max_in_cpu"])
        return [
            _host(
                job,
                "swap buffers of parameters",
                w * offload["buffer_count"] * offload["buffer_size"],
                f"{w} x {offload['buffer_count']} buffers x {offload['buffer_size']:,}",
            ),
            _host(job, "trained shards", _pinned(job, wt * in_memory), f"{wt} x {in_memory:,} (max_in_cpu), pinned"),
        ]
    threshold, pin = job.zero["stage3_param_persistence_threshold"], offload["pin_memory"]

    def shards(numels: Counter[int], width: int) -> int:
        return sum(
            _pinned(job, width * -(-numel // n), pin=pin) * count
            for numel, count in numels.items()
            if numel > threshold
        )

    # Freed shards of trained parameters stay with the allocator where they were pinned.
    left = shards(job.trained_numels, wt) if job.has_gpu and pin else 0
    return [
        _host(job, "trained shards", _pinned(job, wt * share), f"{wt} x {share:,}, pinned"),
        _host(
            job, "frozen shards", shards(job.frozen_numels, w), f"{w} x each frozen parameter / {n}, pinned one by one"
        ),
        _host(
            job,
            "allocator's leftovers",
            left,
            f"{wt} x each trained parameter / {n}, pinned one by one, kept when they move",
        ),
    ]
