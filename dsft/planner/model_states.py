"""Memory of model states by DeepSpeed's ZeRO configuration, and of loading; what offload takes of the host is in
`host_states`.

Formulas hold for DeepSpeed 0.19.8; tests/planner/test_model_states.py holds each against unmodified DeepSpeed on one
rank of 16.
Worst rank, worst moment: a parameter that lies across two ranks' shares counts whole, and gradient accumulation is
assumed
unless the configuration says 1. Not counted: activations (elsewhere), alignment paddings, tensor parallelism, MoE
groups,
optimizers other than Adam, `data_types.grad_accum_dtype`, torch autocast, quantised collectives (qwZ, qgZ).
"""

import math
from typing import Any

from dsft.models.size import ModelSize
from dsft.planner.host_memory import host_terms, process_term
from dsft.planner.terms import Term
from dsft.planner.zero_layout import ZeroJob, describe_job, device_sub_groups, frozen_bytes, partition_gradients

STAGE_0_REDUCE_ELEMENTS = 500_000_000
"""Elements that stage 0 all-reduces at once (`elements_per_buffer` in deepspeed/runtime/engine.py)."""


def state_terms(
    size: ModelSize,
    deepspeed_config: dict[str, Any],
    *,
    world_size: int,
    ranks_per_node: int,
    dtype: str,
    has_gpu: bool,
    fused_optimizer: bool = True,
) -> list[Term]:
    """Model states, gradients and DeepSpeed's buffers: of one device, and of one node's host memory.

    Args:
        deepspeed_config: a whole DeepSpeed configuration; "auto" is understood in the numbers that transformers fills.
        dtype: of the computation; bfloat16 and float16 have fp32 master weights.
        has_gpu: without, terms of place "device" are what one rank holds in host memory, and nothing is pinned.
        fused_optimizer: torch's fused AdamW (transformers' default); without, its two fp32 copies come on top during
            the step.
            With offload the optimizer is DeepSpeed's CPUAdam, which needs neither.
    """
    job = describe_job(
        size,
        deepspeed_config,
        world_size=world_size,
        ranks_per_node=ranks_per_node,
        dtype=dtype,
        has_gpu=has_gpu,
        fused_optimizer=fused_optimizer,
    )
    device = {0: stage_0, 1: stage_1_2, 2: stage_1_2, 3: stage_3}[job.stage](job)
    return [term for term in device + host_terms(job) if term.num_bytes]


def stage_0(job: ZeroJob) -> list[Term]:
    """Everything on every rank: FP16_UnfusedOptimizer (bf16 and fp16), or torch's optimizer alone (fp32)."""
    w, t = job.weight_bytes, job.size.num_trainable
    frozen, how = frozen_bytes(job)
    states = 12 if job.has_fp32_master else 8
    # The engine reduces a flat copy of the gradients; later, in bf16 and fp16, fp32 gradients stand beside w ones
    # (unfused_optimizer.py, step).
    reduced = w * min(t, STAGE_0_REDUCE_ELEMENTS + job.largest_trained)
    unscaled = ((4 if job.has_fp32_master else 0) + job.update_bytes) * t
    return [
        Term(name="weights", num_bytes=frozen + w * t, formula=f"{how} + {w} x {t:,} trained"),
        Term(
            name="optimizer state",
            num_bytes=states * t,
            formula=f"({'fp32 master 4 + ' if job.has_fp32_master else ''}Adam m 4 + v 4) x {t:,}",
        ),
        Term(name="gradients", num_bytes=w * t, formula=f"{w} x {t:,}"),
        Term(
            name="optimizer step",
            num_bytes=max(reduced, unscaled),
            phase="step",
            formula=(
                f"max(all-reduce copy {w} x min({t:,}, {STAGE_0_REDUCE_ELEMENTS:,} + {job.largest_trained:,}), fp32"
                f" gradients and copies {unscaled:,})"
            ),
        ),
    ]


