"""Where users begin: `dsft demo-data` writes data to try things on, and `dsft quickstart` does the whole job on that
data, as the commands a user would type: full finetuning, LoRA, merge, perplexity, report.

Each step is a real `dsft` command on all GPUs of this machine, or on 2 CPU ranks. Nothing is downloaded: the data, a
tokenizer and a small model config are made from what every Python carries. Text: the language reference
(`pydoc_data.topics`) and the docstrings of the standard library, read from its source files without importing them.
Instructions: a question about a function, and the summary of its docstring as the answer. Whole documents are held out,
less the paragraphs and answers that training has too. The same Python version gives the same files; another's
docstrings read otherwise, and so do all figures.
"""

import ast
import gzip
import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

from dsft.cli.commands import FolderOptions, QuickstartOptions
from dsft.errors import UserError
from dsft.runtime.console import show_text
from dsft.runtime.hardware import cpu_computes_bfloat16, default_ranks, has_gpu

ANSWERS = "answers.jsonl"
REPORT = "report {folder}/runs/full {folder}/runs/lora --out {folder}/report.html"
STEPS = {
    "text, instructions, tokenizer and model config from Python's own documentation": "demo-data {folder}",
    "full finetuning under ZeRO-3 (the first launch on a machine compiles a DeepSpeed op, up to a minute)": (
        "train --config {folder}/full.yaml"
    ),
    "LoRA on questions and answers, over that model": "train --config {folder}/lora.yaml",
    "the adapter merged into a plain Hugging Face folder": "merge {folder}/runs/lora {folder}/merged --dtype float32",
    "perplexity of both models on text and answers that they have not seen, measured from their folders": (
        "eval --model {folder}/runs/full/final {folder}/merged --data {folder}/corpus/held_out.jsonl"
        " {folder}/instructions/held_out.jsonl --seq_len 512 --output_dir {folder}/perplexity"
    ),
    "a page about both trainings": REPORT,
}
"""What a step does -> its `dsft` command."""
TITLES = {"full": "full finetuning", "lora": "LoRA, answers only"}
NUM_QUESTIONS = 3
"""Answered before and after LoRA: the shortest of those held out."""
SHIPPED = Path(__file__).parent.parent / "quickstart"
"""Holds the runs of the quickstart as YAML, and the config of a Llama of 1.3 M parameters."""
END = "<|end|>"
VOCAB_SIZE = 4096
HELD_OUT_PERCENT = 8
SKIPPED = "test tests idlelib tkinter turtle turtledemo lib2to3 distutils venv ensurepip macholib"
"""Tests, and what a distribution's Python may lack."""


def _folder(options: FolderOptions | QuickstartOptions) -> Path:
    """The folder to write. Raises UserError where something else is there."""
    if os.path.lexists(options.folder) and not os.path.isdir(options.folder):
        raise UserError(f"{options.folder}: exists and is no folder; choose a new one")
    return Path(options.folder)


def demo(options: FolderOptions) -> None:
    """Write the demo data. Raises UserError where the folder is none."""
    dtype = "bfloat16" if not has_gpu() and cpu_computes_bfloat16() else "auto"
    for name, rows in write_demo_data(_folder(options), dtype=dtype).items():
        show_text(f"dsft: {options.folder}/{name}.jsonl: {rows:,} rows")
    show_text(f"dsft: next: dsft train --config {shlex.quote(f'{options.folder}/full.yaml')}")


