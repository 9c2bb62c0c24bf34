"""Reads options from one YAML file and command-line flags, with the same names in both: one reader for all commands.

Every value is checked against its field's type annotation, and all problems are collected. A flag given twice is one
longer list where its field is a list, and a problem elsewhere; a YAML key given twice always is one.
Reading never touches a model, a GPU or the network: that is `run_setup`.

Text files are read through `read_text`: one `dsft launch` may have sent them to this node along with its command.
"""

import base64
import dataclasses
import json
import math
import os
import re
import types
import typing
import zlib
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

import yaml

from dsft.config.checks import check_bounds, check_config
from dsft.config.elsewhere import OF, VALUES
from dsft.config.options import EvalConfig, TrainConfig, argument_types
from dsft.errors import nearest, one_line, raise_if_any, without_second_errors

BOOLEANS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


SCALARS = {
    bool: "true or false",
    int: "a whole number",
    float: "a finite number",
    str: "a text",
    type(None): "null",
}
"""Type -> what a value of it is called."""


def read_config(cls: type, argv: Sequence[str], problems: list[str], *, also: type | None = None) -> Any:
    """Reads the `cls` that `argv` (and its `--config FILE`) describe; faults go to `problems`. The defaults where the
    file cannot be read, of which nothing else is said then.

    Args:
        also: class of other options of the command, which a mistyped one may mean.
    """
    values = read_file_and_flags(argv, problems)
    return cls() if values is None else make_config(cls, values, problems, also=also)


def make_config(cls: type, values: dict[str, Any], problems: list[str], *, also: type | None = None) -> Any:
    """Makes the `cls` with these options by name, checked; faults go to `problems`."""
    dsft_types = field_types(cls)
    all_types = training_types() if cls is TrainConfig else dsft_types
    if values.get("resume_from_checkpoint") is True:  # the bare flag, and what transformers' own scripts take
        values = values | {"resume_from_checkpoint": "auto"}
    refused: list[str] = []
    checked = check_values(values, all_types, refused, also=also)
    for key in ("output_dir", "model", "tokenizer", "adapter"):
        if isinstance(checked.get(key), str):
            checked[key] = os.path.expanduser(checked[key])
    options = {key: value for key, value in checked.items() if key in dsft_types}
    if cls is TrainConfig:
        options["training"] = {key: value for key, value in checked.items() if key not in dsft_types}
    config = cls(**options)
    problems += refused + without_second_errors(check_config(config), refused)
    return config


def field_types(*classes: type) -> dict[str, Any]:
    """Maps names to type annotations for the options among the fields of `classes`; earlier classes win."""
    hints: dict[str, Any] = {}
    for cls in reversed(classes):
        annotations = typing.get_type_hints(cls)
        hints |= {option_name(field): annotations[field.name] for field in dataclasses.fields(cls) if is_option(field)}
    return hints


def training_types() -> dict[str, Any]:
    """Maps names to types of all options of a training, those of transformers.TrainingArguments included."""
    return argument_types() | field_types(TrainConfig)


def option_name(field: dataclasses.Field) -> str:
    """As users write it; `from_` is the field of --from, which Python keeps for itself."""
    return field.name.removesuffix("_")


def is_option(field: dataclasses.Field) -> bool:
    """Whether a user can set this field."""
    return field.init and field.metadata.get("option", True)


def read_file_and_flags(argv: Sequence[str], problems: list[str]) -> dict[str, Any] | None:
    """Option -> value of `--config FILE` with all flags over it, unchecked; None where the file cannot be read."""
    flags = read_flags(argv, problems)
    values = read_named_file(flags, problems)
    return None if values is None else values | flags


def read_named_file(flags: dict[str, Any], problems: list[str]) -> dict[str, Any] | None:
    """Takes `--config FILE` out of the flags: the mapping in it, an empty one without; None where it is unreadable."""
    path = flags.pop("config", None)
    if path is None or isinstance(path, str):
        return {} if path is None else read_yaml(path, problems)
    problems.append("--config: needs the path of one YAML file")
    return None


