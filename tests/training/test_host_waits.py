"""How often a step of training waits: for values that the host reads, and for other ranks."""

import functools
import json
import socket
import sys
import time
from collections import Counter
from pathlib import Path

import accelerate
import pytest
import torch
import torch.distributed as dist
import transformers
from conftest import grid
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from ranks import on_ranks, train
from transformers import TrainerCallback, trainer

import dsft
from dsft.config.deepspeed import read_zero_file
from dsft.data.epoch import Collator
from dsft.training.metrics import Bottlenecks, RankTimes

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


@pytest.mark.parametrize("packing", grid([False, True], [False]))
def test_an_optimizer_step_waits_for_two_collectives_and_a_micro_batch_for_none(tiny, options, tmp_path, packing):
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
        "packing": packing,
    }
    step = {"all_reduce": 2, "tolist": 1}
    counts = on_ranks(2, counted_training, options(tmp_path / "run", zero="1", **changes))
    log = {"tolist": 2, "item": 3, "all_gather": 2, "all_gather_object": 1}
    assert counts == 2 * [[step, step | log]]
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    line = next(line for line in lines if line["step"] == 5)
    if packing:  # its rows are collated by another class
        return
    assert line["data_wait_seconds"] > 4 * WAIT_SECONDS and line["rank_skew"] >= 1


class Device:
    """A stream and an event of a GPU, of which only the calls that the host waits in are of interest."""

    waits: Counter = Counter()

    def wait_stream(self, *args) -> None: ...

    wait_event = record = record_event = wait_stream

    def query(self) -> bool:
        return True

    def synchronize(self, *args) -> None:
        frame = sys._getframe(1)
        self.waits[f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_name}"] += 1


def waits_of_deepspeed(options: dict) -> dict[str, int]:
    """Places in DeepSpeed that wait for the device from the third step of a training to the sixth: its CPU accelerator
    says, as one of GPUs, that work is queued on streams.
    """
    for name in ("is_synchronized_device", "resolves_data_dependency", "handles_memory_backpressure"):
        setattr(CPU_Accelerator, name, lambda self: False)
    CPU_Accelerator.use_host_timers = lambda self: True
    CPU_Accelerator.Stream = CPU_Accelerator.Event = Device
    CPU_Accelerator.current_stream = CPU_Accelerator.default_stream = lambda self, index=None: Device()
    CPU_Accelerator.synchronize = Device.synchronize
    CPU_Accelerator.waits = Device.waits
    torch.Tensor.record_stream = lambda self, stream: None
    after_steps = []

    class AfterSteps(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            after_steps.append(Device.waits.copy())

    trainer.DEFAULT_CALLBACKS.append(AfterSteps)
    train(options)
    return dict(after_steps[5] - after_steps[2])


REDUCED = "stage_1_and_2.py:independent_gradient_partition_epilogue"
WAITS = [
    ("1", {REDUCED: 3}),
    ("2", {REDUCED: 6}),
    ("2-reduced", {REDUCED: 6}),
    # The second is of those that stay gathered, after a step.
    (
        "3",
        {
            "stage3.py:independent_gradient_partition_epilogue": 6,
            "partition_parameters.py:_allgather_params_coalesced": 3,
        },
    ),
]


@pytest.mark.parametrize(("zero", "expected"), grid(WAITS, WAITS[2:]))
def test_deepspeed_waits_for_the_device_only_where_gradients_are_reduced(tiny, options, tmp_path, zero, expected):
    """In 3 steps of 2 micro batches. Its throughput timer waited before each forward pass and after each step, too."""
    changes = {"max_steps": 7, "seq_len": 32, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 1}
    if zero == "2-reduced":
        content = read_zero_file("2", [])
        content["zero_optimization"] |= {"use_multi_rank_bucket_allreduce": False, "reduce_bucket_size": 20_000}
        (tmp_path / "zero.json").write_text(json.dumps(content))
        zero = str(tmp_path / "zero.json")
    assert on_ranks(2, waits_of_deepspeed, options(tmp_path / "run", zero=zero, **changes)) == 2 * [expected]


def training_beside_a_slow_rank(options: dict) -> None:
    collate = Collator.__call__

    def slow_on_rank_1(*args):
        time.sleep(10 * WAIT_SECONDS * dist.get_rank())
        return collate(*args)

    Collator.__call__ = slow_on_rank_1
    train(options)


@pytest.mark.parametrize("zero", grid("03", "3"))
def test_a_rank_that_holds_up_the_others_is_named_once_with_its_host(tiny, options, tmp_path, zero):
    """In ZeRO-3 the other ranks wait for it in their forward passes: what it does by itself tells."""
    changes = {"max_steps": 6, "logging_steps": 1, "seq_len": 32, "per_device_train_batch_size": 1}
    log = tmp_path / "log"
    on_ranks(2, training_beside_a_slow_rank, options(tmp_path / "run", zero=zero, **changes), log=log)
    screen = log.read_text()
    assert screen.count(f"rank 1 on {socket.gethostname()} holds up the others: reading its data took it") == 1


def test_a_slow_device_is_named_in_two_lines_of_the_log_in_a_row_and_one_alone_is_chance(capsys):
    def line(*products: float) -> list[RankTimes]:
        return [RankTimes(host=f"n{rank}", data=0.0, forward=1.0, product=p) for rank, p in enumerate(products)]

    bottlenecks = Bottlenecks(waits_in_forward=True)
    for products in ((1e-3, 1e-2), (1e-3, 1e-3), (1e-3, 1e-2), (1e-2, 1e-3)):
        bottlenecks.note({}, line(*products), interval=1.0)
    assert capsys.readouterr().out == ""
    for _ in range(3):
        bottlenecks.note({}, line(1e-3, 1e-2), interval=1.0)
    assert capsys.readouterr().out.count("rank 1 on n1 holds up the others") == 1
