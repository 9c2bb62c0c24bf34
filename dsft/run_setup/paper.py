"""What `dsft train` would decide with the same options on a machine that need not be there.

    run = paper_run(options, machine)
    choice = choose_plan(run.job, machine, zero=run.options.zero, zero_file=run.zero_file)

The decisions are those of a training (decisions.py), in the same order. What is left out needs the machine itself:
its packages, its disks, and a checkpoint that the run resumes from.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from transformers import PreTrainedTokenizerBase

from dsft.config.options import TrainConfig
from dsft.data.sequences import Sequences
from dsft.data.sources import FormattedSource
from dsft.data.training_data import check_sources, is_prepared, load_training_data
from dsft.errors import UserError, raise_if_any
from dsft.models.build import resolve_dtype
from dsft.models.packing_probe import try_packing
from dsft.models.row_rules import architecture_problems
from dsft.models.size import ModelFacts, check_positions, check_sharding, measure_model
from dsft.models.tokenizer import check_tokenizer
from dsft.planner.fake_model import Attention
from dsft.planner.gpus import GPUS, gpu_name
from dsft.planner.job import Job
from dsft.planner.plan import Plan
from dsft.run_setup.checks import check_zero_file
from dsft.run_setup.decisions import Draft, decide_batches_and_dtype, packing_decisions, take_zero_file
from dsft.run_setup.named_files import NOT_NEEDED
from dsft.run_setup.plan import job_over_data
from dsft.runtime.hardware import Machine


@dataclass(frozen=True, kw_only=True)
class PaperRun:
    """A training that is decided as far as its plan depends on it."""

    options: TrainConfig
    """After every decision."""
    job: Job
    zero_file: dict[str, Any] | None
    """The DeepSpeed JSON of an explicit `zero`; None with auto."""
    data: tuple[FormattedSource, ...]
    """Empty where none is named, or none can be read here."""
    tokenizer: PreTrainedTokenizerBase | None
    """None where there is no data."""
    notes: tuple[str, ...]
    """What the plan takes for granted."""


def paper_run(
    options: TrainConfig,
    machine: Machine,
    *,
    attention: Attention | None = None,
    scored: bool = False,
    problems: Sequence[str] = (),
) -> PaperRun:
    """Decides what a training with these options on this machine would.

    Args:
        attention: that is planned, whatever the model and its data would take.
        scored: the model is evaluated, not trained.
        problems: of reading the options.

    Raises:
        UserError: with all problems of options and DeepSpeed JSON that a training would have too, else of the model.
    """
    draft = Draft(options, problems=[problem for problem in problems if not problem.startswith(NOT_NEEDED)])
    zero_file = take_zero_file(draft)
    draft.problems += check_zero_file(zero_file, draft.options, here=machine.measured) if zero_file else []
    decide_batches_and_dtype(draft, machine.world_size, auto_dtype=auto_dtype(machine))
    raise_if_any(draft.problems)  # before the model, which may lie on the hub
    facts = _measured(draft.options, scored=scored)
    stage = zero_file and zero_file.get("zero_optimization", {}).get("stage")
    raise_if_any(check_sharding(facts.size, stage=stage or 0, model=options.model))
    data, tokenizer, notes = _readable_data(draft.options)
    if draft.options.packing:
        packing = try_packing(draft.options, facts.config)
        draft.take(packing_decisions(packing))
        implementation = packing.attn_implementation or facts.attn_implementation
        facts = dataclasses.replace(facts, attn_implementation=implementation)
        notes += [f"packing is left out: {packing.problem}"] if packing.problem else []
    if draft.options.training.get("resume_from_checkpoint"):
        notes.append("resume_from_checkpoint: this is the plan of a new run; one that resumes keeps its own")
    job = job_over_data(draft.options, facts, data)
    if attention:
        job = dataclasses.replace(job, attention=attention)
    return PaperRun(
        options=draft.options,
        job=job,
        zero_file=zero_file,
        data=tuple(data),
        tokenizer=tokenizer,
        notes=tuple(notes),
    )


def auto_dtype(machine: Machine) -> str:
    """Says what the option `dtype: auto` is on this machine."""
    if machine.measured or not machine.has_gpu:
        return resolve_dtype("auto") if machine.has_gpu else "float32"
    return "bfloat16" if GPUS[gpu_name(machine)].has_bf16 else "float32"


def _measured(options: TrainConfig, *, scored: bool) -> ModelFacts:
    """Measures the model; an attention that needs a GPU's package is taken as it will be there."""
    asked = options.attn_implementation
    elsewhere = asked and ("flash" in asked or "/" in asked)  # a package, or a kernel of the hub
    facts = measure_model(
        dataclasses.replace(options, attn_implementation=None) if elsewhere else options,
        scored=scored,
    )
    raise_if_any(
        check_positions(facts, seq_len=options.seq_len, model=options.model)
        + architecture_problems(options.model, facts.config, trust_remote_code=options.trust_remote_code)
    )
    return dataclasses.replace(facts, attn_implementation=asked) if elsewhere else facts


def _readable_data(
    options: TrainConfig,
) -> tuple[list[FormattedSource], PreTrainedTokenizerBase | None, list[str]]:
    """(data, tokenizer, notes); no data where it is not on this machine."""
    if not options.data:
        return [], None, []
    problems: list[str] = []
    try:
        tokenizer = check_tokenizer(options, problems)
        data = check_sources(options.data, options, tokenizer, key="data", split=options.data_split, problems=problems)
    except UserError as error:
        problems += error.problems
    if problems:
        return [], None, [f"planned for full rows without padding, since the data cannot be read here: {problems[0]}"]
    return data, tokenizer, []


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """One pass over prepared data, as a plan's steps take it."""

    tokens: int
    """Without padding."""
    steps: int
    mean_len: int
    """Tokens of a sequence as it is fed, padding included, in the mean."""


def prepared_epoch(run: PaperRun, plan: Plan, machine: Machine) -> Epoch | None:
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
    per_step = plan.micro_batch * plan.accumulation * machine.world_size
    mean_len = min(options.seq_len, max(1, round(fed / items)))
    return Epoch(tokens=tokens, steps=-(-items // per_step), mean_len=mean_len)
