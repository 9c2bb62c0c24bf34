"""`dsft plan`: options -> machine and job -> plans -> table, JSON or files."""

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

from dsft.cli.commands import PlanOptions
from dsft.cli.plan_machine import assumed_card, read_machines
from dsft.cli.plan_tables import explain, gpu_hours, show_evaluation_plans, show_plans, show_scale
from dsft.config.options import TrainConfig
from dsft.errors import UserError, raise_if_any
from dsft.models.build import resolve_dtype
from dsft.planner.evaluation_plan import all_evaluation_plans, choose_evaluation
from dsft.planner.export import write_plan
from dsft.planner.job import Job
from dsft.planner.measuring import calibrate
from dsft.planner.plan import as_dict
from dsft.run_setup.plan import choose_plan, paper_job, speeds_for
from dsft.runtime.hardware import Machine, has_gpu


def run(options: PlanOptions) -> None:
    raise_if_any(_impossible_numbers(options))
    if not has_gpu():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed warns that there is no GPU
    machines = read_machines(options)
    dtype = options.dtype or ("bfloat16" if machines[0].has_gpu else resolve_dtype("auto"))
    if options.calibrate:
        if not machines[0].measured:
            raise UserError(["--calibrate measures this machine; leave out --gpus, --hostfile and --gpu_type"])
        file = calibrate(machines[0], dtype=dtype)
        print(f"dsft: speeds measured and kept in {file}", file=sys.stderr)
    job = paper_job(training_options(options, dtype), attention=options.attention)
    if options.perplexity and (len(machines) > 1 or options.write or options.explain):
        raise UserError(["--perplexity takes one number of nodes, and neither --write nor --explain"])
    if options.perplexity:
        _perplexity(options, job, machines[0])
    elif len(machines) > 1:
        _scale(options, job, machines)
    else:
        _training(options, job, machines[0], dtype)


def _impossible_numbers(options: PlanOptions) -> list[str]:
    numbers = ("lora_r", "seq_len", "tokens_per_step", "per_device_train_batch_size", "batch_tokens")
    problems = [
        f"--{name} {getattr(options, name)}: must be at least 1"
        for name in numbers
        if getattr(options, name) is not None and getattr(options, name) < 1
    ]
    if options.tokens_per_step and options.tokens_per_step < options.seq_len:
        problems.append(
            f"--tokens_per_step {options.tokens_per_step} is less than one sequence of --seq_len {options.seq_len};"
            " raise it"
        )
    return problems


def training_options(options: PlanOptions, dtype: str) -> TrainConfig:
    """Says in the options of a training what the flags of the plan ask for."""
    training = {
        "per_device_train_batch_size": options.per_device_train_batch_size,
        "use_liger_kernel": options.use_liger_kernel,
    }
    return TrainConfig(
        model=options.model,
        method=options.method,
        lora_r=options.lora_r,
        seq_len=options.seq_len,
        trust_remote_code=options.trust_remote_code,
        dtype=dtype,
        global_batch_size=options.tokens_per_step and options.tokens_per_step // options.seq_len,
        training=training,
    )


def _training(options: PlanOptions, job: Job, machine: Machine, dtype: str) -> None:
    choice = choose_plan(job, machine)
    written = write_plan(Path(options.write), choice.plan, job.size, machine, dtype=dtype) if options.write else []
    if options.json:
        print_json(
            {
                "chosen": as_dict(choice.plan) | {"reason": choice.reason},
                "candidates": [as_dict(plan) for plan in choice.candidates],
                "model": dataclasses.asdict(job.size),
                "machine": dataclasses.asdict(machine),
                "speeds": dataclasses.asdict(choice.speeds),
                "activations": job.activations.source,
            }
        )
        return
    show_plans(choice.plan, choice.candidates, job.size, machine)
    if options.explain:
        explain(choice.plan)
    print(f"speeds: {assumed_card(options, machine)}{choice.speeds.source}; activations: {job.activations.source}")
    print(choice.reason)
    for path in written:
        print(f"dsft: written: {path}")


def _scale(options: PlanOptions, job: Job, machines: list[Machine]) -> None:
    if options.write or options.explain:
        raise UserError(["--write and --explain take one number of nodes"])
    rows = [(machine, choose_plan(job, machine).plan) for machine in machines]
    if options.json:
        print_json(
            [
                {"nodes": machine.nodes, "gpu_hours_per_1e9_tokens": gpu_hours(plan, machine)} | as_dict(plan)
                for machine, plan in rows
            ]
        )
    else:
        show_scale(rows)


def _perplexity(options: PlanOptions, job: Job, machine: Machine) -> None:
    plans = all_evaluation_plans(job, machine, speeds_for(job, machine), batch_tokens=options.batch_tokens)
    chosen, why = choose_evaluation(plans, machine)
    if options.json:
        print_json(
            {
                "chosen": dataclasses.asdict(chosen) | {"reason": why},
                "candidates": [dataclasses.asdict(plan) for plan in plans],
            }
        )
    else:
        show_evaluation_plans(chosen, plans, job.size, machine)
        print(why)


def print_json(content: Any) -> None:
    print(json.dumps(content, indent=2))
