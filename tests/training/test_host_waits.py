"""How often a step of training waits: for values that the host reads, and for other ranks."""

import functools
import json
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks, train
from transformers import TrainerCallback, trainer

import dsft
from dsft.data.batches import Collator

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


WAIT_SECONDS = 0.05
"""Of rank 1 for each batch."""


def counted_training(options: dict) -> list[dict[str, int]]:
    """Calls out of dsft's code in the third step of a training, and from the fourth, which logs, to the fifth."""
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

    collate = Collator.__call__

    def slow_on_rank_1(*args):
        time.sleep(WAIT_SECONDS * dist.get_rank())
        return collate(*args)

    Collator.__call__ = slow_on_rank_1
    for name in READS:
        count(torch.Tensor, name)
    for name in COLLECTIVES:
        count(dist, name)
    trainer.DEFAULT_CALLBACKS.append(AfterSteps)
    train(options)
    return [after_steps[2] - after_steps[1], after_steps[4] - after_steps[3]]


def test_an_optimizer_step_waits_for_one_collective_and_a_micro_batch_for_none(tiny, options, tmp_path):
    """A line of the log takes one more collective, and tells the rank that waits for its data."""
    changes = {"max_steps": 6, "logging_steps": 4, "gradient_accumulation_steps": 2}
    step = {"all_reduce": 1, "cpu": 1, "tolist": 1}
    counts = on_ranks(2, counted_training, options(tmp_path / "run", zero="1", **changes))
    assert counts == 2 * [[step, step | {"all_gather_object": 1}]]
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    line = next(line for line in lines if line["step"] == 4)
    assert line["data_wait_seconds"] > 4 * WAIT_SECONDS and line["rank_skew"] >= 1
