"""Files of killed jobs go, those of living ones stay: the kernel's lease tells them apart."""

import os
import subprocess
import sys
import tempfile

import pytest

from dsft.launch.environment import write_env_file
from dsft.runtime.disk import CPU_BUFFER, ENV_FILE, remove_leftovers, write_json

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


def test_a_json_that_cannot_be_written_is_named_as_the_user_did(tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path / "file" / "x.json", tmp_path / "none" / "x.json"):
        with pytest.raises(OSError) as caught:
            write_json(path, {})
        assert caught.value.filename == str(path)
