"""The whole job on the demo data, with the commands a user would type: full finetuning, LoRA, merge, perplexity.

    dsft quickstart quickstart

Every step is a real `dsft` command on all GPUs of this machine, or on 2 CPU ranks. Nothing is downloaded.
"""

import shutil
import sys
import time
from pathlib import Path

from dsft.checkpoints.export import merge
from dsft.checkpoints.run_folder import read_run
from dsft.cluster.launch.run import launch
from dsft.demo_data import write_demo_data
from dsft.errors import UserError
from dsft.runtime.console import print_table


def run_quickstart(folder: Path) -> None:
    """Run everything below `folder`, which must be new or a quickstart's; ends with a table and loss.png.

    Raises:
        UserError: where the folder holds something else.
    """
    start = time.perf_counter()
    if folder.exists() and any(folder.iterdir()) and not (folder / "full.yaml").is_file():
        raise UserError([f"{folder}: exists and is no quickstart folder; choose a new one"])
    for old in ("runs/full", "runs/lora", "merged", "perplexity"):
        shutil.rmtree(folder / old, ignore_errors=True)
    print(
        f"dsft: 1 of 5: text, instructions, tokenizer and model config from Python's own documentation, in {folder}",
        flush=True,
    )
    write_demo_data(folder)
    print(
        "dsft: 2 of 5: full finetuning under ZeRO-3 (the first launch on a machine compiles a DeepSpeed op, up to a"
        " minute)",
        flush=True,
    )
    _run("train", ["--config", f"{folder}/full.yaml"])
    print("dsft: 3 of 5: LoRA on questions and answers, over that model", flush=True)
    _run("train", ["--config", f"{folder}/lora.yaml"])
    print("dsft: 4 of 5: the adapter merged into a plain Hugging Face folder", flush=True)
    merge(f"{folder}/runs/lora", f"{folder}/merged")
    print("dsft: 5 of 5: perplexity of the merged model's answers, measured once more from its folder", flush=True)
    _run(
        "eval",
        [
            "--model",
            f"{folder}/merged",
            "--data",
            f"{folder}/instructions/held_out.jsonl",
            "--seq_len",
            "128",
            "--output_dir",
            f"{folder}/perplexity",
        ],
    )

    runs = {name: read_run(str(folder / "runs" / name)) for name in ("full", "lora")}
    plot_losses(runs, folder / "loss.png")
    rows = {}
    for name, title in (("full", "full finetuning"), ("lora", "LoRA, answers only")):
        results = runs[name]["results"]
        before = next(entry["eval_perplexity"] for entry in results["log"] if "eval_perplexity" in entry)
        peak = results.get("peak_gpu_gib", results["peak_host_gib"])
        rows[title] = (
            f"perplexity {before:,.1f} -> {results['eval_perplexity']:,.1f}; {results['tokens_seen']:,} tokens, "
            f"{results['tokens_per_second']:,.0f} tokens/s, peak {peak:.2f} GiB per rank"
        )
    rows |= {
        "models": f"{folder}/runs/full/final, {folder}/merged",
        "runs": f"{folder}/runs/full/run.json, {folder}/runs/lora/run.json",
        "loss curve": f"{folder}/loss.png",
        "time": f"{time.perf_counter() - start:.0f} s",
        "next": f"copy {folder}/full.yaml, name your model and data, and run: dsft train --config yours.yaml",
    }
    print_table("dsft quickstart", rows)


def _run(name: str, argv: list[str]) -> None:
    code = launch(["--no_preflight", name, *argv])
    if code:
        sys.exit(code)


def plot_losses(runs: dict[str, dict], path: Path) -> None:
    """Training and held-out loss of each run against tokens seen."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(runs), figsize=(5 * len(runs), 4), layout="constrained", squeeze=False)
    for axis, (name, run) in zip(axes[0], runs.items(), strict=True):
        for key, style, label in (("loss", "-", "training"), ("eval_loss", "o--", "held out")):
            points = [
                (entry["num_input_tokens_seen"] / 1000, entry[key]) for entry in run["results"]["log"] if key in entry
            ]
            axis.plot(*zip(*points, strict=True), style, label=label)
        axis.set(
            title={"full": "full finetuning", "lora": "LoRA, answers only"}[name],
            xlabel="tokens seen, thousands",
            ylabel="loss, nats per token",
        )
        axis.legend()
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
