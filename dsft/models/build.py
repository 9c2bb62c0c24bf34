"""Builds the model, with adapters or a quantised base where asked. Under ZeRO-3 the DeepSpeed configuration must be
registered before (by `TrainingArguments` or `HfDeepSpeedConfig`): only then are weights sharded while they load.
"""

import contextlib
import io
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, get_peft_model
from peft.utils.integrations import gather_params_ctx
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel, set_seed
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from dsft.config.options import TrainConfig
from dsft.errors import UserError, one_line, raise_if_any
from dsft.models.model_folder import (
    MODEL_FILES,
    OPTIMIZER_FILES,
    adapter_base,
    described_in,
    has_only_shards,
    is_bare_config,
    is_step_folder,
    located,
    step_folder,
)
from dsft.models.package import auto_class, freeze_unreached, from_config, save_as_on_disk
from dsft.models.pickles import check_weight_files, load_pickle, pickle_errors, safe_unpickling
from dsft.models.quantization import Quantization, cast_weights, quantization_of, unpacking_config
from dsft.models.size import load_model_config, set_router_loss
from dsft.models.trained import (
    add_lora,
    gathered_rows,
    grow_embeddings,
    grow_for,
    saved_lora_config,
    select_trained,
    unwrapped,
)
from dsft.models.weights import files_of_tensors, loading_problems, quiet_report
from dsft.runtime import distributed, patches
from dsft.runtime.hardware import has_gpu
from dsft.units import plural

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_dtype(dtype: str) -> str:
    """Resolves "auto" to bfloat16 on a GPU that computes in it, and to float32 elsewhere."""
    if dtype != "auto":
        return dtype
    return "bfloat16" if has_gpu() and torch.cuda.is_bf16_supported(including_emulation=False) else "float32"


def build_model(
    config, *, dtype: str, seed: int = 42, quantization: Quantization | None = None, new_tokens: Sequence[int] = ()
) -> PreTrainedModel:
    """Builds the causal language model of `config`, with trainable adapters where the method has them.

    Args:
        dtype: of the weights: "float32", "bfloat16", "float16" or "auto".
        seed: of the random weights where the model is a config.json alone, and of new adapters.
        quantization: of a model that is scored; it is put together on this rank's device.
        new_tokens: that the model gets rows for.
    """
    compute_dtype, method = DTYPES[resolve_dtype(dtype)], getattr(config, "method", "full")
    known = {"revision": config.revision, "trust_remote_code": config.trust_remote_code}
    options = {"dtype": compute_dtype, "trust_remote_code": config.trust_remote_code}
    if config.attn_implementation:
        options["attn_implementation"] = config.attn_implementation
    # Straight to the GPU, without a copy in host memory; under ZeRO-3 weights are sharded on the way.
    place = distributed.device() if has_gpu() and not is_deepspeed_zero3_enabled() else None
    set_seed(seed)
    with safe_unpickling(trust=config.trust_checkpoint):
        if is_bare_config(config.model):
            with place or contextlib.nullcontext():
                model = from_config(load_model_config(config.model, **known), **options)
        else:
            load_config = None
            if method == "qlora":
                load_config = quantization_of(method, config.quantization).load_config(compute_dtype)
            elif method == "lora" or (quantization and quantization.is_unpacked):
                base = adapter_base(described_in(config.model)) or config.model
                load_config = unpacking_config(load_model_config(base, **known))
            if quantization and not load_config:
                load_config = quantization.load_config(compute_dtype)
            if load_config:
                options["quantization_config"] = load_config
            if place or quantization:
                options["device_map"] = {"": distributed.device()}
            model = load_weights(config.model, revision=config.revision, **options)
            is_unpacked = (load_config or quantization) and not getattr(model, "is_quantized", False)
            if is_unpacked and method != "qlora":
                cast_weights(model, compute_dtype)
            # On CPUs with AVX512-BF16 bitsandbytes packs its 4-bit layers again at the first product in evaluation:
            # that computes in bf16 whatever the dtype, fails for some widths, and has no gradients (bitsandbytes 0.50,
            # nn/modules.py, Linear4bit.forward). So it unpacks them for each product, as on any other device.
            for module in model.modules():
                if hasattr(module, "support_avx512bf16_for_cpu"):
                    module.support_avx512bf16_for_cpu = False
        if method == "qlora":
            from peft import prepare_model_for_kbit_training

            model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
        rows = grow_embeddings(model, new_tokens)
        if method != "full":
            set_seed(seed)
            if config.adapter:
                check_weight_files(Path(config.adapter))
                grow_for(model, saved_lora_config(config.adapter))
            model = add_lora(model, config, adapter=config.adapter, rows=rows)
    if isinstance(config, TrainConfig):
        raise_if_any(select_trained(model, config.trainable, config.frozen))
    if (coefficient := getattr(config, "router_aux_loss", None)) is not None:
        inner = unwrapped(model)
        set_router_loss(inner.config, coefficient)
        inner.router_aux_loss_coef = coefficient  # its constructor has taken it from the config as it was
    for name, module in model.named_modules():
        # Every rank takes part in what ranks do with each expert, whichever its tokens reach. Experts in fused
        # parameters are all reached anyhow.
        if name.endswith("experts") and isinstance(module, nn.ModuleList):
            block = model.get_submodule(name.rpartition(".")[0])
            if is_deepspeed_zero3_enabled():
                from deepspeed.utils import set_z3_leaf_module

                set_z3_leaf_module(block, True)  # gathered together, else others would wait for this rank for ever
            elif distributed.world_size() > 1:
                block.register_forward_pre_hook(partial(_add_zeros, module))
    return model


