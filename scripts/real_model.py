"""Finetunes a real pretrained chat model and scores what it has learned, see scripts/real_model.

The task has one right answer per sentence, so nobody has to judge: the fields of an order as JSON. Names, goods and
towns of the held-out sentences do not occur in training. Each step is a `dsft` command on 2 CPU ranks or all GPUs.
Its tables are written to results.md of its folder; benchmarks/a_real_model.md shows one run. What was interrupted
goes on where it stopped: steps.json has the seconds of each step, and what it printed where a table needs that.
"""

import argparse
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from dsft.cli.quickstart import answer_orders, download_model, is_right, orders, write_orders

BATCH = 8
METHODS = {"LoRA": {"method": "lora", "learning_rate": 1e-3}, "full": {"method": "full", "learning_rate": 5e-5}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", default="real_model", type=Path, help="a new folder, or one to go on with")
    parser.add_argument("--short", action="store_true", help="two of the four trainings, fewer steps and answers")
    args = parser.parse_args()
    folder: Path = args.folder
    steps_file = folder / "steps.json"
    if folder.exists() and any(folder.iterdir()) and not steps_file.is_file():
        sys.exit(f"scripts/real_model: {folder}: holds something else; name a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    num_steps, scored = (24, 20) if args.short else (60, 100)
    train_file = folder / "train.jsonl"
    if train_file.is_file() and len(train_file.read_text().splitlines()) != BATCH * num_steps:
        sys.exit(f"scripts/real_model: {folder}: is of the other form, {'without' if args.short else 'with'} --short")
    runs = [("LoRA", "2"), ("full", "3")] if args.short else [(name, zero) for name in METHODS for zero in "23"]
    steps: dict[str, dict] = json.loads(steps_file.read_text()) if steps_file.is_file() else {}

    def once(title: str, work: Callable[[], Any]) -> Any:
        """Do a step that was not done before; returns what it gave."""
        if title not in steps:
            print(f"real_model: {title}", flush=True)
            start, gave = time.perf_counter(), work()
            steps[title] = {"seconds": time.perf_counter() - start, "gave": gave}
            steps_file.write_text(json.dumps(steps, indent=1))
        return steps[title]["gave"]

    def do(title: str, *words: object, keeps: bool = False) -> str | None:
        """Run a command once; `keeps` returns what it printed instead of showing it."""
        command = [str(word) for word in words]
        if command[0] == "dsft":
            command[:1] = [sys.executable, "-m", "dsft.cli.main"]

        def work() -> str | None:
            print(f"real_model: {shlex.join(map(str, words))}", flush=True)
            done = subprocess.run(command, stdout=subprocess.PIPE if keeps else None, text=True)
            if done.returncode:
                sys.exit(done.returncode)
            return done.stdout

        return once(title, work)

    # ---- the model
    base = folder / "base"
    if failure := once("download", partial(download_model, base)):
        sys.exit(failure)

    # ---- data: orders, and text to see what finetuning does to the rest of what the model knows
    held_out = orders("held_out", 100, seed=2)
    for name, rows in {"train": orders("train", BATCH * num_steps, seed=1), "held_out": held_out}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_orders(folder / "demo", base=base)
    text = folder / "demo" / "corpus" / "held_out.jsonl"  # of Python's documentation

    # ---- trainings; an adapter is merged
    models = {"as published": base}
    for method, zero in runs:
        name = f"{method}, ZeRO-{zero}"
        run = folder / f"{method.lower()}-zero{zero}"
        options = METHODS[method] | {
            "model": str(base),
            "data": str(folder / "train.jsonl"),
            "eval_data": str(folder / "held_out.jsonl"),
            "output_dir": str(run),
            "resume_from_checkpoint": "auto",
            "zero": zero,
            "seq_len": 256,
            "global_batch_size": BATCH,
            "max_steps": num_steps,
            "logging_steps": 4,
            "warmup_steps": num_steps // 10,
        }
        run.with_suffix(".yaml").write_text(yaml.safe_dump(options, sort_keys=False))
        do(f"training: {name}", "dsft", "train", "--config", run.with_suffix(".yaml"))
        models[name] = run / "final"
        if method == "LoRA":
            models[name] = folder / f"{run.name}-merged"
            do(f"merge: {name}", "dsft", "merge", run, models[name])

    # ---- scores
    sets = [text, folder / "held_out.jsonl"]
    results = folder / "perplexity"
    words = ["dsft", "eval", *models.values(), "--data", *sets, "--seq_len", "512", "--output_dir", results]
    do(f"perplexity of {len(models)} models on two sets", *words)
    table = json.loads((results / "perplexity.json").read_text(encoding="utf-8"))["results"]
    compared = json.loads(do(f"comparison of {len(models)} models", "dsft", "compare", results, "--json", keeps=True))
    lines = [
        "| model | orders answered right | perplexity of orders | of other text | times the published one, 95 % |",
        "|---|---|---|---|---|",
    ]
    chats = [f"> {held_out[0]['messages'][0]['content'].splitlines()[1]}", ""]
    for name, model in models.items():
        given = once(f"{scored} answers: {name}", partial(answer_orders, model, held_out[:scored]))
        right = sum(is_right(answer, row) for answer, row in zip(given, held_out, strict=False))
        perplexities = {entry["data"]: entry["perplexity"] for entry in table if entry["model"] == str(model)}
        other, of_orders = (f"{perplexities[str(data)]:,.2f}" for data in sets)
        ratios = [
            "{value:.3f}, {low:.3f} to {high:.3f}".format(**each["perplexity_ratio"])
            for each in compared["comparisons"]
            if (each["model"], each["data"]) == (str(model), str(text))
        ]
        lines.append(f"| {name} | {right} of {scored} | {of_orders} | {other} | {''.join(ratios)} |")
        chats.append(f"- {name}: `{' '.join(given[0].split())}`")

    # ---- one turn with each trained run; an adapter loads on its base
    question = held_out[1]["messages"][0]["content"]
    typed = question.replace("\n", "\\n")
    for method, zero in runs:
        run = folder / f"{method.lower()}-zero{zero}"
        answer = do(f"chat with {run.name}", "dsft", "chat", run, "--prompt", question, keeps=True)
        chats += ["", f"    dsft chat {run.name} --prompt $'{typed}'", f"    {answer.strip()}"]
    lines += ["", *chats, "", "| step | seconds |", "|---|---|"]
    lines += [f"| {title} | {step['seconds']:,.0f} |" for title, step in steps.items()]
    (folder / "results.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print((folder / "results.md").read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
