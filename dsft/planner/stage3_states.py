"""Memory of model states under ZeRO-3 on one device (deepspeed/runtime/zero/stage3.py).

weights   shards, or with offload nothing          always
gathered  persistent parameters                    always
          live parameters, prefetched copies       forward and backward
gradients reduce bucket, partition                 always
optimizer states of the share; copies              always; in the step
"""

import math

from dsft.planner.terms import Term
from dsft.planner.zero_layout import OPTIMIZERS, ZeroLayout


def stage_3(layout: ZeroLayout) -> list[Term]:
    """List weights, gradients, optimizer states and what is gathered, on one device."""
    bucket = layout.zero["reduce_bucket_size"] if layout.zero["contiguous_gradients"] else 0
    # allocated in full, once
    sent_bytes = layout.sent_bytes
    reduced = Term(name="reduce bucket", num_bytes=sent_bytes * bucket, formula=f"{sent_bytes} x bucket {bucket:,}")
    optimizer = []
    if layout.optimizer_device == "none":
        optimizer = _optimizer_on_device(layout)
    elif layout.device_sub_groups:
        optimizer = _optimizer_partly_on_device(layout)
    return [reduced, *shards(layout), *optimizer, *gathered(layout), *secondary(layout)]


def shards(layout: ZeroLayout) -> list[Term]:
    """List this rank's part of the weights; none where they are offloaded."""
    if layout.param_device != "none":
        return []
    weight_bytes, params, ranks = layout.weight_bytes, layout.size.num_params, layout.world_size
    return [
        Term(name="weights", num_bytes=weight_bytes * params // ranks, formula=f"{weight_bytes} x {params:,} / {ranks}")
    ]


def _optimizer_on_device(layout: ZeroLayout) -> list[Term]:
    weight_bytes, trained, share, ranks = (
        layout.weight_bytes,
        layout.num_trainable,
        layout.share,
        layout.world_size,
    )
    optimizer, groups = layout.optimizer, layout.device_sub_groups
    # Gradients of a sub-group flat, then in fp32 (_prepare_fp32_grad_for_sub_group).
    flat = layout.flat_gradient_bytes
    largest = min(share, max(groups) + math.ceil(layout.largest_inner / ranks) * (len(groups) > 1))
    # Only the step partitions these, and gathers them again (step, _post_step).
    released = weight_bytes * sum(persistent_params(layout))
    return [
        # An fp32 master of its own in fp32 training too (_create_fp32_partitions compares a torch.device with a name).
        Term(
            name="optimizer state",
            num_bytes=int((optimizer.master + optimizer.state) * share),
            formula=f"({optimizer.formula}) x {trained:,} / {ranks}",
        ),
        Term(
            name="gradient partition",
            num_bytes=layout.sum_bytes * share,
            formula=f"{layout.sum_bytes} x {trained:,} / {ranks} (grad_partitions_flat_buffer)",
        ),
        Term(
            name="optimizer step",
            num_bytes=max(0, flat * largest - released),
            phase="step",
            formula=f"{flat} x largest sub-group {largest:,} - persistent parameters {released:,}, released meanwhile",
        ),
    ]


def _optimizer_partly_on_device(layout: ZeroLayout) -> list[Term]:
    """List what `ratio` < 1 leaves: the first sub-groups, with fp32 gradients of their own
    (initialize_optimizer_states), updated by `backup_optimizer`, torch's AdamW without fusion.
    """
    optimizer, kept, largest = OPTIMIZERS["adamw_torch"], sum(layout.device_sub_groups), max(layout.device_sub_groups)
    return [
        Term(
            name="optimizer state",
            num_bytes=(optimizer.master + 4 + optimizer.state) * kept,
            formula=f"({optimizer.formula} + gradient 4) x {kept:,} not offloaded",
        ),
        Term(
            name="optimizer step",
            num_bytes=optimizer.step * largest,
            phase="step",
            formula=f"{optimizer.step} x sub-group {largest:,} (AdamW, not fused)",
        ),
    ]


def persistent_params(layout: ZeroLayout) -> tuple[int, int]:
    """Count the (frozen, trained) parameters that stay gathered: those up to the threshold
    (`mark_persistent_parameters`).
    """
    threshold = layout.zero["stage3_param_persistence_threshold"]
    limit = layout.zero["stage3_model_persistence_threshold"]
    frozen, trained = (
        sum(numel * count for numel, count in numels.items() if numel <= threshold)
        for numels in (layout.frozen_numels, layout.trained_numels)
    )
    return min(frozen, limit), min(trained, limit)


def live_params(layout: ZeroLayout) -> tuple[int, int]:
    """Count (parameters gathered at once beside the persistent ones, all that could be).

    `PartitionedParameterCoordinator` fetches ahead up to max_live, and releases what is not used again within
    max_reuse_distance: at the turn from forward to backward a parameter d before the end is used again after 2 d, so
    half that distance stays. The larger of the two decides, so lowering only one of them may change nothing.
    """
    zero = layout.zero
    most = layout.size.num_params - sum(persistent_params(layout))
    wanted = max(
        zero["stage3_max_live_parameters"],
        zero["stage3_max_reuse_distance"] // 2,
        layout.size.largest_module_params,
    )
    return min(most, wanted), most


def prefetched_params(layout: ZeroLayout) -> int:
    """Count the parameters of one prefetch: it ends with the parameter that fills it, and holds a flat copy until its
    last parameter is used (AllGatherCoalescedHandle.wait).
    """
    prefetch = layout.zero["stage3_prefetch_bucket_size"]
    return min(live_params(layout)[1], prefetch + max(numel for numel, _ in layout.size.numels)) if prefetch else 0


def gathered(layout: ZeroLayout) -> list[Term]:
    """List full parameters, and the buffers through which they and their gradients pass; none on a single rank."""
    if not layout.gathers:
        return []
    weight_bytes, kept = layout.weight_bytes, sum(persistent_params(layout))
    live, most = live_params(layout)
    threshold = layout.zero["stage3_param_persistence_threshold"]
    return [
        Term(
            name="persistent parameters",
            num_bytes=weight_bytes * kept,
            formula=f"{weight_bytes} x {kept:,} up to the threshold {threshold:,}",
        ),
        Term(
            name="gathered parameters",
            num_bytes=weight_bytes * live,
            phase="compute",
            formula=f"{weight_bytes} x {live:,} of {most:,}",
        ),
        _prefetch_or_reduce(layout),
    ]


def _prefetch_or_reduce(layout: ZeroLayout) -> Term:
    """Count the larger of what a prefetch and what a reduction copies: they do not come at one time."""
    weight_bytes, sent_bytes = layout.weight_bytes, layout.sent_bytes
    fetched = weight_bytes * prefetched_params(layout)
    if not layout.num_trainable:
        return Term(name="prefetch copies", num_bytes=fetched, phase="compute", formula=_prefetch_formula(layout))
    # The gradient of the largest parameter, while the bucket before it is flattened for the reduce-scatter
    # (reduce_scatter_coalesced). Where everything is gathered, parameters of the bucket's size have been released by
    # then.
    live, most = live_params(layout)
    flattened = min(layout.zero["reduce_bucket_size"], layout.num_trainable) if live < most else 0
    sent = layout.largest_trained if sent_bytes > weight_bytes else 0
    reduced = weight_bytes * layout.largest_trained + sent_bytes * (flattened + sent)
    return Term(
        name="prefetch or reduce copies",
        num_bytes=max(fetched, reduced),
        phase="compute",
        formula=(
            f"max({_prefetch_formula(layout)}, {weight_bytes} x gradient {layout.largest_trained:,} + {sent_bytes} x"
            f" ({f'its copy {sent:,} + ' if sent else ''}flat bucket {flattened:,})), not at one time"
        ),
    )


def _prefetch_formula(layout: ZeroLayout) -> str:
    prefetch, largest = layout.zero["stage3_prefetch_bucket_size"], max(numel for numel, _ in layout.size.numels)
    return f"{layout.weight_bytes} x (prefetch bucket {prefetch:,} + parameter that fills it {largest:,})"


def secondary(layout: ZeroLayout) -> list[Term]:
    """List hpZ's second partition over the ranks of a node (`_partition_param_sec`): made as parameters are released,
    dropped after the step where they are trained.
    """
    over = layout.zero["zero_hpz_partition_size"]
    if over <= 1 or layout.param_device != "none":
        return []
    weight_bytes = layout.weight_bytes
    live, most = live_params(layout)
    return [
        Term(
            name="secondary partition, frozen",
            num_bytes=weight_bytes * layout.num_frozen // over,
            formula=f"{weight_bytes} x {layout.num_frozen:,} / {over}",
        ),
        Term(
            name="secondary partition",
            num_bytes=weight_bytes * layout.num_trainable // over,
            # With everything gathered and one micro batch, the first release comes at the end of its backward, as
            # gathered parameters go.
            phase="always" if layout.accumulates or live < most else "step",
            formula=f"{weight_bytes} x {layout.num_trainable:,} / {over}",
        ),
    ]
