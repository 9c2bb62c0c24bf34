from typing import Literal

import pytest
from transformers import TrainingArguments

from dsft.config.reader import check_values, convert, field_types, read_flags, read_yaml


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


def test_every_training_argument_can_be_set_by_its_own_name_and_default():
    types = field_types(TrainingArguments)
    defaults = {name: TrainingArguments.__dataclass_fields__[name].default for name in types}
    plain = {
        name: value
        for name, value in defaults.items()
        if isinstance(value, (bool, int, float, str)) and not hasattr(value, "value")
    }
    problems: list[str] = []
    checked = check_values(plain, types, problems)
    assert problems == []
    assert len(checked) == len(plain) > 60


def test_unknown_key_names_the_nearest_known_one():
    problems: list[str] = []
    check_values({"leraning_rate": 1}, field_types(TrainingArguments), problems)
    assert problems == ["leraning_rate: unknown key; did you mean 'learning_rate'?"]


def test_enumerations_name_the_choices_and_the_nearest():
    problems: list[str] = []
    check_values({"lr_scheduler_type": "cosin", "eval_strategy": False}, field_types(TrainingArguments), problems)
    assert len(problems) == 1 and "did you mean 'cosine'?" in problems[0] and "linear" in problems[0]


def test_flags_come_as_words_pairs_lists_and_switches():
    problems: list[str] = []
    found = read_flags(
        ["stray", "--a", "1", "--b=2", "--c", "x", "y", "--d", "--local_rank=0", "--lora-r", "4"], problems
    )
    assert found == {"a": "1", "b": "2", "c": ["x", "y"], "d": True, "lora_r": "4"}
    assert len(problems) == 1 and "'stray'" in problems[0]


def test_yaml_faults_name_file_and_line(tmp_path):
    broken = tmp_path / "run.yaml"
    broken.write_text("a: 1\nb: [\n")
    problems: list[str] = []
    assert read_yaml(str(broken), problems) == {}
    assert read_yaml(str(tmp_path / "missing.yaml"), problems) == {}
    assert "run.yaml" in problems[0] and "line 3" in problems[0] and "missing.yaml" in problems[1]
