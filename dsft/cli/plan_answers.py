"""What `dsft plan` answers: what the training would decide -> table, JSON or files. Loads torch."""

import dataclasses
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from dsft.cli.commands import PlanOptions
from dsft.cli.plan import assumed_card, describe_machine
from dsft.config.options import TrainConfig
from dsft.config.reader import split_flags
from dsft.data.batches import Sequences
from dsft.data.training_data import is_prepared, load_training_data
from dsft.errors import UserError, shown_command
from dsft.models.size import ModelSize
from dsft.planner.calibration import calibrate
from dsft.planner.candidates import SEQUENCES_PER_RANK
from dsft.planner.evaluation_plan import EvaluationPlan, plan_evaluation
from dsft.planner.plans import MEMORY_ERROR, Plan, RunCost, as_dict, run_cost, shortlist, write_plan
from dsft.planner.step_time import TIME_RANGE
from dsft.planner.zero_layout import bytes_by_phase
from dsft.run_setup.alternatives import Alternative, Largest, largest_models, longest_sequence, seconds_at, ways_to_fit
from dsft.run_setup.resolve import Choice, DecidedRun, auto_dtype, plan_run, resolve_offline
from dsft.runtime.console import show_table, show_text
from dsft.runtime.hardware import Machine, has_gpu
from dsft.units import Batch, GiB, in_gib, plural

NOTHING_FITS = 1
"""Exit code."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What was asked."""

    options: PlanOptions
    words: tuple[str, ...]
    """Those of the command line that describe the training."""
    training: TrainConfig
    """As it was asked for, without decisions."""


def answer(options: PlanOptions, training: TrainConfig, machines: list[Machine], *, words: tuple[str, ...]) -> None:
    """Print the answer for one machine or several. Args: `words`: those that `training` was read from.

    Raises:
        UserError: with every problem of the model.
    """
    if not has_gpu():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed warns that there is no GPU
    request = Request(options=options, words=words, training=training)
    if options.calibrate:
        _calibrate(request, machines[0])
    if (options.perplexity or options.largest or options.longest) and (
        len(machines) > 1 or options.write or options.explain
    ):
        raise UserError(
            ["--perplexity, --longest and --largest take one number of nodes, and neither --write nor --explain"]
        )
    if options.largest:
        _largest(request, machines[0])
    elif options.perplexity:
        _perplexity(request, machines[0])
    elif options.longest:
        _longest(request, machines[0])
    elif len(machines) > 1:
        _scale(request, machines)
    else:
        _training(request, machines[0])


def _calibrate(request: Request, machine: Machine) -> None:
    if not machine.measured:
        raise UserError(["--calibrate measures this machine; leave out --gpus, --hostfile, --gpu_type and --machine"])
    dtype = request.training.dtype if request.training.dtype != "auto" else auto_dtype(machine)
    path, others = calibrate(machine, dtype=dtype)
    print(f"dsft: speeds measured and kept in {path}", file=sys.stderr)
    if others:
        print(
            f"dsft: note: other programs hold {in_gib(others)} of a GPU: its memory outside of torch was not measured",
            file=sys.stderr,
        )


