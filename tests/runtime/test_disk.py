"""Two runs never share a folder; the lock of a run that was killed stops nobody."""

import subprocess
import sys

import pytest

from dsft.errors import UserError
from dsft.runtime.disk import LOCK, hold_folder, is_held


@pytest.fixture
def other_run(tmp_path):
    """A process that holds the lock of tmp_path/run."""
    script = f"""
import time
from pathlib import Path
from dsft.runtime.disk import hold_folder
with hold_folder(Path({str(tmp_path / "run")!r})):
    print("held", flush=True)
    time.sleep(600)
"""
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()


def test_a_second_run_is_refused_while_the_first_lives_and_starts_once_it_is_killed(other_run, tmp_path):
    assert is_held(tmp_path / "run")
    with pytest.raises(UserError, match="another process is writing there now"), hold_folder(tmp_path / "run"):
        pass
    other_run.kill()
    other_run.wait()
    assert (tmp_path / "run" / LOCK).exists() and not is_held(tmp_path / "run")
    with hold_folder(tmp_path / "run"):
        assert is_held(tmp_path / "run")
    assert not (tmp_path / "run" / LOCK).exists()


def test_a_folder_made_for_the_lock_alone_goes_with_it(tmp_path):
    with hold_folder(tmp_path / "new"):
        assert (tmp_path / "new" / LOCK).exists()
    assert not (tmp_path / "new").exists()
