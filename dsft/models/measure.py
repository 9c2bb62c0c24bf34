"""Counts a model's parameters and the widths that memory formulas need, without weights (meta device). Contains the
configurations of usual models, so that they are planned without the hub.
"""

import contextlib
import copy
import dataclasses
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftConfig
from torch import nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.integrations import deepspeed
from transformers.modeling_layers import GradientCheckpointingLayer

from dsft.config.options import TrainConfig
from dsft.errors import UserError, one_line, raise_if_any
from dsft.models.adapters import (
    adapted_for_a_look,
    adapters_of,
    check_lora_options,
    grow_for,
    learning_rates,
    select_trained,
)
from dsft.models.model_folder import (
    ADAPTER_CONFIG,
    NO_GGUF,
    adapter_base,
    described_in,
    is_bare_config,
    is_gguf,
    located,
    misnamed,
)
from dsft.models.package import (
    FORMATS,
    GGUF,
    UNPACKABLE,
    Quantization,
    from_config,
    quantization_on_disk,
    tied_weights,
)
from dsft.models.weight_files import has_untied_head, weight_bytes_in

# config.json of each repository on the hub, from the fewest parameters to the most.
USUAL_MODELS = json.loads(Path(__file__).with_name("usual_models.json").read_text("utf-8"))


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """Exact counts from the architecture; nothing is estimated."""

    model_type: str  # transformers' name of the (text) architecture: "llama", "gemma3_text"
    num_params: int  # all parameters, tied weights once, adapters included
    num_trainable: int  # parameters that get gradients: those of `saved_params` that patterns select
    saved_params: int
    """Parameters that are saved as the model: all, or the adapters' and modules_to_save's, trained or not."""
    vocab_params: int  # of the input embedding and, if it is not tied, of the output head
    expert_params: int  # of all routed experts together, which no linear layer contains
    active_params: int
    """Parameters that one token is multiplied with: all except the embedding table (a tied head counts) and the experts
    it is not routed to.
    """
    active_expert_params: int  # of these, the parameters of routed experts
    looped_experts: int  # routed experts of all layers that a Python loop computes, without grouped products
    num_modules: int  # modules that directly contain parameters, adapters included: ZeRO-3 hooks each of them
    other_params: int
    """Of a multimodal package's other parts, which are loaded and frozen, and which text does not reach."""
    largest_gathered_params: int  # of the module that directly contains the most: ZeRO-3 gathers at least these at once
    numels: tuple[tuple[int, int], ...]  # (number of elements, number of parameters with so many), adapters included
    trainable_numels: tuple[tuple[int, int], ...]
    num_layers: int
    hidden_size: int
    ffn_size: int  # width of the feed-forward layer that one token passes (active experts together)
    kv_size: int  # num_key_value_heads x head_dim
    num_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int | None  # longest sequence that the model has positions for; None if there is no limit
    lora_r: int  # rank of the adapters (the option's, for a type without one); 0 in full finetuning
    quantization: Quantization | None
    """Format of an adapter's base (qlora's, or the one on disk) or of a scored model; None for plain weights."""

    @property
    def trained_share(self) -> float:
        """Share of the weights that need a second product in the backward, for their own gradients."""
        return 0.0 if self.lora_r else self.num_trainable / (self.num_params - self.other_params)

    @property
    def plain_expert_params(self) -> int:
        """Parameters of experts that stay in the model's dtype if only linear layers are quantised."""
        return self.expert_params if self.quantization and self.quantization.is_of_linear_layers else 0

    @property
    def plain_params(self) -> int:
        """Parameters that a quantised model keeps in its dtype, without norms."""
        return self.vocab_params + self.plain_expert_params

    @property
    def num_key_heads(self) -> int:
        return max(1, self.kv_size // self.head_dim)


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    config: PreTrainedConfig  # of the package, as it is on disk
    size: ModelSize
    attn_implementation: str  # that transformers uses: the requested one, else its default for this architecture
    adapters: PeftConfig | None  # new or saved; None in full finetuning
    architecture: type[PreTrainedModel]  # class that is loaded
    has_plain_head: bool  # a linear layer, also with the adapters


@contextlib.contextmanager
def without_zero_init() -> Iterator[None]:
    """Lets transformers build models inside a `with` on this rank alone, also under ZeRO-3: it would shard them by
    collectives, which the other ranks do not join.
    """
    reference = deepspeed._hf_deepspeed_config_weak_ref
    registered = reference() if reference else None
    deepspeed.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        if registered:
            deepspeed.set_hf_deepspeed_config(registered)


def empty_model(config: PreTrainedConfig, **options) -> PreTrainedModel:
    """Returns the architecture on the meta device: names and shapes, no memory. `options`: of `from_config`."""
    with without_zero_init(), torch.device("meta"):
        return from_config(config, **options)


def usual_config(name: str) -> PreTrainedConfig:
    return AutoConfig.for_model(**USUAL_MODELS[name])


def load_model_config(name: str, *, revision: str | None = None, trust_remote_code: bool = False) -> PreTrainedConfig:
    """Loads the config of a hub id, a folder, the path of a config.json, or a `global_step` folder beside one.
    Raises OSError or ValueError from transformers if it is not found or of an unknown kind.
    """
    # By its folder, in which transformers looks for code too. For random weights the file may have any name.
    file = {"_configuration_file": Path(name).name} if is_bare_config(name) else {}
    name, gguf = located(described_in(name))
    config = AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=trust_remote_code, **file, **gguf)
    claims_tied = not file and not gguf and getattr(config, "tie_word_embeddings", False)
    # transformers compares the tensors after loading, when they are empty shards under ZeRO-3.
    if claims_tied and has_untied_head(name, tied_weights(config), revision):
        config.tie_word_embeddings = False
        config.get_text_config().tie_word_embeddings = False
    return config