def write_demo_data(folder: Path, *, dtype: str = "auto") -> dict[str, int]:
    """Write corpus/, instructions/ (train.jsonl and held_out.jsonl each), model/ (config.json and tokenizer), full.yaml
    and lora.yaml.

    Args:
        dtype: of full.yaml.

    Returns the number of rows of each data file.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    for kind in ("corpus", "instructions"):  # a folder that cannot be written is reported before the work
        (folder / kind).mkdir(parents=True, exist_ok=True)
    modules = dict(standard_library_docs())
    split_of_module = {module: split_of(f"module {module}") for module in modules}
    corpus, instructions = ({"train": [], "held_out": []} for _ in range(2))

    # ---- corpus; topics repeat parts of each other, and so do modules
    for name, text in sorted(topics.items()):
        corpus[split_of(f"topic {name}")].append({"text": text})
    for module, docs in modules.items():
        corpus[split_of_module[module]].append({"text": "\n\n".join(text for _, text in docs)})
    seen = {part for row in corpus["train"] for part in row["text"].split("\n\n")}
    unseen = ("\n\n".join(part for part in row["text"].split("\n\n") if part not in seen) for row in corpus["held_out"])
    corpus["held_out"] = [{"text": text} for text in unseen if text]

    # ---- instructions; bz2 and gzip, say, describe their methods in the same words
    trained_on = {
        summary(text) for module, docs in modules.items() if split_of_module[module] == "train" for _, text in docs
    }
    for module, docs in modules.items():
        split = split_of_module[module]
        for signature, text in docs:
            if "(" in signature and not (split == "held_out" and summary(text) in trained_on):
                prompt = f"Question: what does {module}.{signature} do?\nAnswer: "
                instructions[split].append({"prompt": prompt, "completion": summary(text)})

    counts = {}
    for kind, splits in (("corpus", corpus), ("instructions", instructions)):
        for split, rows in splits.items():
            lines = "".join(json.dumps(row) + "\n" for row in rows)
            (folder / kind / f"{split}.jsonl").write_text(lines, encoding="utf-8")
            counts[f"{kind}/{split}"] = len(rows)

    # ---- a byte-level BPE of the corpus, the model's config and the runs
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([row["text"] for row in corpus["train"]], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END)
    tokenizer.save_pretrained(folder / "model")
    shutil.copy(SHIPPED / "config.json", folder / "model")
    accumulated = 2 if default_ranks() == 1 else 1  # one rank learns from as many tokens as two
    quoted = json.dumps(str(folder), ensure_ascii=False)[1:-1]  # between the double quotes of YAML
    for name in ("full.yaml", "lora.yaml"):
        shipped = (SHIPPED / name).read_text(encoding="utf-8")
        text = shipped.format(folder=quoted, dtype=dtype, accumulated=accumulated)
        (folder / name).write_text(text, encoding="utf-8")
    return counts


def split_of(name: str) -> str:
    """train or held_out, by a hash of the name: stable when documents come or go."""
    return "held_out" if int(hashlib.sha256(name.encode()).hexdigest(), 16) % 100 < HELD_OUT_PERCENT else "train"


def summary(docstring: str) -> str:
    """The first paragraph, in one line."""
    return " ".join(docstring.partition("\n\n")[0].split())


def standard_library_docs() -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """(module, [(signature or name, docstring)]) for every module of the standard library with docstrings, by name."""

    def walk(node: ast.AST, prefix: str) -> Iterator[tuple[ast.AST, str]]:
        yield node, prefix.rstrip(".")
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                yield from walk(child, f"{prefix}{child.name}.")
            elif isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield child, f"{prefix}{child.name}({ast.unparse(child.args)})"

    root, skipped = Path(sysconfig.get_path("stdlib")), set(SKIPPED.split())
    wanted = (each for each in root.iterdir() if each.stem in sys.stdlib_module_names - skipped)
    for path in sorted(path for each in wanted for path in (each.rglob("*.py") if each.is_dir() else [each])):
        parts = path.relative_to(root).with_suffix("").parts
        if path.suffix != ".py" or not skipped.isdisjoint(parts):
            continue
        try:
            tree = ast.parse(path.read_bytes())
        except SyntaxError:
            continue  # templates and samples that are no Python of this version
        name = ".".join(parts).removesuffix(".__init__")
        docs = [(signature, doc) for node, signature in walk(tree, "") if (doc := ast.get_docstring(node))]
        if docs:
            yield name, docs


def run(options: QuickstartOptions) -> None:
    """Run every step below the folder, which must be new or a quickstart's; ends with answers before and after LoRA,
    and a table. Raises UserError where the folder holds something else.
    """
    start, folder = time.perf_counter(), _folder(options)
    if folder.exists() and any(folder.iterdir()) and not (folder / "full.yaml").is_file():
        raise UserError(f"{folder}: exists and is no quickstart folder; choose a new one")
    for old in ("runs/full", "runs/lora", "merged", "perplexity", "report"):
        shutil.rmtree(folder / old, ignore_errors=True)
    for number, (title, command) in enumerate(STEPS.items(), start=1):
        show_text(f"dsft: {number} of {len(STEPS)}: {title}")
        words = [word.format(folder=folder) for word in command.split()]
        show_text(f"dsft: {shlex.join(['dsft', *words])}", is_command=True)
        if code := subprocess.run([sys.executable, "-m", "dsft.cli.main", *words]).returncode:
            sys.exit(code)
        if command.startswith("eval "):
            write_answers(folder)
    show_results(folder, start=start)


def write_answers(folder: Path) -> None:
    """Write what the models before and after LoRA answer to the same held-out questions, beside their perplexities."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from dsft.models.tokenizer import generate, text_ids
    from dsft.runtime.console import set_up_screen

    set_up_screen()
    rows = [json.loads(line) for line in (folder / "instructions" / "held_out.jsonl").open(encoding="utf-8")]
    questions = sorted(rows, key=lambda row: len(row["prompt"]))[:NUM_QUESTIONS]
    answers = {}
    for when, model in {"before LoRA": "runs/full/final", "after LoRA": "merged"}.items():
        loaded, tokenizer = (auto.from_pretrained(folder / model) for auto in (AutoModelForCausalLM, AutoTokenizer))
        answers[when] = [
            generate(loaded, tokenizer, text_ids(tokenizer, row["prompt"]), max_new_tokens=30) for row in questions
        ]
    with (folder / "perplexity" / ANSWERS).open("w", encoding="utf-8") as file:
        for number, row in enumerate(questions):
            given = {when: " ".join(texts[number].split()) for when, texts in answers.items()}
            line = {"prompt": row["prompt"].splitlines()[0]} | given | {"Python says": row["completion"].strip()}
            file.write(json.dumps(line) + "\n")


