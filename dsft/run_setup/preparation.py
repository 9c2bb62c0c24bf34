"""From options to everything a run needs before weights are loaded: checks, data, plan, TrainingArguments.

Every check appends to one list; nothing here loads a weight.
"""

import dataclasses
import importlib.util
import os
import shutil
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase, Trainer, TrainingArguments
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from dsft.checkpoints.manifest import read_manifest
from dsft.checkpoints.reshard import NOT_TAKEN_OVER
from dsft.checkpoints.run_folder import check_free_space, check_output_dir, read_run
from dsft.config.deepspeed_json import (
    adopt_zero_file,
    check_nvme,
    check_section,
    get_value,
    nvme_path,
    offloads,
    read_zero_file,
    stage,
)
from dsft.config.options import LoraFields, TrainConfig
from dsft.data.training_data import FormattedSource, check_sources
from dsft.errors import UserError, nearest, one_line, raise_if_any
from dsft.models.build import is_bare_config, resolve_dtype
from dsft.models.lora import lora_config, saved_lora_config
from dsft.models.size import ModelSize, check_model, load_model_config
from dsft.models.tokenizer import check_tokenizer
from dsft.planner.measured_speeds import calibrated
from dsft.planner.plan import Job, Plan, all_plans, attention_of, choose, reason
from dsft.planner.speeds import Speeds, speeds_of
from dsft.runtime.hardware import Machine, has_gpu

REPORTERS = {
    "tensorboard": ("tensorboard", "tensorboardX"),
    "azure_ml": ("azureml",),
    "clearml": ("clearml",),
    "dagshub": ("dagshub",),
    "dvclive": ("dvclive",),
}
"""Packages of a reporter where they are not called as it is."""


@dataclass(kw_only=True)
class Prepared:
    """What the checks found on the way, for the run to use."""

    tokenizer: PreTrainedTokenizerBase | None = None
    size: ModelSize | None = None
    data: list[FormattedSource] = field(default_factory=list)
    held_out: list[FormattedSource] = field(default_factory=list)
    zero_file: dict[str, Any] | None = None
    """The DeepSpeed JSON of an explicit `zero`; None with auto."""


def check_run(config: TrainConfig, world_size: int, problems: list[str]) -> Prepared:
    """Everything that can be known wrong before weights load, added to `problems`."""
    prepared = Prepared()
    if config.training.get("output_dir"):
        check_output_dir(config, problems)
    _follow_accelerate(config, problems)
    if config.zero != "auto":
        prepared.zero_file = read_zero_file(config.zero, problems)
        adopt_zero_file(prepared.zero_file, config, problems)
        check_section(prepared.zero_file, config.zero, problems)
        check_nvme(prepared.zero_file, config.zero, problems)
        if (get_value(prepared.zero_file, "tensor_parallel.autotp_size") or 1) > 1:
            problems.append(
                f"zero={config.zero}: tensor_parallel is not supported: the Trainer would feed the ranks that share a"
                " layer different sequences, and would save no model; leave it out, ZeRO-3 shards the weights too"
            )
    _check_batches(config, world_size, problems)
    _check_precision(config, problems)
    _check_reporters(config, problems)
    _check_quantization(config, prepared.zero_file, problems)
    _check_training_arguments(config, problems)
    if config.model:
        if config.method != "full" and is_bare_config(config.model):
            problems.append(
                f"method={config.method} over {config.model}: an adapter is nothing without its base, and these random"
                " weights are saved nowhere; train method full first, or save the base as a folder"
            )
        prepared.size = check_model(config, problems)
        if prepared.size or config.tokenizer:  # where there is no model, its missing tokenizer is no news
            prepared.tokenizer = check_tokenizer(
                config, problems, vocab_size=prepared.size and prepared.size.vocab_size
            )
    if (
        prepared.size
        and config.training.get("output_dir")
        and not any(problem.startswith("output_dir") for problem in problems)
    ):
        # What is written at the end; checkpoints come on top.
        check_free_space(
            config.training["output_dir"],
            prepared.size.num_trainable * (4 if config.dtype == "float32" else 2),
            problems,
        )
    check_data(config, prepared, problems)
    return prepared


