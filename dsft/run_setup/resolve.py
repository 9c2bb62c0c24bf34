"""From options and machine to a run that is decided: every option as it will be, and the reason of each decision.

    run = resolve_run(options, world=world_size(), machine=smallest_machine())

Nothing rewrites options afterwards, and nothing here loads a weight.
"""

import dataclasses
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils.import_utils import is_torch_tf32_available

from dsft.checkpoints.manifest import clean_up, manifest_hash
from dsft.checkpoints.run_folder import (
    FINAL,
    WEIGHTS_ONLY,
    check_output_dir,
    damage,
    is_finished,
    last_checkpoint,
    start_from_weights,
)
from dsft.config.deepspeed_json import get_value, stage
from dsft.config.options import Decision, TrainConfig, common_options
from dsft.data.sources import FormattedSource
from dsft.data.training_data import check_sources
from dsft.errors import UserError, raise_if_any, without_second_errors
from dsft.models.build import DTYPES, resolve_dtype
from dsft.models.lora import saved_lora_config
from dsft.models.packing_probe import Packing, try_packing
from dsft.models.quantization import format_problems
from dsft.models.row_rules import architecture_problems
from dsft.models.size import ModelFacts, check_positions, check_sharding, measure_model
from dsft.models.tokenizer import check_tokenizer
from dsft.planner.job import Job
from dsft.planner.plan import Plan
from dsft.run_setup.arguments import ignored_options
from dsft.run_setup.checkpoint_size import CheckpointSize, check_room, checkpoint_size
from dsft.run_setup.checks import (
    check_base,
    check_held_out,
    check_machine,
    check_training_arguments,
    check_weights,
    check_zero_file,
)
from dsft.run_setup.decisions import (
    Draft,
    accelerate_decisions,
    decide_batches_and_dtype,
    keep_global_batch,
    packing_decisions,
    step_limit_decision,
    take_zero_file,
    tf32_decision,
    tiled_loss_decision,
)
from dsft.run_setup.plan import is_masked, job_over_data, plan_run
from dsft.runtime import distributed
from dsft.runtime.agreement import SAME_FILES, SAME_OPTIONS, require_agreement
from dsft.runtime.compiler import offload_problems
from dsft.runtime.console import say
from dsft.runtime.fused_adam import fused_optimizer, nvcc_problem, with_torch_adam
from dsft.runtime.hardware import Machine, has_gpu


@dataclass(frozen=True, kw_only=True)
class CheckedRun:
    """What one rank knows of a run from the options and the files they name."""

    options: TrainConfig
    decisions: tuple[Decision, ...]
    problems: tuple[str, ...]
    model: ModelFacts | None
    """None where the model cannot be measured, which is a problem."""
    tokenizer: PreTrainedTokenizerBase | None
    data: tuple[FormattedSource, ...]
    held_out: tuple[FormattedSource, ...]
    zero_file: dict[str, Any] | None
    """The DeepSpeed JSON of an explicit `zero`; None with auto."""


@dataclass(frozen=True, kw_only=True)
class ResolvedRun:
    """A training that is decided; the same on every rank."""

    options: TrainConfig
    """After every decision."""
    decisions: tuple[Decision, ...]
    """Each option that was decided in the user's place, with its reason, in order."""
    model: ModelFacts
    tokenizer: PreTrainedTokenizerBase
    data: tuple[FormattedSource, ...]
    held_out: tuple[FormattedSource, ...]
    machine: Machine
    job: Job
    plan: Plan
    disk: CheckpointSize
    """What it writes to `output_dir`."""
    reason: str
    """Why this plan."""
    packing: Packing | None
    """Whether and how samples can share rows, where that was asked for."""
    masked: bool
    """Whether padded batches have an attention mask."""
    checkpoint: str | None
    """That the run resumes from."""
    notes: tuple[str, ...]
    """What the user should know: options without effect, packing that is not possible."""

    @property
    def weights_of(self) -> str | None:
        """The checkpoint whose weights alone it takes."""
        values = (decision.value for decision in self.decisions if decision.reason == WEIGHTS_ONLY)
        return next(filter(None, values), None)

    @property
    def output_dir(self) -> str:
        return self.options.training["output_dir"]


