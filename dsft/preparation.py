"""From options to everything a run needs before weights are loaded: checks, data, plan, TrainingArguments.

Every check appends to one list; nothing here loads a weight.
"""

import importlib.util
import os
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerBase, TrainingArguments

from dsft.config import EvalConfig, TrainConfig
from dsft.lora import check_lora_targets
from dsft.machine import Machine
from dsft.model import is_bare_config, load_tokenizer, resolve_dtype
from dsft.model_size import ModelSize, empty_model, load_model_config, measure_model
from dsft.plan import ZeroPlan, choose_plan
from dsft.problems import UserError, raise_if_any
from dsft.run_folder import check_free_space, check_output_dir
from dsft.samples import check_rows
from dsft.text_data import read_rows
from dsft.zero_config import adopt_zero_file, check_nvme, compose, offloads, read_zero_file, stage

REPORTERS = {"tensorboard": ("tensorboard", "tensorboardX"), "wandb": ("wandb",), "trackio": ("trackio",)}


@dataclass(kw_only=True)
class Prepared:
    """What the checks found on the way, for the run to use."""

    tokenizer: PreTrainedTokenizerBase | None = None
    size: ModelSize | None = None
    rows: Dataset | None = None
    held_out_rows: Dataset | None = None
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
        check_nvme(prepared.zero_file, config.zero, problems)
    _check_batches(config, world_size, problems)
    _check_precision(config, problems)
    _check_reporters(config, problems)
    _check_quantization(config, prepared.zero_file, problems)
    _check_training_arguments(config, problems)
    if config.model:
        prepared.size = check_model(config, problems)
        if prepared.size or config.tokenizer:  # where there is no model, its missing tokenizer is no news
            prepared.tokenizer = check_tokenizer(config, problems)
    if prepared.size and config.training.get("output_dir") and not any(problem.startswith("output_dir") for problem in problems):
        # What is written at the end; checkpoints come on top.
        check_free_space(config.training["output_dir"], prepared.size.num_trainable * (4 if config.dtype == "float32" else 2), problems)
    _read_data(config, prepared, problems)
    return prepared


def check_tokenizer(config: TrainConfig | EvalConfig, problems: list[str]) -> PreTrainedTokenizerBase | None:
    """The tokenizer, or a problem that says what is missing."""
    try:
        tokenizer = load_tokenizer(config)
    except (OSError, ValueError, KeyError, ImportError) as error:
        problems.append(f"tokenizer: none found for {config.tokenizer or config.model}; set tokenizer to a hub id or a folder that has one ({_one_line(error)})")
        return None
    if tokenizer.pad_token_id is None:
        problems.append(f"tokenizer {tokenizer.name_or_path}: has neither a pad token nor an end token to pad with; add one to its files (tokenizer.pad_token = ..., save_pretrained)")
    return tokenizer


def check_model(config: TrainConfig, problems: list[str]) -> ModelSize | None:
    """The model's size from its config, or problems: none found, LoRA targets that match nothing, too few positions."""
    try:
        model_config = load_model_config(config.model, revision=config.revision, trust_remote_code=config.trust_remote_code)
        model = empty_model(model_config, trust_remote_code=config.trust_remote_code)
    except (OSError, ValueError, KeyError, ImportError, AttributeError, TypeError) as error:
        problems.append(f"model={config.model}: no causal language model can be read there ({_one_line(error)})")
        return None
    before = len(problems)
    if config.method != "full" and not config.adapter:
        check_lora_targets(model, config, problems)
    positions = getattr(model_config.get_text_config(), "max_position_embeddings", None)
    if positions and config.seq_len > positions:
        problems.append(f"seq_len={config.seq_len} is beyond the {positions} positions of {config.model}; lower seq_len")
    return measure_model(config) if len(problems) == before else None


