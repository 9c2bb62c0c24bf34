"""How often a step of training waits: for values that the host reads, and for other ranks."""

import functools
import json
import sys
import time
from collections import Counter
from pathlib import Path

import accelerate
import pytest
import torch
import torch.distributed as dist
import transformers
from ranks import on_ranks, train
from transformers import TrainerCallback, trainer

import dsft
from dsft.data.epoch import Collator

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
    """Calls out of dsft, transformers and accelerate from the fourth step of a training to the fifth, and from there,
    where it logs, to the sixth.
    """
    calls, after_steps = Counter(), []
    packages = tuple(str(Path(package.__file__).parent) for package in (dsft, transformers, accelerate))

    def count(owner, name: str) -> None:
        function = getattr(owner, name)

        @functools.wraps(function)
        def counting(*args, **kwargs):
            calls[name] += sys._getframe(1).f_code.co_filename.startswith(packages)
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
    return [after_steps[4] - after_steps[3], after_steps[5] - after_steps[4]]


def test_an_optimizer_step_waits_for_two_collectives_and_a_micro_batch_for_none(tiny, options, tmp_path):
    """The host reads, once, what was told of the step before. Another collective adds up how many tokens are trained.

    A line of the log reads the newest step too, and the loss, the norm of the gradients and the operations done so far;
    it tells the rank that waits for its data.
    """
    changes = {
        "max_steps": 7,
        "logging_steps": 5,
        "seq_len": 32,
        "gradient_accumulation_steps": 2,
        "per_device_train_batch_size": 1,
        "train_sampling_strategy": "sequential",  # the last of 42 windows alone is padded
    }
    step = {"all_reduce": 2, "tolist": 1, "__bool__": 2}  # transformers asks whether rows are packed
    counts = on_ranks(2, counted_training, options(tmp_path / "run", zero="1", **changes))
    log = {"tolist": 2, "item": 3, "all_gather": 2, "all_gather_object": 1}
    assert counts == 2 * [[step, step | log]]
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    line = next(line for line in lines if line["step"] == 5)
    assert line["data_wait_seconds"] > 4 * WAIT_SECONDS
