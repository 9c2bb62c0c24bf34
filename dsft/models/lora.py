"""LoRA adapters over a model, through peft; and which of the adapters that peft saves dsft can score and merge."""

import contextlib
import dataclasses
import re
from pathlib import Path

import torch
from peft import PEFT_TYPE_TO_CONFIG_MAPPING, LoraConfig, PeftConfig, PeftModel, PromptLearningConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.utils.hub import cached_file

from dsft.config.options import LoraFields, TrainConfig
from dsft.errors import UserError, one_line
from dsft.models.model_folder import ADAPTER_CONFIG, adapter_description
from dsft.models.package import unreached

ALL_LINEAR = "all-linear"
MERGEABLE = frozenset(
    (
        *("ADALORA", "BOFT", "C3A", "DEFT", "DELORA", "FOURIERFT", "GLORA", "GRALORA", "HIRA", "HRA", "IA3"),
        *("LN_TUNING", "LOHA", "LOKR", "LORA", "MISS", "OFT", "OSF", "PEANUT", "PSOFT", "PVERA", "RANDLORA", "ROAD"),
        *("SUPERTUNING", "TINYLORA", "TRAINABLE_TOKENS", "UNILORA", "VBLORA", "VERA", "WAVEFT"),
    )
)
"""Types whose merge by peft computes what base and adapter do (each in tests/checkpoints/test_export_adapters.py)."""
SCORABLE = MERGEABLE | {"BEFT", "LILY"}
"""Types that change modules inside the base, whose tensors can be compared with it before its weights are loaded."""
STREAMABLE_FIELDS = frozenset(
    (
        *("r", "lora_alpha", "lora_dropout", "target_modules", "exclude_modules", "modules_to_save", "rank_pattern"),
        *("alpha_pattern", "use_rslora", "use_dora", "fan_in_fan_out", "bias", "layers_to_transform"),
        *("layers_pattern", "init_lora_weights", "eva_config", "runtime_config", "qalora_group_size"),
    )
)
"""Fields of LoRA with which a weight's merge needs nothing but that weight and the adapter's own tensors."""
LORA_FIELDS = STREAMABLE_FIELDS | {"trainable_token_indices", "target_parameters", "lora_bias", "ensure_weight_tying"}
STREAMABLE_STARTS = (True, False, None, "gaussian", "orthogonal", "eva")
LORA_STARTS = (*STREAMABLE_STARTS, "mica", "pissa", "olora")
"""Of `init_lora_weights`: the last two change the base, and peft does so again each time it loads the adapter."""


def unwrapped(model: nn.Module) -> nn.Module:
    """Returns the model of transformers, without the wrapper that peft puts around it."""
    return model.get_base_model() if isinstance(model, PeftModel) else model


def add_lora(model: PreTrainedModel, options: LoraFields, *, adapter: str | None = None) -> PeftModel:
    """Returns `model` with trainable adapters by the options, or with those of the folder `adapter`.

    Adapters have the base's dtype, and DeepSpeed keeps fp32 masters of them. peft would make them fp32, and under
    ZeRO-3 DeepSpeed leaves them so: every product of an adapter is then in fp32, and its inputs are kept twice.
    """
    if adapter:
        return PeftModel.from_pretrained(model, adapter, is_trainable=True, autocast_adapter_dtype=False)
    return get_peft_model(model, lora_config(options, model), autocast_adapter_dtype=False)


def saved_lora_config(adapter: str) -> PeftConfig:
    """Reads the shape of a saved adapter of any type, to be trained on, scored or merged.

    Raises:
        UserError: where its type or a field of it is unknown, or dsft cannot compute with it.
        OSError, ValueError: where there is none.
    """
    folder = adapter if Path(adapter).exists() else str(Path(cached_file(adapter, ADAPTER_CONFIG)).parent)
    content = adapter_description(folder)
    if content is None:
        raise ValueError(f"it has no {ADAPTER_CONFIG}")
    file, kind = f"{adapter}/{ADAPTER_CONFIG}", content["peft_type"]
    if kind not in PEFT_TYPE_TO_CONFIG_MAPPING:
        raise UserError(f"{file}: peft_type {kind!r} is unknown to the installed peft; a newer one may know it")
    kind_class = PEFT_TYPE_TO_CONFIG_MAPPING[kind]
    if kind not in SCORABLE:
        adds_tokens = issubclass(kind_class, PromptLearningConfig)
        why = " adds tokens to the model's input" if adds_tokens else ", which dsft cannot compare with its base"
        raise UserError(f"{file}: an adapter of type {kind}{why}; it is not supported, use peft itself")
    known = {field.name for field in dataclasses.fields(kind_class)}
    # peft drops what it does not know; a number or a word may be a new default, a switch or a list is in use.
    if unknown := sorted(k for k, v in content.items() if k not in known and v and isinstance(v, bool | list | dict)):
        raise UserError(f"{file}: sets {', '.join(unknown)}, unknown to the installed peft; install a newer one")
    if content.get("task_type") not in (None, "CAUSAL_LM"):
        raise UserError(f"{file}: task_type {content['task_type']} is of no causal language model")
    start = content.get("init_lora_weights", True)
    if kind == "LORA" and start not in LORA_STARTS:
        raise UserError(
            f"{file}: init_lora_weights {start!r} changed the base at its start, which cannot be repeated from what"
            " was saved; save it with peft's path_initial_model_for_weight_conversion"
        )
    try:
        config = PeftConfig.from_pretrained(folder)
    except (TypeError, ValueError, AttributeError, ImportError) as error:
        raise UserError(f"{file}: cannot be read by peft ({one_line(error)})") from None
    if kind == "LORA" and (foreign := sorted(_set_fields(config) - LORA_FIELDS)):
        raise UserError(f"{file}: LoRA with {', '.join(foreign)} is not supported; load it with peft")
    config.inference_mode = False  # as saved, it would freeze the adapter
    return config


