"""Memory of model states by DeepSpeed's ZeRO configuration: stages 0 to 2 here, stage 3 in stage3_states.py, what
offload takes of the host in host_memory.py, loading in load_states.py.

Formulas hold for DeepSpeed 0.19.8; tests/planner/test_model_states.py compares each with unmodified DeepSpeed on one
rank of 16. Worst rank, worst moment: a parameter that lies across two ranks' shares counts in full, and gradient
accumulation is assumed unless the configuration says 1. Not counted: activations (elsewhere), alignment paddings,
tensor parallelism, MoE groups, `data_types.grad_accum_dtype` under stage 1, torch autocast, quantised collectives (qwZ,
qgZ).
"""

from dsft.planner.host_memory import host_terms
from dsft.planner.stage3_states import stage_3
from dsft.planner.terms import Term
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
    master = optimizer.master if layout.has_fp32_master else 0
    # The engine reduces a flat copy of the gradients, which dsft leaves out on a single rank (saving_trainer.py).
    # Later, in bf16 and fp16, fp32 gradients stand beside the model's (unfused_optimizer.py, step).
    copied = min(trained, STAGE_0_REDUCE_ELEMENTS + layout.largest_trained) if layout.world_size > 1 else 0
    reduced = layout.copy_to_send_bytes * copied
    updating = ((4 if layout.has_fp32_master else 0) + optimizer.step) * trained
    return [
        Term(
            name="weights",
            num_bytes=frozen + weight_bytes * trained,
            formula=f"{how} + {weight_bytes} x {trained:,} trained",
        ),
        Term(
            name="optimizer state",
            num_bytes=int((master + optimizer.state) * trained),
            formula=f"({f'fp32 master {master} + ' if master else ''}moments {optimizer.state}) x {trained:,}",
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
            num_bytes=int((optimizer.master + optimizer.state) * layout.share),
            formula=f"({optimizer.formula}) x {trained:,} / {layout.world_size}",
        )
    else:
        states = Term(
            name="gradient buffer of the offload",
            num_bytes=weight_bytes * largest,
            formula=f"{weight_bytes} x largest parameter {largest:,} (temp_grad_buffer_for_gpu_offload)",
        )
    return [weights, states, *_gradients(layout), *_reduced_gradients(layout)]


def _reduced_gradients(layout: ZeroLayout) -> list[Term]:
    """List what gradients pass through on their way to other ranks."""
    weight_bytes, trained, largest = layout.weight_bytes, layout.num_trainable, layout.largest_trained
    bucket, buffers = layout.zero["reduce_bucket_size"], layout.num_buckets
    # A bucket is allocated in full, however few gradients there are. What is reduced is a flat copy of its used part
    # (where all gradients were kept, those have left), or of the slices of a larger parameter, as many as fill a bucket
    # (allreduce_and_scatter).
    flat = 0 if keeps_gradients(layout) else min(trained, bucket)
    sliced = min(largest, bucket + layout.share) if largest > bucket else 0
    # A tied embedding has two gradients; their sum stands beside them before there is a copy to reduce.
    tied = not layout.size.lora_r and not layout.size.head_params and largest == layout.size.embedding_params
    return [
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


def keeps_gradients(layout: ZeroLayout) -> bool:
    """Whether stage 1 or 2 holds all gradients in full until the last micro batch is reduced (`process_gradients`)."""
    return layout.stage == 1 and (layout.accumulates or not layout.zero["overlap_comm"])


def _gradients(layout: ZeroLayout) -> list[Term]:
    """List gradients that wait for the step, and what the step adds to them."""
    weight_bytes, trained, share = layout.weight_bytes, layout.num_trainable, layout.share
    # fp64 copy of one gradient at a time (get_grad_norm_direct, set_norm_for_param_grad_in_gpu)
    norm = 8 * min(layout.largest_trained, share)
    if layout.keeps_fp32_share:
        return _gradients_in_fp32(layout, norm)
    if layout.optimizer_device != "none":
        # The share's gradients go to host memory as they are reduced; stage 1 keeps them on the device until the last
        # micro batch.
        held = weight_bytes * trained if keeps_gradients(layout) else 0
        return [
            Term(name="gradients", num_bytes=held, formula=f"{weight_bytes} x {trained:,}"),
            Term(name="gradient norm", num_bytes=norm, phase="compute", formula=f"8 x {norm // 8:,} (fp64)"),
        ]
    held, how = _held_gradients(layout)
    of_share = partition_gradients(layout)
    # Beside the share's gradients, after the norm, what carries them into the optimizer.
    flat = layout.flat_gradient_bytes
    # What reduces gradients that were kept goes when the step has begun.
    buckets = weight_bytes * layout.num_buckets * layout.zero["reduce_bucket_size"] if keeps_gradients(layout) else 0
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


def _gradients_in_fp32(layout: ZeroLayout, norm: int) -> list[Term]:
    """List the share's gradients, which the optimizer takes as they are, or a copy in host memory."""
    trained, share, piece = layout.num_trainable, layout.share, norm // 8
    gradients = Term(name="gradients", num_bytes=4 * share, formula=f"4 x {trained:,} / {layout.world_size}, in fp32")
    if layout.optimizer_device != "none":
        return [gradients, Term(name="gradient norm", num_bytes=norm, phase="compute", formula=f"8 x {piece:,} (fp64)")]
    copies = layout.optimizer.step * share
    added = 0 if layout.reduces_in_fp32 else 4 * piece
    return [
        gradients,
        Term(name="gradient to add", num_bytes=added, phase="compute", formula=f"4 x {piece:,}, from what is sent"),
        Term(
            name="optimizer step",
            num_bytes=max(copies, norm),
            phase="step",
            formula=f"max(copies of the optimizer {copies:,}, fp64 norm {norm:,})",
        ),
    ]


def _held_gradients(layout: ZeroLayout) -> tuple[int, str]:
    """Return the bytes of gradients on the device when the step begins, and their arithmetic."""
    weight_bytes, trained, of_share = layout.weight_bytes, layout.num_trainable, partition_gradients(layout)
    if keeps_gradients(layout):
        return weight_bytes * trained, f"{weight_bytes} x {trained:,} until the last micro batch is reduced"
    copies = 2 if layout.stage == 2 and layout.accumulates else 1
    # Stage 1 also keeps, until the step, what was too large for a bucket; the last of these counts as "not yet
    # reduced".
    bucket = layout.zero["reduce_bucket_size"]
    large = sum(numel * count for numel, count in layout.size.trainable_numels if numel > bucket)
    large = large - layout.largest_trained if large and layout.stage == 1 else 0
    return (
        weight_bytes * (copies * of_share + large),
        f"{weight_bytes} x ({copies} x {of_share:,} full parameters of a rank's share"
        + (f" + {large:,} larger than a bucket)" if large else ")"),
    )
