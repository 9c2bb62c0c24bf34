import dataclasses
import itertools
import runpy
import subprocess
import sys

import pytest
from conftest import ROOT
from transformers import TrainingArguments

from dsft.cli.commands import COMMANDS
from dsft.cli.help import command_groups, command_help, commands_help
from dsft.config.options import IGNORED_ARGUMENTS, REFUSED_ARGUMENTS, TrainConfig
from dsft.config.reader import field_types


@pytest.mark.parametrize("words", [["--help"], ["help"], ["train", "--help"], ["doctor", "-h"]])
def test_help_loads_none_of_the_large_libraries(words):
    code = (
        "import sys; before = {*sys.modules}; from dsft.cli.main import main\n"
        f"try: main({words})\n"
        "except SystemExit as end: assert not end.code\n"
        "large = {'torch', 'transformers', 'deepspeed', 'datasets', 'numpy', 'importlib.metadata'}\n"
        "loaded = large & {*sys.modules} - before\n"
        "assert not loaded, loaded"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("dsft ")


def test_the_list_of_commands_fits_a_screen():
    lines = commands_help().splitlines()
    assert len(lines) <= 23 and max(map(len, lines)) <= 80
    assert all(any(line.startswith(f"  {name} ") for line in lines) for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_has_a_text_and_every_common_one_exists(name):
    fields = list(itertools.chain.from_iterable(command_groups(COMMANDS[name]).values()))
    names = [field.name for field in fields]
    assert len(set(names)) == len(names)
    assert COMMANDS[name].common <= set(names)
    of_transformers = {field.name for field in dataclasses.fields(TrainingArguments)}
    assert [field.name for field in fields if not field.text and field.name not in of_transformers] == []
    assert [field.name for field in fields if not field.placeholder] == []


def test_the_help_of_train_has_every_option_that_its_reader_takes():
    names = {field.name for fields in command_groups(COMMANDS["train"]).values() for field in fields}
    options = field_types(TrainConfig, TrainingArguments).keys()
    assert options - names == {*REFUSED_ARGUMENTS, *IGNORED_ARGUMENTS, "local_rank"} & options


def test_the_help_of_train_is_short_unless_all_is_asked_for():
    short, full = (command_help("train", everything=everything) for everything in (False, True))
    assert "--lora_r N  (default: 16)" in short and "Rank of the adapters." in short
    assert "--zero TEXT  (default: auto)" in short and "--lora_target_modules" not in short
    assert "dsft train --help all lists every one" in short
    assert "--lora_target_modules TEXT ...  (default: all-linear)" in full
    assert "--too_long drop|truncate|split|error  (default: drop)" in full
    assert "--save_total_limit N  (default: 2)" in full, "dsft's default, not transformers'"
    assert "--adam_beta2 NUMBER  (default: 0.999)" in full
    assert len(short.splitlines()) < len(full.splitlines()) / 3


def test_the_reference_is_up_to_date():
    made = runpy.run_path(str(ROOT / "scripts" / "reference.py"))
    assert (ROOT / "docs/reference.md").read_text() == made["reference"]() + "\n", (
        "python scripts/reference.py > docs/reference.md"
    )
    assert (ROOT / "docs/migrating.md").read_text().endswith(made["tables_of_migrating"]()), (
        "python scripts/reference.py names"
    )