def merge_problems(adapted: PeftModel) -> list[str]:
    """Lists why the adapter of a model cannot be merged into its base; the meta device is enough."""
    config = adapted.peft_config["default"]
    if config.peft_type not in MERGEABLE:
        return [f"an adapter of type {config.peft_type.value} cannot be merged; evaluate or serve it over its base"]
    if getattr(config, "lora_bias", False) and any(
        layer.get_base_layer().bias is None for layer in adapted.modules() if isinstance(layer, LoraLayer)
    ):
        return ["lora_bias has a bias for layers without one, which cannot take it; evaluate or serve it over its base"]
    return []


def not_streamable(config: PeftConfig) -> str | None:
    """Explains why an adapter cannot be merged into one weight at a time; None where it can."""
    if config.peft_type != "LORA":
        return f"an adapter of type {config.peft_type.value} is merged by peft"
    if others := sorted(_set_fields(config) - STREAMABLE_FIELDS):
        return f"the adapter has {', '.join(others)}"
    if config.init_lora_weights not in STREAMABLE_STARTS:
        return f"the adapter changed the base at its start ({config.init_lora_weights})"
    return None


def _set_fields(config: LoraConfig) -> set[str]:
    """Returns the fields of LoRA itself that are not as peft has them by default."""
    default = LoraConfig()
    names = {field.name for field in dataclasses.fields(LoraConfig)} - {f.name for f in dataclasses.fields(PeftConfig)}
    return {name for name in names if getattr(config, name) and getattr(config, name) != getattr(default, name)}


def lora_config(options: LoraFields, model: PreTrainedModel) -> LoraConfig:
    """Composes peft's configuration from the lora_* options for a model; the meta device is enough."""
    targets = options.lora_target_modules
    # Left out: linear layers that are none, and towers that no text token passes through.
    names, towers = _not_linear(model), unreached(model)
    excluded: list[str] | str | None = names or None
    if towers:
        parts = [rf"(.*\.)?({'|'.join(map(re.escape, names))})"] if names else []
        excluded = "|".join(parts + [rf"{re.escape(beginning.removesuffix('.'))}(\..*)?" for beginning in towers])
    return LoraConfig(
        task_type="CAUSAL_LM",
        r=options.lora_r,
        lora_alpha=options.lora_alpha,
        lora_dropout=options.lora_dropout,
        target_modules=ALL_LINEAR if targets == [ALL_LINEAR] else targets,
        exclude_modules=excluded,
        modules_to_save=options.lora_modules_to_save or None,
        use_dora=options.use_dora,
        use_rslora=options.use_rslora,
    )


@torch.no_grad()
def _not_linear(model: PreTrainedModel) -> list[str]:
    """Returns the names of linear layers of which an architecture made a class that computes something else, as Llama 4
    of its router, which returns two tensors: peft would take them for the output of a linear layer.
    """
    kinds_by_name = {
        ".".join(name.split(".")[-2:]): type(module)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and type(module).__module__ == type(model).__module__
    }
    computes = {}
    for kind in set(kinds_by_name.values()):
        layer, inputs = nn.Linear(4, 3, device="cpu"), torch.ones(2, 4, device="cpu")
        expected, output = layer(inputs), None
        layer.__class__ = kind
        with contextlib.suppress(Exception):  # of what its own __init__ would have made
            output = layer(inputs)
        is_tensor = isinstance(output, torch.Tensor) and output.shape == expected.shape
        computes[kind] = is_tensor and torch.allclose(output, expected)
    return sorted(name for name, kind in kinds_by_name.items() if not computes[kind])


def adapters_of(options: TrainConfig, model: PreTrainedModel) -> PeftConfig | None:
    """Returns the adapters that a training of `model` starts with: none, those of a saved adapter, or new ones."""
    if options.method == "full":
        return None
    return saved_lora_config(options.adapter) if options.adapter else lora_config(options, model)


def check_lora_targets(model: PreTrainedModel, options: TrainConfig) -> list[str]:
    """Lists targets that match no layer of `model` (on the meta device) that LoRA can adapt, and modules to save that
    match no module.
    """
    named, others, towers = dict(model.named_modules()), tuple(_not_linear(model)), unreached(model)
    leaves = [
        name
        for name, module in named.items()
        if isinstance(module, nn.Linear | Conv1D | nn.Embedding)
        and not name.endswith(others)
        and not f"{name}.".startswith(towers)
    ]
    linear = sorted({name.rsplit(".", 1)[-1] for name in leaves if not isinstance(named[name], nn.Embedding)})
    targets = [] if options.lora_target_modules == [ALL_LINEAR] else options.lora_target_modules
    return [
        f"lora_target_modules: {target!r} matches no layer of {options.model} that can be adapted; its linear layers"
        f" are {', '.join(linear)}"
        for target in targets
        if not any(f".{name}".endswith(f".{target}") for name in leaves)
    ] + [
        f"lora_modules_to_save: {target!r} matches no module of {options.model}"
        for target in options.lora_modules_to_save
        if not any(f".{name}".endswith(f".{target}") for name in named)
    ]
