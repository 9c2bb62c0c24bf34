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
            value = json.loads(value, object_pairs_hook=unique_keys)
        except DuplicateKey as error:
            raise ValueError(f"the key {error} is there twice; keep one") from None
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise ValueError(f"{value!r} is not a mapping")
    return value


def _convert_bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in BOOLEANS:
        return BOOLEANS[value.lower()]
    raise ValueError(f"{value!r} is not true or false")


def _convert_int(value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and value.strip().lstrip("+-").isdecimal():
        return int(value)
    raise ValueError(f"{value!r} is not a whole number")


def _convert_float(value: Any) -> float:
    if isinstance(value, (int, float, str)) and not isinstance(value, bool):
        try:
            number = float(value)  # also YAML's `1e-4`, which PyYAML reads as a string
        except (ValueError, OverflowError):
            raise ValueError(f"{value!r} is not a number") from None
        if not math.isfinite(number):
            raise ValueError(f"{value!r} is not a finite number")
        return number
    raise ValueError(f"{value!r} is not a number")


def _convert_str(value: Any) -> str:
    if isinstance(value, (dict, list)) or value is None or isinstance(value, bool):
        raise ValueError(f"{value!r} is not a text value")
    return str(value)


_SCALARS = {bool: _convert_bool, int: _convert_int, float: _convert_float, str: _convert_str}
