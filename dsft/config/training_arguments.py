"""Types of the fields of transformers.TrainingArguments, read from its source: importing it takes seconds, and what is
wrong with options should be said at once.
"""

import ast
import builtins
import enum
import functools
import importlib.util
import typing
from pathlib import Path
from typing import Any

MODULES = ("trainer_utils", "training_args")
"""Of transformers, with the enumerations and the fields."""

NEW_NAMES = {
    "activation_checkpointing": "gradient_checkpointing",
    "activation_checkpointing_kwargs": "gradient_checkpointing_kwargs",
}
"""Option -> what transformers called it before 5.23."""


@functools.cache
def argument_types() -> dict[str, Any]:
    """Map each option to its type. A class that is neither built in nor an enumeration of these modules is Any."""
    folder = Path(importlib.util.find_spec("transformers").submodule_search_locations[0])
    trees = [ast.parse((folder / f"{name}.py").read_text(encoding="utf-8")) for name in MODULES]
    classes = {node.name: node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)}
    names = _Names({name: _enumeration(node) for name, node in classes.items() if _is_enumeration(node)})
    fields = [node for node in classes["TrainingArguments"].body if isinstance(node, ast.AnnAssign)]
    types = {node.target.id: eval(ast.unparse(node.annotation), {}, names) for node in fields if _is_option(node)}
    # transformers before 5.23 has the older names alone; an option of dsft has one name everywhere.
    return {new: types[old] for new, old in NEW_NAMES.items()} | types


class _Names(dict):
    """What the annotations name."""

    def __missing__(self, name: str) -> Any:
        return getattr(builtins, name, getattr(typing, name, Any))


def _is_enumeration(node: ast.ClassDef) -> bool:
    return any("Enum" in ast.unparse(base) for base in node.bases)


def _enumeration(node: ast.ClassDef) -> type[enum.Enum]:
    members = {
        statement.targets[0].id: statement.value.value
        for statement in node.body
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Constant)
    }
    return enum.Enum(node.name, members)


def _is_option(node: ast.AnnAssign) -> bool:
    keywords = node.value.keywords if isinstance(node.value, ast.Call) else []
    return not any(word.arg == "init" and ast.unparse(word.value) == "False" for word in keywords)
