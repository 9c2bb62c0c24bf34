"""What follows from the options of a training: decisions with their reasons, transformers' arguments, options that
transformers, DeepSpeed or the machine refuse, and bytes on the disk. `decide.py` applies what is returned.
"""

import importlib.util
import math
import re
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from huggingface_hub import HfApi
from transformers import TrainingArguments
from transformers.integrations.integration_utils import get_reporting_integration_callbacks

from dsft.checkpoints.manifest import bytes_of, checkpoints, read_manifest
from dsft.config.deepspeed import DeepSpeedJson, compose, get_value, offloads, read_zero_file, stage
from dsft.config.options import (
    HALF_PRECISION,
    IGNORED_ARGUMENTS,
    REFUSED_OPTIMIZERS,
    TRAINING_DEFAULTS,
    Decision,
    LoraFields,
    TrainConfig,
    decide,
    flagged_dtype,
)
from dsft.errors import UserError, one_line
from dsft.models.adapters import learning_rates
from dsft.models.chunked_head import LEAST_VOCAB
from dsft.models.measure import ModelFacts, ModelSize
from dsft.models.probes import trains_in_tiles
from dsft.planner.choose import DEFAULT_BATCH_TOKENS, Plan
from dsft.planner.memory import adapts_head, optimizer_memory, sums_in_fp32
from dsft.runtime.disk import free_bytes
from dsft.runtime.hardware import Machine, has_gpu
from dsft.units import DTYPE_BYTES, GB, Batch, plural

LONGEST_TMPDIR = 75
"""Characters. A Unix socket's path has at most 107, and multiprocessing adds 32."""
BYTES_PER_TOKEN = 200
"""Upper bound for a tokenizer's files: Llama 3's have 134."""
SMALL_FILES_BYTES = 100_000
"""Of the config, the model card, the training arguments and run.json."""
CHECKPOINTING = "activation_checkpointing"
if not hasattr(TrainingArguments, CHECKPOINTING):  # before transformers 5.23
    CHECKPOINTING = "gradient_checkpointing"
CHECKPOINTING_KWARGS = f"{CHECKPOINTING}_kwargs"
ON_HOST = ("adamw_torch_fused", "adamw_torch", "paged_adamw_32bit", "lion_32bit", "paged_lion_32bit")
"""Values of `optim` that DeepSpeed's CPU optimizers may replace under offload, with the same arithmetic."""
NOT_OVER_SHARDS = {
    "adafactor": "it factors the moments of whole weights, and ZeRO's shards are flat pieces of them",
    "adagrad": "DeepSpeed 0.19.8 fails in its first step over shards (IndexError in stage_1_and_2.py)",
}
"""Values of `optim` that ZeRO 1 to 3 refuse -> why."""


def accelerate_decisions(options: TrainConfig, environment: Mapping[str, str], problems: list[str]) -> list[Decision]:
    """Takes the deepspeed_config_file of `accelerate launch` as `zero`, unless the user set another."""
    file = environment.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
    if file == "none":
        if "ACCELERATE_DEEPSPEED_ZERO_STAGE" in environment and options.zero == "auto":
            problems.append(
                "accelerate's own DeepSpeed settings (zero_stage, offload ...) are not read; name a"
                " deepspeed_config_file in its YAML, or set zero"
            )
    elif options.zero == "auto":
        return [Decision("zero", file, "it is accelerate's deepspeed_config_file")]
    elif read_zero_file(options.zero, []) != read_zero_file(file, []):
        problems.append(f"zero={options.zero}, but accelerate's deepspeed_config_file is {file}; keep one")
    return []


