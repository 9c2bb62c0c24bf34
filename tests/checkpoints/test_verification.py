"""A checkpoint whose bytes have changed is not resumed from; the next older one is."""

import json
import shutil
from pathlib import Path

import pytest
from ranks import on_ranks, train, train_all

from dsft.checkpoints.manifest import MANIFEST, shares_of_ranks
from dsft.errors import UserError

SHARD = "zero_pp_rank_1_mp_rank_00_optim_states.pt"


def change_a_byte(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.fixture(scope="module")
def run_of_six(tmp_path_factory, options) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    words = {"zero": "2", "save_strategy": "steps", "save_steps": 2, "save_total_limit": 10, "max_steps": 6}
    train_all(2, [options(folder / "run", **words)], folder / "log")
    return folder / "run"


def resumed(cases: list[dict]) -> list[str]:
    """The first step of each resumed training, or its error."""
    starts = []
    for options in cases:
        try:
            train(options)
            starts.append(json.loads((Path(options["output_dir"]) / "run.json").read_text())["status"])
        except UserError as error:
            starts.append(str(error))
    return starts


@pytest.mark.launch
def test_auto_takes_the_newest_checkpoint_whose_bytes_are_those_that_were_written(run_of_six, options, tmp_path):
    """`damaged` has a changed byte in 6, no manifest in 4; all of `hopeless` are damaged; `untouched` is moved.

    Who takes the weights alone does not read the optimizer's shards.
    """

    def copy(name: str, *, changed: tuple[int, ...] = (), without_manifest: tuple[int, ...] = ()) -> Path:
        run = Path(shutil.copytree(run_of_six, tmp_path / name))
        for step in changed:
            change_a_byte(run / f"checkpoint-{step}" / f"global_step{step}" / SHARD)
        for step in without_manifest:
            (run / f"checkpoint-{step}" / MANIFEST).unlink()
        return run

    def weights_of(run: Path) -> dict:
        checkpoint = str(run / "checkpoint-6")
        words = {"zero": "2", "resume_from_checkpoint": checkpoint, "resume_weights_only": True}
        return options(tmp_path / f"from {run.name}", **words)

    damaged = {"changed": (6,), "without_manifest": (4,)}
    auto = {"resume_from_checkpoint": "auto", "zero": "2", "max_steps": 7}
    named = tmp_path / "named" / "checkpoint-6"
    cases = [
        options(copy("damaged", **damaged), **auto),
        options(copy("hopeless", changed=(2, 6), without_manifest=(4,)), **auto),
        options(copy("named", **damaged), **auto | {"resume_from_checkpoint": str(named)}),
        options(copy("untouched"), **auto),
        options(copy("unverified", changed=(2,), without_manifest=(4, 6)), **auto, verify_resume=False),
        *(weights_of(copy(name, changed=(6,))) for name in ("shards_changed", "weights_changed")),
    ]
    change_a_byte(tmp_path / "weights_changed" / "checkpoint-6" / "model.safetensors")
    damaged, hopeless, named, untouched, unverified, of_shards, of_weights = on_ranks(
        2, resumed, cases, log=tmp_path / "log"
    )[0]
    log = (tmp_path / "log").read_text()
    assert [damaged, untouched, unverified, of_shards] == ["done"] * 4, log[-3000:]
    assert "the content of model.safetensors has changed" in of_weights and "--verify_resume false" in of_weights
    assert "damaged/checkpoint-6 is damaged and is skipped: the content of global_step6/zero_pp_rank_1" in log
    assert f"damaged/checkpoint-4 is incomplete and is skipped: it has no {MANIFEST}" in log
    assert "resuming from " + str(tmp_path / "damaged/checkpoint-2") in log
    assert "no checkpoint in" in hopeless and "--overwrite" in hopeless
    assert "the content of" in named and "--verify_resume false" in named
    assert "resuming from " + str(tmp_path / "untouched/checkpoint-6") in log and "hashed in" in log
    assert "resuming from " + str(tmp_path / "unverified/checkpoint-6") in log


def test_every_file_is_read_by_one_rank_its_own_by_itself_and_bytes_are_even(tmp_path):
    sizes = {"model-1.safetensors": 5000, "config.json": 10, "model-2.safetensors": 5000, "model-3.safetensors": 900}
    sizes |= {"rng_state_0.pth": 100, "rng_state_1.pth": 100, SHARD: 1000}
    for name, size in sizes.items():
        (tmp_path / name).write_bytes(bytes(size))
    files = sorted(tmp_path.iterdir())
    shares = shares_of_ranks(files, 2)
    assert sorted(shares[0] + shares[1]) == files
    assert {tmp_path / "rng_state_1.pth", tmp_path / SHARD} <= set(shares[1])
    read = [sum(sizes[file.name] for file in share) for share in shares]
    assert abs(read[0] - read[1]) <= 200
    assert shares_of_ranks(files, 1) == [files]
