"""Converts a value of a YAML file, or the words of a flag, to the type of its field."""

import enum
import json
import math
import types
import typing
from collections.abc import Sequence
from typing import Any

from dsft.errors import nearest

BOOLEANS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


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


def takes_list(hint: Any) -> bool:
    """Whether a field of this type can hold a list."""
    return any(typing.get_origin(member) in (list, Sequence) for member in (hint, *typing.get_args(hint)))


def convert(value: Any, hint: Any) -> Any:
    """`value` (a YAML value or a flag's string) as the type `hint`.

    Raises:
        ValueError: what was given, and what is allowed.
    """
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        return _convert_union(value, arguments)
    if origin is typing.Literal:
        for choice in arguments:
            # The type too: Literal[False] must not take a 0, nor Literal[0] a False.
            if (type(value) is type(choice) and value == choice) or (isinstance(value, str) and value == str(choice)):
                return choice
        raise _invalid_choice(value, [str(choice) for choice in arguments])
    if origin in (list, Sequence):
        items = value if isinstance(value, list) else [value]
        return [convert(item, arguments[0] if arguments else Any) for item in items]
    if origin is dict or hint is dict:
        return _convert_dict(value)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return _convert_enum(value, hint)
    if hint not in SCALARS:
        raise ValueError(f"cannot be set from a file or a flag ({hint})")
    try:
        return _convert_scalar(value, hint)
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError):
        raise ValueError(f"expected {SCALARS[hint]}, got {value!r}") from None


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
        raise _invalid_choice(text, choices)
    return text


def _invalid_choice(value: Any, choices: list[str]) -> ValueError:
    return ValueError(f"invalid choice: {value!r} (choose from {', '.join(choices)}){nearest(str(value), choices)}")


def _convert_dict(value: Any) -> dict:
    if isinstance(value, str) and value.lstrip().startswith("{"):
        try:
            value = json.loads(value, object_pairs_hook=unique_keys)
        except DuplicateKey as error:
            raise ValueError(f"duplicate key {error}; keep one") from None
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise ValueError(f"expected a mapping, got {value!r}")
    return value


SCALARS = {
    bool: "true or false",
    int: "a whole number",
    float: "a finite number",
    str: "a text",
    type(None): "null",
}
"""Type -> what a value of it is called."""


def _convert_scalar(value: Any, hint: type) -> Any:
    """Raises any of Python's errors of conversion: the value is none of that type."""
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
    raise ValueError
