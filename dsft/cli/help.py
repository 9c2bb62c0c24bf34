"""Help and reference, made from the fields of the options: name, type, default and the text under each field.

They are read from the source, so that help needs neither torch nor transformers, not even for the fields of
transformers.TrainingArguments.
"""

import ast
import dataclasses
import functools
import importlib.util
import shutil
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsft.cli.commands import COMMANDS, Command
from dsft.config.options import (
    IGNORED_ARGUMENTS,
    LEARNING_RATES,
    REFUSED_ARGUMENTS,
    TRAINING_DEFAULTS,
    EvalConfig,
    TrainConfig,
)
from dsft.config.reader import options_of

ARGUMENT_TEXTS = {
    "output_dir": "Folder of the run: run.json, checkpoints, the final model, logs.",
    "resume_from_checkpoint": "auto (the last complete checkpoint in output_dir, if there is one), or a checkpoint's"
    " folder.",
    "eval_strategy": "no, steps or epoch; by default epoch where there is held-out data.",
    "learning_rate": f"Of the optimizer, after the warmup; by default {LEARNING_RATES['full']:g}, with adapters"
    f" {LEARNING_RATES['lora']:g}.",
}
"""Texts of fields of TrainingArguments that mean more here; none of them has a fixed default."""
PLACEHOLDERS = {
    "str": "TEXT",
    "int": "N",
    "float": "NUMBER",
    "bool": "[true|false]",
    "dict": "JSON",
    "Any": "MODULE:NAME",
}


@dataclass(frozen=True, kw_only=True)
class FieldDoc:
    name: str
    placeholder: str
    """What stands for its value: TEXT, N, a|b ..."""
    default: str
    """As it would be written; empty where there is none."""
    text: str
    is_positional: bool = False


@dataclass(frozen=True)
class Group:
    """Options of one class, under its docstring."""

    heading: str
    fields: tuple[FieldDoc, ...]


def commands_help() -> str:
    lines = ["dsft COMMAND ...: finetuning and perplexity with DeepSpeed", ""]
    lines += [f"  {name:<12} {command.summary}" for name, command in COMMANDS.items()]
    return "\n".join([*lines, "", "dsft COMMAND --help explains one, --help all lists every option of it."])


def command_help(name: str, *, everything: bool) -> str:
    """Returns what a command does and its options: the common ones, or every one."""
    command = COMMANDS[name]
    width = min(shutil.get_terminal_size().columns, 100)
    lines = [usage(name), "", f"{command.summary[0].upper()}{command.summary[1:]}."]
    for line in command.details.splitlines():
        lines += textwrap.wrap(line, width) or [""]
    for group in command_groups(command):
        shown = [field for field in group.fields if everything or not command.common or field.name in command.common]
        if shown:
            lines += ["", *textwrap.wrap(group.heading, width)]
        for field in shown:
            default = f"  (default: {field.default})" if field.default else ""
            lines.append(f"  {'' if field.is_positional else '--'}{field.name} {field.placeholder}{default}")
            lines += textwrap.wrap(field.text, width, initial_indent=" " * 6, subsequent_indent=" " * 6)
    if command.common and not everything:
        lines += ["", f"These are the options used most; dsft {name} --help all lists every one."]
    return "\n".join(lines)


def usage(name: str) -> str:
    fields = [field for group in command_groups(COMMANDS[name]) for field in group.fields]
    upper = {field.name.upper(): field.default for field in fields if field.is_positional}
    words = ["dsft", name, *(f"[{word}]" if default else word for word, default in upper.items())]
    options = ["[--OPTION VALUE ...]"] if len(upper) < len(fields) else []
    if name == "launch":
        words += [*options, "train|eval"]
    config = ["[FILE.yaml]"] if name == "launch" or COMMANDS[name].run_options else []
    return " ".join([*words, *config, *options])


