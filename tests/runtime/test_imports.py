import json
import subprocess
import sys

from conftest import ROOT


def test_runtime_loads_no_large_library_at_import():
    """`dsft --help` and the checks of a launch start without torch; functions import it where they need it."""
    modules = sorted(path.stem for path in (ROOT / "dsft/runtime").glob("[a-z]*.py"))
    code = f"import json, sys; from dsft.runtime import {', '.join(modules)}; print(json.dumps([*sys.modules]))"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not {"torch", "transformers", "datasets", "deepspeed"} & set(json.loads(result.stdout))
