"""Memory of model states by DeepSpeed's ZeRO configuration: of one device and of one node's host memory, while training
and while a model is loaded.

Formulas hold for DeepSpeed 0.19.8; tests/planner/test_model_states.py compares each with unmodified DeepSpeed on one
rank of 16. Worst rank, worst moment. Not counted: activations (elsewhere), alignment paddings, tensor parallelism, MoE
groups, `data_types.grad_accum_dtype` under stage 1, torch autocast, quantised collectives (qwZ, qgZ).

torch's CachingHostAllocator rounds pinned memory up to powers of two and keeps what is freed. While loading,
transformers maps checkpoint files into memory: pages that the kernel takes back, so they are not counted.
"""

import math
from collections import Counter
from functools import partial

from dsft.planner.step_time import ASSUMED, gpu_name
from dsft.planner.zero_layout import OPTIMIZERS, Phase, Term, ZeroLayout, checkpoint_parts, peak_bytes, pinned_bytes
from dsft.runtime.hardware import Machine
from dsft.units import GB, MiB, in_gib, plural

STAGE_0_REDUCE_ELEMENTS = 500_000_000
"""Elements that stage 0 all-reduces at once (`elements_per_buffer` in deepspeed/runtime/engine.py)."""
PROCESS_BYTES = {True: 3 * GB, False: int(0.65 * GB)}
"""Host memory of one rank before it holds a model. With a GPU: Python, torch with CUDA, NCCL, DeepSpeed (an estimate).
Without: what a rank of a tiny model holds beyond its states (measured: 0.63 to 0.69 GB on two ranks).
"""
QUANTISED_BYTES, QUANTISED_STATES, QUANTISED_ACTIVATIONS = 2**30, 0.05, 0.4
"""What trainings over a quantised base took on a GPU beyond their formulas, whose reason is not known, and as shares of
states and of activations: five published runs of 1.8 to 72 B (tests/planner/test_published.py) are met within 10 % so.
"""
WORKSPACE_BYTES = 32 * MiB
"""Of cuBLAS on GPUs of compute capability 9.0, for each thread that multiplies, out of torch's allocator and for good
(its default of CUBLAS_WORKSPACE_CONFIG). Two were measured on an H100; those of other cards are small, and not counted.
"""
GONE_AFTER_STEP = ("gradients", "secondary partition")
"""Terms that are counted as always there, since computing and the step need them; between steps they are gone."""


def state_terms(layout: ZeroLayout) -> list[Term]:
    """List model states, gradients and DeepSpeed's buffers: of one device, and of one node's host memory."""
    if layout.stage in (1, 2):
        device = _stage_1_2(layout, largest=layout.largest_trained)
    else:
        device = _stage_3(layout) if layout.stage else _stage_0(layout)
    return [term for term in device + host_terms(layout) if term.num_bytes]


def workspace_terms(machine: Machine, *, threads: int) -> list[Term]:
    """List the workspaces of cuBLAS: of a backward's thread too, where there is one."""
    if not (machine.has_gpu and gpu_name(machine).startswith(("H", "GH"))):  # of gpus.toml, all with 9.0 and no others
        return []
    return [Term("cuBLAS workspaces", threads * WORKSPACE_BYTES, f"{plural(threads, 'thread')} x {WORKSPACE_BYTES:,}")]


def quantised_room(layout: ZeroLayout, states: list[Term], activations: list[Term]) -> list[Term]:
    """List what a quantised base takes beyond its formulas; nothing where its weights are plain."""
    if not (layout.packed and layout.machine.has_gpu):
        return []
    made = peak_bytes(activations, "device")
    held = peak_bytes(states, "device")
    how = f"{in_gib(QUANTISED_BYTES)} + {QUANTISED_STATES:.0%} of states + {QUANTISED_ACTIVATIONS:.0%} of activations"
    room = QUANTISED_BYTES + int(QUANTISED_STATES * held + QUANTISED_ACTIVATIONS * made)
    return [Term("room of a quantised base", room, f"{how}, as published runs took")]