def check_data(config: TrainConfig, prepared: Prepared, problems: list[str]) -> None:
    prepared.data = check_sources(
        config.data, config, prepared.tokenizer, key="data", split=config.data_split, problems=problems
    )
    prepared.held_out = check_sources(
        config.eval_data, config, prepared.tokenizer, key="eval_data", split=config.eval_split, problems=problems
    )
    wants_evaluation = config.training.get("eval_strategy", "no") != "no" or config.training.get(
        "load_best_model_at_end"
    )
    if wants_evaluation and not config.eval_data and not config.eval_fraction:
        problems.append("eval_strategy needs held-out data; give eval_data or eval_fraction")


def _follow_accelerate(config: TrainConfig, problems: list[str]) -> None:
    """Under `accelerate launch` with a deepspeed_config_file, that file is `zero`, unless the user named another: then
    both are named.
    """
    file = os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
    if file == "none":
        if "ACCELERATE_DEEPSPEED_ZERO_STAGE" in os.environ and config.zero == "auto":
            problems.append(
                "accelerate's own DeepSpeed settings (zero_stage, offload ...) are not read; name a"
                " deepspeed_config_file in its YAML, or set zero"
            )
        return
    if config.zero == "auto":
        config.zero = file
    elif read_zero_file(config.zero, []) != read_zero_file(file, []):
        problems.append(f"zero={config.zero}, but accelerate's deepspeed_config_file is {file}; keep one")


def _check_batches(config: TrainConfig, world_size: int, problems: list[str]) -> None:
    """Set gradient_accumulation_steps from global_batch_size, or say which sizes would divide."""
    micro = config.training.get(
        "per_device_train_batch_size", 1
    )  # where it is not said, the plan chooses one that divides
    if not config.global_batch_size or micro < 1:
        return
    accumulation = config.training.get("gradient_accumulation_steps")
    if accumulation and "per_device_train_batch_size" not in config.training:
        config.training["per_device_train_batch_size"], rest = divmod(
            config.global_batch_size, accumulation * world_size
        )
        if rest:
            problems.append(
                f"global_batch_size={config.global_batch_size} is not divisible by"
                f" gradient_accumulation_steps={accumulation} x {world_size} ranks; leave"
                " gradient_accumulation_steps out"
            )
        return
    if accumulation:  # both fixed, by a DeepSpeed JSON
        if micro * accumulation * world_size != config.global_batch_size and not any(
            "global_batch_size" in problem for problem in problems
        ):
            problems.append(
                f"global_batch_size={config.global_batch_size} (train_batch_size) is not"
                f" per_device_train_batch_size={micro} x gradient_accumulation_steps={accumulation} x {world_size}"
                " ranks; leave one to follow"
            )
        return
    per_step = micro * world_size
    if config.global_batch_size % per_step:
        lower = config.global_batch_size // per_step * per_step
        problems.append(
            f"global_batch_size={config.global_batch_size} is not divisible by per_device_train_batch_size={micro} x"
            f" {world_size} ranks; try {' or '.join(str(n) for n in (lower, lower + per_step) if n)}, or another"
            " per_device_train_batch_size"
        )
        return
    if "per_device_train_batch_size" in config.training:
        config.training["gradient_accumulation_steps"] = config.global_batch_size // per_step


def keep_global_batch(config: TrainConfig, checkpoint: str, world_size: int) -> None:
    """Let a training that goes on from `checkpoint` on another number of ranks take as many sequences per step as
    before, unless `global_batch_size` says how many.

    Raises:
        UserError: where they cannot be shared by so many ranks.
    """
    manifest = read_manifest(Path(checkpoint))
    if manifest is None or manifest["world_size"] == world_size or config.global_batch_size:
        return
    config.global_batch_size = manifest["run_identity"]["sequences per step"]
    config.training.pop("gradient_accumulation_steps", None)
    problems: list[str] = []
    _check_batches(config, world_size, problems)
    raise_if_any(
        [
            f"resume_from_checkpoint: {checkpoint} took {config.global_batch_size} sequences per step, and so must what"
            f" follows; {problem}"
            for problem in problems
        ]
    )


