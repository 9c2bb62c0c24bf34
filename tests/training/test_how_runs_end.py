"""However a run ends, run.json and the report say so: errors before training, killed ranks, disks of one node alone."""

import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from conftest import flags, grid, needed_cases
from ranks import run_entry, started_entry
from tiny import write_jsonl, write_texts

from dsft.run_page.page import read_runs

pytestmark = pytest.mark.launch


def end_of(folder: Path, *, seconds: float = 0.0) -> tuple[str, str]:
    """What the report shows as the status, and the error; a run that seems killed is given time for its watchdog to
    record the cause.
    """
    until = time.monotonic() + seconds
    while True:
        [run] = read_runs([str(folder)])
        if run.status != "killed" or time.monotonic() >= until:
            return run.status, run.facts["error"] or ""
        time.sleep(0.1)


@pytest.fixture(scope="module")
def ended(request, options, tmp_path_factory):
    """Name -> (the folder of a run that has ended so, its words, its exit code). All at once, for they wait most of the
    time.
    """
    needed = needed_cases(request)
    cases = {}
    for rank in ("0", "1", "all"):
        cases[f"killed, {rank}"] = ({"lost_timeout": 10, "logging_steps": 1}, rank, "killed")
    cases["killed while loading"] = ({}, "1", "killed while loading")
    runs, words = {}, {}
    with ExitStack() as stack:
        for name in sorted(needed):
            folder = tmp_path_factory.mktemp("ended")
            module, world, environment = "workers.failing_rank", 2, {}
            if name in cases:
                changes, rank, fault = cases[name]
                environment = {"FAILING_RANK": rank, "FAILING_PHASE": fault}
                words[name] = options(folder / "run", **changes)
            elif name == "error on a disk of its own":
                for rank in "01":
                    (folder / f"node-{rank}").mkdir()
                environment = {"FAILING_RANK": "1", "FAILING_PHASE": "error", "NODE_FOLDERS": "1"}
                words[name] = options(Path("run"), lost_timeout=10, save_strategy="no")
            else:
                # Past the first ones, which are read before the ranks meet.
                data = write_jsonl(folder / "data.jsonl", [{"text": "a"}] * 3000 + [{"text": 3}])
                module, world = "dsft.train", int(name.removeprefix("bad data, "))
                words[name] = options(folder / "run", data=str(data))
            start = started_entry(module, flags(words[name]), world=world, folder=folder, **environment)
            runs[name] = folder, stack.enter_context(start)
        return {name: (folder, flags(words[name]), wait()[0].returncode) for name, (folder, wait) in runs.items()}


@pytest.mark.cases("bad data, {world}")
@pytest.mark.parametrize("world", [1, 2])
def test_bad_data_is_a_failed_run_that_the_same_command_starts_again(ended, world):
    tmp_path, words, code = ended[f"bad data, {world}"]
    assert code == 2
    folder = tmp_path / "run"
    status, error = end_of(folder)
    assert status == "failed" and "data.jsonl" in error
    write_texts(tmp_path / "data.jsonl", 60)
    again = run_entry("dsft.train", words, world=world)
    assert again.returncode == 0, again.stderr
    assert end_of(folder) == ("done", "")
    refused = run_entry("dsft.train", words)
    assert refused.returncode == 2 and "contains another run" in refused.stderr


@pytest.mark.cases("killed, {rank}")
@pytest.mark.parametrize("rank", grid(["0", "1", "all"], quick=["all"]))
def test_a_killed_run_is_shown_as_one(ended, rank):
    run = ended[f"killed, {rank}"][0] / "run"
    if rank == "all":  # nobody is left to write
        assert end_of(run) == ("killed", "")
    else:
        status, error = end_of(run, seconds=60)
        assert status == "failed" and error.startswith(f"rank {rank} on ")


@pytest.mark.cases("killed while loading")
def test_a_run_that_is_killed_while_it_loads_is_shown_as_one(ended):
    status, error = end_of(ended["killed while loading"][0] / "run", seconds=60)
    assert status == "failed" and error.startswith("rank 1 on ") and "was killed from outside" in error


@pytest.mark.cases("error on a disk of its own")
def test_the_error_of_a_rank_on_a_disk_of_its_own_is_recorded_on_that_of_rank_0(ended):
    tmp_path = ended["error on a disk of its own"][0]
    assert not (tmp_path / "node-1" / "run" / "run.json").exists()
    status, error = end_of(tmp_path / "node-0" / "run", seconds=60)
    assert status == "failed" and error.startswith("rank 1 on ") and "this GPU has had enough" in error
