"""A start after a kill waits for the memory of the processes that die, but not for that of another program."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from dsft.config.options import EvalConfig, TrainConfig
from dsft.errors import UserError
from dsft.planner.step_time import ASSUMED
from dsft.runtime import hardware
from dsft.runtime.hardware import ask_gpu, wait_for_freed_gpu


@pytest.fixture
def gpu_of(monkeypatch):
    """Let a GPU of 80 GiB, or of another size, have so many GiB free, second by second; the last number stays."""

    def make(*free: float, total: int = 80):
        seconds = [0.0]
        clock = {"monotonic": lambda: seconds[0], "sleep": lambda pause: seconds.__setitem__(0, seconds[0] + pause)}
        monkeypatch.setattr(hardware, "time", SimpleNamespace(**clock))
        monkeypatch.setattr(hardware, "has_gpu", lambda: True)
        monkeypatch.setattr(
            torch.cuda,
            "mem_get_info",
            lambda gpu: (free[min(int(seconds[0]), len(free) - 1)] * 2**30, total * 2**30),
        )

    return make


def test_the_memory_of_dying_ranks_is_waited_for(gpu_of):
    gpu_of(10, 10, 10, 40, 79)
    assert wait_for_freed_gpu() == 4


def test_a_free_gpu_is_not_waited_for(gpu_of):
    gpu_of(79.5)
    assert wait_for_freed_gpu() == 0


def test_what_a_rank_took_to_meet_the_others_is_neither_waited_for_nor_missing_from_its_plan(gpu_of, monkeypatch):
    gpu_of(24 - (ASSUMED.total_bytes(1) / 2**30), total=24)  # 93 % are free
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    assert wait_for_freed_gpu() == 0
    assert ask_gpu(0) == (24 * 2**30, 24 * 2**30)


def test_what_torch_keeps_of_tensors_that_are_gone_is_free(gpu_of, monkeypatch):
    gpu_of(59.5)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda gpu: 20 * 2**30)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda gpu: 5 * 2**30)
    assert ask_gpu(0)[0] == 75 * 2**30


def test_another_program_s_memory_is_waited_for_a_minute(gpu_of):
    gpu_of(10, 40)
    assert wait_for_freed_gpu() == 61


def test_memory_that_comes_back_slowly_is_waited_for_three_minutes(gpu_of):
    gpu_of(*(second / 10 for second in range(1000)))
    assert wait_for_freed_gpu() == 180


@pytest.mark.parametrize("left_lock", [True, False])
def test_a_run_that_was_killed_while_it_loaded_is_waited_for(tmp_path, monkeypatch, left_lock):
    from dsft.training import run

    waits = []
    monkeypatch.setattr(run, "only_run_in", lambda output_dir: nullcontext(left_lock))
    monkeypatch.setattr(run, "wait_for_freed_gpu", lambda: waits.append(1))
    for name in ("require_same_start", "_finetune"):
        monkeypatch.setattr(run, name, lambda *_: None)
    run.finetune(TrainConfig(training={"output_dir": str(tmp_path)}))
    assert waits == [1] * left_lock


@pytest.mark.parametrize("left_lock", [True, False])
def test_an_evaluation_that_was_killed_is_waited_for(tmp_path, monkeypatch, left_lock):
    from dsft import api

    waits = []
    monkeypatch.setattr(api, "only_run_in", lambda output_dir: nullcontext(left_lock))
    monkeypatch.setattr(api, "wait_for_freed_gpu", lambda: waits.append(1))
    # What comes after the wait, and is refused: there is no model.
    with pytest.raises(UserError):
        next(api.evaluate(EvalConfig(output_dir=str(tmp_path)), ["model: missing"]))
    assert waits == [1] * left_lock