def measure_model(
    options: TrainConfig,
    *,
    scored: bool = False,
    adapter: str | None = None,
    config: PreTrainedConfig | None = None,
    new_tokens: Sequence[int] = (),
) -> ModelFacts:
    """Measures the model that `options` name, with the method's adapters if it has some, without its weights.
    Raises UserError if no model can be built from its files, it is an adapter, or its adapters do not fit it.

    Args:
        scored: not trained: it may be a GGUF file, and keeps the format that it has on disk.
        adapter: a saved one over this model that is scored: the model gets its rows, and the format of its training.
        new_tokens: tokens that need new rows, beside those of the adapter.
    """
    name = options.model
    method = options.method
    trusted = {"trust_remote_code": options.trust_remote_code}
    if is_gguf(name) and not scored:
        raise UserError(f"model={name}: {NO_GGUF}")
    if not scored and (base := adapter_base(name)):
        raise UserError(
            f"model={name}: is an adapter of {base}; to train it further name both: model={base}, adapter={name}. To"
            f" train weights that lie beside it, take {ADAPTER_CONFIG} out of the folder"
        )
    try:
        config = config or load_model_config(name, revision=options.revision, **trusted)
        set_router_loss(config, getattr(options, "router_aux_loss", None))
        model = empty_model(copy.deepcopy(config), attn_implementation=options.attn_implementation, **trusted)
    except UserError as error:
        raise UserError([f"model={name}: {problem}" for problem in error.problems]) from error
    except Exception as error:  # anything from transformers or the code of a repository
        problem = f"model={name}: no causal language model can be built with these options ({one_line(error)})"
        raise UserError(misnamed("model", name) or problem) from error
    if method != "full" and not options.adapter:
        raise_if_any(check_lora_options(model, options))
    try:
        if adapter:
            grow_for(model, adapter)
        adapters = adapters_of(options, model, new_tokens)
        on_disk = GGUF if is_gguf(name) else None
        if not on_disk and not is_bare_config(name):  # a config alone has random weights
            trained = not scored or adapter is not None or method != "full"
            on_disk = quantization_on_disk(config, disk_bytes=weight_bytes_in(name), trained=trained)
        size = model_size(model, options, adapters=adapters)
        if scored or on_disk:
            size = dataclasses.replace(size, quantization=on_disk)
        # QLoRA also trains over weights that bitsandbytes has quantised.
        may_train = method == "lora" or (method == "qlora" and on_disk and on_disk.is_of_linear_layers)
        if on_disk and not scored and not may_train:
            which = "which method=full cannot train" if method == "full" else "and method=qlora would do so again"
            raise UserError(
                f"model={name}: its weights are quantised ({on_disk.format}), {which}; use method lora, or the model"
                " that it was made from"
            )
    except UserError:
        raise  # it names its option
    except AttributeError as error:
        raise UserError(f"model={name}: its architecture cannot be measured ({one_line(error)})") from error
    except (ValueError, OSError, TypeError) as error:  # from peft: it cannot adapt this, or the adapter is missing
        named = "lora_options" if options.lora_options else "lora_target_modules"
        problem = None
        if options.adapter:
            named = f"adapter={options.adapter}"
            problem = misnamed("adapter", options.adapter)
        raise UserError([problem or f"{named}: {one_line(error)}"]) from error
    return ModelFacts(
        config=config,
        size=size,
        attn_implementation=model.config.get_text_config()._attn_implementation,
        adapters=adapters,
        architecture=type(model),
        has_plain_head=type(model.get_output_embeddings()) is nn.Linear,
    )