def _check_precision(config: TrainConfig, problems: list[str]) -> None:
    """Make `dtype` and the flags bf16 and fp16 one decision."""
    training = config.training
    if training.get("bf16") or training.get("fp16"):
        config.dtype = "bfloat16" if training.get("bf16") else "float16"
    elif config.dtype == "auto" and "bf16" in training:
        config.dtype = "float32"  # bf16: false, said aloud
    config.dtype = resolve_dtype(config.dtype)
    training["bf16"], training["fp16"] = config.dtype == "bfloat16", config.dtype == "float16"
    if config.dtype == "float16" and not has_gpu():
        problems.append("fp16 needs a GPU; on CPU use bf16 or float32")


def _check_reporters(config: TrainConfig, problems: list[str]) -> None:
    asked = config.training.get("report_to") or []
    for name in [asked] if isinstance(asked, str) else asked:
        known = [*INTEGRATION_TO_CALLBACK, "all", "none"]
        if name not in known:
            problems.append(f"report_to={name}: unknown; there are {', '.join(known)}{nearest(name, known)}")
        packages = REPORTERS.get(name, (name,) if name in INTEGRATION_TO_CALLBACK else ())
        if packages and not any(importlib.util.find_spec(package) for package in packages):
            problems.append(f"report_to={name}: the package {packages[0]} is not installed; pip install {packages[0]}")


def _check_quantization(config: TrainConfig, zero_file: dict[str, Any] | None, problems: list[str]) -> None:
    if config.method != "qlora":
        return
    if not has_gpu():
        problems.append("method=qlora needs a GPU (bitsandbytes); on CPU use method: lora")
    if importlib.util.find_spec("bitsandbytes") is None:
        problems.append("method=qlora: the package bitsandbytes is not installed; pip install bitsandbytes")
    if zero_file and (stage(zero_file) == 3 or offloads(zero_file)):
        # transformers skips zero.Init for quantised models (modeling_utils.py), so ZeRO-3 would not shard them at load.
        problems.append(
            f"method=qlora cannot be combined with zero={config.zero}: a quantised base is neither sharded by ZeRO-3"
            " nor offloaded; use zero 2, or method lora"
        )


def _check_training_arguments(config: TrainConfig, problems: list[str]) -> None:
    """transformers' own rules between its fields, asked of a throw-away object without DeepSpeed, and whether the
    optimizer's package is there.
    """
    values = with_defaults(config.training, has_held_out=bool(config.eval_data or config.eval_fraction))
    values = {
        key: value
        for key, value in values.items()
        if key not in ("deepspeed", "fsdp", "fsdp_config", "parallelism_config")
    }
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the real object will say them
            args = TrainingArguments(**values | {"output_dir": values.get("output_dir") or "unused", "report_to": []})
            Trainer.get_optimizer_cls_and_kwargs(args)
    except (ValueError, TypeError, RuntimeError, ImportError) as error:
        problems.append(one_line(error))


