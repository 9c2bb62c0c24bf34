"""What else would work: changes with which a training fits that does not, and the longest sequence that fits."""

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dsft.config.options import TrainConfig
from dsft.errors import UserError
from dsft.planner.fake_model import Attention
from dsft.planner.job import Job
from dsft.planner.plan import Plan
from dsft.planner.terms import HOST_SHARE
from dsft.run_setup.plan import Choice, choose_plan
from dsft.run_setup.resolve import resolve_offline
from dsft.runtime.hardware import Machine
from dsft.units import GB

MOST_NODES = 64
SHORTEST = 512
LENGTH_STEP = 256
"""Lengths that are tried for the longest sequence are multiples of it."""
HOST_STEP = 64 * GB


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """One change with which the training fits."""

    change: dict[str, Any]
    """Options of `dsft plan` by name."""
    machine: Machine
    plan: Plan


def ways_to_fit(options: TrainConfig, job: Job, machine: Machine, *, attention: Attention | None) -> list[Alternative]:
    """Changes, one at a time, that make a training fit which does not: another `zero`, fewer trained parameters, more
    nodes, more host memory, smaller batches, shorter sequences. The smallest of each kind that is enough.

    Args:
        options: with their decisions.
        attention: that is planned, whatever the model would take; None for the model's.
    """
    alternatives = []
    freed = {}
    if options.zero != "auto":  # part of every change: what follows is planned so
        freed, options = {"zero": "auto"}, dataclasses.replace(options, zero="auto")
        job = _replanned(options, machine, attention)
        plan = choose_plan(job, machine).plan
        if plan.fits:
            alternatives.append(Alternative(change=freed, machine=machine, plan=plan))
    for kind in (_methods, _nodes, _host_memory, _batches, _lengths):
        for change, other_job, other_machine in kind(options, job, machine, attention):
            plan = choose_plan(other_job, other_machine).plan
            if plan.fits:
                alternatives.append(Alternative(change=freed | change, machine=other_machine, plan=plan))
                break
    return alternatives


Trial = tuple[dict[str, Any], Job, Machine]


def _methods(options: TrainConfig, job: Job, machine: Machine, attention: Attention | None) -> Iterator[Trial]:
    # A quantised base is not sharded, that of LoRA is.
    for method in {"full": ("lora", "qlora"), "lora": ("qlora",), "qlora": ("lora",)}[options.method]:
        try:
            yield {"method": method}, _replanned(options, machine, attention, method=method), machine
        except UserError:  # the model has no layers for adapters
            continue


def _nodes(options: TrainConfig, job: Job, machine: Machine, attention: Attention | None) -> Iterator[Trial]:
    nodes = 2 ** (int(math.log2(machine.nodes)) + 1)
    while nodes <= MOST_NODES and machine.has_gpu:
        larger = dataclasses.replace(machine, nodes=nodes)
        if not (job.sequences_per_step or 0) % (larger.world_size * (job.micro_batch or 1)):
            yield {"nodes": nodes}, job, larger
        nodes *= 2


def _host_memory(options: TrainConfig, job: Job, machine: Machine, attention: Attention | None) -> Iterator[Trial]:
    lacking = [
        plan.host_bytes for plan in choose_plan(job, machine).candidates if plan.limiting_resource == "host memory"
    ]
    if lacking and machine.has_gpu:
        enough = math.ceil(min(lacking) / HOST_SHARE / HOST_STEP) * HOST_STEP
        change = {"host_memory": f"{enough // GB}GB"}
        yield change, job, dataclasses.replace(machine, host_bytes=enough)


def _batches(options: TrainConfig, job: Job, machine: Machine, attention: Attention | None) -> Iterator[Trial]:
    if (job.micro_batch or 1) > 1 and not options.batch_tokens:
        yield {"per_device_train_batch_size": 1}, dataclasses.replace(job, micro_batch=1), machine


def _lengths(options: TrainConfig, job: Job, machine: Machine, attention: Attention | None) -> Iterator[Trial]:
    seq_len = job.seq_len // 2
    while seq_len >= SHORTEST:
        yield {"seq_len": seq_len}, of_length(job, seq_len), machine
        seq_len //= 2


def _replanned(options: TrainConfig, machine: Machine, attention: Attention | None, **changes: Any) -> Job:
    return resolve_offline(dataclasses.replace(options, **changes), machine, attention=attention).job


def of_length(job: Job, seq_len: int, **changes: Any) -> Job:
    """The same job with sequences of another length and the activations that were traced: bytes per token do not change
    where attention makes no matrix.

    Args:
        changes: of batches and checkpointing.
    """
    other = dataclasses.replace(job, seq_len=seq_len, **changes)
    if job.attention == "flash":
        other.__dict__["activations"] = job.activations
    return other


def seconds_at(job: Job, machine: Machine, choice: Choice, *, seq_len: int) -> float:
    """Returns the seconds of a step of the chosen plan where sequences have `seq_len` tokens in the mean."""
    plan = choice.plan
    job = of_length(
        job,
        seq_len,
        micro_batch=plan.micro_batch,
        accumulation=plan.accumulation,
        checkpointing=plan.activation_checkpointing,
    )
    zero_file = plan.deepspeed_config if plan.zero.endswith(".json") else None
    return choose_plan(job, machine, zero=plan.zero, zero_file=zero_file).plan.time.step_seconds


def longest_sequence(job: Job, machine: Machine) -> tuple[int, Plan] | None:
    """(the most tokens per sequence that fit, their plan), one sequence per GPU at a time; None where none fits."""
    positions = getattr(job.model_config.get_text_config(), "max_position_embeddings", None) or 2**20
    job = dataclasses.replace(job, micro_batch=1, accumulation=1, sequences_per_step=None)

    def fitting(length: int) -> Plan | None:
        plan = choose_plan(of_length(job, length), machine).plan
        return plan if plan.fits else None

    low, high = 0, positions // LENGTH_STEP
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fitting(middle * LENGTH_STEP) else (low, middle - 1)
    return (low * LENGTH_STEP, fitting(low * LENGTH_STEP)) if low else None
