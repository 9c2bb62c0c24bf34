"""Selects the transformers class that loads a model package, its frozen weights, and its quantisation.

A package may contain more than a language model: towers for images and sound (`vision_config` beside `text_config`).
It is loaded whole, by the class for images and text, and its towers are frozen: what is saved is complete, and adapters
have the names that other trainers and servers use. Layers that predict several tokens (`mtp.*`) are not loaded.

Weights are quantised while they load (FORMATS, by bitsandbytes; the frozen base under method qlora, or a model that is
scored), or already on disk: a GGUF file, or the `quant_method` in a model's config (GPTQ, AWQ, FP8, compressed-tensors
...). transformers loads them all.
"""

import copy
import logging
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    BitsAndBytesConfig,
    GgufConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.quantizers.auto import AutoQuantizationConfig, get_hf_quantizer

from dsft.errors import UserError, one_line

# In the order in which they are tried.
AUTO_CLASSES = (
    (AutoModelForImageTextToText, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING),
    (AutoModelForMultimodalLM, MODEL_FOR_MULTIMODAL_LM_MAPPING),
    (AutoModelForCausalLM, MODEL_FOR_CAUSAL_LM_MAPPING),
)
# Image parts inside a decoder, by model_type: no text token passes through them.
UNREACHED = {
    "git": ("git.image_encoder.", "git.visual_projection."),
    "phi4_multimodal": ("model.embed_tokens_extend.",),
}
# Classes of modules that are skipped without an image, or select keys outside the autograd graph (DeepSeek-V3.2).
WITHOUT_GRADIENT = ("MllamaCrossAttentionDecoderLayer", "Indexer")


def auto_class(config: PreTrainedConfig) -> type:
    """Returns the auto class of transformers that loads a package of `config` for text.
    Raises UserError if there is none, with the reason and without the model's name.
    """
    remote = getattr(config, "auto_map", None) or {}
    why = "no causal language model, which dsft trains"
    for auto, mapping in AUTO_CLASSES:
        if auto.__name__ in remote or type(config) in mapping:
            # An encoder reads the input, and a decoder writes something else.
            has_both = {"encoder", "decoder"} <= config.sub_configs.keys()
            encodes_first = has_both or getattr(config, "is_encoder_decoder", False)
            if auto is AutoModelForCausalLM or not encodes_first:
                return auto
            why = f"an encoder with a decoder, {why}"
            break
    raise UserError(f"its architecture {config.model_type} is {why}")


def tied_weights(config: PreTrainedConfig) -> dict[str, str]:
    """Returns the weights that a package's class ties: name of the head -> name of the embedding, in memory."""
    for _, mapping in AUTO_CLASSES:
        if type(config) in mapping:
            keys = getattr(mapping[type(config)], "_tied_weights_keys", None)
            return keys if isinstance(keys, dict) else {}
    return {}


def from_config(
    config: PreTrainedConfig, *, trust_remote_code: bool = False, attn_implementation: str | None = None, **options
) -> PreTrainedModel:
    """Builds the model of a package with random weights; parts that text cannot reach are frozen.
    Raises UserError as `auto_class`, and if its class cannot generate text.
    """
    options |= {"attn_implementation": attn_implementation} if attn_implementation else {}
    return freeze_unreached(auto_class(config).from_config(config, trust_remote_code=trust_remote_code, **options))


def freeze_unreached(model: PreTrainedModel) -> PreTrainedModel:
    """Freezes parameters that a text loss has no gradient for: towers, their projectors, Mllama's cross attention,
    indexers. Left trainable, they would get optimizer states and `weight_decay`, but never a gradient.
    """
    beginnings = unreached(model)
    for name, parameter in model.named_parameters():
        if name.startswith(beginnings):
            parameter.requires_grad_(False)
    return model


def unreached(model: PreTrainedModel) -> tuple[str, ...]:
    """Returns the name prefixes of parameters that no text token passes through.
    Raises UserError if the package contains no language model with a head.
    """
    config = model.config
    text = config.get_text_config(decoder=True)
    crossing = UNREACHED.get(config.model_type, ())
    for name, module in model.named_modules():
        if type(module).__name__.endswith(WITHOUT_GRADIENT):
            crossing += (f"{name}.",)
    if text is config:
        return crossing
    decoder = model.get_decoder()
    head = model.get_output_embeddings()
    if head is None or decoder is model:
        raise UserError(f"its architecture {config.model_type} has no language model with a head, which dsft trains")
    reached = set()
    for part in (decoder, model.get_input_embeddings(), head):
        reached.update(part.parameters())
    beginnings = crossing
    for name, part in model.named_modules():  # the largest parts come first
        parameters = {*part.parameters()}
        if parameters and reached.isdisjoint(parameters) and not name.startswith(beginnings):
            beginnings += (f"{name}.",)
    for name, parameter in model.named_parameters():
        if parameter not in reached and not name.startswith(beginnings):
            beginnings += (name,)
    return beginnings