def set_router_loss(config: PreTrainedConfig, coefficient: float | None) -> None:
    """Sets the coefficient of a router's auxiliary loss, unless it is None; UserError if there is no such loss."""
    text = config.get_text_config()
    if coefficient is None:
        return
    if not hasattr(text, "router_aux_loss_coef") or not hasattr(text, "output_router_logits"):
        raise UserError(f"router_aux_loss: {text.model_type} has no auxiliary loss of a router; leave it out")
    text.router_aux_loss_coef = coefficient
    text.output_router_logits = coefficient > 0


def check_sharding(size: ModelSize, *, stage: int, model: str) -> list[str]:
    quantization = size.quantization
    if stage < 3 or not quantization or (size.lora_r and not quantization.lies_on_disk):
        return []
    way_out = ", or dsft export, which writes a folder of unpacked weights" if quantization.format in UNPACKABLE else ""
    return [
        f"model={model}: its weights are quantised ({quantization.format}), and transformers loads such a model whole"
        f" on every rank under ZeRO-3 (get_init_context); use zero 0 or auto{way_out}"
    ]


def check_positions(facts: ModelFacts, *, seq_len: int, model: str) -> list[str]:
    positions = facts.size.max_positions
    if not positions or seq_len <= positions:
        return []
    return [f"seq_len={seq_len} is beyond the {positions} positions of {model}; lower seq_len"]


