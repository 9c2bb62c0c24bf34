"""However a run ends, run.json and the report say so: errors before training, killed ranks, disks of one node alone."""

import time
from pathlib import Path

import pytest
from conftest import flags, grid
from ranks import run_entry
from tiny import write_jsonl, write_texts

from dsft.report.runs import read_report

pytestmark = pytest.mark.launch


def end_of(folder: Path, *, seconds: float = 0.0) -> tuple[str, str]:
    """What the report shows as the status, and the error; a run that seems killed is given time for its watchdog to
    record the cause.
    """
    until = time.monotonic() + seconds
    while True:
        [run] = read_report([str(folder)]).runs
        if run.status != "killed" or time.monotonic() >= until:
            return run.status, run.facts["error"] or ""
        time.sleep(0.1)


@pytest.mark.parametrize("world", [1, 2])
def test_bad_data_is_a_failed_run_that_the_same_command_starts_again(options, tmp_path, world):
    rows = [{"text": "a"}] * 3000 + [{"text": 3}]  # past the first ones, which are read before the ranks meet
    data, folder = write_jsonl(tmp_path / "data.jsonl", rows), tmp_path / "run"
    words = flags(options(folder, data=str(data)))
    assert run_entry("dsft.train", words, world=world).returncode == 2
    status, error = end_of(folder)
    assert status == "failed" and "data.jsonl" in error
    write_texts(data, 60)
    again = run_entry("dsft.train", words, world=world)
    assert again.returncode == 0, again.stderr
    assert end_of(folder) == ("done", "")
    refused = run_entry("dsft.train", words)
    assert refused.returncode == 2 and "holds another run" in refused.stderr


@pytest.mark.parametrize("fault", ["killed", "killed with its watchdog"])
@pytest.mark.parametrize("rank", grid(["0", "1", "all"], quick=["all"]))
def test_a_killed_run_is_shown_as_one(options, tmp_path, fault, rank):
    words = options(tmp_path / "run", lost_timeout=10, logging_steps=1)
    environment = {"FAILING_RANK": rank, "FAILING_PHASE": fault}
    run_entry("workers.failing_rank", flags(words), world=2, folder=tmp_path, **environment)
    if fault == "killed":
        status, error = end_of(tmp_path / "run", seconds=60)
        assert status == "failed" and "was killed from outside" in error
        assert error.startswith("rank " if rank == "all" else f"rank {rank} on ")
    elif rank == "all":  # nobody is left to write
        assert end_of(tmp_path / "run") == ("killed", "")
    else:  # the other rank writes what it saw of it
        assert end_of(tmp_path / "run", seconds=60)[0] == "failed"


def test_a_run_that_is_killed_while_it_loads_is_shown_as_one(options, tmp_path):
    environment = {"FAILING_RANK": "1", "FAILING_PHASE": "killed while loading"}
    run_entry("workers.failing_rank", flags(options(tmp_path / "run")), world=2, folder=tmp_path, **environment)
    status, error = end_of(tmp_path / "run", seconds=60)
    assert status == "failed" and error.startswith("rank 1 on ") and "was killed from outside" in error


def test_the_error_of_a_rank_on_a_disk_of_its_own_is_recorded_on_that_of_rank_0(options, tmp_path):
    for rank in "01":
        (tmp_path / f"node-{rank}").mkdir()
    words = options(Path("run"), lost_timeout=10, save_strategy="no")
    environment = {"FAILING_RANK": "1", "FAILING_PHASE": "error", "NODE_FOLDERS": "1"}
    run_entry("workers.failing_rank", flags(words), world=2, folder=tmp_path, **environment)
    assert not (tmp_path / "node-1" / "run" / "run.json").exists()
    status, error = end_of(tmp_path / "node-0" / "run", seconds=60)
    assert status == "failed" and error.startswith("rank 1 on ") and "this GPU has had enough" in error
