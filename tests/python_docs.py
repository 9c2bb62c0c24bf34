"""Text and instructions from what every Python carries, for benchmarks and checks that work offline.

Text: the language reference (`pydoc_data.topics`) and the docstrings of the standard library, read from its source
files without importing them. Instructions: a question about a function, and the summary of its docstring as the answer.
Whole documents are held out, less the paragraphs and answers that training has too. The same Python version gives the
same files.
"""

import ast
import hashlib
import json
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

from dsft.cli.quickstart import write_small_model

HELD_OUT_PERCENT = 8
SKIPPED = "test tests idlelib tkinter turtle turtledemo lib2to3 distutils venv ensurepip macholib"
"""Tests, and what a distribution's Python may lack."""


def write_python_docs(folder: Path) -> None:
    """Write corpus/ and instructions/ (train.jsonl and held_out.jsonl each), and model/ (config.json and tokenizer)."""
    for kind in ("corpus", "instructions"):
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

    for kind, splits in (("corpus", corpus), ("instructions", instructions)):
        for split, rows in splits.items():
            lines = "".join(json.dumps(row) + "\n" for row in rows)
            (folder / kind / f"{split}.jsonl").write_text(lines, encoding="utf-8")

    write_small_model(folder / "model", [row["text"] for row in corpus["train"]])


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
