from typing import Literal

import pytest

from dsft.config.convert import convert


@pytest.mark.parametrize(
    ("value", "hint", "expected"),
    [
        ("1e-4", float, 1e-4),
        (3, float, 3.0),
        ("7", int, 7),
        ("-7", int, -7),
        ("true", bool, True),
        ("no", bool, False),
        ("none", int | None, None),
        ("a", list[str], ["a"]),
        (["a", "b"], list[str], ["a", "b"]),
        ("x", str | list[str], "x"),
        ('{"a": 1}', dict | str, {"a": 1}),
        (4, Literal[4, 8], 4),
        ("8", Literal[4, 8], 8),
        ("3", str, "3"),
        (3, str, "3"),
    ],
)
def test_values_of_files_and_flags_take_the_field_s_type(value, hint, expected):
    assert convert(value, hint) == expected


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        ("1.5", int),
        (1.5, int),
        (True, int),
        ("x", float),
        (1, bool),
        ("maybe", bool),
        ("5", Literal[4, 8]),
        ({}, str),
        (None, str),
        ([1], str),
        ("{", dict),
    ],
)
def test_wrong_types_are_refused(value, hint):
    with pytest.raises(ValueError):
        convert(value, hint)