def plan_run(
    config: TrainConfig, prepared: Prepared, machine: Machine, *, checkpoint: str | None = None
) -> tuple[Plan, str]:
    """The plan of this run, and why it was chosen.

    Args:
        checkpoint: that the run goes on from: with zero auto and as many ranks as before the earlier plan is kept, with
            others one that can take it over is chosen.

    Raises:
        UserError: where it cannot fit, with the resource that binds and the nearest plan that can.
    """
    training = config.training
    explicit = training.get("activation_checkpointing", training.get("gradient_checkpointing"))
    if nvme := nvme_path(prepared.zero_file or {}):
        machine = dataclasses.replace(machine, nvme_bytes=shutil.disk_usage(nvme).free, nvme_path=nvme)
    job = _job(
        config, prepared, checkpointing=explicit if explicit is not None else (None if config.zero == "auto" else False)
    )
    speeds = _speeds(machine, job)
    zero = config.zero
    unsharded = checkpoint and (read_manifest(Path(checkpoint)) or {}).get("zero_stage") == 0
    if checkpoint and zero == "auto" and (Path(training["output_dir"]) / "run.json").is_file():
        earlier = read_run(training["output_dir"])
        if earlier["world_size"] == machine.world_size:
            zero, kept = earlier["plan"]["zero"], earlier["plan"]
            job = dataclasses.replace(
                job,
                checkpointing=kept["activation_checkpointing"],
                micro_batch=kept["micro_batch"],
                accumulation=kept["accumulation"],
            )
    if unsharded and zero == "auto":
        zero = "0"
    plans = all_plans(job, machine, speeds, zero=zero, zero_file=prepared.zero_file if zero.endswith(".json") else None)
    if checkpoint and zero == "auto":
        plans = [plan for plan in plans if plan.zero not in NOT_TAKEN_OVER]
    plan = choose(plans, machine)
    why = reason(plan, plans, machine, zero=zero, resumes=zero != config.zero)
    if not plan.fits and config.memory_check:
        others = all_plans(dataclasses.replace(job, checkpointing=None), machine, speeds)
        nearest_plan = choose(others, machine)
        way_out = (
            f"{nearest_plan.label} would fit"
            if nearest_plan.fits
            else "use more GPUs or nodes, method lora, or a smaller per_device_train_batch_size or seq_len"
        )
        raise UserError([f"{why} {way_out}; memory_check=false starts it all the same"])
    return plan, why


def smaller_plan(config: TrainConfig, prepared: Prepared, machine: Machine, plan: Plan) -> Plan | None:
    """The fastest plan that takes at most nine tenths of the memory of `plan` for the same steps; None where there is
    none.
    """
    job = _job(config, prepared, checkpointing=None)
    per_step = job.sequences_per_step or plan.micro_batch * plan.accumulation * machine.world_size
    roomier = dataclasses.replace(machine, device_bytes=int(0.9 * plan.device_bytes))
    plans = all_plans(
        dataclasses.replace(job, micro_batch=None, accumulation=None, sequences_per_step=per_step),
        roomier,
        _speeds(machine, job),
    )
    best = choose(plans, roomier)
    return best if best.device_bytes <= roomier.device_bytes else None


def _speeds(machine: Machine, job: Job) -> Speeds:
    return calibrated(speeds_of(machine, half=job.half), machine, half=job.half)


