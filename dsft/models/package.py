"""Decides how a model package is loaded for text: by which class, without which of its weights, with which frozen.

A package may hold more than a language model: towers for images and sound (`vision_config` beside `text_config`),
layers that predict several tokens (`mtp.*`). transformers' causal-LM mapping has three kinds of classes for it:

    Qwen3_5Config -> Qwen3_5ForCausalLM               the language model alone; towers stay on disk
    Gemma3Config  -> Gemma3ForConditionalGeneration   all of it
    LlavaConfig   -> none; AutoModelForImageTextToText loads all of it
"""

from collections.abc import Iterable

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.core_model_loading import PrefixChange, revert_weight_conversion

from dsft.errors import UserError
from dsft.runtime import patches

AUTO_CLASSES = (
    (AutoModelForCausalLM, MODEL_FOR_CAUSAL_LM_MAPPING),
    (AutoModelForImageTextToText, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING),
    (AutoModelForMultimodalLM, MODEL_FOR_MULTIMODAL_LM_MAPPING),
)
"""In the order in which they are tried."""
NOT_LOADED_BY_TEXT_CLASS = ("emu3",)
"""Packages whose language model gets random weights from the text class: it finds none of their names."""
UNREACHED = {
    "git": ("git.image_encoder.", "git.visual_projection."),
    "phi4_multimodal": ("model.embed_tokens_extend.",),
}
"""Parts for images inside a decoder, by model_type: no text token passes through them."""
WITHOUT_GRADIENT = ("MllamaCrossAttentionDecoderLayer", "Indexer")
"""Classes of modules that are skipped where there is no image, or choose keys outside of the graph (DeepSeek-V3.2)."""


def auto_class(config: PreTrainedConfig) -> type:
    """Returns the auto class of transformers that loads a package of `config` for text.
    Raises UserError where there is none, with the reason and without the model's name.
    """
    remote, why = getattr(config, "auto_map", None) or {}, "no causal language model, which dsft trains"
    for auto, mapping in AUTO_CLASSES:
        if auto is AutoModelForCausalLM and config.model_type in NOT_LOADED_BY_TEXT_CLASS:
            continue
        if auto.__name__ in remote or type(config) in mapping:
            encodes_first = (  # an encoder reads the input, and a decoder writes something else
                getattr(config, "is_encoder_decoder", False)
                or getattr(config.get_text_config(), "is_encoder_decoder", False)
                or {"encoder", "decoder"} <= config.sub_configs.keys()
            )
            if auto is AutoModelForCausalLM or not encodes_first:
                return auto
            why = f"an encoder with a decoder, {why}"
            break
    raise UserError(f"its architecture {config.model_type} is {why}")


def whole_class(config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    """Returns the class that loads all of a package; None where there is no other than `auto_class`'s."""
    return next((mapping[type(config)] for _, mapping in AUTO_CLASSES[1:] if type(config) in mapping), None)


def from_config(
    config: PreTrainedConfig, *, trust_remote_code: bool = False, attn_implementation: str | None = None, **options
) -> PreTrainedModel:
    """Builds the model of a package with random weights, what text cannot reach frozen.
    Raises UserError as `auto_class`, and where its class cannot answer with text.
    """
    options |= {"attn_implementation": attn_implementation} if attn_implementation else {}
    return freeze_unreached(auto_class(config).from_config(config, trust_remote_code=trust_remote_code, **options))


def freeze_unreached(model: PreTrainedModel) -> PreTrainedModel:
    """Freezes what no gradient of a text loss reaches: towers, their projectors, Mllama's cross attention, indexers.
    Left trainable they would get optimizer states and decay (`weight_decay`) without ever a gradient.
    """
    beginnings = unreached(model)
    for name, parameter in model.named_parameters():
        if name.startswith(beginnings):
            parameter.requires_grad_(False)
    return model


def unreached(model: PreTrainedModel) -> tuple[str, ...]:
    """Returns the beginnings of the names of parameters that no text token passes through.
    Raises UserError where no language model with a head is found in the package.
    """
    config = model.config
    text = config.get_text_config(decoder=True)
    crossing = UNREACHED.get(config.model_type, ()) + tuple(
        f"{name}." for name, module in model.named_modules() if type(module).__name__.endswith(WITHOUT_GRADIENT)
    )
    if text is config:
        return crossing
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    if head is None or decoder is model:
        raise UserError(f"its architecture {config.model_type} has no language model with a head, which dsft trains")
    reached = {id(p) for part in (decoder, model.get_input_embeddings(), head) for p in part.parameters()}
    outermost: list[str] = []  # the largest parts none of whose parameters are reached
    for name, module in model.named_modules(remove_duplicate=False):
        if f"{name}.".startswith(tuple(part for part in outermost if part.endswith("."))):
            continue
        prefix, parameters = f"{name}." if name else "", {id(parameter) for parameter in module.parameters()}
        if parameters and not parameters & reached:
            outermost.append(prefix)
        elif parameters - reached:
            direct = module.named_parameters(recurse=False)
            outermost += [f"{prefix}{key}" for key, parameter in direct if id(parameter) not in reached]
    return crossing + tuple(outermost)


def names_saved(model: PreTrainedModel) -> set[str]:
    """Returns the names under which `save_pretrained` writes a model's tensors, tied ones under each name."""
    state = {
        name: torch.empty(getattr(tensor, "ds_shape", tensor.shape), dtype=tensor.dtype, device="meta")
        for name, tensor in model.state_dict(keep_vars=True).items()
    }
    return set(revert_weight_conversion(model, state))


def save_as_on_disk(model: PreTrainedModel, names: Iterable[str]) -> None:
    """Lets a model that was loaded from tensors `names` be saved under the names that they have there.

    transformers strips the wrapper's prefix while it loads Llama 4's and Mllama's language model
    (`language_model.model.layers...`), and does not put it back.
    """
    prefix, names = model.base_model_prefix, set(names)
    if not prefix or not names:
        return
    saved = names_saved(model)
    others = {name for name in saved if f"{prefix}.{name}" not in names}
    if not saved & names and others <= set(getattr(model, "all_tied_weights_keys", None) or ()):
        removal = PrefixChange(prefix_to_remove=prefix)
        patches.replace("prefix_on_disk", lambda conversions: [removal, *(conversions or [])], on=model)