def stage_1_2(job: ZeroJob) -> list[Term]:
    """`DeepSpeedZeroOptimizer` in deepspeed/runtime/zero/stage_1_and_2.py."""
    w, t, share, largest = job.weight_bytes, job.size.num_trainable, job.share, job.largest_trained
    frozen, how = frozen_bytes(job)
    terms = [Term(name="weights", num_bytes=frozen + w * t, formula=f"{how} + {w} x {t:,} trained")]
    if job.optimizer_device == "none":
        # An fp32 master of its own in fp32 training too: `detach().clone()`.
        terms.append(
            Term(
                name="optimizer state",
                num_bytes=12 * share,
                formula=f"(fp32 master 4 + Adam m 4 + v 4) x {t:,} / {job.world_size}",
            )
        )
    else:
        terms.append(
            Term(
                name="gradient buffer of the offload",
                num_bytes=w * largest,
                formula=f"{w} x largest parameter {largest:,} (temp_grad_buffer_for_gpu_offload)",
            )
        )
    bucket, buffers = job.zero["reduce_bucket_size"], 2 if job.zero["overlap_comm"] else 1
    if not job.zero["contiguous_gradients"] and job.optimizer_device == "none":
        buffers = 0
    # A bucket is allocated whole, however few gradients there are. What is reduced is a flat copy of its used part
    # (where all
    # gradients were kept, those have left), or of the slices of a larger parameter, as many as fill a bucket
    # (allreduce_and_scatter).
    reduced = max(
        0 if keeps_gradients(job) else min(t, bucket), min(largest, bucket + share) if largest > bucket else 0
    )
    tied = not job.size.lora_r and not job.size.head_params and largest == job.size.embedding_params
    pending = (
        2 * largest if tied else largest
    )  # a tied embedding has two; their sum stands beside them before there is a copy to reduce
    return (
        terms
        + gradients_1_2(job)
        + [
            Term(
                name="reduce buckets",
                num_bytes=w * (buffers * bucket + reduced),
                phase="compute",
                formula=f"{w} x ({buffers} x bucket {bucket:,} + copy {reduced:,})",
            ),
            Term(
                name="gradient not yet reduced",
                num_bytes=w * pending,
                phase="compute",
                formula=f"{w} x {'2 uses of the tied embedding' if tied else 'largest parameter'} {largest:,}",
            ),
        ]
    )


def keeps_gradients(job: ZeroJob) -> bool:
    """Whether stage 1 or 2 holds all gradients whole until the last micro batch is reduced (`process_gradients`)."""
    return job.stage == 1 and (job.accumulates or not job.zero["overlap_comm"])


def gradients_1_2(job: ZeroJob) -> list[Term]:
    """Gradients that wait for the step, and what the step adds to them."""
    w, t, share, n = job.weight_bytes, job.size.num_trainable, job.share, job.world_size
    norm = 8 * min(
        job.largest_trained, share
    )  # fp64 copy of one gradient at a time (get_grad_norm_direct, set_norm_for_param_grad_in_gpu)
    whole = partition_gradients(job)
    if job.optimizer_device != "none":
        # The share's gradients go to host memory as they are reduced; stage 1 keeps them on the device until the last
        # micro batch.
        held = w * t if keeps_gradients(job) else 0
        return [
            Term(name="gradients", num_bytes=held, formula=f"{w} x {t:,}"),
            Term(name="gradient norm", num_bytes=norm, phase="compute", formula=f"8 x {norm // 8:,} (fp64)"),
        ]
    if keeps_gradients(job):
        held, how = w * t, f"{w} x {t:,} until the last micro batch is reduced"
    else:
        copies = 2 if job.stage == 2 and job.accumulates else 1
        # Stage 1 also keeps, until the step, what was too large for a bucket; the last of these counts as "not yet
        # reduced".
        large = (
            sum(numel * count for numel, count in job.size.trainable_numels if numel > job.zero["reduce_bucket_size"])
            if job.stage == 1
            else 0
        )
        large -= job.largest_trained if large else 0
        held, how = (
            w * (copies * whole + large),
            f"{w} x ({copies} x {whole:,} whole parameters of a rank's share"
            + (f" + {large:,} larger than a bucket)" if large else ")"),
        )
    # Beside the share's gradients: a flat copy of them (w) and one in fp32 (4; in fp32 the flat copy is it), after the
    # norm.
    flat = (job.weight_bytes if job.has_fp32_master else 0) + 4 + job.update_bytes
    step = max(0, w * whole + max(flat * share, norm) - held)
    return [
        Term(name="gradients", num_bytes=held, formula=how),
        Term(
            name="optimizer step",
            num_bytes=step,
            phase="step",
            formula=f"{w} x {whole:,} + max({flat} x {t:,} / {n}, fp64 norm {norm:,}) - gradients {held:,}",
        ),
    ]


