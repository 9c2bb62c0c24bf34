"""What `dsft plan` answers: what the training would decide -> table, JSON or files. Loads torch."""

import dataclasses
import json
import sys
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Column, Table
from transformers import TrainingArguments

from dsft.cli.commands import PlanOptions
from dsft.config.deepspeed import get_value, stage
from dsft.config.options import TrainConfig, shuffle_seed
from dsft.config.reader import split_flags
from dsft.data.epoch import EpochSampler, PaddedToFullSteps
from dsft.data.training_data import is_prepared, load_training_data
from dsft.errors import UserError, raise_if_any, shown_command
from dsft.launch.launchers import flag_words
from dsft.models.sequence_parallel import refused_ranks
from dsft.models.size import ModelSize, check_sharding
from dsft.models.trials import length_limits
from dsft.planner.activations import Job
from dsft.planner.calibration import calibrate, to_carry
from dsft.planner.candidates import SEQUENCES_PER_RANK
from dsft.planner.evaluation_plan import plan_evaluation
from dsft.planner.plans import (
    MEMORY_ERROR,
    WORTH_IT,
    Needs,
    Plan,
    RunCost,
    as_dict,
    predicted,
    run_cost,
    shortlist,
    speed_of,
    write_plan,
)
from dsft.planner.step_time import GPUS, TIME_RANGES, named_gpus
from dsft.planner.zero_layout import DEFAULT_OPTIMIZER, bytes_by_phase
from dsft.run_setup.alternatives import EIGHT_BIT, largest_models, longest_sequence, seconds_at, ways_to_fit
from dsft.run_setup.arguments import batch_decisions
from dsft.run_setup.evaluation_checks import read_scoring_file
from dsft.run_setup.resolve import Choice, TrainingRun, auto_dtype, choose_plan, plan_run, resolve_offline, with_disk_of
from dsft.runtime.console import show_table, show_text
from dsft.runtime.hardware import Machine, split_gpus
from dsft.units import Batch, GiB, in_gib, plural

NOTHING_FITS = 1
"""Exit code."""
PHASES = {
    "always": "always",
    "compute": "forward and backward",
    "step": "optimizer step",
    "sample": "generating samples",
    "save": "saving",
    "load": "loading",
}
LEFT = ("", "ZeRO", "zero", "ckpt", "batch", "plan", "fits")
"""Columns of text; the others are numbers."""
ON_THE_LEFT = {"title_justify": "left", "caption_justify": "left"}
NARROW = {"box": SIMPLE_HEAD, "show_edge": False, "padding": (0, 1, 0, 0)}
"""120 columns hold the table of candidates so."""


def answer(options: PlanOptions, training: TrainConfig, machines: list[Machine], *, words: tuple[str, ...]) -> None:
    """Print the answer for one machine or several. Args: `training`: as it was asked for, without decisions; `words`:
    those of the command line that `training` was read from. Ends with NOTHING_FITS where nothing does. Raises UserError
    with every problem of the model.
    """
    machine = machines[0]
    if options.calibrate:
        if not machine.measured:
            raise UserError("--calibrate measures this machine; leave out --gpus, --hostfile, --gpu_type and --machine")
        dtype = training.dtype if training.dtype != "auto" else auto_dtype(machine)
        path, others = calibrate(machine, dtype=dtype)
        show_text(f"dsft: speeds measured and kept in {path}", file=sys.stderr)
        if others:
            print_note(f"other programs hold {in_gib(others)} of a GPU: its memory outside of torch was not measured")
    if options.largest:
        rows = largest_models(training, machine, attention=options.attention)
        fits = any(row.plan for row in rows)
        if options.json:
            print_json([dataclasses.asdict(row) for row in rows])
        else:
            show_text(f"{machine}, {training.seq_len:,} tokens per sequence")
            for row in rows:
                beyond = f"; not {row.too_large[0]}" if row.too_large else ""
                if row.plan:
                    speed = speed_text(row.plan, machine)
                    show_text(f"{row.method}: up to {row.fits[-1]} ({row.plan.label}{speed}){beyond}")
                else:
                    show_text(f"{row.method}: none fits, from {row.too_large[0]} on")
    elif options.perplexity:
        fits = _perplexity(options, training, machine)
    elif options.longest:
        longest = longest_sequence(_decided(options, training, machine))
        fits = longest is not None
        if options.json:
            print_json({"seq_len": longest[0], "plan": as_dict(longest[1])} if longest else {"seq_len": None})
        elif longest:
            tokens, plan = longest
            held = f"{plan.device_bytes / GiB:.1f} GiB per {machine.place}"
            show_text(f"{tokens:,} tokens per sequence fit: {plan.label}, {held}")
        else:
            show_text("no sequence fits, however short")
    elif len(machines) > 1:
        fits = _scale(options, training, machines)
    else:
        fits = _training(options, training, machine, words)
    if not fits:
        raise SystemExit(NOTHING_FITS)


