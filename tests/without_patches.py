"""Leaves each patch of a library out once, and prints whether its test fails without it, in half an hour:

    python tests/without_patches.py [NAME ...]

A test that passes says that the patch is needed no more, or that the test does not show the need. Returns how many.
"""

import contextlib
import os
import sys
import tempfile
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from dsft.runtime import WITHOUT

TESTS = {
    "models/test_embeddings.py::test_rows_of_new_tokens_are_trained_saved_and_merged": ("token_rows",),
}
"""Test of tests/ -> the patches without any of which it fails."""


def main() -> None:
    os.chdir(ROOT)
    not_shown = 0
    # In one process: libraries, and the process from which ranks are forked, are loaded once.
    for test, name in [(test, name) for test, names in TESTS.items() for name in names]:
        if name not in (sys.argv[1:] or [name]):
            continue
        os.environ[WITHOUT], start = name, time.monotonic()
        with tempfile.TemporaryFile("w+") as log:
            with contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
                code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", f"tests/{test}"])
            log.seek(0)
            last = (log.read().strip().splitlines() or [""])[-1]
        is_shown = code == pytest.ExitCode.TESTS_FAILED
        not_shown += not is_shown
        result = "fails without it" if is_shown else f"DOES NOT FAIL ({last})"
        print(f"{name}: {test.rpartition('::')[2]} {result}, {time.monotonic() - start:.0f} s", flush=True)
    sys.exit(not_shown)


if __name__ == "__main__":
    main()
