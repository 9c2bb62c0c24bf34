"""A data set, a tokenizer and a small model config made from what every Python carries: nothing is downloaded.

    dsft demo-data demo

Text: the language reference (`pydoc_data.topics`) and the docstrings of the standard library, read from its source
files without importing them. Instructions: a question about a function, and the summary of its docstring as the answer.
Whole documents are held out, less the paragraphs and answers that training has too. The same Python version gives the
same files; another's docstrings read otherwise, and so do all figures.
"""

import ast
import hashlib
import json
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

SHIPPED = Path(__file__).parent
"""Holds the runs of the quickstart as YAML, and the config of a Llama of 1.3 M parameters."""
END = "<|end|>"
VOCAB_SIZE = 4096
HELD_OUT_PERCENT = 8
SKIPPED = "test tests idlelib tkinter turtle turtledemo lib2to3 distutils venv ensurepip macholib"
"""Tests, and what a distribution's Python may lack."""


def write_demo_data(folder: Path, *, dtype: str = "auto") -> dict[str, int]:
    """Write corpus/, instructions/ (train.jsonl and held_out.jsonl each), model/ (config.json and tokenizer), full.yaml
    and lora.yaml.

    Args:
        dtype: of full.yaml.

    Returns the number of rows of each data file.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

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
            path = folder / kind / f"{split}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
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
    for name in ("full.yaml", "lora.yaml"):
        text = (SHIPPED / name).read_text(encoding="utf-8").format(folder=folder, dtype=dtype)
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
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if parts[0] not in sys.stdlib_module_names or not set(SKIPPED.split()).isdisjoint(parts):
            continue
        try:
            tree = ast.parse(path.read_bytes())
        except SyntaxError:
            continue  # templates and samples that are no Python of this version
        name = ".".join(parts).removesuffix(".__init__")
        docs = [(signature, doc) for node, signature in _walk(tree, "") if (doc := ast.get_docstring(node))]
        if docs:
            yield name, docs


def _walk(node: ast.AST, prefix: str) -> Iterator[tuple[ast.AST, str]]:
    yield node, prefix.rstrip(".")
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            yield from _walk(child, f"{prefix}{child.name}.")
        elif isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield child, f"{prefix}{child.name}({ast.unparse(child.args)})"
