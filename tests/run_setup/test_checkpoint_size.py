"""The bytes that a training is said to write, from sizes alone; training/test_saving.py weighs those on a disk."""

import dataclasses
from types import SimpleNamespace

import pytest

from dsft.config.options import TrainConfig
from dsft.config.reader import make_config
from dsft.run_setup.checkpoint_size import checkpoint_size


def size_of(options: dict, *, stage: int | None = None, dtype: str = "float32", **parameters: int):
    problems: list[str] = []
    config = make_config(TrainConfig, {"model": "m", "data": ["d"], "output_dir": "out"} | options, problems)
    counts = {"num_trainable": 1000, "num_params": 1000, "lora_r": 0, "vocab_size": 100}
    model = SimpleNamespace(**counts | parameters)
    deepspeed_config = None if stage is None else {"zero_optimization": {"stage": stage}}
    assert problems == []
    return checkpoint_size(dataclasses.replace(config, dtype=dtype), model, deepspeed_config)


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
        ({"save_total_limit": 1}, 2),
        ({"save_total_limit": 1, "metric_for_best_model": "loss"}, 3),
    ],
)
def test_the_checkpoints_that_lie_on_the_disk_at_once_are_counted(options, count):
    assert size_of(options).kept == count


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_frozen_weights_are_written_with_the_model_and_not_with_adapters(dtype):
    num_bytes = 4 if dtype == "float32" else 2
    of_model, of_frozen, of_adapters = (
        size_of({}, dtype=dtype, stage=3, **parameters)
        for parameters in ({}, {"num_params": 1500}, {"num_params": 1500, "lora_r": 4})
    )
    assert of_model.weight_bytes == of_adapters.weight_bytes == num_bytes * 1000
    assert of_frozen.weight_bytes == num_bytes * 1500
    assert of_model.state_bytes == of_adapters.state_bytes == of_frozen.state_bytes - num_bytes * 500 > 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_stage_3_writes_no_second_copy_of_the_weights_and_weights_alone_have_no_states(dtype):
    sizes = [size_of({}, stage=stage, dtype=dtype) for stage in (1, 2, 3)]
    assert sizes[0] == sizes[1] and sizes[1].state_bytes - sizes[2].state_bytes == sizes[0].weight_bytes
    assert size_of({}, dtype=dtype) == sizes[2], "the stage that writes least, where none is known"
    without = size_of({"save_only_model": True}, stage=2, dtype=dtype)
    assert without.checkpoint_bytes == without.final_bytes == sizes[0].final_bytes


def test_all_that_lies_there_at_once_is_the_final_model_and_the_checkpoints():
    size = size_of({"save_total_limit": 4}, stage=2)
    assert size.total_bytes == size.final_bytes + 5 * size.checkpoint_bytes
    assert size_of({"save_strategy": "no"}, stage=2).total_bytes == size.final_bytes
