"""Answers of `dsft plan`: the training's decisions -> table, JSON or files. Loads torch."""

import dataclasses
import json
import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from transformers import TrainingArguments

from dsft.cli.commands import PlanOptions
from dsft.config.deepspeed import offloads
from dsft.config.options import Decision, TrainConfig, decide
from dsft.data.tokens import tokenise
from dsft.errors import UserError
from dsft.planner.activations import attention_of
from dsft.planner.choose import (
    OFFLOAD_GAIN,
    Plan,
    as_dict,
    describe_memory,
    longest_length,
    plan_evaluation,
    plan_flags,
)
from dsft.planner.speed import CARDS, card_of
from dsft.runtime.console import print_json, show_table, show_text
from dsft.runtime.hardware import Machine
from dsft.setup.decide import Choice, TrainingRun, plan_run, resolve_offline, smaller_plan
from dsft.units import GiB, MiB, in_gib, in_time, plural

NOTHING_FITS = 1
"""Exit code."""
MOST_READ_BYTES = 2**28
TOKENISED_ROWS = 200
CLEARLY_FASTER = 1.1
NODES = (2, 4, 8, 16, 32, 64)
SHORTEST = 512


@dataclass(frozen=True)
class Alternative:
    option: str
    """An option of `dsft plan`."""
    value: Any
    plan: Plan


def answer(options: PlanOptions, training: TrainConfig, machines: list[Machine], words: Sequence[str]) -> None:
    """Print the answer, or exit with NOTHING_FITS. `training` and `words`: the options as the user wrote them."""
    runs = [resolve_offline(training, machine, scored=options.perplexity) for machine in machines]
    for note in dict.fromkeys(note for run in runs for note in run.notes):
        show_text(f"dsft: note: {note}", file=sys.stderr)
    if options.perplexity:
        fits = answer_perplexity(options, runs[0])
    elif options.longest:
        fits = answer_longest(options, runs[0])
    elif len(machines) > 1:
        fits = compare_machines(options, runs)
    else:
        fits = answer_training(options, training, runs[0], words)
    if not fits:
        raise SystemExit(NOTHING_FITS)


def answer_training(options: PlanOptions, training: TrainConfig, run: TrainingRun, words: Sequence[str]) -> bool:
    """Print the plan for one machine with alternatives, or what would fit instead; return whether it fits."""
    machine = run.machine
    choice = plan_run(run, must_fit=False)
    plan = run.plan = choice.plan
    nodes = () if options.hostfile else NODES  # a host file names all there are
    ways = [] if plan.fits else ways_to_fit(training, machine, nodes)
    whole = whole_training(options.tokens, run, plan)
    if options.out:
        write_plan(Path(options.out), plan, run)
    if options.json:
        print_json(
            {
                "chosen": as_dict(plan) | {"reason": choice.reason},
                "candidates": [as_dict(candidate) for candidate in choice.candidates],
                "model": dataclasses.asdict(run.job.size),
                "machine": dataclasses.asdict(machine),
                "hours": whole and whole[0] / 3600,
                "would_fit": [{way.option: way.value} for way in ways],
            }
        )
        return plan.fits
    model = Path(run.options.model.removesuffix("/config.json")).name
    job = f"{model}, {run.options.method}, {describe_machine(machine)}"
    label = plan.label
    is_offloaded = offloads(plan.deepspeed_config)
    if machine.world_size == 1 and not is_offloaded:  # nothing is sharded in any stage
        label = label.removeprefix(f"ZeRO {plan.zero}, ")
    fits = "fits:" if plan.fits else "nothing fits; the closest takes"
    needs_host = is_offloaded or not machine.has_gpu or not plan.fits
    lines = [f"{job}: {label}", f"{fits} {describe_memory(plan, machine, host=needs_host)}"]
    if plan.fits:
        if plan.has_time_estimate:
            time = f"{in_time(plan.step_seconds)} per step, {plan.tokens_per_second:,.0f} tokens/s"
            if whole:
                time = f"{whole[1]}: about {in_time(whole[0])}; {time}"
            if not CARDS[card_of(machine)].utilisation:
                time += " (a guess: no training on this card was published)"
            lines.append(time)
        lines.append(train_command(training, words))
        lines += [f"faster: {describe_way(way)}" for way in faster_ways(training, plan, machine)]
        without = ways_without_offload(training, plan, machine)
        lines += [f"without offload: {describe_way(way)}" for way in without]
        smaller = None if without else smaller_plan(run)
        if smaller:
            flags = plan_flags(smaller, run.job)
            if machine.world_size == 1 and not offloads(smaller.deepspeed_config):
                flags = flags.removeprefix(f"--zero {smaller.zero} ")
            lines.append(f"smaller: {flags} ({describe_cost(smaller)})")
    lines += [f"would fit: {describe_way(way)}" for way in ways]
    show_text("\n".join(lines))
    if options.explain:
        explain(run, choice)
    return plan.fits


