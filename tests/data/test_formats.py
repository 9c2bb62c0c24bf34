"""The registry of data formats: which one rows are of, and what a reader of the manual finds about it."""

from typing import get_args

import pytest
from conftest import ROOT

from dsft.config.options import TrainConfig
from dsft.config.reader import field_types
from dsft.data.formats import FORMATS, format_rules
from dsft.data.sources import Row

MANUAL = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")


def find_format(columns: list[str], config: TrainConfig) -> str:
    return format_rules([Row(dict.fromkeys(columns), 1)], config).format


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_has_its_line_in_the_manual_with_all_its_columns(name):
    (line,) = [line for line in MANUAL.splitlines() if line.startswith(f"| `{name}` |")]
    for column in (*FORMATS[name].columns(TrainConfig()), *FORMATS[name].more_columns):
        assert f"`{column}`" in line


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "template"])
def test_a_format_is_found_by_its_columns(name):
    columns = [*FORMATS[name].columns(TrainConfig()), *FORMATS[name].more_columns, "id"]
    assert find_format(columns, TrainConfig()) == name


def test_missing_columns_list_those_present():
    with pytest.raises(ValueError, match="there are body, title"):
        find_format(["body", "title"], TrainConfig())
    with pytest.raises(ValueError, match="completion, prompt; there are body, title"):
        find_format(["body", "title"], TrainConfig(data_format="prompt_completion"))
    assert find_format(["body", "title"], TrainConfig(text_column="body")) == "text"


def test_every_format_is_a_choice_of_the_option():
    """So that the help lists it, and a mistyped one is refused before any file is read."""
    assert {*get_args(field_types(TrainConfig)["data_format"])} == {"auto", *FORMATS}


def test_columns_of_a_template_are_those_of_both_its_parts():
    assert find_format(["q", "a"], TrainConfig(prompt_template="{q}", completion_template="{a}")) == "template"
    with pytest.raises(ValueError, match="columns of no known format"):  # and no crash: half a template is reported
        find_format(["q", "a"], TrainConfig(prompt_template="{q}"))
