"""Counts a model's parameters and the widths that memory formulas need, without weights (meta device)."""

from dataclasses import dataclass

import torch
from peft import PeftModel, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from dsft.lora import lora_config, saved_lora_config


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """Exact counts from the architecture; nothing is estimated."""

    num_params: int
    """All parameters, tied weights once."""
    num_trainable: int
    """Parameters that get gradients: all, or the adapters' and modules_to_save's."""
    unadapted_expert_params: int
    """With LoRA: parameters of fused experts that got no adapter."""
    largest_module_params: int
    """Parameters held directly by one module, the most that ZeRO-3 gathers at once in any case."""
    num_layers: int
    hidden_size: int
    ffn_size: int
    """Width of the feed-forward layer that one token passes through (active experts together)."""
    kv_size: int
    """num_key_value_heads x head_dim."""
    num_heads: int
    vocab_size: int
    lora_r: int
    """Rank of the adapters; 0 in full finetuning."""
    quantized_bits: int
    """Bits per base weight with qlora; 0 otherwise."""


def empty_model(model_config: PreTrainedConfig, *, trust_remote_code: bool = False, attn_implementation: str | None = None) -> PreTrainedModel:
    """The architecture with parameters on the meta device: names and shapes, no memory."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(model_config, trust_remote_code=trust_remote_code, **({"attn_implementation": attn_implementation} if attn_implementation else {}))


def load_model_config(name: str, *, revision: str | None = None, trust_remote_code: bool = False) -> PreTrainedConfig:
    """Config of a hub id, a folder, or the path of a config.json.

    Raises:
        OSError, ValueError: as transformers does, where it is not found or of an unknown kind.
    """
    return AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=trust_remote_code)


def _unadapted_expert_params(adapted: PeftModel) -> int:
    """transformers holds a layer's experts in three-dimensional parameters of one module, which peft may or may not adapt."""
    names = dict(adapted.named_parameters())
    with_adapter = {name.partition(".lora_")[0].replace(".base_layer", "") for name in names if ".lora_" in name}
    experts = {name: p for name, p in names.items() if p.dim() == 3 and not p.requires_grad}
    return sum(p.numel() for name, p in experts.items() if name.rpartition(".")[0].replace(".base_layer", "") not in with_adapter)


def measure_model(config) -> ModelSize:
    """The size of `config.model` (a `TrainConfig`), with its adapters where the method has some."""
    model_config = load_model_config(config.model, revision=config.revision, trust_remote_code=config.trust_remote_code)
    model = empty_model(model_config, trust_remote_code=config.trust_remote_code)
    num_params = sum(p.numel() for p in model.parameters())
    trainable, unadapted = num_params, 0
    if config.method != "full":
        with torch.device("meta"):
            adapted = get_peft_model(model, saved_lora_config(config.adapter) if config.adapter else lora_config(config))
        trainable = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
        num_params = sum(p.numel() for p in adapted.parameters())
        unadapted = _unadapted_expert_params(adapted)
    largest = max(sum(p.numel() for p in module.parameters(recurse=False)) for module in model.modules())
    text = model_config.get_text_config()
    heads = text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    ffn = next((getattr(text, key) for key in ("moe_intermediate_size", "intermediate_size", "n_inner") if getattr(text, key, None)), 4 * text.hidden_size)
    return ModelSize(
        num_params=num_params,
        num_trainable=trainable,
        unadapted_expert_params=unadapted,
        largest_module_params=largest,
        num_layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        ffn_size=ffn * (getattr(text, "num_experts_per_tok", None) or 1),
        kv_size=(getattr(text, "num_key_value_heads", None) or heads) * head_dim,
        num_heads=heads,
        vocab_size=text.vocab_size,
        lora_r=0 if config.method == "full" else config.lora_r,
        quantized_bits=config.quantization_bits if config.method == "qlora" else 0,
    )
