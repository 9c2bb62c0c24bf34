"""Plans perplexity: one copy of the model per rank where it fits, else shards over all ranks, else shards in host memory or on NVMe."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from dsft.machine import GiB, Machine
from dsft.planner.hardware import Speeds
from dsft.planner.plan import HOST_SHARE, Job
from dsft.planner.states import state_terms
from dsft.planner.step_time import GATHERS_PER_LAYER, collective_seconds
from dsft.planner.terms import Term, peak_bytes
from dsft.zero_config import get_value, read_zero_file

NAMES = ("0", "3", "3-offload", "3-nvme")
DEFAULT_BATCH_TOKENS = {True: 16384, False: 4096}
"""Tokens of one forward on a GPU, and on a CPU. The same for every way of holding the model, since the bits of a result depend on it."""


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
    """The section zero_optimization that scoring gets: that of training without its optimizer."""
    section = read_zero_file(zero, []).get("zero_optimization", {"stage": 0})
    return {key: value for key, value in section.items() if key != "offload_optimizer"}


def all_evaluation_plans(job: Job, machine: Machine, speeds: Speeds, *, batch_tokens: int | None = None) -> list[EvaluationPlan]:
    """Every way of holding the model, simplest first, with `batch_tokens` or the default."""
    names = [name for name in NAMES if (name != "3-nvme" or machine.nvme_bytes) and (name != "3-offload" or machine.has_gpu)]
    batch_tokens = batch_tokens or max(DEFAULT_BATCH_TOKENS[machine.has_gpu], job.seq_len)
    return [_plan(name, batch_tokens, job, machine, speeds) for name in names]


def choose_evaluation(plans: list[EvaluationPlan], machine: Machine) -> tuple[EvaluationPlan, str]:
    """(the first that fits, or else what lacks least; one sentence why)."""
    have = f"{machine.device_bytes / GiB:.0f} GiB per {'GPU' if machine.has_gpu else 'rank'} and {machine.host_bytes / GiB:.0f} GiB per host are there"
    for plan in plans:
        if plan.fits:
            how = "one copy of the model per rank" if plan.zero == "0" else f"shards over all ranks (zero {plan.zero})"
            return plan, f"{how}, {plan.batch_tokens:,} tokens at once: {plan.device_bytes / GiB:.1f} GiB needed; {have}."
    least = min(plans, key=lambda plan: max(plan.device_bytes / machine.device_bytes, plan.host_bytes / machine.host_bytes))
    return least, f"nothing fits; what lacks least is zero {least.zero}, which needs {least.device_bytes / GiB:.1f} GiB per rank and {least.host_bytes / GiB:.0f} GiB per host; {have}."


def _plan(zero: str, batch_tokens: int, job: Job, machine: Machine, speeds: Speeds) -> EvaluationPlan:
    size = dataclasses.replace(job.size, num_trainable=0, trainable_numels=())
    section = evaluation_section(zero)
    weights = state_terms(size, {"zero_optimization": section}, world_size=machine.world_size, ranks_per_node=machine.ranks_per_node, half=job.half, has_gpu=machine.has_gpu)
    activations = job.activations.evaluation_terms(batch_tokens, job.seq_len, has_gpu=machine.has_gpu)
    terms = (*weights, *activations)
    device, host = peak_bytes(terms, "device"), peak_bytes(terms, "host")
    if not machine.has_gpu:
        host += machine.ranks_per_node * device
    binds = "GPU memory" if machine.has_gpu and device > machine.device_bytes else "host memory" if host > HOST_SHARE * machine.host_bytes else ""
    return EvaluationPlan(
        zero=zero, batch_tokens=batch_tokens, terms=terms, weight_bytes=peak_bytes(weights, "device"), activation_bytes=peak_bytes(activations, "device"), device_bytes=device,
        host_bytes=host, tokens_per_second=batch_tokens * machine.world_size / _batch_seconds(section, batch_tokens, job, machine, speeds), fits=not binds, binds=binds,
    )


def _batch_seconds(section: dict[str, Any], batch_tokens: int, job: Job, machine: Machine, speeds: Speeds) -> float:
    """One forward on every rank: products and attention of a causal sequence, gathers, and what comes from host memory or NVMe."""
    size, width = job.size, 2 if job.half else 4
    compute = batch_tokens * (2 * size.active_params + 2 * job.seq_len * size.num_heads * size.head_dim * size.num_layers) / speeds.flops
    if section.get("stage") != 3:
        return compute
    moving = collective_seconds(width * size.num_params, GATHERS_PER_LAYER * size.num_layers, machine, speeds)
    shard = width * size.num_params / machine.world_size
    device = get_value(section, "offload_param.device") or "none"
    if device != "none":
        moving += shard / speeds.host_link_bytes
    if device == "nvme":
        moving += shard * machine.ranks_per_node / speeds.nvme_bytes
    return max(compute, moving) if speeds.overlaps else compute + moving
