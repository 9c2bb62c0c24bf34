"""What a training leaves on the disk: a tied head once, and a final model or the way to one where the disk is full."""

import errno
import importlib.util
import json
import os
import subprocess
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from conftest import grid
from ranks import on_ranks, train, train_all
from safetensors import SafetensorError
from tiny import write_model

from dsft.checkpoints.manifest import checkpoints, files_of, integrity_errors
from dsft.checkpoints.save import Saves, StagedSave
from dsft.config.options import TrainConfig
from dsft.config.reader import make_config
from dsft.errors import EXIT_CODES, Unsaved
from dsft.models.size import measure_model
from dsft.models.weight_files import SafetensorsFiles
from dsft.run_setup.arguments import CheckpointSize, check_room, checkpoint_size
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
    from dsft.training.trainer import PerplexityTrainer

    original, folder = getattr(PerplexityTrainer, fills_before), Path(options["output_dir"])

    def fill_first(trainer, *args, **kwargs):
        if distributed.rank() == 0 and not (folder.parent / "filler").exists() and checkpoints(folder):
            if is_greedy:
                (folder / ".room_for_final").unlink(missing_ok=True)
            fill(folder.parent)
        distributed.wait_for_all()
        return original(trainer, *args, **kwargs)

    setattr(PerplexityTrainer, fills_before, fill_first)
    try:
        train(options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        setattr(PerplexityTrainer, fills_before, original)
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
        assert (held / "final" / "model.safetensors").is_file() and integrity_errors(held / "final", hashes="all") == []
        assert [folder.name for folder in checkpoints(held)] == ["checkpoint-2"]
        assert "Unsaved" in first[1] and f"dsft export {lost}/checkpoint-6 {lost}/final" in first[1], first[1]
        assert integrity_errors(lost / "checkpoint-6", hashes="all") == []
        assert first[2] == "done"
        for run in (held, lost, without):
            assert not {".saving", ".removed", ".room_for_final"} & {path.name for path in run.iterdir()}
        assert not (lost / "final").exists()


@needs_root
def test_a_disk_without_room_for_model_and_checkpoints_is_refused_before_training(tmp_path):
    def problems(num_trainable: int) -> list[str]:
        size = CheckpointSize(weight_bytes=4 * num_trainable, state_bytes=12 * num_trainable, small_bytes=1000, kept=3)
        return check_room(str(tmp_path / "run"), size)

    with small_disk(tmp_path, "50m"):
        assert problems(900_000) == []  # 4 B final, 3 checkpoints of 16 B: 46.8 MB
        (problem,) = problems(1_100_000)
        assert "3 checkpoints" in problem and "save_total_limit" in problem


def train_in_a_folder_of_its_own(folder: Path, cases: list[dict]) -> list[str]:
    """As each of two nodes that share no folder: the same relative output_dir, seen from elsewhere."""
    os.chdir(folder / f"node-{distributed.rank()}")
    outcomes = []
    for options in cases:
        try:
            train(options)
            outcomes.append("done")
        except Exception as error:
            outcomes.append(f"{type(error).__name__}: {error}")
    return outcomes


@pytest.mark.launch
@pytest.mark.parametrize("zero", grid("0123", quick=["3"]))
def test_on_disks_that_nodes_do_not_share_the_final_model_is_saved_and_verified(options, tmp_path, zero):
    for rank in (0, 1):
        (tmp_path / f"node-{rank}").mkdir()
    cases = [
        options(Path("without"), zero=zero),
        options(Path("with"), zero=zero, max_steps=3, save_strategy="steps", save_steps=1),
    ]
    first, second = on_ranks(2, train_in_a_folder_of_its_own, tmp_path, cases, log=tmp_path / "log")
    assert first == second and first[0] == "done", first
    assert first[1].startswith("Unsaved: with/final is written, but 3 checkpoints on the way not"), first[1]
    assert "do all nodes share the output folder?" in first[1]
    for name in ("without", "with"):
        final = tmp_path / "node-0" / name / "final"
        assert integrity_errors(final, hashes="all") == [] and (final / "model.safetensors").is_file()
        assert not (tmp_path / "node-0" / name / ".saving").exists()
        assert {path.name for path in (tmp_path / "node-1" / name).iterdir()} == {"logs"}


UNSUPPORTED = NotImplementedError("this kind of tensor is not supported")


def train_with_saves_that_fail(options: dict, from_step: int, error: Exception) -> tuple[str, int]:
    """(the outcome, the last step), where DeepSpeed's save fails with `error` from a step on."""
    from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

    from dsft.training.trainer import PerplexityTrainer

    save, write, steps = PerplexityTrainer._save_checkpoint, TorchCheckpointEngine.save, []

    def refuse_to_save(*_, **__):
        raise error

    def save_or_fail(trainer, *args) -> None:
        steps.append(trainer.state.global_step)
        if trainer.state.global_step >= from_step and distributed.rank() == 1:
            TorchCheckpointEngine.save = refuse_to_save
        save(trainer, *args)

    PerplexityTrainer._save_checkpoint = save_or_fail
    try:
        train(options)
    except Exception as error:
        return f"{type(error).__name__}: {error}", steps[-1]
    finally:
        PerplexityTrainer._save_checkpoint, TorchCheckpointEngine.save = save, write


@pytest.mark.launch
def test_a_first_checkpoint_that_no_disk_is_to_blame_for_stops_the_run_a_later_one_does_not(options, tmp_path):
    words = {"zero": "2", "max_steps": 3, "save_strategy": "steps", "save_steps": 1}
    (said, step), _ = on_ranks(2, train_with_saves_that_fail, options(tmp_path / "first", **words), 1, UNSUPPORTED)
    assert step == 1 and said.startswith("TrainingStopped: checkpoint-1, the first of this run, could not be saved")
    assert "rank 1: this kind of tensor is not supported" in said
    assert json.loads((tmp_path / "first" / "run.json").read_text())["status"] == "stopped"
    (said, step), _ = on_ranks(2, train_with_saves_that_fail, options(tmp_path / "later", **words), 2, UNSUPPORTED)
    assert step == 3 and said.startswith("Unsaved") and "2 checkpoints on the way not" in said
    assert [folder.name for folder in checkpoints(tmp_path / "later")] == ["checkpoint-1"]


@pytest.mark.parametrize(
    ("error", "comes_again"),
    [
        (UNSUPPORTED, True),
        (RuntimeError("Some tensors share memory, this will lead to duplicate memory on disk"), True),
        (OSError(errno.EROFS, "Read-only file system"), True),
        (PermissionError(errno.EACCES, "Permission denied"), True),
        (SafetensorError("Error while serializing: I/O error: Read-only file system (os error 30)"), True),
        (OSError(errno.ENOSPC, "No space left on device"), False),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), False),
        (OSError(errno.EIO, "Input/output error"), False),
        (SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"), False),
        (RuntimeError("[enforce fail at inline_container.cc:664] . unexpected pos 64 vs 0"), False),
    ],
    ids=str,
)
def test_only_a_full_disk_or_one_that_may_recover_is_tried_again(tmp_path, capsys, error, comes_again):
    def write():
        raise error

    save = StagedSave(tmp_path / "checkpoint-1", Saves())
    save.attempt(write)
    assert save.will_fail_again is comes_again and save.errors == [str(error)]
    assert ("Traceback" in capsys.readouterr().err) == (error is UNSUPPORTED or "share memory" in str(error))


