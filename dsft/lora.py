"""LoRA adapters over a model, through peft."""

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

ALL_LINEAR = "all-linear"


def add_lora(model: PreTrainedModel, config, *, adapter: str | None = None) -> PeftModel:
    """`model` with trainable adapters as `config` (a `TrainConfig`) says, or with those of the folder `adapter`."""
    if adapter:
        return PeftModel.from_pretrained(model, adapter, is_trainable=True)
    return get_peft_model(model, lora_config(config))


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
    """Every named target and module to save must exist in `model` (meta device is enough); problems list the candidates."""
    linear = {name.rsplit(".", 1)[-1] for name, module in model.named_modules() if isinstance(module, (torch.nn.Linear, Conv1D))}
    names = [name for name, _ in model.named_modules()]

    def missing(targets: list[str]) -> list[str]:
        return [t for t in targets if not any(name == t or name.endswith(f".{t}") for name in names)]

    targets = [] if config.lora_target_modules == [ALL_LINEAR] else config.lora_target_modules
    for target in missing(targets):
        problems.append(f"lora_target_modules: {target!r} matches no module of {config.model}; its linear layers are {', '.join(sorted(linear))}")
    for target in missing(config.lora_modules_to_save):
        problems.append(f"lora_modules_to_save: {target!r} matches no module of {config.model}")
