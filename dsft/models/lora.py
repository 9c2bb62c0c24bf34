"""LoRA adapters over a model, through peft."""

from collections.abc import Iterable

import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

ALL_LINEAR = "all-linear"


def add_lora(model: PreTrainedModel, config, *, adapter: str | None = None) -> PeftModel:
    """`model` with trainable adapters as `config` (a `TrainConfig`) says, or with those of the folder `adapter`."""
    if adapter:
        return PeftModel.from_pretrained(model, adapter, is_trainable=True)
    return get_peft_model(model, lora_config(config))


def saved_lora_config(adapter: str) -> PeftConfig:
    """The shape of a saved adapter, to be trained on."""
    config = PeftConfig.from_pretrained(adapter)
    config.inference_mode = False  # as saved, it would freeze the adapter
    return config


def lora_config(config) -> LoraConfig:
    """peft's configuration from the lora_* options."""
    targets = config.lora_target_modules
    return LoraConfig(
        task_type="CAUSAL_LM",
        r=config.lora_r,
        lora_alpha=config.lora_alpha,
        lora_dropout=config.lora_dropout,
        target_modules=ALL_LINEAR if targets == [ALL_LINEAR] else targets,
        modules_to_save=config.lora_modules_to_save or None,
        use_dora=config.use_dora,
        use_rslora=config.use_rslora,
    )


def check_lora_targets(model: PreTrainedModel, config, problems: list[str]) -> None:
    """Every named target must match a layer of `model` that LoRA can adapt, and every module to save a module; meta
    device is enough.
    """
    adaptable = (torch.nn.Linear, Conv1D, torch.nn.Embedding)
    named = dict(model.named_modules())
    leaves = [name for name, module in named.items() if isinstance(module, adaptable)]
    linear = sorted({name.rsplit(".", 1)[-1] for name in leaves if not isinstance(named[name], torch.nn.Embedding)})

    def missing(targets: list[str], names: Iterable[str]) -> list[str]:
        return [t for t in targets if not any(name == t or name.endswith(f".{t}") for name in names)]

    targets = [] if config.lora_target_modules == [ALL_LINEAR] else config.lora_target_modules
    for target in missing(targets, leaves):
        problems.append(
            f"lora_target_modules: {target!r} matches no layer of {config.model} that can be adapted; its linear layers"
            f" are {', '.join(linear)}"
        )
    for target in missing(config.lora_modules_to_save, named):
        problems.append(f"lora_modules_to_save: {target!r} matches no module of {config.model}")
