import json
import subprocess
import sys

import pytest
from conftest import ROOT

COMMANDS = ("data", "doctor", "folders", "plan", "quickstart")
"""Of dsft, that read files alone, or look at them before they load more."""


def test_runtime_and_commands_that_read_files_load_no_large_library_at_import():
    """`dsft --help` and the checks of a launch start without torch; functions import it where they need it."""
    modules = [f"dsft.runtime.{path.stem}" for path in sorted((ROOT / "dsft/runtime").glob("[a-z]*.py"))]
    modules += [f"dsft.cli.{name}" for name in COMMANDS]
    code = f"import json, sys, {', '.join(modules)}; print(json.dumps([*sys.modules]))"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not {"torch", "transformers", "datasets", "deepspeed"} & set(json.loads(result.stdout))


BAD = {
    ("preview", "--data", "no.jsonl", "--model", "gpt2", "--seq_len", "x"): [
        "data: no.jsonl",
        "seq_len: expected a whole number",
    ],
    ("prepare", "--data", "no.jsonl", "--model", "./nowhere"): ["data: no.jsonl", "model=./nowhere"],
    ("export", "./nowhere", "out"): ["./nowhere: is not a folder"],
    ("plan", "--model", "./nowhere", "--zero", "4", "--gpus", "8x80GB"): ["model=./nowhere", "zero=4"],
    ("merge", "./dsft", "out"): ["./dsft: contains neither safetensors"],
}


@pytest.mark.parametrize(("words", "named"), BAD.items(), ids=lambda value: value[0])
def test_what_is_wrong_with_options_and_files_is_told_before_torch_is_loaded(words, named):
    code = (
        "import sys; from dsft.cli.main import main\n"
        f"try: main({list(words)})\n"
        "finally: assert not {'torch', 'transformers', 'deepspeed'} & sys.modules.keys()"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 2 and all(name in result.stderr for name in named), result.stderr
