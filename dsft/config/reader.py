"""Reads dataclass fields from one YAML file and command-line flags, with the same names in both.

Every value is checked against the field's type annotation. All problems are collected; nothing is raised here.
Reading never touches a model, a GPU or the network: that is `run_setup`.
"""

import dataclasses
import enum
import json
import os
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from transformers import TrainingArguments

from dsft.config.checks import check_config
from dsft.config.options import TrainConfig
from dsft.errors import nearest


def read_config(cls: type, argv: Sequence[str], problems: list[str]) -> Any:
    """Reads the `cls` that `argv` (and its `--config FILE`) describe. A fault goes to `problems`."""
    flags = read_flags(argv, problems)
    path = flags.pop("config", None)
    values = read_yaml(path, problems) if isinstance(path, str) else {}
    if path is True:
        problems.append("--config: needs the path of a YAML file")
    return make_config(cls, values | flags, problems)


def make_config(cls: type, values: dict[str, Any], problems: list[str]) -> Any:
    """Makes the `cls` with these options by name, checked; faults go to `problems`."""
    dsft_types = field_types(cls)
    all_types = field_types(cls, TrainingArguments) if cls is TrainConfig else dsft_types
    if values.get("resume_from_checkpoint") is True:  # the bare flag, and what transformers' own scripts take
        values = values | {"resume_from_checkpoint": "auto"}
    checked = check_values(values, all_types, problems)
    for key in ("output_dir", "model", "tokenizer", "adapter"):
        if isinstance(checked.get(key), str):
            checked[key] = os.path.expanduser(checked[key])
    options = {key: value for key, value in checked.items() if key in dsft_types}
    if cls is TrainConfig:
        options["training"] = {key: value for key, value in checked.items() if key not in dsft_types}
    config = cls(**options)
    problems += check_config(config)
    return config


def field_types(*classes: type) -> dict[str, Any]:
    """Maps names to type annotations for the options among the fields of `classes`; earlier classes win."""
    hints: dict[str, Any] = {}
    for cls in reversed(classes):
        annotations = typing.get_type_hints(cls)
        hints |= {field.name: annotations[field.name] for field in dataclasses.fields(cls) if is_option(field)}
    return hints


def is_option(field: dataclasses.Field) -> bool:
    """Whether a user can set this field."""
    return field.init and field.metadata.get("option", True)


def read_yaml(path: str, problems: list[str]) -> dict[str, Any]:
    """The mapping in a YAML file; an unreadable or malformed file goes to `problems` with its line."""
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        problems.append(f"--config {path}: cannot be read ({error})")
        return {}
    except yaml.YAMLError as error:
        problems.append(f"--config {path}: not valid YAML: {' '.join(str(error).split())}")
        return {}
    if content is None:
        return {}
    if not isinstance(content, dict):
        problems.append(f"--config {path}: must hold 'key: value' lines, found a {type(content).__name__}")
        return {}
    return {str(key): value for key, value in content.items()}


def read_flags(argv: Sequence[str], problems: list[str]) -> dict[str, Any]:
    """`--key value`, `--key=value`, `--key a b` (a list) and bare `--key` (true), as strings, lists and True."""
    flags: dict[str, Any] = {}
    key = None
    for word in argv:
        if word.startswith("--"):
            key, equals, value = word[2:].partition("=")
            key = key.replace("-", "_")
            flags[key] = value if equals else True
        elif key is None:
            problems.append(f"argument {word!r} stands alone; options are written --key value")
        elif flags[key] is True:
            flags[key] = word
        else:
            flags[key] = [*(flags[key] if isinstance(flags[key], list) else [flags[key]]), word]
    # Every rank gets --local_rank=N from the deepspeed launcher, which also sets LOCAL_RANK.
    flags.pop("local_rank", None)
    return flags


def check_values(values: Mapping[str, Any], types_by_name: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    """`values` converted to their fields' types; unknown keys and wrong types go to `problems`."""
    checked = {}
    for key, value in values.items():
        if key not in types_by_name:
            problems.append(f"{key}: unknown key{nearest(key, types_by_name)}")
            continue
        try:
            checked[key] = convert(value, types_by_name[key])
        except ValueError as error:
            problems.append(f"{key}: {error}")
    return checked


def convert(value: Any, hint: Any) -> Any:
    """`value` (a YAML value or a flag's string) as the type `hint`.

    Raises:
        ValueError: saying what was found and what is allowed.
    """
    if hint is Any:
        return value
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return _convert_union(value, arguments)
    if origin is typing.Literal:
        for choice in arguments:
            # The type too: Literal[False] must not take a 0, nor Literal[0] a False.
            if type(value) is type(choice) and value == choice:
                return choice
            if isinstance(value, str) and value == str(choice):
                return choice
        raise ValueError(
            f"{value!r} is none of {', '.join(map(str, arguments))}{nearest(str(value), map(str, arguments))}"
        )
    if origin in (list, Sequence):
        items = value if isinstance(value, list) else [value]
        return [convert(item, arguments[0] if arguments else Any) for item in items]
    if origin is dict or hint is dict:
        return _convert_dict(value)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return _convert_enum(value, hint)
    if hint in _SCALARS:
        return _SCALARS[hint](value)
    if hint is type(None):
        if value is None or (isinstance(value, str) and value.lower() in ("none", "null")):
            return None
        raise ValueError(f"{value!r} is not null")
    raise ValueError(f"cannot be set from a file or a flag ({hint})")


def _convert_union(value: Any, members: tuple) -> Any:
    enums = [member for member in members if isinstance(member, type) and issubclass(member, enum.Enum)]
    if enums and value is not None:
        return _convert_enum(value, enums[0])  # `IntervalStrategy | str`: the enumeration is the law
    # A string fits `str` always and a list of one nearly always, so these come last.
    members = sorted(members, key=lambda member: (typing.get_origin(member) is list, member is str, member is float))
    errors = []
    for member in members:
        try:
            return convert(value, member)
        except ValueError as error:
            if member is not type(None):
                errors.append(str(error))
    raise ValueError("; ".join(dict.fromkeys(errors)))


def _convert_enum(value: Any, hint: type[enum.Enum]) -> str:
    choices = [str(member.value) for member in hint]
    # YAML reads a bare `no` as false.
    text = "no" if value is False else str(getattr(value, "value", value))
    if text not in choices:
        raise ValueError(f"{text!r} is none of {', '.join(choices)}{nearest(text, choices)}")
    return text


def _convert_dict(value: Any) -> dict:
    if isinstance(value, str) and value.lstrip().startswith("{"):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise ValueError(f"not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise ValueError(f"{value!r} is not a mapping")
    return value


def _convert_bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    words = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
    if isinstance(value, str) and value.lower() in words:
        return words[value.lower()]
    raise ValueError(f"{value!r} is not true or false")


def _convert_int(value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and value.strip().lstrip("+-").isdecimal():
        return int(value)
    raise ValueError(f"{value!r} is not a whole number")


def _convert_float(value: Any) -> float:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, str):
        try:
            return float(value)  # also YAML's `1e-4`, which PyYAML reads as a string
        except ValueError:
            pass
    raise ValueError(f"{value!r} is not a number")


def _convert_str(value: Any) -> str:
    if isinstance(value, (dict, list)) or value is None or isinstance(value, bool):
        raise ValueError(f"{value!r} is not a text value")
    return str(value)


_SCALARS = {bool: _convert_bool, int: _convert_int, float: _convert_float, str: _convert_str}
