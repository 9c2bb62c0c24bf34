"""Trainings with a loss of tiles have the losses and models of plain ones."""

from itertools import product

import pytest
import torch
from conftest import grid, read_json
from ranks import on_ranks, trained
from safetensors.torch import load_file

from dsft.models import chunked_head

pytestmark = pytest.mark.launch


def trained_in_tiles(cases: list[dict]) -> None:
    chunked_head.TILE_LOGITS = 384 * 11  # 11 rows; the ranks end after this
    for options in cases:
        trained(options)


@pytest.mark.parametrize(
    ("world", "zero", "method"),
    grid([*product([1, 2], ["0", "2", "3"], ["full", "lora"])], [(2, "2", "lora"), (2, "3", "full")]),
)
def test_a_training_in_tiles_is_the_plain_one(world, zero, method, options, tiny, tmp_path):
    """Accumulated micro batches of other numbers of trained tokens; ranks have other numbers of tiles. With plain SGD
    weights are as near as gradients.
    """
    changes = {"zero": zero, "method": method, "logging_steps": 1, "global_batch_size": 8, "optim": "sgd"}
    cases = [
        options(tmp_path / name, data=str(tiny / "pairs.jsonl"), **changes, tiled_loss=is_tiled)
        for name, is_tiled in (("plain", False), ("tiled", True))
    ]
    on_ranks(world, trained_in_tiles, cases, log=tmp_path / "log")
    plain, tiled = (read_json(tmp_path / name / "run.json") for name in ("plain", "tiled"))
    assert plain["config"]["tiled_loss"] is False and tiled["config"]["tiled_loss"] is True
    losses = [[entry["loss"] for entry in run["results"]["log"] if "loss" in entry] for run in (plain, tiled)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5) and len(losses[0]) == 2
    (file,) = (tmp_path / "plain" / "final").glob("*.safetensors")
    plain, tiled = (load_file(tmp_path / name / "final" / file.name) for name in ("plain", "tiled"))
    for name, weight in plain.items():
        torch.testing.assert_close(tiled[name], weight, rtol=0, atol=1e-5 * weight.abs().max().item())
