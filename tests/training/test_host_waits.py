"""How often a step of training waits: for values that the host reads, and for other ranks."""

import functools
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks, train
from transformers import TrainerCallback, trainer

import dsft

pytestmark = pytest.mark.launch
READS = ("item", "tolist", "cpu", "__int__", "__float__", "__bool__")
COLLECTIVES = [
    "all_reduce",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "barrier",
    "broadcast",
    "broadcast_object_list",
]


def counted_training(options: dict) -> dict[str, int]:
    """Calls out of dsft's code during the third step of a training, which logs nothing."""
    calls, after_steps = Counter(), []
    package = str(Path(dsft.__file__).parent)

    def count(owner, name: str) -> None:
        function = getattr(owner, name)

        @functools.wraps(function)
        def counting(*args, **kwargs):
            calls[name] += sys._getframe(1).f_code.co_filename.startswith(package)
            return function(*args, **kwargs)

        setattr(owner, name, counting)

    class AfterSteps(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            after_steps.append(calls.copy())

    for name in READS:
        count(torch.Tensor, name)
    for name in COLLECTIVES:
        count(dist, name)
    trainer.DEFAULT_CALLBACKS.append(AfterSteps)
    train(options)
    return after_steps[2] - after_steps[1]


def test_an_optimizer_step_waits_for_one_collective_and_a_micro_batch_for_none(tiny, options, tmp_path):
    case = options(tmp_path / "run", zero="1", max_steps=3, gradient_accumulation_steps=2)
    assert on_ranks(2, counted_training, case) == 2 * [{"all_reduce": 1, "cpu": 1, "tolist": 1}]
