"""Files of killed jobs go, those of living ones stay: the kernel's lease tells them apart. Two runs never share a
folder; the lock of one that is gone stops nobody. A live compilation's lock is waited for and named, a dead one's is
taken over at once.
"""

import errno
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.utils.cpp_extension as extension
from conftest import flags
from ranks import on_ranks, started_entry
from torch.utils.file_baton import FileBaton

from dsft.api import evaluate_perplexity
from dsft.errors import UserError
from dsft.launch.environment import write_env_file
from dsft.runtime import disk
from dsft.runtime.disk import (
    CPU_BUFFER,
    ENV_FILE,
    LOCK,
    OLD_SECONDS,
    SILENT_OWNER_SECONDS,
    OperatorLock,
    Owner,
    RunLock,
    is_held,
    name_owners_of_operator_locks,
    remove_leftovers,
)
from dsft.runtime.distributed import only_run_in

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
import sys, time
from pathlib import Path
from dsft.runtime.disk import RunLock
RunLock(Path({str(tmp_path / "run")!r})).acquire()
print("held", flush=True)
time.sleep(600)
"""
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()


def test_a_second_run_is_refused_while_the_first_lives_and_takes_over_once_it_is_killed(other_run, tmp_path):
    with pytest.raises(UserError, match=f"process {other_run.pid} on"), only_run_in(str(tmp_path / "run")):
        pass
    assert (tmp_path / "run" / LOCK).exists() and is_held(tmp_path / "run")
    other_run.kill()
    other_run.wait()
    assert not is_held(tmp_path / "run")
    with only_run_in(str(tmp_path / "run")) as was_killed:
        assert was_killed, "even while it loaded, before it wrote run.json"
        assert json.loads((tmp_path / "run" / LOCK).read_text())["pid"] == os.getpid()
    with only_run_in(str(tmp_path / "run")) as was_killed:
        assert not was_killed
    assert not (tmp_path / "run" / LOCK).exists() and not is_held(tmp_path / "run")


def test_a_folder_made_for_the_lock_alone_goes_with_it(tmp_path):
    with only_run_in(str(tmp_path / "new" / "run")):
        assert (tmp_path / "new" / "run" / LOCK).exists()
    assert not (tmp_path / "new" / "run").exists()
    with only_run_in(str(tmp_path / "run")):
        (tmp_path / "run" / "run.json").touch()
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["run.json"]
    (tmp_path / "file").touch()
    with only_run_in(str(tmp_path / "file")) as file_was_killed, only_run_in(None) as nothing_was_killed:
        assert not file_was_killed and not nothing_was_killed  # that it is no folder is said by the checks


def test_a_disk_too_full_for_the_lock_hides_no_other_error(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(disk.os, "write", full)
    with pytest.raises(UserError, match="what the checks found"), only_run_in(str(tmp_path / "run")) as was_killed:
        assert not was_killed
        raise UserError("what the checks found")
    assert not (tmp_path / "run").exists()


@pytest.mark.launch
def test_a_live_run_is_neither_joined_nor_overwritten(other_run, options, tmp_path):
    kept = tmp_path / "run" / "checkpoint-2" / "trainer_state.json"
    kept.parent.mkdir()
    kept.write_text("{}")
    with ExitStack() as stack:
        cases = [
            flags(options(tmp_path / "run", **words))
            for words in ({"overwrite": True}, {"resume_from_checkpoint": "auto"})
        ]
        waits = [stack.enter_context(started_entry("dsft.train", words, world=2)) for words in cases]
        results = [wait()[0] for wait in waits]
    for refused in results:
        assert refused.returncode == 2 and f"process {other_run.pid} on" in refused.stderr, refused.stderr
        assert refused.stderr.count("dsft: error") == 1 and kept.exists()


def test_a_second_evaluation_into_the_same_folder_is_refused_while_the_first_lives(other_run, tiny, tmp_path):
    options = {"model": str(tiny / "model"), "data": str(tiny / "held_out.jsonl"), "max_documents": 2, "seq_len": 32}
    options["output_dir"] = str(tmp_path / "run")
    with pytest.raises(UserError, match=f"process {other_run.pid} on"):
        evaluate_perplexity(**options, progress=False)
    assert [path.name for path in (tmp_path / "run").iterdir()] == [LOCK]
    other_run.kill()
    other_run.wait()
    evaluate_perplexity(**options, progress=False)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        "documents.parquet",
        "partial",
        "perplexity.json",
    ]


def lock_of_another_machine(folder) -> None:
    folder.mkdir()
    (folder / LOCK).write_text(json.dumps(asdict(replace(Owner.this_process(), host="other"))))


def test_a_lock_of_another_machine_counts_while_it_beats(tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "STALE_SECONDS", 2.0)
    lock_of_another_machine(tmp_path / "run")
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(0.1):
            os.utime(tmp_path / "run" / LOCK)

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        assert is_held(tmp_path / "run")
        with pytest.raises(UserError, match="on other is writing there now"):
            RunLock(tmp_path / "run").acquire()
    finally:
        ended.set()
        thread.join()
    lock = RunLock(tmp_path / "run")
    lock.acquire()  # it beats no more
    lock.release()
    assert list((tmp_path / "run").iterdir()) == []


def test_a_run_of_another_machine_that_ends_while_it_is_waited_for_leaves_the_folder(tmp_path, monkeypatch):
    lock_of_another_machine(tmp_path / "run")
    ends = {"sleep": lambda _: (tmp_path / "run" / LOCK).unlink()}
    monkeypatch.setattr(disk, "time", SimpleNamespace(time=time.time, monotonic=time.monotonic, **ends))
    with only_run_in(str(tmp_path / "run")) as was_killed:
        assert not was_killed and is_held(tmp_path / "run")


def test_an_old_or_unreadable_lock_of_another_machine_is_stale_at_once(tmp_path):
    for number, content in enumerate((None, "", "{", "[]")):
        folder = tmp_path / str(number)
        lock_of_another_machine(folder)
        if content is not None:
            (folder / LOCK).write_text(content)
        os.utime(folder / LOCK, (time.time() - 60, time.time() - 60))
        assert not is_held(folder)
        lock = RunLock(folder)
        lock.acquire()
        lock.release()
        assert list(folder.iterdir()) == []


@pytest.fixture(autouse=True)
def looks_often(monkeypatch):
    monkeypatch.setattr(disk, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(disk, "SILENT_SECONDS", 0.3)


def gone() -> Owner:
    """A process of this machine that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return replace(Owner.this_process(), pid=process.pid)