def late_bytes(layout: ZeroLayout, states: list[Term]) -> int:
    """Count what of the states' terms is not there while all layers hold their activations, but comes as these go:
    gradients, and with a tied embedding what its gradient passes through. The head's are the first to come.

    Nothing where micro batches are accumulated, since gradients of earlier ones are there. Nothing under stage 3 and
    with sums in fp32, whose buffers are allocated in full.
    """
    if layout.stage == 3 or layout.accumulates or layout.keeps_fp32_share:
        return 0
    size, largest = layout.size, layout.weight_bytes * layout.largest_trained
    gradients = sum(term.num_bytes for term in states if term.name == "gradients")
    if layout.stage == 0:
        return max(0, gradients - largest)
    if not (size.trains_embedding and not size.head_params and layout.largest_trained == size.embedding_params):
        return gradients
    # One of the embedding's two gradients is there; what comes in the meantime is of layers.
    of_layers = _stage_1_2(layout, largest=layout.largest_inner)
    passing, first = (sum(term.num_bytes for term in terms if term.phase == "compute") for terms in (states, of_layers))
    return gradients + max(0, passing - first - largest)


def frozen_bytes(layout: ZeroLayout) -> tuple[int, str]:
    """Return the bytes of the base that adapters stand on, unsharded, and their arithmetic.

    Quantised, only linear layers are, without the head: `plain_params` of its size are left.
    """
    weight_bytes, quantization = layout.weight_bytes, layout.packed
    if not quantization:
        return weight_bytes * layout.num_frozen, f"{weight_bytes} x {layout.num_frozen:,} frozen"
    if quantization.disk_bytes:
        return quantization.disk_bytes, f"{quantization.format} files of the weights"
    plain, per_weight = layout.size.plain_params, quantization.weight_bytes
    quantized = layout.num_frozen - plain
    return (
        int(weight_bytes * plain + per_weight * quantized),
        f"{weight_bytes} x {plain:,} not quantised + {per_weight:.3f} x {quantized:,} quantised",
    )


def _gradients_of_share(layout: ZeroLayout) -> int:
    """Count the elements of the parameters that lie in one rank's share, each in full, on the rank that has most
    (`copy_grads_in_partition`). The embedding comes first; any other parameter may lie across the share's border.
    """
    share = layout.share
    first = layout.size.embedding_params if layout.size.trains_embedding else 0
    before = first - first % share if first > share else 0  # of the embedding, in the shares before
    return min(layout.size.num_trainable, before + share + layout.largest_inner)


def _stage_0(layout: ZeroLayout) -> list[Term]:
    weight_bytes, trained, optimizer = layout.weight_bytes, layout.size.num_trainable, layout.optimizer
    frozen, how = frozen_bytes(layout)
    is_half = weight_bytes < 4  # then the optimizer updates fp32 copies of the weights
    master = optimizer.master_bytes if is_half else 0
    moments = f"({f'fp32 master {master} + ' if master else ''}moments {optimizer.state_bytes}) x {trained:,}"
    # The engine reduces a flat copy of the gradients, which dsft leaves out on one rank (training/engine.py).
    # Later, in bf16 and fp16, fp32 gradients stand beside the model's (unfused_optimizer.py, step).
    copied = min(trained, STAGE_0_REDUCE_ELEMENTS + layout.largest_trained) if layout.machine.world_size > 1 else 0
    reduced, updating = layout.reduced_bytes, ((4 if is_half else 0) + optimizer.step_bytes) * trained
    step = f"max(all-reduce copy {reduced} x {copied:,}, fp32 gradients and copies {updating:,})"
    return [
        Term("weights", frozen + weight_bytes * trained, f"{how} + {weight_bytes} x {trained:,} trained"),
        Term("optimizer state", int((master + optimizer.state_bytes) * trained), moments),
        Term("gradients", weight_bytes * trained, f"{weight_bytes} x {trained:,}"),
        Term("optimizer step", max(reduced * copied, updating), step, "step"),
    ]