SIZES = [("0", "adamw_torch_fused"), ("2", "adamw_torch_fused"), ("3", "adamw_torch_fused"), ("2", "sgd"), ("3", "sgd")]
SIZES_8BIT = [("2", "adamw_8bit"), ("3", "adamw_8bit"), ("2", "lion_8bit"), ("3", "lion_8bit")]
has_bitsandbytes = pytest.mark.skipif(
    not importlib.util.find_spec("bitsandbytes"), reason="needs bitsandbytes, whose optimizers compute on CPU too"
)


@pytest.mark.launch
@pytest.mark.parametrize("sizes", [SIZES, pytest.param(SIZES_8BIT, marks=has_bitsandbytes)], ids=["torch", "8-bit"])
@pytest.mark.parametrize("dtype", grid(["float32", "bfloat16"], quick=["float32"]))
def test_the_bytes_that_are_counted_are_those_on_the_disk(options, tmp_path, dtype, sizes):
    write_model(tmp_path / "model", hidden_size=128, intermediate_size=512)
    words = {"model": str(tmp_path / "model"), "save_strategy": "steps", "save_steps": 2, "dtype": dtype}
    cases = [options(tmp_path / f"{zero}-{optim}", zero=zero, optim=optim, **words) for zero, optim in sizes]
    log = train_all(1, cases, tmp_path / "log")
    for case, (zero, _) in zip(cases, sizes, strict=True):
        config = make_config(TrainConfig, case | {"dtype": dtype}, [])
        run = Path(case["output_dir"])
        deepspeed_config = json.loads((run / "run.json").read_text())["deepspeed"]
        size = checkpoint_size(config, measure_model(config).size, deepspeed_config)
        files = [*(run / "checkpoint-2").rglob("*.pt"), run / "checkpoint-2" / "model.safetensors"]
        written = sum(file.stat().st_size for file in files)
        counted = size.weight_bytes + size.state_bytes
        assert abs(written / counted - 1) < 0.05, (zero, case["optim"], written / counted, log[-2000:])
        assert sum(file.stat().st_size for file in files_of(run / "checkpoint-2")) < size.checkpoint_bytes
