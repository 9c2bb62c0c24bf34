"""Plans perplexity: one copy of the model per rank where it fits, else shards over all ranks, else shards in host
memory.

Ranks that share a window exchange its positions for heads around attention: DeepSpeed's Ulysses
(deepspeed/runtime/sequence_parallel/ulysses_sp.py, UlyssesSPAttentionHF).
"""

import dataclasses
from bisect import bisect_left
from dataclasses import dataclass
from typing import Any

from dsft.config.deepspeed import compose, read_zero_file
from dsft.errors import UserError
from dsft.models.chunked_head import ROW_TILE, VOCAB_TILE
from dsft.models.measure import ModelFacts
from dsft.models.sequence_parallel import refused_ranks
from dsft.planner.activations import Attention, attention_of
from dsft.planner.choose import Needs, add_up, available, needed, shortage
from dsft.planner.memory import Job, Term, ZeroLayout, host_terms, outside_terms
from dsft.planner.speed import (
    GATHER_SECONDS,
    attention_flops_per_token,
    collective_seconds,
    launch_seconds,
    product_seconds,
    speeds_of,
)
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


@dataclass(frozen=True, kw_only=True)
class EvaluationChoice:
    """The plan that was chosen, among which, and why."""

    plan: EvaluationPlan
    candidates: tuple[EvaluationPlan, ...]
    reason: str
    longest_window: int | None
    """Tokens of the longest window that fits in some way, each in a batch of its own; 0 where none fits; None where
    attention holds a matrix.
    """


def tokens_at_once(batch_tokens: int | None, seq_len: int, *, has_gpu: bool) -> int:
    """Return the tokens of one forward: those that are asked for, and enough for one window, as it is padded."""
    return max(padded_width(seq_len), batch_tokens or DEFAULT_BATCH_TOKENS[has_gpu])


def evaluation_section(zero: str, ranks_per_node: int) -> dict[str, Any]:
    """The section zero_optimization that scoring gets: that of training without its optimizer, with DeepSpeed's
    defaults where it has "auto".
    """
    hpz_ranks = None if zero.endswith(".json") else ranks_per_node
    section = compose(read_zero_file(zero, []), hpz_ranks=hpz_ranks)["zero_optimization"]
    return {key: value for key, value in section.items() if value != "auto" and key != "offload_optimizer"}


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
        sequence_parallel=sequence_parallel,
    )
    if zero != "auto":
        names = [zero]
    elif job.size.quantization:  # no such model is sharded (check_sharding)
        names = ["0"]
    else:
        names = [name for name in NAMES if name != "3-offload" or machine.has_gpu]

    def plans_with(tokens: int, job: Job) -> list[EvaluationPlan]:
        return [_plan(name, tokens, job, machine) for name in names]

    def fits_alone(window: int) -> bool:
        taken = attention or attention_of(facts, seq_len=window, masked=False)  # a mask from a sliding window on
        longer = dataclasses.replace(job, attention=taken, seq_len=window)
        return any(plan.fits for plan in plans_with(window, longer))

    plans = plans_with(tokens_at_once(batch_tokens, seq_len, has_gpu=machine.has_gpu), job)
    fitting = [plan for plan in plans if plan.fits]
    asked = f"zero={zero} (requested): " if zero != "auto" else ""
    if fitting:
        chosen = fitting[0]
        way = "one copy of the model per rank" if chosen.zero == "0" else f"shards over all ranks (zero {chosen.zero})"
        why = f"{way}, {chosen.batch_tokens:,} tokens at once: {in_gib(chosen.device_bytes)} needed"
    else:
        chosen = min(plans, key=lambda plan: shortage(plan, machine))
        why = f"nothing fits; the closest is zero {chosen.zero}, which needs {needed(chosen, machine)}"
    longest = None
    if job.attention == "flash":
        positions = job.size.max_positions or MOST_POSITIONS
        step = min(WINDOW_STEP, positions)
        longest = step * bisect_left(range(step, positions + 1, step), True, key=lambda window: not fits_alone(window))
    return EvaluationChoice(
        plan=chosen,
        candidates=tuple(plans),
        reason=f"{asked}{why}; {available(machine)}.",
        longest_window=longest,
    )


def _plan(zero: str, batch_tokens: int, job: Job, machine: Machine) -> EvaluationPlan:
    section = {"zero_optimization": evaluation_section(zero, machine.ranks_per_node)}
    layout = ZeroLayout(job, section, machine, accumulation=1)
    size = job.size
    item = job.weight_bytes
    ranks = job.sequence_parallel
    tokens = -(-batch_tokens // ranks)
    weights = layout.frozen_bytes
    if layout.stage == 3:
        shard = item * size.num_params // machine.world_size
        prefetched = layout.zero["stage3_prefetch_bucket_size"] + size.largest_gathered_params
        weights = item * (layout.persistent_params + layout.gathered_params + prefetched)
        weights += shard if layout.param_device == "none" else 0
    # The backbone without gradients, or, after it, hidden states twice and a tile of the logits in fp32.
    measured = job.activations
    backbone = tokens * max(4 * item * (size.hidden_size + size.ffn_size), 0.6 * max(measured.layers))
    device = "cuda" if machine.has_gpu else "cpu"
    tile = min(tokens, ROW_TILE[device]) * min(size.vocab_size, VOCAB_TILE[device])
    head = tokens * 2 * item * size.hidden_size + tile * (4 + 2 * item)
    terms = [
        Term("weights, and what is gathered", weights, "all, or shards and live parameters"),
        Term("backbone, or hidden states and logits", int(max(backbone, head)), "the larger of both", "compute"),
        *host_terms(layout),
    ]
    if ranks > 1:  # queries, keys and values once exchanged, and two more copies of queries on their way
        queries, keys = size.exchanged_widths(ranks)
        exchanged = tokens * (3 * queries + 2 * keys) * item
        terms.append(Term("positions exchanged for heads", exchanged, "tokens x width", "compute"))
    terms += outside_terms(layout, terms)

    speeds = speeds_of(machine, dtype=job.dtype)
    attention = attention_flops_per_token(size, job.seq_len) / speeds.flops
    seconds = tokens * (product_seconds(size, speeds, machine) + attention)
    if layout.stage == 3:
        num_bytes = item * size.num_params
        moving = collective_seconds(num_bytes, machine, speeds)
        if layout.param_device != "none":
            moving += num_bytes / machine.world_size / speeds.host_link_bytes
        seconds = max(seconds, moving)
    if machine.has_gpu:
        gathers = size.num_modules if layout.stage == 3 and machine.world_size > 1 else 0
        seconds = max(seconds, launch_seconds(layout) + GATHER_SECONDS * gathers)
    return EvaluationPlan(
        zero=zero,
        batch_tokens=batch_tokens,
        weight_bytes=weights,
        activation_bytes=int(max(backbone, head)),
        tokens_per_second=tokens * machine.world_size / seconds,
        **add_up(terms, machine, stage=layout.stage),
    )
