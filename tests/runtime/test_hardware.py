"""What the hardware offers: GPUs that torch does not see, memory and cores of cgroups. A start after a kill waits for
the memory of the processes that die, but not for that of another program.
"""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT

from dsft.cli.commands import PlanOptions
from dsft.cli.plan import read_machines
from dsft.errors import UserError
from dsft.runtime import hardware
from dsft.runtime.hardware import (
    ask_gpu,
    free_host_bytes,
    host_memory_bytes,
    require_seen_gpus,
    wait_for_freed_gpu,
)
from dsft.units import GiB


@pytest.fixture
def gpus_of_the_driver(tmp_path, monkeypatch):
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(hardware, "GPU_FILES", str(tmp_path / "nvidia[0-9]*"))
    for name in ("DS_ACCELERATOR", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


def test_a_machine_without_a_driver_counts_its_ranks_without_torch():
    code = "import sys; from dsft.runtime import hardware; hardware._has_driver = lambda: False"
    code += "; assert hardware.default_ranks() in (1, 2) and 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


@pytest.mark.parametrize("start", [require_seen_gpus, lambda: read_machines(PlanOptions())])
@pytest.mark.usefixtures("gpus_of_the_driver")
def test_gpus_that_torch_does_not_see_are_named(start):
    with pytest.raises(UserError, match="does not see; it is .* DS_ACCELERATOR=cpu"):
        start()


@pytest.mark.parametrize(("name", "value"), [("DS_ACCELERATOR", "cpu"), ("CUDA_VISIBLE_DEVICES", "")])
@pytest.mark.usefixtures("gpus_of_the_driver")
def test_cpu_ranks_that_are_asked_for_start(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    require_seen_gpus()
    assert not read_machines(PlanOptions())[0].has_gpu


@pytest.mark.usefixtures("gpus_of_the_driver")
def test_a_plan_on_paper_asks_for_no_gpu_here():
    assert read_machines(PlanOptions(gpus="8xH100"))[0].gpu_type == "H100"


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


def test_what_a_rank_took_to_meet_the_others_is_neither_waited_for_nor_missing_from_its_plan(gpu_of, monkeypatch):
    gpu_of(24 - (hardware.CONTEXT_BYTES + hardware.COMMUNICATOR_BYTES) / 2**30, total=24)  # 93 % are free
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
    assert wait_for_freed_gpu() == 60


@pytest.mark.parametrize(
    ("cgroups", "limits", "expected"),
    [
        # version 2: a job of SLURM's, whose step has no limit of its own; a container; a process without limits
        ("0::/slurm/job_7/step_0", {"slurm/job_7": 64, "slurm/job_7/step_0": None, "slurm/job_8": 1}, (64, 54)),
        ("0::/", {".": 32}, (32, 22)),
        ("0::/user.slice", {"user.slice": None}, (512, 500)),
        ("0::/elsewhere", {".": 48}, (48, 38)),  # the host's path, which a container does not see
        # version 1, beside another controller and the empty tree of version 2
        ("9:cpu:/a\n4:memory:/slurm/job_7\n0::/b", {"memory/slurm/job_7": 16, "memory": 2**33, "a": 1}, (16, 6)),
        ("", {".": 1}, (512, 500)),
    ],
)
def test_memory_is_limited_by_all_cgroups_above_this_process(monkeypatch, tmp_path, cgroups, limits, expected):
    (tmp_path / "own").write_text(cgroups)
    for folder, limit in limits.items():
        place = tmp_path / "cgroup" / folder
        place.mkdir(parents=True, exist_ok=True)
        old = folder.startswith("memory")
        text = "max" if limit is None else str(limit * GiB)
        (place / ("memory.limit_in_bytes" if old else "memory.max")).write_text(text)
        (place / ("memory.usage_in_bytes" if old else "memory.current")).write_text(str(12 * GiB))
        names = [f"{'total_' * old}{name}active_file" for name in ("in", "")]
        (place / "memory.stat").write_text("anon 7\n" + "".join(f"{name} {GiB}\n" for name in names))
    monkeypatch.setattr(hardware, "OWN_CGROUPS", tmp_path / "own")
    monkeypatch.setattr(hardware, "CGROUPS", tmp_path / "cgroup")
    host = SimpleNamespace(total=512 * GiB, available=500 * GiB)
    monkeypatch.setattr(hardware.psutil, "virtual_memory", lambda: host)
    assert (host_memory_bytes() // GiB, free_host_bytes() // GiB) == expected


@pytest.mark.parametrize(
    ("cgroups", "quotas", "cores"),
    [
        # version 2: of all cgroups above the process; rounded up
        ("0::/pods/one", {".": "max 100000", "pods": "800000 100000", "pods/one": "250000 100000"}, 3),
        ("0::/pods/one", {"pods": "150000 100000", "pods/one": "max 100000", "pods/two": "100000 100000"}, 2),
        ("0::/", {".": "50000 100000"}, 1),
        ("0::/", {".": "6400000 100000"}, 16),  # more than there are
        # version 1, beside another controller
        ("9:memory:/a\n4:cpu,cpuacct:/job\n0::/", {"cpu/job": "400000 100000", "cpu": "-1 100000", "cpu/a": "1 1"}, 4),
        ("0::/elsewhere", {}, 16),
        ("", {".": "100000 100000"}, 16),
    ],
)
def test_cores_are_no_more_than_all_cgroups_above_this_process_give_time_for(
    monkeypatch, tmp_path, cgroups, quotas, cores
):
    (tmp_path / "own").write_text(cgroups)
    for folder, text in quotas.items():
        place = tmp_path / "cgroup" / folder
        place.mkdir(parents=True, exist_ok=True)
        names = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if folder.startswith("cpu") else ("cpu.max",)
        for name, value in zip(names, text.split() if len(names) == 2 else [text], strict=True):
            (place / name).write_text(f"{value}\n")
    monkeypatch.setattr(hardware, "OWN_CGROUPS", tmp_path / "own")
    monkeypatch.setattr(hardware, "CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    assert hardware.cpu_count() == cores