def _read_data(config: TrainConfig, prepared: Prepared, problems: list[str]) -> None:
    try:
        if config.data:
            prepared.rows = read_rows(config.data, config, key="data", split=config.data_split)
            check_rows(prepared.rows, config, prepared.tokenizer, key="data", problems=problems)
    except UserError as error:
        problems += error.problems
    try:
        if config.eval_data:
            prepared.held_out_rows = read_rows(config.eval_data, config, key="eval_data", split=config.eval_split)
            check_rows(prepared.held_out_rows, config, prepared.tokenizer, key="eval_data", problems=problems)
    except UserError as error:
        problems += error.problems
    if prepared.rows is not None and config.eval_fraction and not config.eval_data:
        if int(len(prepared.rows) * config.eval_fraction) < 1:
            problems.append(f"eval_fraction={config.eval_fraction} of {len(prepared.rows)} rows is no row; raise it or give eval_data")
        else:
            parts = prepared.rows.train_test_split(test_size=config.eval_fraction, seed=config.training.get("data_seed") or config.training.get("seed", 42))
            prepared.rows, prepared.held_out_rows = parts["train"], parts["test"]
    wants_evaluation = config.training.get("eval_strategy", "no") != "no" or config.training.get("load_best_model_at_end")
    if wants_evaluation and not config.eval_data and not config.eval_fraction:
        problems.append("eval_strategy needs held-out data; give eval_data or eval_fraction")


def _follow_accelerate(config: TrainConfig, problems: list[str]) -> None:
    """Under `accelerate launch` with a deepspeed_config_file, that file is `zero`, unless the user named another: then both are named."""
    file = os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
    if file == "none":
        return
    if config.zero == "auto":
        config.zero = file
    elif read_zero_file(config.zero, []) != read_zero_file(file, []):
        problems.append(f"zero={config.zero}, but accelerate's deepspeed_config_file is {file}; keep one")


def _check_batches(config: TrainConfig, world_size: int, problems: list[str]) -> None:
    """Set gradient_accumulation_steps from global_batch_size, or say which sizes would divide."""
    micro = config.training.get("per_device_train_batch_size", 8)
    if not config.global_batch_size or micro < 1 or "gradient_accumulation_steps" in config.training:
        return
    per_step = micro * world_size
    if config.global_batch_size % per_step:
        lower = config.global_batch_size // per_step * per_step
        problems.append(
            f"global_batch_size={config.global_batch_size} is not divisible by per_device_train_batch_size={micro} x {world_size} ranks; "
            f"try {' or '.join(str(n) for n in (lower, lower + per_step) if n)}, or another per_device_train_batch_size"
        )
        return
    config.training["gradient_accumulation_steps"] = config.global_batch_size // per_step


def _check_precision(config: TrainConfig, problems: list[str]) -> None:
    """Make `dtype` and the flags bf16 and fp16 one decision."""
    training = config.training
    if training.get("bf16") or training.get("fp16"):
        config.dtype = "bfloat16" if training.get("bf16") else "float16"
    elif config.dtype == "auto" and "bf16" in training:
        config.dtype = "float32"  # bf16: false, said aloud
    config.dtype = resolve_dtype(config.dtype)
    training["bf16"], training["fp16"] = config.dtype == "bfloat16", config.dtype == "float16"
    if config.dtype == "float16" and not torch.cuda.is_available():
        problems.append("fp16 needs a GPU; on CPU use bf16 or float32")


def _check_reporters(config: TrainConfig, problems: list[str]) -> None:
    asked = config.training.get("report_to") or []
    for name in [asked] if isinstance(asked, str) else asked:
        packages = REPORTERS.get(name, ())
        if packages and not any(importlib.util.find_spec(package) for package in packages):
            problems.append(f"report_to={name}: the package {packages[0]} is not installed; pip install {packages[0]}")


def _check_quantization(config: TrainConfig, zero_file: dict[str, Any] | None, problems: list[str]) -> None:
    if config.method != "qlora":
        return
    if not torch.cuda.is_available():
        problems.append("method=qlora needs a GPU (bitsandbytes); on CPU use method: lora")
    if importlib.util.find_spec("bitsandbytes") is None:
        problems.append("method=qlora: the package bitsandbytes is not installed; pip install bitsandbytes")
    if config.model and is_bare_config(config.model):
        problems.append(f"method=qlora: {config.model} is a config without weights; there is nothing to quantise")
    if zero_file and (stage(zero_file) == 3 or offloads(zero_file)):
        # transformers skips zero.Init for quantised models (modeling_utils.py), so ZeRO-3 would not shard them at load.
        problems.append(f"method=qlora cannot be combined with zero={config.zero}: a quantised base is neither sharded by ZeRO-3 nor offloaded; use zero 2, or method lora")


