"""Memory of model states by DeepSpeed's ZeRO configuration, while training and while a model is loaded; what offload
takes of the host is in host_memory.py.

Formulas hold for DeepSpeed 0.19.8; tests/planner/test_model_states.py compares each with unmodified DeepSpeed on one
rank of 16. Worst rank, worst moment: a parameter that lies across two ranks' shares counts in full, and gradient
accumulation is assumed unless the configuration says 1. Not counted: activations (elsewhere), alignment paddings,
tensor parallelism, MoE groups, `data_types.grad_accum_dtype` under stage 1, torch autocast, quantised collectives (qwZ,
qgZ).

ZeRO-3 on one device (deepspeed/runtime/zero/stage3.py):

    weights   shards, or with offload nothing          always
    gathered  persistent parameters                    always
              live parameters, prefetched copies       forward and backward
    gradients reduce bucket, partition                 always
    optimizer states of the share; copies              always; in the step

Loading: transformers maps checkpoint files into memory (under ZeRO-3 on rank 0 alone): pages that the kernel takes back
when it needs them, so they are not counted; a file system that cannot map them needs the complete checkpoint on top.
From there weights go straight to the GPU.
"""

import math

from dsft.planner.host_memory import host_terms, process_term
from dsft.planner.optimizers import OPTIMIZERS
from dsft.planner.terms import ASSUMED, Term
from dsft.planner.zero_layout import ZeroLayout, frozen_bytes, partition_gradients

STAGE_0_REDUCE_ELEMENTS = 500_000_000
"""Elements that stage 0 all-reduces at once (`elements_per_buffer` in deepspeed/runtime/engine.py)."""


def state_terms(layout: ZeroLayout) -> list[Term]:
    """List model states, gradients and DeepSpeed's buffers: of one device, and of one node's host memory."""
    device = {0: stage_0, 1: stage_1_2, 2: stage_1_2, 3: stage_3}[layout.stage](layout)
    return [term for term in device + host_terms(layout) if term.num_bytes]


def stage_0(layout: ZeroLayout) -> list[Term]:
    """Hold everything on every rank: FP16_UnfusedOptimizer (bf16 and fp16), or torch's optimizer alone (fp32)."""
    weight_bytes, trained, optimizer = layout.weight_bytes, layout.num_trainable, layout.optimizer
    frozen, how = frozen_bytes(layout)
    master = optimizer.master_bytes if layout.has_fp32_master else 0
    # The engine reduces a flat copy of the gradients, which dsft leaves out on a single rank (training/patches.py).
    # Later, in bf16 and fp16, fp32 gradients stand beside the model's (unfused_optimizer.py, step).
    copied = min(trained, STAGE_0_REDUCE_ELEMENTS + layout.largest_trained) if layout.world_size > 1 else 0
    reduced = layout.copy_to_send_bytes * copied
    updating = ((4 if layout.has_fp32_master else 0) + optimizer.step_bytes) * trained
    return [
        Term(
            name="weights",
            num_bytes=frozen + weight_bytes * trained,
            formula=f"{how} + {weight_bytes} x {trained:,} trained",
        ),
        Term(
            name="optimizer state",
            num_bytes=int((master + optimizer.state_bytes) * trained),
            formula=f"({f'fp32 master {master} + ' if master else ''}moments {optimizer.state_bytes}) x {trained:,}",
        ),
        Term(name="gradients", num_bytes=weight_bytes * trained, formula=f"{weight_bytes} x {trained:,}"),
        Term(
            name="optimizer step",
            num_bytes=max(reduced, updating),
            phase="step",
            formula=(
                f"max(all-reduce copy {layout.copy_to_send_bytes} x {copied:,}, fp32 gradients and copies {updating:,})"
            ),
        ),
    ]