# Quantised weights


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """How a model's linear layers are stored; embedding and head stay as they are on disk."""

    format: str  # named by the option `quantization`, or by the config or file on disk
    bits: int = 8  # per weight in memory, without scales
    scale_bytes: float = 0.0  # per weight, its share of the scales
    lies_on_disk: bool = True  # else bitsandbytes quantises while weights load
    is_unpacked: bool = False  # transformers unpacks the weights to the model's dtype while it loads them
    disk_bytes: int | None = None  # of all weights, if they are on this machine's disk in this format

    @property
    def weight_bytes(self) -> float:
        return self.bits / 8 + self.scale_bytes

    @property
    def is_of_linear_layers(self) -> bool:
        """Whether bitsandbytes quantised it or will, linear layers only. Method qlora trains over it."""
        return not self.lies_on_disk or self.format == "bitsandbytes"

    def __str__(self) -> str:
        return self.format

    def load_config(self, compute_dtype: torch.dtype) -> Any:
        """Returns the configuration to load this format with transformers; None if the model's config contains it."""
        if self.format == "gguf":
            return GgufConfig(dequantize=True)  # the same results with and without a kernel for packed weights
        if self.lies_on_disk:
            return None
        if self.bits == 8:
            # Each layer warns in each forward that its inputs are cast to float16.
            logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
            return BitsAndBytesConfig(load_in_8bit=True)
        return BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=self.format,
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=compute_dtype,
            bnb_4bit_quant_storage=compute_dtype,  # so that DeepSpeed can shard the storage like any other weight
        )


# Formats that weights are quantised to while they load, by the option `quantization`.
FORMATS = {
    # Double quantisation: one 8-bit scale per 64 weights, one fp32 scale per 256 of those (QLoRA paper, section 3).
    "nf4": Quantization(format="nf4", bits=4, scale_bytes=1 / 64 + 4 / (64 * 256), lies_on_disk=False),
    "int8": Quantization(format="int8", lies_on_disk=False),
}
GGUF = Quantization(format="gguf", bits=16, is_unpacked=True)
# Values of `quant_method` that transformers can unpack (`dequantize` in their configuration). Adapters are trained
# and evaluated over the unpacked weights, and `dsft export` writes them.
UNPACKABLE = ("compressed-tensors", "fp8", "mxfp8", "mxfp4")
# Packages whose versions can change the results of a quantised model.
PACKAGES = ("bitsandbytes", "gguf", "compressed-tensors", "gptqmodel", "optimum")


def quantization_on_disk(
    config: PreTrainedConfig, *, disk_bytes: int | None = None, trained: bool = False
) -> Quantization | None:
    """Returns the format that a model's config names; None if its weights are not quantised. `trained`: adapters are,
    or were, trained over the weights, which are then loaded with `unpacking_config`.
    """
    section, method = _section(config)
    if not section:
        return None
    bits = section.get("bits", 8)
    if section.get("load_in_4bit") or method == "mxfp4":
        bits = 4
    return Quantization(
        format=method,
        bits=bits,
        is_unpacked=trained and method in UNPACKABLE,
        disk_bytes=disk_bytes,
    )


def unpacking_config(config: PreTrainedConfig) -> Any:
    """Returns the configuration for transformers to unpack weights while loading; None if adapters get them packed."""
    section, method = _section(config)
    if not section or method not in UNPACKABLE:
        return None
    return AutoQuantizationConfig.from_dict(section | {"dequantize": True})


def _section(config: PreTrainedConfig) -> tuple[dict[str, Any] | None, str]:
    section = None
    for part in (config, config.get_text_config(decoder=True)):
        section = section or getattr(part, "quantization_config", None)
    if section and not isinstance(section, dict):
        section = section.to_dict()
    method = (section or {}).get("quant_method")
    return section, str(getattr(method, "value", method) or "bitsandbytes")


def cast_weights(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Casts all weights of an unpacked model to its dtype, except those that its architecture keeps in fp32."""
    # transformers unpacks to `dtype`, and leaves other weights in their dtype on disk (quantizers/base.py,
    # get_new_dtype): products of both would fail.
    kept = model._get_dtype_plan(dtype)
    for name, weight in model.named_parameters():
        if not any(fnmatch(name, f"*{pattern}*") for pattern in kept):
            weight.data = weight.data.to(dtype)


def format_problems(
    name: str, config: PreTrainedConfig, quantization: Quantization, *, dtype: torch.dtype, trained: bool = False
) -> list[str]:
    """Lists why the model `name` cannot be loaded in this format here, by transformers' own checks."""
    if quantization.format == GGUF.format:
        return []  # its file has been read
    about = f"model={name}: quantised as {quantization.format}"
    unpacking = unpacking_config(config) if quantization.is_unpacked else None
    try:
        load_config = unpacking or quantization.load_config(dtype)
        quantizer, *_ = get_hf_quantizer(copy.deepcopy(config), load_config, None, True, {})
    except Exception as error:  # any, from transformers or the format's package
        return [f"{about}, it cannot be computed here ({one_line(error)})"]
    if quantizer is None:
        return [f"{about}, unknown to this transformers; update it"]
    if trained and not unpacking and not quantizer.is_trainable:
        return [f"{about}, over which transformers cannot train adapters; use the model that it was made from"]
    return []
