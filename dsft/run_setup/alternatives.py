"""What else would work: changes with which a training fits that does not, the longest sequence that fits, and which of
the usual models fit a machine: the largest for full finetuning, for LoRA and for QLoRA.
"""

import contextlib
import dataclasses
import math
import tempfile
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsft.config.options import TrainConfig
from dsft.errors import UserError
from dsft.models.size import USUAL_MODELS, max_positions, num_experts_of, usual_config
from dsft.planner.activations import Cost, Job, TrainingActivations
from dsft.planner.plans import HOST_SHARE, Plan
from dsft.planner.traced_model import Attention, attention_of
from dsft.planner.zero_layout import DEFAULT_OPTIMIZER
from dsft.run_setup.resolve import Choice, TrainingRun, choose_plan, plan_run, resolve_offline
from dsft.runtime.hardware import Machine
from dsft.units import GB

MOST_NODES = 64
SHORTEST = 512
LONG = 8192
"""Tokens of a sequence from which on activations of feed-forwards are worth tiles."""
LENGTH_STEP, MOST_POSITIONS = 256, 2**20
"""Lengths that are tried for the longest sequence are multiples of it, up to the model's positions or, without a limit,
as many.
"""
HOST_STEP = 64 * GB
EIGHT_BIT = "adamw_8bit"
"""The optimizer that is proposed where the default one has no room."""


@dataclass(frozen=True)
class Alternative:
    """A change with which the training fits."""

    change: dict[str, Any]
    """Options of `dsft plan` by name."""
    machine: Machine
    plan: Plan


def ways_to_fit(options: TrainConfig, job: Job, machine: Machine, *, attention: Attention | None) -> list[Alternative]:
    """Changes that make a training fit which does not: the smallest of each kind that is enough; where none is, one of
    these on top of another method. `attention` is planned, whatever the model would take.
    """

    def replanned(**changes: Any) -> TrainingRun | None:
        try:
            return resolve_offline(dataclasses.replace(options, **changes), machine, attention=attention)
        except UserError:  # the model has no layers for adapters
            return None

    def tried(change: dict[str, Any], options: TrainConfig, job: Job, machine: Machine) -> list[Alternative]:
        with contextlib.suppress(UserError):  # a training would be refused
            plan = plan_run(options, job, machine, must_fit=False).plan
            return [Alternative(change, machine, plan)] if plan.fits else []
        return []

    def fitting(options: TrainConfig, job: Job, before: dict[str, Any]) -> Iterator[Alternative]:
        """Tries one change of this job at a time, of each option the smallest first, on top of those `before`."""
        trials: list[tuple[dict[str, Any], Job, Machine]] = []
        if job.optimizer == DEFAULT_OPTIMIZER and not job.size.lora_r and machine.has_gpu:
            trials.append(({"optim": EIGHT_BIT}, dataclasses.replace(job, optimizer=EIGHT_BIT), machine))
        may_tile = job.seq_len >= LONG and not job.size.tiled_params and machine.has_gpu
        if may_tile and (in_tiles := replanned(**before, tiled_mlp=True)):
            trials.append(({"tiled_mlp": True}, in_tiles.job, machine))
        nodes = 2 ** (int(math.log2(machine.nodes)) + 1)
        while nodes <= MOST_NODES and machine.has_gpu and not machine.host_names:  # a host file names all there are
            larger = dataclasses.replace(machine, nodes=nodes)
            if not (job.sequences_per_step or 0) % job.batch(job.micro_batch or 1, 1, larger).sequences:
                trials.append(({"nodes": nodes}, job, larger))
            nodes *= 2
        candidates = choose_plan(job, machine).candidates
        lacking = [plan.host_bytes for plan in candidates if plan.limiting_resource == "host memory"]
        if lacking and machine.has_gpu:
            enough = math.ceil(min(lacking) / HOST_SHARE / HOST_STEP) * HOST_STEP
            larger = dataclasses.replace(machine, host_bytes=enough)
            trials.append(({"host_memory": f"{enough // GB}GB"}, job, larger))
        if (job.micro_batch or 1) > 1:
            trials.append(({"per_device_train_batch_size": 1}, dataclasses.replace(job, micro_batch=1), machine))
        seq_len = job.seq_len // 2
        while seq_len >= SHORTEST:
            shorter = of_length(job, seq_len, micro_batch=options.training.get("per_device_train_batch_size"))
            trials.append(({"seq_len": seq_len}, shorter, machine))
            seq_len //= 2
        solved: set[str] = set()
        for change, changed_job, changed_machine in trials:
            if not change.keys() <= solved:
                ways = tried(before | change, options, changed_job, changed_machine)
                solved |= change.keys() if ways else set()
                yield from ways

    alternatives, freed = [], {}
    if options.zero != "auto":  # part of every change: what follows is planned so
        freed, options = {"zero": "auto"}, dataclasses.replace(options, zero="auto")
        if free := replanned():
            options, job = free.options, free.job
        alternatives += tried(freed, options, job, machine)
    # A quantised base is not sharded, that of LoRA is.
    methods = {"full": ("lora", "qlora"), "lora": ("qlora",), "qlora": ("lora",)}[options.method]
    others = {method: other for method in methods if (other := replanned(method=method))}
    for method, other in others.items():
        if ways := tried(freed | {"method": method}, other.options, other.job, machine):
            alternatives += ways
            break
    alternatives += fitting(options, job, freed)
    if not alternatives:
        for method, other in others.items():
            alternatives += fitting(other.options, other.job, freed | {"method": method})
    return alternatives