def _stage_1_2(layout: ZeroLayout, *, largest: int) -> list[Term]:
    """Args: `largest`: elements of the largest parameter whose gradient comes."""
    weight_bytes, trained = layout.weight_bytes, layout.size.num_trainable
    share, ranks, bucket = layout.share, layout.machine.world_size, layout.zero["reduce_bucket_size"]
    offloads, optimizer = layout.optimizer_device != "none", layout.optimizer
    frozen, how = frozen_bytes(layout)
    terms = [Term("weights", frozen + weight_bytes * trained, f"{how} + {weight_bytes} x {trained:,} trained")]
    if offloads:
        how = f"{weight_bytes} x largest parameter {largest:,} (temp_grad_buffer_for_gpu_offload)"
        terms.append(Term("gradient buffer of the offload", weight_bytes * largest, how))
    else:  # with an fp32 master of its own in fp32 training too: `detach().clone()`
        how = f"({optimizer.formula}) x {trained:,} / {ranks}"
        terms.append(Term("optimizer state", int(optimizer.checkpoint_bytes * share), how))

    # Gradients that wait for the step, and what the step adds to them.
    # Stage 1 holds all gradients in full until the last micro batch is reduced (`process_gradients`).
    keeps_all = layout.stage == 1 and (layout.accumulates or not layout.zero["overlap_comm"])
    # Buffers of the bucket's size that are allocated.
    buffers = 2 if layout.zero["overlap_comm"] else 1
    if not layout.zero["contiguous_gradients"] and not offloads:
        buffers = 0
    # fp64 copy of one gradient at a time (get_grad_norm_direct, set_norm_for_param_grad_in_gpu)
    norm_elements = min(largest, share)
    norm = Term("gradient norm", 8 * norm_elements, f"8 x {norm_elements:,} (fp64)", "compute")
    if layout.keeps_fp32_share:
        terms.append(Term("gradients", 4 * share, f"4 x {trained:,} / {ranks}, in fp32"))
        if offloads:
            terms.append(norm)
        else:  # the optimizer takes them as they are, or a copy in host memory
            copies, added = optimizer.step_bytes * share, 0 if layout.sent_bytes == 4 else 4 * norm_elements
            terms.append(Term("gradient to add", added, f"4 x {norm_elements:,}, from what is sent", "compute"))
            how = f"max(copies of the optimizer {copies:,}, fp64 norm {norm.num_bytes:,})"
            terms.append(Term("optimizer step", max(copies, norm.num_bytes), how, "step"))
    elif offloads:
        # The share's gradients go to host memory as they are reduced; stage 1 keeps them on the device until the last
        # micro batch.
        terms.append(Term("gradients", weight_bytes * trained * keeps_all, f"{weight_bytes} x {trained:,}"))
        terms.append(norm)
    else:
        of_share = _gradients_of_share(layout)
        held, how = weight_bytes * trained, f"{weight_bytes} x {trained:,} until the last micro batch is reduced"
        if not keeps_all:
            copies = 2 if layout.stage == 2 and layout.accumulates else 1
            # Stage 1 also keeps, until the step, what was too large for a bucket; the last of these counts as "not yet
            # reduced".
            large = sum(numel * count for numel, count in layout.size.trainable_numels if numel > bucket)
            large = large - largest if large and layout.stage == 1 else 0
            held = weight_bytes * (copies * of_share + large)
            how = f"{weight_bytes} x ({copies} x {of_share:,} full parameters of a rank's share"
            how += f" + {large:,} larger than a bucket)" if large else ")"
        terms.append(Term("gradients", held, how))
        # Beside the share's gradients, after the norm, what carries them into the optimizer. What reduces gradients
        # that were kept goes when the step has begun.
        carried, kept_buckets = layout.carried_bytes, weight_bytes * buffers * bucket * keeps_all
        step = max(kept_buckets, weight_bytes * of_share + max(carried * share, norm.num_bytes) - held)
        how = (
            f"{weight_bytes} x {of_share:,} + max({carried} x {trained:,} / {ranks}, fp64 norm {norm.num_bytes:,}) -"
            f" gradients {held:,}{f', at least the buckets {kept_buckets:,}' if kept_buckets else ''}"
        )
        terms.append(Term("optimizer step", step, how, "step"))

    # What gradients pass through on their way to other ranks. A bucket is allocated in full, however few gradients
    # there are. What is reduced is a flat copy of its used part (where all gradients were kept, those have left), or of
    # the slices of a larger parameter, as many as fill a bucket (allreduce_and_scatter).
    flat = 0 if keeps_all else min(trained, bucket)
    sliced = min(largest, bucket + share) if largest > bucket else 0
    copied, reduced = max(flat, sliced), layout.reduced_bytes
    how = f"{weight_bytes} x {buffers} x bucket {bucket:,} + {reduced} x copy {copied:,}"
    terms.append(Term("reduce buckets", weight_bytes * buffers * bucket + reduced * copied, how, "compute"))
    # A tied embedding has two gradients; their sum stands beside them before there is a copy to reduce.
    tied = layout.size.trains_embedding and not layout.size.head_params and largest == layout.size.embedding_params
    how = f"{weight_bytes} x {'2 uses of the tied embedding' if tied else 'largest parameter'} {largest:,}"
    terms.append(Term("gradient not yet reduced", weight_bytes * largest * (2 if tied else 1), how, "compute"))
    return terms


