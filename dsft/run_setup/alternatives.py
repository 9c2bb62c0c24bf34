"""What else would work: changes with which a training fits that does not, the longest sequence that fits, and which of
the usual models fit a machine: the largest for full finetuning, for LoRA and for QLoRA.
"""

import dataclasses
import math
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsft.config.options import TrainConfig
from dsft.errors import UserError
from dsft.models.size import USUAL_MODELS, usual_config
from dsft.planner.activations import Cost, TrainingActivations
from dsft.planner.candidates import Job
from dsft.planner.plans import HOST_SHARE, Plan
from dsft.planner.traced_model import Attention
from dsft.planner.zero_layout import DEFAULT_OPTIMIZER
from dsft.run_setup.resolve import Choice, choose_plan, resolve_offline
from dsft.runtime.hardware import Machine
from dsft.units import GB

MOST_NODES = 64
SHORTEST = 512
LONG = 8192
"""Tokens of a sequence from which on activations of feed-forwards are worth tiles."""
LENGTH_STEP = 256
"""Lengths that are tried for the longest sequence are multiples of it."""
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

    def replanned(**changes: Any) -> Job | None:
        try:
            return resolve_offline(dataclasses.replace(options, **changes), machine, attention=attention).job
        except UserError:  # the model has no layers for adapters
            return None

    def fitting(job: Job, before: dict[str, Any]) -> Iterator[Alternative]:
        """Tries one change of this job at a time, of each option the smallest first, on top of those `before`."""
        trials: list[tuple[dict[str, Any], Job, Machine]] = []
        if job.optimizer == DEFAULT_OPTIMIZER and not job.size.lora_r and machine.has_gpu:
            trials.append(({"optim": EIGHT_BIT}, dataclasses.replace(job, optimizer=EIGHT_BIT), machine))
        may_tile = job.seq_len >= LONG and not job.size.tiled_params and machine.has_gpu
        if may_tile and (in_tiles := replanned(**before, tiled_mlp=True)):
            trials.append(({"tiled_mlp": True}, in_tiles, machine))
        nodes = 2 ** (int(math.log2(machine.nodes)) + 1)
        while nodes <= MOST_NODES and machine.has_gpu:
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
        if (job.micro_batch or 1) > 1 and not options.batch_tokens:
            trials.append(({"per_device_train_batch_size": 1}, dataclasses.replace(job, micro_batch=1), machine))
        seq_len = job.seq_len // 2
        while seq_len >= SHORTEST:
            trials.append(({"seq_len": seq_len}, of_length(job, seq_len), machine))
            seq_len //= 2
        solved: set[str] = set()
        for change, changed_job, changed_machine in trials:
            if not change.keys() <= solved:
                plan = choose_plan(changed_job, changed_machine).plan
                if plan.fits:
                    solved |= change.keys()
                    yield Alternative(before | change, changed_machine, plan)

    alternatives, freed = [], {}
    if options.zero != "auto":  # part of every change: what follows is planned so
        freed, options = {"zero": "auto"}, dataclasses.replace(options, zero="auto")
        job = replanned() or job
        plan = choose_plan(job, machine).plan
        if plan.fits:
            alternatives.append(Alternative(freed, machine, plan))
    # A quantised base is not sharded, that of LoRA is.
    methods = {"full": ("lora", "qlora"), "lora": ("qlora",), "qlora": ("lora",)}[options.method]
    others = {method: other for method in methods if (other := replanned(method=method))}
    for method, other in others.items():
        plan = choose_plan(other, machine).plan
        if plan.fits:
            alternatives.append(Alternative(freed | {"method": method}, machine, plan))
            break
    alternatives += fitting(job, freed)
    if not alternatives:
        for method, other in others.items():
            alternatives += fitting(other, freed | {"method": method})
    return alternatives


def of_length(job: Job, seq_len: int, **changes: Any) -> Job:
    """The same job with sequences of another length and the activations that were traced: bytes per token do not change
    where attention makes no matrix.
    """
    if job.attention == "flash":
        return job.with_same_activations(seq_len=seq_len, **changes)
    return dataclasses.replace(job, seq_len=seq_len, **changes)


def seconds_at(job: Job, machine: Machine, choice: Choice, *, seq_len: int) -> float:
    """Returns the seconds of a step of the chosen plan where sequences have `seq_len` tokens in the mean."""
    plan = choice.plan
    same = {"checkpointing": plan.activation_checkpointing, "checkpoint_every": plan.checkpoint_every}
    job = of_length(job, seq_len, micro_batch=plan.micro_batch, accumulation=plan.accumulation, **same)
    zero_file = plan.deepspeed_config if plan.zero.endswith(".json") else None
    return choose_plan(job, machine, zero=plan.zero, zero_file=zero_file).plan.time.step_seconds


def longest_sequence(job: Job, machine: Machine) -> tuple[int, Plan] | None:
    """(the most tokens per sequence that fit, their plan), one sequence per GPU, or for all GPUs that share one, at a
    time; None where none fits.
    """
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


METHODS = ("full", "lora", "qlora")


@dataclass(frozen=True, kw_only=True)
class Largest:
    """The answer for one method."""

    method: str
    fits: tuple[str, ...]
    """Names of usual models, fewest parameters first."""
    too_large: tuple[str, ...]
    plan: Plan | None
    """Of the last that fits; None where none does."""


def largest_models(options: TrainConfig, machine: Machine, *, attention: Attention | None) -> list[Largest]:
    """Finds for each method of this machine the largest usual model that fits; smaller ones are taken to fit too."""
    answers, names = [], list(USUAL_MODELS)
    costs = {field.name: Cost() for field in dataclasses.fields(TrainingActivations) if field.type in (Cost, "Cost")}
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            usual_config(name).save_pretrained(Path(folder, name))
        for method in METHODS if machine.has_gpu else METHODS[:2]:  # bitsandbytes needs a GPU
            for number in range(len(names), 0, -1):
                asked = dataclasses.replace(options, model=str(Path(folder, names[number - 1])), method=method, data=[])
                job = resolve_offline(asked, machine, attention=attention).job
                # Without any activations first: what does not fit so needs no trace.
                bare = dataclasses.replace(job)
                layers = (Cost(),) * job.size.num_layers
                none = TrainingActivations(layers_saved=layers, layers_input=layers, source="none", **costs)
                bare.__dict__["activations"] = none
                if choose_plan(bare, machine).plan.fits and (plan := choose_plan(job, machine).plan).fits:
                    break
            else:
                number, plan = 0, None
            fits, too_large = tuple(names[:number]), tuple(names[number:])
            answers.append(Largest(method=method, fits=fits, too_large=too_large, plan=plan))
    return answers
