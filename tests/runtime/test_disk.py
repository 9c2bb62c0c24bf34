"""Files of killed jobs go, those of living ones stay: the kernel's lease tells them apart. Two runs never share a
folder; the lock of a run that was killed stops nobody.
"""

import os
import subprocess
import sys
import tempfile

import pytest

from dsft.errors import UserError
from dsft.launch import write_env_file
from dsft.runtime.disk import CPU_BUFFER, ENV_FILE, LOCK, hold_folder, is_held, remove_leftovers

HOLD = """
import mmap, os, sys, time
descriptor = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT, 0o600)
os.ftruncate(descriptor, 4096)
if sys.argv[2] == "mapped":
    memory = mmap.mmap(descriptor, 4096)
    os.close(descriptor)
print("ready", flush=True)
time.sleep(600)
"""


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("begin", "how"),
    [(f"/dev/shm/{CPU_BUFFER}", "mapped"), (ENV_FILE, "open")],
    ids=["buffer", "env"],
)
def test_a_file_stays_while_its_process_lives_and_goes_when_it_was_killed(begin, how, temporary):
    file = temporary / f"{begin}of-a-test-{os.getpid()}"  # an absolute name stands for itself
    holder = subprocess.Popen([sys.executable, "-c", HOLD, file, how], stdout=subprocess.PIPE)
    try:
        assert holder.stdout.readline() == b"ready\n"
        remove_leftovers()
        assert file.exists()
    finally:
        holder.kill()
        holder.communicate()
    remove_leftovers()
    assert not file.exists()


def test_other_files_and_links_stay(temporary):
    (temporary / "other").touch()
    (temporary / f"{ENV_FILE}link").symlink_to(temporary / "other")
    (temporary / f"{ENV_FILE}folder").mkdir()
    remove_leftovers()
    assert len(list(temporary.iterdir())) == 3


def test_the_variables_of_a_living_launch_stay(temporary):
    path = write_env_file({"A": "1"})
    assert path.parent == temporary and path.read_text() == "A=1\n"
    remove_leftovers()
    assert path.exists()


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
