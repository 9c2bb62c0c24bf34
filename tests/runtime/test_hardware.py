"""What the hardware offers: a node's network as the kernel shows it in a folder like /sys/class, GPUs that torch does
not see or has no kernels for, CPUs that multiply bfloat16. A start after a kill waits for the memory of the processes
that die, but not for that of another program; freed memory of CPU ranks goes back to the system, or is kept.
"""

import contextlib
import dataclasses
import os
import platform
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT

from dsft.cli.commands import PlanOptions
from dsft.cli.plan import read_machines
from dsft.config.options import EvalConfig, TrainConfig
from dsft.errors import UserError
from dsft.launch.environment import accelerator
from dsft.planner.step_time import ASSUMED, GPUS, parse_interconnect, speeds_of
from dsft.runtime import hardware
from dsft.runtime.hardware import (
    Machine,
    ask_gpu,
    children_bytes,
    cpu_computes_bfloat16,
    free_host_bytes,
    host_memory_bytes,
    peak_memory_bytes,
    read_interconnect,
    read_network,
    read_topology,
    require_kernels,
    require_seen_gpus,
    set_back_peaks,
    wait_for_freed_gpu,
)
from dsft.units import GB, GiB


def write_port(sysfs: Path, card: str, rate: str, *, state: str = "4: ACTIVE", link: str = "InfiniBand") -> None:
    folder = sysfs / "infiniband" / card / "ports" / "1"
    folder.mkdir(parents=True)
    for name, text in (("rate", rate), ("state", state), ("link_layer", link)):
        (folder / name).write_text(f"{text}\n")


def write_interface(sysfs: Path, name: str, speed: int | None, *, state: str = "up", physical: bool = True) -> None:
    folder = sysfs / "net" / name
    (folder / "device").mkdir(parents=True) if physical else folder.mkdir(parents=True)
    (folder / "operstate").write_text(f"{state}\n")
    if speed is not None:
        (folder / "speed").write_text(f"{speed}\n")


def test_the_fastest_ports_of_infiniband_or_roce_are_the_network(tmp_path):
    for number in range(8):
        write_port(tmp_path, f"mlx5_{number}", "400 Gb/sec (4X NDR)")
    write_port(tmp_path, "mlx5_8", "100 Gb/sec (4X EDR)", link="Ethernet")
    write_port(tmp_path, "mlx5_9", "400 Gb/sec (4X NDR)", state="1: DOWN")
    write_interface(tmp_path, "eth0", 800_000)
    assert read_network(tmp_path) == "8xib400"


