import enum
import subprocess
import sys
import typing

from conftest import ROOT
from transformers import TrainingArguments

from dsft.config.options import argument_types
from dsft.config.reader import field_types


def described(hint) -> object:
    """A type without the module that its enumerations come from."""
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return {member.name: member.value for member in hint}
    members = typing.get_args(hint)
    return (typing.get_origin(hint), *map(described, members)) if members else hint


def test_the_types_in_the_source_are_those_of_the_class():
    read, imported = argument_types(), field_types(TrainingArguments)
    other = {name for name in read.keys() | imported.keys() if described(read.get(name)) != described(imported[name])}
    assert other == {"parallelism_config", "debug"}, (
        "of classes that are no part of these modules; the first is refused"
    )


def test_what_is_wrong_with_options_is_said_before_any_large_library_loads(tmp_path):
    (tmp_path / "run.yaml").write_text("model: m\ndata: d\noutput_dir: o\nlearning_rat: 1\nmax_steps: -3\n")
    for words, lines in (
        (["train", "--config", str(tmp_path / "run.yaml")], ("learning_rat: unknown key", "max_steps=-3: must be")),
        (["eval", "--model", "m", "--data", "d", "--seq_len", "one"], ("seq_len: expected a whole number, got 'one'",)),
    ):
        code = (
            "import sys; from dsft.cli.main import main\n"
            f"try: main({words})\n"
            "except SystemExit as end: assert end.code == 2, end.code\n"
            "loaded = {'torch', 'transformers', 'deepspeed', 'datasets'} & sys.modules.keys()\n"
            "assert not loaded, loaded"
        )
        result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        assert all(f"dsft: error: {line}" in result.stderr for line in lines), result.stderr
        assert result.stderr.count("dsft: error") == len(lines)
