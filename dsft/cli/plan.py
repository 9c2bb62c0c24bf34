"""`dsft plan`: options -> machine and job -> plans -> table, JSON or files."""

import dataclasses
import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

from dsft.cli.commands import PlanOptions
from dsft.cli.plan_machine import assumed_card, read_machines
from dsft.cli.plan_tables import cost_text, explain, gpu_hours, show_evaluation_plans, show_plans, show_scale
from dsft.config.options import TrainConfig
from dsft.errors import UserError, raise_if_any
from dsft.models.build import resolve_dtype
from dsft.planner.candidates import SEQUENCES_PER_STEP
from dsft.planner.evaluation_plan import all_evaluation_plans, choose_evaluation
from dsft.planner.export import write_plan
from dsft.planner.job import Job
from dsft.planner.measuring import calibrate
from dsft.planner.plan import Plan, as_dict
from dsft.planner.shortlist import RunCost, run_cost, shortlist
from dsft.run_setup.alternatives import Alternative, longest_sequence, ways_to_fit
from dsft.run_setup.plan import choose_plan, paper_job, speeds_for
from dsft.runtime.hardware import Machine, has_gpu
from dsft.units import GiB

NOTHING_FITS = 1
"""Exit code."""


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
    elif options.longest:
        _longest(options, job, machines[0])
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
    above_zero = ("tokens", "epochs", "dollars_per_gpu_hour")
    problems += [
        f"--{name} {getattr(options, name)}: must be above 0"
        for name in above_zero
        if getattr(options, name) is not None and not getattr(options, name) > 0
    ]
    if options.dollars_per_gpu_hour and not options.tokens:
        problems.append("--dollars_per_gpu_hour: the cost of a training needs --tokens, for example 1e9")
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
    ways = (
        []
        if choice.plan.fits
        else ways_to_fit(training_options(options, dtype), job, machine, attention=options.attention)
    )
    cost = _cost(options, choice.plan, machine)
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
                "cost": cost and dataclasses.asdict(cost),
                "would_fit": [command_line(options, way.change) for way in ways],
            }
        )
        if not choice.plan.fits:
            raise SystemExit(NOTHING_FITS)
        return
    shown = list(choice.candidates) if options.all else shortlist(choice.plan, list(choice.candidates), machine)
    show_plans(choice.plan, shown, job.size, machine)
    if options.explain:
        explain(choice.plan)
    print(f"speeds: {assumed_card(options, machine)}{choice.speeds.source}; activations: {job.activations.source}")
    print(choice.reason)
    if cost:
        print(cost_text(cost))
    for path in written:
        print(f"dsft: written: {path}")
    if not choice.plan.fits:
        _print_ways(options, ways)
        raise SystemExit(NOTHING_FITS)


def _print_ways(options: PlanOptions, ways: list[Alternative]) -> None:
    print("what would fit:" if ways else "nothing that was tried would fit: more nodes, LoRA, QLoRA, shorter sequences")
    for way in ways:
        speed = way.plan.time.tokens_per_second / way.machine.world_size
        print(f"  {command_line(options, way.change)}\n    {way.plan.label}: {speed:,.0f} tokens/s per GPU")


def command_line(options: PlanOptions, change: dict[str, Any]) -> str:
    """The command with these options and a change."""
    words = []
    for field in dataclasses.fields(options):
        value = change.get(field.name, getattr(options, field.name))
        if field.name in change or value != field.default:
            words += [f"--{field.name}"] if value is True else [f"--{field.name}", shlex.quote(str(value))]
    return " ".join(["dsft", "plan", *words])


def _longest(options: PlanOptions, job: Job, machine: Machine) -> None:
    longest = longest_sequence(job, machine)
    if options.json:
        print_json({"seq_len": longest[0], "plan": as_dict(longest[1])} if longest else {"seq_len": None})
    elif longest:
        tokens, plan = longest
        print(f"{tokens:,} tokens per sequence fit: {plan.label}, {plan.device_bytes / GiB:.1f} GiB per GPU")
    else:
        print("no sequence fits, however short")
    if not longest:
        raise SystemExit(NOTHING_FITS)


def _cost(options: PlanOptions, plan: Plan, machine: Machine) -> RunCost | None:
    if not options.tokens:
        return None
    tokens = options.tokens * options.epochs
    return run_cost(plan, machine, tokens=tokens, dollars_per_gpu_hour=options.dollars_per_gpu_hour)


def _scale(options: PlanOptions, job: Job, machines: list[Machine]) -> None:
    if options.write or options.explain:
        raise UserError(["--write and --explain take one number of nodes"])
    per_step = job.sequences_per_step or SEQUENCES_PER_STEP
    fewest = min(machine.nodes for machine in machines)
    rows = []
    for machine in machines:
        grown = per_step * machine.nodes // fewest if options.scaling == "weak" else per_step
        rows.append((machine, choose_plan(dataclasses.replace(job, sequences_per_step=grown), machine).plan))
    if options.json:
        print_json(
            [
                {"nodes": machine.nodes, "gpu_hours_per_1e9_tokens": gpu_hours(plan, machine)} | as_dict(plan)
                for machine, plan in rows
            ]
        )
    else:
        show_scale(rows)
        batch = "grows with the nodes (weak scaling)" if options.scaling == "weak" else "stays (strong scaling)"
        print(f"the global batch {batch}; --scaling {'strong' if options.scaling == 'weak' else 'weak'} for the other")


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
