"""Configurations of usual models, so that they are planned without the hub."""

from typing import Any

from transformers import AutoConfig, PreTrainedConfig


def _dense(model_type: str, hidden: int, layers: int, heads: int, kv_heads: int, ffn: int, vocab: int, **others: Any):
    return {
        "model_type": model_type,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": ffn,
        "vocab_size": vocab,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
        **others,
    }


USUAL_MODELS: dict[str, dict[str, Any]] = {
    "Qwen/Qwen2.5-0.5B": _dense(
        "qwen2", 896, 24, 14, 2, 4864, 151936, tie_word_embeddings=True, max_position_embeddings=32768
    ),
    "meta-llama/Llama-3.2-1B": _dense("llama", 2048, 16, 32, 8, 8192, 128256, head_dim=64, tie_word_embeddings=True),
    "meta-llama/Llama-3.2-3B": _dense("llama", 3072, 28, 24, 8, 8192, 128256, head_dim=128, tie_word_embeddings=True),
    "mistralai/Mistral-7B-v0.3": _dense(
        "mistral", 4096, 32, 32, 8, 14336, 32768, sliding_window=None, max_position_embeddings=32768
    ),
    "meta-llama/Llama-3.1-8B": _dense("llama", 4096, 32, 32, 8, 14336, 128256),
    "Qwen/Qwen2.5-14B": _dense("qwen2", 5120, 48, 40, 8, 13824, 152064),
    "Qwen/Qwen2.5-32B": _dense("qwen2", 5120, 64, 40, 8, 27648, 152064),
    "mistralai/Mixtral-8x7B-v0.1": _dense(
        "mixtral", 4096, 32, 32, 8, 14336, 32000, sliding_window=None, max_position_embeddings=32768
    ),
    "meta-llama/Llama-3.1-70B": _dense("llama", 8192, 80, 64, 8, 28672, 128256),
    "Qwen/Qwen2.5-72B": _dense("qwen2", 8192, 80, 64, 8, 29568, 152064),
    "meta-llama/Llama-3.1-405B": _dense("llama", 16384, 126, 128, 8, 53248, 128256),
}
"""From the fewest parameters to the most; as config.json of each repository of the hub has them."""


def usual_config(name: str) -> PreTrainedConfig:
    """Returns the config of a key of USUAL_MODELS."""
    return AutoConfig.for_model(**USUAL_MODELS[name])