@pytest.mark.parametrize("content", ["owner", "none", "before a restart of the machine"])
def test_a_fresh_lock_whose_owner_is_dead_is_taken_over_at_once(tmp_path, capfd, content):
    path = tmp_path / "lock"
    owner = gone() if content == "owner" else replace(Owner.this_process(), boot="an earlier one")
    path.write_text("" if content == "none" else json.dumps(asdict(owner)))
    lock = OperatorLock(str(path))
    assert lock.try_acquire() and json.loads(path.read_text())["pid"] == os.getpid()
    assert f"took over {path}" in capfd.readouterr().err
    lock.release()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("named", [True, False])
def test_a_lock_that_is_held_is_waited_for_and_its_owner_named(tmp_path, capfd, monkeypatch, named):
    monkeypatch.setattr(os, "getppid", lambda: 1)  # else the holder counts as a rank of the same launch
    path = tmp_path / "lock"
    if named:
        holder = OperatorLock(str(path))
        assert holder.try_acquire()
    else:
        file = path.open("w")  # as torch's own lock: open, and empty
        long_ago = time.time() - 2 * OLD_SECONDS
        os.utime(path, (long_ago, long_ago))
    acquired = []
    waiter = threading.Thread(target=lambda: acquired.append(OperatorLock(str(path)).try_acquire()))
    waiter.start()
    screen, until = "", time.monotonic() + 60
    while f"waiting for {path}, held by process {os.getpid()} on " not in screen and time.monotonic() < until:
        screen += capfd.readouterr().err
        time.sleep(0.05)
    assert waiter.is_alive() and time.monotonic() < until, screen
    if named:
        assert "compiling DeepSpeed's operator" in screen
        holder.release()
    else:
        file.close()
        path.unlink()
    waiter.join(60)
    assert acquired == [False]  # its owner has built


