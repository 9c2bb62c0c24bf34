"""Plans perplexity: one copy of the model per rank where it fits, else shards over all ranks, else shards in host
memory or on NVMe.

Ranks that share a window exchange its positions for heads around attention: DeepSpeed's Ulysses
(deepspeed/runtime/sequence_parallel/ulysses_sp.py, UlyssesSPAttentionHF).
"""

import dataclasses
from bisect import bisect_left
from dataclasses import dataclass
from typing import Any

from dsft.config.deepspeed import compose, read_zero_file
from dsft.errors import UserError
from dsft.models.sequence_parallel import refused_ranks
from dsft.models.size import ModelFacts, ModelSize
from dsft.planner.activations import Job
from dsft.planner.calibration import speeds_for
from dsft.planner.candidates import fit_nvme_buffers
from dsft.planner.plans import Needs, add_up, available, shortage, with_room
from dsft.planner.states import frozen_bytes, gathered, host_terms, load_terms, shards, workspace_terms
from dsft.planner.step_time import (
    GATHER_SECONDS,
    Speeds,
    attention_flops_per_token,
    collective_seconds,
    launch_seconds,
    product_seconds,
)
from dsft.planner.traced_model import Attention, attention_of
from dsft.planner.zero_layout import Term, ZeroLayout, peak_bytes
from dsft.runtime.hardware import Machine
from dsft.units import in_gib, padded_width

NAMES = ("0", "3", "3-offload")
DEFAULT_BATCH_TOKENS = {True: 16384, False: 4096}
"""Tokens of one forward on a GPU, and on a CPU. The same for every way of holding the model, since the bits of a result
depend on it.
"""
WINDOW_STEP = 1024
"""Tokens: the longest window that fits is a multiple, but for models with fewer positions."""
MOST_POSITIONS = 2**24
"""Of a window of a model without a limit."""


@dataclass(frozen=True, kw_only=True)
class EvaluationPlan(Needs):
    """One way of holding the model while scoring."""

    zero: str
    """As the option `zero` of `dsft eval` takes it."""
    batch_tokens: int
    weight_bytes: int
    """On one device, with what is gathered for a moment."""
    activation_bytes: int
    tokens_per_second: float
    """Over all ranks."""


def tokens_at_once(batch_tokens: int | None, seq_len: int, *, has_gpu: bool) -> int:
    """Return the tokens of one forward: those that are asked for, and enough for one window, as it is padded."""
    return max(padded_width(seq_len), batch_tokens or DEFAULT_BATCH_TOKENS[has_gpu])


def evaluation_section(zero: str, size: ModelSize, ranks: int, ranks_per_node: int) -> dict[str, Any]:
    """The section zero_optimization that scoring gets: that of training without its optimizer, with DeepSpeed's
    defaults where it has "auto", and with buffers for the model on so many ranks where it names NVMe.
    """
    hpz_ranks = None if zero.endswith(".json") else ranks_per_node
    section = compose(read_zero_file(zero, []), hpz_ranks=hpz_ranks)["zero_optimization"]
    fit_nvme_buffers(section, size, ranks)
    return {key: value for key, value in section.items() if value != "auto" and key != "offload_optimizer"}


@dataclass(frozen=True, kw_only=True)
class EvaluationChoice:
    """The plan that was chosen, among which, and why."""

    plan: EvaluationPlan
    candidates: tuple[EvaluationPlan, ...]
    reason: str
    longest_window: int | None
    """Tokens of the longest window that fits in some way, each in a batch of its own; it ends with the model's
    positions. 0 where none fits; None where attention holds a matrix, which grows otherwise than the activations that
    were traced.
    """
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
    zero: str = "auto",
) -> EvaluationChoice:
    """Choose how a model is held while it is scored: for `dsft eval` and for `dsft plan --perplexity`.

    Args:
        seq_len: of the longest window.
        attention: that is planned, whatever the model would take; scoring feeds no mask.
        batch_tokens: of all the ranks that share a batch; None for the default.
        sequence_parallel: ranks that share the tokens of a batch.
        zero: "auto" for all ways, else the one that is asked for.

    Raises:
        UserError: where so many ranks cannot share a window.
    """
    if refusal := refused_ranks(sequence_parallel, machine.world_size, facts.size):
        raise UserError(f"sequence_parallel={sequence_parallel}: {refusal}")
    job = Job(
        size=dataclasses.replace(facts.size, num_trainable=0, trainable_numels=()),  # nothing is trained
        model_config=facts.config,
        adapters=facts.adapters,
        dtype=dtype,
        seq_len=seq_len,
        attention=attention or attention_of(facts, seq_len=seq_len, masked=False),
    )
    speeds = speeds_for(machine, dtype=dtype)
    names = [name for name in NAMES if name != "3-offload" or machine.has_gpu]
    if job.size.quantization:  # no such model is sharded (check_sharding)
        names = ["0"]
    if zero != "auto":
        names = [zero]

    def plans_with(tokens: int, job: Job = job) -> list[EvaluationPlan]:
        return [_plan(name, tokens, job, machine, speeds, sequence_parallel) for name in names]

    def fits_alone(window: int) -> bool:
        taken = attention or attention_of(facts, seq_len=window, masked=False)  # a mask from a sliding window on
        other = job if taken == job.attention else dataclasses.replace(job, attention=taken, seq_len=window)
        return any(plan.fits for plan in plans_with(window, other))

    plans = plans_with(tokens_at_once(batch_tokens, seq_len, has_gpu=machine.has_gpu))
    if fitting := with_room(plans):
        chosen = fitting[0]
        how = f"shards over all ranks (zero {chosen.zero})" if chosen.zero != "0" else "one copy of the model per rank"
        reason = f"{how}, {chosen.batch_tokens:,} tokens at once: {in_gib(chosen.device_bytes)} needed"
    else:
        chosen = min(plans, key=lambda plan: shortage(plan, machine))
        reason = "nothing fits; the closest to fitting is" if zero == "auto" else "it does not fit:"
        reason += (
            f" zero {chosen.zero}, which needs {in_gib(chosen.device_bytes)} per"
            f" rank and {in_gib(chosen.host_bytes)} per host"
        )
    asked = f"zero={zero} (requested): " if zero != "auto" else ""
    reason = f"{asked}{reason}{available(machine)}."
    longest = None
    if job.attention == "flash":
        positions = job.size.max_positions or MOST_POSITIONS
        step = min(WINDOW_STEP, positions)
        longest = step * bisect_left(range(step, positions + 1, step), True, key=lambda window: not fits_alone(window))
    return EvaluationChoice(plan=chosen, candidates=tuple(plans), reason=reason, longest_window=longest, speeds=speeds)


