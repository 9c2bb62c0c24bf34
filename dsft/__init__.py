"""dsft: DeepSpeed-backed finetuning and distributed perplexity for Hugging Face causal language models.

Importing it touches no GPU, environment variable, logger or network. See README.md.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

_FUNCTIONS = {
    "build_model": "dsft.models.build",
    "chat": "dsft.cli.folders",
    "compare": "dsft.api",
    "evaluate": "dsft.api",
    "export": "dsft.checkpoints.export",
    "load_config": "dsft.api",
    "merge": "dsft.checkpoints.export",
    "plan": "dsft.api",
    "preview": "dsft.cli.data",
    "read_run": "dsft.checkpoints.run_folder",
    "report": "dsft.run_page.page",
}
"""Name -> its module, which is loaded at first use: it imports torch and transformers."""


def __getattr__(name: str) -> Any:
    if name == "train":  # a module that can be called
        return importlib.import_module("dsft.train")
    if name in _FUNCTIONS:
        importlib.import_module("dsft.runtime").quiet_libraries()
        return getattr(importlib.import_module(_FUNCTIONS[name]), name)
    raise AttributeError(f"module 'dsft' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*_FUNCTIONS, "train", "__version__"])
