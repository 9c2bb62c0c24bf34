"""Counts a model's parameters and the widths that memory formulas need, without weights (meta device)."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import PeftModel, get_peft_model
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from dsft.errors import one_line
from dsft.models.lora import check_lora_targets, lora_config, saved_lora_config
from dsft.models.zero_shards import OPTIMIZER_FILES, step_folder

CONFIG_ERRORS = (OSError, ValueError, KeyError, ImportError, AttributeError, TypeError)
"""What transformers raises where a config cannot be found, read or built from."""


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """Exact counts from the architecture; nothing is estimated."""

    model_type: str
    """transformers' name of the (text) architecture: "llama", "gemma3_text" ..."""
    num_params: int
    """All parameters, tied weights once, adapters included."""
    num_trainable: int
    """Parameters that get gradients: all, or the adapters' and modules_to_save's."""
    embedding_params: int
    """Of the input embedding; a tied head is the same weight."""
    head_params: int
    """Of the output head where it is a weight of its own; 0 where it is tied."""
    expert_params: int
    """Of all routed experts together."""
    active_params: int
    """Parameters that one token is multiplied with: all but the embedding table (a tied head counts) and the experts it
    does not pass.
    """
    other_params: int
    """Of a multimodal wrapper's other parts, which are counted but not planned in detail."""
    unadapted_expert_params: int
    """With LoRA: parameters of fused experts that got no adapter."""
    largest_module_params: int
    """Parameters held directly by one module, the most that ZeRO-3 gathers at once in any case."""
    numels: tuple[tuple[int, int], ...]
    """(elements of a parameter, how many parameters have so many), adapters included."""
    trainable_numels: tuple[tuple[int, int], ...]
    num_layers: int
    hidden_size: int
    ffn_size: int
    """Width of the feed-forward layer that one token passes through (active experts together)."""
    kv_size: int
    """num_key_value_heads x head_dim."""
    num_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int | None
    """The longest sequence the model has positions for; None where there is no limit."""
    lora_r: int
    """Rank of the adapters; 0 in full finetuning."""
    quantized_bits: int
    """Bits per base weight with qlora; 0 otherwise."""


def empty_model(
    model_config: PreTrainedConfig, *, trust_remote_code: bool = False, attn_implementation: str | None = None
) -> PreTrainedModel:
    """The architecture with parameters on the meta device: names and shapes, no memory."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            model_config,
            trust_remote_code=trust_remote_code,
            **({"attn_implementation": attn_implementation} if attn_implementation else {}),
        )


def is_step_folder(model: str) -> bool:
    """Whether `model` is the folder of DeepSpeed's own shards inside a checkpoint."""
    return Path(model).is_dir() and Path(model).name.startswith("global_step")


def load_model_config(name: str, *, revision: str | None = None, trust_remote_code: bool = False) -> PreTrainedConfig:
    """Config of a hub id, a folder, the path of a config.json, or a `global_step` folder beside one.

    Raises:
        OSError, ValueError: as transformers does, where it is not found or of an unknown kind.
    """
    return AutoConfig.from_pretrained(
        str(Path(name).parent) if is_step_folder(name) else name, revision=revision, trust_remote_code=trust_remote_code
    )


def _unadapted_expert_params(adapted: PeftModel) -> int:
    """transformers holds a layer's experts in three-dimensional parameters of one module, which peft may or may not
    adapt.
    """
    names = dict(adapted.named_parameters())
    with_adapter = {name.partition(".lora_")[0].replace(".base_layer", "") for name in names if ".lora_" in name}
    experts = {name: p for name, p in names.items() if p.dim() == 3 and not p.requires_grad}
    return sum(
        p.numel()
        for name, p in experts.items()
        if name.rpartition(".")[0].replace(".base_layer", "") not in with_adapter
    )


