"""Which class of transformers loads a model package, and which of its weights are frozen.

A package may contain more than a language model: towers for images and sound (`vision_config` beside `text_config`).
It is loaded whole, by the class for images and text, and its towers are frozen: what is saved is complete, and adapters
have the names that other trainers and servers use. Layers that predict several tokens (`mtp.*`) are not loaded.
"""

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

from dsft.errors import UserError

AUTO_CLASSES = (
    (AutoModelForImageTextToText, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING),
    (AutoModelForMultimodalLM, MODEL_FOR_MULTIMODAL_LM_MAPPING),
    (AutoModelForCausalLM, MODEL_FOR_CAUSAL_LM_MAPPING),
)
"""In the order in which they are tried."""
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
    remote = getattr(config, "auto_map", None) or {}
    why = "no causal language model, which dsft trains"
    for auto, mapping in AUTO_CLASSES:
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


def tied_weights(config: PreTrainedConfig) -> dict[str, str]:
    """Returns which weights the class of a package ties: name of the head -> name of the embedding, in memory."""
    for _, mapping in AUTO_CLASSES:
        if type(config) in mapping:
            keys = getattr(mapping[type(config)], "_tied_weights_keys", None)
            return keys if isinstance(keys, dict) else {}
    return {}


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
    decoder = model.get_decoder()
    head = model.get_output_embeddings()
    if head is None or decoder is model:
        raise UserError(f"its architecture {config.model_type} has no language model with a head, which dsft trains")
    reached = {id(p) for part in (decoder, model.get_input_embeddings(), head) for p in part.parameters()}
    outermost: list[str] = []  # the largest parts none of whose parameters are reached
    for name, module in model.named_modules(remove_duplicate=False):
        if f"{name}.".startswith(tuple(part for part in outermost if part.endswith("."))):
            continue
        prefix = f"{name}." if name else ""
        parameters = {id(parameter) for parameter in module.parameters()}
        if parameters and not parameters & reached:
            outermost.append(prefix)
        elif parameters - reached:
            direct = module.named_parameters(recurse=False)
            outermost += [f"{prefix}{key}" for key, parameter in direct if id(parameter) not in reached]
    return crossing + tuple(outermost)