def max_positions(text: PreTrainedConfig) -> int | None:
    """Returns the longest sequence that a text model of this config has positions for; None if there is no limit."""
    positions = _first(text, "max_position_embeddings", "max_seq_len", "max_sequence_length", "max_positions")
    if not isinstance(positions, int) or positions <= 0:  # XLNet has -1
        return None
    return positions


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Returns the decoder layers; if one contains another (Zamba), only the outer one."""
    has_towers = model.config.get_text_config() is not model.config
    decoder = model.get_decoder() if has_towers else model
    layers = []
    inner = set()
    for module in decoder.modules():  # an outer one comes first
        if isinstance(module, GradientCheckpointingLayer) and module not in inner:
            layers.append(module)
            inner.update(module.modules())
    return layers


def model_size(model: PreTrainedModel, options: TrainConfig, *, adapters: PeftConfig | None = None) -> ModelSize:
    """Counts the parameters of `model` (on the meta device) with the adapters, which are added to it."""
    text = model.config.get_text_config()
    embedding = model.get_input_embeddings().weight.numel()
    head = model.get_output_embeddings()
    own_head = 0 if head is None or head.weight is model.get_input_embeddings().weight else head.weight.numel()
    largest = 0
    expert_params = 0
    expert_layers = 0  # one module contains the experts of a layer
    for name, module in model.named_modules():
        numel = sum(parameter.numel() for parameter in module.parameters(recurse=False))
        largest = max(largest, numel)
        is_routed = "Expert" in type(module).__name__ and "shared" not in name
        if is_routed and all(parameter.requires_grad for parameter in module.parameters()):
            expert_params += numel
            expert_layers += 1
    num_experts = _first(text, "num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    chosen = _first(text, "num_experts_per_tok", "moe_topk", "top_k_experts") or num_experts
    active_experts = expert_params
    looped_experts = 0
    if isinstance(num_experts, int) and isinstance(chosen, int):
        active_experts = int(expert_params * (chosen / num_experts))
        if getattr(text, "_experts_implementation", None) == "eager":
            looped_experts = expert_layers * num_experts
    base_params = model.num_parameters(only_trainable=True)
    other_params = model.num_parameters() - base_params
    if adapters is not None:
        with torch.device("meta"):
            model = adapted_for_a_look(model, adapters)
    saved_params = model.num_parameters(only_trainable=adapters is not None)
    raise_if_any(select_trained(model, options.trainable, options.frozen, learning_rates(options)))
    numels = Counter(parameter.numel() for parameter in model.parameters())
    trainable_numels = Counter(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    num_modules = 0
    for module in model.modules():
        if any(True for _ in module.parameters(recurse=False)):
            num_modules += 1
    heads = _first(text, "num_attention_heads", "num_heads") or 1  # state-space models have none
    head_dim = _first(text, "head_dim") or text.hidden_size // heads
    ffn = _first(text, "moe_intermediate_size", "intermediate_size", "n_inner") or 4 * text.hidden_size
    if isinstance(ffn, (list, tuple)):  # one width for each layer
        ffn = max(ffn)
    lora_r = 0
    if adapters is not None:
        lora_r = adapters.r if isinstance(adapters, LoraConfig) else options.lora_r
    return ModelSize(
        model_type=text.model_type,
        num_params=model.num_parameters(),
        num_trainable=model.num_parameters(only_trainable=True),
        saved_params=saved_params,
        other_params=other_params,
        vocab_params=embedding + own_head,
        expert_params=expert_params,
        active_params=base_params - (embedding if own_head else 0) - expert_params + active_experts,
        active_expert_params=active_experts,
        looped_experts=looped_experts,
        num_modules=num_modules,
        largest_gathered_params=largest,
        numels=tuple(sorted(numels.items())),
        trainable_numels=tuple(sorted(trainable_numels.items())),
        vocab_size=text.vocab_size,
        max_positions=max_positions(text),
        lora_r=lora_r,
        quantization=FORMATS[options.quantization] if options.method == "qlora" else None,
        num_layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        ffn_size=ffn * (chosen if isinstance(chosen, int) else 1),
        kv_size=(_first(text, "num_key_value_heads") or heads) * head_dim,
        num_heads=heads,
        head_dim=head_dim,
    )


def _first(text: PreTrainedConfig, *names: str) -> Any:
    """Returns the value of the first of `names` that this config sets: names differ between families. If layers differ
    (Gemma 4's head_dim), the largest value.
    """
    for name in names:
        if text.is_heterogeneous and name in text.per_layer_attributes:
            values = [getattr(layer, name, None) for layer in text.per_layer_config]
            value = max(filter(None, values), default=None)
        else:
            value = getattr(text, name, None)
        if value:
            return value
    return None
