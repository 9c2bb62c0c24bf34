"""Host memory of one node that DeepSpeed's offload takes.

Pinned memory is rounded up to powers of two by torch's CachingHostAllocator (c10 `CachingHostAllocator.h`), which keeps
what is freed. Without a GPU nothing is pinned, and every buffer has its own size.
"""

from collections import Counter

from dsft.planner.terms import Phase, Term
from dsft.planner.zero_layout import ZeroLayout, partition_gradients
from dsft.units import GB

GPU_PROCESS_BYTES = 3 * GB
"""Of one rank: Python, torch with CUDA, NCCL, DeepSpeed (an estimate)."""
CPU_PROCESS_BYTES = int(0.65 * GB)
"""Of one rank without CUDA: what a rank of a tiny model holds beyond its states (measured: 0.63 to 0.69 GB on two
ranks).
"""
GRADIENT_BYTES = 4
"""Of the fp32 gradient that CPUAdam reads."""


def host_terms(layout: ZeroLayout) -> list[Term]:
    """List what all ranks of one node take together."""
    terms = [process_term(layout, phase="always")]
    if layout.stage in (1, 2) and layout.optimizer_device != "none":
        terms += _stage_1_2(layout)
    if layout.stage == 3 and layout.optimizer_device != "none":
        if layout.optimizer_device == "nvme":  # buffers of OptimizerSwapper: page-locked by aio, not rounded
            buffers, largest = layout.zero["offload_optimizer"]["buffer_count"], max(layout.sub_groups)
            swapped = f"4 x sub-group {largest:,} x {buffers} buffers"
            terms.append(_host(layout, "swap buffers of the optimizer", 4 * largest * buffers, swapped))
            terms.append(_gradient_partition(layout))
        else:
            terms += _stage_3_optimizer(layout)
    if layout.stage == 3 and layout.param_device != "none":
        terms += _stage_3_params_nvme(layout) if layout.param_device == "nvme" else _stage_3_params(layout)
    if layout.has_gpu:
        # What rank 0 copies to write a checkpoint: the trained weights, gathered under ZeRO-3
        # (`_zero3_consolidated_16bit_state_dict`). On CPU ranks an optimizer step takes more.
        trained, weight_bytes = layout.num_trainable, layout.weight_bytes
        formula = f"{weight_bytes} x {trained:,} on rank 0"
        save = {"phase": "save", "place": "host", "formula": formula}
        terms.append(Term(name="weights to be saved", num_bytes=weight_bytes * trained, **save))
    return terms + _files(layout)


