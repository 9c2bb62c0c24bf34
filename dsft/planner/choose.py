"""Chooses a DeepSpeed configuration: predicts the memory and time of every candidate from the configuration that a
training would get (`plan.deepspeed_config`), and takes the fastest that fits. For an evaluation it takes the first of
three ways to place the model that fits. Pure arithmetic.
"""

import dataclasses
import itertools
import json
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from dsft.config.deepspeed import DeepSpeedJson, compose, get_value, offloads, read_zero_file
from dsft.models.chunked_head import ROW_TILE, VOCAB_TILE
from dsft.models.measure import ModelFacts, ModelSize
from dsft.planner.activations import LIGER_MODELS, attention_of
from dsft.planner.memory import (
    OPTIMIZERS,
    PLANNED_AS,
    Job,
    Term,
    ZeroLayout,
    device_state_terms,
    host_terms,
    optimizer_name,
    outside_terms,
    peak_bytes,
    pinned_bytes,
    training_terms,
)
from dsft.planner.speed import cards_named, speeds_of, step_seconds
from dsft.runtime.hardware import Machine
from dsft.units import Batch, GiB, JsonObject, in_time, padded_width

NAMES = ("0", "1", "2", "3", "3-hpz", "2-offload", "3-offload-optimizer", "3-offload-param", "3-offload")
"""Candidates, simplest first: of two that are equally fast, the first wins."""
SEQUENCES_PER_RANK = 8
"""Of one optimizer step, if no option sets them: TrainingArguments' default. The plan cuts them into micro batches."""
LARGEST_MICRO_BATCH = 64
CHECKPOINT_EVERY = (1, 2, 4, 8)  # activation checkpointing of every n-th layer: the n that are tried
MANY_MICRO_BATCHES = 4
"""From this number on, gradients are accumulated in fp32: in bf16 the sum of 4 is off by 0.3 %, of 64 by 0.8 %."""
SMALL_LIVE_PARAMS = 50_000_000
"""stage3_max_live_parameters and stage3_max_reuse_distance, lowered together, if 1e9 does not fit."""
LEAST_BUCKET = 2**25
"""Smallest bucket of ZeRO-3, in elements: transformers' "auto" is the hidden size squared, 65,536 at a width of 256."""
MOST_PREFETCHED = 2**28  # largest prefetch of ZeRO-3, in elements: a layer of an 8B model has 218 M
FAST_LINK_BYTES = 1e11
"""Bytes per second of a rank's links in a node above which halving the traffic gains little: NVLink with a switch."""
PERSISTENT_SHARE = 0.05  # share of a model's parameters that may stay gathered so that its adapters do

HOST_SHARE = 0.95  # of a node's memory; the rest is the system's
RESERVE_BYTES = 2**29
"""Left free: memory outside of torch was up to 0.3 GiB above the assumption. ZeRO-3 can release parameters instead."""
FULL = 0.92  # share of a GPU's memory above which a plan must be FULL_COSTS times as fast as a smaller one
ROOMY = 0.8  # share of a GPU's memory up to which larger micro batches are preferred
FULL_COSTS = 1.15
OFFLOAD_GAIN = 1.2  # how much faster offload must be than every plan without it that fits
HPZ_GAIN = 1.1  # how much faster hpZ must be than other plans: no run has confirmed its prediction
SAME_SPEED = 1.02  # plans within this factor count as equally fast: the simplest is taken


@dataclass(frozen=True, kw_only=True)
class Needs:
    """Memory that a plan, of a training or an evaluation, needs."""

    terms: tuple[Term, ...]
    device_bytes: int  # peak on one GPU (on CPU, of one rank), including context and communication buffers
    host_bytes: int  # host memory of one node, all its ranks together
    fits: bool


def add_up(terms: list[Term], machine: Machine, *, stage: int) -> JsonObject:
    """Return the sums of the terms on a machine: the fields of `Needs`."""
    device = peak_bytes(terms, "device")
    host = peak_bytes(terms, "host")
    if not machine.has_gpu:
        host += machine.ranks_per_node * device  # CPU ranks keep everything in host memory
    can_release = stage == 3 and machine.world_size > 1
    reserve = 0 if can_release else RESERVE_BYTES
    fits = host <= HOST_SHARE * machine.host_bytes
    if machine.has_gpu and device + reserve > machine.device_bytes:
        fits = False
    return {"terms": tuple(terms), "device_bytes": device, "host_bytes": host, "fits": fits}


