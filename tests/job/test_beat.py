"""A job of two real ranks ends after each fault, with one message that names the rank, and nothing outlives it."""

import os
import re
import socket
import subprocess
import sys
import time
from contextlib import ExitStack

import psutil
import pytest
from conftest import ROOT, grid
from ranks import started_entry

from dsft.job.beat import Cause, is_consequence, record_failure
from dsft.runtime.distributed import free_port
from dsft.units import write_json

RANK = ROOT / "tests/workers/watched_rank.py"
FAULTS = {
    "none": "",
    "paused": "",
    "exception": "rank 1 on HOST failed: RuntimeError: this GPU has had enough",
    "user-error": "data=/x: not on this node",
    "same-error": "data=/x: not there",
    "killed 1": "rank 1 on HOST exited without an error of its own",
    "killed 1 under torchrun": "",  # its agent, which ends the other rank at once, names the rank and its exit code
    "killed 0": "rank 0 on HOST exited without an error of its own",
    "stopped 1": "rank 1 on HOST gave no heartbeat for 5 s",
    "stopped 0": "rank 0 on HOST was stopped",
    "holds the interpreter": "rank 1 on HOST gave no heartbeat for 5 s",
    "stalled 1": "rank 1 on HOST made no progress",
    "stalled 0": "rank 0 on HOST made no progress",
    "launcher": "torchrun's agent at 127.0.0.1 exited or was killed",
}
"""Fault -> what the message names."""
QUICK = ("none", "exception", "user-error", "same-error", "killed 1", "killed 0")
LAUNCHED = ("launcher", "killed 1 under torchrun")
"""By torchrun, which holds the store; the others are forked, and rank 0 holds it."""


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """Fault -> (exit code, screen, processes left, logs) of a job of two ranks; all at once."""
    folders = {fault: tmp_path_factory.mktemp("job") for fault in FAULTS}
    results = {}
    with ExitStack() as stack:
        forked, launched = {}, {}
        for fault, folder in folders.items():
            if fault not in LAUNCHED:
                forked[fault] = stack.enter_context(started_entry(str(RANK), [fault, folder], world=2))
                continue
            words = ["--nproc_per_node", "2", "--master_port", free_port(), RANK, fault, folder]
            launched[fault] = subprocess.Popen(
                [sys.executable, "-m", "torch.distributed.run", *map(str, words)],
                env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        for fault, folder in folders.items():
            if fault in launched:
                screen, _ = launched[fault].communicate(timeout=600)
                code = launched[fault].returncode
            else:
                result, _ = forked[fault]()
                code, screen = result.returncode, result.stdout + result.stderr
            pids = [int(path.read_text()) for path in folder.glob("pid_*")]
            assert len(pids) == 2, screen
            until = time.monotonic() + 60
            while time.monotonic() < until and any(map(psutil.pid_exists, pids)):
                time.sleep(0.2)
            logs = "".join(path.read_text() for path in folder.glob("*.log"))
            results[fault] = (code, screen, [pid for pid in pids if psutil.pid_exists(pid)], logs)
    return results


@pytest.mark.launch
@pytest.mark.parametrize("fault", grid(FAULTS, quick=QUICK))
def test_the_rank_that_failed_is_named_first_and_no_rank_outlives_it(ended, fault):
    code, screen, left, _ = ended[fault]
    assert left == []
    named = FAULTS[fault].replace("HOST", socket.gethostname())
    if "torchrun" in fault:
        assert code != 0 and re.search(r"rank +: 1 .*\n +exitcode +: -9", screen), screen
    elif named:
        lines = [line for line in screen.splitlines() if "dsft: error:" in line]
        assert code != 0 and lines and named in lines[0], screen
        # A rank may see the end of the one that was named before it is ended itself, and name that too.
        assert len(lines) <= 2, screen
    else:
        assert code == 0 and "error" not in screen, screen


@pytest.mark.launch
def test_a_stall_leaves_the_stacks_of_all_ranks_in_their_logs(ended):
    logs = ended["stalled 1"][3]
    assert "in wait_for_nothing" in logs and "in barrier" in logs


@pytest.mark.parametrize(
    ("error", "follows"),
    [
        ("RuntimeError: [../gloo/transport/tcp/pair.cc:537] Connection closed by peer [10.0.0.2]:37", True),
        ("torch.distributed.DistBackendError: NCCL error", True),
        ("ValueError: rows of shard 7 cannot be read", False),
    ],
)
def test_an_error_of_a_connection_follows_from_another_ranks_failure(error, follows):
    assert is_consequence(f"Traceback ...\n{error}\n") == follows


def test_a_cause_is_recorded_in_a_run_that_has_not_ended(tmp_path):
    cause = Cause(rank=3, host="node-1", text="gave no heartbeat", lines=["a", "b"])
    assert Cause.from_json(cause.to_json()) == cause
    file = tmp_path / "run.json"
    record_failure(file, cause.sentence())
    assert not file.exists()
    for status, expected in (("running", "failed"), ("done", "done")):
        write_json(file, {"status": status})
        record_failure(file, cause.sentence())
        assert f'"{expected}"' in file.read_text()
