"""Writes the README.md of a trained model: its base model, data, options and what was measured."""

from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

from dsft.units import plural

CARD = "README.md"
METRICS = {
    "eval_perplexity": "held-out perplexity",
    "eval_loss": "held-out loss (nats per token)",
    "eval_tokens": "held-out tokens",
    "train_loss": "training loss, mean",
    "steps": "optimizer steps",
    "tokens_seen": "tokens seen",
    "seconds": "seconds",
    "peak_gpu_gib": "peak memory of a GPU (GiB)",
    "peak_host_gib": "peak memory of a rank on the host (GiB)",
}
"""Keys of the results in run.json, as the card calls them."""
OPTIONS = (
    *("learning_rate", "num_train_epochs", "max_steps", "global_batch_size", "per_device_train_batch_size", "seq_len"),
    *("lora_r", "lora_alpha", "lora_target_modules", "seed"),
)


def model_card(run: dict[str, Any], *, data: str, held_out: str) -> str:
    """Return Markdown with the metadata that the hub reads.

    Args:
        run: the content of run.json of a finished run.
        data: what was trained on, counted, as text; `held_out` likewise, empty where nothing was held out.
    """
    config, results = run["config"], run["results"]
    data += f"\n\nHeld out: {held_out}" if held_out else ""
    options = {
        name: config[name]
        for name in OPTIONS
        if config.get(name) not in (None, -1) and (config["method"] != "full" or not name.startswith("lora"))
    }
    numbers = {text: results[name] for name, text in METRICS.items() if results.get(name) is not None}
    measured = {text: f"{n:,}" if isinstance(n, int) else f"{n:,.6g}" for text, n in numbers.items()}
    # A folder of this machine means nothing to the hub, nor does a data file.
    metadata = ModelCardData(
        base_model=None if Path(config["model"]).exists() else config["model"],
        library_name="transformers" if config["method"] == "full" else "peft",
        pipeline_tag="text-generation",
        tags=["dsft", "deepspeed"],
    )
    return f"""---
{metadata.to_yaml()}
---

# {Path(config["model"]).name}, finetuned ({config["method"]})

Trained from `{config["model"]}` with dsft on {run["machine"]}, {plural(run["world_size"], "rank")}.

## Data

{", ".join(f"`{name}`" for name in config["data"])}: {data}

## Training

{_list(options)}
- plan: {run["plan"]["reason"]}

## Measured

{_list(measured)}

## Versions

{", ".join(f"{name} {version}" for name, version in run["versions"].items() if version)}
"""


def _list(values: dict[str, Any]) -> str:
    return "\n".join(f"- {name}: {value}" for name, value in values.items())