def test_of_the_ranks_of_a_launch_the_one_that_compiles_says_so_and_the_others_wait_in_silence(tmp_path, capfd):
    holder = OperatorLock(str(tmp_path / "lock"))
    assert holder.try_acquire()
    acquired = []
    waiter = threading.Thread(target=lambda: acquired.append(OperatorLock(str(tmp_path / "lock")).try_acquire()))
    waiter.start()
    screen, until = "", time.monotonic() + 60
    while "compiling DeepSpeed's operator" not in screen and time.monotonic() < until:
        screen += capfd.readouterr().err
        time.sleep(0.05)
    time.sleep(3 * disk.SILENT_SECONDS)
    holder.release()
    waiter.join(60)
    screen += capfd.readouterr().err
    assert acquired == [False]
    assert "compiling DeepSpeed's operator" in screen and "waiting for" not in screen


def test_a_lock_of_another_machine_is_respected_until_it_is_old(tmp_path):
    path = tmp_path / "lock"
    path.write_text(json.dumps(asdict(replace(Owner.this_process(), host="elsewhere"))))
    assert disk.left_behind(path) is None and "on elsewhere" in disk._holder(path)
    long_ago = time.time() - SILENT_OWNER_SECONDS - 60
    os.utime(path, (long_ago, long_ago))
    assert "on elsewhere gave no heartbeat" in disk.left_behind(path)


def test_an_owner_elsewhere_that_compiles_for_long_keeps_its_lock(tmp_path, monkeypatch):
    """As seen from another node, with a clock of its own that is ten minutes ahead."""
    monkeypatch.setattr(disk, "BEAT_SECONDS", 0.05)
    path = tmp_path / "lock"
    holder = OperatorLock(str(path))
    assert holder.try_acquire()
    monkeypatch.setattr(Owner, "is_here", lambda self: False)
    monkeypatch.setattr(disk, "_process_with", lambda path: None)
    monkeypatch.setattr(time, "time", lambda: time.time_ns() / 1e9 + 600)
    assert disk.left_behind(path) is None
    os.utime(path, (0, 0))  # nothing heard for long: the next heartbeat brings it back
    until = time.monotonic() + 60
    while disk.left_behind(path) and time.monotonic() < until:
        time.sleep(0.02)
    assert disk.left_behind(path) is None
    holder.release()
    assert list(tmp_path.iterdir()) == []


def test_an_owner_that_lost_its_lock_leaves_that_of_the_next(tmp_path):
    path = tmp_path / "lock"
    holder, successor = OperatorLock(str(path)), OperatorLock(str(path))
    assert holder.try_acquire() and successor.take_over(disk._identity(path), "its owner was stopped for long")
    holder.release()
    assert path.exists()
    successor.release()
    assert list(tmp_path.iterdir()) == []


def _loads_an_operator(folder: Path) -> None:
    def build(**options) -> None:
        (folder / "building").touch(exist_ok=False)
        time.sleep(0.2)
        (folder / "building").rename(folder / "built")

    name_owners_of_operator_locks()
    extension._write_ninja_file_and_build_library = build
    extension._import_module_from_library = lambda name, folder, is_python: Path(folder, "built").open().close()
    extension.load("probe", [], build_directory=str(folder))


def test_one_of_several_waiting_processes_takes_a_dead_owners_lock_over_and_the_others_wait_for_its_build(tmp_path):
    """No two build at once: the second could not make the file `building`."""
    (tmp_path / "lock").write_text(json.dumps(asdict(gone())))
    on_ranks(3, _loads_an_operator, tmp_path)
    assert (tmp_path / "built").exists()


def test_torch_builds_with_this_lock(tmp_path, monkeypatch):
    """Its own would wait for a dead owner for ever."""
    monkeypatch.setattr(extension, "FileBaton", FileBaton)
    (tmp_path / "lock").write_text(json.dumps(asdict(gone())))
    assert not extension.FileBaton(str(tmp_path / "lock")).try_acquire()
    name_owners_of_operator_locks()
    baton = extension.FileBaton(str(tmp_path / "lock"))
    assert baton.try_acquire()
    baton.release()
