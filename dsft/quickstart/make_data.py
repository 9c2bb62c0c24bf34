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
SKIPPED = {
    "test",
    "tests",
    "idlelib",
    "tkinter",
    "turtle",
    "turtledemo",
    "lib2to3",
    "distutils",
    "venv",
    "ensurepip",
    "macholib",
}
"""Tests, and what a distribution's Python may lack."""


def write_demo_data(folder: Path, *, dtype: str = "auto") -> dict[str, int]:
    """Write corpus/, instructions/ (train.jsonl and held_out.jsonl each), model/ (config.json and tokenizer), full.yaml
    and lora.yaml.

    Args:
        dtype: of full.yaml.

    Returns the number of rows of each data file.
    """
    modules = dict(standard_library_docs())
    documents = [(f"topic {name}", text) for name, text in sorted(topics.items())]
    documents += [(f"module {name}", "\n\n".join(text for _, text in docs)) for name, docs in modules.items()]
    counts = {}
    corpus = {"train": [], "held_out": []}
    for name, text in documents:
        corpus[split_of(name)].append({"text": text})
    # Topics repeat parts of each other, and so do modules.
    seen = {part for row in corpus["train"] for part in row["text"].split("\n\n")}
    unseen = ("\n\n".join(part for part in row["text"].split("\n\n") if part not in seen) for row in corpus["held_out"])
    corpus["held_out"] = [{"text": text} for text in unseen if text]
    instructions = {"train": [], "held_out": []}
    trained_on = {
        summary(text) for module, docs in modules.items() if split_of(f"module {module}") == "train" for _, text in docs
    }
    for module, docs in modules.items():
        held_out = split_of(f"module {module}") == "held_out"
        for signature, text in docs:
            # bz2 and gzip, say, describe their methods in the same words.
            if "(" in signature and not (held_out and summary(text) in trained_on):
                instructions[split_of(f"module {module}")].append(
                    {"prompt": f"Question: what does {module}.{signature} do?\nAnswer: ", "completion": summary(text)}
                )
    for kind, splits in (("corpus", corpus), ("instructions", instructions)):
        for split, rows in splits.items():
            path = folder / kind / f"{split}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
            counts[f"{kind}/{split}"] = len(rows)
    write_tokenizer(folder / "model", [row["text"] for row in corpus["train"]])
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
        if parts[0] not in sys.stdlib_module_names or SKIPPED & set(parts):
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


def write_tokenizer(folder: Path, texts: list[str]) -> None:
    """A byte-level BPE of VOCAB_SIZE tokens trained on `texts`, saved as a Hugging Face tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END).save_pretrained(folder)
