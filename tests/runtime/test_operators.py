"""Compiled operators: a machine that cannot compile one says so before weights load, or takes torch's; a live owner's
lock is waited for and named, a dead owner's is taken over at once.
"""

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

from dsft.errors import UserError
from dsft.run_setup import resolve
from dsft.runtime import operators
from dsft.runtime.lock_file import Owner
from dsft.runtime.operators import (
    OLD_SECONDS,
    SILENT_OWNER_SECONDS,
    OperatorLock,
    name_owners_of_operator_locks,
    nvcc_problem,
    offload_problems,
)


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


OFFLOAD = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
PARAMETERS = {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}


@pytest.fixture
def nothing_compiled(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))


@pytest.mark.usefixtures("nothing_compiled")
def test_a_missing_compiler_is_named_where_the_optimizer_is_offloaded(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    (problem,) = offload_problems(OFFLOAD)
    assert "no-such-compiler is not there" in problem and "apt-get install g++" in problem
    assert offload_problems(PARAMETERS) == offload_problems({}) == []
    assert offload_problems(OFFLOAD | {"optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}) == []


@pytest.mark.usefixtures("nothing_compiled")
def test_a_compiler_without_a_header_is_named_by_its_complaint(monkeypatch, tmp_path):
    false = tmp_path / "c++"
    false.write_text("#!/bin/sh\necho 'fatal error: omp.h: No such file' >&2; exit 1\n")
    false.chmod(0o755)
    monkeypatch.setenv("CXX", str(false))
    assert "omp.h: No such file" in offload_problems(OFFLOAD)[0]


@pytest.mark.usefixtures("nothing_compiled")
def test_what_was_compiled_before_needs_no_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "no-such-compiler")
    (tmp_path / "cpu_adam").mkdir()
    (tmp_path / "cpu_adam" / "cpu_adam.so").touch()
    assert offload_problems(OFFLOAD) == []


@pytest.mark.parametrize("words", ["", "c++ -O2", "env c++"])
@pytest.mark.usefixtures("nothing_compiled")
def test_this_machine_compiles(monkeypatch, words):
    monkeypatch.setenv("CXX", words)
    assert offload_problems(OFFLOAD) == [] and operators.compile_error() == ""


ADAMW = {"zero_optimization": {"stage": 2}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}
CPU_ADAM = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}, "optimizer": {"type": "AdamW"}}
CASES = [
    (ADAMW, {"lr": 1e-4, "torch_adam": True}),
    (ADAMW | {"optimizer": {"type": "adam"}}, {"torch_adam": True}),
    (ADAMW | {"optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}, {"torch_adam": True}),
    (
        ADAMW
        | {"optimizer": {"type": "AdamW", "params": {"bias_correction": True, "set_grad_none": True, "eps": 1e-6}}},
        {"eps": 1e-6, "torch_adam": True},
    ),
    (ADAMW | {"optimizer": {"type": "SGD", "params": {"lr": 1e-4}}}, {"lr": 1e-4}),
    (CPU_ADAM, None),
]


@pytest.fixture
def without_toolkit(monkeypatch):
    import torch.utils.cpp_extension

    monkeypatch.setattr(torch.utils.cpp_extension, "CUDA_HOME", None)
    monkeypatch.setattr(resolve, "has_gpu", lambda: True)


@pytest.mark.parametrize(("content", "parameters"), CASES)
def test_without_nvcc_torch_s_adam_is_taken(without_toolkit, content, parameters):
    taken, notes = resolve._with_an_adam_that_compiles(content)
    assert taken["optimizer"].get("params") == parameters
    assert bool(notes) == (taken != content) and all("CUDA_HOME does not exist" in note for note in notes)


def test_without_nvcc_an_optimizer_that_torch_lacks_is_refused(without_toolkit):
    with pytest.raises(UserError, match="optimizer.type lion: nvcc cannot compile it .*CUDA_HOME does not exist"):
        resolve._with_an_adam_that_compiles(ADAMW | {"optimizer": {"type": "Lion", "params": {"lr": 1e-4}}})


def test_a_toolkit_of_another_cuda_is_named(tmp_path, monkeypatch):
    import torch.utils.cpp_extension

    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 11.8, V11.8.89'\n")
    nvcc.chmod(0o755)
    monkeypatch.setattr(torch.utils.cpp_extension, "CUDA_HOME", str(tmp_path))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert "11.8 does not match the version torch was compiled with 13.0" in nvcc_problem()
    monkeypatch.setattr(torch.version, "cuda", "11.8")
    assert nvcc_problem() == ""
