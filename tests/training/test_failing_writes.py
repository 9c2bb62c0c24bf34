"""A disk that fails at any write of a save ends the run with its cause; earlier checkpoints are complete."""

import errno
import re
from pathlib import Path

import failing_writes
import pytest
from conftest import flags, grid, read_json
from failing_writes import Disk
from ranks import on_ranks, run_entry, train

from dsft.checkpoints.manifest import checkpoints, clean_up, integrity_errors
from dsft.errors import Unsaved

ERRORS = {"full": errno.ENOSPC, "broken": errno.EIO, "read-only": errno.EROFS}
STAGES = ("0", "1", "2", "3")


def fail_each_write_of_a_save(options: dict, error: int, every: int) -> list[tuple[str, str]]:
    """Trains, and lets each write of a save fail in turn, or one of `every` few: (failed call, outcome) of each."""
    from dsft.training.trainer import PerplexityTrainer

    disk, save, seen = Disk("/.saving"), PerplexityTrainer._save_checkpoint, []

    def tried(trainer, number: int, *args) -> int:
        disk.fail(number, error)
        outcome = "saved"
        try:
            save(trainer, *args)
        except Unsaved as unsaved:
            outcome = str(unsaved)
        counted, failed = disk.heal()
        if number:
            seen.append((failed, outcome))
            clean_up(options["output_dir"])  # as the next start does
            assert integrity_errors(Path(options["output_dir"]) / "checkpoint-2", hash_tensors=True) == [], failed
        return counted

    def save_often(trainer, *args) -> None:
        save(trainer, *args)
        if trainer.state.global_step == 2:
            for number in range(1, tried(trainer, 0, *args) + 1, every):
                tried(trainer, number, *args)

    PerplexityTrainer._save_checkpoint = save_often
    try:
        train(options)
    finally:
        PerplexityTrainer._save_checkpoint = save
    return seen


@pytest.mark.launch
@pytest.mark.skipif(not failing_writes.library(), reason="the failing disk is compiled with gcc")
@pytest.mark.parametrize(
    ("zero", "fault", "every"),
    grid([(zero, fault, 1) for zero in STAGES for fault in ERRORS] + [("3", "full", 7)], quick=[("3", "full", 7)]),
)
def test_every_write_of_a_save_may_fail(options, tmp_path, zero, fault, every):
    words = options(tmp_path / "run", zero=zero, max_steps=3, save_strategy="steps", save_steps=2)
    (seen,) = on_ranks(1, fail_each_write_of_a_save, words, ERRORS[fault], every, log=tmp_path / "log")
    failed = [(call, outcome) for call, outcome in seen if call]
    assert len(failed) > 5
    # Folders are made by several, a copy goes on without the kernel's, an empty `.saving` goes at the next save.
    needed = [each for each in failed if not each[0].startswith(("mkdir", "sendfile")) and each[0][-8:] != "/.saving"]
    assert all(outcome.startswith("checkpoint-2 could not be saved") for _, outcome in needed), needed
    assert Unsaved.exit_code == 4
    assert integrity_errors(tmp_path / "run" / "final", hash_tensors=True) == []


@pytest.mark.launch
def test_a_save_that_fails_on_one_rank_ends_all_with_its_cause_and_the_run_resumes(options, tmp_path):
    words = options(tmp_path / "run", zero="3", max_steps=4, save_strategy="steps", save_steps=1, lost_timeout=10)
    codes: list[int] = []
    result = run_entry("workers.failing_save", flags(words), world=2, codes=codes)
    assert codes[1] == 4 and codes[0] != 0, result.stderr
    assert re.search(r"rank 1 on \S+: checkpoint-2 could not be saved: .*No space left", result.stderr), result.stderr
    assert [folder.name for folder in checkpoints(tmp_path / "run")] == ["checkpoint-1"]
    assert integrity_errors(tmp_path / "run" / "checkpoint-1", hash_tensors=True) == []
    again = run_entry("dsft.train", flags(words | {"resume_from_checkpoint": "auto"}), world=2)
    assert again.returncode == 0, again.stderr
    assert read_json(tmp_path / "run" / "run.json")["results"]["steps"] == 4
    assert not (tmp_path / "run" / ".saving").exists()