def empty_table(columns: Iterable[str], **options: Any) -> Table:
    """A table of plans. Args: `options`: of rich."""
    table = Table(**ON_THE_LEFT, **options)
    for name in columns:
        table.add_column(name, no_wrap=name != "plan", justify="left" if name in LEFT else "right")
    return table


def print_json(content: Any) -> None:
    print(json.dumps(content, indent=2))


def print_note(text: str) -> None:
    show_text(f"dsft: note: {text}", file=sys.stderr)


def _decided(
    options: PlanOptions, training: TrainConfig, machine: Machine, *, noted: Collection[str] = ()
) -> TrainingRun:
    """What the training would decide on this machine; what was rounded is printed, and notes but those `noted`."""
    problems: list[str] = []
    wanted = options.tokens_per_step
    if wanted and training.global_batch_size:
        problems.append("--tokens_per_step and --global_batch_size are both set; keep one")
    elif wanted and wanted < training.seq_len:
        problems.append(
            f"--tokens_per_step {wanted} is less than one sequence of --seq_len {training.seq_len}; raise it"
        )
    elif wanted:
        micro = training.training.get("per_device_train_batch_size") or 1
        # 0 where fewer ranks are there than are to share a sequence, which is refused below.
        share = Batch(micro, 1, machine.world_size, training.sequence_parallel).sequences or 1
        sequences = max(1, wanted // training.seq_len // share) * share
        training = dataclasses.replace(training, global_batch_size=sequences)
        if sequences * training.seq_len != wanted:
            print_note(
                f"{sequences * training.seq_len:,} tokens per step instead of {wanted:,}: {sequences:,} sequences of"
                f" {training.seq_len:,} are what {plural(machine.world_size, 'rank')} can share evenly"
            )
    offline = resolve_offline(
        training, machine, attention=options.attention, scored=options.perplexity, problems=problems
    )
    for note in offline.notes:
        if note not in noted:
            print_note(note)
    return offline


def _training(options: PlanOptions, training: TrainConfig, machine: Machine, words: tuple[str, ...]) -> bool:
    """One machine: the chosen plan beside its candidates, its terms, cost and files, or what else would fit; whether it
    fits.
    """
    offline = _decided(options, training, machine)
    job = offline.job
    choice = plan_run(offline.options, job, machine, zero_file=offline.zero_file, must_fit=False)
    plan = choice.plan
    asked = offline.options
    if training.zero.endswith(".json"):  # its numbers go with it
        total = offline.options.global_batch_size if options.tokens_per_step else training.global_batch_size
        asked = dataclasses.replace(training, global_batch_size=total)
    ways = [] if plan.fits else ways_to_fit(asked, job, machine, attention=options.attention)
    given = {
        field.name: getattr(options, field.name)
        for field in dataclasses.fields(options)
        if getattr(options, field.name) != field.default
    }

    def command(change: Mapping[str, Any]) -> str:
        """These words with a change."""
        _, others = split_flags(words, dict.fromkeys(change, str))
        return shown_command(["dsft", "plan", *others, *flag_words(given | change)])

    commands = [command(way.change) for way in ways]
    cost = _cost(options, offline, choice, machine)
    written = []
    if options.write:
        clipping = offline.options.training.get("max_grad_norm", TrainingArguments.max_grad_norm)
        written = write_plan(Path(options.write), plan, job, machine, max_grad_norm=clipping)
    is_sharded = stage(plan.deepspeed_config) == 3
    traced_by = (job.activations_of_shards if is_sharded else job.activations).source
    if options.record:
        print(predicted(command({}), plan, ranks=machine.world_size))
    elif options.json:
        print_json(
            {
                "chosen": as_dict(plan) | {"reason": choice.reason},
                "candidates": [as_dict(candidate) for candidate in choice.candidates],
                "model": dataclasses.asdict(job.size),
                "machine": describe_machine(machine, dtype=job.dtype),
                "speeds": dataclasses.asdict(choice.speeds),
                "activations": traced_by,
                "cost": cost and dataclasses.asdict(cost),
                "would_fit": commands,
            }
        )
    else:
        shown = [plan] if plan.fits else shortlist(plan, list(choice.candidates), machine)
        show_text(describe_question(offline, [job.dtype]))
        shown = list(choice.candidates) if options.all else shown
        show_plans(plan, shown, job.size, machine, is_traced=" of llama" not in traced_by)
        if options.explain:
            explain(plan)
        sources = f"{choice.speeds.source}; activations: {traced_by}"
        if machine.has_gpu and not choice.speeds.outside.measured:
            sources += "; memory outside of torch: assumed"
        # For which card the time is, where only a size was given and others have it too.
        is_by_size = options.gpus and not options.gpu_type and not named_gpus(split_gpus(options.gpus)[1])
        if is_by_size:
            card, memory_gb = machine.gpu_type, GPUS[machine.gpu_type].memory_gb
            alike = [name for name, gpu in GPUS.items() if name != card and gpu.memory_gb == memory_gb]
            if alike:
                sources = f"{card} assumed, {', '.join(alike)} have as much memory (--gpu_type); {sources}"
        show_text(f"speeds: {sources}")
        show_text("\n".join([choice.sentence, *choice.notes]))
        is_open = offline.options.zero == "auto" and job.optimizer == DEFAULT_OPTIMIZER and not job.size.lora_r
        if plan.fits and is_open and "offload" in plan.zero:
            eight_bit = choose_plan(dataclasses.replace(job, optimizer=EIGHT_BIT), machine).plan
            gain = speed_of(eight_bit) / speed_of(plan)
            if eight_bit.fits and gain >= WORTH_IT:
                show_text(f"with --optim {EIGHT_BIT}: {eight_bit.label}, {gain:.2f} times as fast")
        if cost:
            hours = f"{cost.hours:,.1f} hours"
            if cost.most_hours > cost.least_hours:
                hours += f" ({cost.least_hours:,.1f} to {cost.most_hours:,.1f})"
            dollars = "" if cost.dollars is None else f", {cost.dollars:,.0f} dollars"
            steps = f"{cost.tokens:,.0f} tokens in {cost.steps:,.0f} steps"
            if cost.epochs:
                steps += f" ({cost.epochs:.3g} {'epoch' if cost.epochs == 1 else 'epochs'}, --num_train_epochs)"
            show_text(f"{steps}: {hours}, {cost.gpu_hours:,.0f} GPU hours{dollars}")
        for path in written:
            show_text(f"dsft: written: {path}")
        if ways:
            show_text("what would fit:")
        elif not plan.fits:
            show_text("no change of options that was tried would fit: more nodes, LoRA, QLoRA, shorter sequences")
        for way, command in zip(ways, commands, strict=True):
            show_text(f"  {command}", is_command=True)
            show_text(f"    {way.plan.label}{speed_text(way.plan, way.machine)}")
    return plan.fits


def describe_machine(machine: Machine, *, dtype: str) -> dict[str, Any]:
    """Make what `--machine` reads: this machine and what was measured on it, without names of hosts and folders."""
    carried = {"carried": to_carry(machine, dtype=dtype)} if machine.measured else {}
    return dataclasses.asdict(machine) | carried | {"nvme_path": "", "host_names": ()}


def prepared_epoch(run: TrainingRun, plan: Plan, machine: Machine) -> tuple[int, int, int] | None:
    """Counts one epoch of the run's data, as the plan's steps take it: (tokens without padding, steps, tokens of a
    sequence in the mean, padding included); None where its tokens have not been prepared.
    """
    options, tokenizer = run.options, run.tokenizer
    if options.eval_data:  # lies beside what is trained on
        options = dataclasses.replace(options, eval_data=[], eval_fraction=0.0)
    if not run.data or not is_prepared(options, run.data, tokenizer):
        return None
    limits = length_limits(run.model.config)
    data = load_training_data(options, list(run.data), [], tokenizer, limits=limits)
    tokens, items = int(data.items.lengths.sum()), len(data.items)
    batch = Batch(plan.micro_batch, plan.accumulation, machine.world_size, options.sequence_parallel)
    order = {"seed": shuffle_seed(options.training), "drop_last": bool(options.training.get("dataloader_drop_last"))}
    data.describe_batches(batch, **order)
    steps = EpochSampler(PaddedToFullSteps(data.items, batch.sequences), step=lambda: 0, **order).steps
    fed = tokens / data.counts["fill_rate"] if options.packing else tokens / (1 - data.counts["padding_share"])
    tokens = tokens * min(items, steps * batch.sequences) // items  # the others are left out
    return tokens, steps, min(options.seq_len, max(1, round(fed / items)))


def _cost(options: PlanOptions, offline: TrainingRun, choice: Choice, machine: Machine) -> RunCost | None:
    """Hours of the whole training: of the tokens that are named, else of data that is prepared."""
    plan, training, dollars = choice.plan, offline.options.training, options.dollars_per_gpu_hour
    max_steps = training.get("max_steps", -1)
    if not plan.has_time_estimate:
        return None
    if not options.tokens and (epoch := prepared_epoch(offline, plan, machine)):
        tokens, steps, mean_len = epoch
        epochs = training.get("num_train_epochs", TrainingArguments.num_train_epochs)
        epochs = max_steps / steps if max_steps > 0 else epochs
        return run_cost(
            plan,
            machine,
            tokens=tokens * epochs,
            epochs=epochs,
            steps=steps * epochs,
            dollars=dollars,
            step_seconds=seconds_at(offline.job, machine, choice, seq_len=mean_len),
        )
    if options.tokens or max_steps > 0:
        return cost_of_tokens(options.tokens, training, plan, machine, dollars)
    if dollars:
        raise UserError(
            "--dollars_per_gpu_hour: a cost needs --tokens, for example 1e9, --max_steps, or data that is prepared"
        )
    if offline.data:
        print_note("hours are counted once the data is prepared: dsft prepare, or --tokens")
    return None


def cost_of_tokens(
    tokens: float | None, training: Mapping[str, Any], plan: Plan, machine: Machine, dollars: float | None = None
) -> RunCost:
    """Of the steps, else the epochs, that `training` sets, on data of so many tokens; of 1e9 tokens where neither is
    set. Args: `dollars`: of one GPU for an hour.
    """
    per_step, max_steps = plan.time.tokens_per_step, training.get("max_steps", -1)
    epochs = training.get("num_train_epochs", TrainingArguments.num_train_epochs)
    taken = max_steps * per_step if max_steps > 0 else tokens * epochs if tokens else 1e9
    passes = taken / tokens if tokens else None
    return run_cost(plan, machine, tokens=taken, epochs=passes, steps=taken / per_step, dollars=dollars)


def on_ranks(job: Job, training: TrainConfig, machine: Machine) -> tuple[Job, list[str]]:
    """The job with its step shared by the ranks of this machine, and why they cannot share it evenly. Args: `training`:
    as it was asked for; with its accumulation the micro batch follows.
    """
    asked = dataclasses.replace(training, global_batch_size=job.sequences_per_step)
    decisions, problems = batch_decisions(asked, machine.world_size)
    shared = {decision.name: decision.value for decision in decisions}
    micro = shared.get("per_device_train_batch_size", job.micro_batch)
    return dataclasses.replace(job, micro_batch=micro), problems


def show_cheapest(
    options: PlanOptions, training: TrainConfig, priced: list[tuple[Machine, float | None]], source: str
) -> None:
    """Which of these machines do the job: hours and dollars of the whole training, the smallest and the cheapest. Args:
    `priced`: machines, with the dollars of one GPU for an hour; `source`: of the prices.
    """
    has_own_file = training.zero.endswith(".json")  # which may fix the batch for some numbers of ranks
    rows, decided = [], {}  # what is decided for each dtype that is taken on some of the machines
    for machine, dollars in priced:
        if refusal := refused_ranks(training.sequence_parallel, machine.world_size):
            print_note(f"{name_of(machine)}: sequence_parallel={training.sequence_parallel}: {refusal}")
            continue
        # Else on the fewest of its ranks, which can share any batch.
        fewest = dataclasses.replace(machine, nodes=1, ranks_per_node=training.sequence_parallel)
        key = (auto_dtype(machine), machine.world_size if has_own_file else None)
        if key not in decided:
            noted = {note for run in decided.values() for note in run.notes}
            try:
                decided[key] = _decided(options, training, machine if has_own_file else fewest, noted=noted)
            except UserError as error:
                if not has_own_file:
                    raise
                print_note(f"{name_of(machine)}: {'; '.join(error.problems)}")
                continue
        offline, job, problems = decided[key], decided[key].job, []
        if job.sequences_per_step and not has_own_file:
            job, problems = on_ranks(job, training, machine)
        plan = plan_run(offline.options, job, machine, zero_file=offline.zero_file, must_fit=False).plan
        for problem in problems if training.global_batch_size else []:  # with which a training is refused there
            print_note(f"{name_of(machine)}: {problem}")
            plan = dataclasses.replace(plan, fits=False, limiting_resource="global_batch_size")
        rows.append((machine, plan, cost_of_tokens(options.tokens, offline.options.training, plan, machine, dollars)))
    if not rows:
        raise UserError("--cheapest: none of these machines can share this job, as noted above; change what they name")
    fitting = [row for row in rows if row[1].fits]
    with_price = [row for row in fitting if row[2].dollars is not None]
    best = {
        "smallest": min(fitting, key=lambda row: row[0].world_size, default=None),
        "cheapest": min(with_price, key=lambda row: row[2].dollars, default=None),
    }
    if options.json:
        print_json(
            [
                {"machine": dataclasses.asdict(machine), "plan": as_dict(plan), "cost": dataclasses.asdict(cost)}
                for machine, plan, cost in rows
            ]
        )
    else:
        max_steps, cost = offline.options.training.get("max_steps", -1), rows[0][2]
        how = f"{cost.epochs:g} epochs of {options.tokens:,.0f} tokens" if options.tokens else "1e9 tokens (--tokens)"
        how = f"{max_steps:,} steps" if max_steps > 0 else how
        columns = ("", "GPUs", "plan", "peak", "tokens/s", "hours", "dollars", "fits")
        table = empty_table(columns, caption=f"GiB per GPU; {how}", **NARROW)
        for row in rows:
            machine, plan, cost = row
            marks = [name for name, marked in best.items() if row is marked]
            dollars = "-" if cost.dollars is None else f"{cost.dollars:,.0f}"
            numbers = (f"{plan.time.tokens_per_second:,.0f}", f"{cost.hours:,.1f}", dollars)
            checkpointing = " ckpt" * plan.activation_checkpointing
            checkpointing += f" 1/{plan.checkpoint_every}" if plan.checkpoint_every > 1 else ""
            table.add_row(
                ", ".join(marks),
                name_of(machine),
                f"{plan.zero}{checkpointing}, {plan.micro_batch} x {plan.accumulation}",
                f"{plan.device_bytes / GiB:,.1f}",
                *(numbers if plan.fits else "---"),
                _fits(plan),
            )
        dtypes = dict.fromkeys(run.job.dtype for run in decided.values())
        show_text(f"{describe_question(offline, dtypes)}\n{describe_model(job.size)}")
        show_table(table)
        show_text(f"prices (--prices): {source}")
        texts = []
        for mark, (machine, _, cost) in ((mark, row) for mark, row in best.items() if row):
            dollars = "" if cost.dollars is None else f", {cost.dollars:,.0f} dollars"
            texts.append(f"{mark}: {name_of(machine)}, {cost.hours:,.1f} hours{dollars}")
        nothing = "none of these machines does the job: --method lora or qlora, or a shorter --seq_len"
        show_text("; ".join(texts) or nothing)
    if not fitting:
        raise SystemExit(NOTHING_FITS)


def name_of(machine: Machine) -> str:
    """As it is asked for: 2 x 8xH100 are two nodes."""
    nodes = f"{machine.nodes} x " if machine.nodes > 1 else ""
    return f"{nodes}{machine.ranks_per_node}x{machine.gpu_type}"


def describe_question(run: TrainingRun, dtypes: Iterable[str]) -> str:
    """One line: what was asked, with the options that change it."""
    options, job = run.options, run.job
    named = get_value(run.zero_file or {}, "optimizer.type")
    optimizer = f"{named} (--zero)" if named else f"{job.optimizer} (--optim)"
    shape = options.adapter or f"rank {job.size.lora_r}"
    how = "full finetuning" if options.method == "full" else f"{options.method} of {shape}"
    return (
        f"{how} (--method), {job.seq_len:,} tokens per sequence (--seq_len), {' or '.join(dtypes)} (--dtype),"
        f" {optimizer}"
    )


def _scale(options: PlanOptions, training: TrainConfig, machines: list[Machine]) -> bool:
    """How speed, memory and cost move with the number of nodes, and whether one of them is enough."""
    smallest = min(machines, key=lambda machine: machine.world_size)
    offline = _decided(options, training, smallest)
    job = offline.job
    per_step = (
        job.sequences_per_step
        or job.batch(job.micro_batch or SEQUENCES_PER_RANK, job.accumulation or 1, smallest).sequences
    )
    rows = []  # (machine, plan, GPU hours for 1e9 tokens)
    for machine in machines:
        grown = per_step * machine.world_size // smallest.world_size if options.scaling == "weak" else per_step
        scaled = dataclasses.replace(job, sequences_per_step=grown, accumulation=None)
        scaled, _ = on_ranks(scaled, training, machine)
        plan = plan_run(offline.options, scaled, machine, zero_file=offline.zero_file, must_fit=False).plan
        rows.append((machine, plan, cost_of_tokens(None, {}, plan, machine).gpu_hours))
        taken = plan.time.tokens_per_step // job.seq_len
        if taken != grown:
            print_note(f"{machine.world_size} ranks cannot share {grown} sequences evenly: {taken} per step")
    fits = any(plan.fits for _, plan, _ in rows)
    if options.json:
        print_json(
            [
                {"nodes": machine.nodes, "gpu_hours_per_1e9_tokens": gpu_hours} | as_dict(plan)
                for machine, plan, gpu_hours in rows
            ]
        )
        return fits
    columns = ("nodes", "GPUs", "tokens/step", "plan", "peak", "host", "s/step", "tokens/s", "GPU hours", "fits")
    table = empty_table(columns, caption=f"GiB per {smallest.place}; host: GiB per node; GPU hours for 1e9 tokens")
    for machine, plan, gpu_hours in rows:
        times = (f"{plan.time.step_seconds:,.2f}", f"{plan.time.tokens_per_second:,.0f}", f"{gpu_hours:,.1f}")
        table.add_row(
            str(machine.nodes),
            str(machine.world_size),
            f"{plan.time.tokens_per_step:,}",
            plan.label,
            f"{plan.device_bytes / GiB:,.1f}",
            f"{plan.host_bytes / GiB:,.0f}",
            *(times if plan.has_time_estimate else "---"),
            _fits(plan),
        )
    show_table(table)
    is_weak = options.scaling == "weak"
    batch = "grows with the nodes (weak scaling)" if is_weak else "stays (strong scaling)"
    show_text(f"the global batch {batch}; --scaling {'strong' if is_weak else 'weak'} for the other")
    return fits


def _perplexity(options: PlanOptions, training: TrainConfig, machine: Machine) -> bool:
    """The ways to hold a model while scoring, and whether one fits; speeds where they are more than rules of thumb."""
    if training.method == "qlora":
        raise UserError("--perplexity plans a model as it lies on disk; leave out --method qlora")
    plain = dataclasses.replace(training, global_batch_size=None, zero="auto", packing=False)
    problems: list[str] = []
    zero_file = read_scoring_file(training.zero, problems) if training.zero not in ("auto", "0") else {}
    raise_if_any(problems)
    offline = _decided(options, plain, machine)
    raise_if_any(check_sharding(offline.model.size, stage=stage(zero_file), model=training.model))
    machine = with_disk_of(zero_file, machine)
    choice = plan_evaluation(
        offline.model,
        machine,
        dtype=offline.options.dtype,
        seq_len=offline.options.seq_len,
        attention=options.attention,
        sequence_parallel=training.sequence_parallel,
        zero=training.zero,
    )
    if options.json:
        print_json(
            {
                "chosen": dataclasses.asdict(choice.plan) | {"reason": choice.reason},
                "candidates": [dataclasses.asdict(plan) for plan in choice.candidates],
                "longest_window": choice.longest_window,
            }
        )
        return choice.plan.fits
    columns = ("", "zero", "batch_tokens", "weights", "activations and logits", "peak", "host", "tokens/s", "fits")
    table = empty_table(columns, caption=f"GiB per {machine.place}; host: GiB per node")
    for plan in choice.candidates:
        numbers = (plan.weight_bytes, plan.activation_bytes, plan.device_bytes, plan.host_bytes)
        table.add_row(
            "->" if plan is choice.plan else "",
            plan.zero,
            f"{plan.batch_tokens:,}",
            *(f"{number / GiB:,.1f}" for number in numbers),
            f"{plan.tokens_per_second:,.0f}" if choice.speeds.has_time_estimate else "-",
            _fits(plan),
        )
    show_text(f"{describe_model(offline.model.size)}\n{machine}")
    show_table(table)
    show_text(choice.reason)
    if choice.longest_window:
        ranks = plural(training.sequence_parallel, "rank")
        show_text(f"longest window that fits: {choice.longest_window:,} tokens on {ranks}")
    return choice.plan.fits


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


def show_plans(chosen: Plan, plans: list[Plan], size: ModelSize, machine: Machine, *, is_traced: bool = True) -> None:
    """The table of these candidates, the chosen one marked. Args: `is_traced`: activations are the model's own."""
    error = ""
    if machine.has_gpu:
        least, most = TIME_RANGES.get(chosen.time.kind, (0, 0))
        error = f"; published runs of this kind took {least:.2f} to {most:.2f} of their time" if most else ""
        error += f"; memory of published runs was within {MEMORY_ERROR:.0%}" if is_traced else ""
    numbers = ("states", "buffers", "activations", "step", "peak", "host", "s/step", "tokens/s", f"per {machine.place}")
    table = empty_table(
        ("", "ZeRO", "ckpt", "batch", *numbers, "fits"),
        caption=f"GiB per {machine.place}; host: GiB per node; batch: sequences of a micro batch x accumulation{error}",
        **NARROW,
    )
    for plan in plans:
        parts = bytes_by_phase(plan.terms, "device")
        activations, speed = plan.activation_bytes, plan.time.tokens_per_second
        held = (parts["always"], parts["compute"] - activations, activations, parts["step"])
        sizes = (*held, plan.device_bytes, plan.host_bytes)
        times = (f"{plan.time.step_seconds:,.2f}", f"{speed:,.0f}", f"{speed / machine.world_size:,.0f}")
        all_or_none = "on" if plan.activation_checkpointing else "off"
        table.add_row(
            "->" if plan is chosen else "",
            plan.zero,
            f"1/{plan.checkpoint_every}" if plan.checkpoint_every > 1 else all_or_none,
            f"{plan.micro_batch} x {plan.accumulation}",
            *(f"{number / GiB:,.1f}" for number in sizes),
            *(times if plan.has_time_estimate else "---"),
            _fits(plan).replace(" memory", "").replace(" and ", "+"),
        )
    show_text(f"{describe_model(size)}\n{machine}")
    show_table(table)
    show_text(f"{chosen.time.tokens_per_step:,} tokens per step")


def _fits(plan: Needs) -> str:
    return ("tight" if plan.low_headroom else "yes") if plan.fits else f"no: {plan.limiting_resource}"


def speed_text(plan: Plan, machine: Machine) -> str:
    """Tokens per second of one GPU, to be appended; empty where no time is predicted."""
    speed = plan.time.tokens_per_second / machine.world_size
    return f", {speed:,.0f} tokens/s per {machine.place}" if plan.has_time_estimate else ""


def explain(plan: Plan) -> None:
    """Every term of one plan with its formula, and the parts of its time."""
    table = Table("term", "held", "where", Column("GiB", justify="right"), "formula", title=plan.label, **ON_THE_LEFT)
    for term in sorted(plan.terms, key=lambda term: (term.place, list(PHASES).index(term.phase))):
        place = "one GPU or rank" if term.place == "device" else "one node"
        table.add_row(term.name, PHASES[term.phase], place, f"{term.num_bytes / GiB:,.3f}", term.formula)
    times = Table("part", Column("seconds", justify="right"), title="one optimizer step", **ON_THE_LEFT)
    for name, part in (
        ("computing", "compute"),
        ("communication, if nothing hid it", "communication"),
        ("offload transfers, if nothing hid them", "offload"),
        ("optimizer", "optimizer"),
        ("together", "step"),
    ):
        times.add_row(name, f"{getattr(plan.time, f'{part}_seconds'):,.4f}")
    show_table(table)
    show_table(times)
    others = ", ".join(f"({name})" for phase, name in PHASES.items() if phase not in ("always", "load"))
    show_text(f"peak = always + the largest of {others}; or (loading) alone, where that is more")
