"""What keeps ranks from starting is said in one message with its own exit code, and Ctrl-C in one line."""

import errno
import importlib
import os
import signal
import socket
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from ranks import started_entry

from dsft.errors import (
    EXIT_INTERRUPTED,
    EXIT_NOT_STARTED,
    EXIT_USER_ERROR,
    UserError,
    ends_with_clear_errors,
)
from dsft.runtime import distributed
from dsft.runtime.distributed import free_port

FIRST_OF_TWO = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}


@pytest.fixture
def busy_port():
    with socket.create_server(("", 0)) as listener:
        yield listener.getsockname()[1]


CASES = {
    "rank 0 of 2 on": (EXIT_NOT_STARTED, {}),
    "rank 1 of 2 on": (EXIT_NOT_STARTED, {"RANK": "1"}),
}


def started(folder: Path, variables: dict):
    """A training of one rank that finds these variables of a launcher."""
    words = ["--model", "m", "--data", "d", "--output_dir", folder, "--start_timeout", "2"]
    return started_entry("dsft.train", words, **FIRST_OF_TWO | variables)


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """The result of each case, all at once: they wait most of their time."""
    with ExitStack() as stack:
        waits = {
            named: stack.enter_context(
                started(tmp_path_factory.mktemp("run"), {"MASTER_PORT": str(free_port())} | variables)
            )
            for named, (_, variables) in CASES.items()
        }
        return {named: wait()[0] for named, wait in waits.items()}


@pytest.mark.parametrize("named", CASES)
def test_a_rank_that_cannot_meet_the_others_says_why(ended, named):
    result = ended[named]
    lines = [line for line in result.stderr.splitlines() if line.startswith("dsft: ")]
    assert result.returncode == CASES[named][0] and len(lines) == 1 and named in lines[0], result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("missing", ["MASTER_ADDR", "MASTER_PORT"])
def test_variables_of_a_launcher_that_are_missing_are_named(monkeypatch, missing):
    for name, value in (FIRST_OF_TWO | {"MASTER_PORT": "29500"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(missing)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)  # by another test of this process
    with pytest.raises(UserError, match=f"WORLD_SIZE=2 is set but {missing} is not: start dsft through a launcher"):
        distributed.start_ranks()


def test_a_busy_port_is_named_with_the_way_out(tmp_path, busy_port):
    with started(tmp_path, {"MASTER_PORT": str(busy_port)}) as wait:
        result, _ = wait()
    assert result.returncode == EXIT_USER_ERROR and "Traceback" not in result.stderr, result.stderr
    assert f"MASTER_PORT={busy_port}: is in use on" in result.stderr


@pytest.mark.parametrize(
    ("variables", "threads"),
    [
        ({}, 3),
        ({"OMP_NUM_THREADS": "2"}, 2),
        ({"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "none"}, 3),  # torchrun's own 1
        ({"OMP_NUM_THREADS": "1", "ACCELERATE_USE_DEEPSPEED": "true"}, 3),  # accelerate's, over pdsh
        ({"OMP_NUM_THREADS": "1"}, 1),
        ({"SLURM_STEP_ID": "0"}, 6),  # srun has tied it to 6 of 16 cores
    ],
)
def test_the_ranks_of_a_node_share_its_cores_under_every_launcher(monkeypatch, variables, threads):
    before = torch.get_num_threads()
    for name in ("OMP_NUM_THREADS", "LOCAL_SIZE", *distributed.ONE_THREAD_BY_DEFAULT):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in (FIRST_OF_TWO | {"LOCAL_WORLD_SIZE": "2"} | variables).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(distributed, "cpu_count", lambda: 6)
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    try:
        distributed.set_library_variables()
        assert torch.get_num_threads() == int(os.environ["OMP_NUM_THREADS"]) == threads
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("cores", "given", "threads"), [(2, "", 2), (8, "", 4), (2, "3", 4)])
def test_a_single_rank_has_no_more_threads_than_its_container_has_time_for(monkeypatch, cores, given, threads):
    """Unless the environment says how many: torch has read that."""
    before = torch.get_num_threads()
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", given)
    if not given:
        monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(distributed, "cpu_count", lambda: cores)
    try:
        torch.set_num_threads(4)
        distributed.set_library_variables()
        assert torch.get_num_threads() == threads
        assert os.environ.get("OMP_NUM_THREADS", "") == given, "a launch from a notebook would take it for the user's"
    finally:
        torch.set_num_threads(before)


def test_a_first_ctrl_c_lets_a_training_save_and_a_second_one_ends_it(monkeypatch, capfd):
    monkeypatch.setattr(distributed, "_is_asked", False)
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    with distributed.signals_save():
        os.kill(os.getpid(), signal.SIGINT)
        assert distributed.is_asked_to_save() and capfd.readouterr().err.count("dsft: Ctrl-C: saves and exits") == 1
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_ignored_signal_stays_ignored(monkeypatch, number):
    monkeypatch.setattr(distributed, "_is_asked", False)
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    before = signal.signal(number, signal.SIG_IGN)  # of a script's `trap "" TERM`, or its background jobs
    try:
        with distributed.signals_save():
            os.kill(os.getpid(), number)
            assert not distributed.is_asked_to_save()
    finally:
        signal.signal(number, before)


def test_in_a_notebook_ctrl_c_stays_what_it_is(monkeypatch):
    monkeypatch.setattr(distributed, "_is_asked", False)
    monkeypatch.setitem(sys.modules, "ipykernel", None)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    try:
        with distributed.signals_save(), pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


def test_ctrl_c_is_one_line(capsys, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)

    @ends_with_clear_errors
    def main() -> None:
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == EXIT_INTERRUPTED and capsys.readouterr().err == "dsft: interrupted (Ctrl-C)\n"


@pytest.mark.parametrize(("number", "path"), [(errno.EACCES, "run/options.yaml"), (errno.EROFS, "run")])
def test_a_file_of_another_user_is_one_line(capsys, monkeypatch, number, path):
    monkeypatch.delenv("RANK", raising=False)

    @ends_with_clear_errors
    def main() -> None:
        raise OSError(number, os.strerror(number), path)

    with pytest.raises(SystemExit) as ended:
        main()
    line = f"dsft: error: {path}: {os.strerror(number)}; choose another path\n"
    assert ended.value.code == EXIT_USER_ERROR and capsys.readouterr().err == line


class Started(Exception):
    """Raised in the place of the rendezvous, with its options."""


@pytest.mark.parametrize("entry", ["train", "eval_ppl"])
@pytest.mark.parametrize("name", ["load_timeout", "step_timeout"])
def test_a_collective_lasts_as_long_as_the_watchdog_lets_a_phase_last(entry, name, monkeypatch):
    """Else torch ends a step that step_timeout allows, where one rank takes long for it."""

    def start_ranks(**options):
        raise Started(options)

    module = importlib.import_module(f"dsft.{entry}")
    for function in ("check_before_rendezvous", "set_up_screen"):
        monkeypatch.setattr(module, function, lambda *_: None)
    monkeypatch.setattr(distributed, "listen_for_signals", lambda: None)
    monkeypatch.setattr(distributed, "start_ranks", start_ranks)
    with pytest.raises(Started) as started:
        module.main(["--model", "m", "--data", "d", f"--{name}", "7200"])
    assert started.value.args[0]["timeout_seconds"] >= 7200
