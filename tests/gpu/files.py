"""Makes what the checks work on, offline: the demo data, a model with random weights, a small one, and one of NaN."""

import copy
import time
from collections.abc import Iterator

from python_docs import write_python_docs

from dsft.units import GiB
from gpu.check import Row, Setting

WIDE = {
    "vocab_size": 32_768,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 8192,
}
"""The widths of Llama 3.2 1B."""
NARROW = WIDE | {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16}
"""For GPUs below WIDE_BYTES."""
SHORT = NARROW | {"num_hidden_layers": 4}
"""For GPUs below NARROW_BYTES."""
SHARED = NARROW | {"num_hidden_layers": 8}
"""For ranks that share a GPU: 0.2 B parameters."""
WIDE_BYTES = 36 * GiB
"""Of GPU memory that the wide model asks for: 16 GiB of states, and room for its activations."""
NARROW_BYTES = 11 * GiB
"""The same of the narrow one, which takes 10 without checkpointing."""


def widths_for(memory_bytes: int) -> dict[str, int]:
    """Choose the model for GPUs of this memory."""
    if memory_bytes >= WIDE_BYTES:
        return WIDE
    return NARROW if memory_bytes >= NARROW_BYTES else SHORT


def make_files(setting: Setting) -> Iterator[Row]:
    """Write `demo`, `base`, `small` and `broken`."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    start = time.perf_counter()
    write_python_docs(setting.path("demo"))
    tokenizer = AutoTokenizer.from_pretrained(setting.path("demo", "model"))
    config = AutoConfig.from_pretrained(setting.path("demo", "model"))
    torch.manual_seed(0)
    small = AutoModelForCausalLM.from_config(copy.deepcopy(config))  # of its own: the base's is changed
    small.save_pretrained(setting.path("small"))
    if setting.has_gpu and not setting.tiny:
        memory = min(torch.cuda.get_device_properties(gpu).total_memory for gpu in range(setting.ranks))
        config.update(SHARED if setting.share else widths_for(memory))
    with torch.device("cuda" if setting.has_gpu else "cpu"):
        base = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if setting.has_gpu else torch.float32)
    base.save_pretrained(setting.path("base"))
    with torch.no_grad():
        small.get_input_embeddings().weight.fill_(float("nan"))
    small.save_pretrained(setting.path("broken"))
    for name in ("base", "small", "broken"):
        tokenizer.save_pretrained(setting.path(name))
    seconds, millions = time.perf_counter() - start, base.num_parameters() / 1e6
    yield Row(
        claim="data and models are made offline", measured=f"{millions:,.0f} M parameters, {seconds:.0f} s", ok=True
    )
