"""From the options of a training to transformers' arguments, and which options have no effect."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from transformers import TrainingArguments

from dsft.config.deepspeed import stage
from dsft.config.options import IGNORED_ARGUMENTS, NEW_NAMES, TRAINING_DEFAULTS, LoraFields, TrainConfig
from dsft.models.size import ModelSize
from dsft.planner.fake_model import LIGER_MODELS
from dsft.planner.optimizers import OPTIMIZERS
from dsft.planner.plans import Plan
from dsft.planner.zero_layout import sums_in_fp32
from dsft.runtime.hardware import has_gpu


def with_defaults(options: TrainConfig) -> dict[str, Any]:
    """Lays the user's TrainingArguments fields over dsft's defaults, with one name where transformers has two."""
    eval_strategy = "epoch" if options.has_held_out else "no"
    values = TRAINING_DEFAULTS | {"eval_strategy": eval_strategy} | dict(options.training)
    if values.get("load_best_model_at_end"):
        values.setdefault("save_strategy", values["eval_strategy"])
    values.pop("gradient_checkpointing", None)  # the plan says
    if "gradient_checkpointing_kwargs" in values:
        values.setdefault("activation_checkpointing_kwargs", values.pop("gradient_checkpointing_kwargs"))
    values = {name: value for name, value in values.items() if name not in IGNORED_ARGUMENTS}
    return values | {
        "use_cpu": not has_gpu(),
        "remove_unused_columns": False,  # sequences have their columns already
        "resume_from_checkpoint": None,  # train() gets the folder
        "logging_nan_inf_filter": False,  # it would wait for the loss of each micro batch
    }


def training_arguments(options: TrainConfig, plan: Plan) -> TrainingArguments:
    """Composes transformers' arguments: the user's, with dsft's defaults beneath them and the plan applied.

    From here on transformers shards what it loads, where the plan is ZeRO-3.
    """
    values = with_defaults(options) | {
        "per_device_train_batch_size": 1 if options.batch_tokens else plan.micro_batch,
        "gradient_accumulation_steps": plan.accumulation,
        "activation_checkpointing": plan.activation_checkpointing,
        "deepspeed": plan.deepspeed_config,
    }
    dealt = values.get("accelerator_config")  # what the user sets of accelerate, in a dict or a JSON file
    if isinstance(dealt, str):
        dealt = json.loads(Path(dealt).read_text(encoding="utf-8"))
    # The host waits for no copy to the GPU. Of a stream every rank reads; batches that rank 0 deals out would need one
    # width.
    streamed = {"dispatch_batches": False} if options.streaming else {}
    values["accelerator_config"] = {"non_blocking": has_gpu()} | (dealt or {}) | streamed
    for name, older in NEW_NAMES.items():
        if name in values and name not in TrainingArguments.__dataclass_fields__:
            values[older] = values.pop(name)
    return TrainingArguments(**values)


def ignored_options(options: TrainConfig, deepspeed_config: dict[str, Any], size: ModelSize) -> list[str]:
    """Says of each option that was set but has no, or another, effect in this configuration why that is."""
    training, defaults, notes = options.training, LoraFields(), []
    changed = ", ".join(
        field.name
        for field in dataclasses.fields(LoraFields)
        if field.name not in ("method", "adapter", "quantization")
        and getattr(options, field.name) != getattr(defaults, field.name)
    )
    if changed and options.method == "full":
        notes.append(f"{changed}: ignored, because method is full; set method: lora")
    if changed and options.adapter:
        notes.append(f"{changed}: ignored, because adapter={options.adapter} brings its own shape")
    if options.method != "qlora" and options.quantization != defaults.quantization:
        notes.append(f"quantization: ignored, because method is {options.method}; set method: qlora")
    if "train_sampling_strategy" in training and (options.packing or options.batch_tokens or options.streaming):
        notes.append(
            "train_sampling_strategy: ignored, because packing, batch_tokens or streaming decide which sequences go"
            " together"
        )
    if options.eval_data and options.eval_fraction:
        notes.append("eval_fraction: ignored, because eval_data is given")
    notes += [f"{name}: ignored, {why}" for name, why in IGNORED_ARGUMENTS.items() if name in training]
    if options.fp32_accumulation is True and not sums_in_fp32(deepspeed_config):
        why = (
            "dtype is float32" if options.dtype == "float32" else f"ZeRO {stage(deepspeed_config)} cannot, 2 and 3 can"
        )
        notes.append(f"fp32_accumulation: ignored, because {why}")
    if "optim" in training and training["optim"] not in OPTIMIZERS:
        notes.append(f"optim={training['optim']}: its memory and time are planned as AdamW's")
    if training.get("use_liger_kernel") and size.model_type not in LIGER_MODELS:
        notes.append(f"use_liger_kernel: ignored, because Liger has no kernels for {size.model_type}")
    if "optimizer" in deepspeed_config and "optim" in training:
        notes.append(
            "optim: ignored, because the DeepSpeed configuration brings"
            f" {deepspeed_config['optimizer'].get('type')}, which offload needs"
        )
    if "optimizer" in deepspeed_config and training.get("weight_decay"):
        notes.append("weight_decay: DeepSpeed's own optimizer applies it to norms and biases too")
    if "scheduler" in deepspeed_config and "lr_scheduler_type" in training:
        notes.append(
            "lr_scheduler_type: ignored, because the DeepSpeed configuration brings"
            f" {deepspeed_config['scheduler'].get('type')}"
        )
    if size.unadapted_expert_params:
        notes.append(
            f"{size.unadapted_expert_params:,} parameters of experts get no adapter: peft's"
            f" {', '.join(options.lora_target_modules)} does not reach them in this architecture"
        )
    return notes