def _job(config: TrainConfig, prepared: Prepared, *, checkpointing: bool | None) -> Job:
    training = config.training
    micro = (
        training.get("per_device_train_batch_size")
        or (config.batch_tokens and config.batch_tokens // config.seq_len)
        or (None if config.global_batch_size else 8)
    )  # 8 is TrainingArguments' own
    model_config = load_model_config(config.model, revision=config.revision, trust_remote_code=config.trust_remote_code)
    full_windows = all(one.rules.is_text for one in prepared.data) and not config.packing and config.seq_len % 8 == 0
    return Job(
        size=prepared.size,
        model_config=model_config,
        method=config.method,
        half=config.dtype != "float32",
        seq_len=config.seq_len,
        attention=attention_of(config, model_config, padded=not full_windows),
        loss="fused" if training.get("use_liger_kernel") else "hf",
        adapters=(
            None
            if config.method == "full"
            else saved_lora_config(config.adapter)
            if config.adapter
            else lora_config(config)
        ),
        micro_batch=micro,
        accumulation=training.get("gradient_accumulation_steps"),
        sequences_per_step=config.global_batch_size,
        checkpointing=checkpointing,
        fused_optimizer=training.get("optim", "adamw_torch_fused") == "adamw_torch_fused",
    )


def with_defaults(training: dict[str, Any], *, has_held_out: bool) -> dict[str, Any]:
    """The user's TrainingArguments fields over dsft's defaults, with one name where transformers has two."""
    values = {
        "logging_steps": 10,
        "logging_first_step": True,
        "logging_nan_inf_filter": False,  # the default would hide a NaN loss
        "include_num_input_tokens_seen": "non_padding",
        "report_to": "none",
        "save_total_limit": 2,
        "eval_strategy": "epoch" if has_held_out else "no",
        "ddp_timeout": 1800,
    } | training
    if values.get("load_best_model_at_end"):
        values.setdefault("save_strategy", values["eval_strategy"])
    values.pop("gradient_checkpointing", None)  # the plan says
    if "gradient_checkpointing_kwargs" in values:
        values.setdefault("activation_checkpointing_kwargs", values.pop("gradient_checkpointing_kwargs"))
    # Sequences have their columns already; train() gets the folder to resume from.
    return values | {"use_cpu": not has_gpu(), "remove_unused_columns": False, "resume_from_checkpoint": None}


def training_arguments(config: TrainConfig, plan: Plan, *, has_held_out: bool) -> TrainingArguments:
    """transformers' arguments: the user's, with dsft's defaults beneath them and the plan applied."""
    values = with_defaults(config.training, has_held_out=has_held_out)
    decided: dict[str, Any] = {
        "per_device_train_batch_size": 1 if config.batch_tokens else plan.micro_batch,
        "gradient_accumulation_steps": plan.accumulation,
        "activation_checkpointing": plan.activation_checkpointing,
    }
    if config.packing:
        values["include_num_input_tokens_seen"] = config.training.get(
            "include_num_input_tokens_seen", "all"
        )  # without an attention mask, transformers takes end tokens for padding
    if config.streaming:
        decided["accelerator_config"] = {
            "dispatch_batches": False
        }  # every rank reads; batches that rank 0 deals out would need one width
    return TrainingArguments(**values | decided | {"deepspeed": plan.deepspeed_config})


def ignored_options(config: TrainConfig, deepspeed_config: dict[str, Any], size: ModelSize) -> list[str]:
    """One sentence for each option that was set but has no, or another, effect in this configuration."""
    notes = []
    defaults = LoraFields()
    lora_names = [
        f.name for f in dataclasses.fields(LoraFields) if f.name not in ("method", "adapter", "quantization_bits")
    ]
    changed = [name for name in lora_names if getattr(config, name) != getattr(defaults, name)]
    if changed and config.method == "full":
        notes.append(f"{', '.join(changed)}: ignored, because method is full; set method: lora")
    if changed and config.adapter:
        notes.append(f"{', '.join(changed)}: ignored, because adapter={config.adapter} brings its own shape")
    if config.method != "qlora" and config.quantization_bits != defaults.quantization_bits:
        notes.append(f"quantization_bits: ignored, because method is {config.method}; set method: qlora")
    if "train_sampling_strategy" in config.training and (config.packing or config.batch_tokens or config.streaming):
        notes.append(
            "train_sampling_strategy: ignored, because packing, batch_tokens or streaming decide which sequences go"
            " together"
        )
    if config.eval_data and config.eval_fraction:
        notes.append("eval_fraction: ignored, because eval_data is given")
    for name in ("use_cpu", "remove_unused_columns"):
        if name in config.training:
            notes.append(f"{name}: ignored, dsft sets it (DS_ACCELERATOR=cpu in the environment asks for CPU ranks)")
    if config.training.get("optim", "adamw_torch").partition("_")[0] != "adamw":
        notes.append(f"optim={config.training['optim']}: its memory and time are planned as AdamW's")
    if "optimizer" in deepspeed_config:
        if "optim" in config.training:
            notes.append(
                "optim: ignored, because the DeepSpeed configuration brings"
                f" {deepspeed_config['optimizer'].get('type')}, which offload needs"
            )
        if config.training.get("weight_decay"):
            notes.append("weight_decay: DeepSpeed's own optimizer applies it to norms and biases too")
    if size.unadapted_expert_params:
        notes.append(
            f"{size.unadapted_expert_params:,} parameters of experts get no adapter: peft's"
            f" {', '.join(config.lora_target_modules)} does not reach them in this architecture"
        )
    return notes
