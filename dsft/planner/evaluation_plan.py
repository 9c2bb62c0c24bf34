"""Plans perplexity: one copy of the model per rank where it fits, else shards over all ranks, else shards in host
memory or on NVMe.

Ranks that share a window exchange its positions for heads around attention: DeepSpeed's Ulysses
(deepspeed/runtime/sequence_parallel/ulysses_sp.py, UlyssesSPAttentionHF).
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

from dsft.config.deepspeed import read_zero_file
from dsft.errors import UserError, raise_if_any
from dsft.models.size import ModelFacts, ModelSize
from dsft.planner.calibration import speeds_for
from dsft.planner.fake_model import Attention
from dsft.planner.host_memory import host_terms
from dsft.planner.job import Job, attention_of
from dsft.planner.states import gathered, load_terms, shards
from dsft.planner.step_time import GATHERS_PER_LAYER, Speeds, collective_seconds, forward_seconds_per_token
from dsft.planner.terms import Term, add_up, peak_bytes, with_room
from dsft.planner.zero_layout import describe_layout, frozen_bytes
from dsft.runtime.hardware import Machine
from dsft.units import in_gib, padded_width

NAMES = ("0", "3", "3-offload", "3-nvme")
DEFAULT_BATCH_TOKENS = {True: 16384, False: 4096}
"""Tokens of one forward on a GPU, and on a CPU. The same for every way of holding the model, since the bits of a result
depend on it.
"""
WINDOW_STEP = 1024
"""Tokens: the longest window that fits is a multiple, but for models with fewer positions."""
MOST_POSITIONS = 2**24
"""Of a window of a model without a limit."""


@dataclass(frozen=True, kw_only=True)
class EvaluationPlan:
    """One way of holding the model while scoring."""

    zero: str
    """As the option `zero` of `dsft eval` takes it."""
    batch_tokens: int
    terms: tuple[Term, ...]
    weight_bytes: int
    """On one device, with what is gathered for a moment."""
    activation_bytes: int
    device_bytes: int
    host_bytes: int
    """Of one node."""
    tokens_per_second: float
    """Over all ranks."""
    fits: bool
    low_headroom: bool
    limiting_resource: str


def default_batch_tokens(seq_len: int, *, has_gpu: bool) -> int:
    """Return the tokens of one forward where the user names none: enough for one window, as it is padded."""
    return max(padded_width(seq_len), DEFAULT_BATCH_TOKENS[has_gpu])


def evaluation_section(zero: str) -> dict[str, Any]:
    """The section zero_optimization that scoring gets: that of training without its optimizer, with DeepSpeed's
    defaults where it says "auto".
    """
    section = read_zero_file(zero, []).get("zero_optimization", {"stage": 0})
    return {key: value for key, value in section.items() if value != "auto" and key != "offload_optimizer"}


@dataclass(frozen=True, kw_only=True)
class EvaluationChoice:
    """The plan that was chosen, among which, and why."""

    plan: EvaluationPlan
    candidates: tuple[EvaluationPlan, ...]
    reason: str
    longest_window: int | None
    """As `longest_window` returns it."""
    speeds: Speeds


def plan_evaluation(
    facts: ModelFacts,
    machine: Machine,
    *,
    dtype: str,
    seq_len: int,
    attention: Attention | None = None,
    batch_tokens: int | None = None,
    sequence_parallel: int = 1,
) -> EvaluationChoice:
    """Choose how a model is held while it is scored: for `dsft eval` and for `dsft plan --perplexity`.

    Args:
        seq_len: of the longest window.
        attention: that is planned, whatever the model would take; scoring feeds no mask.
        batch_tokens: of all the ranks that share a batch; None for the default.
        sequence_parallel: ranks that share the tokens of a batch.

    Raises:
        UserError: where so many ranks cannot share a window.
    """
    refusal = refused_number(sequence_parallel, machine.world_size)
    if not refusal and (line := refused_heads(facts.size, size=sequence_parallel, world=machine.world_size)):
        refusal = f"sequence_parallel={sequence_parallel}: {line}"
    raise_if_any([refusal] if refusal else [])
    job = Job(
        size=facts.size,
        model_config=facts.config,
        adapters=facts.adapters,
        dtype=dtype,
        seq_len=seq_len,
        attention=attention or attention_of(facts, seq_len=seq_len, masked=False),
    )
    speeds = speeds_for(machine, dtype=dtype)
    plans = all_evaluation_plans(job, machine, speeds, batch_tokens=batch_tokens, sequence_parallel=sequence_parallel)
    chosen = min(  # where nothing fits, the closest to fitting
        plans, key=lambda plan: max(plan.device_bytes / machine.device_bytes, plan.host_bytes / machine.host_bytes)
    )
    reason = (
        f"nothing fits; the closest to fitting is zero {chosen.zero}, which needs {in_gib(chosen.device_bytes)} per"
        f" rank and {in_gib(chosen.host_bytes)} per host"
    )
    if fitting := with_room(plans):
        chosen = fitting[0]
        how = f"shards over all ranks (zero {chosen.zero})" if chosen.zero != "0" else "one copy of the model per rank"
        reason = f"{how}, {chosen.batch_tokens:,} tokens at once: {in_gib(chosen.device_bytes)} needed"
    reason += f"; available: {in_gib(machine.device_bytes)} per {'GPU' if machine.has_gpu else 'rank'}"
    reason += f" and {in_gib(machine.host_bytes)} per host."
    return EvaluationChoice(
        plan=chosen,
        candidates=tuple(plans),
        reason=reason,
        longest_window=longest_window(job, machine, speeds, sequence_parallel=sequence_parallel),
        speeds=speeds,
    )


def all_evaluation_plans(
    job: Job, machine: Machine, speeds: Speeds, *, batch_tokens: int | None = None, sequence_parallel: int = 1
) -> list[EvaluationPlan]:
    """Every way of holding the model, simplest first, with `batch_tokens` or the default.

    Args:
        sequence_parallel: ranks that share the tokens of a batch.
    """
    if job.size.quantization and job.size.lora_r:
        raise UserError(["--perplexity plans a model as it lies on disk; leave out --method qlora"])
    batch_tokens = batch_tokens or default_batch_tokens(job.seq_len, has_gpu=machine.has_gpu)
    return [_plan(name, batch_tokens, job, machine, speeds, sequence_parallel) for name in _names(job, machine)]


def longest_window(job: Job, machine: Machine, speeds: Speeds, *, sequence_parallel: int = 1) -> int | None:
    """Return the tokens of the longest window that fits in some way, each in a batch of its own.

    It ends with the model's positions; 0 where none fits. None where attention holds a matrix, which grows otherwise
    than the activations that were traced.
    """
    if job.attention != "flash":
        return None
    positions = job.size.max_positions or MOST_POSITIONS
    step = min(WINDOW_STEP, positions)
    low, high = 0, positions // step
    while low < high:
        middle = (low + high + 1) // 2
        fits = any(
            _plan(name, middle * step, job, machine, speeds, sequence_parallel).fits for name in _names(job, machine)
        )
        low, high = (middle, high) if fits else (low, middle - 1)
    return low * step


def _names(job: Job, machine: Machine) -> list[str]:
    if job.size.quantization:  # no such model is sharded (check_sharding)
        return ["0"]
    return [
        name for name in NAMES if (name != "3-nvme" or machine.nvme_bytes) and (name != "3-offload" or machine.has_gpu)
    ]


def _plan(
    zero: str, batch_tokens: int, job: Job, machine: Machine, speeds: Speeds, sequence_parallel: int
) -> EvaluationPlan:
    layout = describe_layout(
        dataclasses.replace(job.size, num_trainable=0, trainable_numels=()),  # nothing is trained
        {"zero_optimization": evaluation_section(zero)},
        world_size=machine.world_size,
        ranks_per_node=machine.ranks_per_node,
        dtype=job.dtype,
        has_gpu=machine.has_gpu,
    )
    size, weights = job.size, [*host_terms(layout), *load_terms(layout)]
    if layout.stage == 3:  # this rank's shard with what ZeRO-3 gathers for a moment
        weights += [*shards(layout), *gathered(layout)]
    else:
        num_bytes, how = frozen_bytes(layout)
        weights.append(Term(name="weights", num_bytes=num_bytes, formula=how))
    rank_tokens = -(-batch_tokens // sequence_parallel)
    # The backbone without gradients, or, after it, hidden states and a tile of the logits (dsft/perplexity/scoring.py).
    traced = job.evaluation_activations
    activations = [
        Term(
            name="backbone, or hidden states and part of the logits",
            num_bytes=traced.peak_bytes(rank_tokens, "cuda" if machine.has_gpu else "cpu"),
            phase="compute",
            formula=f"max(backbone {traced.backbone.formula(rank_tokens)}, hidden states and a part of the logits)",
        )
    ]
    communicators = 0
    if layout.world_size > 1:
        # NCCL's: a replicated model has no engine with a group of its own; ranks that share a window have one.
        communicators = (layout.communicators if layout.stage == 3 else 1) + (sequence_parallel > 1)
    if sequence_parallel > 1:
        # What Ulysses attention holds beside the activations of one rank's tokens: q, k and v once exchanged, and two
        # more copies of q, or of its result, on their way.
        repeats = max(1, sequence_parallel // max(1, size.kv_size // size.head_dim))
        width = 3 * size.num_heads * size.head_dim + 2 * size.kv_size * repeats
        activations.append(
            Term(
                name="positions exchanged for heads",
                num_bytes=rank_tokens * width * layout.weight_bytes,
                phase="compute",
                formula=f"{rank_tokens:,} tokens x (3 q + k + v = {width:,}) x {layout.weight_bytes} B",
            )
        )
    terms, needs = add_up(
        [*weights, *activations], machine, speeds.outside, communicators=communicators, stage=layout.stage
    )
    # One forward on every rank: products and attention of a causal sequence, gathers, and what comes from host memory
    # or NVMe.
    seconds = rank_tokens * forward_seconds_per_token(size, job.seq_len, speeds)
    if layout.stage == 3:
        gathers, num_bytes = GATHERS_PER_LAYER * size.num_layers, layout.weight_bytes * size.num_params
        moving = collective_seconds(num_bytes, gathers, machine, speeds, speeds.link_bytes)
        shard = num_bytes / machine.world_size
        if layout.param_device != "none":
            moving += shard / speeds.host_link_bytes
        if layout.param_device == "nvme":
            moving += shard * machine.ranks_per_node / speeds.nvme_bytes
        seconds = max(seconds, moving) if speeds.overlaps else seconds + moving
    return EvaluationPlan(
        zero=zero,
        batch_tokens=batch_tokens,
        terms=tuple(terms),
        weight_bytes=peak_bytes(weights, "device"),
        activation_bytes=peak_bytes(activations, "device"),
        device_bytes=needs.device_bytes,
        host_bytes=needs.host_bytes,
        tokens_per_second=rank_tokens * machine.world_size / seconds,
        fits=not needs.limiting_resource,
        low_headroom=needs.low_headroom,
        limiting_resource=needs.limiting_resource,
    )


def refused_number(size: int, world: int) -> str:
    """Say why the ranks cannot form teams of `size`; empty where they can."""
    if size <= 1 or world % size == 0:  # what is below 1 is a problem of the options
        return ""
    works = [number for number in range(1, world + 1) if world % number == 0]
    return f"sequence_parallel={size}: must divide the number of ranks, which is {world}; use {_one_of(works)}"


def refused_heads(model: ModelSize, *, size: int, world: int) -> str:
    """Say why `size` of `world` ranks cannot share the heads of a model; empty where they can."""
    heads, key_heads = model.num_heads, max(1, model.kv_size // model.head_dim)
    if _shares_heads(heads, key_heads, size):
        return ""
    works = [
        number for number in range(1, world + 1) if world % number == 0 and _shares_heads(heads, key_heads, number)
    ]
    return f"its {heads} heads and {key_heads} key heads cannot be shared by {size} ranks; use {_one_of(works)}"


def _shares_heads(heads: int, key_heads: int, size: int) -> bool:
    """Tell whether `size` ranks can share the heads: key heads may also be repeated."""
    return heads % size == 0 and (key_heads % size == 0 or size % key_heads == 0)


def _one_of(numbers: list[int]) -> str:
    *first, last = map(str, numbers)
    return f"{', '.join(first)} or {last}" if first else last