def shortage(plan: Needs, machine: Machine) -> float:
    """Return the needed share of the scarcer memory, GPU or host."""
    host = plan.host_bytes / (HOST_SHARE * machine.host_bytes)
    if not machine.has_gpu:
        return host
    return max(host, (plan.device_bytes + RESERVE_BYTES) / machine.device_bytes)


@dataclass(frozen=True, kw_only=True)
class Plan(Needs):
    zero: str  # name as the option `zero` takes it: 0, 1, 2, 3, 3-hpz, 2-offload ... or the path of a DeepSpeed JSON
    activation_checkpointing: bool
    checkpoint_every: int  # with checkpointing, every n-th layer is recomputed
    micro_batch: int  # sequences of one forward on one rank
    accumulation: int  # micro batches of one optimizer step
    sequence_parallel: int  # ranks that share each micro batch
    deepspeed_config: DeepSpeedJson  # what training gets; "auto" numbers are left to transformers
    step_seconds: float
    tokens_per_step: int  # over all ranks
    has_time_estimate: bool  # whether `step_seconds` may be shown, and not only ranks plans: the GPU is known by name

    @property
    def tokens_per_second(self) -> float:
        return self.tokens_per_step / self.step_seconds

    @property
    def checkpointing(self) -> str:
        """As shown in tables: off, on, 1/2 ..."""
        if not self.activation_checkpointing:
            return "off"
        if self.checkpoint_every == 1:
            return "on"
        return f"1/{self.checkpoint_every}"

    @property
    def label(self) -> str:
        text = f"ZeRO {self.zero}, checkpointing {self.checkpointing}, batch {self.micro_batch} x {self.accumulation}"
        if self.sequence_parallel > 1:
            text += f", {self.sequence_parallel} ranks to a sequence"
        return text


def as_dict(plan: Plan) -> JsonObject:
    return dataclasses.asdict(plan) | {"tokens_per_second": plan.tokens_per_second}


def plan_flags(plan: Plan, job: Job) -> str:
    """The options that reproduce exactly this plan."""
    flags = f"--zero {plan.zero} --per_device_train_batch_size {plan.micro_batch}"
    if not job.sequences_per_step:  # else it is derived
        flags += f" --gradient_accumulation_steps {plan.accumulation}"
    flags += f" --activation_checkpointing {str(plan.activation_checkpointing).lower()}"
    if plan.checkpoint_every > 1:
        kwargs = {"every_n_layers": plan.checkpoint_every}
        if job.checkpoint_offload:
            kwargs["offload"] = True
        flags += f" --activation_checkpointing_kwargs '{json.dumps(kwargs)}'"
    return flags


def describe_memory(needs: Needs, machine: Machine, *, host: bool = True) -> str:
    share = needs.device_bytes / machine.device_bytes
    each = ""
    if machine.world_size > 1:
        each = f" per {machine.place}"
    text = f"{needs.device_bytes / GiB:,.1f} of {machine.device_bytes / GiB:.1f} GiB{each} ({share:.0%})"
    if host:
        text += f", host memory {needs.host_bytes / GiB:,.1f} of {machine.host_bytes / GiB:,.0f} GiB"
    return text


# ---- candidates


def candidate_names(job: Job, machine: Machine) -> list[str]:
    """List the configurations that make sense for this model and machine."""
    offloaded = {name for name in NAMES if "offload" in name}
    stage_3 = {name for name in NAMES if name.startswith("3")}
    left_out = set()
    if machine.world_size == 1:
        # Nothing is sharded. Stage 1 is stage 2 with fewer buffers, but a second copy of the weights in fp32.
        left_out |= {"1", "2"} if job.dtype == "float32" else {"0"}
    if job.dtype == "float16" or job.bf16_states:
        left_out.add("0")
    if machine.nodes == 1 or machine.ranks_per_node == 1 or machine.num_ranks:  # uneven nodes share no size
        left_out.add("3-hpz")
    if not machine.has_gpu:  # device and host are the same memory
        left_out |= offloaded
    if job.liger and not job.tiled_loss:  # its loss reads the head without ZeRO-3's hooks
        left_out |= stage_3
    if job.size.quantization:  # neither sharded by ZeRO-3 nor offloaded
        left_out |= stage_3 | offloaded
    return [name for name in NAMES if name not in left_out]