def _decided(request: Request, machine: Machine) -> DecidedRun:
    """What the training would decide on this machine; what was rounded is said."""
    training, problems = request.training, []
    wanted = request.options.tokens_per_step
    if wanted and training.global_batch_size:
        problems.append("--tokens_per_step and --global_batch_size are both set; keep one")
    elif wanted and wanted < training.seq_len:
        problems.append(
            f"--tokens_per_step {wanted} is less than one sequence of --seq_len {training.seq_len}; raise it"
        )
    elif wanted:
        share = Batch(training.training.get("per_device_train_batch_size") or 1, 1, machine.world_size).sequences
        sequences = max(1, wanted // training.seq_len // share) * share
        training = dataclasses.replace(training, global_batch_size=sequences)
        if sequences * training.seq_len != wanted:
            print(
                f"dsft: note: {sequences * training.seq_len:,} tokens per step instead of {wanted:,}: {sequences:,}"
                f" sequences of {training.seq_len:,} are what {machine.world_size:,} ranks can share evenly",
                file=sys.stderr,
            )
    attention, scored = request.options.attention, bool(request.options.perplexity)
    offline = resolve_offline(training, machine, attention=attention, scored=scored, problems=problems)
    for note in offline.notes:
        print(f"dsft: note: {note}", file=sys.stderr)
    return offline


def _choice(offline: DecidedRun, machine: Machine) -> Choice:
    return plan_run(offline.options, offline.job, machine, zero_file=offline.zero_file, must_fit=False)


def _training(request: Request, machine: Machine) -> None:
    options, offline = request.options, _decided(request, machine)
    choice, job = _choice(offline, machine), offline.job
    ways = [] if choice.plan.fits else ways_to_fit(offline.options, job, machine, attention=options.attention)
    cost = _cost(options, offline, choice, machine)
    written = []
    if options.write:
        written = write_plan(Path(options.write), choice.plan, job.size, machine, dtype=job.dtype)
    if options.json:
        print_json(
            {
                "chosen": as_dict(choice.plan) | {"reason": choice.reason},
                "candidates": [as_dict(plan) for plan in choice.candidates],
                "model": dataclasses.asdict(job.size),
                "machine": describe_machine(machine, dtype=job.dtype),
                "speeds": dataclasses.asdict(choice.speeds),
                "activations": job.activations.source,
                "cost": cost and dataclasses.asdict(cost),
                "would_fit": [command_line(request, way.change) for way in ways],
            }
        )
    else:
        shown = list(choice.candidates) if options.all else shortlist(choice.plan, list(choice.candidates), machine)
        show_plans(choice.plan, shown, job.size, machine)
        if options.explain:
            explain(choice.plan)
        sources = f"{choice.speeds.source}; activations: {job.activations.source}"
        if machine.has_gpu and not choice.speeds.outside.measured:
            sources += "; memory outside of torch: assumed"
        show_text(f"speeds: {assumed_card(options, machine)}{sources}")
        show_text(choice.reason)
        if cost:
            print(cost_text(cost))
        for path in written:
            print(f"dsft: written: {path}")
        if not choice.plan.fits:
            _print_ways(request, ways)
    if not choice.plan.fits:
        raise SystemExit(NOTHING_FITS)


def _print_ways(request: Request, ways: list[Alternative]) -> None:
    print("what would fit:" if ways else "nothing that was tried would fit: more nodes, LoRA, QLoRA, shorter sequences")
    for way in ways:
        print(f"  {command_line(request, way.change)}\n    {way.plan.label}{speed_text(way.plan, way.machine)}")


def command_line(request: Request, change: dict[str, Any]) -> str:
    """The command with these options and a change."""
    _, words = split_flags(request.words, dict.fromkeys(change, str))
    asked = {
        field.name: getattr(request.options, field.name)
        for field in dataclasses.fields(request.options)
        if getattr(request.options, field.name) != field.default
    }
    for name, value in (asked | change).items():
        words += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return shown_command(["dsft", "plan", *words])


def _longest(request: Request, machine: Machine) -> None:
    offline = _decided(request, machine)
    longest = longest_sequence(offline.job, machine)
    if request.options.json:
        print_json({"seq_len": longest[0], "plan": as_dict(longest[1])} if longest else {"seq_len": None})
    elif longest:
        tokens, plan = longest
        print(f"{tokens:,} tokens per sequence fit: {plan.label}, {plan.device_bytes / GiB:.1f} GiB per GPU")
    else:
        print("no sequence fits, however short")
    if not longest:
        raise SystemExit(NOTHING_FITS)


def _largest(request: Request, machine: Machine) -> None:
    rows = largest_models(request.training, machine, attention=request.options.attention)
    if request.options.json:
        print_json([dataclasses.asdict(row) for row in rows])
    else:
        print(f"{machine}, {request.training.seq_len:,} tokens per sequence")
        for row in rows:
            print(largest_text(row, machine))


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """One pass over prepared data, as a plan's steps take it."""

    tokens: int
    """Without padding."""
    steps: int
    mean_len: int
    """Tokens of a sequence as it is fed, padding included, in the mean."""


def prepared_epoch(run: DecidedRun, plan: Plan, machine: Machine) -> Epoch | None:
    """Counts one epoch of the run's data; None where its tokens have not been prepared."""
    options, tokenizer = run.options, run.tokenizer
    if options.eval_data:  # lies beside what is trained on
        options = dataclasses.replace(options, eval_data=[], eval_fraction=0.0)
    if not run.data or options.streaming or not is_prepared(options, run.data, tokenizer):
        return None
    data = load_training_data(options, list(run.data), [], tokenizer, pack=options.packing, flash=False)
    tokens, items = int(data.counts["tokens"]), len(data.items)
    if isinstance(data.items, Sequences):
        args = SimpleNamespace(
            per_device_train_batch_size=plan.micro_batch,
            gradient_accumulation_steps=plan.accumulation,
            data_seed=options.training.get("data_seed"),
            seed=options.training.get("seed", 42),
        )
        data.describe_batches(args, machine.world_size)
        fed = tokens / (1 - data.counts["padding_share"])
    elif options.batch_tokens:
        fed, items = tokens / (1 - data.counts["padding_share"]), items * plan.micro_batch
    else:
        fed = tokens / data.counts["fill_rate"]
    per_step = Batch(plan.micro_batch, plan.accumulation, machine.world_size).sequences
    mean_len = min(options.seq_len, max(1, round(fed / items)))
    return Epoch(tokens=tokens, steps=-(-items // per_step), mean_len=mean_len)


def _cost(options: PlanOptions, offline: DecidedRun, choice: Choice, machine: Machine) -> RunCost | None:
    """Hours of the whole training: of the tokens that are named, else of data that is prepared."""
    plan, training = choice.plan, offline.options.training
    if not plan.has_time_estimate:
        return None
    steps = training.get("max_steps", -1)
    dollars = options.dollars_per_gpu_hour
    if options.tokens:
        tokens = options.tokens * training.get("num_train_epochs", 1)
        return run_cost(plan, machine, tokens=tokens, steps=tokens / plan.time.tokens_per_step, dollars=dollars)
    epoch = prepared_epoch(offline, plan, machine)
    if epoch:
        steps = steps if steps > 0 else epoch.steps * training.get("num_train_epochs", 3)  # transformers' default
        seconds = seconds_at(offline.job, machine, choice, seq_len=epoch.mean_len)
        tokens = epoch.tokens * steps / epoch.steps
        return run_cost(plan, machine, tokens=tokens, steps=steps, dollars=dollars, step_seconds=seconds)
    if steps > 0:
        return run_cost(plan, machine, tokens=steps * plan.time.tokens_per_step, steps=steps, dollars=dollars)
    if dollars:
        raise UserError(
            ["--dollars_per_gpu_hour: a cost needs --tokens, for example 1e9, --max_steps, or data that is prepared"]
        )
    if offline.data:
        print("dsft: note: hours are counted once the data is prepared: dsft prepare, or --tokens", file=sys.stderr)
    return None


def _scale(request: Request, machines: list[Machine]) -> None:
    options = request.options
    if options.write or options.explain:
        raise UserError(["--write and --explain take one number of nodes"])
    smallest = min(machines, key=lambda machine: machine.world_size)
    offline = _decided(request, smallest)
    job = offline.job
    batch = Batch(job.micro_batch or SEQUENCES_PER_RANK, job.accumulation or 1, smallest.world_size)
    per_step = job.sequences_per_step or batch.sequences
    rows = []
    for machine in machines:
        grown = per_step * machine.world_size // smallest.world_size if options.scaling == "weak" else per_step
        scaled = dataclasses.replace(job, sequences_per_step=grown, accumulation=None)
        rows.append((machine, _choice(dataclasses.replace(offline, job=scaled), machine).plan))
        taken = rows[-1][1].time.tokens_per_step // job.seq_len
        if taken != grown:
            print(
                f"dsft: note: {machine.world_size} ranks cannot share {grown} sequences evenly: {taken} per step",
                file=sys.stderr,
            )
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


def _perplexity(request: Request, machine: Machine) -> None:
    batch_tokens = request.training.batch_tokens
    training = dataclasses.replace(request.training, batch_tokens=None, zero="auto", packing=False)
    offline = _decided(dataclasses.replace(request, training=training), machine)
    choice = plan_evaluation(
        offline.model,
        machine,
        dtype=offline.options.dtype,
        seq_len=offline.options.seq_len,
        attention=request.options.attention,
        batch_tokens=batch_tokens,
        sequence_parallel=request.options.sequence_parallel,
    )
    if request.options.json:
        print_json(
            {
                "chosen": dataclasses.asdict(choice.plan) | {"reason": choice.reason},
                "candidates": [dataclasses.asdict(plan) for plan in choice.candidates],
                "longest_window": choice.longest_window,
            }
        )
    else:
        known = choice.speeds.has_time_estimate
        show_evaluation_plans(
            choice.plan, list(choice.candidates), offline.model.size, machine, has_time_estimate=known
        )
        show_text(choice.reason)
        if choice.longest_window:
            ranks_of_window = plural(request.options.sequence_parallel, "rank")
            print(f"longest window that fits: {choice.longest_window:,} tokens on {ranks_of_window}")


def print_json(content: Any) -> None:
    print(json.dumps(content, indent=2))


PHASES = {
    "always": "always",
    "compute": "forward and backward",
    "step": "optimizer step",
    "save": "saving",
    "load": "loading",
}


def describe_model(size: ModelSize) -> str:
    """One line: parameters by kind."""
    parts = [
        f"{size.num_params / 1e9:,.3f} B parameters",
        f"{size.num_trainable / 1e9:,.3f} B trained",
        f"embedding {size.embedding_params / 1e9:,.3f} B",
    ]
    parts.append(f"head {size.head_params / 1e9:,.3f} B" if size.head_params else "head tied")
    if size.expert_params:
        parts.append(f"experts {size.expert_params / 1e9:,.3f} B, {size.active_params / 1e9:,.3f} B active per token")
    if size.other_params:
        parts.append(f"{size.other_params / 1e9:,.3f} B beside the text model, frozen: no text reaches them")
    return ", ".join(parts)


NUMBERS = ("states", "buffers", "activations", "step", "peak", "host", "s/step", "tokens/s")


def show_plans(chosen: Plan, plans: list[Plan], size: ModelSize, machine: Machine) -> None:
    """The table of these candidates, the chosen one marked."""
    device = "GPU" if machine.has_gpu else "rank"
    error = ""
    if machine.has_gpu:
        least, most = TIME_RANGE
        error = f"; published runs took {least:.2f} to {most:.2f} of their time, memory within {MEMORY_ERROR:.0%}"
    table = Table(
        caption=f"GiB per {device}; host: GiB per node; batch: sequences of a micro batch x accumulation{error}",
        caption_justify="left",
        box=SIMPLE_HEAD,
        show_edge=False,
        padding=(0, 1, 0, 0),
    )  # 120 columns hold it
    for name in ("", "ZeRO", "ckpt", "batch", *NUMBERS, f"per {device}", "fits"):
        left = name in ("", "ZeRO", "ckpt", "batch", "fits")
        table.add_column(name, no_wrap=True, justify="left" if left else "right")
    for plan in plans:
        table.add_row("->" if plan is chosen else "", *_plan_row(plan, machine))
    print(f"{describe_model(size)}\n{machine}")
    show_table(table)
    print(f"{chosen.time.tokens_per_step:,} tokens per step")


def _plan_row(plan: Plan, machine: Machine) -> list[str]:
    parts = bytes_by_phase(plan.terms, "device")
    sizes = (
        parts["always"],
        parts["compute"] - plan.activation_bytes,
        plan.activation_bytes,
        parts["step"],
        plan.device_bytes,
        plan.host_bytes,
    )
    speed = plan.time.tokens_per_second
    times = [f"{plan.time.step_seconds:,.2f}", f"{speed:,.0f}", f"{speed / machine.world_size:,.0f}"]
    return [
        plan.zero,
        "on" if plan.activation_checkpointing else "off",
        f"{plan.micro_batch} x {plan.accumulation}",
        *(f"{number / GiB:,.1f}" for number in sizes),
        *(times if plan.has_time_estimate else ["-"] * 3),
        _fits(plan, plan.limiting_resource.replace(" memory", "").replace(" and ", "+")),
    ]


def _fits(plan: Plan | EvaluationPlan, limiting_resource: str) -> str:
    return ("tight" if plan.low_headroom else "yes") if plan.fits else f"no: {limiting_resource}"


def explain(plan: Plan) -> None:
    """Every term of one plan with its formula, and the parts of its time."""
    table = Table(title=plan.label, title_justify="left")
    for name in ("term", "held", "where", "GiB", "formula"):
        table.add_column(name, justify="right" if name == "GiB" else "left")
    for term in sorted(plan.terms, key=lambda term: (term.place, list(PHASES).index(term.phase))):
        table.add_row(
            term.name,
            PHASES[term.phase],
            "one GPU or rank" if term.place == "device" else "one node",
            f"{term.num_bytes / GiB:,.3f}",
            term.formula,
        )
    times = Table(title="one optimizer step", title_justify="left")
    for name in ("part", "seconds"):
        times.add_column(name, justify="right" if name == "seconds" else "left")
    time = plan.time
    for name, seconds in (
        ("computing", time.compute_seconds),
        ("communication, if nothing hid it", time.communication_seconds),
        ("offload transfers, if nothing hid them", time.offload_seconds),
        ("optimizer", time.optimizer_seconds),
        ("together", time.step_seconds),
    ):
        times.add_row(name, f"{seconds:,.4f}")
    show_table(table)
    show_table(times)
    print("peak = always + the larger of (forward and backward) and (optimizer step)")


def largest_text(row: Largest, machine: Machine) -> str:
    """One sentence for a method: the largest model with its plan, and the next one."""
    if not row.plan:
        return f"{row.method}: none fits, from {row.too_large[0]} on"
    beyond = f"; not {row.too_large[0]}" if row.too_large else ""
    return f"{row.method}: up to {row.fits[-1]} ({row.plan.label}{speed_text(row.plan, machine)}){beyond}"


def speed_text(plan: Plan, machine: Machine) -> str:
    """Tokens per second of one GPU, to be appended; empty where no time is told."""
    speed = plan.time.tokens_per_second / machine.world_size
    return f", {speed:,.0f} tokens/s per {'GPU' if machine.has_gpu else 'rank'}" if plan.has_time_estimate else ""


def cost_text(cost: RunCost) -> str:
    """One sentence: hours, GPU hours and dollars."""
    dollars = "" if cost.dollars is None else f", {cost.dollars:,.0f} dollars"
    hours = f"{cost.hours:,.1f} hours"
    if cost.most_hours > cost.least_hours:
        hours += f" ({cost.least_hours:,.1f} to {cost.most_hours:,.1f})"
    return f"{cost.tokens:,.0f} tokens in {cost.steps:,.0f} steps: {hours}, {cost.gpu_hours:,.0f} GPU hours{dollars}"


def show_scale(rows: list[tuple[Machine, Plan]]) -> None:
    """How speed, memory and cost move with the number of nodes."""
    table = Table(caption="GiB per GPU; host: GiB per node; GPU hours for 1e9 tokens", caption_justify="left")
    for name in ("nodes", "GPUs", "tokens/step", "plan", "peak", "host", "s/step", "tokens/s", "GPU hours", "fits"):
        table.add_column(name, no_wrap=name != "plan", justify="left" if name in ("plan", "fits") else "right")
    for machine, plan in rows:
        times = [f"{plan.time.step_seconds:,.2f}", f"{plan.time.tokens_per_second:,.0f}"]
        times.append(f"{gpu_hours(plan, machine):,.1f}")
        table.add_row(
            str(machine.nodes),
            str(machine.world_size),
            f"{plan.time.tokens_per_step:,}",
            plan.label,
            f"{plan.device_bytes / GiB:,.1f}",
            f"{plan.host_bytes / GiB:,.0f}",
            *(times if plan.has_time_estimate else ["-"] * 3),
            _fits(plan, plan.limiting_resource),
        )
    show_table(table)


def gpu_hours(plan: Plan, machine: Machine) -> float:
    """GPU hours for 1e9 tokens."""
    return 1e9 / plan.time.tokens_per_second * machine.world_size / 3600


def show_evaluation_plans(
    chosen: EvaluationPlan, plans: list[EvaluationPlan], size: ModelSize, machine: Machine, *, has_time_estimate: bool
) -> None:
    """The table of the ways to hold a model while scoring; speeds where they are more than rules of thumb."""
    table = Table(caption=f"GiB per {'GPU' if machine.has_gpu else 'rank'}; host: GiB per node", caption_justify="left")
    for name in ("", "zero", "batch_tokens", "weights", "activations and logits", "peak", "host", "tokens/s", "fits"):
        table.add_column(name, no_wrap=True, justify="left" if name in ("", "zero", "fits") else "right")
    for plan in plans:
        numbers = (plan.weight_bytes, plan.activation_bytes, plan.device_bytes, plan.host_bytes)
        table.add_row(
            "->" if plan is chosen else "",
            plan.zero,
            f"{plan.batch_tokens:,}",
            *(f"{number / GiB:,.1f}" for number in numbers),
            f"{plan.tokens_per_second:,.0f}" if has_time_estimate else "-",
            _fits(plan, plan.limiting_resource),
        )
    print(f"{describe_model(size)}\n{machine}")
    show_table(table)
