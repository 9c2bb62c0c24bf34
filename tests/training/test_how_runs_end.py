"""However a run ends, run.json and the report say so: errors before training, killed ranks, disks of one node alone."""

import multiprocessing
import os
import signal
import subprocess
import time
from contextlib import ExitStack, suppress
from itertools import product
from pathlib import Path

import psutil
import pytest
from conftest import ROOT, flags, grid, launch_words, needed_cases
from ranks import run_entry, started_entry
from tiny import write_jsonl, write_texts

from dsft.report.page import read_runs

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
    assert refused.returncode == 2 and "holds another run" in refused.stderr


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


def processes_of(job: Path) -> list[psutil.Process]:
    """Launchers, ranks, and those beside them, wherever they stand: all have the variable."""
    members = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("JOB_OF_TEST") == str(job):
                members.append(process)
    return members


def is_alive(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


@pytest.mark.parametrize(
    ("launcher", "phase"),
    grid(
        product(("ranks", "deepspeed", "torchrun", "dsft"), ("loading", "training")),
        quick=[("ranks", "training")],
    ),
)
def test_a_launcher_that_is_killed_with_its_process_group_leaves_nothing(options, tmp_path, launcher, phase):
    """deepspeed's ranks are killed with it, as those that are forked here, those of torchrun and `dsft train` are in
    groups of their own.
    """
    words = options(tmp_path / "run", max_steps=10_000, lost_timeout=10, logging_steps=1)
    temporary, log, metrics = tmp_path / "tmp", tmp_path / "log", tmp_path / "run" / "metrics.jsonl"
    temporary.mkdir()
    variables = {"TMPDIR": str(temporary)}
    mine = variables | {"JOB_OF_TEST": str(tmp_path)}
    begun = {
        "loading": (tmp_path / "run" / "run.json").exists,
        "training": lambda: metrics.exists() and '"step": 2' in metrics.read_text(),
    }
    with ExitStack() as stack:
        if launcher == "ranks":
            stack.enter_context(started_entry("dsft.train", flags(words), world=2, folder=ROOT, **mine))
            # Their variables are not to be seen from outside: those of a forked process are of its beginning.
            started = [psutil.Process(rank.pid) for rank in multiprocessing.active_children()]
            assert len(started) == 2
        else:
            start = ["dsft", "train", "--num_gpus", "2"] if launcher == "dsft" else launch_words(launcher, "train")
            process = subprocess.Popen(
                [*start, *flags(words)],
                cwd=ROOT,
                env=os.environ | mine,
                stdout=log.open("w"),
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            started = [psutil.Process(process.pid)]
        try:
            until = time.monotonic() + 600
            while not begun[phase]() and all(map(is_alive, started)) and time.monotonic() < until:
                time.sleep(0.2)
            assert all(map(is_alive, started)), log.read_text()[-3000:] if log.exists() else ""
            for each in started:
                each.kill() if launcher == "ranks" else os.killpg(each.pid, signal.SIGKILL)
            until = time.monotonic() + 120
            while (left := [*filter(is_alive, started), *processes_of(tmp_path)]) and time.monotonic() < until:
                time.sleep(0.2)
            assert not left, log.read_text()[-3000:] if log.exists() else left
        finally:
            for each in processes_of(tmp_path):
                with suppress(psutil.Error):
                    each.kill()
    status, error = end_of(tmp_path / "run")
    # Ranks that live on are asked to end, and save where they can.
    assert status in ("failed", "preempted", "killed"), (status, error)
    again = run_entry("dsft.train", flags(words | {"max_steps": 1, "overwrite": True}), folder=ROOT, **variables)
    assert again.returncode == 0, again.stderr[-3000:]
    # torchrun leaves a folder of a few bytes after every start, whatever its end.
    assert [path for path in temporary.iterdir() if not path.name.startswith("torchelastic_")] == []