def show_results(folder: Path, *, start: float) -> None:
    """Print the answers and a table of the runs. Args: `start`: when the steps began, by time.perf_counter()."""
    from dsft.checkpoints.run_folder import read_run
    from dsft.runtime.console import print_table

    for line in (folder / "perplexity" / ANSWERS).open(encoding="utf-8"):
        answers = json.loads(line)
        show_text(f"dsft: {answers.pop('prompt')}")
        for name, text in answers.items():
            show_text(f"dsft:   {name + ':':<13}{text}")

    table = {}
    for name, title in TITLES.items():
        results = read_run(str(folder / "runs" / name))["results"]
        before = next(entry["eval_perplexity"] for entry in results["log"] if "eval_perplexity" in entry)
        peak = results.get("peak_gpu_gib", results["peak_host_gib"])
        table[title] = (
            f"perplexity {before:,.1f} -> {results['eval_perplexity']:,.1f}; {results['tokens_seen']:,} tokens, "
            f"{results['tokens_per_second']:,.0f} tokens/s, peak {peak:.2f} GiB per rank"
        )
    held_out = folder / "corpus" / "held_out.jsonl"
    text = "".join(json.loads(line)["text"] for line in held_out.open(encoding="utf-8")).encode()
    bits_of_gzip = 8 * len(gzip.compress(text, 9)) / len(text)
    results = json.loads((folder / "perplexity" / "perplexity.json").read_text(encoding="utf-8"))["results"]
    asked = (str(held_out), f"{folder}/runs/full/final")
    (bits,) = (result["bits_per_byte"] for result in results if (result["data"], result["model"]) == asked)
    table |= {
        "held-out text": f"{bits:.2f} bits per byte by the model, {bits_of_gzip:.2f} by gzip -9",
        "models": f"{folder}/runs/full/final, {folder}/merged",
        "runs": f"{folder}/runs/full/run.json, {folder}/runs/lora/run.json",
        "time": f"{time.perf_counter() - start:.0f} s",
        "next": f"copy {folder}/full.yaml, name your model and data, and run: dsft train --config yours.yaml",
    }
    table["report"] = f"open {folder}/report.html in a browser"
    print_table("dsft quickstart", table)