def _plan(
    zero: str, batch_tokens: int, job: Job, machine: Machine, speeds: Speeds, sequence_parallel: int
) -> EvaluationPlan:
    layout = ZeroLayout(
        job.size,
        {"zero_optimization": evaluation_section(zero, job.size, machine.world_size, machine.ranks_per_node)},
        machine,
        dtype=job.dtype,
    )
    size, weights = job.size, [*host_terms(layout), *load_terms(layout)]
    # This rank's shard with what ZeRO-3 gathers for a moment, or all weights.
    weights += [*shards(layout), *gathered(layout)] if layout.stage == 3 else [Term("weights", *frozen_bytes(layout))]
    rank_tokens, traced = -(-batch_tokens // sequence_parallel), job.evaluation_activations
    # The backbone without gradients, or, after it, hidden states and a tile of the logits (dsft/perplexity/scoring.py).
    peak = traced.peak_bytes(rank_tokens, "cuda" if machine.has_gpu else "cpu")
    how = f"max(backbone {traced.backbone.formula(rank_tokens)}, hidden states and a part of the logits)"
    activations = [Term("backbone, or hidden states and part of the logits", peak, how, "compute")]
    communicators = 0
    if layout.machine.world_size > 1:
        # NCCL's: a replicated model has no engine with a group of its own; ranks that share a window have one.
        communicators = (layout.communicators if layout.stage == 3 else 1) + (sequence_parallel > 1)
    if sequence_parallel > 1:
        # What Ulysses attention holds beside the activations of one rank's tokens: q, k and v once exchanged, and two
        # more copies of q, or of its result, on their way.
        queries, keys = size.exchanged_widths(sequence_parallel)
        width = 3 * queries + 2 * keys
        how = f"{rank_tokens:,} tokens x (3 q + k + v = {width:,}) x {layout.weight_bytes} B"
        num_bytes = rank_tokens * width * layout.weight_bytes
        activations.append(Term("positions exchanged for heads", num_bytes, how, "compute"))
    terms = [*weights, *activations, *workspace_terms(machine, threads=1)]
    # One forward on every rank: products and attention of a causal sequence, gathers, and what comes from host memory
    # or NVMe.
    attention = attention_flops_per_token(size, job.seq_len) / speeds.attention_flops
    seconds = rank_tokens * (product_seconds(size, speeds, has_gpu=machine.has_gpu) + attention)
    gathers = size.num_modules if layout.stage == 3 and machine.world_size > 1 else 0
    if layout.stage == 3:
        num_bytes = layout.weight_bytes * size.num_params
        moving = collective_seconds(num_bytes, gathers, machine, speeds, speeds.link_bytes)
        shard = num_bytes / machine.world_size
        if layout.param_device != "none":
            moving += shard / speeds.host_link_bytes
        if layout.param_device == "nvme":
            moving += shard * machine.ranks_per_node / speeds.nvme_bytes
        seconds = max(seconds, moving) if speeds.overlaps else seconds + moving
    if machine.has_gpu:
        seconds = max(seconds, launch_seconds(layout) + GATHER_SECONDS * gathers)
    return EvaluationPlan(
        zero=zero,
        batch_tokens=batch_tokens,
        weight_bytes=peak_bytes(weights, "device"),
        activation_bytes=peak_bytes(activations, "device"),
        tokens_per_second=rank_tokens * machine.world_size / seconds,
        **add_up(terms, machine, speeds.outside, communicators=communicators, stage=layout.stage),
    )
