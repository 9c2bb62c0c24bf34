"""Builds the model, with adapters or a quantised base where asked.

Under ZeRO-3 the DeepSpeed configuration must be registered (by `TrainingArguments` or `HfDeepSpeedConfig`) before
`build_model`: only then are the weights sharded while they load, instead of filling every rank's memory.
"""

import contextlib
import io
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from peft import PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, PreTrainedModel, set_seed
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from dsft.errors import UserError, one_line, raise_if_any
from dsft.models.lora import add_lora, saved_lora_config
from dsft.models.model_folder import (
    MODEL_FILES,
    OPTIMIZER_FILES,
    adapter_base,
    has_only_shards,
    is_step_folder,
    located,
    step_folder,
)
from dsft.models.package import auto_class, freeze_unreached, from_config, save_as_on_disk
from dsft.models.pickles import check_weight_files, load_pickle, pickle_errors, safe_unpickling
from dsft.models.quantization import Quantization, cast_weights, compute_in_own_dtype, quantization_of, unpacking_config
from dsft.models.size import load_model_config
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


def is_bare_config(model: str) -> bool:
    """Tells whether `model` is the path of a config file, which means random weights."""
    return model.endswith(".json") and Path(model).is_file()


def described_in(model: str) -> str:
    """Returns where config and tokenizer of `model` lie.

    Beside a config file or a DeepSpeed `global_step` folder, else in itself.
    """
    return str(Path(model).parent) if is_bare_config(model) or is_step_folder(model) else model


def build_model(config, *, dtype: str, seed: int = 42, quantization: Quantization | None = None) -> PreTrainedModel:
    """Builds the causal language model of `config`, with trainable adapters where the method has them.

    Args:
        dtype: of the weights: "float32", "bfloat16", "float16" or "auto".
        seed: of the random weights where the model is a config.json alone, and of new adapters.
        quantization: of a model that is scored; it is put together on this rank's device.
    """
    with safe_unpickling(trust=config.trust_checkpoint):
        return _build(config, DTYPES[resolve_dtype(dtype)], seed=seed, quantization=quantization)


def _build(config, dtype: torch.dtype, *, seed: int, quantization: Quantization | None) -> PreTrainedModel:
    options = {"dtype": dtype, "trust_remote_code": config.trust_remote_code}
    if config.attn_implementation:
        options["attn_implementation"] = config.attn_implementation
    method = getattr(config, "method", "full")
    set_seed(seed)
    # Straight to the GPU, without a copy in host memory; under ZeRO-3 weights are sharded on the way.
    place = distributed.device() if has_gpu() and not is_deepspeed_zero3_enabled() else None
    if is_bare_config(config.model):
        with place or contextlib.nullcontext():
            model = from_config(load_model_config(config.model, trust_remote_code=config.trust_remote_code), **options)
    else:
        if place:
            options["device_map"] = {"": place}
        unpacking = None
        if method == "lora" or (quantization and quantization.is_unpacked):
            known = {"revision": config.revision, "trust_remote_code": config.trust_remote_code}
            base = adapter_base(described_in(config.model)) or config.model
            unpacking = unpacking_config(load_model_config(base, **known))
        if method == "qlora":
            options["quantization_config"] = quantization_of(config).load_config(dtype)
        elif quantization:
            options["device_map"] = {"": distributed.device()}
            if load_config := unpacking or quantization.load_config(dtype):
                options["quantization_config"] = load_config
        elif unpacking:
            options["quantization_config"] = unpacking
        model = load_weights(config.model, revision=config.revision, **options)
        if (unpacking or quantization) and not getattr(model, "is_quantized", False):
            cast_weights(model, dtype)
        compute_in_own_dtype(model)
    if method == "qlora":
        from peft import prepare_model_for_kbit_training

        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    if method != "full":
        set_seed(seed)
        if config.adapter:
            check_weight_files(Path(config.adapter))
        model = add_lora(model, config, adapter=config.adapter)
    return model


