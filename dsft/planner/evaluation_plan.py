"""Plans perplexity: one copy of the model per rank where it fits, else shards over all ranks, else shards in host
memory or on NVMe.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

from dsft.config.deepspeed_json import get_value, read_zero_file
from dsft.errors import UserError
from dsft.planner.host_memory import host_terms
from dsft.planner.model_states import live_params, persistent_params
from dsft.planner.plan import HOST_SHARE, Job, overhead
from dsft.planner.speeds import Speeds
from dsft.planner.step_time import GATHERS_PER_LAYER, collective_seconds, forward_flops_per_token
from dsft.planner.terms import Term, peak_bytes
from dsft.planner.zero_layout import describe_job, frozen_bytes
from dsft.runtime.hardware import Machine
from dsft.units import DTYPE_BYTES, in_gib

NAMES = ("0", "3", "3-offload", "3-nvme")
DEFAULT_BATCH_TOKENS = {True: 16384, False: 4096}
"""Tokens of one forward on a GPU, and on a CPU. The same for every way of holding the model, since the bits of a result
depend on it.
"""


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
    binds: str


def evaluation_section(zero: str) -> dict[str, Any]:
    """The section zero_optimization that scoring gets: that of training without its optimizer, with DeepSpeed's
    defaults where it says "auto".
    """
    section = read_zero_file(zero, []).get("zero_optimization", {"stage": 0})
    return {key: value for key, value in section.items() if value != "auto" and key != "offload_optimizer"}


def all_evaluation_plans(
    job: Job, machine: Machine, speeds: Speeds, *, batch_tokens: int | None = None
) -> list[EvaluationPlan]:
    """Every way of holding the model, simplest first, with `batch_tokens` or the default."""
    if job.size.quantized_bits:
        raise UserError(["--perplexity plans a model as it lies on disk; leave out --method qlora"])
    names = [
        name for name in NAMES if (name != "3-nvme" or machine.nvme_bytes) and (name != "3-offload" or machine.has_gpu)
    ]
    batch_tokens = batch_tokens or max(DEFAULT_BATCH_TOKENS[machine.has_gpu], job.seq_len)
    return [_plan(name, batch_tokens, job, machine, speeds) for name in names]


def choose_evaluation(plans: list[EvaluationPlan], machine: Machine) -> tuple[EvaluationPlan, str]:
    """(the first that fits, or else what lacks least; one sentence why)."""
    have = (
        f"{in_gib(machine.device_bytes)} per {'GPU' if machine.has_gpu else 'rank'} and {in_gib(machine.host_bytes)}"
        " per host are there"
    )
    for plan in plans:
        if plan.fits:
            how = "one copy of the model per rank" if plan.zero == "0" else f"shards over all ranks (zero {plan.zero})"
            return plan, f"{how}, {plan.batch_tokens:,} tokens at once: {in_gib(plan.device_bytes)} needed; {have}."
    least = min(
        plans, key=lambda plan: max(plan.device_bytes / machine.device_bytes, plan.host_bytes / machine.host_bytes)
    )
    return (
        least,
        (
            f"nothing fits; what lacks least is zero {least.zero}, which needs {in_gib(least.device_bytes)} per rank"
            f" and {in_gib(least.host_bytes)} per host; {have}."
        ),
    )


def _plan(zero: str, batch_tokens: int, job: Job, machine: Machine, speeds: Speeds) -> EvaluationPlan:
    section = evaluation_section(zero)
    weights = _weight_terms(section, job, machine)
    activations = _activation_terms(job, batch_tokens, machine)
    terms = [*weights, *activations]
    if machine.has_gpu:
        terms.append(overhead(peak_bytes(terms, "device"), machine))
    device, host = peak_bytes(terms, "device"), peak_bytes(terms, "host")
    if not machine.has_gpu:
        host += machine.ranks_per_node * device
    binds = (
        "GPU memory"
        if machine.has_gpu and device > machine.device_bytes
        else "host memory"
        if host > HOST_SHARE * machine.host_bytes
        else ""
    )
    return EvaluationPlan(
        zero=zero,
        batch_tokens=batch_tokens,
        terms=tuple(terms),
        weight_bytes=peak_bytes(weights, "device"),
        activation_bytes=peak_bytes(activations, "device"),
        device_bytes=device,
        host_bytes=host,
        tokens_per_second=batch_tokens
        * machine.world_size
        / _batch_seconds(section, batch_tokens, job, machine, speeds),
        fits=not binds,
        binds=binds,
    )


def _weight_terms(section: dict[str, Any], job: Job, machine: Machine) -> list[Term]:
    """The model with nothing to train: whole, or this rank's shard with what ZeRO-3 gathers for a moment."""
    frozen = dataclasses.replace(job.size, num_trainable=0, trainable_numels=())
    state = describe_job(
        frozen,
        {"zero_optimization": section},
        world_size=machine.world_size,
        ranks_per_node=machine.ranks_per_node,
        dtype=job.dtype,
        has_gpu=machine.has_gpu,
    )
    w, psi, n = state.weight_bytes, frozen.num_params, machine.world_size
    terms = host_terms(state)
    if state.stage != 3:
        weights, how = frozen_bytes(state)
        terms.append(Term(name="weights", num_bytes=weights, formula=how))
        if machine.has_gpu:  # every rank builds the model in host memory first
            ranks = machine.ranks_per_node
            terms.append(
                Term(
                    name="weights while loading",
                    num_bytes=ranks * weights,
                    phase="load",
                    place="host",
                    formula=f"{ranks} ranks x {how}",
                )
            )
        return terms
    if state.param_device == "none":
        terms.append(Term(name="shard of the weights", num_bytes=w * psi // n, formula=f"{w} x {psi:,} / {n}"))
    if state.gathers:
        persistent, (live, most) = persistent_params(state)[0], live_params(state)
        fetched = state.zero["stage3_prefetch_bucket_size"] + max(numel for numel, _ in frozen.numels)
        terms += [
            Term(name="persistent parameters", num_bytes=w * persistent, formula=f"{w} x {persistent:,}"),
            Term(name="gathered parameters", num_bytes=w * live, formula=f"{w} x {live:,} of {most:,}"),
            Term(
                name="prefetch copies",
                num_bytes=w * min(fetched, most),
                formula=f"{w} x (prefetch bucket + parameter that fills it) = {w} x {min(fetched, most):,}",
            ),
        ]
    return terms


def _activation_terms(job: Job, batch_tokens: int, machine: Machine) -> list[Term]:
    """The backbone without gradients, or, after it, hidden states and some rows and words of the logits: whichever is
    more (dsft/perplexity/scoring.py).
    """
    activations = job.evaluation_activations
    return [
        Term(
            name="backbone, or hidden states and part of the logits",
            num_bytes=activations.peak_bytes(batch_tokens, "cuda" if machine.has_gpu else "cpu"),
            phase="compute",
            formula=(
                f"max(backbone {activations.backbone.formula(batch_tokens)}, hidden states and a part of the logits)"
            ),
        )
    ]


def _batch_seconds(section: dict[str, Any], batch_tokens: int, job: Job, machine: Machine, speeds: Speeds) -> float:
    """One forward on every rank: products and attention of a causal sequence, gathers, and what comes from host memory
    or NVMe.
    """
    size, width = job.size, DTYPE_BYTES[job.dtype]
    compute = batch_tokens * forward_flops_per_token(size, job.seq_len) / speeds.flops
    if section.get("stage") != 3:
        return compute
    moving = collective_seconds(
        width * size.num_params, GATHERS_PER_LAYER * size.num_layers, machine, speeds, speeds.link_bytes
    )
    shard = width * size.num_params / machine.world_size
    device = get_value(section, "offload_param.device") or "none"
    if device != "none":
        moving += shard / speeds.host_link_bytes
    if device == "nvme":
        moving += shard * machine.ranks_per_node / speeds.nvme_bytes
    return max(compute, moving) if speeds.overlaps else compute + moving
