"""The registry of data formats: which one rows are of, and what a reader of the manual finds about it."""

import pytest
from conftest import ROOT

from dsft.config.options import TrainConfig
from dsft.data.formats import FORMATS, find_format
from dsft.run_setup.named_files import check_named_files

MANUAL = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")


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


def test_an_unknown_format_is_reported_once_with_the_choices(tmp_path):
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text('{"text": "a"}\n')
    problems = check_named_files(TrainConfig(data=[str(tmp_path / "*.jsonl")], data_format="mesages"))
    (problem,) = problems
    assert problem.startswith(f"data_format: invalid choice 'mesages' (choose from auto, {', '.join(FORMATS)})")
