"""What a training leaves on the disk: a tied head once, and a final model or the way to one where the disk is full."""

import os
import subprocess
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from ranks import on_ranks, train, train_all
from tiny import write_model

from dsft.checkpoints.manifest import checkpoints, integrity_errors
from dsft.checkpoints.tensor_sources import SafetensorsFiles
from dsft.config.options import TrainConfig
from dsft.config.reader import make_config
from dsft.errors import EXIT_CODES, Unsaved
from dsft.run_setup.room import check_room, num_checkpoints
from dsft.runtime import distributed

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system, which takes root")


@contextmanager
def small_disk(folder: Path, size: str):
    folder.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


@pytest.mark.launch
def test_a_tied_head_is_written_once_in_every_stage(options, tmp_path):
    write_model(tmp_path / "tied", "gemma3")
    stages = ("0", "2", "3")
    words = {"model": str(tmp_path / "tied"), "save_strategy": "steps", "save_steps": 2}
    log = train_all(1, [options(tmp_path / stage, zero=stage, **words) for stage in stages], tmp_path / "log")
    once = SafetensorsFiles(tmp_path / "tied").shapes
    for stage in stages:
        for folder in ("final", "checkpoint-2"):
            assert SafetensorsFiles(tmp_path / stage / folder).shapes == once, log[-3000:]


def fill(folder: Path) -> None:
    with (folder / "filler").open("wb", buffering=0) as file, pytest.raises(OSError, match="space"):
        while True:
            file.write(bytes(1 << 16))


def train_beside_a_neighbour(options: dict, fills_before: str, is_greedy: bool) -> str:
    """Train while a neighbour fills the disk before `fills_before`; a greedy one takes the reserved room too."""
    from dsft.training.saving_trainer import SavingTrainer

    original, folder = getattr(SavingTrainer, fills_before), Path(options["output_dir"])

    def fill_first(trainer, *args, **kwargs):
        if distributed.rank() == 0 and not (folder.parent / "filler").exists() and checkpoints(folder):
            if is_greedy:
                (folder / ".room_for_final").unlink(missing_ok=True)
            fill(folder.parent)
        distributed.wait_for_all()
        return original(trainer, *args, **kwargs)

    setattr(SavingTrainer, fills_before, fill_first)
    try:
        train(options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        setattr(SavingTrainer, fills_before, original)
    return "done"


def train_on_full_disks(cases: list) -> list[str]:
    return [train_beside_a_neighbour(*case) for case in cases]


@needs_root
@pytest.mark.launch
def test_a_disk_that_fills_costs_no_training(options, tmp_path):
    """The room of the final model is held from the start; where even that is taken, the command that exports the last
    checkpoint is said. Neither a traceback nor a half-written folder is left.
    """
    words = {"zero": "3", "max_steps": 6, "save_strategy": "steps", "save_steps": 2}
    with ExitStack() as disks:
        held, lost, without = (
            disks.enter_context(small_disk(tmp_path / name, "6m")) / "run" for name in ("held", "lost", "without")
        )
        cases = [
            (options(held, **words), "_save_checkpoint", False),
            (options(lost, **words), "save_final", True),
            (options(without, **words | {"save_strategy": "no"}), "save_final", True),
        ]
        cases[2][0]["max_steps"] = 1
        first, second = on_ranks(2, train_on_full_disks, cases, log=tmp_path / "log")
        assert first == second
        log = (tmp_path / "log").read_text()
        assert "could not be saved" in log and "training continues" in log and "GB are free" in log
        assert (
            EXIT_CODES[Unsaved] == 4
            and "Unsaved" in first[0]
            and "checkpoint-4" in first[0]
            and "is written" in first[0]
        ), first[0] + log[-3000:]
        assert (held / "final" / "model.safetensors").is_file() and integrity_errors(held / "final", hashes=True) == []
        assert [folder.name for folder in checkpoints(held)] == ["checkpoint-2"]
        assert "Unsaved" in first[1] and f"dsft export {lost}/checkpoint-6 {lost}/final" in first[1], first[1]
        assert integrity_errors(lost / "checkpoint-6", hashes=True) == []
        assert first[2] == "done"
        for run in (held, lost, without):
            assert not {".saving", ".removed", ".room_for_final"} & {path.name for path in run.iterdir()}
        assert not (lost / "final").exists()


@pytest.mark.parametrize(
    ("options", "count"),
    [
        ({"save_strategy": "no"}, 0),
        ({"save_strategy": "no", "save_minutes": 5}, 3),
        ({}, 3),
        ({"max_steps": 100}, 1),
        ({"max_steps": 1000, "save_steps": 1}, 3),
        ({"max_steps": 100, "save_minutes": 5}, 3),
        ({"save_steps": 0.5, "save_total_limit": 10}, 2),
        ({"save_strategy": "epoch", "num_train_epochs": 2, "save_total_limit": 10}, 2),
        ({"save_total_limit": 4}, 5),
    ],
)
def test_the_checkpoints_that_lie_on_the_disk_at_once_are_counted(options, count):
    problems: list[str] = []
    config = make_config(TrainConfig, {"model": "m", "data": ["d"], "output_dir": "out"} | options, problems)
    assert problems == [] and num_checkpoints(config) == count


@needs_root
def test_a_disk_without_room_for_model_and_checkpoints_is_refused_before_training(tmp_path):
    config = make_config(
        TrainConfig, {"model": "m", "data": ["d"], "dtype": "float32", "output_dir": str(tmp_path / "run")}, []
    )
    with small_disk(tmp_path, "50m"):
        assert check_room(config, 900_000) == []  # 4 B final, 3 checkpoints of 16 B: 46.8 MB
        (problem,) = check_room(config, 1_100_000)
        assert "3 checkpoints" in problem and "save_total_limit" in problem