def resolve_run(
    options: TrainConfig, *, world: int, machine: Machine, problems: Sequence[str] = ()
) -> ResolvedRun | None:
    """Checks and decides a training; None where its checkpoint is its end already. Collective.

    Args:
        world: number of ranks, for the batches.
        machine: for the plan; the same on all ranks.
        problems: of reading the options, to be raised with the others.

    Raises:
        UserError: with all problems that can be found before weights load, on every rank.
    """
    checked = check_run(options, world, problems)
    distributed.raise_together([*checked.problems])
    distributed.raise_together(check_weights(checked.options, checked.model.config, local=False))
    draft = Draft(checked.options, checked.decisions)
    # What depends on the disk or the clock is decided once, by rank 0.
    checkpoint, decisions, finished = distributed.on_rank_0(lambda: resume_decisions(draft.options, world))
    if finished:
        say(f"nothing left to train: {checkpoint} is its end; raise max_steps or num_train_epochs to continue")
        return None
    _require_same_run(draft.options, checked.zero_file, checkpoint)
    zero_file, notes = _with_an_adam_that_compiles(checked.zero_file)
    draft.take(decisions)
    packing, model = _decide_packing(draft, _with_adapter(checked, draft.options))
    masked = distributed.on_rank_0(lambda: is_masked(draft.options, model, checked.data))
    tiling, asked = distributed.on_rank_0(lambda: tiled_loss_decision(draft.options, model)), draft.options.tiled_loss
    draft.take([tiling])
    job = job_over_data(draft.options, model, checked.data, masked=masked, tiled_loss=tiling.value)
    plan, reason = _decide_plan(draft, job, machine, zero_file, checkpoint)
    disk = checkpoint_size(draft.options, model.size, plan.deepspeed_config)
    distributed.raise_together(check_room(draft.options, disk) if distributed.rank() == 0 else [])
    notes += [f"tiled_loss: ignored, {tiling.reason}"] if asked is True and not tiling.value else []
    notes += _decide_tf32(draft) + _notes_on_plan(draft.options, plan, model, packing, zero_file)
    return ResolvedRun(
        options=draft.options,
        decisions=tuple(draft.decisions),
        model=model,
        tokenizer=checked.tokenizer,
        data=checked.data,
        held_out=checked.held_out,
        machine=machine,
        job=job,
        plan=plan,
        disk=disk,
        reason=reason,
        packing=packing,
        masked=masked,
        checkpoint=checkpoint,
        notes=tuple(notes),
    )


def _decide_packing(draft: Draft, model: ModelFacts) -> tuple[Packing | None, ModelFacts]:
    """Decides whether samples share rows, where that was asked for; the model has the attention for it. Collective."""
    if not draft.options.packing:
        return None, model
    packing = distributed.on_rank_0(lambda: try_packing(draft.options, model.config))
    draft.take(packing_decisions(packing))
    attn_implementation = packing.attn_implementation or model.attn_implementation
    return packing, dataclasses.replace(model, attn_implementation=attn_implementation)


def _decide_tf32(draft: Draft) -> list[str]:
    """Decide whether a training in float32 multiplies in TF32, and say so. Collective."""
    decisions = tf32_decision(draft.options, available=all(distributed.from_all([is_torch_tf32_available()])))
    draft.take(decisions)
    return [f"tf32: {decision.reason}; tf32=false leaves it off" for decision in decisions]


def _require_same_run(options: TrainConfig, zero_file: dict[str, Any] | None, checkpoint: str | None) -> None:
    """Compare what each rank has made of its options by itself, and the files that they name. Collective.

    Raises:
        UserError: on every rank, with what differs and where.
    """
    files = {f"content of {options.zero}": zero_file}
    if checkpoint:
        files[f"{checkpoint} to resume from"] = manifest_hash(Path(checkpoint))
    require_agreement({SAME_OPTIONS: common_options(options), SAME_FILES: files})


def _with_an_adam_that_compiles(zero_file: dict[str, Any] | None) -> tuple[dict[str, Any] | None, list[str]]:
    """Return the DeepSpeed JSON with torch's AdamW where a rank cannot compile DeepSpeed's, and a note. Collective.

    Raises:
        UserError: on every rank, where torch has no such optimizer.
    """
    if zero_file is None or not has_gpu() or not (kind := fused_optimizer(zero_file)):
        return zero_file, []
    problems = [problem for problem in distributed.from_all([nvcc_problem()]) if problem]
    if not problems:
        return zero_file, []
    if not kind.startswith("adam"):
        raise UserError([f"zero: optimizer.type {kind}: nvcc cannot compile it ({problems[0]}); AdamW needs none"])
    return with_torch_adam(zero_file), [f"optimizer: torch's Adam, since FusedAdam cannot be compiled ({problems[0]})"]


def _with_adapter(checked: CheckedRun, options: TrainConfig) -> ModelFacts:
    """Returns the model with the adapter that training starts with, which may be a checkpoint's weights."""
    if options.adapter in (None, checked.options.adapter):
        return checked.model
    return dataclasses.replace(checked.model, adapters=saved_lora_config(options.adapter))


