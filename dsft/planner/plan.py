"""Chooses a DeepSpeed configuration: predicts memory and time of every candidate and takes the fastest that fits. Pure
arithmetic.

    job = Job(size=facts.size, model_config=facts.config, dtype="bfloat16", seq_len=4096)
    plans = all_plans(job, machine, speeds_of(machine, dtype="bfloat16"))
    chosen = choose(plans, machine)

A prediction is made from the very DeepSpeed configuration that training would get: `plan.deepspeed_config`.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from peft import LoraConfig
from transformers import PreTrainedConfig

from dsft.config.deepspeed_json import compose, get_value, read_zero_file
from dsft.models.size import ModelFacts, ModelSize
from dsft.planner.activations import (
    EvaluationActivations,
    Loss,
    TrainingActivations,
    evaluation_activations,
    training_activations,
)
from dsft.planner.fake_model import Attention
from dsft.planner.model_states import load_terms, state_terms
from dsft.planner.speeds import Speeds
from dsft.planner.step_time import StepTime, step_time
from dsft.planner.terms import Term, peak_bytes
from dsft.planner.zero_layout import resolve_auto
from dsft.runtime.hardware import Machine
from dsft.units import GiB, in_gib

SEQUENCES_PER_STEP = 64
"""Sequences of one optimizer step over all ranks where nothing is said; at least one per rank."""
LARGEST_MICRO_BATCH = 64
SMALL_LIVE_PARAMS = 50_000_000
"""stage3_max_live_parameters and stage3_max_reuse_distance, lowered together (one alone changes nothing), where 1e9
would not fit.
"""
HOST_SHARE = 0.95
"""Of a node's memory; the rest is the system's."""
CONTEXT_BYTES = 2**29
"""CUDA's context on one GPU: outside of what torch allocates."""
COMMUNICATION_BYTES = 2**29
"""NCCL's buffers on one GPU, where there are several: also outside of torch."""
FRAGMENTATION = 0.03
"""What the allocator holds beyond what is used, with expandable segments."""
OVERHEAD = "context, NCCL and fragmentation"
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


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is to be trained, as far as memory and time depend on it."""

    size: ModelSize
    model_config: PreTrainedConfig
    dtype: str = "bfloat16"
    """Of the computation. bfloat16 and float16 have fp32 master weights; with float32 everything is fp32."""
    seq_len: int = 1024
    attention: Attention = "flash"
    loss: Loss = "hf"
    adapters: LoraConfig | None = None
    fused_optimizer: bool = True
    """torch's fused AdamW, transformers' default."""
    micro_batch: int | None = None
    """Sequences of one forward on one rank; None lets the plan choose."""
    accumulation: int | None = None
    sequences_per_step: int | None = None
    """Of one optimizer step over all ranks."""
    checkpointing: bool | None = None
    """As the user set it; None lets the plan decide."""

    @cached_property
    def activations(self) -> TrainingActivations:
        return training_activations(self.size, self.model_config, loss=self.loss, **self._traced())

    @cached_property
    def evaluation_activations(self) -> EvaluationActivations:
        return evaluation_activations(self.size, self.model_config, **self._traced())

    def _traced(self) -> dict[str, Any]:
        names = ("dtype", "attention", "seq_len", "adapters")
        return {name: getattr(self, name) for name in names}


def attention_of(facts: ModelFacts, *, seq_len: int, padded: bool) -> Attention:
    """Returns what attention holds: transformers leaves sdpa's mask out only where a batch has no padding and no
    sliding window is reached.
    """
    if facts.attn_implementation != "sdpa":
        return "eager" if facts.attn_implementation == "eager" else "flash"
    window = getattr(facts.config.get_text_config(), "sliding_window", None)
    return "sdpa" if padded or (window and seq_len >= window) else "flash"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One DeepSpeed configuration with its predicted memory and time."""

    zero: str
    """Name as the option `zero` takes it: 0, 1, 2, 3, 3-hpz, 2-offload ... or the path of a DeepSpeed JSON."""
    activation_checkpointing: bool
    micro_batch: int
    """Sequences of one forward on one rank."""
    accumulation: int
    """Micro batches of one optimizer step."""
    deepspeed_config: dict[str, Any]
    """What training gets; "auto" numbers are left to transformers."""
    terms: tuple[Term, ...]
    """Every part of the prediction."""
    activation_bytes: int
    """Of these, activations, logits and loss of one micro batch on one rank."""
    time: StepTime
    device_bytes: int
    """Peak on one GPU (one rank, on CPU), context and communication buffers included."""
    host_bytes: int
    """Host memory of one node, all its ranks together."""
    ranks_per_node: int
    has_gpu: bool
    fits: bool
    binds: str
    """Of "GPU memory", "host memory", "NVMe" and "locked memory" what is too small, joined by " and "; empty where it
    fits.
    """

    @property
    def allocated_bytes(self) -> int:
        """Peak that torch itself allocates on one device: `device_bytes` without context, NCCL and fragmentation."""
        return peak_bytes((term for term in self.terms if term.name != OVERHEAD), "device")

    @property
    def training_host_bytes(self) -> int:
        """`host_bytes` without loading."""
        terms = [term for term in self.terms if term.phase != "load"]
        return peak_bytes(terms, "host") + (0 if self.has_gpu else self.ranks_per_node * peak_bytes(terms, "device"))

    @property
    def reserved_bytes(self) -> int:
        """What torch's allocator then holds on one device."""
        return int((1 + FRAGMENTATION) * self.allocated_bytes)

    @property
    def label(self) -> str:
        checkpointing = " with activation checkpointing" if self.activation_checkpointing else ""
        return f"ZeRO {self.zero}{checkpointing}, micro batch {self.micro_batch} x {self.accumulation} accumulated"

    def part_bytes(self, phase: str) -> int:
        return sum(term.num_bytes for term in self.terms if term.place == "device" and term.phase == phase)


