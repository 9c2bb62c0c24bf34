"""A start after a kill waits for the memory of the processes that die, but not for that of another program."""

import json
from types import SimpleNamespace

import pytest
import torch

from dsft.checkpoints.run_folder import was_killed
from dsft.runtime import hardware
from dsft.runtime.hardware import wait_for_freed_gpu


@pytest.fixture
def gpu_of(monkeypatch):
    """Let a GPU of 80 GiB have so many GiB free, second by second; the last number stays."""

    def make(*free: float):
        seconds = [0.0]
        clock = {"monotonic": lambda: seconds[0], "sleep": lambda pause: seconds.__setitem__(0, seconds[0] + pause)}
        monkeypatch.setattr(hardware, "time", SimpleNamespace(**clock))
        monkeypatch.setattr(
            torch.cuda,
            "mem_get_info",
            lambda gpu: (free[min(int(seconds[0]), len(free) - 1)] * 2**30, 80 * 2**30),
        )

    return make


def test_the_memory_of_dying_ranks_is_waited_for(gpu_of):
    gpu_of(10, 10, 10, 40, 79)
    assert wait_for_freed_gpu() == 4


def test_a_free_gpu_is_not_waited_for(gpu_of):
    gpu_of(79.5)
    assert wait_for_freed_gpu() == 0


def test_another_program_s_memory_is_waited_for_a_minute(gpu_of):
    gpu_of(10, 40)
    assert wait_for_freed_gpu() == 61


def test_memory_that_comes_back_slowly_is_waited_for_three_minutes(gpu_of):
    gpu_of(*(second / 10 for second in range(1000)))
    assert wait_for_freed_gpu() == 180


@pytest.mark.parametrize(("status", "killed"), [("running", True), ("done", False), ("preempted", False)])
def test_a_run_that_ended_without_a_word_was_killed(tmp_path, status, killed):
    assert not was_killed(str(tmp_path))
    (tmp_path / "run.json").write_text(json.dumps({"status": status}))
    assert was_killed(str(tmp_path)) == killed
