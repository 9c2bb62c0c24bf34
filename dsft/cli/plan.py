"""`dsft plan`: options of a training and a machine (measured, or on paper) -> the training's decisions. Problems of the
options are reported before torch is loaded.
"""

import dataclasses
import json
import os
from collections.abc import Sequence
from importlib import resources

from dsft.cli.commands import PlanOptions
from dsft.config.options import REMOVED_OPTIONS, HostFields, TrainConfig
from dsft.config.reader import NOT_NEEDED, read_config
from dsft.errors import UserError
from dsft.launch import hosts_of
from dsft.planner.speed import CARDS, card_of, cards_named, choose_card, parse_interconnect
from dsft.runtime import quick_imports
from dsft.runtime.hardware import Machine, has_gpu, parse_bytes, require_seen_gpus, split_gpus, this_machine
from dsft.setup import check_named_files
from dsft.units import GB


def run(options: PlanOptions, argv: Sequence[str]) -> None:
    """Print the decisions of a training, or another answer that `options` request. Raises UserError."""
    problems = []
    asked = [f"--{name}" for name in ("perplexity", "longest", "out", "explain") if getattr(options, name)]
    if len(asked) > 1 and (options.perplexity or options.longest):
        problems.append(f"{' and '.join(asked)}: keep one")
    training = read_config(TrainConfig, argv, problems, also=PlanOptions)
    if options.perplexity and training.sequence_parallel > 1:
        problems.append(f"sequence_parallel: {REMOVED_OPTIONS['sequence_parallel']}")
    problems = [problem for problem in problems if not problem.startswith(NOT_NEEDED)]
    named = dataclasses.replace(training, data=[], eval_data=[])  # a plan accepts data that does not exist yet
    usual_models = resources.files("dsft.models").joinpath("usual_models.json").read_text(encoding="utf-8")
    if training.model in json.loads(usual_models):  # planned without the hub
        named = dataclasses.replace(named, model="")
    check_named_files(named, problems)
    machines = read_machines(options)
    with quick_imports():
        from dsft.cli.plan_answers import answer

    if not has_gpu():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # or DeepSpeed warns that there is no GPU
    answer(options, training, machines, argv)


def read_machines(options: PlanOptions) -> list[Machine]:
    """Return this machine, or one for each entry of --gpus. Raises UserError for one that cannot be."""
    hosts = hosts_of(HostFields(hostfile=options.hostfile))
    if hosts and options.nodes != 1:
        raise UserError(f"--nodes {options.nodes}: --hostfile {options.hostfile} has {len(hosts)}; keep one")
    if options.gpus:
        machines = [machine_on_paper(gpus.strip()) for gpus in options.gpus.split(",")]
    else:
        require_seen_gpus()
        machines = [this_machine()]
    changes = {"nodes": len(hosts) or options.nodes}
    if options.host_memory:
        changes["host_bytes"] = parse_bytes(options.host_memory)
    if options.interconnect:
        changes["interconnect"] = options.interconnect
        parse_interconnect(options.interconnect, CARDS[card_of(machines[0])])
    if hosts:
        changes["ranks_per_node"] = max(hosts.values())
        if len(set(hosts.values())) > 1:
            changes["num_ranks"] = sum(hosts.values())
    return [dataclasses.replace(machine, **changes) for machine in machines]


def machine_on_paper(gpus: str) -> Machine:
    """Return a node with GPUs given by name or memory: 8xH100, 8x80GB."""
    number, word = split_gpus(gpus)
    size = 0
    gpu_type = ""
    if word[:1].isdigit() and not cards_named(word):
        size = parse_bytes(word)
    else:
        gpu_type = choose_card(word)
    machine = Machine(
        nodes=1,
        ranks_per_node=number,
        device_bytes=size,
        host_bytes=1000 * GB,
        has_gpu=True,
        gpu_type=gpu_type,
    )
    card = CARDS[gpu_type or card_of(machine)]
    if gpu_type or size >= 0.98 * card.memory_gb * GB:
        return dataclasses.replace(machine, device_bytes=card.usable_bytes)
    return machine