def stage_3(job: ZeroJob) -> list[Term]:
    """`DeepSpeedZeroOptimizer_Stage3` in deepspeed/runtime/zero/stage3.py."""
    w, wt, t, n, share = job.weight_bytes, job.trained_bytes, job.size.num_trainable, job.world_size, job.share
    bucket = job.zero["reduce_bucket_size"] if job.zero["contiguous_gradients"] else 0
    terms = [
        Term(name="reduce bucket", num_bytes=w * bucket, formula=f"{w} x bucket {bucket:,}")
    ]  # allocated whole, once
    if job.param_device == "none":
        terms.append(
            Term(
                name="weights",
                num_bytes=(w * job.frozen + wt * t) // n,
                formula=f"({w} x {job.frozen:,} frozen + {wt} x {t:,} trained) / {n}",
            )
        )
    on_device = device_sub_groups(job)
    if job.optimizer_device == "none":
        largest = min(share, max(on_device) + math.ceil(job.largest_inner / n) * (len(on_device) > 1))
        flat = (
            (w if job.has_fp32_master else 0) + 4 + job.update_bytes
        )  # gradients of a sub-group flat, then in fp32 (_prepare_fp32_grad_for_sub_group)
        frozen_kept, trained_kept = persistent_params(job)
        released = (
            w * frozen_kept + wt * trained_kept
        )  # only the step partitions these, and gathers them again (step, _post_step)
        terms += [
            # An fp32 master of its own in fp32 training too (_create_fp32_partitions compares a torch.device with a
            # name).
            Term(
                name="optimizer state", num_bytes=12 * share, formula=f"(fp32 master 4 + Adam m 4 + v 4) x {t:,} / {n}"
            ),
            Term(
                name="gradient partition",
                num_bytes=w * share,
                formula=f"{w} x {t:,} / {n} (grad_partitions_flat_buffer)",
            ),
            Term(
                name="optimizer step",
                num_bytes=max(0, flat * largest - released),
                phase="step",
                formula=(
                    f"{flat} x largest sub-group {largest:,} - persistent parameters {released:,}, released meanwhile"
                ),
            ),
        ]
    elif on_device:
        held = sum(
            on_device
        )  # ratio < 1: the first sub-groups stay, with fp32 gradients of their own (initialize_optimizer_states)
        terms += [
            Term(
                name="optimizer state",
                num_bytes=16 * held,
                formula=f"(fp32 master 4 + gradient 4 + Adam m 4 + v 4) x {held:,} not offloaded",
            ),
            # backup_optimizer is torch's AdamW without fusion: two copies of the sub-group.
            Term(
                name="optimizer step",
                num_bytes=8 * max(on_device),
                phase="step",
                formula=f"8 x sub-group {max(on_device):,} (AdamW, not fused)",
            ),
        ]
    return terms + gathered(job) + secondary(job)


def persistent_params(job: ZeroJob) -> tuple[int, int]:
    """(frozen, trained) parameters that stay gathered: those up to the threshold (`mark_persistent_parameters`)."""
    threshold, limit = job.zero["stage3_param_persistence_threshold"], job.zero["stage3_model_persistence_threshold"]
    frozen, trained = (
        sum(numel * count for numel, count in numels.items() if numel <= threshold)
        for numels in (job.frozen_numels, job.trained_numels)
    )
    return min(frozen, limit), min(trained, limit)


def live_params(job: ZeroJob) -> tuple[int, int]:
    """(parameters gathered at once beside the persistent ones, all that could be).

    `PartitionedParameterCoordinator` fetches ahead up to max_live, and releases what is not used again within
    max_reuse_distance: at the turn from forward to backward a parameter d before the end is used again after 2 d, so
    half that distance stays. The larger of the two decides, so lowering only one of them may change nothing.
    """
    most = job.size.num_params - sum(persistent_params(job))
    zero = job.zero
    return (
        min(
            most,
            max(
                zero["stage3_max_live_parameters"],
                zero["stage3_max_reuse_distance"] // 2,
                job.size.largest_module_params,
            ),
        ),
        most,
    )


def gathered(job: ZeroJob) -> list[Term]:
    """Whole parameters, and the buffers through which they and their gradients pass."""
    if not job.gathers:
        return []
    w, wt = job.weight_bytes, job.trained_bytes
    frozen, trained = persistent_params(job)
    live, most = live_params(job)
    fp32_adapters = (wt - w) * (job.size.num_trainable - trained) * live // max(most, 1)
    largest = max(numel for numel, _ in job.size.numels)
    # A prefetch ends with the parameter that fills it, and holds a flat copy until its last parameter is used
    # (AllGatherCoalescedHandle.wait).
    prefetch = job.zero["stage3_prefetch_bucket_size"]
    fetched = w * min(most, prefetch + largest) if prefetch else 0
    # The gradient of the largest parameter, while the bucket before it is flattened for the reduce-scatter
    # (reduce_scatter_coalesced).
    # Where everything is gathered, parameters of the bucket's size have been released by then.
    flattened = min(job.zero["reduce_bucket_size"], job.size.num_trainable) if live < most else 0
    reduced = wt * job.largest_trained + w * flattened
    return [
        Term(
            name="persistent parameters",
            num_bytes=w * frozen + wt * trained,
            formula=(
                f"{w} x {frozen:,} + {wt} x {trained:,} (trained) up to the threshold"
                f" {job.zero['stage3_param_persistence_threshold']:,}"
            ),
        ),
        Term(
            name="gathered parameters",
            num_bytes=w * live + fp32_adapters,
            phase="compute",
            formula=f"{w} x {live:,} of {most:,}"
            + (f" + {fp32_adapters:,} as adapters are fp32" if fp32_adapters else ""),
        ),
        Term(
            name="prefetch or reduce copies",
            num_bytes=max(fetched, reduced),
            phase="compute",
            formula=(
                f"max({w} x (prefetch bucket {prefetch:,} + parameter that fills it {largest:,}), gradient {wt} x"
                f" {job.largest_trained:,} + {w} x flat bucket {flattened:,}), not at one time"
            ),
        ),
    ]