def read_yaml(path: str, problems: list[str]) -> dict[str, Any] | None:
    """The mapping in a YAML file; None where it is unreadable or malformed, which goes to `problems` with its line."""
    try:
        loader = _Loader(read_text(path))
        content = loader.get_single_data()
    except OSError as error:
        problems.append(f"--config {path}: cannot be read ({error.strerror})")
        return None
    except UnicodeDecodeError as error:
        problems.append(f"--config {path}: not valid UTF-8 ({error.reason} at byte {error.start})")
        return None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: a date such as 2024-13-01
        problems.append(f"--config {path}: not valid YAML: {one_line(error)}")
        return None
    problems += [f"--config {path}: {problem}" for problem in loader.problems]
    if content is None:
        return {}
    if not isinstance(content, dict):
        problems.append(f"--config {path}: must hold 'key: value' lines, found a {type(content).__name__}")
        return None
    return {str(key): value for key, value in content.items()}


class _Loader(yaml.SafeLoader):
    """PyYAML takes the last of several equal keys without a word, and reads 0100 as 64 and 1:30 as 90, as YAML 1.1 has
    it; this loader notes both.
    """

    def __init__(self, text: str):
        super().__init__(text)
        self.problems: list[str] = []

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        lines: dict[str, int] = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            first = lines.setdefault(str(key.value), line)
            if first != line:
                self.problems.append(f"line {line}: duplicate key {key.value}, first on line {first}; keep one")
        return super().construct_mapping(node, deep)

    def construct_scalar(self, node: yaml.ScalarNode) -> Any:
        is_number = node.tag in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
        if is_number and re.fullmatch(r"[-+]?0[0-7_]+|.*:.*", node.value):
            line = node.start_mark.line + 1
            self.problems.append(
                f"line {line}: YAML reads {node.value} in base {60 if ':' in node.value else 8}; write the number in"
                " base 10, or a text in quotes"
            )
        return super().construct_scalar(node)


class Repeated(list):
    """All values of a flag that is given more than once."""


def read_flags(argv: Sequence[str], problems: list[str]) -> dict[str, Any]:
    """`--key value`, `--key=value`, `--key a b` (a list) and bare `--key` (true), as strings, lists and True."""
    occurrences: dict[str, list[list[str]]] = {}
    values: list[str] | None = None
    for word in argv:
        if word.startswith("--"):
            key, equals, value = word[2:].partition("=")
            values = [value] if equals else []
            occurrences.setdefault(key.replace("-", "_"), []).append(values)
        elif values is None:
            is_file = word.endswith((".yaml", ".yml"))
            way_out = f"did you mean --config {word}?" if is_file else "options are written --key value"
            problems.append(f"unexpected argument {word!r}; {way_out}")
            if is_file:  # so that none of its options is reported as missing
                occurrences.setdefault("config", [[word]])
        else:
            values.append(word)
    # Every rank gets --local_rank=N from the deepspeed launcher, which also sets LOCAL_RANK.
    occurrences.pop("local_rank", None)
    flags: dict[str, Any] = {}
    for key, lists in occurrences.items():
        if len(lists) > 1:
            flags[key] = Repeated(value for values in lists for value in values or [True])
        else:
            flags[key] = lists[0] if len(lists[0]) > 1 else lists[0][0] if lists[0] else True
    return flags


