"""Small real things for tests, made on the spot: a tokenizer, models of many architectures, data files."""

import json
import random
from pathlib import Path

import numpy as np
import torch
import transformers

from dsft.perplexity.modes import Windows
from dsft.units import IGNORED

END = "<|end|>"
WORDS = [
    "the",
    "a",
    "model",
    "token",
    "loss",
    "rank",
    "node",
    "shard",
    "gather",
    "reduce",
    "step",
    "batch",
    "learns",
    "reads",
    "writes",
    "big",
    "small",
    "fast",
    "slow",
    "and",
    "of",
    "to",
    "in",
]
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}"
    + END
    + "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def sentences(number: int, *, seed: int = 0, longest: int = 40) -> list[str]:
    """Texts of 3 to `longest` words, the same for the same seed."""
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randint(3, longest))) for _ in range(number)]


def write_tokenizer(folder: Path, *, chat: bool = False) -> Path:
    """A byte-level BPE of 384 tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [END, "<|user|>", "<|assistant|>", "<|system|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=384,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sentences(200), trainer)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)
    if chat:
        fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)
    return folder


COMMON = {
    "vocab_size": 384,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": None,
}
GATED = COMMON | {"intermediate_size": 48, "num_key_value_heads": 2}
ARCHITECTURES = {
    "llama": (transformers.LlamaConfig, GATED),
    "qwen3": (transformers.Qwen3Config, GATED | {"head_dim": 8}),
    "gemma3": (transformers.Gemma3TextConfig, GATED | {"head_dim": 8, "sliding_window": 64}),
    "mistral": (transformers.MistralConfig, GATED | {"sliding_window": 64}),
    "gpt2": (
        transformers.GPT2Config,
        {
            "vocab_size": 384,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 256,
            "bos_token_id": None,
            "eos_token_id": 0,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
        },
    ),
    "gpt_neox": (transformers.GPTNeoXConfig, COMMON | {"intermediate_size": 48}),
    "phi3": (transformers.Phi3Config, GATED),
    "olmo2": (transformers.Olmo2Config, GATED),
    "mixtral": (transformers.MixtralConfig, GATED | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2_moe": (
        transformers.Qwen2MoeConfig,
        GATED
        | {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 48,
        },
    ),
}


def write_model(folder: Path, architecture: str = "llama", *, seed: int = 0, chat: bool = False, **changes) -> Path:
    """A folder with random weights, config and tokenizer, as `save_pretrained` writes it."""
    cls, values = ARCHITECTURES[architecture]
    torch.manual_seed(seed)
    transformers.AutoModelForCausalLM.from_config(cls(**(values | changes))).save_pretrained(folder)
    return write_tokenizer(folder, chat=chat)


def write_jsonl(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_texts(path: Path, number: int = 40, *, seed: int = 0) -> Path:
    return write_jsonl(path, [{"text": text} for text in sentences(number, seed=seed)])


def write_pairs(path: Path, number: int = 40, *, seed: int = 0) -> Path:
    rows = [{"prompt": f"say {text}: ", "completion": text[::-1]} for text in sentences(number, seed=seed, longest=8)]
    return write_jsonl(path, rows)


def with_labels(batch: dict) -> dict:
    """A batch of the collator as transformers' models take it: labels at their own positions."""
    labels_BT = torch.nn.functional.pad(batch["shift_labels"], (1, -1), value=IGNORED)
    others = {name: batch[name] for name in batch if name not in ("num_tokens", "shift_labels", "shift_weights")}
    return others | {"labels": labels_BT}


def windows_of_sequences(sequences: list[dict]) -> Windows:
    """A window of each sequence, which is a document of its own."""
    ends = np.cumsum([len(each["input_ids"]) for each in sequences])
    starts = np.concatenate([[0], ends[:-1]])
    sizes = np.zeros(len(ends), np.int64)
    return Windows(
        tokens=np.concatenate([each["input_ids"] for each in sequences]),
        scorable=np.concatenate([each["labels"] != IGNORED for each in sequences]),
        document_ends=ends,
        spans=np.stack([starts, ends, np.minimum(starts + 1, ends)], axis=1),
        document_bytes=sizes,
        document_words=sizes,
        document_hashes=np.zeros(0, np.uint64),
    )
