"""Commands as functions, for notebooks: `dsft.preview` and `dsft.chat`."""

import contextlib
import io
from typing import Any

from dsft.cli import data, folders
from dsft.cli.commands import ChatOptions, PreviewOptions


def preview(config: str | None = None, *, samples: int = 3, **options: Any) -> None:
    """Print samples of a training's data as the model will see them. Args: `config`: a YAML file."""
    words = ["--config", config] if config else []
    for name, value in options.items():
        words += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    data.run(PreviewOptions(samples=samples), words)


def chat(model: str, prompt: str, **options: Any) -> str:
    """Return the answer of a run, a checkpoint or a model. Args: `options`: those of `dsft chat`."""
    with contextlib.redirect_stdout(io.StringIO()):  # the command prints while the answer is made
        return folders.chat(ChatOptions(model, prompt=prompt, **options))
