"""Locks on compiled operators: a live owner's is waited for and named, a dead owner's is taken over at once."""

import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch.utils.cpp_extension as extension
from ranks import on_ranks

from dsft.runtime import operators
from dsft.runtime.lock_file import Owner
from dsft.runtime.operators import OLD_SECONDS, SILENT_OWNER_SECONDS, OperatorLock, name_owners_of_operator_locks


@pytest.fixture(autouse=True)
def looks_often(monkeypatch):
    monkeypatch.setattr(operators, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(operators, "SILENT_SECONDS", 0.3)


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
def test_a_lock_that_is_held_is_waited_for_and_its_owner_named(tmp_path, capfd, named):
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


def test_a_lock_of_another_machine_is_respected_until_it_is_old(tmp_path):
    path = tmp_path / "lock"
    path.write_text(json.dumps(asdict(replace(Owner.this_process(), host="elsewhere"))))
    assert operators._left_behind(path) is None and "on elsewhere" in operators._holder(path)
    long_ago = time.time() - SILENT_OWNER_SECONDS - 60
    os.utime(path, (long_ago, long_ago))
    assert "on elsewhere gave no heartbeat" in operators._left_behind(path)


def test_an_owner_elsewhere_that_compiles_for_long_keeps_its_lock(tmp_path, monkeypatch):
    """As seen from another node, with a clock of its own that is ten minutes ahead."""
    monkeypatch.setattr(operators, "BEAT_SECONDS", 0.05)
    path = tmp_path / "lock"
    holder = OperatorLock(str(path))
    assert holder.try_acquire()
    monkeypatch.setattr(Owner, "is_here", lambda self: False)
    monkeypatch.setattr(operators, "_process_with", lambda path: None)
    monkeypatch.setattr(time, "time", lambda: time.time_ns() / 1e9 + 600)
    assert operators._left_behind(path) is None
    os.utime(path, (0, 0))  # nothing heard for long: the next heartbeat brings it back
    until = time.monotonic() + 60
    while operators._left_behind(path) and time.monotonic() < until:
        time.sleep(0.02)
    assert operators._left_behind(path) is None
    holder.release()
    assert list(tmp_path.iterdir()) == []


def test_an_owner_that_lost_its_lock_leaves_that_of_the_next(tmp_path):
    path = tmp_path / "lock"
    holder, successor = OperatorLock(str(path)), OperatorLock(str(path))
    assert holder.try_acquire() and successor._take_over(operators._identity(path), "its owner was stopped for long")
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


def test_torch_builds_with_this_lock(monkeypatch):
    monkeypatch.setattr(extension, "FileBaton", None)
    name_owners_of_operator_locks()
    assert extension.FileBaton is OperatorLock
