"""Builds a small model of any architecture, with random weights, to try out how it computes."""

import contextlib
import copy
import re
from collections.abc import Iterator

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from dsft.errors import UserError, one_line
from dsft.models.package import auto_class, from_config
from dsft.models.size import empty_model, without_zero_init

SMALL = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "n_embd": 64,
    "n_head": 4,
    "n_inner": None,
    "head_dim": 16,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "ffn_dim": 64,
    "word_embed_proj_dim": 64,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "rotary_dim": 16,
    "vocab_size_per_layer_input": 128,
}
SMALL_TOWER = {
    **dict.fromkeys(("hidden_size", "embed_dim", "intermediate_size"), 64),
    **dict.fromkeys(("num_attention_heads", "num_heads", "attention_heads", "num_key_value_heads"), 4),
    **dict.fromkeys(("depth", "num_hidden_layers", "num_layers", "n_layers", "encoder_layers"), 2),
    "head_dim": 16,
    "num_global_layers": 1,
    "conf_num_hidden_layers": 1,
}
"""Of the part for images or sound, which no trial runs."""
ASKS_FOR_MORE = re.compile("required|pixel_values|image_embeds|input_features")
"""Found in what a forward raises that is given no image or sound."""
LARGEST_TRIED = 100_000_000
"""Parameters; no architecture that SMALL knows comes near."""
LAYER_NAMES = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")


class TooLarge(Exception):
    """Says how many parameters the small model would have."""


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Computes on one thread: operators of a small model take less time than threads need to meet on busy cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def small_model(
    config: PreTrainedConfig,
    *,
    dtype: torch.dtype = torch.float32,
    trust_remote_code: bool = False,
    heads: int = SMALL["num_attention_heads"],
    **options,
) -> PreTrainedModel:
    """Builds the architecture of `config` with narrow layers, few of them but one of each kind.

    Args:
        heads: of attention; an even number.

    Raises:
        TooLarge: where it would have more than LARGEST_TRIED parameters.
        Exception: whatever an architecture's own code makes of sizes that it was not made for.
    """
    small = _small_config(config, heads)
    empty = empty_model(small, trust_remote_code=trust_remote_code)
    num_params = sum(parameter.numel() for parameter in empty.parameters())
    if num_params > LARGEST_TRIED:
        raise TooLarge(f"{num_params:,} parameters")
    with without_zero_init():
        return from_config(small, trust_remote_code=trust_remote_code, dtype=dtype, **options)


@one_thread()
def text_problem(config: PreTrainedConfig, *, trust_remote_code: bool = False) -> str | None:
    """Says why a package that only a class for images or sound loads cannot be trained on text alone, tried out on a
    small model; None where it can, where it is too large to be tried, and of all other packages.
    """
    if auto_class(config) is AutoModelForCausalLM:
        return None
    try:
        model = small_model(config, trust_remote_code=trust_remote_code).train()
        ids_BT = torch.arange(3, 19).view(2, 8)
        model(input_ids=ids_BT, labels=ids_BT, use_cache=False).loss.backward()
    except Exception as error:  # also what an architecture's own code makes of sizes that it was not made for
        if isinstance(error, (ImportError, UserError)) or ASKS_FOR_MORE.search(str(error)):
            return (
                f"its architecture {config.model_type} cannot be computed from text alone ({one_line(error)[:200]}),"
                " and no class of transformers loads its language model"
            )
    return None


def _small_config(config: PreTrainedConfig, small_heads: int) -> PreTrainedConfig:
    """Makes the same package with narrow layers, few of them but one of each kind, and towers of two."""
    small = copy.deepcopy(config)
    text = small.get_text_config(decoder=True)
    for name in config.sub_configs:
        part = getattr(small, name, None)
        if part is text:
            setattr(small, name, _small_text(text, small_heads))
        elif isinstance(part, PreTrainedConfig) and (text is not small or name in ("vision_config", "audio_config")):
            for size, value in SMALL_TOWER.items():
                if type(vars(part).get(size)) is int:
                    setattr(part, size, value)
    return _small_text(small, small_heads) if text is small else small


def _small_text(text: PreTrainedConfig, small_heads: int) -> PreTrainedConfig:
    small = copy.deepcopy(text)
    heads = getattr(small, "num_attention_heads", None)
    key_heads = {1: 1, heads: small_heads}.get(getattr(small, "num_key_value_heads", None), small_heads // 2)
    width = SMALL["head_dim"] * small_heads
    sizes = dict.fromkeys(("hidden_size", "n_embd", "word_embed_proj_dim"), width)
    sizes |= {"num_attention_heads": small_heads, "n_head": small_heads, "num_key_value_heads": key_heads}
    kept = ["head_dim"] * hasattr(small, "qk_rope_head_dim")  # latent attention: it is derived
    for name, value in (SMALL | sizes).items():
        if isinstance(vars(small).get(name), int) and name not in kept:
            setattr(small, name, value)
    small.pad_token_id = 0
    kinds = vars(small).get("layer_types")
    layers = max(2, *(kinds.index(kind) + 1 for kind in set(kinds))) if kinds else 2
    for name in LAYER_NAMES:
        if isinstance(getattr(small, name, None), int):
            setattr(small, name, min(layers, getattr(small, name)))
    if kinds:
        small.layer_types = kinds[:layers]
    _shorten_rope_sections(small)
    return small


def _shorten_rope_sections(small: PreTrainedConfig) -> None:
    """Divides the angles of a head between time, height and width as the model does (Qwen-VL's `mrope_section`)."""
    rope = getattr(small, "rope_parameters", None) or {}
    sections = rope.get("mrope_section")
    if not sections:
        return
    head_dim = getattr(small, "head_dim", None) or small.hidden_size // small.num_attention_heads
    angles = int(head_dim * rope.get("partial_rotary_factor", 1.0)) // 2
    fewer = [section * angles // sum(sections) for section in sections]
    rope["mrope_section"] = [angles - sum(fewer[1:]), *fewer[1:]]
