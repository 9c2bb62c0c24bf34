"""Help and reference, generated from the fields of the options: name, type, default and the text under each field.

Only `dsft train --help all` needs torch and transformers.
"""

import ast
import dataclasses
import inspect
import itertools
import shutil
import textwrap
import typing
from dataclasses import dataclass
from typing import Any

from dsft.cli.commands import COMMANDS, Command
from dsft.config.options import (
    IGNORED_ARGUMENTS,
    LEARNING_RATES,
    REFUSED_ARGUMENTS,
    TRAINING_DEFAULTS,
    TrainConfig,
    argument_types,
)
from dsft.config.reader import field_types, options_of

ARGUMENT_TEXTS = {
    "output_dir": "Folder of the run: run.json, checkpoints, the final model, logs.",
    "per_device_train_batch_size": "Sequences of one forward on one GPU; by default the plan's.",
    "learning_rate": f"Of the optimizer, after the warmup; by default {LEARNING_RATES['full']:g}, with adapters"
    f" {LEARNING_RATES['lora']:g}.",
    "num_train_epochs": "Passes over the data; by default 3.",
    "max_steps": "Optimizer steps, in place of num_train_epochs.",
    "save_steps": "Optimizer steps between two checkpoints; by default 500.",
    "eval_strategy": "no, steps or epoch; by default epoch if there is held-out data.",
    "resume_from_checkpoint": "auto (the last complete checkpoint in output_dir, if there is one), or a checkpoint's"
    " folder.",
}
"""Most used fields of TrainingArguments, or with another meaning here -> their text, with the default."""
PLACEHOLDERS = {
    str: "TEXT",
    int: "N",
    float: "NUMBER",
    bool: "[true|false]",
    dict: "JSON",
    Any: "MODULE:NAME",
}


@dataclass(frozen=True)
class FieldDoc:
    name: str
    flag: str
    """--NAME, or the name of a positional word."""
    placeholder: str
    """For its value: TEXT, N, a|b ..."""
    default: str
    """As a user would write it; empty if there is none."""
    text: str


Groups = dict[str, list[FieldDoc]]
"""Heading -> the options of the group."""


def commands_help() -> str:
    lines = ["dsft COMMAND ...: finetuning and perplexity with DeepSpeed", ""]
    lines += [f"  {name:<12} {command.summary}" for name, command in COMMANDS.items()]
    return "\n".join([*lines, "", "dsft COMMAND --help explains one, --help all lists every option of it."])


def command_help(name: str, *, everything: bool) -> str:
    """Returns a command's summary and its options: the common ones, or every one."""
    command = COMMANDS[name]
    width = min(shutil.get_terminal_size().columns, 100)
    lines = [usage(name), "", f"{command.summary[0].upper()}{command.summary[1:]}."]
    for line in command.details.splitlines():
        lines += textwrap.wrap(line, width) or [""]
    for heading, fields in command_groups(command, everything=everything).items():
        lines += ["", *textwrap.wrap(heading, width)]
        for field in fields:
            default = f"  (default: {field.default})" if field.default else ""
            lines.append(f"  {field.flag} {field.placeholder}{default}")
            lines += textwrap.wrap(field.text, width, initial_indent=" " * 6, subsequent_indent=" " * 6)
    if command.common and not everything:
        lines += ["", f"These are the options used most; dsft {name} --help all lists every one."]
    return "\n".join(lines)


def usage(name: str) -> str:
    command = COMMANDS[name]
    words = ["dsft", name]
    fields = options_of(command.options)
    for option, field in fields.items():
        if not field.kw_only:
            words.append(option.upper() if field.default is dataclasses.MISSING else f"[{option.upper()}]")
    if command.run_options or any(field.kw_only for field in fields.values()):
        words.append("[--OPTION VALUE ...]")
    if name == "launch":
        words.append("train|eval")
    if name == "launch" or command.run_options:
        words.append("[FILE.yaml]")
    return " ".join(words)


def command_groups(command: Command, *, everything: bool = True) -> Groups:
    """Returns the groups of a command's options, those of the run first; without `everything` only the common ones."""
    if not command.common:
        return class_groups(command.options)
    groups = class_groups(command.run_options)
    if command.run_options is TrainConfig:
        groups["TrainingArguments: of transformers, by their own names."] = training_arguments(everything=everything)
    groups |= class_groups(command.options)
    if everything:
        return groups
    common = {}
    for heading, fields in groups.items():
        chosen = [field for field in fields if field.name in command.common]
        if chosen:
            common[heading] = chosen
    return common


def class_groups(cls: type) -> Groups:
    """Returns a group, with its docstring, for `cls` and each base class; an option is in that of its last class."""
    fields = options_of(cls)
    types = field_types(cls)
    groups = {}
    for base in cls.__mro__[:-1]:
        docs = []
        for name, text in texts_below(base).items():
            if name in fields:
                field = fields.pop(name)
                flag = f"--{name}" if field.kw_only else name
                docs.append(FieldDoc(name, flag, placeholder_of(types[name]), default_of(field), text))
        if docs:
            groups[" ".join(base.__doc__.split())] = docs
    return groups


def texts_below(cls: type) -> dict[str, str]:
    """Maps the fields of a class to the strings below them in its source."""
    texts = {}
    (tree,) = ast.parse(inspect.getsource(cls)).body
    for node, below in itertools.pairwise(tree.body):
        if isinstance(node, ast.AnnAssign) and isinstance(below, ast.Expr):
            texts[node.target.id] = " ".join(below.value.value.split())
    return texts


def training_arguments(*, everything: bool) -> list[FieldDoc]:
    """Returns the options of TrainingArguments: those of ARGUMENT_TEXTS, or all of them, which loads transformers."""
    types = argument_types()
    texts = dict(ARGUMENT_TEXTS)
    defaults = {}
    if everything:
        from transformers import TrainingArguments

        for field in dataclasses.fields(TrainingArguments):
            name = field.name
            if name in types and name not in {*texts, *REFUSED_ARGUMENTS, *IGNORED_ARGUMENTS, "local_rank"}:
                text = " ".join(field.metadata.get("help", "").split())
                sentence = text.partition(". ")[0].rstrip(".")
                texts[name] = sentence and f"{sentence}."
                defaults[name] = default_of(field)
    defaults |= {name: str(value).lower() for name, value in TRAINING_DEFAULTS.items()}
    return [
        FieldDoc(name, f"--{name}", placeholder_of(types[name]), defaults.get(name, ""), text)
        for name, text in texts.items()
    ]


def default_of(field: dataclasses.Field) -> str:
    value = field.default
    if field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    if isinstance(value, list):
        return " ".join(map(str, value))
    if isinstance(value, bool):
        return str(value).lower()
    return "" if value in (None, dataclasses.MISSING) or value == {} else str(value)


def placeholder_of(hint: Any) -> str:
    members = typing.get_args(hint)
    origin = typing.get_origin(hint)
    if origin is typing.Literal:
        return "|".join(map(str, members))
    if origin is list:
        return f"{placeholder_of(members[0])} ..."
    if origin is dict or not members:
        return PLACEHOLDERS.get(origin or hint, "")  # an enum of transformers is in a union with `str`
    return "|".join(dict.fromkeys(filter(None, map(placeholder_of, members))))