def check_run(options: TrainConfig, world: int, problems: Sequence[str] = ()) -> CheckedRun:
    """Finds everything that can be known wrong before weights load, and decides what needs no other rank.

    Args:
        problems: of reading the options; the others are added to them.
    """
    draft = Draft(options, problems=problems)
    if options.training.get("output_dir"):
        check_output_dir(options, draft.problems)
    draft.take(*accelerate_decisions(options, os.environ))
    zero_file = take_zero_file(draft)
    draft.problems += check_zero_file(zero_file, draft.options) if zero_file is not None else []
    decide_batches_and_dtype(draft, world, auto_dtype=resolve_dtype("auto"))
    options = draft.options
    draft.problems += check_machine(options) + check_held_out(options)
    draft.problems += check_training_arguments(options, draft.problems)
    model = tokenizer = None
    if options.model:
        model = _measured(options, draft.problems, zero_file)
    if model and zero_file:  # before the plan, whose trace of such a model takes minutes
        draft.problems += check_sharding(model.size, stage=stage(zero_file), model=options.model)
    if options.model and (model or options.tokenizer):  # where there is no model, its missing tokenizer is no news
        tokenizer = check_tokenizer(options, draft.problems, vocab_size=model and model.size.vocab_size)
    data, held_out = (
        check_sources(sources, options, tokenizer, key=key, split=split, problems=draft.problems)
        for key, sources, split in (
            ("data", options.data, options.data_split),
            ("eval_data", options.eval_data, options.eval_split),
        )
    )
    return CheckedRun(
        options=options,
        decisions=tuple(draft.decisions),
        problems=(*problems, *without_second_errors(draft.problems[len(problems) :], problems)),
        model=model,
        tokenizer=tokenizer,
        data=tuple(data),
        held_out=tuple(held_out),
        zero_file=zero_file,
    )


def _measured(options: TrainConfig, problems: list[str], zero_file: dict[str, Any] | None) -> ModelFacts | None:
    if options.verify_resume:
        damaged = [
            f"{key}={name}: {error}; use another, or take it as it is with --verify_resume false"
            for key, name in (("model", options.model), ("adapter", options.adapter))
            for error in (damage(name) if name else [])
        ]
        if damaged:
            problems += damaged
            return None
    problems += check_base(options)
    try:
        model = measure_model(options)
    except UserError as error:
        problems += error.problems
        return None
    on_disk = model.size.quantization
    if on_disk and on_disk.lies_on_disk:
        dtype = DTYPES[resolve_dtype(options.dtype)]
        problems += format_problems(options.model, model.config, on_disk, dtype=dtype, trained=True)
    problems += check_weights(options, model.config, local=True)
    problems += architecture_problems(options.model, model.config, trust_remote_code=options.trust_remote_code)
    problems += check_positions(model, seq_len=options.seq_len, model=options.model)
    # What a model of wrong sizes would take on disk is no news.
    if options.training.get("output_dir") and not any(re.match("output_dir|model=", problem) for problem in problems):
        problems += check_room(options, checkpoint_size(options, model.size, zero_file))
    return model


def resume_decisions(options: TrainConfig, world: int) -> tuple[str | None, list[Decision], bool]:
    """(checkpoint to resume from or None, what follows from it, whether it is the end of the run). On rank 0.

    Raises:
        UserError: where the checkpoint that was named is not complete, or does not fit this run.
    """
    for path in clean_up(options.training["output_dir"]):
        say(f"removed {path}: a save that did not end")
    checkpoint = last_checkpoint(options)
    if checkpoint and options.resume_weights_only:
        return None, start_from_weights(options, checkpoint), False
    if not checkpoint:
        return None, [], False
    decisions = keep_global_batch(options, checkpoint, world)
    has_final = (Path(options.training["output_dir"]) / FINAL).is_dir()  # a kill may have come before it
    return checkpoint, decisions, has_final and is_finished(checkpoint, options.training)


def packing_note(packing: Packing) -> str:
    return (
        "packing is left out, sequences are padded instead: samples in one row cannot be kept apart in this model,"
        f" {packing.problem}"
    )


def _notes_on_plan(
    options: TrainConfig, plan: Plan, model: ModelFacts, packing: Packing | None, zero_file: dict[str, Any] | None
) -> list[str]:
    deepspeed_config = plan.deepspeed_config
    return [
        *([packing_note(packing)] if packing and packing.problem else []),
        *raised_buffers(zero_file, deepspeed_config),
        *ignored_options(options, deepspeed_config, model.size),
    ]


def raised_buffers(zero_file: dict[str, Any] | None, deepspeed_config: dict[str, Any]) -> list[str]:
    """Say which number of a DeepSpeed JSON was too small for the model."""
    key = "zero_optimization.offload_param.buffer_size"
    given, taken = get_value(zero_file or {}, key), get_value(deepspeed_config, key)
    if given is None or given == taken:
        return []
    return [f"{key}: {taken:,} instead of {given}, since the largest parameter's shard must fit"]


def _decide_plan(
    draft: Draft, job: Job, machine: Machine, zero_file: dict[str, Any] | None, checkpoint: str | None
) -> tuple[Plan, str]:
    """Decide the plan, which every node can compile, and say why this one. Collective."""
    options = draft.options

    def choose() -> tuple[Plan, str]:
        choice = plan_run(options, job, machine, zero_file=zero_file, checkpoint=checkpoint)
        plan, config = choice.plan, choice.plan.deepspeed_config  # a resume keeps its plan, whatever options are new
        problems = check_zero_file(config, dataclasses.replace(options, zero=plan.zero))
        raise_if_any([*problems, *check_sharding(job.size, stage=stage(config), model=options.model)])
        return plan, choice.reason

    plan, reason = distributed.on_rank_0(choose)
    distributed.raise_together(offload_problems(plan.deepspeed_config))
    draft.take([step_limit_decision(options, plan)])
    return plan, reason
