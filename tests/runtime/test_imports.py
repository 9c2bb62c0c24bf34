import json
import subprocess
import sys

from conftest import ROOT

COMMANDS = ("checkpoints", "compare", "doctor", "init", "report")
"""Of dsft, that read files alone."""


def test_runtime_and_commands_that_read_files_load_no_large_library_at_import():
    """`dsft --help` and the checks of a launch start without torch; functions import it where they need it."""
    modules = [f"dsft.runtime.{path.stem}" for path in sorted((ROOT / "dsft/runtime").glob("[a-z]*.py"))]
    modules += [f"dsft.cli.{name}" for name in COMMANDS]
    code = f"import json, sys, {', '.join(modules)}; print(json.dumps([*sys.modules]))"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not {"torch", "transformers", "datasets", "deepspeed"} & set(json.loads(result.stdout))