def secondary(job: ZeroJob) -> list[Term]:
    """hpZ's second partition over the ranks of a node (`_partition_param_sec`): made as parameters are released,
    dropped after the step where they are trained.
    """
    over = job.zero["zero_hpz_partition_size"]
    if over <= 1 or job.param_device != "none":
        return []
    w, wt = job.weight_bytes, job.trained_bytes
    live, most = live_params(job)
    terms = [
        Term(
            name="secondary partition, frozen",
            num_bytes=w * job.frozen // over,
            formula=f"{w} x {job.frozen:,} / {over}",
        )
    ]
    # With everything gathered and one micro batch, the first release comes at the end of its backward, as gathered
    # parameters go.
    phase = "always" if job.accumulates or live < most else "step"
    return [
        *terms,
        Term(
            name="secondary partition",
            num_bytes=wt * job.size.num_trainable // over,
            phase=phase,
            formula=f"{wt} x {job.size.num_trainable:,} / {over}",
        ),
    ]


def load_terms(
    size: ModelSize,
    deepspeed_config: dict[str, Any],
    *,
    world_size: int,
    ranks_per_node: int,
    dtype: str,
    has_gpu: bool,
) -> list[Term]:
    """Memory while the model is loaded and handed to DeepSpeed; arguments as for `state_terms`.

    transformers maps checkpoint files into memory (under ZeRO-3 on rank 0 alone): pages that the kernel takes back when
    it
    needs them, so they are not counted; a file system that cannot map them needs the whole checkpoint on top.
    """
    job = describe_job(
        size, deepspeed_config, world_size=world_size, ranks_per_node=ranks_per_node, dtype=dtype, has_gpu=has_gpu
    )
    w, t = job.weight_bytes, size.num_trainable
    adapters = (
        4 * t if size.lora_r else 0
    )  # peft makes them in fp32, whole on every rank; DeepSpeed then converts or shards them
    weights, how = frozen_bytes(job)
    if not size.lora_r:
        weights, how = w * t, f"{w} x {t:,}"
    place = "host" if has_gpu else "device"
    ranks = ranks_per_node if has_gpu else 1
    terms = [process_term(job, phase="load")]

    def load(name: str, num_bytes: int, formula: str, *, on: str) -> Term:
        many = ranks if on == "host" else 1
        return Term(
            name=name,
            num_bytes=many * num_bytes,
            phase="load",
            place=on,
            formula=f"{many} ranks x {formula}" if many > 1 else formula,
        )

    if job.stage == 3:
        shards_on = (
            "host" if job.param_device != "none" else "device"
        )  # of offload to NVMe: at most, each is written out as it is made
        largest = max(
            0, w * size.largest_module_params - (0 if has_gpu else adapters)
        )  # the module comes before the adapters
        terms += [
            load("shards", weights // world_size, f"({how}) / {world_size}", on=shards_on if has_gpu else "device"),
            load("one module, whole", largest, f"{w} x {size.largest_module_params:,}", on="device"),
        ]
        if job.zero["zero_hpz_partition_size"] > 1 and job.param_device == "none":
            over = job.zero["zero_hpz_partition_size"]
            terms.append(load("secondary partition", weights // over, f"({how}) / {over}", on="device"))
    elif size.quantized_bits and has_gpu:
        plain = (
            size.embedding_params + size.head_params
        )  # prepare_model_for_kbit_training makes what is not quantised fp32
        terms.append(load("weights", weights + (4 - w) * plain, f"{how}, embedding and head in fp32", on="device"))
    else:
        terms.append(load("weights", weights, how, on=place))
        if has_gpu:
            terms.append(load("weights moved to the device", weights + w * t * bool(size.lora_r), how, on="device"))
        elif job.stage in (1, 2):
            flat = (
                2 * w * t - adapters if adapters else w * t
            )  # adapters in w bytes and their flat copy replace those in fp32
            terms.append(
                load(
                    "flat copy of trained weights",
                    max(0, flat),
                    f"{w} x {t:,} (flatten_dense_tensors_aligned)",
                    on="device",
                )
            )
    return terms + ([load("adapters", adapters, f"4 x {t:,}", on=place)] if adapters else [])
