"""The plan of a training: one composition of the planner's job and one choice, for `dsft plan` and for `dsft train`.

job = job_over_data(options, facts, data)
choice = plan_run(options, job, machine)      # raises where it does not fit; plan_offline does not
"""

import dataclasses
import shutil
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsft.checkpoints.manifest import read_manifest
from dsft.checkpoints.resume import NOT_TAKEN_OVER
from dsft.checkpoints.run_folder import read_run
from dsft.config.deepspeed_json import nvme_path, stage
from dsft.config.options import TrainConfig
from dsft.data.formats import FormattedSource
from dsft.errors import UserError, raise_if_any
from dsft.models.size import ModelFacts, check_sharding
from dsft.models.trials import needs_mask
from dsft.planner.candidates import NO_FP32_SUMS, candidate_names, wants_fp32_sums
from dsft.planner.fake_model import Attention
from dsft.planner.job import Job, attention_of
from dsft.planner.measured_speeds import calibrated
from dsft.planner.plan import Plan, all_plans, choose, reason
from dsft.planner.speeds import Speeds, speeds_of
from dsft.planner.zero_layout import sums_in_fp32, unmodelled_settings
from dsft.run_setup.checks import check_zero_file
from dsft.run_setup.decisions import tiled_loss_decision
from dsft.runtime.hardware import Machine

WORTH_SAYING = 1.05
"""A plan so many times as fast as the chosen one is named."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The plan that was chosen, among which, and why."""

    plan: Plan
    candidates: tuple[Plan, ...]
    reason: str
    speeds: Speeds


