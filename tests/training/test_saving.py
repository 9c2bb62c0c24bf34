"""What a training leaves on the disk: a tied head once, and a final model or the way to one where the disk is full."""

import importlib.util
import json
import os
import subprocess
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import grid
from ranks import on_ranks, train, train_all
from tiny import write_model

from dsft.checkpoints.manifest import files_of, integrity_errors
from dsft.config.options import TrainConfig
from dsft.config.reader import make_config
from dsft.models.measure import measure_model
from dsft.models.weight_files import shapes_in
from dsft.runtime import distributed
from dsft.setup.arguments import CheckpointSize, check_room, checkpoint_size
from dsft.training import run

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
    once = shapes_in(tmp_path / "tied")
    for stage in stages:
        for folder in ("final", "checkpoint-2"):
            assert shapes_in(tmp_path / stage / folder) == once, log[-3000:]


@needs_root
def test_a_disk_without_room_for_model_and_checkpoints_is_refused_before_training(tmp_path):
    def problems(num_trainable: int, kept: int = 3) -> list[str]:
        sizes = {"weight_bytes": 4 * num_trainable, "state_bytes": 12 * num_trainable, "small_bytes": 1000}
        size = CheckpointSize(**sizes, kept=kept)
        return check_room(str(tmp_path / "run"), size)

    with small_disk(tmp_path, "50m"):
        assert problems(900_000) == []  # 4 B final, 3 checkpoints of 16 B: 46.8 MB
        (problem,) = problems(1_100_000)
        assert "3 checkpoints" in problem and "save_total_limit" in problem
        (problem,) = problems(15_000_000, kept=0)
        assert "checkpoint" not in problem and "save_strategy" not in problem


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
    assert first[1].startswith("Unsaved: checkpoint-1 could not be saved"), first[1]
    assert "do all nodes share the output folder?" in first[1]
    final = tmp_path / "node-0" / "without" / "final"
    assert integrity_errors(final, hash_tensors=True) == [] and (final / "model.safetensors").is_file()


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


def test_the_final_model_alone_is_uploaded(tmp_path, monkeypatch):
    uploads = []

    class Hub:
        def __init__(self, **_):
            pass

        def create_repo(self, name, **_):
            return SimpleNamespace(repo_id=f"me/{name}")

        def upload_folder(self, **options):
            uploads.append((options["repo_id"], options["folder_path"]))
            assert "training_args.bin" in options["ignore_patterns"], "it has paths of this machine"

    monkeypatch.setattr(run, "HfApi", Hub)
    run.push_final({}, tmp_path / "my-run" / "final")
    assert uploads == [("me/my-run", tmp_path / "my-run" / "final")]
