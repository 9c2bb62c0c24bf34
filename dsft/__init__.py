"""dsft: DeepSpeed-backed finetuning and distributed perplexity for Hugging Face causal language models.

Importing it touches no GPU, environment variable, logger or network. See README.md.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

_API = ("load_config", "build_model", "plan", "evaluate_perplexity", "compare", "read_run")


def __getattr__(name: str) -> Any:
    """Load the API at first use: it imports torch and transformers."""
    if name == "train":
        return importlib.import_module("dsft.train")  # the module is the function
    if name in _API:
        return getattr(importlib.import_module("dsft.api"), name)
    raise AttributeError(f"module 'dsft' has no attribute {name!r}")
