"""The option `async_save`: checkpoints are written of copies while training goes on, and are complete or not there."""

import time
from pathlib import Path

import pytest
import torch
from conftest import grid, read_json
from ranks import on_ranks, train_all, trained
from safetensors.torch import load_file

from dsft.checkpoints.manifest import checkpoints, clean_up, integrity_errors
from dsft.checkpoints.save import StagedSave
from dsft.errors import Unsaved

STEPS = 8
RUNS = {
    "2, full": {"zero": "2"},
    "3, full": {"zero": "3"},
    "2, lora": {"zero": "2", "method": "lora"},
    "3, lora": {"zero": "3", "method": "lora"},
}
QUICK = ("2, lora", "3, full")


def _slowly(cases: list[dict], seconds: float) -> list[list[int]]:
    """Train each; the steps that began while this rank still wrote. Each file takes so long at least."""
    from dsft.training.trainer import PerplexityTrainer

    steps, write, train_step = [], StagedSave.attempt, PerplexityTrainer.training_step

    def slow(save: StagedSave, function) -> None:
        if save.is_writing:
            time.sleep(seconds)
        write(save, function)

    def noting(trainer, *args):
        if trainer._unpublished is not None and trainer._unpublished[0].is_writing:
            steps[-1].append(trainer.state.global_step)
        return train_step(trainer, *args)

    StagedSave.attempt, PerplexityTrainer.training_step = slow, noting
    try:
        for case in cases:
            steps.append([])
            trained(case)
    finally:
        StagedSave.attempt, PerplexityTrainer.training_step = write, train_step
    return steps


def losses(run: Path) -> list[float]:
    return [entry["loss"] for entry in read_json(run / "run.json")["results"]["log"] if "loss" in entry]


@pytest.fixture(scope="module")
def case(options):
    def make(folder: Path, **changes) -> dict:
        words = {"max_steps": STEPS, "logging_steps": 1, "save_strategy": "steps", "save_steps": 3}
        return options(folder, **words | {"save_total_limit": 9, "async_save": True} | changes)

    return make


def tensors_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    (file,) = checkpoint.glob("*.safetensors")
    shards = {
        f"{path.name} {key}": value
        for path in checkpoint.glob("global_step*/*optim_states.pt")
        for key, value in torch.utils._pytree.tree_leaves_with_path(torch.load(path, weights_only=False))
        if isinstance(value, torch.Tensor)
    }
    return load_file(file) | shards


@pytest.mark.launch
@pytest.mark.parametrize("is_quick", grid([True, False], [True]))
def test_a_checkpoint_that_is_written_later_holds_the_step_it_is_of(case, tmp_path, is_quick):
    names = [name for name in RUNS if (name in QUICK) == is_quick]
    plain = [case(tmp_path / f"{name}, plain", **RUNS[name], async_save=False) for name in names]
    log = train_all(2, plain, tmp_path / "log")
    steps = on_ranks(2, _slowly, [case(tmp_path / name, **RUNS[name]) for name in names], 0.3, log=tmp_path / "later")
    for number, name in enumerate(names):
        run, other = tmp_path / name, tmp_path / f"{name}, plain"
        assert any(each[number] for each in steps), "training went on"
        assert losses(run) == losses(other), log[-2000:]
        assert [folder.name for folder in checkpoints(run)] == ["checkpoint-3", "checkpoint-6", "checkpoint-8"]
        for checkpoint in checkpoints(run):
            assert integrity_errors(checkpoint, hashes="all") == []
            there, expected = tensors_of(checkpoint), tensors_of(other / checkpoint.name)
            assert there.keys() == expected.keys()
            assert all(torch.equal(there[key], expected[key]) for key in there), checkpoint
        assert read_json(run / "run.json")["results"]["saves"]["number"] == 3


KILLS = [("3, full", 0.0), ("3, full", 0.4), ("2, lora", 0.2), ("3, full", 0.8), ("2, full", 0.3), ("3, lora", 0.5)]


@pytest.mark.launch
@pytest.mark.parametrize(("name", "seconds"), grid(KILLS, KILLS[1:2]))
def test_kills_while_a_checkpoint_is_written_lose_nothing_before_it(case, tmp_path, name, seconds):
    """Ranks are killed some seconds after the second save began; the resume goes on as an uninterrupted run does."""
    run, begun = tmp_path / "run", []

    def is_time() -> bool:
        if (run / ".saving" / "checkpoint-6").is_dir() and not begun:
            begun.append(time.monotonic())
        return bool(begun) and time.monotonic() > begun[0] + seconds

    train_all(2, [case(tmp_path / "whole", **RUNS[name])], tmp_path / "log")
    assert on_ranks(2, _slowly, [case(run, **RUNS[name])], 0.3, kill_when=is_time, log=tmp_path / "killed") is None
    clean_up(run)
    left = [folder.name for folder in checkpoints(run)]
    assert left[0] == "checkpoint-3" and all(integrity_errors(each, hashes="all") == [] for each in checkpoints(run))
    log = train_all(2, [case(run, **RUNS[name], resume_from_checkpoint="auto")], tmp_path / "resumed")
    done = STEPS - int(left[-1].rpartition("-")[2])
    assert f"resuming from {run}/{left[-1]}" in log
    assert losses(run)[-done:] == losses(tmp_path / "whole")[-done:]
    whole, resumed = (load_file(*(each / "final").glob("*.safetensors")) for each in (tmp_path / "whole", run))
    assert all(torch.equal(whole[key], resumed[key]) for key in whole)


def _failing(options: dict) -> str:
    from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

    from dsft.runtime import distributed

    write = TorchCheckpointEngine.save

    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    if distributed.rank() == 1:
        TorchCheckpointEngine.save = fail
    try:
        trained(options)
    except Unsaved as error:
        return str(error)
    finally:
        TorchCheckpointEngine.save = write
    return "done"


@pytest.mark.launch
def test_an_error_of_the_writer_is_that_of_a_failed_save(case, tmp_path):
    said = on_ranks(2, _failing, case(tmp_path / "run", zero="2", max_steps=4), log=tmp_path / "log")
    assert said[0] == said[1] and "2 checkpoints on the way not: checkpoint-3: rank 1: " in said[0], said
    assert checkpoints(tmp_path / "run") == [] and (tmp_path / "run" / "final").is_dir()
    assert not (tmp_path / "run" / ".saving").exists()