def describe_machine(machine: Machine) -> str:
    if not machine.has_gpu:
        return plural(machine.world_size, "CPU rank")
    nodes = f"{machine.nodes}x" if machine.nodes > 1 else ""
    return f"{nodes}{machine.ranks_per_node}x{machine.gpu_type or in_gib(machine.device_bytes)}"


def train_command(training: TrainConfig, words: Sequence[str]) -> str:
    """Return the command of this plan's training, as one line for a shell; `words` are the user's."""
    command = f"dsft train {shlex.join(words)}"
    if not training.data:
        command += " --data DATA"
    if "output_dir" not in training.training:
        command += " --output_dir runs/first"
    return command


def describe_way(way: Alternative) -> str:
    return f"--{way.option} {way.value} ({describe_cost(way.plan)})"


def describe_cost(plan: Plan) -> str:
    speed = f", {plan.tokens_per_second:,.0f} tokens/s" if plan.has_time_estimate else ""
    return in_gib(plan.device_bytes) + speed


def explain(run: TrainingRun, choice: Choice) -> None:
    """Print the assumptions, and every term of the chosen plan."""
    plan = choice.plan
    job = run.job
    size = job.size
    candidates = sorted(choice.candidates, key=lambda each: each.step_seconds / each.tokens_per_step)
    named = [("->" if each is plan else "", each) for each in candidates]
    show_table(plans_table(named, shards=run.machine.world_size > 1))
    lines = [
        f"{job.seq_len:,} tokens per sequence, {job.dtype}, {job.optimizer}",
        f"B parameters: {size.num_params / 1e9:,.3f}, of a token {size.active_params / 1e9:,.3f}, trained"
        f" {size.num_trainable / 1e9:,.3f}",
        str(run.machine),
        choice.reason,
        f"to keep this plan: {plan_flags(plan, job)}",
    ]
    if not job.activations.is_measured:
        lines.append(f"activations: those of a Llama as wide: {size.model_type} does not run without weights")
    for place, title in (("device", f"one {run.machine.place}"), ("host", "host memory of one node")):
        lines += ["", f"{title}, GiB, and when:"]
        for term in plan.terms:
            if term.place == place and term.num_bytes >= MiB:
                lines.append(f"{term.num_bytes / GiB:9.2f}  {term.phase:9}  {term.name} ({term.formula})")
    show_text("\n".join(lines))


def compare_machines(options: PlanOptions, runs: list[TrainingRun]) -> bool:
    """Print one row per machine; return whether a training fits on any."""
    plans = [plan_run(run, must_fit=False).plan for run in runs]
    if options.json:
        pairs = zip(runs, plans, strict=True)
        print_json([{"machine": dataclasses.asdict(run.machine), "plan": as_dict(plan)} for run, plan in pairs])
    else:
        names = [describe_machine(run.machine) for run in runs]
        show_table(plans_table(zip(names, plans, strict=True)))
    return any(plan.fits for plan in plans)


def plans_table(plans: Iterable[tuple[str, Plan]], *, shards: bool = True) -> Table:
    """Return a table with a row per plan, which begins with its word. `shards`: show stages without an offload too."""
    names = ("", "ZeRO" if shards else "offload", "ckpt", "batch", "peak GiB", "step", "tokens/s")
    table = Table(*names, box=SIMPLE_HEAD, show_edge=False)
    for word, plan in plans:
        table.add_row(
            word,
            plan.zero if shards or offloads(plan.deepspeed_config) else "",
            plan.checkpointing,
            f"{plan.micro_batch} x {plan.accumulation}",
            f"{plan.device_bytes / GiB:,.1f}" + ("" if plan.fits else " (no)"),
            in_time(plan.step_seconds) if plan.has_time_estimate else "-",
            f"{plan.tokens_per_second:,.0f}" if plan.has_time_estimate else "-",
        )
    return table


def whole_training(tokens: float | None, run: TrainingRun, plan: Plan) -> tuple[float, str] | None:
    """Return (seconds of the training, its steps or epochs), by `max_steps`, `tokens` or the data; None if unknown."""
    if not plan.has_time_estimate:
        return None
    training = run.options.training
    steps = training.get("max_steps", -1)
    if steps > 0:
        return steps * plan.step_seconds, plural(steps, "step")
    tokens = tokens or count_tokens(run)
    if not tokens:
        return None
    epochs = training.get("num_train_epochs", TrainingArguments.num_train_epochs)
    seconds = max(tokens / plan.tokens_per_second, plan.step_seconds) * epochs  # an epoch has at least one step
    return seconds, f"{epochs:g} epoch{'s' * (epochs != 1)}"