def batches(job: Job, machine: Machine) -> Iterator[Batch]:
    """Yield the batches to try, smallest micro batch first: the sequences of a step, or as many as divide evenly."""
    per_rank = job.micro_batch or SEQUENCES_PER_RANK
    micro_batches = [per_rank]
    if job.sequences_per_step:
        per_rank = max(1, job.sequences_per_step // job.batch(1, 1, machine).sequences)
    if not job.micro_batch and not job.accumulation:
        most = min(per_rank, LARGEST_MICRO_BATCH)
        micro_batches = [number for number in range(1, most + 1) if per_rank % number == 0]
    for micro in micro_batches:
        accumulation = job.accumulation or max(1, per_rank // micro)
        yield job.batch(micro, accumulation, machine)


def settings(
    name: str, zero_file: DeepSpeedJson | None, job: Job, machine: Machine, accumulation: int
) -> list[DeepSpeedJson]:
    """Return the configuration with numbers for this model (of a user's JSON only "auto"), then smaller variants."""
    hpz_ranks = None if zero_file else machine.ranks_per_node
    config = compose(zero_file or read_zero_file(name, []), hpz_ranks=hpz_ranks, bf16_states=job.bf16_states)
    zero = config["zero_optimization"]
    stage = zero.get("stage", 0)
    buckets = {}
    if stage == 3:
        buckets = stage_3_buckets(zero, job.size)
    if zero_file is not None:
        return [config | {"zero_optimization": zero | buckets}]
    _fit_numbers(name, zero, job, machine)
    sections = [zero | buckets]
    if stage == 3:
        live = dict.fromkeys(("stage3_max_live_parameters", "stage3_max_reuse_distance"), SMALL_LIVE_PARAMS)
        sections.append(zero | live)
    pageable = {}  # pinned memory is rounded up to powers of two
    for part in ("offload_optimizer", "offload_param"):
        if get_value(zero, f"{part}.pin_memory"):
            pageable[part] = zero[part] | {"pin_memory": False}
    if pageable:
        sections.append(sections[-1] | pageable)
    configs = [config | {"zero_optimization": section} for section in sections]
    # Stage 0 refuses to add up in another type than the model's; stage 1 would hold all gradients in full.
    if stage >= 2 and wants_fp32_sums(job, accumulation):
        in_fp32 = [each | {"data_types": {"grad_accum_dtype": "fp32"}} for each in configs]
        if job.fp32_accumulation:
            return in_fp32
        return in_fp32 + configs
    return configs


def _fit_numbers(name: str, zero: DeepSpeedJson, job: Job, machine: Machine) -> None:
    """Size the buckets and sub-groups of a named configuration for this model."""
    size = job.size
    ranks = machine.world_size
    largest = max(numel for numel, _ in size.trainable_numels)
    for key in ("reduce_bucket_size", "allgather_bucket_size"):
        if isinstance(zero.get(key), int):  # allocated in full; a few buckets per step are enough to overlap
            enough = max(size.num_trainable // 8, largest)
            zero[key] = min(zero[key], -(-enough // 1024) * 1024)  # DeepSpeed wants an even number
    if name in ("1", "2"):
        if ranks == 1:
            zero["overlap_comm"] = False  # nothing to overlap, and it would need a second bucket
        elif machine.has_gpu and size.num_trainable >= LEAST_BUCKET * ranks:
            link_bytes = speeds_of(machine, dtype=job.dtype).link_bytes
            if machine.nodes > 1 or link_bytes < FAST_LINK_BYTES:
                # DeepSpeed's default all-reduces every gradient (stage_1_and_2.py, average_tensor): twice the bytes.
                zero["use_multi_rank_bucket_allreduce"] = False
    if zero.get("stage") == 3:
        # Pinned memory is rounded up to a power of two, which a sub-group should fill. DeepSpeed closes one after it
        # has reached the number: the largest shard of a parameter is subtracted as margin.
        margin = -(-largest // ranks)
        zero["sub_group_size"] = max(2**28, pinned_bytes(4 * margin)) - margin


def wants_fp32_sums(job: Job, accumulation: int) -> bool:
    """Whether half-precision gradients should be accumulated in fp32: as asked for, else with many micro batches."""
    if job.fp32_accumulation is None:
        return job.dtype == "bfloat16" and accumulation >= MANY_MICRO_BATCHES
    return job.fp32_accumulation and job.dtype != "float32"


def stage_3_buckets(zero: DeepSpeedJson, size: ModelSize) -> dict[str, int]:
    """Choose the "auto" entries of a stage-3 section; small collectives would be dominated by their latency."""
    # The largest adapter that stays gathered: else each is a collective of its own over a few thousand elements.
    adapters = 0
    for numel, _ in size.trainable_numels if size.lora_r else ():
        if sum(n * count for n, count in size.numels if n <= numel) <= PERSISTENT_SHARE * size.num_params:
            adapters = max(adapters, numel)
    square = size.hidden_size**2
    bucket = min(max(square, LEAST_BUCKET), size.num_trainable)
    layer = min(size.num_params // size.num_layers, MOST_PREFETCHED)
    numbers = {
        "reduce_bucket_size": bucket + bucket % 2,
        "stage3_prefetch_bucket_size": min(max(int(0.9 * square), LEAST_BUCKET, layer), size.num_params),
        "stage3_param_persistence_threshold": max(10 * size.hidden_size, 100_000, adapters),
    }
    return {key: number for key, number in numbers.items() if zero.get(key) == "auto"}


# ---- plans


def all_plans(job: Job, machine: Machine, *, zero: str = "auto", zero_file: DeepSpeedJson | None = None) -> list[Plan]:
    """Return a plan for each configuration, micro batch, and share of recomputed layers: with the first of its settings
    that fits, else with the last, which needs least.

    Args:
        zero: "auto" for all candidates, else the one of that name, whatever type it accumulates gradients in.
        zero_file: the content of the DeepSpeed JSON if `zero` is a path.
    """
    every_nth = (job.checkpoint_every or 1,)
    if job.checkpointing is None:
        every_nth = (0, *(every_nth if job.checkpoint_every else CHECKPOINT_EVERY))
    elif not job.checkpointing:
        every_nth = (0,)
    names = candidate_names(job, machine) if zero == "auto" else [zero]
    plans = []
    for name, batch, every in itertools.product(names, batches(job, machine), every_nth):
        accumulation = batch.accumulation
        if zero == "auto" and name in ("0", "1") and wants_fp32_sums(job, accumulation):
            continue
        for config in settings(name, zero_file, job, machine, accumulation):
            layout = ZeroLayout(job, config, machine, accumulation=accumulation)
            needs = add_up(training_terms(layout, batch, every=every), machine, stage=layout.stage)
            # If the GPU would be nearly full, fewer parameters are gathered at once.
            is_full = needs["device_bytes"] > FULL * machine.device_bytes
            gathers_much = layout.stage == 3 and layout.zero["stage3_max_live_parameters"] > SMALL_LIVE_PARAMS
            if needs["fits"] and not (is_full and gathers_much):
                break
        plan = Plan(
            **needs,
            zero=name,
            activation_checkpointing=every > 0,
            checkpoint_every=every or 1,
            micro_batch=batch.micro,
            accumulation=accumulation,
            sequence_parallel=batch.sequence_parallel,
            deepspeed_config=config,
            step_seconds=step_seconds(layout, batch, recomputed=1 / every if every else 0.0),
            tokens_per_step=job.seq_len * batch.sequences,
            has_time_estimate=machine.has_gpu and (not machine.gpu_type or bool(cards_named(machine.gpu_type))),
        )
        plans.append(plan)
    return plans


def choose(plans: list[Plan], machine: Machine) -> Plan:
    """Return the fastest that fits, or the closest to fitting. Offload, hpZ and a nearly full GPU must be faster by a
    margin. Of equally fast plans the simplest is taken, then the one that leaves most memory free.
    """
    fitting = [plan for plan in plans if plan.fits]
    if not fitting:
        return min(plans, key=lambda plan: shortage(plan, machine))
    on_gpus = [plan for plan in fitting if not offloads(plan.deepspeed_config)]
    if on_gpus:
        speed = OFFLOAD_GAIN * max(plan.tokens_per_second for plan in on_gpus)
        fitting = [plan for plan in fitting if plan.tokens_per_second > speed or not offloads(plan.deepspeed_config)]

    def cost(plan):
        seconds = plan.step_seconds / plan.tokens_per_step
        if plan.zero == "3-hpz":
            seconds *= HPZ_GAIN
        if machine.has_gpu and plan.device_bytes > FULL * machine.device_bytes:
            seconds *= FULL_COSTS
        return seconds

    def preference(plan):
        is_roomy = plan.device_bytes <= ROOMY * machine.device_bytes
        size = -plan.micro_batch if is_roomy else plan.device_bytes
        stage_rank = NAMES.index(plan.zero) if plan.zero in NAMES else 0
        return (stage_rank, not is_roomy, size)

    least = min(map(cost, fitting))
    return min((plan for plan in fitting if cost(plan) <= SAME_SPEED * least), key=preference)


def best_of_each(plans: Iterable[Plan], machine: Machine) -> list[Plan]:
    """Return the chosen plan of each configuration with and without checkpointing, for a table."""
    groups = defaultdict(list)
    for plan in plans:
        groups[plan.zero, plan.activation_checkpointing].append(plan)
    return [choose(group, machine) for group in groups.values()]


# ---- texts


def reason(chosen: Plan, machine: Machine, *, zero: str = "auto") -> str:
    asked = "" if zero == "auto" else f"zero={zero}: "
    memory = describe_memory(chosen, machine)
    if not chosen.fits:
        return f"{asked}nothing fits; the closest is {chosen.label}: {memory}."
    speed = ""
    if chosen.has_time_estimate:
        per_gpu = chosen.tokens_per_second / machine.world_size
        speed = f", about {in_time(chosen.step_seconds)} per step and {per_gpu:,.0f} tokens/s per GPU"
    return f"{asked}{chosen.label} is the fastest that fits{speed}: {memory}."


def unmodelled(job: Job, deepspeed_config: DeepSpeedJson) -> list[str]:
    """What a job and its configuration ask for and the plan does not model, one sentence each."""
    notes = []
    optimizer = optimizer_name(deepspeed_config, job.optimizer)
    if optimizer not in OPTIMIZERS:
        notes.append(f"optimizer {optimizer} is planned with the memory of {PLANNED_AS}.")
    if job.liger and job.size.model_type not in LIGER_MODELS:
        notes.append(f"use_liger_kernel changes nothing: Liger has no kernels for {job.size.model_type}.")
    if left := job.size.plain_expert_params:
        notes.append(f"{left / 1e9:,.1f} B parameters of experts are not quantised: only linear layers are.")
    if offloads(deepspeed_config, to=("nvme",)):
        notes.append("Offload to NVMe is not planned: memory and time are those of the GPU alone.")
    return notes


# ---- evaluation

EVALUATION_NAMES = ("0", "3", "3-offload")
"""One copy of the model per rank, shards over all ranks, shards in host memory: the first that fits is chosen."""
DEFAULT_BATCH_TOKENS = {True: 16384, False: 4096}
"""Tokens of one forward on a GPU and on a CPU, however the model is placed: the bits of a result depend on it."""
LENGTH_STEP = 256
MOST_POSITIONS = 2**20
"""Windows are planned in multiples of LENGTH_STEP, up to the model's positions, or else MOST_POSITIONS."""


@dataclass(frozen=True, kw_only=True)
class EvaluationPlan(Needs):
    zero: str  # as the option `zero` of `dsft eval` takes it
    batch_tokens: int
    reason: str = ""  # why it was chosen, one sentence
    longest_window: int | None = None
    """Tokens of the longest window that fits, alone in its batch; 0 if none does; None if attention has a matrix."""


def longest_length(fits: Callable[[int], bool], size: ModelSize) -> int:
    """Return the most tokens of a sequence that fit; 0 if none do."""
    positions = size.max_positions or MOST_POSITIONS
    step = min(LENGTH_STEP, positions)
    return step * bisect_left(range(step, positions + 1, step), True, key=lambda length: not fits(length))


def tokens_at_once(batch_tokens: int | None, seq_len: int, *, has_gpu: bool) -> int:
    """Return the tokens of one forward: as asked for, and at least one padded window."""
    return max(padded_width(seq_len), batch_tokens or DEFAULT_BATCH_TOKENS[has_gpu])


def evaluation_section(zero: str, ranks_per_node: int) -> DeepSpeedJson:
    """Return training's zero_optimization without the optimizer, and with DeepSpeed's defaults in place of "auto"."""
    hpz_ranks = None if zero.endswith(".json") else ranks_per_node
    section = compose(read_zero_file(zero, []), hpz_ranks=hpz_ranks)["zero_optimization"]
    return {key: value for key, value in section.items() if value != "auto" and key != "offload_optimizer"}


def plan_evaluation(
    facts: ModelFacts,
    machine: Machine,
    *,
    dtype: str,
    seq_len: int,
    batch_tokens: int | None = None,
    zero: str = "auto",
) -> EvaluationPlan:
    """Choose how a model is placed for scoring. Args: `seq_len`: of the longest window; `batch_tokens`: of all ranks
    that share a batch, None for the default; `zero`: "auto" for all ways, else the one that is asked for.
    """
    job = Job(
        size=dataclasses.replace(facts.size, num_trainable=0, trainable_numels=()),  # nothing is trained
        model_config=facts.config,
        adapters=facts.adapters,
        dtype=dtype,
        seq_len=seq_len,
        attention=attention_of(facts, seq_len=seq_len, masked=False),
    )
    if zero != "auto":
        names = [zero]
    elif job.size.quantization:  # no such model is sharded (check_sharding)
        names = ["0"]
    else:
        names = [name for name in EVALUATION_NAMES if name != "3-offload" or machine.has_gpu]

    def fits_alone(window):
        attention = attention_of(facts, seq_len=window, masked=False)  # masked from the sliding window on
        longer = dataclasses.replace(job, attention=attention, seq_len=window)
        return any(_plan_scoring(name, window, longer, machine).fits for name in names)

    tokens = tokens_at_once(batch_tokens, seq_len, has_gpu=machine.has_gpu)
    plans = [_plan_scoring(name, tokens, job, machine) for name in names]
    chosen = next((plan for plan in plans if plan.fits), None)
    if chosen:
        way = f"shards over all ranks (zero {chosen.zero})"
        if chosen.zero == "0":
            way = "one copy of the model per rank"
        why = f"{way}, {chosen.batch_tokens:,} tokens at once"
    else:
        chosen = min(plans, key=lambda plan: shortage(plan, machine))
        why = f"nothing fits; the closest is zero {chosen.zero}"
    return dataclasses.replace(
        chosen,
        reason=f"{why}: {describe_memory(chosen, machine)}.",
        longest_window=longest_length(fits_alone, job.size) if job.attention == "flash" else None,
    )


def _plan_scoring(zero: str, tokens: int, job: Job, machine: Machine) -> EvaluationPlan:
    section = {"zero_optimization": evaluation_section(zero, machine.ranks_per_node)}
    layout = ZeroLayout(job, section, machine, accumulation=1)
    size = job.size
    item = job.weight_bytes
    # The backbone without gradients, or after it the hidden states twice and one tile of logits in fp32.
    products = 4 * item * (size.hidden_size + size.ffn_size)
    backbone = tokens * max(products, 0.6 * max(job.activations.layers))
    device = "cuda" if machine.has_gpu else "cpu"
    tile = min(tokens, ROW_TILE[device]) * min(size.vocab_size, VOCAB_TILE[device])
    head = tokens * 2 * item * size.hidden_size + tile * (4 + 2 * item)
    terms = [
        *device_state_terms(layout),
        Term("backbone, or hidden states and logits", int(max(backbone, head)), "the larger of both", "compute"),
        *host_terms(layout),
    ]
    terms += outside_terms(layout, terms)
    return EvaluationPlan(zero=zero, batch_tokens=tokens, **add_up(terms, machine, stage=layout.stage))