def command_groups(command: Command) -> list[Group]:
    """Returns the groups of a command's options: for train and eval those of the run, then those of the launch."""
    groups = class_groups(command.options)
    if command.common and command.run_options:
        groups = class_groups(command.run_options) + groups
    if command.common and command.run_options is TrainConfig:
        folder = importlib.util.find_spec("transformers").submodule_search_locations[0]
        arguments = tuple(
            dataclasses.replace(field, default="", text=ARGUMENT_TEXTS[field.name])
            if field.name in ARGUMENT_TEXTS
            else dataclasses.replace(field, default=str(TRAINING_DEFAULTS.get(field.name, field.default)).lower())
            for field in source_fields(str(Path(folder, "training_args.py")), "TrainingArguments")
            if field.name not in (*REFUSED_ARGUMENTS, *IGNORED_ARGUMENTS, "local_rank")
        )
        groups.insert(-1, Group("TrainingArguments: of transformers, by their own names.", arguments))
    return groups


def class_groups(cls: type) -> list[Group]:
    """Returns one group for `cls` and each of its base classes that has options, bases first.

    An option stands in the group that has it first, with the text of the class that has it last.
    """

    def bases_first(base: type) -> list[type]:
        return [each for parent in base.__bases__ for each in bases_first(parent)] + [base]

    ancestry = [base for base in dict.fromkeys(bases_first(cls)) if dataclasses.is_dataclass(base)]
    docs = {
        doc.name: doc
        for base in ancestry
        for doc in source_fields(sys.modules[base.__module__].__file__, base.__name__)
    }
    if issubclass(cls, EvalConfig):
        from dsft.perplexity.modes import CHOICES  # loads numpy, which other help does without

        docs |= {name: dataclasses.replace(docs[name], placeholder="|".join(CHOICES[name])) for name in CHOICES}
    options = {field.name: (name, field) for name, field in options_of(cls).items()}
    groups = []
    seen = set()
    for base in ancestry:
        names = [name for name in vars(base).get("__annotations__", {}) if name in options and name not in seen]
        seen.update(names)
        fields = [
            dataclasses.replace(docs[name], name=options[name][0], is_positional=not options[name][1].kw_only)
            for name in names
        ]
        if fields:
            groups.append(Group(" ".join(base.__doc__.split()), tuple(fields)))
    return groups


@functools.cache
def source_fields(file: str, class_name: str) -> tuple[FieldDoc, ...]:
    """Returns the fields that a class has by its source, in their order.

    Their text is the string below each, or the `help` of its metadata, of which the first sentence is taken.
    """

    def literal(node: ast.expr | None) -> Any:
        try:
            return ast.literal_eval(node) if node else None
        except ValueError:  # not a plain value
            return None

    body = next(node.body for node in parsed(file).body if isinstance(node, ast.ClassDef) and node.name == class_name)
    docs = []
    for node, below in zip(body, [*body[1:], None], strict=True):
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        keywords = {}
        if isinstance(node.value, ast.Call):
            keywords = {keyword.arg: keyword.value for keyword in node.value.keywords}
        default = keywords.get("default", keywords.get("default_factory", node.value))
        value = literal(default.body if isinstance(default, ast.Lambda) else default)
        if isinstance(value, bool):
            value = str(value).lower()
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            text = below.value.value
        elif text := (literal(keywords.get("metadata")) or {}).get("help", ""):
            text = text.split(". ")[0].rstrip(".") + "."
        docs.append(
            FieldDoc(
                name=node.target.id,
                placeholder=_placeholder(node.annotation),
                default=" ".join(map(str, value)) if isinstance(value, list) else "" if value is None else str(value),
                text=" ".join(text.split()),
            )
        )
    return tuple(docs)


@functools.cache  # a file of several classes of options is parsed once
def parsed(file: str) -> ast.Module:
    return ast.parse(Path(file).read_text(encoding="utf-8"))


def _placeholder(annotation: ast.expr) -> str:
    if isinstance(annotation, ast.BinOp):
        members = dict.fromkeys((_placeholder(annotation.left), _placeholder(annotation.right)))
        return "|".join(member for member in members if member)
    if isinstance(annotation, ast.Subscript):
        name = ast.unparse(annotation.value)
        if name == "Literal":
            return "|".join(str(value) for value in ast.literal_eval(f"[{ast.unparse(annotation.slice).strip('()')}]"))
        return f"{_placeholder(annotation.slice)} ..." if name == "list" else PLACEHOLDERS.get(name, "")
    return PLACEHOLDERS.get(ast.unparse(annotation), "")  # a type of transformers stands beside `str`