def stage_1_2(layout: ZeroLayout) -> list[Term]:
    """Shard optimizer states, and gradients: `DeepSpeedZeroOptimizer` in deepspeed/runtime/zero/stage_1_and_2.py."""
    weight_bytes, trained, largest = layout.weight_bytes, layout.num_trainable, layout.largest_trained
    frozen, how = frozen_bytes(layout)
    weights = Term(
        name="weights",
        num_bytes=frozen + weight_bytes * trained,
        formula=f"{how} + {weight_bytes} x {trained:,} trained",
    )
    if layout.optimizer_device == "none":
        # An fp32 master of its own in fp32 training too: `detach().clone()`.
        optimizer = layout.optimizer
        states = Term(
            name="optimizer state",
            num_bytes=int(optimizer.checkpoint_bytes * layout.share),
            formula=f"({optimizer.formula}) x {trained:,} / {layout.world_size}",
        )
    else:
        states = Term(
            name="gradient buffer of the offload",
            num_bytes=weight_bytes * largest,
            formula=f"{weight_bytes} x largest parameter {largest:,} (temp_grad_buffer_for_gpu_offload)",
        )
    # What gradients pass through on their way to other ranks.
    bucket, buffers = layout.zero["reduce_bucket_size"], layout.num_buckets
    # A bucket is allocated in full, however few gradients there are. What is reduced is a flat copy of its used part
    # (where all gradients were kept, those have left), or of the slices of a larger parameter, as many as fill a bucket
    # (allreduce_and_scatter).
    flat = 0 if keeps_gradients(layout) else min(trained, bucket)
    sliced = min(largest, bucket + layout.share) if largest > bucket else 0
    # A tied embedding has two gradients; their sum stands beside them before there is a copy to reduce.
    tied = not layout.size.lora_r and not layout.size.head_params and largest == layout.size.embedding_params
    reduced = [
        Term(
            name="reduce buckets",
            num_bytes=weight_bytes * buffers * bucket + layout.copy_to_send_bytes * max(flat, sliced),
            phase="compute",
            formula=(
                f"{weight_bytes} x {buffers} x bucket {bucket:,} + {layout.copy_to_send_bytes} x copy"
                f" {max(flat, sliced):,}"
            ),
        ),
        Term(
            name="gradient not yet reduced",
            num_bytes=weight_bytes * largest * (2 if tied else 1),
            phase="compute",
            formula=f"{weight_bytes} x {'2 uses of the tied embedding' if tied else 'largest parameter'} {largest:,}",
        ),
    ]
    return [weights, states, *_gradients(layout), *reduced]


def keeps_gradients(layout: ZeroLayout) -> bool:
    """Whether stage 1 or 2 holds all gradients in full until the last micro batch is reduced (`process_gradients`)."""
    return layout.stage == 1 and (layout.accumulates or not layout.zero["overlap_comm"])