def all_plans(
    job: Job, machine: Machine, speeds: Speeds, *, zero: str = "auto", zero_file: dict[str, Any] | None = None
) -> list[Plan]:
    """The best plan of each candidate (configuration, activation checkpointing): over its micro batches, the fastest
    that fits, else the smallest.

    Args:
        zero: "auto" for all candidates, else the one of that name.
        zero_file: the content of the DeepSpeed JSON where `zero` is a path.
    """
    names = candidate_names(job.size, machine) if zero == "auto" else [zero]
    choices = [False, True] if job.checkpointing is None else [job.checkpointing]
    plans = []
    for name in names:
        for checkpointing in choices:
            found = [
                _fitted(name, zero_file, checkpointing, micro, steps, job, machine, speeds)
                for micro, steps in batches(job, machine.world_size)
            ]
            plans.append(_best_batch(found, machine))
    return plans


def _best_batch(found: list[Plan], machine: Machine) -> Plan:
    """The fastest that fits, else the smallest. The time model sees no launch overhead, so of equally fast ones the
    largest micro batch that leaves a fifth of the memory free.
    """
    fitting = [plan for plan in found if plan.fits]
    if not fitting:
        return found[0]
    fastest = max(plan.time.tokens_per_second for plan in fitting)
    equal = [plan for plan in fitting if plan.time.tokens_per_second >= 0.99 * fastest]
    roomy = [plan for plan in equal if plan.device_bytes <= 0.8 * machine.device_bytes]
    return roomy[-1] if roomy else equal[0]


def choose(plans: list[Plan], machine: Machine) -> Plan:
    """The fastest that fits; where nothing fits, the one that lacks least. A gain below 1 % is no reason to leave a
    simpler one.
    """
    fitting = [plan for plan in plans if plan.fits]
    if not fitting:
        return min(plans, key=lambda plan: shortage(plan, machine))
    fastest = max(plan.time.tokens_per_second for plan in fitting)
    return next(plan for plan in fitting if plan.time.tokens_per_second >= 0.99 * fastest)


def candidate_names(size: ModelSize, machine: Machine) -> list[str]:
    """Configurations that make sense for this model and machine."""
    left_out = set()
    if machine.world_size == 1:
        left_out |= {"0", "2"}  # nothing to shard: 1 is the same with fewer buffers
    if machine.nodes == 1 or machine.ranks_per_node == 1:
        left_out.add("3-hpz")
    if not machine.has_gpu:
        left_out |= {name for name in NAMES if "offload" in name}  # device and host are the same memory
    if not machine.nvme_bytes:
        left_out.add("3-nvme")
    if (
        size.quantized_bits
    ):  # a quantised base is neither sharded by ZeRO-3 nor offloaded: transformers skips zero.Init for it
        left_out |= {name for name in NAMES if name not in ("0", "1", "2")}
    return [name for name in NAMES if name not in left_out]


