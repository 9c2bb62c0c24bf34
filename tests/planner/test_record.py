"""Predictions as rows with a hash: docs/predictions.md, and what `dsft plan --record` prints and refuses."""

import datetime
import re
import shlex

import pytest
from conftest import ROOT

from dsft.cli.commands import PlanOptions
from dsft.cli.main import main
from dsft.config.options import TrainConfig
from dsft.config.reader import read_config, read_options
from dsft.planner.plans import hash_of

ASKED = ["plan", "--model", "Qwen/Qwen2.5-0.5B", "--seq_len", "512", "--gpus", "1x4090", "--record"]


def cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip().strip("|").split("|")]


def registered() -> list[list[str]]:
    """The cells of each row of docs/predictions.md; the last is what others published, outside of the hash."""
    lines = (ROOT / "docs" / "predictions.md").read_text().splitlines()
    return [cells(line) for line in lines if line.startswith("| `dsft plan ")]


def test_every_registered_row_has_the_hash_of_its_cells():
    rows = registered()
    assert len(rows) >= 20
    for *said, digest, _ in rows:
        assert hash_of(said) == digest, said[0]
        assert datetime.date.fromisoformat(said[-1]) and len(said) == 7
    assert len({row[0] for row in rows}) == len(rows)


def test_a_changed_digit_changes_the_hash():
    *said, digest, _ = registered()[0]
    assert hash_of([said[0], *said[1:-1], "2030-01-01"]) != digest


def test_every_registered_command_is_one_of_today():
    for row in registered():
        words = shlex.split(row[0].strip("`"))[2:]
        problems: list[str] = []
        values, left = read_options(PlanOptions, words, problems)
        read_config(TrainConfig, left, problems, also=PlanOptions)
        assert values["record"] and [each for each in problems if "missing" not in each] == []


def test_a_row_is_printed_with_ranges_versions_date_and_hash(capsys):
    main(ASKED)
    *said, digest = cells(capsys.readouterr().out)
    assert said[0] == f"`dsft {' '.join(ASKED)}`" and hash_of(said) == digest
    assert re.fullmatch(r"[\d.]+ \([\d.]+ to [\d.]+\)", said[2]) and re.fullmatch(
        r"[\d.]+ \([\d.]+ to [\d.]+\)", said[3]
    )
    assert "torch" in said[5] and "code " in said[5] and said[6] == datetime.date.today().isoformat()


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--json"], "--record: is one row of one plan; leave out --json"),
        (["--nodes", "1,2"], "leave out several --nodes"),
        (["--config", "run.yaml"], "write the job's options and --gpus"),
    ],
)
def test_a_row_that_others_could_not_ask_for_is_refused(words, problem, capsys):
    with pytest.raises(SystemExit):
        main([*ASKED, *words])
    assert problem in capsys.readouterr().err
