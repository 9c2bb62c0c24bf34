"""What else would work: changes with which a training fits that does not, and the longest sequence that fits."""

import contextlib
import dataclasses
from dataclasses import dataclass
from typing import Any

from dsft.config.deepspeed import offloads
from dsft.config.options import Decision, TrainConfig, decide
from dsft.errors import UserError
from dsft.planner.activations import attention_of
from dsft.planner.choose import Plan, longest_length
from dsft.planner.speed import CARDS, card_of
from dsft.runtime.hardware import Machine
from dsft.setup.decide import TrainingRun, plan_run, resolve_offline

CLEARLY_FASTER = 1.1
NODES = (2, 4, 8, 16, 32, 64)
SHORTEST = 512


@dataclass(frozen=True)
class Alternative:
    """A change with which the training fits."""

    change: dict[str, Any]
    """Options of `dsft plan` by name."""
    plan: Plan


def ways_to_fit(options: TrainConfig, machine: Machine) -> list[Alternative]:
    """Find changes that make a training fit which does not: of each kind the smallest that is enough. One that changes
    nothing does not fit either.
    """
    nodes = [] if machine.host_names else NODES  # a host file names all there are
    lengths = [options.seq_len // 2**power for power in range(1, 8)]
    kinds = {
        "zero": ["auto"],
        "method": ["lora", "qlora"],  # LoRA's base is sharded, a quantised one is not
        "optim": ["adamw_8bit"],
        "states": ["bfloat16"],
        "per_device_train_batch_size": [1],
        "sequence_parallel": [machine.ranks_per_node],
        "nodes": [number for number in nodes if number > machine.nodes],
        "seq_len": [length for length in lengths if length >= SHORTEST],
    }
    alternatives = []
    for name, values in kinds.items():
        for value in values:
            way = _tried(options, name, value, machine)
            if way:
                alternatives.append(way)
                break
    return alternatives


def faster_ways(options: TrainConfig, plan: Plan, machine: Machine) -> list[Alternative]:
    """Find another precision with which a training that fits is clearly faster, if there is one."""
    changes = {}
    if machine.has_gpu and not CARDS[card_of(machine)].has_bf16 and options.dtype == "auto":
        changes["dtype"] = "float16"
    if options.method == "full" and offloads(plan.deepspeed_config):
        changes["states"] = "bfloat16"
    ways = [_tried(options, name, value, machine) for name, value in changes.items()]
    return [way for way in ways if way and way.plan.tokens_per_second > CLEARLY_FASTER * plan.tokens_per_second]


def _tried(options: TrainConfig, name: str, value: Any, machine: Machine) -> Alternative | None:
    if name == "nodes":
        machine = dataclasses.replace(machine, nodes=value)
    else:
        options = decide(options, [Decision(name, value, "it is tried")])
    with contextlib.suppress(UserError):  # a training would be refused
        plan = plan_run(resolve_offline(options, machine), must_fit=False).plan
        return Alternative({name: value}, plan) if plan.fits else None
    return None


def longest_sequence(run: TrainingRun) -> tuple[int, Plan] | None:
    """(the most tokens per sequence that fit, their plan), one sequence per GPU, or for all GPUs that share one, at a
    time; None where none fits.
    """
    job = dataclasses.replace(run.job, micro_batch=1, accumulation=1, sequences_per_step=None)

    def plan_of(length: int) -> Plan:
        attention = attention_of(run.model, seq_len=length, masked=run.masked)  # a mask from a sliding window on
        changed = dataclasses.replace(job, seq_len=length, attention=attention)
        return plan_run(dataclasses.replace(run, job=changed), must_fit=False).plan

    length = longest_length(lambda length: plan_of(length).fits, job.size)
    return (length, plan_of(length)) if length else None
