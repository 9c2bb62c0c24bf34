"""What `dsft plan` answers: what the training would decide -> table, JSON or files. Loads torch."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from transformers import TrainingArguments

from dsft.cli.commands import PlanOptions
from dsft.config.options import HALF_PRECISION, TrainConfig
from dsft.errors import UserError
from dsft.models.size import ModelSize
from dsft.planner.choose import Plan, as_dict, checkpointing_flags
from dsft.planner.evaluation import plan_evaluation
from dsft.planner.memory import Job, resolve_auto
from dsft.run_setup.alternatives import longest_sequence, ways_to_fit
from dsft.run_setup.resolve import Choice, TrainingRun, plan_run, resolve_offline
from dsft.runtime.console import show_table, show_text
from dsft.runtime.hardware import Machine
from dsft.units import GiB, in_gib

NOTHING_FITS = 1
"""Exit code."""


def answer(options: PlanOptions, training: TrainConfig, machines: list[Machine]) -> None:
    """Print the answer for one machine or several. Ends with NOTHING_FITS where nothing does. Raises UserError with
    every problem of the model.

    Args:
        training: as it was asked for, without decisions.
    """
    if options.perplexity:
        fits = answer_perplexity(options, training, machines[0])
    elif options.longest:
        fits = answer_longest(options, training, machines[0])
    elif len(machines) > 1:
        fits = compare_machines(options, training, machines)
    else:
        fits = answer_training(options, training, machines[0])
    if not fits:
        raise SystemExit(NOTHING_FITS)


def print_json(content: Any) -> None:
    print(json.dumps(content, indent=2))


def new_table(*columns: str, **options: Any) -> Table:
    table = Table(title_justify="left", caption_justify="left", box=SIMPLE_HEAD, show_edge=False, **options)
    for name in columns:
        table.add_column(name, no_wrap=name != "formula")
    return table


def decide(options: PlanOptions, training: TrainConfig, machine: Machine) -> TrainingRun:
    """Return what the training would decide on this machine; its notes are printed."""
    run = resolve_offline(training, machine, attention=options.attention, scored=options.perplexity)
    for note in run.notes:
        show_text(f"dsft: note: {note}", file=sys.stderr)
    return run


def answer_training(options: PlanOptions, training: TrainConfig, machine: Machine) -> bool:
    """One machine: the chosen plan beside its candidates, its terms, hours and files, or what else would fit."""
    run = decide(options, training, machine)
    choice = plan_run(run.options, run.job, machine, zero_file=run.zero_file, must_fit=False)
    plan = choice.plan
    ways = [] if plan.fits else ways_to_fit(training, machine, attention=options.attention)
    hours = training_hours(options.tokens, run, plan)
    if options.write:
        clipping = run.options.training.get("max_grad_norm", TrainingArguments.max_grad_norm)
        write_plan(Path(options.write), plan, run.job, machine, max_grad_norm=clipping)
    if options.json:
        print_json(
            {
                "chosen": as_dict(plan) | {"reason": choice.text},
                "candidates": [as_dict(candidate) for candidate in choice.candidates],
                "model": dataclasses.asdict(run.job.size),
                "machine": dataclasses.asdict(machine),
                "hours": hours,
                "would_fit": [way.change for way in ways],
            }
        )
        return plan.fits
    show_text(f"{describe_question(run)}\n{describe_model(run.job.size)}\n{machine}")
    show_table(plans_table(choice, list(choice.candidates) if options.all else [plan], machine))
    if options.explain:
        show_table(terms_table(plan))
    show_text("\n".join([choice.reason, *choice.notes]))
    if not run.job.activations(zero_3=False).is_measured:
        show_text(f"activations: those of a Llama as wide: {run.job.size.model_type} does not run without weights")
    if hours is not None:
        show_text(f"about {hours:,.1f} hours of training, {hours * machine.world_size:,.0f} GPU hours")
    if options.write:
        show_text(f"dsft: written: {Path(options.write) / 'deepspeed.json'}")
    if plan.fits:
        batch = f"--per_device_train_batch_size {plan.micro_batch} --gradient_accumulation_steps {plan.accumulation}"
        flags = f"--zero {plan.zero} {batch} {checkpointing_flags(plan, run.job)}"
        show_text(f"dsft train takes this plan by itself; to fix it: {flags}")
    for way in ways:
        change = " ".join(f"--{name} {value}" for name, value in way.change.items())
        show_text(f"would fit: {change} ({way.plan.label}, {in_gib(way.plan.device_bytes)})")
    return plan.fits


def compare_machines(options: PlanOptions, training: TrainConfig, machines: list[Machine]) -> bool:
    """One row per machine."""
    plans: list[tuple[Machine, Plan]] = []
    for machine in machines:
        run = decide(options, training, machine)
        plans.append((machine, plan_run(run.options, run.job, machine, zero_file=run.zero_file, must_fit=False).plan))
    if options.json:
        print_json([{"machine": dataclasses.asdict(machine), "plan": as_dict(plan)} for machine, plan in plans])
    else:
        table = new_table("machine", "ZeRO", "ckpt", "batch", "GiB", "host", "tokens/s", "per GPU", "fits")
        for machine, plan in plans:
            speed = plan.tokens_per_second
            table.add_row(
                f"{machine.nodes} x {machine.ranks_per_node}x{machine.gpu_type or in_gib(machine.device_bytes)}",
                *plan_cells(plan),
                f"{speed:,.0f}" if plan.has_time_estimate else "-",
                f"{speed / machine.world_size:,.0f}" if plan.has_time_estimate else "-",
                plan.limiting_resource or "yes",
            )
        show_table(table)
    return any(plan.fits for _, plan in plans)


def plan_cells(plan: Plan) -> list[str]:
    return [
        plan.zero,
        plan.checkpointing,
        f"{plan.micro_batch} x {plan.accumulation}",
        f"{plan.device_bytes / GiB:,.1f}",
        f"{plan.host_bytes / GiB:,.1f}",
    ]


def plans_table(choice: Choice, plans: list[Plan], machine: Machine) -> Table:
    """The table of these candidates, the chosen one marked."""
    table = new_table(
        *("", "ZeRO", "ckpt", "batch", "GiB", "host", "s/step", "tokens/s", "fits"),
        caption=f"GiB per {machine.place}; host: GiB per node; batch: sequences of a micro batch x accumulation",
    )
    for plan in plans:
        table.add_row(
            "->" if plan is choice.plan else "",
            *plan_cells(plan),
            f"{plan.step_seconds:,.2g}" if plan.has_time_estimate else "-",
            f"{plan.tokens_per_second:,.0f}" if plan.has_time_estimate else "-",
            f"no: {plan.limiting_resource}" if plan.limiting_resource else "yes",
        )
    return table


def terms_table(plan: Plan) -> Table:
    """Every term of one plan with its formula."""
    table = new_table("term", "held", "where", "GiB", "formula", title=plan.label)
    for term in plan.terms:
        if term.num_bytes:
            place = "one GPU or rank" if term.place == "device" else "one node"
            table.add_row(term.name, term.phase, place, f"{term.num_bytes / GiB:,.3f}", term.formula)
    return table


def training_hours(tokens: float | None, run: TrainingRun, plan: Plan) -> float | None:
    """Hours of the whole training, on data of so many tokens or for `max_steps`; None where neither is known."""
    training = run.options.training
    steps = training.get("max_steps", -1)
    if steps <= 0:
        epochs = training.get("num_train_epochs", TrainingArguments.num_train_epochs)
        steps = (tokens or 0) * epochs / plan.tokens_per_step
    return steps * plan.step_seconds / 3600 if steps and plan.has_time_estimate else None


def answer_longest(options: PlanOptions, training: TrainConfig, machine: Machine) -> bool:
    longest = longest_sequence(decide(options, training, machine))
    if options.json:
        print_json({"seq_len": longest[0], "plan": as_dict(longest[1])} if longest else {"seq_len": None})
    elif longest:
        tokens, plan = longest
        show_text(f"{tokens:,} tokens per sequence fit: {plan.label}, {in_gib(plan.device_bytes)} per {machine.place}")
    else:
        show_text("no sequence fits, however short")
    return longest is not None


def answer_perplexity(options: PlanOptions, training: TrainConfig, machine: Machine) -> bool:
    run = decide(options, training, machine)
    choice = plan_evaluation(
        run.model,
        machine,
        dtype=run.options.dtype,
        seq_len=run.options.seq_len,
        attention=options.attention,
        sequence_parallel=run.options.sequence_parallel,
        zero=run.options.zero,
    )
    if options.json:
        chosen = dataclasses.asdict(choice.plan) | {"reason": choice.reason}
        candidates = [dataclasses.asdict(plan) for plan in choice.candidates]
        print_json({"chosen": chosen, "candidates": candidates, "longest_window": choice.longest_window})
        return choice.plan.fits
    table = new_table("", "ZeRO", "weights", "activations", "GiB", "host", "tokens/s", "fits")
    for plan in choice.candidates:
        sizes = (plan.weight_bytes, plan.activation_bytes, plan.device_bytes, plan.host_bytes)
        table.add_row(
            "->" if plan is choice.plan else "",
            plan.zero,
            *(f"{num_bytes / GiB:,.1f}" for num_bytes in sizes),
            f"{plan.tokens_per_second:,.0f}",
            plan.limiting_resource or "yes",
        )
    show_text(f"perplexity of {describe_model(run.model.size)}\n{machine}")
    show_table(table)
    show_text(choice.reason)
    if choice.longest_window:
        show_text(f"longest window that fits: {choice.longest_window:,} tokens")
    return choice.plan.fits


def describe_question(run: TrainingRun) -> str:
    """One line: what was asked, with the options that change it."""
    options, job = run.options, run.job
    method = "full finetuning" if options.method == "full" else f"{options.method} of rank {job.size.lora_r}"
    return (
        f"{method} (--method), {job.seq_len:,} tokens per sequence (--seq_len), {job.dtype} (--dtype),"
        f" {job.optimizer} (--optim)"
    )


def describe_model(size: ModelSize) -> str:
    """One line: parameters by kind."""
    parts = [f"{size.num_params / 1e9:,.3f} B parameters", f"{size.num_trainable / 1e9:,.3f} B trained"]
    if size.expert_params:
        parts.append(f"experts {size.expert_params / 1e9:,.3f} B, {size.active_params / 1e9:,.3f} B active per token")
    if size.other_params:
        parts.append(f"{size.other_params / 1e9:,.3f} B beside the text model, frozen: no text reaches them")
    return ", ".join(parts)


def write_plan(folder: Path, plan: Plan, job: Job, machine: Machine, *, max_grad_norm: float) -> None:
    """Write deepspeed.json to `folder`, without "auto" but for what only the training's options say.

    Raises:
        UserError: where it exists already, or the folder cannot be written.
    """
    zero = plan.deepspeed_config["zero_optimization"]
    resolved = resolve_auto(zero, job.size.hidden_size)
    config = plan.deepspeed_config | {
        "train_micro_batch_size_per_gpu": plan.micro_batch,
        "gradient_accumulation_steps": plan.accumulation,
        "train_batch_size": job.batch(plan.micro_batch, plan.accumulation, machine).sequences,
        "gradient_clipping": max_grad_norm,
        "zero_optimization": {key: value for key, value in resolved.items() if key in zero},
    }
    for section, dtype in HALF_PRECISION.items():
        config[section] = plan.deepspeed_config.get(section, {}) | {"enabled": job.dtype == dtype}
    path = folder / "deepspeed.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as file:
            file.write(json.dumps(config, indent=2) + "\n")
    except OSError as error:
        raise UserError(f"--write {folder}: {path} cannot be written ({error.strerror})") from error