def _gradients(layout: ZeroLayout) -> list[Term]:
    """List gradients that wait for the step, and what the step adds to them."""
    weight_bytes, trained, share = layout.weight_bytes, layout.num_trainable, layout.share
    # fp64 copy of one gradient at a time (get_grad_norm_direct, set_norm_for_param_grad_in_gpu)
    norm = 8 * min(layout.largest_trained, share)
    if layout.keeps_fp32_share:
        # The optimizer takes them as they are, or a copy in host memory.
        how = f"4 x {trained:,} / {layout.world_size}, in fp32"
        gradients = Term(name="gradients", num_bytes=4 * share, formula=how)
        if layout.optimizer_device != "none":
            how = f"8 x {norm // 8:,} (fp64)"
            return [gradients, Term(name="gradient norm", num_bytes=norm, phase="compute", formula=how)]
        copies, how = layout.optimizer.step_bytes * share, f"4 x {norm // 8:,}, from what is sent"
        added = 0 if layout.reduces_in_fp32 else 4 * (norm // 8)
        return [
            gradients,
            Term(name="gradient to add", num_bytes=added, phase="compute", formula=how),
            Term(
                name="optimizer step",
                num_bytes=max(copies, norm),
                phase="step",
                formula=f"max(copies of the optimizer {copies:,}, fp64 norm {norm:,})",
            ),
        ]
    if layout.optimizer_device != "none":
        # The share's gradients go to host memory as they are reduced; stage 1 keeps them on the device until the last
        # micro batch.
        held = weight_bytes * trained if keeps_gradients(layout) else 0
        return [
            Term(name="gradients", num_bytes=held, formula=f"{weight_bytes} x {trained:,}"),
            Term(name="gradient norm", num_bytes=norm, phase="compute", formula=f"8 x {norm // 8:,} (fp64)"),
        ]
    of_share, bucket = partition_gradients(layout), layout.zero["reduce_bucket_size"]
    held, how = weight_bytes * trained, f"{weight_bytes} x {trained:,} until the last micro batch is reduced"
    if not keeps_gradients(layout):
        copies = 2 if layout.stage == 2 and layout.accumulates else 1
        # Stage 1 also keeps, until the step, what was too large for a bucket; the last of these counts as "not yet
        # reduced".
        large = sum(numel * count for numel, count in layout.size.trainable_numels if numel > bucket)
        large = large - layout.largest_trained if large and layout.stage == 1 else 0
        held = weight_bytes * (copies * of_share + large)
        how = f"{weight_bytes} x ({copies} x {of_share:,} full parameters of a rank's share"
        how += f" + {large:,} larger than a bucket)" if large else ")"
    # Beside the share's gradients, after the norm, what carries them into the optimizer.
    flat = layout.flat_gradient_bytes
    # What reduces gradients that were kept goes when the step has begun.
    buckets = weight_bytes * layout.num_buckets * bucket if keeps_gradients(layout) else 0
    return [
        Term(name="gradients", num_bytes=held, formula=how),
        Term(
            name="optimizer step",
            num_bytes=max(buckets, weight_bytes * of_share + max(flat * share, norm) - held),
            phase="step",
            formula=(
                f"{weight_bytes} x {of_share:,} + max({flat} x {trained:,} / {layout.world_size}, fp64 norm {norm:,}) -"
                f" gradients {held:,}{f', at least the buckets {buckets:,}' if buckets else ''}"
            ),
        ),
    ]


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
        # What `ratio` < 1 leaves: the first sub-groups, with fp32 gradients of their own (initialize_optimizer_states),
        # updated by `backup_optimizer`, torch's AdamW without fusion.
        memory, groups = OPTIMIZERS["adamw_torch"], layout.device_sub_groups
        optimizer = [
            Term(
                name="optimizer state",
                num_bytes=(memory.master_bytes + 4 + memory.state_bytes) * sum(groups),
                formula=f"({memory.formula} + gradient 4) x {sum(groups):,} not offloaded",
            ),
            Term(
                name="optimizer step",
                num_bytes=memory.step_bytes * max(groups),
                phase="step",
                formula=f"{memory.step_bytes} x sub-group {max(groups):,} (AdamW, not fused)",
            ),
        ]
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
            num_bytes=int(optimizer.checkpoint_bytes * share),
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


def gathered(layout: ZeroLayout) -> list[Term]:
    """List full parameters, and the buffers through which they and their gradients pass; none on a single rank."""
    if not layout.gathers:
        return []
    weight_bytes, kept = layout.weight_bytes, sum(persistent_params(layout))
    live, most = live_params(layout)
    threshold = layout.zero["stage3_param_persistence_threshold"]
    # A prefetch ends with the parameter that fills it, and holds a flat copy until its last parameter is used
    # (AllGatherCoalescedHandle.wait).
    prefetch, largest = layout.zero["stage3_prefetch_bucket_size"], max(numel for numel, _ in layout.size.numels)
    name, num_bytes = "prefetch copies", weight_bytes * (min(most, prefetch + largest) if prefetch else 0)
    formula = f"{weight_bytes} x (prefetch bucket {prefetch:,} + parameter that fills it {largest:,})"
    if layout.num_trainable:
        # The gradient of the largest parameter, while the bucket before it is flattened for the reduce-scatter
        # (reduce_scatter_coalesced). Where everything is gathered, parameters of the bucket's size have been released
        # by then. A prefetch and a reduction do not copy at one time.
        sent_bytes, trained = layout.sent_bytes, layout.largest_trained
        flattened = min(layout.zero["reduce_bucket_size"], layout.num_trainable) if live < most else 0
        sent = trained if sent_bytes > weight_bytes else 0
        reduced = weight_bytes * trained + sent_bytes * (flattened + sent)
        name, num_bytes = "prefetch or reduce copies", max(num_bytes, reduced)
        formula = (
            f"max({formula}, {weight_bytes} x gradient {trained:,} + {sent_bytes} x"
            f" ({f'its copy {sent:,} + ' if sent else ''}flat bucket {flattened:,})), not at one time"
        )
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
        Term(name=name, num_bytes=num_bytes, phase="compute", formula=formula),
    ]


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