def split_multimodal(
    model_config: PreTrainedConfig, *, trust_remote_code: bool = False
) -> tuple[PreTrainedConfig, int]:
    """(config of the text model, parameters of everything else) of a wrapper around vision or audio towers;
    (`model_config`, 0) of a language model.
    """
    text = model_config.get_text_config()
    if text is model_config or type(model_config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return model_config, 0
    with torch.device("meta"):
        whole, part = (AutoModel.from_config(one, trust_remote_code=trust_remote_code) for one in (model_config, text))
    return text, sum(p.numel() for p in whole.parameters()) - sum(p.numel() for p in part.parameters())


def measure_model(config, model_config: PreTrainedConfig | None = None, *, other_params: int = 0) -> ModelSize:
    """The size of `config.model` (a `TrainConfig`), with its adapters where the method has some.

    Args:
        model_config: in place of what `config.model` names.
        other_params: what is held beside the language model, trained where the method is full.
    """
    model_config = model_config or load_model_config(
        config.model, revision=config.revision, trust_remote_code=config.trust_remote_code
    )
    model = empty_model(model_config, trust_remote_code=config.trust_remote_code)
    text = model_config.get_text_config()
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings()
    tied = head is not None and head.weight is embedding
    experts = _expert_params(model)
    base_params = sum(p.numel() for p in model.parameters())
    active = base_params - (0 if tied else embedding.numel()) - int(experts * (1 - _active_share(text)))
    unadapted = 0
    largest = max(sum(p.numel() for p in module.parameters(recurse=False)) for module in model.modules())
    if config.method != "full":
        with torch.device("meta"):
            model = get_peft_model(model, saved_lora_config(config.adapter) if config.adapter else lora_config(config))
        unadapted = _unadapted_expert_params(model)
    heads = (
        getattr(text, "num_attention_heads", None) or getattr(text, "num_heads", None) or 1
    )  # state-space models have none
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    ffn = next(
        (
            getattr(text, key)
            for key in ("moe_intermediate_size", "intermediate_size", "n_inner")
            if getattr(text, key, None)
        ),
        4 * text.hidden_size,
    )
    if isinstance(ffn, (list, tuple)):  # one width for each layer
        ffn = max(ffn)
    return ModelSize(
        model_type=text.model_type,
        num_params=sum(p.numel() for p in model.parameters()) + other_params,
        num_trainable=sum(p.numel() for p in model.parameters() if p.requires_grad)
        + (other_params if config.method == "full" else 0),
        other_params=other_params,
        embedding_params=embedding.numel(),
        head_params=0 if tied or head is None else head.weight.numel(),
        expert_params=experts,
        active_params=active,
        unadapted_expert_params=unadapted,
        largest_module_params=largest,
        numels=_numels(model.parameters()),
        trainable_numels=_numels(p for p in model.parameters() if p.requires_grad),
        num_layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        ffn_size=ffn * (getattr(text, "num_experts_per_tok", None) or 1),
        kv_size=(getattr(text, "num_key_value_heads", None) or heads) * head_dim,
        num_heads=heads,
        head_dim=head_dim,
        vocab_size=text.vocab_size,
        max_positions=getattr(text, "max_position_embeddings", None),
        lora_r=0 if config.method == "full" else config.lora_r,
        quantized_bits=config.quantization_bits if config.method == "qlora" else 0,
    )


def _numels(parameters: Iterable[torch.nn.Parameter]) -> tuple[tuple[int, int], ...]:
    return tuple(sorted(Counter(p.numel() for p in parameters).items()))


def _expert_params(model: PreTrainedModel) -> int:
    """Routed experts: transformers holds a layer's in three-dimensional parameters of one module called `experts`, or
    in one module each of a list with that name.
    """
    return sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)


def _active_share(text: PreTrainedConfig) -> float:
    """Share of the routed experts that one token passes through."""
    number = next(
        (
            getattr(text, key)
            for key in ("num_local_experts", "num_experts", "n_routed_experts")
            if getattr(text, key, None)
        ),
        0,
    )
    chosen = next(
        (
            getattr(text, key)
            for key in ("num_experts_per_tok", "moe_topk", "top_k_experts")
            if getattr(text, key, None)
        ),
        number,
    )
    return chosen / number if number and isinstance(chosen, int) and isinstance(number, int) else 1.0


def check_model(
    config,
    problems: list[str],
    model_config: PreTrainedConfig | None = None,
    *,
    other_params: int = 0,
    needs_weights: bool = True,
) -> ModelSize | None:
    """The size of `config.model` (a `TrainConfig`), or problems: none found, no weights, LoRA targets that match
    nothing, too few positions.

    Args:
        model_config, other_params: as for `measure_model`.
        needs_weights: whether a folder must hold some.
    """
    try:
        model_config = model_config or load_model_config(
            config.model, revision=config.revision, trust_remote_code=config.trust_remote_code
        )
        model = empty_model(
            model_config, trust_remote_code=config.trust_remote_code, attn_implementation=config.attn_implementation
        )
    except CONFIG_ERRORS as error:
        only_shards = step_folder(config.model) is not None
        way_out = (
            "; DeepSpeed's shards lie there without a description: copy config.json and the tokenizer's files of the"
            " model they were trained from beside them"
            if only_shards
            else ""
        )
        problems.append(
            f"model={config.model}: no causal language model can be built from what is there"
            f" ({one_line(error)}){way_out}"
        )
        return None
    before = len(problems)
    folder = Path(config.model)
    if (
        needs_weights
        and folder.is_dir()
        and not any(
            path
            for pattern in ("*.safetensors", "*.bin", "global_step*", OPTIMIZER_FILES)
            for path in folder.glob(pattern)
        )
    ):
        problems.append(f"model={config.model}: holds a config but no weights; for random weights name its config.json")
    if config.method != "full" and not config.adapter:
        check_lora_targets(model, config, problems)
    positions = getattr(model_config.get_text_config(), "max_position_embeddings", None)
    if positions and config.seq_len > positions:
        problems.append(
            f"seq_len={config.seq_len} is beyond the {positions} positions of {config.model}; lower seq_len"
        )
    if len(problems) > before:
        return None
    try:
        return measure_model(config, model_config, other_params=other_params)
    except AttributeError as error:
        problems.append(f"model={config.model}: its architecture cannot be measured ({one_line(error)})")
        return None
    except (
        ValueError,
        OSError,
    ) as error:  # peft's: targets it cannot adapt, an adapter that is not there or of another model
        problems.append(
            f"{f'adapter={config.adapter}' if config.adapter else 'lora_target_modules'}: {one_line(error)}"
        )
        return None