def batches(job: Job, world_size: int) -> Iterator[tuple[int, int]]:
    """(micro batch, accumulation) to try, smallest micro batch first; each makes up the sequences of a step on all
    ranks.
    """
    if job.micro_batch:
        per_step = job.sequences_per_step or job.micro_batch * world_size
        yield job.micro_batch, job.accumulation or max(1, per_step // (job.micro_batch * world_size))
        return
    per_rank = max(1, (job.sequences_per_step or SEQUENCES_PER_STEP) // world_size)
    for micro in range(1, min(per_rank, LARGEST_MICRO_BATCH) + 1):
        if per_rank % micro == 0:
            yield micro, per_rank // micro


def _fitted(
    name: str,
    zero_file: dict[str, Any] | None,
    checkpointing: bool,
    micro: int,
    accumulation: int,
    job: Job,
    machine: Machine,
    speeds: Speeds,
) -> Plan:
    """The plan of one candidate, with the first of its settings that fits, else the last and leanest."""
    for deepspeed_config in _settings(name, zero_file, job, machine):
        plan = _plan(name, deepspeed_config, checkpointing, micro, accumulation, job, machine, speeds)
        if plan.fits:
            break
    return plan


def _settings(name: str, zero_file: dict[str, Any] | None, job: Job, machine: Machine) -> Iterator[dict[str, Any]]:
    """The configuration with numbers for this model, then with less memory; a JSON of the user's stays as it is."""
    config = compose(zero_file or read_zero_file(name, []), ranks_per_node=machine.ranks_per_node)
    if zero_file is not None:
        yield config
        return
    zero = config["zero_optimization"]
    for part in ("offload_optimizer", "offload_param"):
        if machine.nvme_path and get_value(zero, f"{part}.nvme_path"):
            zero[part]["nvme_path"] = machine.nvme_path
    if zero.get("stage") == 3:
        zero["sub_group_size"] = sub_group_size(job.size, machine.world_size)
    for key in ("reduce_bucket_size", "allgather_bucket_size"):
        if isinstance(zero.get(key), int):  # allocated whole; some buckets per step are enough to overlap
            enough = max(job.size.num_trainable // 8, max(numel for numel, _ in job.size.trainable_numels))
            zero[key] = min(zero[key], -(-enough // 1024) * 1024)  # DeepSpeed wants an even number
    shares = [1.0]
    if "ratio" in (zero.get("offload_optimizer") or {}):
        shares = [0.2, 0.4, 0.6, 0.8]
        zero["sub_group_size"] = min(
            zero["sub_group_size"], max(1, job.size.num_trainable // machine.world_size // 10)
        )  # whole sub-groups go to one side
    for share in shares:
        if "ratio" in (zero.get("offload_optimizer") or {}):
            zero = zero | {"offload_optimizer": zero["offload_optimizer"] | {"ratio": share}}
        yield config | {"zero_optimization": zero}
    if zero.get("stage") == 3:
        zero = zero | {"stage3_max_live_parameters": SMALL_LIVE_PARAMS, "stage3_max_reuse_distance": SMALL_LIVE_PARAMS}
        yield config | {"zero_optimization": zero}
    offloaded = [part for part in ("offload_optimizer", "offload_param") if get_value(zero, f"{part}.pin_memory")]
    if offloaded:  # pinned memory is rounded up to powers of two, pageable memory is not
        yield config | {"zero_optimization": zero | {part: zero[part] | {"pin_memory": False} for part in offloaded}}


def sub_group_size(size: ModelSize, world_size: int) -> int:
    """Elements of the pieces in which a rank's shard is updated: they fill a power of two just about, which pinned
    memory is rounded up to.

    DeepSpeed closes a group once it has reached the number, so the largest shard of one parameter is left as margin.
    """
    margin = -(-max(numel for numel, _ in size.trainable_numels) // world_size)
    whole = 2**28
    while whole < 4 * margin:
        whole *= 2
    return whole - margin


def _plan(
    name: str,
    deepspeed_config: dict[str, Any],
    checkpointing: bool,
    micro: int,
    accumulation: int,
    job: Job,
    machine: Machine,
    speeds: Speeds,
) -> Plan:
    on = {
        "world_size": machine.world_size,
        "ranks_per_node": machine.ranks_per_node,
        "dtype": job.dtype,
        "has_gpu": machine.has_gpu,
    }
    with_steps = deepspeed_config | {"gradient_accumulation_steps": accumulation}
    terms = state_terms(job.size, with_steps, fused_optimizer=job.fused_optimizer, **on) + load_terms(
        job.size, with_steps, **on
    )
    activations = job.activations.terms(micro * job.seq_len, checkpointing)
    terms += activations
    if machine.has_gpu:
        terms.append(overhead(peak_bytes(terms, "device"), machine))
    device, host, nvme = peak_bytes(terms, "device"), peak_bytes(terms, "host"), peak_bytes(terms, "nvme")
    if not machine.has_gpu:
        host += machine.ranks_per_node * device  # CPU ranks hold everything in host memory
    lacking = {
        "GPU memory": machine.has_gpu and device > machine.device_bytes,
        "host memory": host > HOST_SHARE * machine.host_bytes,
        "NVMe": nvme > machine.nvme_bytes,
        "locked memory": (
            bool(nvme) and machine.memlock_bytes is not None and _locked_bytes(terms, machine) > machine.memlock_bytes
        ),
    }
    binds = " and ".join(name for name, lacks in lacking.items() if lacks)
    time = step_time(
        job.size,
        resolve_auto(deepspeed_config["zero_optimization"], job.size),
        machine,
        speeds,
        micro_batch=micro,
        accumulation=accumulation,
        seq_len=job.seq_len,
        checkpointing=checkpointing,
        dtype=job.dtype,
    )
    return Plan(
        zero=name,
        activation_checkpointing=checkpointing,
        micro_batch=micro,
        accumulation=accumulation,
        deepspeed_config=deepspeed_config,
        terms=tuple(terms),
        activation_bytes=sum(term.num_bytes for term in activations),
        time=time,
        device_bytes=device,
        host_bytes=host,
        ranks_per_node=machine.ranks_per_node,
        has_gpu=machine.has_gpu,
        fits=not binds,
        binds=binds,
    )


def overhead(allocated_bytes: int, machine: Machine) -> Term:
    """What one GPU holds beyond torch's allocations."""
    communication = COMMUNICATION_BYTES if machine.world_size > 1 else 0
    return Term(
        name=OVERHEAD,
        num_bytes=CONTEXT_BYTES + communication + int(FRAGMENTATION * allocated_bytes),
        formula=(
            f"{CONTEXT_BYTES / GiB:.1f} GiB context + {communication / GiB:.1f} GiB NCCL + {FRAGMENTATION:.0%} of what"
            " is allocated"
        ),
    )


def _locked_bytes(terms: list[Term], machine: Machine) -> int:
    """What one rank locks for transfers to NVMe."""
    return sum(term.num_bytes for term in terms if term.name.startswith("swap buffers")) // machine.ranks_per_node


def shortage(plan: Plan, machine: Machine) -> float:
    """How much of the scarcest resource is asked for, over what is there."""
    device = plan.device_bytes / machine.device_bytes if machine.has_gpu else 0.0
    nvme = peak_bytes(plan.terms, "nvme") / machine.nvme_bytes if machine.nvme_bytes else 0.0
    return max(device, nvme, plan.host_bytes / (HOST_SHARE * machine.host_bytes))


def reason(chosen: Plan, plans: list[Plan], machine: Machine, *, zero: str = "auto", resumes: bool = False) -> str:
    """One sentence why, and one what the next better configuration would need."""
    have = (
        f"{in_gib(machine.device_bytes)} per {'GPU' if machine.has_gpu else 'rank'} and {in_gib(machine.host_bytes)}"
        " per host are there"
    )
    if not chosen.fits:
        if zero != "auto":
            return f"zero={zero} cannot fit: {chosen.label} needs {need(chosen)}; {have}."
        return f"nothing fits; what lacks least is {chosen.label}, which needs {need(chosen)}; {have}."
    speed = f"{chosen.time.step_seconds:.3g} s per step, {chosen.time.tokens_per_second:,.0f} tokens/s predicted"
    why = f"{chosen.label} is the fastest that fits ({speed})"
    if zero != "auto":
        why = (
            f"zero={zero} {'is what the resumed run began with' if resumes else 'was asked for'}, and {chosen.label}"
            f" fits ({speed})"
        )
    better = [
        plan for plan in plans if not plan.fits and plan.time.tokens_per_second > 1.01 * chosen.time.tokens_per_second
    ]
    if not better:
        return f"{why}; {have}."
    nearest = min(better, key=lambda plan: shortage(plan, machine))
    gain = nearest.time.tokens_per_second / chosen.time.tokens_per_second
    return f"{why}; {have}. With {need(nearest)}, {nearest.label} would fit, {gain:.1f} times as fast."


def need(plan: Plan) -> str:
    """What a plan that does not fit asks for."""
    needs = {
        "GPU memory": f"{in_gib(plan.device_bytes)} per GPU",
        "host memory": f"{in_gib(plan.host_bytes / HOST_SHARE)} of memory per host",
        "NVMe": f"{in_gib(peak_bytes(plan.terms, 'nvme'))} of NVMe per node",
        "locked memory": "a higher limit of locked memory (ulimit -l unlimited) for the buffers to NVMe",
    }
    return " and ".join(needs[name] for name in plan.binds.split(" and "))


def as_dict(plan: Plan) -> dict[str, Any]:
    """For JSON: everything, with the sums that tables show."""
    return dataclasses.asdict(plan) | {"tokens_per_second": plan.time.tokens_per_second}
