"""A disk that fails at any write of a save costs that save alone: no rank waits for ever, training continues."""

import errno
from pathlib import Path

import failing_writes
import pytest
from conftest import grid
from failing_writes import Disk
from ranks import on_ranks, train

from dsft.checkpoints.manifest import integrity_errors
from dsft.errors import EXIT_CODES, Unsaved
from dsft.runtime import distributed

ERRORS = {"full": errno.ENOSPC, "broken": errno.EIO, "read-only": errno.EROFS}
STAGES = ("0", "1", "2", "3")


def fail_each_write_of_a_save(options: dict, faults: list[int], every: int) -> dict:
    """Train, and let each write of a save of each rank fail in turn; or one of `every` few.

    Returns the outcome, and (rank, failed call, whether the save stands) of each.
    """
    from dsft.training.trainer import PerplexityTrainer

    disk, save, seen = Disk("/.saving"), PerplexityTrainer._save_checkpoint, []

    def tried(trainer, rank: int, number: int, error: int, *args) -> int:
        before = trainer.saves.number
        disk.fail(number if distributed.rank() == rank else 0, error)
        save(trainer, *args)
        counted, failed = disk.heal()
        counted, failed = distributed.from_all([(counted, failed)])[rank]
        if number:
            seen.append((rank, failed, trainer.saves.number > before))
            checkpoint = Path(options["output_dir"]) / "checkpoint-2"
            assert integrity_errors(checkpoint, hashes="none" if distributed.rank() else "all") == [], failed
        return counted

    def save_often(trainer, *args) -> None:
        save(trainer, *args)
        if trainer.state.global_step != 2:
            return
        for rank in range(distributed.world_size()):
            for number in range(1, tried(trainer, rank, 0, 0, *args) + 1, every):
                tried(trainer, rank, number, faults[number % len(faults)], *args)

    PerplexityTrainer._save_checkpoint = save_often
    try:
        train(options)
        outcome = "done"
    except Exception as error:
        outcome = f"{type(error).__name__}: {error}"
    finally:
        PerplexityTrainer._save_checkpoint = save
    return {"outcome": outcome, "seen": seen}


@pytest.mark.launch
@pytest.mark.skipif(not failing_writes.library(), reason="the failing disk is compiled with gcc")
@pytest.mark.parametrize(
    ("zero", "faults", "every"),
    grid(
        [*((zero, name, 1) for zero in STAGES for name in ERRORS), ("2", "mixed", 8), ("3", "mixed", 7)],
        quick=[("3", "mixed", 7)],
    ),
)
def test_every_write_of_a_save_may_fail(options, tmp_path, zero, faults, every):
    words = {"zero": zero, "max_steps": 3, "save_strategy": "steps", "save_steps": 2}
    errors = list(ERRORS.values()) if faults == "mixed" else [ERRORS[faults]]
    log = tmp_path / "log"
    first, second = on_ranks(2, fail_each_write_of_a_save, options(tmp_path / "run", **words), errors, every, log=log)
    assert first == second
    assert first["outcome"].startswith("Unsaved") and EXIT_CODES[Unsaved] == 4, first["outcome"]
    assert "training continues" in log.read_text()
    of_rank = {rank: [failed for at, failed, _ in first["seen"] if at == rank and failed] for rank in (0, 1)}
    names = ["model.safetensors", "trainer_state.json", "latest", "manifest.json", "rng_state_0", "scheduler.pt"]
    for name in (*names, *(["zero_to_fp32.py"] if zero != "0" else [])) if every == 1 else ():
        assert any(name in failed for failed in of_rank[0]), f"no write of {name} failed"
    assert len(of_rank[0]) > 5 and of_rank[1]
    assert "Traceback" not in log.read_text(), "the disk's errors are no faults of the program"
    retried = [failed for _, failed, is_saved in first["seen"] if failed and is_saved]
    # Folders are made by several, a copy goes on without the kernel's, an empty `.saving` goes at the next save.
    needed = [failed for failed in retried if not failed.startswith(("mkdir", "sendfile"))]
    assert all(failed.endswith("/.saving") for failed in needed), "\n".join(needed)
    left = {path.name for path in (tmp_path / "run").iterdir()}
    assert {"checkpoint-2", "final", "run.json"} <= left and not {".saving", ".replaced"} & left
    assert integrity_errors(tmp_path / "run" / "final", hashes="all") == []
