"""What can be known wrong of a training before its weights load. Pure: each check returns its problems.

What the options show by themselves is in `config/checks.py`.
"""

import importlib.util
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import TrainingArguments
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from dsft.config.deepspeed import check_nvme, get_value, offloads, stage
from dsft.config.options import HALF_PRECISION, TrainConfig
from dsft.errors import nearest, one_line
from dsft.models.build import resolve_dtype
from dsft.models.quantization import FORMATS
from dsft.models.size import ModelFacts
from dsft.models.weights import adapter_problems, weight_problems
from dsft.planner.optimizers import optimizer_memory
from dsft.planner.zero_layout import sums_in_fp32
from dsft.run_setup.arguments import with_defaults
from dsft.runtime.hardware import Machine

REPORTERS = {
    "tensorboard": ("tensorboard", "tensorboardX"),
    "azure_ml": ("azureml",),
    "clearml": ("clearml",),
    "dagshub": ("dagshub",),
    "dvclive": ("dvclive",),
}
"""Packages of a reporter where they are not called as it is."""


def check_zero_file(zero_file: dict[str, Any], options: TrainConfig, *, here: bool = True) -> list[str]:
    """Lists what dsft cannot do of an explicit `zero`, or this machine.

    Args:
        here: whether the run is to take place on this machine.
    """
    zero = options.zero
    problems = check_nvme(zero_file, zero) if here else []
    if options.method == "qlora" and (stage(zero_file) == 3 or offloads(zero_file)):
        # transformers skips zero.Init for quantised models (modeling_utils.py, get_init_context).
        problems.append(
            f"method=qlora cannot be combined with zero={zero}: every GPU would load the whole quantised base"
            " before ZeRO-3 shards it (DeepSpeed issue 5637), and offload does not take it; use zero 2 where that base"
            " fits one GPU, else method lora, whose base is sharded and offloaded"
        )
    if options.training.get("use_liger_kernel") and stage(zero_file) == 3:
        # liger_kernel 0.8.5, transformers/model/llama.py: lce_maybe_trainable_lm_head reads lm_head.weight itself.
        problems.append(
            f"use_liger_kernel cannot be combined with zero={zero}: its loss reads the head's weight past ZeRO-3's"
            " hooks, which no run has proven; leave it out (tiled_loss saves the same memory), or use zero 2"
        )
    if stage(zero_file) == 0 and sums_in_fp32(zero_file) and options.dtype in HALF_PRECISION.values():
        problems.append(f"zero={zero}: data_types.grad_accum_dtype: ZeRO 0 cannot add up in fp32; use stage 2 or 3")
    # A schedule-free optimizer's average counts the steps of a group of parameters, and refuses steps before training.
    if optimizer_memory({}, options.training.get("optim")).counts_steps:
        is_half, reason = resolve_dtype(options.dtype) in HALF_PRECISION.values(), ""
        if offloads(zero_file):
            reason = "DeepSpeed's CPUAdam takes the place of an optimizer that is offloaded"
        elif "optimizer" in zero_file:
            reason = ""  # it trains instead, as a note says
        elif stage(zero_file) == 3:
            reason = (
                "stage 3 steps each sub-group of parameters by itself, and each would count as a step of the average"
            )
        elif is_half and (stage(zero_file) == 0 or (stage(zero_file) == 1 and sums_in_fp32(zero_file))):
            reason = "DeepSpeed makes its states in 16 bit there by a step with zero gradients, which counts"
        if reason:
            problems.append(
                f"optim={options.training['optim']} cannot be combined with zero={zero}: {reason}; use zero 1 or 2"
            )
    clipping = options.training.get("max_grad_norm", TrainingArguments.max_grad_norm)
    if get_value(zero_file, "zero_optimization.offload_optimizer.super_offload") and clipping:
        # superoffload_stage3.py: it steps while gradients still come only where none is clipped.
        problems.append(
            f"zero={zero}: offload_optimizer.super_offload gains nothing while gradients are clipped"
            f" (max_grad_norm={clipping}); set max_grad_norm to 0, or leave super_offload out"
        )
    if (get_value(zero_file, "tensor_parallel.autotp_size") or 1) > 1:
        problems.append(
            f"zero={zero}: tensor_parallel is not supported: the Trainer would feed the ranks that share a layer"
            " different sequences, and would save no model; leave it out, ZeRO-3 shards the weights too"
        )
    return problems