def _stage_3(layout: ZeroLayout) -> list[Term]:
    weight_bytes, sent_bytes, sum_bytes = layout.weight_bytes, layout.sent_bytes, layout.sum_bytes
    trained, share, ranks = layout.size.num_trainable, layout.share, layout.machine.world_size
    groups = layout.device_sub_groups
    persistent, live, most = _gathered_params(layout)
    bucket = layout.zero["reduce_bucket_size"] if layout.zero["contiguous_gradients"] else 0
    # allocated in full, once
    terms = [Term("reduce bucket", sent_bytes * bucket, f"{sent_bytes} x bucket {bucket:,}"), *shards(layout)]
    if layout.optimizer_device == "none":
        optimizer = layout.optimizer
        # An fp32 master of its own in fp32 training too (_create_fp32_partitions compares a torch.device with a name).
        how = f"({optimizer.formula}) x {trained:,} / {ranks}"
        terms.append(Term("optimizer state", int(optimizer.checkpoint_bytes * share), how))
        how = f"{sum_bytes} x {trained:,} / {ranks} (grad_partitions_flat_buffer)"
        terms.append(Term("gradient partition", sum_bytes * share, how))
        # Gradients of a sub-group flat, then in fp32 (_prepare_fp32_grad_for_sub_group). Only the step partitions
        # persistent parameters, and gathers them again (step, _post_step).
        carried, released = layout.carried_bytes, weight_bytes * persistent
        largest = min(share, max(groups) + math.ceil(layout.largest_inner / ranks) * (len(groups) > 1))
        how = f"{carried} x largest sub-group {largest:,} - persistent parameters {released:,}, released meanwhile"
        terms.append(Term("optimizer step", max(0, carried * largest - released), how, "step"))
    elif groups:
        # What `ratio` < 1 leaves: the first sub-groups, with fp32 gradients of their own (initialize_optimizer_states),
        # updated by `backup_optimizer`, torch's AdamW without fusion.
        adam, each = OPTIMIZERS["adamw_torch"], layout.optimizer.master_bytes  # and its two moments are of this type
        held = 4 * each * sum(groups)
        how = f"(master {each} + moments {2 * each} + gradient {each}) x {sum(groups):,} not offloaded"
        terms.append(Term("optimizer state", held, how))
        step_bytes = adam.step_bytes * each // adam.master_bytes
        how = f"{step_bytes} x sub-group {max(groups):,} (AdamW, not fused)"
        terms.append(Term("optimizer step", step_bytes * max(groups), how, "step"))
    terms += gathered(layout)
    over = layout.hpz_ranks
    if over and layout.param_device == "none":
        # hpZ's second partition over the ranks of a node (`_partition_param_sec`): made as parameters are released,
        # dropped after the step where they are trained.
        frozen = layout.num_frozen
        how = f"{weight_bytes} x {frozen:,} / {over}"
        terms.append(Term("secondary partition, frozen", weight_bytes * frozen // over, how))
        # With everything gathered and one micro batch, the first release comes at the end of its backward, as gathered
        # parameters go.
        phase: Phase = "always" if layout.accumulates or live < most else "step"
        how = f"{weight_bytes} x {trained:,} / {over}"
        terms.append(Term("secondary partition", weight_bytes * trained // over, how, phase))
    return terms


def shards(layout: ZeroLayout) -> list[Term]:
    """List this rank's part of the weights under ZeRO-3; none where they are offloaded."""
    if layout.param_device != "none":
        return []
    weight_bytes, params, ranks = layout.weight_bytes, layout.size.num_params, layout.machine.world_size
    return [Term("weights", weight_bytes * params // ranks, f"{weight_bytes} x {params:,} / {ranks}")]


def _gathered_params(layout: ZeroLayout) -> tuple[int, int, int]:
    """Count (parameters that stay gathered, those gathered at once beside them, all that could be).

    Those up to a threshold stay gathered (`mark_persistent_parameters`). `PartitionedParameterCoordinator` fetches
    ahead up to max_live, and releases what is not used again within max_reuse_distance: at the turn from forward to
    backward a parameter d before the end is used again after 2 d, so half that distance stays. The larger of the two
    decides, so lowering only one of them may change nothing.
    """
    zero, trained = layout.zero, Counter(dict(layout.size.trainable_numels))
    persistent = 0
    for numels in (trained, Counter(dict(layout.size.numels)) - trained):  # frozen ones have a limit of their own
        small = (n * count for n, count in numels.items() if n <= zero["stage3_param_persistence_threshold"])
        persistent += min(sum(small), zero["stage3_model_persistence_threshold"])
    most = layout.size.num_params - persistent
    wanted = max(
        zero["stage3_max_live_parameters"],
        zero["stage3_max_reuse_distance"] // 2,
        layout.size.largest_gathered_params,
    )
    return persistent, min(most, wanted), most


def gathered(layout: ZeroLayout) -> list[Term]:
    """List full parameters, and the buffers through which they and their gradients pass; none on a single rank."""
    if layout.machine.world_size == 1 and layout.param_device == "none":  # nothing is partitioned (`NoGatherHandle`)
        return []
    weight_bytes, zero, size = layout.weight_bytes, layout.zero, layout.size
    persistent, live, most = _gathered_params(layout)
    threshold = zero["stage3_param_persistence_threshold"]
    # A prefetch ends with the parameter that fills it, and holds a flat copy until its last parameter is used
    # (AllGatherCoalescedHandle.wait).
    prefetch, largest = zero["stage3_prefetch_bucket_size"], max(numel for numel, _ in size.numels)
    name, num_bytes = "prefetch copies", weight_bytes * (min(most, prefetch + largest) if prefetch else 0)
    how = f"{weight_bytes} x (prefetch bucket {prefetch:,} + parameter that fills it {largest:,})"
    if size.num_trainable:
        # The gradient of the largest parameter, while the bucket before it is flattened for the reduce-scatter
        # (reduce_scatter_coalesced). Where everything is gathered, parameters of the bucket's size have been released
        # by then. A prefetch and a reduction do not copy at one time.
        sent_bytes, trained = layout.sent_bytes, layout.largest_trained
        flattened = min(zero["reduce_bucket_size"], size.num_trainable) if live < most else 0
        sent = trained if sent_bytes > weight_bytes else 0
        reduced = weight_bytes * trained + sent_bytes * (flattened + sent)
        name, num_bytes = "prefetch or reduce copies", max(num_bytes, reduced)
        how = (
            f"max({how}, {weight_bytes} x gradient {trained:,} + {sent_bytes} x"
            f" ({f'its copy {sent:,} + ' if sent else ''}flat bucket {flattened:,})), not at one time"
        )
    kept = f"{weight_bytes} x {persistent:,} up to the threshold {threshold:,}"
    return [
        Term("persistent parameters", weight_bytes * persistent, kept),
        Term("gathered parameters", weight_bytes * live, f"{weight_bytes} x {live:,} of {most:,}", "compute"),
        Term(name, num_bytes, how, "compute"),
    ]


def sample_terms(layout: ZeroLayout) -> list[Term]:
    """List what generating samples gathers: all weights on every rank (deepspeed.zero.GatheredParameters, which holds
    no flat copies beside them, but what is offloaded is moved to the device first). What generation itself holds is
    less than a micro batch of training does.
    """
    if layout.stage < 3 or (layout.machine.world_size == 1 and layout.param_device == "none"):
        return []
    persistent, _, most = _gathered_params(layout)
    offloads = layout.param_device != "none" and layout.machine.has_gpu
    moved = -(-layout.size.num_params // layout.machine.world_size) if offloads else 0
    how = f"{layout.weight_bytes} x ({most:,} beside {persistent:,} persistent{f' + shard {moved:,}' if moved else ''})"
    return [Term("weights gathered for samples", layout.weight_bytes * (most + moved), how, "sample")]


def copied_terms(layout: ZeroLayout) -> list[Term]:
    """List the copies of a checkpoint that lie in host memory until they are written (checkpoints/save.py): of each
    rank's shard, and on rank 0 of what is not cut into shards.
    """
    weights, copies, states = checkpoint_parts(
        layout.size, layout.optimizer, stage=layout.stage, weight_bytes=layout.weight_bytes
    )
    whole, cut = (copies, 0) if layout.stage < 3 else (0, copies)
    whole, cut = (whole, cut + states) if layout.stage else (whole + states, cut)
    how, ranks = f"weights {weights:,} + {whole:,} of DeepSpeed's own on rank 0", layout.machine.world_size
    return [
        Term("copies of weights to be written", weights + whole, how, place="host"),
        _on_node(layout, "copies of shards to be written", cut / ranks, f"{cut:,} / {ranks}"),
    ]


def _on_node(layout: ZeroLayout, name: str, num_bytes: float, formula: str, phase: Phase = "always") -> Term:
    ranks = layout.machine.ranks_per_node
    return Term(name, int(ranks * num_bytes), f"{ranks} ranks x {formula}", phase, "host")


def _processes(layout: ZeroLayout, phase: Phase) -> Term:
    num_bytes = PROCESS_BYTES[layout.machine.has_gpu]
    return _on_node(layout, "processes", num_bytes, f"{num_bytes:,}", phase)


def host_terms(layout: ZeroLayout) -> list[Term]:
    """List what offload takes of a node's host memory and NVMe, and what its processes take."""
    weight_bytes, share, ranks, size = layout.weight_bytes, layout.share, layout.machine.world_size, layout.size
    optimizer, trained = layout.optimizer, layout.size.num_trainable
    offload, params = layout.zero["offload_optimizer"] or {}, layout.zero["offload_param"] or {}

    def pinned(num_bytes: int, pin: bool = True) -> int:
        """Round up to a power of two where it is pinned."""
        return pinned_bytes(num_bytes) if pin and layout.machine.has_gpu else num_bytes

    def hold(name: str, num_bytes: float, formula: str) -> None:
        terms.append(_on_node(layout, name, num_bytes, formula))

    terms = [_processes(layout, "always")]
    pin = offload.get("pin_memory", False)
    if layout.stage in (1, 2) and layout.optimizer_device != "none":
        # All but the moments are pinned (stage_1_and_2.py, __init__ and initialize_optimizer_states).
        hold("Adam moments", optimizer.state_bytes * share, f"{optimizer.state_bytes} x {share:,}")
        for name, num_bytes, count in (
            ("fp32 master weights", optimizer.master_bytes, share),
            ("fp32 gradients", optimizer.master_bytes, share),  # in the master's type, as CPUAdam reads them
            ("copy of updated weights", weight_bytes, share),
            ("gradient buffer", weight_bytes, layout.largest_trained),
        ):
            hold(name, pinned(num_bytes * count, pin), f"{num_bytes} x {count:,}, pinned")
        # With bf16 states the gradients above hold the sums (low_precision_master_weights_and_grads).
        if layout.accumulates and layout.stage == 2 and not layout.keeps_fp32_share and optimizer.master_bytes == 4:
            # One buffer for each parameter of the share, in full (buffer_to_accumulate_to_in_cpu), rounded like the
            # average parameter.
            of_share = _gradients_of_share(layout)
            exact = weight_bytes * trained
            rounded = sum(pinned(weight_bytes * numel, pin) * count for numel, count in size.trainable_numels)
            how = f"{weight_bytes} x {of_share:,} full parameters of the share x {rounded / exact:.2f} for pinning each"
            hold("accumulated gradients", weight_bytes * of_share * rounded / exact, how)
    if layout.stage == 3 and layout.optimizer_device != "none":
        groups, on_device = layout.sub_groups, layout.device_sub_groups
        if layout.optimizer_device == "nvme":  # buffers of OptimizerSwapper: page-locked by aio, not rounded
            buffers, largest = offload["buffer_count"], max(groups)
            how = f"4 x sub-group {largest:,} x {buffers} buffers"
            hold("swap buffers of the optimizer", 4 * largest * buffers, how)
        else:
            # stage3.py, _create_fp32_partitions, initialize_optimizer_states, _setup_for_real_optimizer
            kept = share - sum(on_device)
            how = f"({optimizer.formula}) x {kept:,}, pageable"
            hold("fp32 master weights and Adam moments", optimizer.checkpoint_bytes * kept, how)
            # Buffers of sub-groups that the device updates are made pinned and moved: the allocator keeps them.
            here = groups if layout.machine.has_gpu and pin else groups[len(on_device) :]
            gradients = sum(pinned(optimizer.master_bytes * group, pin) for group in here)
            hold("fp32 gradients", gradients, f"{optimizer.master_bytes} x each of {len(groups)} sub-groups, pinned")
        hold("gradient partition", pinned(layout.sum_bytes * share, pin), f"{layout.sum_bytes} x {share:,}, pinned")
    if layout.stage == 3 and layout.param_device == "nvme":
        buffers, elements = params["buffer_count"], params["buffer_size"]
        how = f"{weight_bytes} x {buffers} buffers x {elements:,}"
        hold("swap buffers of parameters", weight_bytes * buffers * elements, how)
        in_memory = min(share, params["max_in_cpu"])
        hold("trained shards", pinned(weight_bytes * in_memory), f"{weight_bytes} x {in_memory:,} (max_in_cpu), pinned")
    elif layout.stage == 3 and layout.param_device != "none":
        # Shards are made one by one (zero.Init); trained ones then move to one flat buffer, which is always pinned
        # (_create_param_groups_fp16_flat_cpu_memory).
        of_trained = Counter(dict(size.trainable_numels))
        of_frozen, pin_shards = Counter(dict(size.numels)) - of_trained, params["pin_memory"]
        trained_shards, frozen_shards = (
            sum(
                pinned(weight_bytes * -(-numel // ranks), pin_shards) * count
                for numel, count in numels.items()
                if numel > layout.zero["stage3_param_persistence_threshold"]
            )
            for numels in (of_trained, of_frozen)
        )
        hold("trained shards", pinned(weight_bytes * share), f"{weight_bytes} x {share:,}, pinned")
        how = f"{weight_bytes} x each frozen parameter / {ranks}, pinned one by one"
        hold("frozen shards", frozen_shards, how)
        # Freed shards of trained parameters stay with the allocator where they were pinned.
        freed = trained_shards if layout.machine.has_gpu and pin_shards else 0
        how = f"{weight_bytes} x each trained parameter / {ranks}, pinned one by one, kept when they move"
        hold("allocator's leftovers", freed, how)
    if layout.machine.has_gpu:
        # What rank 0 copies to write a checkpoint: the trained weights, gathered under ZeRO-3
        # (`_zero3_consolidated_16bit_state_dict`). On CPU ranks an optimizer step takes more.
        how = f"{weight_bytes} x {trained:,} on rank 0"
        terms.append(Term("weights to be saved", weight_bytes * trained, how, "save", "host"))
    # What offload writes to a node's NVMe: shards of the weights; master, moments and gradients in fp32
    # (deepspeed/runtime/swap_tensor; not run here).
    per_param = optimizer.checkpoint_bytes + optimizer.master_bytes
    weights = weight_bytes * -(-size.num_params // ranks) if layout.param_device == "nvme" else 0
    states = int(per_param * share) if layout.optimizer_device == "nvme" else 0
    if weights + states:
        how = f"{layout.machine.ranks_per_node} ranks x (weights {weights:,} + {per_param} x {share:,} trained)"
        terms.append(Term("files", layout.machine.ranks_per_node * (weights + states), how, place="nvme"))
    return terms


def load_terms(layout: ZeroLayout) -> list[Term]:
    """List what one device, and one node's host memory, hold before training."""
    size, weight_bytes, trained = layout.size, layout.weight_bytes, layout.size.num_trainable
    terms = [_processes(layout, "load")]

    def hold(name: str, num_bytes: int, formula: str, *, on_host: bool = False) -> None:
        """On each rank."""
        held = partial(_on_node, layout) if on_host else Term
        terms.append(held(name, num_bytes, formula, "load"))

    # Adapters are in full on every rank until DeepSpeed shards them; over a quantised base it also converts them.
    adapter_bytes = 4 if layout.packed else weight_bytes
    adapters = adapter_bytes * trained if size.lora_r else 0
    weights, how = frozen_bytes(layout)
    if trained and not size.lora_r:
        more = f"{weight_bytes} x {trained:,}"
        weights, how = weights + weight_bytes * trained, f"{how} + {more}" if layout.num_frozen else more
    if layout.stage == 3:
        # zero.Init makes shards, one module after the other; of offload to NVMe at most, since each shard is written
        # out as it is made.
        offloads, over = layout.param_device != "none", layout.hpz_ranks
        of_rank = f"({how}) / {layout.machine.world_size}"
        hold("shards", weights // layout.machine.world_size, of_rank, on_host=layout.machine.has_gpu and offloads)
        # The module comes before the adapters.
        module = weight_bytes * size.largest_module_params - (0 if layout.machine.has_gpu else adapters)
        hold("one module, gathered", max(0, module), f"{weight_bytes} x {size.largest_module_params:,}")
        if over and not offloads:
            hold("secondary partition", weights // over, f"({how}) / {over}")
    elif layout.packed and layout.machine.has_gpu:
        if trained:
            plain = size.plain_params  # prepare_model_for_kbit_training makes these fp32
            weights, how = weights + (4 - weight_bytes) * plain, f"{how}, what is not quantised in fp32"
        hold("weights", weights, how)
    else:
        hold("weights", weights, how)
        # What becomes the flat tensor of the trained weights (stage_1_and_2.py): on a GPU it takes what is free, so it
        # is not counted; where that is too little, weights and copy are both in host memory.
        flat = weight_bytes * trained if layout.stage in (1, 2) else 0
        how = f"{weight_bytes} x {trained:,} (flatten_dense_tensors_aligned)"
        outside = ASSUMED.total_bytes(layout.communicators)
        if flat and not layout.machine.has_gpu:
            hold("flat copy of trained weights", flat, how)
        elif flat and weights + adapters + flat + outside > layout.machine.device_bytes:
            hold("trained weights and their flat copy", 2 * flat, f"2 x {how}", on_host=True)
    if adapters:
        how = f"{adapter_bytes} x {trained:,}"
        hold("adapters", adapters, how, on_host=layout.machine.has_gpu and layout.stage == 3)
    return terms