def _files(layout: ZeroLayout) -> list[Term]:
    """List what offload writes to a node's NVMe: shards of the weights; master, moments and gradients in fp32
    (deepspeed/runtime/swap_tensor; not run here).
    """
    ranks, share, per_param = layout.ranks_per_node, layout.share, layout.optimizer.checkpoint_bytes + GRADIENT_BYTES
    params = optimizer = 0
    if layout.param_device == "nvme":
        params = layout.weight_bytes * -(-layout.size.num_params // layout.world_size)
    if layout.optimizer_device == "nvme":
        optimizer = int(per_param * share)
    if not params + optimizer:
        return []
    return [
        Term(
            name="files",
            num_bytes=ranks * (params + optimizer),
            place="nvme",
            formula=f"{ranks} ranks x (weights {params:,} + {per_param} x {share:,} trained)",
        )
    ]


def process_term(layout: ZeroLayout, *, phase: Phase) -> Term:
    """Count what the ranks of a node take before they hold a model."""
    num_bytes = GPU_PROCESS_BYTES if layout.has_gpu else CPU_PROCESS_BYTES
    return Term(
        name="processes",
        num_bytes=layout.ranks_per_node * num_bytes,
        phase=phase,
        place="host",
        formula=f"{layout.ranks_per_node} ranks x {num_bytes:,}",
    )


def _host(layout: ZeroLayout, name: str, num_bytes: float, formula: str) -> Term:
    return Term(
        name=name,
        num_bytes=int(layout.ranks_per_node * num_bytes),
        place="host",
        formula=f"{layout.ranks_per_node} ranks x {formula}",
    )


def _pinned(layout: ZeroLayout, *sizes: int, pin: bool = True) -> int:
    """Bytes that buffers of these sizes take: each rounded up to a power of two where it is pinned."""
    return sum(1 << (size - 1).bit_length() if size and pin and layout.has_gpu else size for size in sizes)


def _stage_1_2(layout: ZeroLayout) -> list[Term]:
    """Pin everything but the moments (stage_1_and_2.py, __init__ and initialize_optimizer_states)."""
    pin = layout.zero["offload_optimizer"]["pin_memory"]
    moments = layout.optimizer.state_bytes * layout.share
    terms = [_host(layout, "Adam moments", moments, f"{layout.optimizer.state_bytes} x {layout.share:,}")]
    for name, num_bytes, count in (
        ("fp32 master weights", layout.optimizer.master_bytes, layout.share),
        ("fp32 gradients", GRADIENT_BYTES, layout.share),
        ("copy of updated weights", layout.weight_bytes, layout.share),
        ("gradient buffer", layout.weight_bytes, layout.largest_trained),
    ):
        buffer = _pinned(layout, num_bytes * count, pin=pin)
        terms.append(_host(layout, name, buffer, f"{num_bytes} x {count:,}, pinned"))
    waits = layout.accumulates and layout.stage == 2 and not layout.keeps_fp32_share
    if waits:
        # One buffer for each parameter of the share, in full (buffer_to_accumulate_to_in_cpu), rounded like the average
        # parameter.
        weight_bytes, of_share = layout.weight_bytes, partition_gradients(layout)
        numels = layout.size.trainable_numels
        exact = sum(weight_bytes * numel * count for numel, count in numels)
        rounded = sum(_pinned(layout, weight_bytes * numel, pin=pin) * count for numel, count in numels)
        formula = f"{weight_bytes} x {of_share:,} full parameters of the share x {rounded / exact:.2f} for pinning each"
        terms.append(_host(layout, "accumulated gradients", weight_bytes * of_share * rounded / exact, formula))
    return terms


def _stage_3_optimizer(layout: ZeroLayout) -> list[Term]:
    """List states, fp32 gradients and gradients of the share (stage3.py, _create_fp32_partitions,
    initialize_optimizer_states, _setup_for_real_optimizer).
    """
    pin, groups, on_device = (
        layout.zero["offload_optimizer"]["pin_memory"],
        layout.sub_groups,
        layout.device_sub_groups,
    )
    kept = layout.share - sum(on_device)
    # Buffers of sub-groups that the device updates are made pinned and moved: the allocator keeps them.
    pinned_groups = groups if layout.has_gpu and pin else groups[len(on_device) :]
    gradients = _pinned(layout, *(GRADIENT_BYTES * group for group in pinned_groups), pin=pin)
    states = f"({layout.optimizer.formula}) x {kept:,}, pageable"
    return [
        _host(layout, "fp32 master weights and Adam moments", layout.optimizer.checkpoint_bytes * kept, states),
        _host(layout, "fp32 gradients", gradients, f"{GRADIENT_BYTES} x each of {len(groups)} sub-groups, pinned"),
        _gradient_partition(layout),
    ]


def _gradient_partition(layout: ZeroLayout) -> Term:
    sum_bytes, pin = layout.sum_bytes, layout.zero["offload_optimizer"]["pin_memory"]
    partition = _pinned(layout, sum_bytes * layout.share, pin=pin)
    return _host(layout, "gradient partition", partition, f"{sum_bytes} x {layout.share:,}, pinned")


def _stage_3_params_nvme(layout: ZeroLayout) -> list[Term]:
    offload, weight_bytes = layout.zero["offload_param"], layout.weight_bytes
    buffers, elements = offload["buffer_count"], offload["buffer_size"]
    in_memory = min(layout.share, offload["max_in_cpu"])
    return [
        _host(
            layout,
            "swap buffers of parameters",
            weight_bytes * buffers * elements,
            f"{weight_bytes} x {buffers} buffers x {elements:,}",
        ),
        _host(
            layout,
            "trained shards",
            _pinned(layout, weight_bytes * in_memory),
            f"{weight_bytes} x {in_memory:,} (max_in_cpu), pinned",
        ),
    ]


def _stage_3_params(layout: ZeroLayout) -> list[Term]:
    """List shards one by one as zero.Init makes them; trained ones then move to one flat buffer, which is always pinned
    (_create_param_groups_fp16_flat_cpu_memory).
    """
    weight_bytes, ranks = layout.weight_bytes, layout.world_size
    threshold, pin = layout.zero["stage3_param_persistence_threshold"], layout.zero["offload_param"]["pin_memory"]

    def shards(numels: Counter[int]) -> int:
        return sum(
            _pinned(layout, weight_bytes * -(-numel // ranks), pin=pin) * count
            for numel, count in numels.items()
            if numel > threshold
        )

    # Freed shards of trained parameters stay with the allocator where they were pinned.
    freed = shards(layout.trained_numels) if layout.has_gpu and pin else 0
    one_by_one = f"parameter / {ranks}, pinned one by one"
    return [
        _host(
            layout,
            "trained shards",
            _pinned(layout, weight_bytes * layout.share),
            f"{weight_bytes} x {layout.share:,}, pinned",
        ),
        _host(
            layout,
            "frozen shards",
            shards(layout.frozen_numels),
            f"{weight_bytes} x each frozen {one_by_one}",
        ),
        _host(
            layout,
            "allocator's leftovers",
            freed,
            f"{weight_bytes} x each trained {one_by_one}, kept when they move",
        ),
    ]