def split_flags(argv: Sequence[str], types_by_name: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """(words of `argv` that set the named fields, all other words in their order).

    A switch takes no value but true or false, a list all words up to the next flag, any other field one word.
    """
    taken: list[str] = []
    left: list[str] = []
    words = list(argv)
    while words:
        word = words.pop(0)
        name, equals, _ = word.removeprefix("--").partition("=")
        hint = types_by_name.get(name.replace("-", "_")) if word.startswith("--") else None
        if hint is None:
            left.append(word)
            continue
        taken.append(word)
        is_list = takes_list(hint)
        while not equals and words and not words[0].startswith("--"):
            if hint is bool and words[0].lower() not in BOOLEANS:
                break
            taken.append(words.pop(0))
            if not is_list:
                break
    return taken, left


def read_options(cls: type, argv: Sequence[str], problems: list[str]) -> tuple[dict[str, Any], list[str]]:
    """(checked values of the fields of `cls` that flags in `argv` set, all other words)."""
    types_by_name = field_types(cls)
    taken, left = split_flags(argv, types_by_name)
    return check_values(read_flags(taken, problems), types_by_name, problems), left


def read_command(cls: type, argv: Sequence[str]) -> Any:
    """The `cls` that the words of a command describe. Its fields that are not keyword-only are positional words; a
    list takes all that are left.

    Raises:
        UserError: with every word that cannot be used and every required one that is missing.
    """
    problems: list[str] = []
    values, left = read_options(cls, argv, problems)
    by_name = {option_name(field): field for field in dataclasses.fields(cls)}
    positional = [name for name, field in by_name.items() if not field.kw_only and name not in values]
    words = [word for word in left if not word.startswith("--")]
    given: dict[str, Any] = dict(zip(positional, words, strict=False))
    if words and positional and takes_list(field_types(cls)[positional[-1]]):
        first = len(positional) - 1
        given[positional[-1]], positional = words[first:], [*positional[:first], *words[first:]]
    values |= check_values(given, field_types(cls), problems)
    known = [f"--{name}" for name in by_name]
    problems += [f"{word}: unknown option{nearest(word, known)}" for word in left if word not in words]
    if not problems:
        problems += [f"{word}: unexpected argument" for word in words[len(positional) :]]
        missing = dataclasses.MISSING
        required = [name for name, field in by_name.items() if field.default is field.default_factory is missing]
        problems += [f"{name}: missing" for name in required if name not in values]
    raise_if_any(problems)
    return cls(**{by_name[name].name: value for name, value in values.items()})


def check_values(
    values: Mapping[str, Any], types_by_name: Mapping[str, Any], problems: list[str], *, also: type | None = None
) -> dict[str, Any]:
    """`values` converted to their fields' types; unknown keys and wrong types go to `problems`."""
    checked = {}
    for key, value in values.items():
        if key not in types_by_name:
            known = [*types_by_name, *(field_types(also) if also else ())]
            problems.append(f"{key}: unknown key{_hint(key, known)}")
            continue
        if isinstance(value, str) and (key, value) in VALUES and not os.path.exists(value):
            problems.append(f"{key}={value}: {VALUES[key, value]}")
            continue
        if isinstance(value, Repeated) and not takes_list(types_by_name[key]):
            problems.append(f"--{key} is given {len(value)} times ({', '.join(map(str, value))}); keep one")
            continue
        try:
            checked[key] = convert(value, types_by_name[key])
        except ValueError as error:
            problems.append(f"{key}: {'needs a value: ' if value is True else ''}{error}")
    for key in types_by_name:  # in one order, wherever the values stand
        problems += check_bounds(key, checked.get(key))
    return checked


def _hint(key: str, known: list[str]) -> str:
    """What an unknown option may mean, with a semicolon before it: by the table of other trainers' names, else by its
    spelling; empty where nothing is like it.

    Args:
        known: the options that the command has.
    """
    if key not in OF:
        return nearest(key, known)
    ours, how = OF[key].ours, OF[key].how
    here = next((name for name in ours.split() if name in known), None)
    if here:
        return f"; did you mean {here!r}{f' ({how})' * bool(how)}?"
    if not ours:
        return f"; {how}"
    name = ours.split()[0]
    command = "eval" if name in field_types(EvalConfig) else "train"
    return f"; dsft {command} has it as {name}, and this command has no such option"


def takes_list(hint: Any) -> bool:
    """Whether a field of this type can hold a list."""
    return any(typing.get_origin(member) in (list, Sequence) for member in (hint, *typing.get_args(hint)))


def convert(value: Any, hint: Any) -> Any:
    """Converts a value of a YAML file, or the words of a flag, to the type of its field.

    Raises:
        ValueError: what was given, and what is allowed.
    """
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    is_union = origin in (typing.Union, types.UnionType)
    enums = [each for each in (arguments if is_union else (hint,)) if isinstance(each, type) and issubclass(each, Enum)]
    if hint is Any:
        return value
    if origin is typing.Literal or (enums and not (is_union and value is None)):
        choices = arguments
        if enums:  # also of `IntervalStrategy | str`: the enumeration is the law
            choices = [str(member.value) for member in enums[0]]
            # YAML reads a bare `no` as false.
            value = "no" if value is False else str(getattr(value, "value", value))
        for choice in choices:
            # The type too: Literal[False] must not take a 0, nor Literal[0] a False.
            if (type(value) is type(choice) and value == choice) or (isinstance(value, str) and value == str(choice)):
                return choice
        names = [str(choice) for choice in choices]
        raise ValueError(f"invalid choice: {value!r} (choose from {', '.join(names)}){nearest(str(value), names)}")
    if is_union:
        # A string fits `str` always and a list of one nearly always, so these come last.
        members = sorted(arguments, key=lambda each: (typing.get_origin(each) is list, each is str, each is float))
        errors = []
        for member in members:
            try:
                return convert(value, member)
            except ValueError as error:
                if member is not type(None):
                    errors.append(str(error))
        raise ValueError("; ".join(dict.fromkeys(errors)))
    if origin in (list, Sequence):
        items = value if isinstance(value, list) else [value]
        return [convert(item, arguments[0] if arguments else Any) for item in items]
    if origin is dict or hint is dict:
        if isinstance(value, str) and value.lstrip().startswith("{"):
            try:
                value = json.loads(value, object_pairs_hook=unique_keys)
            except DuplicateKey as error:
                raise ValueError(f"duplicate key {error}; keep one") from None
            except (json.JSONDecodeError, RecursionError) as error:
                raise ValueError(f"not valid JSON ({error})") from None
        if not isinstance(value, dict):
            raise ValueError(f"expected a mapping, got {value!r}")
        key_type, value_type = arguments or (Any, Any)
        return {convert(key, key_type): convert(item, value_type) for key, item in value.items()}
    if hint not in SCALARS:
        raise ValueError(f"cannot be set from a file or a flag ({hint})")
    try:
        if hint is bool:
            return value if isinstance(value, bool) else BOOLEANS[value.lower()]
        if hint is str and not isinstance(value, (dict, list, bool, type(None))):
            return str(value)
        if hint is type(None) and (value is None or value.lower() in ("none", "null")):
            return None
        if hint is int and (type(value) is int or "_" not in value):  # a bool is an int, too; int() would take 1_000
            return int(value)
        if hint is float and not isinstance(value, bool):
            number = float(value)  # also YAML's `1e-4`, which PyYAML reads as a string
            if math.isfinite(number):
                return number
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError):
        pass
    raise ValueError(f"expected {SCALARS[hint]}, got {value!r}")