def of_length(job: Job, seq_len: int, *, attention: Attention | None = None, **changes: Any) -> Job:
    """The same job with sequences of another length, and with the activations that were traced where attention makes no
    matrix: there the bytes of a token do not change. `attention` is that of this length, by default the job's.
    """
    attention = attention or job.attention
    if attention == job.attention == "flash":
        return job.with_same_activations(seq_len=seq_len, **changes)
    return dataclasses.replace(job, seq_len=seq_len, attention=attention, **changes)


def seconds_at(job: Job, machine: Machine, choice: Choice, *, seq_len: int) -> float:
    """Returns the seconds of a step of the chosen plan where sequences have `seq_len` tokens in the mean."""
    plan = choice.plan
    same = {"checkpointing": plan.activation_checkpointing, "checkpoint_every": plan.checkpoint_every}
    job = of_length(job, seq_len, micro_batch=plan.micro_batch, accumulation=plan.accumulation, **same)
    zero_file = plan.deepspeed_config if plan.zero.endswith(".json") else None
    return choose_plan(job, machine, zero=plan.zero, zero_file=zero_file).plan.time.step_seconds


def longest_sequence(run: TrainingRun) -> tuple[int, Plan] | None:
    """(the most tokens per sequence that fit, their plan), one sequence per GPU, or for all GPUs that share one, at a
    time; None where none fits.
    """
    job = run.job.with_same_activations(micro_batch=1, accumulation=1, sequences_per_step=None)
    positions = job.size.max_positions or MOST_POSITIONS
    step = min(LENGTH_STEP, positions)

    def attention_at(length: int) -> Attention:  # one that reaches a sliding window has a mask
        return attention_of(run.model, seq_len=length, masked=run.masked)

    is_own = job.attention == attention_at(job.seq_len)  # not the one that was asked for
    lengths = range(step, positions + 1, step)

    def at(length: int, like: Job) -> Job:
        return of_length(like, length, attention=attention_at(length) if is_own else None)

    def plan_of(job: Job) -> Plan:
        return plan_run(run.options, job, run.machine, zero_file=run.zero_file, must_fit=False).plan

    def number_fitting(like: Job) -> int:
        return bisect_left(lengths, True, key=lambda length: not plan_of(at(length, like)).fits)

    number = number_fitting(job)
    if number and (near := dataclasses.replace(at(lengths[number - 1], job))).attention == "flash":
        number = number_fitting(near)  # traced at about the answer's length
    exact = ((length, plan_of(dataclasses.replace(at(length, job)))) for length in reversed(lengths[:number]))
    return next(((length, plan) for length, plan in exact if plan.fits), None)


METHODS = ("full", "lora", "qlora")


@dataclass(frozen=True, kw_only=True)
class Largest:
    """The answer for one method."""

    method: str
    fits: tuple[str, ...]
    """Names of usual models, fewest parameters first."""
    too_large: tuple[str, ...]
    plan: Plan | None
    """Of the largest that fits; None where none does."""


def largest_models(options: TrainConfig, machine: Machine, *, attention: Attention | None) -> list[Largest]:
    """Finds for each method of this machine the largest usual model that fits; smaller ones are taken to fit too."""
    answers, long_enough = [], [name for name in USUAL_MODELS if max_positions(usual_config(name)) >= options.seq_len]
    names = long_enough or list(USUAL_MODELS)  # all are refused then, with the reason
    costs = {field.name: Cost() for field in dataclasses.fields(TrainingActivations) if field.type in (Cost, "Cost")}
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            usual_config(name).save_pretrained(Path(folder, name))
        for method in METHODS if machine.has_gpu else METHODS[:2]:  # bitsandbytes needs a GPU
            fits, plan, run, refusal = [], None, None, None
            for name in reversed(names):
                # Experts that stay plain may take more than all of a larger model in 4 bits.
                if fits and not (method == "qlora" and num_experts_of(usual_config(name))):
                    fits.append(name)
                    continue
                asked = dataclasses.replace(options, model=str(Path(folder, name)), method=method, data=[])
                try:
                    run = resolve_offline(asked, machine, attention=attention)
                except UserError as error:  # too few positions, or the method is not for what else is asked
                    refusal = error
                    continue
                # Without any activations first: what does not fit so needs no trace.
                bare = dataclasses.replace(run.job)
                layers = (Cost(),) * bare.size.num_layers
                none = TrainingActivations(layers_saved=layers, layers_input=layers, source="none", **costs)
                bare.__dict__.update(activations=none, activations_of_shards=none)
                for job in (bare, run.job):
                    tried = plan_run(run.options, job, machine, zero_file=run.zero_file, must_fit=False).plan
                    if not tried.fits:
                        break
                else:
                    fits.append(name)
                    plan = plan or tried
            if run is None and method == options.method:
                raise refusal
            if run is None:
                continue
            too_large = tuple(name for name in names if name not in fits)
            answers.append(Largest(method=method, fits=tuple(reversed(fits)), too_large=too_large, plan=plan))
    return answers
