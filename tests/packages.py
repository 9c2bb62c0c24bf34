"""Model packages as they lie on the hub: towers beside a language model, several shards, layers no class loads.

Built by transformers' own classes with narrow layers. The tensors' names are those that these classes save, which are
the hub's; `mtp.*` is added where hub packages have it.
"""

import json
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file
from tiny import write_tokenizer
from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from dsft.models.package import auto_class

TEXT = {
    **{"vocab_size": 384, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256},
    **{"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1},
    **{"topk_group": 1, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "first_k_dense_replace": 1},
    **{"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 384, "intermediate_size_mlp": 64},
    **{"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16},
    **{"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
    **{"bos_token_id": 1, "eos_token_id": 0, "pad_token_id": 383},
}
TOWER = {
    **dict.fromkeys(("hidden_size", "embed_dim", "intermediate_size", "d_model", "encoder_ffn_dim"), 32),
    **dict.fromkeys(("num_attention_heads", "num_heads", "attention_heads", "num_key_value_heads"), 4),
    **dict.fromkeys(("depth", "num_hidden_layers", "num_layers", "n_layers", "encoder_layers"), 1),
    **{"head_dim": 8, "num_global_layers": 1, "encoder_attention_heads": 4},
}
TOWERS = {
    "Dots3NoteVisionConfig": {
        **{"num_heads": 4, "adapter_in_dim": 32, "adapter_out_dim": 64, "pyramid_num_routed": [2]},
    },
    "Dots3NoteAudioConfig": {"adapter_out_dim": 64, "adapter_input_size": 32},
    "Emu3VQVAEConfig": {"base_channels": 32, "attn_resolutions": []},
}
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
EMU_IMAGE_WORDS = {"<image>": 380, "<|extra_200|>": 381} | {f"<|visual token {i:06}|>": 300 + i for i in range(64)}
CAUSAL = {
    "dots3_note": {"num_key_value_heads": 4},
    "emu3": {},
    "fuyu": {},
    "gemma3": {},
    "gemma4": {"num_hidden_layers": 6},
    "gemma4_unified": {"num_hidden_layers": 6},
    "got_ocr2": {},
    "llama4": {"num_hidden_layers": 4},
    "mllama": {"cross_attention_layers": [1], "num_hidden_layers": 3},
    "moss_transcribe_diarize": {},
    "qwen3_5": {"num_hidden_layers": 4},
    "qwen3_5_moe": {"num_hidden_layers": 4},
    "qwen4_exp": {
        **{"num_hidden_layers": 4, "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16},
        **{"indexer_budget": 16, "indexer_compress_ratio": 4},
    },
}
"""Composite classes of transformers' causal-LM mapping, with what their text configs have of their own. Gemma3n needs
the package timm.
"""
for newer in CAUSAL.keys() - CONFIG_MAPPING.keys():  # than the oldest transformers
    del CAUSAL[newer]
IMAGE = {
    "glm4v": {"rope_parameters": ROPE},
    "kimi_k25": {},
    "llava": {},
    "minimax_m3_vl": {},
    "mistral3": {},
    "mistral4": {},
    "qwen3_vl": {"rope_parameters": ROPE},
}
"""Packages without a class there, which AutoModelForImageTextToText loads."""
_INSIDE = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
_DECODER = {
    name: TEXT[name]
    for name in (
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
        *("max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id"),
    )
}
DECODERS = {
    "git": transformers.GitConfig(**_DECODER, vision_config=_INSIDE | {"image_size": 32, "patch_size": 16}),
    "phi4_multimodal": transformers.Phi4MultimodalConfig(
        **_DECODER,
        num_key_value_heads=2,
        original_max_position_embeddings=256,
        vision_config=_INSIDE | {"crop_size": 64, "image_size": 64, "patch_size": 16},
        audio_config={
            **{"hidden_size": 32, "intermediate_size": 32, "num_blocks": 1, "num_attention_heads": 4},
            **{"nemo_conv_channels": 32, "ext_pw_out_channel": 32, "depthwise_separable_out_channel": 32},
        },
    ),
}
"""Whose towers lie inside the decoder: `package.UNREACHED` names them."""
HAS_MTP = ("qwen3_5", "qwen3_5_moe", "qwen4_exp")


def package_config(model_type: str) -> PreTrainedConfig:
    if model_type in DECODERS:
        return DECODERS[model_type]
    settings = (CAUSAL | IMAGE)[model_type]
    default = CONFIG_MAPPING[model_type]()
    text = default.get_text_config(decoder=True)

    def values(part: PreTrainedConfig) -> dict:
        if part is text:
            derived = ("head_dim",) if "qk_rope_head_dim" in vars(part) else ()  # of latent attention
            return {
                name: value for name, value in TEXT.items() if name in vars(part) and name not in derived
            } | settings
        common = {name: value for name, value in TOWER.items() if type(vars(part).get(name)) is int}
        return common | TOWERS.get(type(part).__name__, {})

    if text is default:
        return type(default)(**values(default))
    parts = {name: getattr(default, name) or kind() for name, kind in default.sub_configs.items()}
    return type(default)(
        **{
            name: values(part) | {"model_type": part.model_type}
            for name, part in parts.items()
            if isinstance(part, PreTrainedConfig)
        },
        **({"vocabulary_map": EMU_IMAGE_WORDS} if model_type == "emu3" else {}),
    )


def write_package(folder: Path, model_type: str, *, seed: int = 0, chat: bool = False) -> Path:
    """A folder with random weights in several shards, config and tokenizer."""
    config = package_config(model_type)
    torch.manual_seed(seed)
    model = auto_class(config)._model_mapping[type(config)]._from_config(config)
    model.save_pretrained(folder, max_shard_size=sum(p.nbytes for p in model.parameters()) // 2)
    if model_type in HAS_MTP:
        extra = {"mtp.fc.weight": torch.randn(8, 16), "mtp.layers.0.mlp.gate_proj.weight": torch.randn(4, 4)}
        save_file(extra, folder / "mtp.safetensors", {"format": "pt"})
        index_file = folder / SAFE_WEIGHTS_INDEX_NAME
        index = json.loads(index_file.read_text())
        index["weight_map"] |= dict.fromkeys(extra, "mtp.safetensors")
        index_file.write_text(json.dumps(index))
    (folder / "preprocessor_config.json").write_text("{}")
    return write_tokenizer(folder, chat=chat)