def _check_training_arguments(config: TrainConfig, problems: list[str]) -> None:
    """transformers' own rules between its fields, asked of a throw-away object without DeepSpeed."""
    values = config.training | {"use_cpu": not torch.cuda.is_available(), "report_to": [], "resume_from_checkpoint": None}
    values = {key: value for key, value in values.items() if key not in ("deepspeed", "fsdp", "fsdp_config", "parallelism_config")}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the real object will say them
            TrainingArguments(**values | {"output_dir": values.get("output_dir") or "unused"})
    except (ValueError, TypeError, RuntimeError, ImportError) as error:
        problems.append(_one_line(error))


def plan_run(config: TrainConfig, prepared: Prepared, machine: Machine) -> tuple[ZeroPlan, dict[str, Any]]:
    """The plan and the DeepSpeed configuration that carries it out.

    Raises:
        UserError: where `zero` is auto and nothing fits.
    """
    training = config.training
    explicit = training.get("activation_checkpointing", training.get("gradient_checkpointing"))
    plan = choose_plan(
        prepared.size,
        machine,
        micro_batch_tokens=training.get("per_device_train_batch_size", 8) * config.seq_len,
        half=config.dtype != "float32",
        zero=config.zero if prepared.zero_file is None else _nearest_name(config.zero, prepared.zero_file),
        activation_checkpointing=explicit if explicit is not None else (None if config.zero == "auto" else False),
    )
    if config.zero == "auto" and not plan.fits:
        raise UserError([f"zero=auto: {plan.reason} Use more GPUs or nodes, method lora, a smaller per_device_train_batch_size or seq_len, or set zero yourself"])
    zero_file = prepared.zero_file
    if zero_file is None:
        problems: list[str] = []
        zero_file = read_zero_file(plan.zero, problems)
        raise_if_any(problems)
    return plan, compose(zero_file, ranks_per_node=machine.ranks_per_node)


def _nearest_name(zero: str, zero_file: dict[str, Any]) -> str:
    """The name whose formulas describe a DeepSpeed JSON."""
    if not zero.endswith(".json"):
        return zero
    section = zero_file.get("zero_optimization", {})
    if not offloads(zero_file):
        return "3-hpz" if section.get("zero_hpz_partition_size", 1) > 1 else str(stage(zero_file))
    if stage(zero_file) != 3:
        return "2-offload"
    return "3-offload" if "offload_param" in section else "3-offload-optimizer"


def training_arguments(config: TrainConfig, plan: ZeroPlan, deepspeed_config: dict[str, Any], *, has_held_out: bool) -> TrainingArguments:
    """transformers' arguments: the user's, with dsft's defaults beneath them and the plan applied."""
    values = {
        "logging_steps": 10,
        "logging_first_step": True,
        "logging_nan_inf_filter": False,  # the default would hide a NaN loss
        "include_num_input_tokens_seen": "non_padding",
        "report_to": "none",
        "save_total_limit": 2,
        "eval_strategy": "epoch" if has_held_out else "no",
        "ddp_timeout": 1800,
    } | config.training
    if values.get("load_best_model_at_end"):
        values.setdefault("save_strategy", values["eval_strategy"])
    # Both names mean the same (transformers renamed it); one is given on.
    values.pop("gradient_checkpointing", None)
    if "gradient_checkpointing_kwargs" in values:
        values.setdefault("activation_checkpointing_kwargs", values.pop("gradient_checkpointing_kwargs"))
    values |= {
        "activation_checkpointing": plan.activation_checkpointing,
        "deepspeed": deepspeed_config,
        "use_cpu": not torch.cuda.is_available(),
        "remove_unused_columns": False,
        "resume_from_checkpoint": None,  # train() gets the folder
    }
    return TrainingArguments(**values)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