def load_terms(layout: ZeroLayout, *, device_bytes: int | None = None) -> list[Term]:
    """List what one device, and one node's host memory, hold before training.

    Args:
        device_bytes: memory of a GPU; None for enough.
    """
    size, weight_bytes, trained = layout.size, layout.weight_bytes, layout.num_trainable
    # Adapters are in full on every rank until DeepSpeed shards them; over a quantised base it also converts them.
    adapter_bytes = 4 if layout.packed else weight_bytes
    adapters = adapter_bytes * trained if size.lora_r else 0
    flat_formula = f"{weight_bytes} x {trained:,}"
    weights, how = frozen_bytes(layout) if size.lora_r or not trained else (weight_bytes * trained, flat_formula)
    terms = [process_term(layout, phase="load")]
    if layout.stage == 3:
        # zero.Init makes shards, one module after the other; of offload to NVMe at most, since each shard is written
        # out as it is made.
        shards, over = weights // layout.world_size, layout.zero["zero_hpz_partition_size"]
        place = "host" if layout.has_gpu and layout.param_device != "none" else "device"
        terms.append(_load(layout, "shards", shards, f"({how}) / {layout.world_size}", place=place))
        # The module comes before the adapters.
        module = weight_bytes * size.largest_module_params - (0 if layout.has_gpu else adapters)
        formula = f"{weight_bytes} x {size.largest_module_params:,}"
        terms.append(_load(layout, "one module, gathered", max(0, module), formula, place="device"))
        if over > 1 and layout.param_device == "none":
            terms.append(_load(layout, "secondary partition", weights // over, f"({how}) / {over}", place="device"))
    elif layout.packed and layout.has_gpu:
        if trained:
            plain = size.embedding_params + size.head_params  # prepare_model_for_kbit_training makes these fp32
            weights, how = weights + (4 - weight_bytes) * plain, f"{how}, embedding and head in fp32"
        terms.append(_load(layout, "weights", weights, how, place="device"))
    else:
        terms.append(_load(layout, "weights", weights, how, place="device"))
        # What becomes the flat tensor of the trained weights (stage_1_and_2.py): on a GPU it takes what is free, so it
        # is not counted; where that is too little, weights and copy are both in host memory.
        flat = weight_bytes * trained if layout.stage in (1, 2) else 0
        how, outside = f"{flat_formula} (flatten_dense_tensors_aligned)", ASSUMED.total_bytes(layout.communicators)
        if flat and not layout.has_gpu:
            terms.append(_load(layout, "flat copy of trained weights", flat, how, place="device"))
        elif flat and device_bytes is not None and weights + adapters + flat + outside > device_bytes:
            terms.append(_load(layout, "trained weights and their flat copy", 2 * flat, f"2 x {how}", place="host"))
    formula, place = f"{adapter_bytes} x {trained:,}", "host" if layout.has_gpu and layout.stage == 3 else "device"
    return terms + ([_load(layout, "adapters", adapters, formula, place=place)] if adapters else [])


def _load(layout: ZeroLayout, name: str, num_bytes: int, formula: str, *, place: str) -> Term:
    ranks = layout.ranks_per_node if place == "host" else 1
    return Term(
        name=name,
        num_bytes=ranks * num_bytes,
        phase="load",
        place=place,
        formula=f"{ranks} ranks x {formula}" if ranks > 1 else formula,
    )