def load_weights(name: str, **options) -> PreTrainedModel:
    """Loads the model of a hub id or folder; of an adapter folder, its base with the adapter over it (not merged).

    A checkpoint that holds only DeepSpeed's shards (of any ZeRO stage and number of ranks), or such a `global_step`
    folder, is read from these.

    Raises:
        UserError: where a weight would not be what it is on disk, on every rank.
    """
    folder = Path(name)
    if has_only_shards(name):
        raise_if_any(pickle_errors(sorted(step_folder(folder).glob("*.pt"))))
        return _load_zero_shards(folder, **options)
    check_weight_files(folder)
    base = adapter_base(name)
    if base:
        return PeftModel.from_pretrained(load_weights(base, **options), name)
    # Adapters remember this name: absolute, it stays right when they are loaded from another working folder.
    return _load_files(str(folder.resolve()) if folder.is_dir() else name, **options)


def _load_files(name: str, **options) -> PreTrainedModel:
    place, gguf = located(name)
    known = {key: options.get(key) for key in ("revision", "trust_remote_code")}
    config = load_model_config(name, **known)
    auto = AutoModelForCausalLM if gguf else auto_class(config)
    try:
        # Mismatched tensors stand in the report, as the missing ones do.
        with quiet_report(bar=True), patches.replaced("full_fans", _of_full_shape):
            model, info = auto.from_pretrained(
                place, output_loading_info=True, ignore_mismatched_sizes=True, **options, **gguf
            )
    except RuntimeError as error:
        if "Error(s) in loading state_dict" not in str(error):
            raise
        problems = [f"model={name}: {one_line(error)}"]  # under ZeRO-3 rank 0 alone sees shapes
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
    """A function that counts inputs and outputs of a weight by its full shape, which ZeRO-3 keeps as `ds_shape`."""
    return lambda tensor: fans(torch.empty(getattr(tensor, "ds_shape", tensor.shape), device="meta"))


def _load_zero_shards(folder: Path, **options) -> PreTrainedModel:
    """Loads the weights that DeepSpeed saved: whole under ZeRO 0, else gathered from its shards."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    checkpoint, saved = folder.parent if is_step_folder(str(folder)) else folder, step_folder(folder)
    if any(saved.glob(OPTIMIZER_FILES)):
        with contextlib.redirect_stdout(io.StringIO()):  # it prints a dozen lines on every rank
            state = get_fp32_state_dict_from_zero_checkpoint(str(checkpoint), tag=saved.name)
    else:  # ZeRO 0 keeps the weights whole
        state = load_pickle(next(saved.glob(MODEL_FILES)))["module"]
    base = adapter_base(str(checkpoint))
    if base is None:
        config = load_model_config(str(checkpoint), trust_remote_code=options.get("trust_remote_code", False))
        if options["dtype"] == "auto":
            options["dtype"] = config.dtype or torch.float32
        model = from_config(
            config, **{name: value for name, value in options.items() if name not in ("revision", "device_map")}
        )
        wanted = dict(model.named_parameters()) | {
            name: buffer for name, buffer in model.named_buffers() if name in state
        }
    else:
        model = get_peft_model(load_weights(base, **options), saved_lora_config(str(checkpoint)))
        wanted = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    missing = sorted(wanted.keys() - state.keys())
    if missing:
        raise UserError(
            f"model={folder}: {plural(len(missing), 'weight')} of the model missing, the first is {missing[0]}"
        )
    with torch.no_grad():
        for name, tensor in wanted.items():
            with gathered([tensor]):
                tensor.copy_(state[name])
    return model


@contextlib.contextmanager
def gathered(parameters: list[torch.Tensor]) -> Iterator[None]:
    """Gathers parameters to their full size on every rank; a no-op without ZeRO-3.

    Afterwards they are sharded again, with what rank 0 made of them.
    """
    if not is_deepspeed_zero3_enabled():
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(parameters, modifier_rank=0):
        yield