def dgx(kind: str) -> str:
    """The matrix of `nvidia-smi topo -m` on a node of 8 GPUs, each with a card at its switch, and 4 ports for storage
    at the processors (the same: github.com/NVIDIA/nccl/issues/1264); "older" drivers name cards in the header.
    """
    cards = [f"mlx5_{number}" for number in range(12)]
    header = [f"GPU{number}" for number in range(8)]
    header += cards if kind == "older" else [f"NIC{number}" for number in range(12)]
    lines = ["\x1b[4m\t" + "\t".join(header) + "\tCPU Affinity\tNUMA Affinity\x1b[0m"]
    for gpu in range(8):
        near = [("PIX" if card == gpu else "NODE" if card // 4 == gpu // 4 else "SYS") for card in range(8)]
        storage = ["NODE" if card // 2 == gpu // 4 else "SYS" for card in range(4)]
        links = [" X " if other == gpu else "NV18" for other in range(8)]
        lines.append(f"GPU{gpu}\t" + "\t".join([*links, *near, *storage]) + "\t0-55\t0")
    if kind != "older":
        lines += ["", "NIC Legend:", "", *(f"  NIC{number}: {card}" for number, card in enumerate(cards))]
    return "\n".join(lines)


@pytest.mark.parametrize("kind", ["newer", "older"])
@pytest.mark.parametrize(
    ("visible", "links"), [("", "nvlink+8xib400"), ("0,1", "nvlink+2xib400"), ("3", "pcie+1xib400")]
)
def test_storage_ports_of_a_dgx_are_not_counted(tmp_path, monkeypatch, kind, visible, links):
    for number in range(12):
        write_port(tmp_path / "sys", f"mlx5_{number}", "400 Gb/sec (4X NDR)")
    (tmp_path / "topology").write_text(dgx(kind))
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\ncat {tmp_path}/topology\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(read_network, "__defaults__", (tmp_path / "sys",))
    assert read_interconnect() == links


def test_cards_that_no_gpu_is_near_to_count_where_they_alone_are_fast(tmp_path):
    write_port(tmp_path, "mlx5_0", "100 Gb/sec (4X EDR)")
    for number in (1, 2):
        write_port(tmp_path, f"mlx5_{number}", "400 Gb/sec (4X NDR)")
    assert read_network(tmp_path, nearest={"mlx5_0"}) == "2xib400"
    assert read_topology(matrix("X NV4", "NV4 X"))[1] == {"NIC0"} and read_topology("")[1] == set()


@pytest.mark.parametrize(
    ("named", "network"),
    [
        ("", "12xib400"),
        ("mlx5_1", "3xib400"),
        ("=mlx5_1", "1xib400"),
        ("mlx5_2:1,mlx5_3:1", "2xib400"),
        ("^mlx5_10,mlx5_11", "10xib400"),
        ("^=mlx5_1", "11xib400"),
        ("bnxt", "eth25"),
    ],
)
def test_cards_that_nccl_is_told_not_to_take_are_not_counted(tmp_path, monkeypatch, named, network):
    for number in range(12):
        write_port(tmp_path, f"mlx5_{number}", "400 Gb/sec (4X NDR)")
    write_interface(tmp_path, "eth0", 25_000)
    monkeypatch.setenv("NCCL_IB_HCA", named)
    assert read_network(tmp_path) == network


def test_roce_is_named(tmp_path):
    write_port(tmp_path, "bnxt_re0", "200 Gb/sec (4X HDR)", link="Ethernet")
    assert read_network(tmp_path) == "1xroce200"


def test_without_them_the_fastest_card_that_is_up(tmp_path):
    write_interface(tmp_path, "enp1s0", 1_000)
    write_interface(tmp_path, "enp2s0", 25_000)
    write_interface(tmp_path, "enp3s0", 100_000, state="down")
    for name in ("lo", "docker0", "veth1", "br0", "bond0"):
        write_interface(tmp_path, name, 100_000, physical=False)
    assert read_network(tmp_path) == "eth25"


@pytest.mark.parametrize("speed", [-1, None])
def test_a_rate_that_is_not_told_is_left_out(tmp_path, speed):
    assert read_network(tmp_path) == ""
    write_interface(tmp_path, "eth0", speed)
    assert read_network(tmp_path) == ""


def test_a_plan_between_nodes_counts_what_was_read_and_says_what_is_assumed():
    machine = Machine(nodes=2, ranks_per_node=8, device_bytes=80 * GB, host_bytes=10**12, has_gpu=True)
    assert parse_interconnect("nvlink+1xroce200", GPUS["H100"])[1] == 0.8 * 25 * GB
    for links, nodes, assumed in (("nvlink", 2, True), ("nvlink", 1, False), ("pcie+eth25", 2, False), ("", 2, True)):
        speeds = speeds_of(dataclasses.replace(machine, nodes=nodes, interconnect=links), dtype="bfloat16")
        assert ("400 Gbit/s between nodes assumed" in speeds.source) == assumed
        assert speeds.network_bytes == (0.8 * 25 / 8 * GB if "eth" in links else 0.8 * 50 * GB)


@pytest.mark.parametrize("exists", [{"measured": True}, {"carried": {"speeds": {}}}])
def test_a_machine_whose_kernel_tells_no_rate_is_given_the_network_of_a_virtual_one(exists):
    machine = Machine(
        nodes=2, ranks_per_node=8, device_bytes=80 * GB, host_bytes=10**12, has_gpu=True, gpu_type="H100", **exists
    )
    for links in ("", "nvlink"):
        speeds = speeds_of(dataclasses.replace(machine, interconnect=links), dtype="bfloat16")
        assert speeds.network_bytes == 0.8 * 25 / 8 * GB
        assert "25 Gbit/s between nodes assumed (--interconnect" in speeds.source
    speeds = speeds_of(dataclasses.replace(machine, interconnect="nvlink+ib400"), dtype="bfloat16")
    assert speeds.network_bytes == 0.8 * 50 * GB


@pytest.mark.parametrize(
    ("read", "asked", "planned"),
    [
        ("pcie+8xib400", "nvlink", "nvlink+8xib400"),
        ("nvlink+8xib400", "eth25", "nvlink+eth25"),
        ("nvlink+8xib400", "pcie4+ib200", "pcie4+ib200"),
        ("nvlink", "nvlink", "nvlink"),
        ("nvlink", "wifi", "nvlink+wifi"),  # refused by parse_interconnect
        ("", "eth10", "eth10"),
    ],
)
def test_what_the_option_leaves_out_stays_as_it_was_read(read, asked, planned, monkeypatch):
    here = Machine(nodes=1, ranks_per_node=8, device_bytes=80 * GB, host_bytes=10**12, has_gpu=True, interconnect=read)
    monkeypatch.setattr("dsft.cli.plan.require_seen_gpus", lambda: None)
    monkeypatch.setattr("dsft.cli.plan.this_machine", lambda: here)
    assert [each.interconnect for each in read_machines(PlanOptions(interconnect=asked))] == [planned]


def matrix(*rows: str) -> str:
    """As `nvidia-smi topo -m` prints it."""
    header = "\t" + "\t".join(f"GPU{number}" for number in range(len(rows))) + "\tNIC0\tCPU Affinity\tNUMA Affinity"
    lines = [f"GPU{number}\t" + "\t".join(row.split()) + "\tPXB\t0-55\t0" for number, row in enumerate(rows)]
    return "\n".join([header, *lines, "NIC0\tPXB\tPXB\t X ", "", "Legend:", "  NV#  = a bonded set of # NVLinks"])


@pytest.mark.parametrize(
    ("rows", "links"),
    [
        (("X NV18 NV18", "NV18 X NV18", "NV18 NV18 X"), "nvlink"),
        (("X NV4", "NV4 X"), "nvlink"),
        (("X NV4 SYS SYS", "NV4 X SYS SYS", "SYS SYS X NV4", "SYS SYS NV4 X"), "pcie"),
        (("X PHB", "PHB X"), "pcie"),
        (("X",), "pcie"),
    ],
)
def test_nvlink_counts_where_it_joins_all_gpus(rows, links):
    assert read_topology(matrix(*rows))[0] == links


def test_only_visible_gpus_count():
    pairs = matrix("X NV4 SYS SYS", "NV4 X SYS SYS", "SYS SYS X NV4", "SYS SYS NV4 X")
    assert read_topology(pairs, "2,3")[0] == "nvlink" and read_topology(pairs, "1,2")[0] == "pcie"
    assert read_topology(pairs, "GPU-8a3f")[0] == "pcie" and read_topology(pairs, "0")[0] == "pcie"


def test_a_bridge_is_planned_slower_than_a_switch():
    for name, gigabytes in (("H100", 450), ("A40", 56), ("H100-NVL", 300)):
        assert parse_interconnect("nvlink", GPUS[name])[0] == 0.8 * gigabytes * GB


@pytest.mark.parametrize(
    ("flags", "native"),
    [
        ("flags : fpu avx512f avx512_bf16", True),
        ("Features : fp asimd bf16 i8mm", True),
        ("flags : fpu avx512f avx512_vnni", False),
    ],
)
def test_a_cpu_that_multiplies_bfloat16_is_known_by_its_flags(tmp_path, flags, native):
    (tmp_path / "cpuinfo").write_text(f"processor : 0\n{flags}\n")
    assert cpu_computes_bfloat16(tmp_path / "cpuinfo") is native


OF_CUDA_13 = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"]


@pytest.mark.parametrize(
    ("capability", "built_for", "is_refused"),
    [
        ((7, 0), OF_CUDA_13, True),
        ((6, 1), OF_CUDA_13, True),
        ((7, 5), OF_CUDA_13, False),
        ((8, 9), OF_CUDA_13, False),
        ((9, 0), OF_CUDA_13, False),
        ((12, 1), OF_CUDA_13, False),
        ((13, 0), OF_CUDA_13, False),
        ((8, 0), ["sm_86"], True),
        ((9, 0), ["sm_90a"], False),
        ((9, 4), [], False),
    ],
)
def test_a_card_without_kernels_is_refused_by_name(monkeypatch, capability, built_for, is_refused):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: built_for)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda gpu: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda gpu: "Tesla V100")
    if not is_refused:
        return require_kernels(0)
    with pytest.raises(UserError, match=rf"Tesla V100 has compute capability {capability[0]}\.{capability[1]}, .*sm_8"):
        require_kernels(0)


@pytest.fixture
def gpus_of_the_driver(tmp_path, monkeypatch):
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(hardware, "GPU_FILES", str(tmp_path / "nvidia[0-9]*"))
    monkeypatch.setattr(hardware, "AMD_FILE", str(tmp_path / "kfd"))
    monkeypatch.setattr(hardware, "AMD_MEMORY", str(tmp_path / "card*"))
    for name in ("DS_ACCELERATOR", *hardware.HIDING):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


def test_a_machine_without_a_driver_counts_its_ranks_without_torch():
    code = "import sys; from dsft.runtime import hardware; hardware._has_driver = lambda: False"
    code += "; assert hardware.default_ranks() in (1, 2) and 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


@pytest.mark.parametrize("name", ["GPU_FILES", "AMD_FILE", "WSL_FILE"])
def test_a_file_of_a_driver_is_enough_for_torch_to_be_asked(tmp_path, monkeypatch, name):
    def no_library(_):
        raise OSError

    monkeypatch.setattr(hardware.ctypes, "CDLL", no_library)
    for each in ("GPU_FILES", "AMD_FILE", "WSL_FILE"):
        monkeypatch.setattr(hardware, each, str(tmp_path / each))
    assert not hardware._has_driver()
    (tmp_path / name).touch()
    assert hardware._has_driver()


@pytest.mark.parametrize("start", [require_seen_gpus, accelerator, lambda: read_machines(PlanOptions())])
@pytest.mark.usefixtures("gpus_of_the_driver")
def test_gpus_that_torch_does_not_see_are_named(start):
    with pytest.raises(UserError, match="does not see; it is .* DS_ACCELERATOR=cpu"):
        start()


@pytest.mark.parametrize(
    ("name", "value"), [("DS_ACCELERATOR", "cpu"), ("CUDA_VISIBLE_DEVICES", ""), ("HIP_VISIBLE_DEVICES", "-1")]
)
@pytest.mark.usefixtures("gpus_of_the_driver")
def test_cpu_ranks_that_are_asked_for_start(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    require_seen_gpus()
    assert not read_machines(PlanOptions())[0].has_gpu


@pytest.mark.usefixtures("gpus_of_the_driver")
def test_a_plan_on_paper_asks_for_no_gpu_here():
    assert read_machines(PlanOptions(gpus="8xH100"))[0].gpu_type == "H100"


@pytest.mark.usefixtures("gpus_of_the_driver")
def test_a_machine_without_gpus_needs_no_word(monkeypatch, tmp_path):
    monkeypatch.setattr(hardware, "GPU_FILES", str(tmp_path / "none[0-9]*"))
    require_seen_gpus()


@pytest.mark.parametrize(("gigabytes", "is_refused"), [(192, True), (1, False)])
@pytest.mark.usefixtures("gpus_of_the_driver")
def test_amd_s_cards_are_named_but_not_a_processor_s_own_graphics(monkeypatch, tmp_path, gigabytes, is_refused):
    monkeypatch.setattr(hardware, "GPU_FILES", str(tmp_path / "none[0-9]*"))
    (tmp_path / "kfd").touch()
    (tmp_path / "card1").write_text(f"{gigabytes * 10**9}\n")
    with pytest.raises(UserError, match="kfd.* ROCm version") if is_refused else contextlib.nullcontext():
        require_seen_gpus()


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
    for name in ("require_same_start", "resolve_run"):
        monkeypatch.setattr(run, name, lambda *_, **__: None)
    run.finetune(TrainConfig(training={"output_dir": str(tmp_path)}))
    assert waits == [1] * left_lock


def test_a_second_training_of_a_process_has_peaks_of_its_own(tmp_path, monkeypatch):
    """As in a notebook. Before its steps the peaks of loading are kept."""
    from dsft.training import run

    for name in ("require_same_start", "resolve_run"):
        monkeypatch.setattr(run, name, lambda *_, **__: None)
    for first, second in ((80, 50), (10, 20)):
        monkeypatch.setattr(hardware, "peak_resident_bytes", lambda taken=first: taken)
        run.finetune(TrainConfig(training={"output_dir": str(tmp_path)}))
        set_back_peaks()
        monkeypatch.setattr(hardware, "peak_resident_bytes", lambda taken=second: taken)
        assert peak_memory_bytes() == {"host": max(first, second)}


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


START = """
import resource, sys, psutil
from dsft.runtime.hardware import keep_freed_memory
if sys.argv[1] != "default":
    keep_freed_memory(keeps=sys.argv[1] == "keeps")
"""
HALF = """
del (large := [bytearray(30 * 2**20)])[:]  # from here on glibc takes blocks of this size from its heap
blocks = [bytearray(b"x" * 4 * 2**20) for _ in range(60)]
del blocks[::2]
print(psutil.Process().memory_info().rss // 2**20)
"""
STEPS = """
for _ in range(5):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [bytearray(b"x" * 4 * 2**20) for _ in range(20)]
    del blocks
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


on_glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library has other rules")


def result_of(program: str, how: str) -> int:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    command = [sys.executable, "-c", START + program, how]
    done = subprocess.run(command, cwd=ROOT, env=kept, capture_output=True, text=True, check=True)
    return int(done.stdout)


@on_glibc
def test_half_of_the_blocks_freed_are_half_of_the_memory():
    kept, given_back = result_of(HALF, "default"), result_of(HALF, "gives back")
    assert kept - given_back > 90, "30 blocks of 4 MiB"


@on_glibc
def test_a_step_of_kept_memory_asks_the_system_for_none():
    """By page faults; without the kernel's huge pages there are 20,480 in a step of 80 MiB."""
    default, kept = result_of(STEPS, "default"), result_of(STEPS, "keeps")
    assert default > 30 and kept < default / 4


def test_pages_that_children_share_count_once_and_a_dead_child_holds_nothing():
    script = """
import os, sys
shared = bytearray(b"1") * 10**8
for _ in range(3):
    if not os.fork():
        break
else:
    print("they hold it", flush=True)
sys.stdin.read()
"""
    before = children_bytes()
    with (
        subprocess.Popen([sys.executable, "-c", ""]) as dead,
        subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent,
    ):
        os.waitid(os.P_PID, dead.pid, os.WEXITED | os.WNOWAIT)  # a zombie until it is asked for
        assert parent.stdout.readline()
        assert 10**8 <= children_bytes() - before < 2 * 10**8
        parent.stdin.close()


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
    assert hardware.cpu_count(range(2)) == min(2, cores)