def batch_decisions(options: TrainConfig, world: int, problems: list[str]) -> list[Decision]:
    """Derives the batch from `global_batch_size`, or reports which sizes would divide."""
    total = options.global_batch_size
    shared_by = options.sequence_parallel
    if not total or shared_by < 1 or world % shared_by:  # a problem of its own
        return []
    names = ("per_device_train_batch_size", "gradient_accumulation_steps")
    given = {name: options.training[name] for name in names if options.training.get(name)}
    product = "".join(f"{name}={value} x " for name, value in given.items()) + plural(world, "rank")
    if shared_by > 1:
        product += f" / sequence_parallel={shared_by}"
    per_step = Batch(math.prod(given.values()), 1, world, shared_by).sequences
    if len(given) == 2:  # both fixed, by a DeepSpeed JSON
        if total != per_step:
            problems.append(f"global_batch_size={total} is not {product}; leave one of them to follow")
    elif total % per_step:
        lower = total // per_step * per_step
        sizes = " or ".join(str(size) for size in (lower, lower + per_step) if size)
        problems.append(
            f"global_batch_size={total} is not divisible by {product}; try {sizes}, or another of these numbers"
        )
    elif given:  # else the plan chooses a micro batch
        (name,) = set(names) - given.keys()
        return [Decision(name, total // per_step, f"global_batch_size={total} / ({product})")]
    return []


def dtype_decisions(options: TrainConfig, auto_dtype: str) -> list[Decision]:
    """Combines `dtype` and the flags bf16 and fp16. `auto_dtype` is the meaning of `auto` on the run's devices."""
    flagged = flagged_dtype({"dtype": options.dtype, **options.training})
    if flagged:
        dtype, reason = flagged
    elif options.dtype == "auto":
        dtype = auto_dtype
        reason = "auto is bfloat16 on a GPU that computes in it, else float32"
    else:
        dtype = options.dtype
        reason = "as asked for"
    decisions = [Decision("dtype", dtype, reason)]
    for name, half in HALF_PRECISION.items():
        decisions.append(Decision(name, dtype == half, f"dtype={dtype}"))
    return decisions


def keep_global_batch(options: TrainConfig, checkpoint: str, world: int) -> list[Decision]:
    """Keeps the sequences per step of a resumed training, unless `global_batch_size` is set. Raises UserError if so
    many ranks cannot share them.
    """
    manifest = read_manifest(checkpoint)
    if "run_identity" not in manifest or options.global_batch_size:
        return []
    then = Batch(1, 1, manifest["world_size"], manifest.get("sequence_parallel", 1))
    on_as_many = then.sequences == Batch(1, 1, world, options.sequence_parallel).sequences
    if on_as_many and options.training.get("gradient_accumulation_steps"):
        return []
    total = manifest["run_identity"]["sequences per step"]
    kept = [
        Decision("global_batch_size", total, f"{checkpoint} took so many on {then.ranks} ranks"),
        Decision("gradient_accumulation_steps", None, "follows from global_batch_size"),
    ]
    problems = []
    decisions = batch_decisions(decide(options, kept), world, problems)
    if problems:
        raise UserError(
            f"resume_from_checkpoint: {checkpoint} took {total} sequences per step, and so must what follows; {world}"
            " ranks cannot share them: use a number of ranks that divides them, or a smaller"
            " per_device_train_batch_size"
        )
    return kept + decisions


def tiled_loss_decision(options: TrainConfig, facts: ModelFacts) -> Decision:
    vocab_size = facts.size.vocab_size
    others = [name for name in ("label_smoothing_factor", "compute_loss") if options.value(name)]
    is_wanted = options.tiled_loss is True or options.training.get("use_liger_kernel")
    why_not = ""
    if options.tiled_loss is False:
        why_not = "as asked for"
    elif vocab_size < LEAST_VOCAB and not is_wanted:
        why_not = f"a vocabulary of {vocab_size:,} is below {LEAST_VOCAB:,}"
    elif others:
        why_not = f"not with {' and '.join(others)}"
    elif adapts_head(facts.adapters):
        why_not = "the output head has an adapter"
    elif options.dtype == "float16":
        why_not = "float16's small gradients vanish before they are scaled"
    elif not facts.has_plain_head or not trains_in_tiles(facts.config, trust_remote_code=options.trust_remote_code):
        why_not = f"a trial with {facts.size.model_type} did not find the same gradients"
    reason = why_not or f"logits of {vocab_size:,} entries take more memory than the layers"
    return Decision("tiled_loss", not why_not, reason)


def with_defaults(options: TrainConfig) -> dict[str, Any]:
    """Returns the user's TrainingArguments fields over dsft's defaults, with one name where transformers has two."""
    # 8 as in transformers, but no more tokens than in dsft eval: long sequences would exceed the plan.
    at_once = DEFAULT_BATCH_TOKENS[has_gpu()] // max(1, options.seq_len)
    derived = {
        "eval_strategy": "epoch" if options.has_held_out else "no",
        "per_device_eval_batch_size": max(1, min(8, at_once)),
    }
    values = TRAINING_DEFAULTS | derived | dict(options.training)
    if options.early_stopping_patience or values.get("save_strategy") == "best":  # which need a metric
        values["metric_for_best_model"] = values.get("metric_for_best_model") or "loss"
    if values.get("load_best_model_at_end"):
        values.setdefault("save_strategy", values["eval_strategy"])
    values.pop("gradient_checkpointing", None)  # the plan decides
    if "gradient_checkpointing_kwargs" in values:
        values.setdefault(CHECKPOINTING_KWARGS, values.pop("gradient_checkpointing_kwargs"))
    values = {name: value for name, value in values.items() if name not in IGNORED_ARGUMENTS}
    return values | {
        "use_cpu": not has_gpu(),
        "remove_unused_columns": False,  # sequences have their columns already
        "resume_from_checkpoint": None,  # train() gets the folder
        "include_num_input_tokens_seen": "non_padding",
        "logging_nan_inf_filter": False,  # it would wait for the loss of each micro batch
    }


def checkpointing_kwargs(options: TrainConfig) -> dict[str, Any]:
    """Returns activation_checkpointing_kwargs, given by either name; raises ValueError for a text that is not JSON."""
    kwargs = with_defaults(options).get(CHECKPOINTING_KWARGS) or {}
    if not isinstance(kwargs, dict):
        raise ValueError(f"activation_checkpointing_kwargs={kwargs}: must be a JSON object")
    return dict(kwargs)


def training_arguments(options: TrainConfig, plan: Plan) -> TrainingArguments:
    """Makes transformers' arguments. Under ZeRO-3 transformers shards all that it loads from here on."""
    values = with_defaults(options) | {
        "per_device_train_batch_size": plan.micro_batch,
        "gradient_accumulation_steps": plan.accumulation,
        CHECKPOINTING: plan.activation_checkpointing,
        # The engine counts each rank's micro batches, even if ranks share sequences.
        "deepspeed": plan.deepspeed_config | {"train_batch_size": "auto"},
        "accelerator_config": {"non_blocking": has_gpu()},  # the host does not wait for copies to the GPU
    }
    kwargs = checkpointing_kwargs(options)
    if not has_gpu():
        kwargs.pop("offload", None)  # activations are in host memory already
    if plan.activation_checkpointing and kwargs.get("every_n_layers", 1) != plan.checkpoint_every:
        kwargs["every_n_layers"] = plan.checkpoint_every
    if kwargs or CHECKPOINTING_KWARGS in values:
        values[CHECKPOINTING_KWARGS] = kwargs
    if values.get("use_liger_kernel"):  # its forward with a loss would replace the tiled loss
        given = values.get("liger_kernel_config") or {}
        values["liger_kernel_config"] = given | {"fused_linear_cross_entropy": False, "cross_entropy": False}
    # The Trainer would upload the run's folder, and writes its arguments beside the weights; `finish` uploads final/.
    for name in ("push_to_hub", "hub_token"):
        values.pop(name, None)
    return TrainingArguments(**values)


def check_zero_file(zero_file: DeepSpeedJson, options: TrainConfig, machine: Machine) -> list[str]:
    """Lists what this training or machine cannot do with the configuration `zero_file`."""
    zero = options.zero
    training = options.training
    zero_stage = stage(zero_file)
    optimizer = str(get_value(zero_file, "optimizer.type")).lower()
    offload = get_value(zero_file, "zero_optimization.offload_optimizer.device")
    is_offloaded = offload in ("cpu", "nvme")
    problems = []

    if options.method == "qlora" and (zero_stage == 3 or offloads(zero_file)):
        # transformers skips zero.Init for quantised models (modeling_utils.py, get_init_context).
        problems.append(
            f"method=qlora cannot be combined with zero={zero}: every GPU would load the whole quantised base"
            " before ZeRO-3 shards it (DeepSpeed issue 5637), and offload does not take it; use zero 2 if that base"
            " fits on one GPU, else method lora, whose base is sharded and offloaded"
        )
    if options.states == "bfloat16" and zero_stage == 0:
        problems.append(
            f"states=bfloat16 cannot be combined with zero={zero}: DeepSpeed has such states in ZeRO 1, 2 and 3; use"
            " one of these"
        )
    elif options.states == "bfloat16" and is_offloaded and optimizer not in ("adam", "adamw"):
        problems.append(  # base_optimizer.py, _configure_master_weights
            f"states=bfloat16 cannot be combined with zero={zero}: an offloaded optimizer must be AdamW in the"
            " DeepSpeed JSON, as in zero 2-offload"
        )
    if options.dtype == "float16" and zero_stage == 0:
        problems.append(f"dtype=float16 cannot be combined with zero={zero}; use zero 1, 2 or 3, or bfloat16")
    if zero_stage == 0 and sums_in_fp32(zero_file) and options.dtype in HALF_PRECISION.values():
        problems.append(f"zero={zero}: data_types.grad_accum_dtype: ZeRO 0 cannot add up in fp32; use stage 2 or 3")
    optim = training.get("optim")
    if "optimizer" not in zero_file and zero_stage and optim in NOT_OVER_SHARDS:
        problems.append(f"optim={optim}: {NOT_OVER_SHARDS[optim]}; add zero: 0, or use adamw_torch or adamw_8bit")
    # accelerate replaces all others with CPUAdam, 8-bit AdamW with an L2 penalty (map_pytorch_optim_to_deepspeed).
    elif (
        "optimizer" not in zero_file
        and is_offloaded
        and zero_file.get("zero_force_ds_cpu_optimizer", True)
        and optim not in (None, *ON_HOST)
    ):
        problems.append(
            f"optim={optim} cannot be combined with zero={zero}: DeepSpeed's CPUAdam would take its place on the host;"
            f" choose from {', '.join(ON_HOST)}, or name an optimizer in the DeepSpeed JSON"
        )
    for name in ("zero_quantized_weights", "zero_quantized_gradients"):
        if not machine.has_gpu and get_value(zero_file, f"zero_optimization.{name}"):
            problems.append(f"zero={zero}: {name} needs GPUs; leave it out")
    clipping = training.get("max_grad_norm", 1.0)
    if optimizer == "muon" and zero_stage and clipping:  # DeepSpeed clips the orthogonalised updates
        problems.append(
            f"zero={zero}: Muon's updates would be clipped by max_grad_norm={clipping}; set max_grad_norm: 0"
        )
    if optimizer == "lion" and not machine.has_gpu and not is_offloaded:
        problems.append(f"zero={zero}: DeepSpeed's Lion needs a GPU or an offload; use optim lion_32bit, or AdamW")
    for part in ("optimizer", "scheduler"):
        if part in zero_file and learning_rates(options):
            problems.append(
                f"zero={zero}: DeepSpeed's own {part} has one learning rate; with learning_rates and loraplus_lr_ratio"
                " use one without, such as zero 2 or 3"
            )
    return problems


def check_machine(options: TrainConfig, machine: Machine) -> list[str]:
    """Lists what the machine cannot do, and missing packages if it is this one."""
    problems = []
    training = options.training
    if options.dtype == "float16" and not machine.has_gpu:
        problems.append("fp16 needs a GPU; on CPU use bf16 or float32")
    if options.states == "bfloat16" != options.dtype:
        problems.append(f"states=bfloat16 needs dtype bfloat16, which is {options.dtype} here")
    if options.method == "qlora" and not machine.has_gpu:
        problems.append("method=qlora needs a GPU (bitsandbytes); on CPU use method: lora")
    if not machine.measured:
        return problems
    temporary = tempfile.gettempdir()
    if training.get("dataloader_num_workers") and len(temporary) > LONGEST_TMPDIR:
        problems.append(
            f"TMPDIR={temporary}: too long for the sockets of data workers; set one of at most {LONGEST_TMPDIR}"
            " characters, or dataloader_num_workers: 0"
        )
    needs_liger = bool(training.get("use_liger_kernel"))
    if needs_liger and importlib.util.find_spec("liger_kernel") is None:
        problems.append("use_liger_kernel: the package liger_kernel is not installed; pip install liger-kernel")
    needs_bitsandbytes = options.method == "qlora" and machine.has_gpu
    if needs_bitsandbytes and importlib.util.find_spec("bitsandbytes") is None:
        problems.append("method=qlora: the package bitsandbytes is not installed; pip install bitsandbytes")
    return problems


class WithoutDevice(TrainingArguments):
    """transformers' checks alone. The original joins a process group to find its device: if RANK and the like are set,
    `dsft plan` would wait for other ranks."""

    _setup_devices = torch.device("cpu")
    distributed_state = None


def check_hub(options: TrainConfig) -> list[str]:
    if not options.training.get("push_to_hub"):
        return []
    try:
        HfApi().whoami(token=options.training.get("hub_token"))
    except Exception as error:  # of its HTTP library: no network, no token, an invalid one
        return [
            f"push_to_hub: login to the hub failed ({one_line(error)}); log in with hf auth login, or"
            " leave it out and upload final/ afterwards"
        ]
    return []


def check_training_arguments(options: TrainConfig, *, here: bool = True) -> list[str]:
    """Returns transformers' own error for its options. `here`: the run is on this machine, whose devices and packages
    transformers checks.
    """
    values = with_defaults(options)
    report_to = values.pop("report_to") or "none"
    if isinstance(report_to, list) and len(report_to) == 1:
        report_to = report_to[0]
    for name in () if here else ("tf32", *HALF_PRECISION):
        values.pop(name, None)
    where = "TrainingArguments of transformers"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the real object repeats them
            made = WithoutDevice(**values | {"output_dir": values.get("output_dir") or "unused", "report_to": "none"})
        checkpointing_kwargs(options)
        where = f"report_to={report_to}"
        for reporter in get_reporting_integration_callbacks(report_to) if here else ():
            reporter()
        given = {name: options.training[name] for name in ("optim", "optim_args") if options.training.get(name)}
        if here and given and given.get("optim") not in REFUSED_OPTIMIZERS:
            from transformers import Trainer  # seconds

            where = ", ".join(f"{name}={value}" for name, value in given.items())
            Trainer.get_optimizer_cls_and_kwargs(made)  # its package may be missing
    except (ValueError, TypeError, RuntimeError, ImportError, OSError) as error:
        text = one_line(error)
        has_name = any(re.search(rf"\b{name}\b", text) for name in options.training)
        return [text if has_name else f"{where}: {text}"]
    return []


def ignored_options(options: TrainConfig, deepspeed_config: DeepSpeedJson, size: ModelSize) -> list[str]:
    """Reports each option that is set but has no effect, or another one, in this configuration, with the reason."""
    training = options.training
    defaults = LoraFields()
    ignored = {name: why for name, why in IGNORED_ARGUMENTS.items() if name in training}
    changed = [name for name, default in vars(defaults).items() if getattr(options, name) != default]
    changed = [name for name in changed if name not in ("method", "adapter")]
    shape = [name for name in changed if name not in ("quantization", "loraplus_lr_ratio")]
    if changed and options.method == "full":
        ignored[", ".join(changed)] = "because method is full; set method: lora"
    elif shape and options.adapter:
        ignored[", ".join(shape)] = f"because adapter={options.adapter} brings its own shape"
    if "quantization" in changed and options.method == "lora":
        ignored["quantization"] = "because method is lora; set method: qlora"
    elif "quantization" in changed and options.method == "qlora" and size.quantization.lies_on_disk:
        ignored["quantization"] = f"because {options.model} is already {size.quantization.format} on disk"
    if options.eval_data and options.eval_fraction:
        ignored["eval_fraction"] = "because eval_data is given"
    if options.fp32_accumulation is True and not sums_in_fp32(deepspeed_config):
        ignored["fp32_accumulation"] = f"because ZeRO {stage(deepspeed_config)} with dtype {options.dtype} cannot"
    for section, name in (("optimizer", "optim"), ("scheduler", "lr_scheduler_type")):
        if section in deepspeed_config and name in training:
            ignored[name] = f"because the DeepSpeed configuration brings {deepspeed_config[section].get('type')}"
    notes = [f"{name}: ignored, {why}" for name, why in ignored.items()]
    if "optimizer" in deepspeed_config and training.get("weight_decay"):
        notes.append("weight_decay: DeepSpeed's own optimizer applies it to norms and biases too")
    return notes


@dataclass(frozen=True, kw_only=True)
class CheckpointSize:
    """Bytes that a run writes to `output_dir`, over all ranks."""

    weight_bytes: int
    """Weights of the model (frozen ones too) or of the adapter as safetensors; tied ones once."""
    state_bytes: int
    """The rest of a checkpoint: DeepSpeed's own copy of the weights and the optimizer's states."""
    small_bytes: int
    """Tokenizer, configs, card."""
    kept: int
    """Largest number of checkpoints at once: those kept, and the one being written."""

    @property
    def final_bytes(self) -> int:
        return self.weight_bytes + self.small_bytes

    @property
    def checkpoint_bytes(self) -> int:
        return self.weight_bytes + self.state_bytes + self.small_bytes

    @property
    def total_bytes(self) -> int:
        return self.final_bytes + self.kept * self.checkpoint_bytes


def checkpoint_size(
    options: TrainConfig, size: ModelSize, deepspeed_config: DeepSpeedJson | None = None
) -> CheckpointSize:
    """Predicts the bytes that a training writes; without a config, for the stage that writes least."""
    config = compose(
        deepspeed_config or {"zero_optimization": {"stage": 3}},
        bf16_states=options.states == "bfloat16",
    )
    weight_bytes = DTYPE_BYTES[options.dtype]
    optimizer = optimizer_memory(config, options.training.get("optim"), weight_bytes=weight_bytes)
    zero_stage = stage(config)
    in_module = size.num_trainable if size.lora_r else size.num_params
    # Stages 0 to 2 write the module again, stages 2 and 3 its frozen part (engine.py, frozen_param_fragments).
    copied = (in_module if zero_stage < 3 else 0) + (in_module - size.num_trainable if zero_stage >= 2 else 0)
    state_bytes = weight_bytes * copied + int(optimizer.checkpoint_bytes * size.num_trainable)
    values = with_defaults(options)
    kept = (values.get("save_total_limit") or 1) + 1
    if values.get("load_best_model_at_end") or values.get("metric_for_best_model"):
        kept = max(kept, 3)
    if not options.save_minutes:
        strategy = values.get("save_strategy", "steps")
        max_steps = values.get("max_steps", -1)
        every = values.get("save_steps", TrainingArguments.save_steps)
        saves = kept
        if strategy == "no":
            saves = 0
        elif strategy == "epoch" and max_steps <= 0:
            saves = math.ceil(values.get("num_train_epochs", TrainingArguments.num_train_epochs))
        elif strategy == "steps" and max_steps > 0 and every >= 1:
            saves = math.ceil(max_steps / every)
        kept = min(kept, saves)
    return CheckpointSize(
        weight_bytes=weight_bytes * size.saved_params,
        state_bytes=0 if options.training.get("save_only_model") else state_bytes,
        small_bytes=BYTES_PER_TOKEN * size.vocab_size + SMALL_FILES_BYTES,
        kept=kept,
    )


def check_room(output_dir: str, size: CheckpointSize) -> list[str]:
    """Compares the free bytes of output_dir's disk with what the run needs beyond the checkpoints that it replaces."""
    replaced = sum(bytes_of(folder) for folder in checkpoints(output_dir))
    needed = max(size.final_bytes, size.total_bytes - replaced)
    free = free_bytes(output_dir)
    if free is None or free >= needed:
        return []
    saves = ""
    way_out = "choose another disk"
    if size.kept:
        saves = f" and {plural(size.kept, 'checkpoint')} of {size.checkpoint_bytes / GB:.3g} GB"
        way_out += ", a smaller save_total_limit, or save_strategy: no"
    return [
        f"output_dir={output_dir}: the run needs {needed / GB:.3g} GB more for the final model"
        f" ({size.final_bytes / GB:.3g} GB){saves}, but the disk has {free / GB:.3g} GB free; {way_out}"
    ]
