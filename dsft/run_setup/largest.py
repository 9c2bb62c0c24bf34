"""Which of the usual models fit a machine: the largest for full finetuning, for LoRA and for QLoRA."""

import dataclasses
import tempfile
from dataclasses import dataclass
from pathlib import Path

from dsft.config.options import TrainConfig
from dsft.planner.activations import Cost, TrainingActivations
from dsft.planner.fake_model import Attention
from dsft.planner.job import Job
from dsft.planner.plan import Plan
from dsft.planner.usual_models import USUAL_MODELS, usual_config
from dsft.run_setup.plan import choose_plan
from dsft.run_setup.resolve import resolve_offline
from dsft.runtime.hardware import Machine

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
    """Finds for each method of this machine the largest usual model that fits; smaller ones are taken to fit too.

    Args:
        options: of a training; model and method are put in their place.
    """
    with tempfile.TemporaryDirectory() as folder:
        for name in USUAL_MODELS:
            usual_config(name).save_pretrained(Path(folder, name))
        methods = METHODS if machine.has_gpu else METHODS[:2]  # bitsandbytes needs one
        return [_largest(method, Path(folder), options, machine, attention) for method in methods]


def _largest(method: str, folder: Path, options: TrainConfig, machine: Machine, attention: Attention | None) -> Largest:
    names, plan, number = list(USUAL_MODELS), None, len(USUAL_MODELS)
    for number in range(len(names), 0, -1):
        asked = dataclasses.replace(options, model=str(folder / names[number - 1]), method=method, data=[])
        job = resolve_offline(asked, machine, attention=attention).job
        if not choose_plan(_without_activations(job), machine).plan.fits:
            continue  # and no trace is needed
        plan = choose_plan(job, machine).plan
        if plan.fits:
            return Largest(method=method, fits=tuple(names[:number]), too_large=tuple(names[number:]), plan=plan)
    return Largest(method=method, fits=(), too_large=tuple(names), plan=None)


def _without_activations(job: Job) -> Job:
    """The same job with no activations at all: what does not fit so does not fit with them."""
    bare = dataclasses.replace(job)
    costs = {field.name: Cost() for field in dataclasses.fields(TrainingActivations) if field.type in (Cost, "Cost")}
    bare.__dict__["activations"] = TrainingActivations(num_layers=job.size.num_layers, source="none", **costs)
    return bare
