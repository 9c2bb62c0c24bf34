"""LoRA adapters over a model, through peft."""

from collections.abc import Iterable

import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from dsft.config.options import LoraFields, TrainConfig

ALL_LINEAR = "all-linear"


def add_lora(model: PreTrainedModel, options: LoraFields, *, adapter: str | None = None) -> PeftModel:
    """Returns `model` with trainable adapters as the options say, or with those of the folder `adapter`.

    Adapters have the base's dtype, and DeepSpeed keeps fp32 masters of them. peft would make them fp32, and under
    ZeRO-3 DeepSpeed leaves them so: every product of an adapter is then in fp32, and its inputs are kept twice.
    """
    if adapter:
        return PeftModel.from_pretrained(model, adapter, is_trainable=True, autocast_adapter_dtype=False)
    return get_peft_model(model, lora_config(options, model), autocast_adapter_dtype=False)


def saved_lora_config(adapter: str) -> PeftConfig:
    """Reads the shape of a saved adapter, to be trained on."""
    config = PeftConfig.from_pretrained(adapter)
    config.inference_mode = False  # as saved, it would freeze the adapter
    return config


def lora_config(options: LoraFields, model: PreTrainedModel) -> LoraConfig:
    """Composes peft's configuration from the lora_* options for a model; the meta device is enough."""
    targets = options.lora_target_modules
    return LoraConfig(
        task_type="CAUSAL_LM",
        r=options.lora_r,
        lora_alpha=options.lora_alpha,
        lora_dropout=options.lora_dropout,
        target_modules=ALL_LINEAR if targets == [ALL_LINEAR] else targets,
        exclude_modules=_not_linear(model) or None,
        modules_to_save=options.lora_modules_to_save or None,
        use_dora=options.use_dora,
        use_rslora=options.use_rslora,
    )


def _not_linear(model: PreTrainedModel) -> list[str]:
    """Returns the names of linear layers of which an architecture made a class of its own, as Llama 4 of its router,
    which returns two tensors: peft would take them for the output of a linear layer.
    """
    return sorted(
        {
            ".".join(name.split(".")[-2:])
            for name, module in model.named_modules()
            if isinstance(module, torch.nn.Linear) and type(module).__module__ == type(model).__module__
        }
    )


def adapters_of(options: TrainConfig, model: PreTrainedModel) -> PeftConfig | None:
    """Returns the adapters that a training of `model` starts with: none, those of a saved adapter, or new ones."""
    if options.method == "full":
        return None
    return saved_lora_config(options.adapter) if options.adapter else lora_config(options, model)


def check_lora_targets(model: PreTrainedModel, options: TrainConfig) -> list[str]:
    """Lists targets that match no layer of `model` that LoRA can adapt, and modules to save that match no module.

    The meta device is enough.
    """
    adaptable = (torch.nn.Linear, Conv1D, torch.nn.Embedding)
    named = dict(model.named_modules())
    others = tuple(_not_linear(model))
    leaves = [name for name, module in named.items() if isinstance(module, adaptable) and not name.endswith(others)]
    linear = sorted({name.rsplit(".", 1)[-1] for name in leaves if not isinstance(named[name], torch.nn.Embedding)})

    def missing(targets: list[str], names: Iterable[str]) -> list[str]:
        return [t for t in targets if not any(name == t or name.endswith(f".{t}") for name in names)]

    targets = [] if options.lora_target_modules == [ALL_LINEAR] else options.lora_target_modules
    return [
        f"lora_target_modules: {target!r} matches no layer of {options.model} that can be adapted; its linear layers"
        f" are {', '.join(linear)}"
        for target in missing(targets, leaves)
    ] + [
        f"lora_modules_to_save: {target!r} matches no module of {options.model}"
        for target in missing(options.lora_modules_to_save, named)
    ]