def count_tokens(run: TrainingRun) -> float | None:
    """Estimate the tokens of the data from its first rows; None without data, or if it takes long to read."""
    size_bytes = sum(each.source.size_bytes for each in run.data)
    if not run.data or run.tokenizer is None or size_bytes > MOST_READ_BYTES:
        return None
    tokens = 0.0
    for each in run.data:
        num_rows = sum(row.values is not None for row in each.rows())
        sample = each.source.first_rows()[:TOKENISED_ROWS]
        ids = tokenise(sample, each.rules, run.tokenizer).ids
        tokens += num_rows * len(ids) / len(sample)
    return tokens


def answer_longest(options: PlanOptions, run: TrainingRun) -> bool:
    """Print the longest sequence that fits, one at a time per GPU or per group that shares one; return if any fits."""
    job = dataclasses.replace(run.job, micro_batch=1, accumulation=1, sequences_per_step=None)

    def plan_of(length):
        attention = attention_of(run.model, seq_len=length, masked=run.masked)  # a mask above a sliding window
        changed = dataclasses.replace(job, seq_len=length, attention=attention)
        return plan_run(dataclasses.replace(run, job=changed), must_fit=False).plan

    length = longest_length(lambda length: plan_of(length).fits, job.size)
    plan = plan_of(length) if length else None
    if options.json:
        print_json({"seq_len": length or None, "plan": plan and as_dict(plan)})
    elif plan:
        show_text(f"{length:,} tokens per sequence fit: {plan.label}, {describe_memory(plan, run.machine, host=False)}")
    else:
        show_text("no sequence fits, however short")
    return plan is not None


def answer_perplexity(options: PlanOptions, run: TrainingRun) -> bool:
    plan = plan_evaluation(
        run.model,
        run.machine,
        dtype=run.options.dtype,
        seq_len=run.options.seq_len,
        zero=run.options.zero,
    )
    if options.json:
        print_json({"chosen": dataclasses.asdict(plan)})
        return plan.fits
    show_text(f"perplexity of {run.options.model}\n{run.machine}\n{plan.reason}")
    if plan.longest_window:
        show_text(f"longest window that fits: {plan.longest_window:,} tokens")
    return plan.fits


def write_plan(folder: Path, plan: Plan, run: TrainingRun) -> None:
    """Write a new deepspeed.json to `folder`, with "auto" for values of the training's options."""
    config = plan.deepspeed_config | {
        "train_micro_batch_size_per_gpu": plan.micro_batch,
        "gradient_accumulation_steps": plan.accumulation,
        "train_batch_size": run.job.batch(plan.micro_batch, plan.accumulation, run.machine).sequences,
    }
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "deepspeed.json").open("x", encoding="utf-8") as file:
        file.write(json.dumps(config, indent=2) + "\n")
    show_text(f"dsft: written: {folder / 'deepspeed.json'}", file=sys.stderr)


def ways_to_fit(options: TrainConfig, machine: Machine, nodes: Sequence[int]) -> list[Alternative]:
    """Return changes with which a training fits that does not: of each kind the smallest sufficient one."""
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
    return _ways(options, machine, kinds)


def faster_ways(options: TrainConfig, plan: Plan, machine: Machine) -> list[Alternative]:
    """Return another precision with which a training that fits is clearly faster, if there is one."""
    kinds = {}
    if machine.has_gpu and not CARDS[card_of(machine)].has_bf16 and options.dtype == "auto":
        kinds["dtype"] = ["float16"]
    if options.method == "full" and offloads(plan.deepspeed_config):
        kinds["states"] = ["bfloat16"]
    return _ways(options, machine, kinds, least_speed=CLEARLY_FASTER * plan.tokens_per_second)


def ways_without_offload(options: TrainConfig, plan: Plan, machine: Machine) -> list[Alternative]:
    """Return whether ranks that share each sequence need no offload, and are at most slower by OFFLOAD_GAIN."""
    if options.sequence_parallel == machine.ranks_per_node or not offloads(plan.deepspeed_config):
        return []
    kinds = {"sequence_parallel": [machine.ranks_per_node]}
    ways = _ways(options, machine, kinds, least_speed=plan.tokens_per_second / OFFLOAD_GAIN)
    return [way for way in ways if not offloads(way.plan.deepspeed_config)]


def _ways(
    options: TrainConfig, machine: Machine, kinds: dict[str, list[Any]], *, least_speed: float = 0.0
) -> list[Alternative]:
    """Return, for each kind of change, the first value whose plan fits and is faster than `least_speed` tokens/s."""
    ways = []
    for name, values in kinds.items():
        for value in values:
            changed = options
            changed_machine = machine
            if name == "nodes":
                changed_machine = dataclasses.replace(machine, nodes=value)
            else:
                changed = decide(options, [Decision(name, value, "it is tried")])
            try:
                plan = plan_run(resolve_offline(changed, changed_machine), must_fit=False).plan
            except UserError:  # a training would be refused
                continue
            if plan.fits and plan.tokens_per_second > least_speed:
                ways.append(Alternative(name, value, plan))
                break
    return ways