def check_machine(options: TrainConfig, machine: Machine) -> list[str]:
    """Lists what the machine cannot do, or the packages on it, where it is this one."""
    problems = []
    if options.dtype == "float16" and not machine.has_gpu:
        problems.append("fp16 needs a GPU; on CPU use bf16 or float32")
    if options.method == "qlora" and not machine.has_gpu:
        problems.append("method=qlora needs a GPU (bitsandbytes); on CPU use method: lora")
    if not machine.measured:
        return problems
    needed = {"liger_kernel": "use_liger_kernel"} if options.training.get("use_liger_kernel") else {}
    if options.method == "qlora" and machine.has_gpu and options.quantization in FORMATS:
        needed[FORMATS[options.quantization].package] = "method=qlora"
    for package, name in needed.items():
        if importlib.util.find_spec(package) is None:
            problems.append(f"{name}: the package {package} is not installed; pip install {package.replace('_', '-')}")
    names, known = options.training.get("report_to") or [], [*INTEGRATION_TO_CALLBACK, "all", "none"]
    for name in [names] if isinstance(names, str) else names:
        if name not in known:
            problems.append(f"report_to={name}: unknown; there are {', '.join(known)}{nearest(name, known)}")
        packages = REPORTERS.get(name, (name,) if name in INTEGRATION_TO_CALLBACK else ())
        if packages and not any(importlib.util.find_spec(package) for package in packages):
            problems.append(f"report_to={name}: the package {packages[0]} is not installed; pip install {packages[0]}")
    return problems


def check_training_arguments(options: TrainConfig, known: Sequence[str] = (), *, here: bool = True) -> list[str]:
    """Asks transformers for its own rules between its fields, of a throw-away object without DeepSpeed, and whether
    the optimizer's package is there.

    Args:
        known: problems found so far; what transformers reports of an option that is named there is left out.
        here: whether the run is to take place on this machine, whose devices and packages transformers looks at.
    """
    named = {re.match(r"\w*", problem)[0] for problem in known} & options.training.keys()
    values = with_defaults(options)
    of_devices = () if here else ("tf32", *HALF_PRECISION)
    for name in ("deepspeed", "fsdp", "fsdp_config", "parallelism_config", *of_devices):
        values.pop(name, None)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the real object will say them
            args = TrainingArguments(**values | {"output_dir": values.get("output_dir") or "unused", "report_to": []})
            if here and "optim" in options.training:
                from transformers import Trainer  # with datasets and pandas, which most plans do without

                Trainer.get_optimizer_cls_and_kwargs(args)
    except (ValueError, TypeError, RuntimeError, ImportError) as error:
        return [] if any(re.search(rf"\b{name}\b", str(error)) for name in named) else [one_line(error)]
    if args.torch_compile and not options.training.get("torch_compile"):
        return ["torch_compile_mode and torch_compile_backend need torch_compile: true, which is planned otherwise"]
    dealt, accumulation = args.accelerator_config, args.accelerator_config.gradient_accumulation_kwargs or {}
    return [
        f"accelerator_config: {name} changes how many sequences a step holds, behind the plan; use {instead}"
        for name, value, instead in (
            ("split_batches", dealt.split_batches, "global_batch_size"),
            ("dispatch_batches", dealt.dispatch_batches, "streaming where the data is larger than the disk"),
            ("num_steps", accumulation.get("num_steps"), "gradient_accumulation_steps"),
        )
        if value
    ]


def check_weights(options: TrainConfig, facts: ModelFacts, *, local: bool) -> list[str]:
    """Compares the weights of model and adapter with the model's config.

    Args:
        local: those that lie in a folder, else those of the hub, which are downloaded for it.
    """
    problems = []
    if Path(options.model).exists() == local:
        problems += weight_problems(options.model, facts, revision=options.revision)
    if options.adapter and Path(options.adapter).exists() == local:
        problems += adapter_problems(options.adapter, facts.config, trust_remote_code=options.trust_remote_code)
    return problems