class DuplicateKey(ValueError):
    """A key that one JSON object has twice: json.loads would take the last one without a word."""


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The mapping of a JSON object, for `object_pairs_hook` of json.loads.

    Raises:
        DuplicateKey: naming the first key that is there twice.
    """
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        raise DuplicateKey(repr(next(name for name in names if names.count(name) > 1)))
    return values


SENT_FILES = "DSFT_FILES"
"""Variable with the files that one `dsft launch` sends to its nodes. Every user of a node can read it there: a file
with a token in it is not sent."""
LONGEST_SENT = 60_000
"""Characters of the variable. The kernel allows 131,072 for the whole command of a node (MAX_ARG_STRLEN)."""


def pack_files(paths: Iterable[str]) -> str:
    """The contents of text files by their paths as the options name them, for the variable."""
    contents = {path: Path(path).expanduser().read_text(encoding="utf-8") for path in paths}
    return base64.urlsafe_b64encode(zlib.compress(json.dumps(contents).encode())).decode()


def read_text(path: str | Path) -> str:
    """The file as the launch has sent it; else as it is on this node.

    Raises:
        OSError, UnicodeDecodeError: it cannot be read.
    """
    sent = sent_files().get(str(path))
    return Path(path).expanduser().read_text(encoding="utf-8") if sent is None else sent


def sent_files() -> dict[str, str]:
    """What was sent to this process: path -> content."""
    packed = os.environ.get(SENT_FILES)
    return json.loads(zlib.decompress(base64.urlsafe_b64decode(packed))) if packed else {}
