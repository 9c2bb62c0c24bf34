"""ZeRO-3 whose optimizer is offloaded in part: on a GPU one share of its sub groups is updated there by an Adam of its
own. On CPU ranks CPUAdam updates all, so here the first half are told to be elsewhere.
"""

import json

import pytest
from conftest import ROOT, read_json
from ranks import on_ranks, trained

from dsft.training import trainer

pytestmark = pytest.mark.launch

SCHEDULE = {"max_steps": 6, "warmup_steps": 3, "logging_steps": 1, "weight_decay": 0.1}


@pytest.fixture
def small_groups(tmp_path):
    """The JSON that dsft brings, with many sub groups in a tiny model."""
    content = read_json(ROOT / "ds_configs" / "zero3_offload_partial.json")
    content["zero_optimization"]["sub_group_size"] = 2000
    path = tmp_path / "partial.json"
    path.write_text(json.dumps(content))
    return str(path)


def losses_with_half_elsewhere(options: dict) -> list[float]:
    patch_engine = trainer.patch_engine

    def split(engine, *, resumes: bool) -> None:
        devices = engine.optimizer.subgroup_to_device
        assert len(devices) > 3
        devices.update(dict.fromkeys(range(len(devices) // 2), "elsewhere"))
        patch_engine(engine, resumes=resumes)

    trainer.patch_engine = split
    try:
        return losses(options)
    finally:
        trainer.patch_engine = patch_engine


def losses(options: dict) -> list[float]:
    history = [entry for entry in trained(options).state.log_history if "loss" in entry]
    assert [entry["learning_rate"] for entry in history] == pytest.approx(
        [options["learning_rate"] * share for share in (0, 1 / 3, 2 / 3, 1, 2 / 3, 1 / 3)]
    )
    return [entry["loss"] for entry in history]


def losses_of_all(alone: dict, partial: dict, again: dict) -> list[list[float]]:
    return [losses(alone), losses_with_half_elsewhere(partial), losses_with_half_elsewhere(again)]


def test_sub_groups_on_the_gpu_follow_the_schedule_and_go_on_from_a_checkpoint(options, small_groups, tmp_path):
    partial = options(tmp_path / "partial", zero=small_groups, **SCHEDULE, save_strategy="steps", save_steps=3)
    alone = partial | {"output_dir": str(tmp_path / "alone"), "save_strategy": "no"}
    again = partial | {"output_dir": str(tmp_path / "again"), "save_strategy": "no"}
    again["resume_from_checkpoint"] = str(tmp_path / "partial" / "checkpoint-3")
    offloaded, split, resumed = on_ranks(2, losses_of_all, alone, partial, again)[0]
    assert split == pytest.approx(offloaded, rel=1e-6)
    assert resumed[-3:] == split[-3:]
