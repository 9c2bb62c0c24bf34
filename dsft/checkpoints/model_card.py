"""The README.md of a trained model: what it was made from, how, and what was measured."""

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
    "learning_rate",
    "num_train_epochs",
    "max_steps",
    "global_batch_size",
    "per_device_train_batch_size",
    "seq_len",
    "lora_r",
    "lora_alpha",
    "lora_target_modules",
    "seed",
)


def model_card(run: dict[str, Any], *, data: str, held_out: str) -> str:
    """Markdown with the metadata that the hub reads.

    Args:
        run: the content of run.json of a finished run.
        data: what was trained on, counted, as text; `held_out` likewise, empty where nothing was held out.
    """
    config, plan, results = run["config"], run["plan"], run["results"]
    base, method = config["model"], config["method"]
    # A folder of this machine means nothing to the hub, nor does a data file.
    metadata = ModelCardData(
        base_model=None if Path(base).exists() else base,
        library_name="transformers" if method == "full" else "peft",
        pipeline_tag="text-generation",
        tags=["dsft", "deepspeed"],
    )
    options = {
        name: config[name]
        for name in OPTIONS
        if config.get(name) not in (None, -1) and (method != "full" or not name.startswith("lora"))
    }
    return "\n".join(
        [
            f"---\n{metadata.to_yaml()}\n---",
            "",
            f"# {Path(base).name}, finetuned ({method})",
            "",
            f"Made from `{base}` with dsft on {run['machine']}, {plural(run['world_size'], 'rank')}.",
            "",
            "## Data",
            "",
            f"{', '.join(f'`{name}`' for name in config['data'])}: {data}",
            *([f"\nHeld out: {held_out}"] if held_out else []),
            "",
            "## Training",
            "",
            *(f"- {name}: {value}" for name, value in options.items()),
            f"- plan: {plan['reason']}",
            "",
            "## Measured",
            "",
            *(f"- {text}: {results[name]:,.6g}" for name, text in METRICS.items() if results.get(name) is not None),
            "",
            "## Made with",
            "",
            ", ".join(f"{name} {version}" for name, version in run["versions"].items() if version),
            "",
        ]
    )