def _add_zeros(experts: nn.ModuleList, _: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Adds a zero of each expert to a block's inputs. ZeRO 1 and 2 add up gradients in the order in which they come:
    those of an expert that only some ranks reach would be added to another's. Made before the block, the zeros are the
    last that is differentiated.
    """
    if not args or not torch.is_grad_enabled():
        return None
    firsts = [weight.flatten()[0] for weight in experts.parameters() if weight.requires_grad]
    return (args[0] + 0 * torch.stack(firsts).sum().to(args[0].dtype), *args[1:]) if firsts else None


def load_weights(name: str, **options) -> PreTrainedModel:
    """Loads the model of a hub id or folder; of an adapter folder, its base with the adapter over it (not merged); of a
    checkpoint that holds only DeepSpeed's shards (of any ZeRO stage and number of ranks), from these.
    Raises UserError where a weight would not be what it is on disk, on every rank.
    """
    folder = Path(name)
    if has_only_shards(name):
        return _load_zero_shards(folder, **options)
    check_weight_files(folder)
    if base := adapter_base(name):
        model = load_weights(base, **options)
        grow_for(model, saved_lora_config(name))
        with patches.replaced("token_rows", lambda _: gathered_rows):
            return PeftModel.from_pretrained(model, name)
    # Adapters remember this name: absolute, it stays right when they are loaded from another working folder.
    name = str(folder.resolve()) if folder.is_dir() else name
    place, gguf = located(name)
    config = load_model_config(name, **{key: options.get(key) for key in ("revision", "trust_remote_code")})
    auto = AutoModelForCausalLM if gguf else auto_class(config)
    try:
        # Mismatched tensors stand in the report, as the missing ones do.
        with quiet_report(bar=True), patches.replaced("full_fans", _of_full_shape):
            model, info = auto.from_pretrained(
                place, output_loading_info=True, ignore_mismatched_sizes=True, **options, **gguf
            )
    except RuntimeError as error:
        if "automatic conversion of the weights" in str(error):  # which names none of them
            problems = [f"model={name}: experts are missing, or of other shapes than the rest; get its files again"]
        elif "Error(s) in loading state_dict" in str(error):
            problems = [f"model={name}: {one_line(error)}"]  # under ZeRO-3 rank 0 alone sees shapes
        else:
            raise
    else:
        if getattr(model.config, "quantization_config", None) or type(model.config) is not type(config):
            # Scales and the like, which belong to the quantised weights; towers, which weight_problems() knows.
            info["unexpected_keys"] = set()
        problems = loading_problems(name, info)
    distributed.raise_together(problems)
    if getattr(model, "_weight_conversions", None):
        patches.replace("used_conversions", lambda conversions: [c for c in conversions if c.was_used()], on=model)
    if type(model.config) is not type(config):
        save_as_on_disk(model, files_of_tensors(name, options.get("revision")))
    return freeze_unreached(model)


def _of_full_shape(fans: Callable[[torch.Tensor], tuple[int, int]]) -> Callable[[torch.Tensor], tuple[int, int]]:
    """Counts inputs and outputs of a weight by its full shape, which ZeRO-3 keeps as `ds_shape`."""
    return lambda tensor: fans(torch.empty(getattr(tensor, "ds_shape", tensor.shape), device="meta"))


def _load_zero_shards(folder: Path, **options) -> PreTrainedModel:
    """Loads the weights that DeepSpeed saved: whole under ZeRO 0, else gathered from its shards."""
    checkpoint, saved = folder.parent if is_step_folder(str(folder)) else folder, step_folder(folder)
    raise_if_any(pickle_errors(sorted(saved.glob("*.pt"))))
    if any(saved.glob(OPTIMIZER_FILES)):
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        with contextlib.redirect_stdout(io.StringIO()):  # it prints a dozen lines on every rank
            state = get_fp32_state_dict_from_zero_checkpoint(str(checkpoint), tag=saved.name)
    else:  # ZeRO 0 keeps the weights whole
        state = load_pickle(next(saved.glob(MODEL_FILES)))["module"]
    if base := adapter_base(str(checkpoint)):
        adapters, model = saved_lora_config(str(checkpoint)), load_weights(base, **options)
        grow_for(model, adapters)
        with patches.replaced("token_rows", lambda _: gathered_rows):
            model = get_peft_model(model, adapters)
        wanted = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    else:
        config = load_model_config(str(checkpoint), trust_remote_code=options.get("trust_remote_code", False))
        if options["dtype"] == "auto":
            options["dtype"] = config.dtype or torch.float32
        options = {key: value for key, value in options.items() if key not in ("revision", "device_map")}
        model = from_config(config, **options)
        saved_buffers = {name: buffer for name, buffer in model.named_buffers() if name in state}
        wanted = dict(model.named_parameters()) | saved_buffers
    if missing := sorted(wanted.keys() - state.keys()):
        raise UserError(
            f"model={folder}: {plural(len(missing), 'weight')} of the model missing, the first is {missing[0]}"
        )
    with torch.no_grad():
        for name, tensor in wanted.items():
            # One weight at a time is whole on every rank; afterwards it is sharded again as rank 0 has filled it.
            with gather_params_ctx([tensor]):
                tensor.copy_(state[name])
    return model
