"""`dsft demo-data` and `dsft quickstart`: the whole job on the demo data, as the commands a user would type.

Full finetuning, LoRA, merge, perplexity: each step is a real `dsft` command on all GPUs of this machine, or on 2 CPU
ranks. Nothing is downloaded.
"""

import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

from dsft.cli.commands import FolderOptions
from dsft.demo_data import write_demo_data
from dsft.errors import UserError

STEPS = {
    "text, instructions, tokenizer and model config from Python's own documentation": "demo-data {folder}",
    "full finetuning under ZeRO-3 (the first launch on a machine compiles a DeepSpeed op, up to a minute)": (
        "train --config {folder}/full.yaml"
    ),
    "LoRA on questions and answers, over that model": "train --config {folder}/lora.yaml",
    "the adapter merged into a plain Hugging Face folder": "merge {folder}/runs/lora {folder}/merged",
    "perplexity of the merged model's answers, measured once more from its folder": (
        "eval --model {folder}/merged --data {folder}/instructions/held_out.jsonl --seq_len 128"
        " --output_dir {folder}/perplexity"
    ),
}
"""What a step does -> its `dsft` command."""
TITLES = {"full": "full finetuning", "lora": "LoRA, answers only"}


def demo(options: FolderOptions) -> None:
    """Write the demo data."""
    for name, rows in write_demo_data(Path(options.folder)).items():
        print(f"dsft: {options.folder}/{name}.jsonl: {rows:,} rows")
    print(f"dsft: next: dsft train --config {options.folder}/full.yaml")


def run(options: FolderOptions) -> None:
    """Run every step below the folder, which must be new or a quickstart's; ends with a table and loss.png.

    Raises:
        UserError: where the folder holds something else.
    """
    start, folder = time.perf_counter(), Path(options.folder)
    if folder.exists() and any(folder.iterdir()) and not (folder / "full.yaml").is_file():
        raise UserError([f"{folder}: exists and is no quickstart folder; choose a new one"])
    for old in ("runs/full", "runs/lora", "merged", "perplexity"):
        shutil.rmtree(folder / old, ignore_errors=True)
    for number, (title, command) in enumerate(STEPS.items(), start=1):
        print(f"dsft: {number} of {len(STEPS)}: {title}", flush=True)
        words = [word.format(folder=folder) for word in command.split()]
        print(f"dsft: {shlex.join(['dsft', *words])}", flush=True)
        if code := subprocess.run([sys.executable, "-m", "dsft.cli.main", *words]).returncode:
            sys.exit(code)
    show_results(folder, seconds=time.perf_counter() - start)


def show_results(folder: Path, *, seconds: float) -> None:
    """Print a table of the runs and draw their losses."""
    from dsft.checkpoints.run_folder import read_run
    from dsft.runtime.console import print_table

    runs = {name: read_run(str(folder / "runs" / name)) for name in TITLES}
    plot_losses(runs, folder / "loss.png")
    rows = {}
    for name, title in TITLES.items():
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
        "time": f"{seconds:.0f} s",
        "next": f"copy {folder}/full.yaml, name your model and data, and run: dsft train --config yours.yaml",
    }
    print_table("dsft quickstart", rows)


def plot_losses(runs: dict[str, dict], path: Path) -> None:
    """Draw the training and held-out loss of each run against tokens seen."""
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
        axis.set(title=TITLES[name], xlabel="tokens seen, thousands", ylabel="loss, nats per token")
        axis.legend()
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