def training_job(options: TrainConfig, facts: ModelFacts, *, attention: Attention, tiled_loss: bool = False) -> Job:
    """Composes what a training with these options is to the planner.

    Args:
        attention: as `attention_of` says, or as it is assumed on paper.
    """
    training = options.training
    checkpointing = training.get("activation_checkpointing", training.get("gradient_checkpointing"))
    if checkpointing is None and options.zero != "auto":
        checkpointing = False
    return Job(
        size=facts.size,
        model_config=facts.config,
        dtype=options.dtype,
        seq_len=options.seq_len,
        attention=attention,
        liger=bool(training.get("use_liger_kernel")),
        tiled_loss=tiled_loss,
        adapters=facts.adapters,
        micro_batch=training.get("per_device_train_batch_size")
        or (options.batch_tokens and options.batch_tokens // options.seq_len),
        accumulation=training.get("gradient_accumulation_steps"),
        sequences_per_step=options.global_batch_size,
        checkpointing=checkpointing,
        optimizer=training.get("optim", "adamw_torch_fused"),
        fp32_accumulation=None if options.fp32_accumulation == "auto" else options.fp32_accumulation,
        fp32_reduction=options.fp32_reduction,
        compiled=bool(training.get("torch_compile")),
    )


def job_over_data(
    options: TrainConfig,
    facts: ModelFacts,
    data: Sequence[FormattedSource],
    *,
    masked: bool | None = None,
    tiled_loss: bool | None = None,
) -> Job:
    """Composes the job of a training whose data is known.

    Args:
        masked: what `is_masked` says, where that is known already.
        tiled_loss: what `tiled_loss_decision` says, likewise.
    """
    tiled_loss = tiled_loss_decision(options, facts).value if tiled_loss is None else tiled_loss
    masked = is_masked(options, facts, data) if masked is None else masked
    masks = options.packing or (masked and not _in_full_windows(options, data))
    attention = attention_of(facts, seq_len=options.seq_len, masked=masks)
    return training_job(options, facts, attention=attention, tiled_loss=tiled_loss)


def is_masked(options: TrainConfig, facts: ModelFacts, data: Sequence[FormattedSource]) -> bool:
    """Tells whether batches that are not packed have an attention mask: padded rows have none where
    the model computes the same without. Full windows need none.
    """
    if options.packing or _in_full_windows(options, data):
        return True
    return needs_mask(facts, trust_remote_code=options.trust_remote_code)


def _in_full_windows(options: TrainConfig, data: Sequence[FormattedSource]) -> bool:
    return all(source.rules.is_text for source in data) and options.seq_len % 8 == 0


def speeds_for(job: Job, machine: Machine) -> Speeds:
    """Returns the speeds that a plan counts on: measured ones where there are some, else assumed ones."""
    return calibrated(speeds_of(machine, dtype=job.dtype), machine, dtype=job.dtype)


def choose_plan(
    job: Job,
    machine: Machine,
    *,
    zero: str = "auto",
    zero_file: dict[str, Any] | None = None,
    resumes: bool = False,
    left_out: Collection[str] = (),
) -> Choice:
    """Chooses the fastest plan that fits.

    Args:
        zero: "auto" for all candidates, else the one of that name, or the path of a DeepSpeed JSON.
        zero_file: the content of that JSON.
        resumes: whether `zero` is an earlier run's and not the user's word.
        left_out: candidates that must not be taken.
    """
    speeds = speeds_for(job, machine)
    own_file = zero_file if zero.endswith(".json") else None
    candidates = all_plans(job, machine, speeds, zero=zero, zero_file=own_file)
    candidates = [plan for plan in candidates if plan.zero not in left_out]
    plan = choose(candidates, machine)
    why = reason(plan, candidates, machine, zero=zero, resumes=resumes)
    if job.size.quantization and not plan.fits:
        why += " Every GPU holds the whole quantised base: ZeRO-3 would shard it only once it is loaded."
    config = plan.deepspeed_config
    if own_file is None and wants_fp32_sums(job, plan.accumulation) and not sums_in_fp32(config):
        because = "float32 takes too much memory" if stage(config) >= 2 else f"ZeRO {plan.zero} cannot in float32"
        why += f" Gradients of {plan.accumulation} micro batches are added up in bfloat16: {because}."
    if zero == "auto":
        why += _cost_of_fp32_sums(plan, job, machine, speeds)
    said = [why, *job.unmodelled, *unmodelled_settings(config)]
    return Choice(plan=plan, candidates=tuple(candidates), reason=" ".join(said), speeds=speeds)


def _cost_of_fp32_sums(plan: Plan, job: Job, machine: Machine, speeds: Speeds) -> str:
    """Says how much faster ZeRO 0 or 1 would be with sums in bfloat16, where that is worth a word."""
    if job.dtype != "bfloat16" or job.fp32_accumulation is not None or not (plan.fits and plan.has_time_estimate):
        return ""
    in_bf16 = dataclasses.replace(job, fp32_accumulation=False)
    names = [name for name in candidate_names(in_bf16, machine) if name in NO_FP32_SUMS]
    plans = [other for name in names for other in all_plans(in_bf16, machine, speeds, zero=name)]
    fitting = [other for other in plans if other.fits]
    gain = max((other.time.tokens_per_second / plan.time.tokens_per_second for other in fitting), default=0)
    if gain < WORTH_SAYING:
        return ""
    return (
        f" {choose(fitting, machine).label} would be {gain:.2f} times as fast, but adds up gradients in bfloat16"
        " (--fp32_accumulation false)."
    )


def plan_run(
    options: TrainConfig,
    job: Job,
    machine: Machine,
    *,
    zero_file: dict[str, Any] | None = None,
    checkpoint: str | None = None,
) -> Choice:
    """Chooses the plan of a training that is to start.

    Args:
        checkpoint: that the run resumes from: with zero auto and as many ranks as before the earlier plan is kept, with
            others one is chosen that can take the checkpoint over.

    Raises:
        UserError: where it cannot fit, with the resource that binds and the nearest plan that can.
    """
    zero = options.zero
    if checkpoint and zero == "auto":
        job, zero = _as_before(options, job, machine, checkpoint)
    choice = plan_offline(
        dataclasses.replace(options, zero=zero),
        job,
        machine,
        zero_file=zero_file,
        resumes=zero != options.zero,
        left_out=NOT_TAKEN_OVER if checkpoint and zero == "auto" else (),
    )
    if not choice.plan.fits and options.memory_check:
        other = choose_plan(dataclasses.replace(job, checkpointing=None), machine).plan
        way_out = (
            f"{other.label} would fit"
            if other.fits
            else "use more GPUs or nodes, method lora, or a smaller per_device_train_batch_size or seq_len"
        )
        raise UserError([f"{choice.reason} {way_out}; memory_check=false starts it all the same"])
    return choice


def plan_offline(
    options: TrainConfig, job: Job, machine: Machine, *, zero_file: dict[str, Any] | None = None, **known: Any
) -> Choice:
    """Chooses the plan of a training, also where none fits.

    Args:
        zero_file: the content of the DeepSpeed JSON that `zero` names.
        known: for `choose_plan`.

    Raises:
        UserError: where the plan is one that this training cannot have.
    """
    machine = with_nvme(machine, zero_file)
    choice = choose_plan(job, machine, zero=options.zero, zero_file=zero_file, **known)
    config, chosen = choice.plan.deepspeed_config, dataclasses.replace(options, zero=choice.plan.zero)
    problems = check_zero_file(config, chosen, here=machine.measured)
    raise_if_any([*problems, *check_sharding(job.size, stage=stage(config), model=options.model)])
    return choice


def with_nvme(machine: Machine, zero_file: dict[str, Any] | None) -> Machine:
    """Returns the machine with the free bytes of the disk that a DeepSpeed JSON names for offload."""
    nvme = nvme_path(zero_file or {})
    if not nvme or not Path(nvme).is_dir():
        return machine
    return dataclasses.replace(machine, nvme_bytes=shutil.disk_usage(nvme).free, nvme_path=nvme)


def _as_before(options: TrainConfig, job: Job, machine: Machine, checkpoint: str) -> tuple[Job, str]:
    """(job, zero) as the earlier run had them, where there are as many ranks; what was not sharded stays so."""
    zero, output_dir = "auto", options.training["output_dir"]
    if (Path(output_dir) / "run.json").is_file():
        earlier = read_run(output_dir)
        if earlier["world_size"] == machine.world_size:
            plan = earlier["plan"]
            zero = plan["zero"]
            job = dataclasses.replace(
                job,
                checkpointing=plan["activation_checkpointing"],
                micro_batch=plan["micro_batch"],
                accumulation=plan["accumulation"],
            )
    if zero == "auto" and (read_manifest(Path(checkpoint)) or {}).get("zero_stage") == 0:
        zero = "0"
    return job, zero


def smaller_plan(job: Job, machine: Machine, plan: Plan) -> Plan | None:
    """Finds the fastest plan for the same steps that fits and takes at most nine tenths of the memory of `plan`, if
    any.
    """
    per_step = job.sequences_per_step or plan.micro_batch * plan.accumulation * machine.world_size
    job = dataclasses.replace(job, checkpointing=None, micro_batch=None, accumulation=None, sequences_per_step=per_step)
    smaller = dataclasses.replace(machine, device_bytes=min(machine.device_bytes, int(0.9 * plan.device_bytes)))
    best = choose_plan(job, smaller).plan
    return best if best.device_bytes <= smaller.device_bytes else None
