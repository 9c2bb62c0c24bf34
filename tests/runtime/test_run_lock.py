"""Two runs never share a folder; the lock of one that is gone stops nobody."""

import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace

import pytest
from conftest import flags
from ranks import run_entry

from dsft.api import evaluate_perplexity
from dsft.errors import UserError
from dsft.runtime import run_lock
from dsft.runtime.lock_file import Owner
from dsft.runtime.run_lock import LOCK, RunLock, is_held, only_run_in


@pytest.fixture
def other_run(tmp_path):
    """A process that holds the lock of tmp_path/run."""
    script = f"""
import sys, time
from pathlib import Path
from dsft.runtime.run_lock import RunLock
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
    with only_run_in(str(tmp_path / "file")), only_run_in(None):
        pass  # that it is no folder is said by the checks


@pytest.mark.launch
def test_a_live_run_is_neither_joined_nor_overwritten(other_run, options, tmp_path):
    kept = tmp_path / "run" / "checkpoint-2" / "trainer_state.json"
    kept.parent.mkdir()
    kept.write_text("{}")
    for words in ({"overwrite": True}, {"resume_from_checkpoint": "auto"}):
        refused = run_entry("dsft.train", flags(options(tmp_path / "run", **words)), world=2)
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
    monkeypatch.setattr(run_lock, "STALE_SECONDS", 2.0)
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
