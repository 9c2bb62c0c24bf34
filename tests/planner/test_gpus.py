"""Cards by name and by size: the memory a plan on paper has is what a run on that card has."""

import pytest
import torch

from dsft.cli.commands import PlanOptions
from dsft.cli.plan import read_machines
from dsft.errors import UserError
from dsft.planner import calibration
from dsft.planner.calibration import keep, ranks_key, speeds_for
from dsft.planner.step_time import GPUS, OTHERS, Speeds, gpu_name, named_gpus, speeds_of
from dsft.runtime.hardware import Machine
from dsft.units import GB, GiB


def machine_of(**options) -> Machine:
    return read_machines(PlanOptions(**options))[0]


@pytest.mark.parametrize(
    ("options", "name", "usable_gib"),
    [
        ({"gpus": "8x80GB"}, "A100-80GB", 79.15),
        ({"gpus": "8x80GB", "gpu_type": "H100"}, "H100", 79.1),
        ({"gpus": "8xH100"}, "H100", 79.1),
        ({"gpus": "8x141GB"}, "H200", 139.8),
        ({"gpus": "8x40GB"}, "A100-40GB", 39.39),
        ({"gpu_type": "A100-40GB"}, "A100-40GB", 39.39),
        ({"gpus": "8x40GB", "gpu_type": "A100"}, "A100-40GB", 39.39),
        ({"gpu_type": "V100-16GB"}, "V100-16GB", 15.78),
        ({"gpus": "4x48GB", "gpu_type": "L40S"}, "L40S", 44.42),
        ({"gpus": "2x4090"}, "4090", 23.64),
        ({"gpus": "1x16GB", "gpu_type": "T4"}, "T4", 14.56),
        ({"gpus": "8x10GB", "gpu_type": "A100"}, "A100-40GB", 10 * GB / GiB),  # a part of a card
    ],
)
def test_a_card_on_paper_has_the_memory_that_programs_see(options, name, usable_gib):
    machine = machine_of(**options)
    assert machine.gpu_type == name
    assert machine.device_bytes == pytest.approx(usable_gib * GiB, rel=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpu_type": "A100"}, "A100-80GB and A100-40GB; name one"),
        ({"gpus": "8x96GB"}, r"may be H20 \(94.9 GiB usable\), GH200 .*RTX-PRO-6000.*--gpu_type"),
        ({"gpus": "8x48GB"}, "L40S.*A6000.*--gpu_type"),
        ({"gpus": "1x24GB"}, "4090.*A10.*--gpu_type"),
        ({"gpus": "8x80TB"}, "80,000 GB each: no such GPU"),
        ({"gpus": "1x12GB"}, "no such GPU is known; name the card"),
        ({"gpus": "8x80GB", "gpu_type": "4090"}, "a 4090 has 24 GB"),
        ({"gpus": "8x80TB", "gpu_type": "H100"}, "a H100 has 80 GB"),
        ({"gpus": "1000000x80GB"}, "no node has more than 72"),
        ({"gpus": "8x80GB", "nodes": "200000"}, "1,600,000 GPUs: the largest clusters"),
        ({"gpus": "8xH100", "gpu_type": "H200"}, "both name the card"),
        ({"gpu_type": "Z80"}, "--gpu_type Z80: invalid choice"),
        ({"gpus": "0x80GB"}, "8x80GB"),
        ({"gpus": "80GB"}, "8x80GB"),
        ({"gpus": "8x80G"}, "80GB"),
    ],
)
def test_what_several_cards_may_be_is_asked_and_the_impossible_refused(options, message):
    with pytest.raises(UserError, match=message):
        machine_of(**options)


@pytest.mark.parametrize(
    ("driver_name", "name"),
    [
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA A100 80GB PCIe", "A100-80GB"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100-PCIE"),
        ("NVIDIA H100 NVL", "H100-NVL"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA H200 NVL", "H200-NVL"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA H20", "H20"),
        ("NVIDIA H20-3e", "H20-3E"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX-PRO-6000"),
        ("RTX-PRO-6000", "RTX-PRO-6000"),
        ("PRO 6000", "RTX-PRO-6000"),
        ("NVIDIA H800", "H800"),
        ("NVIDIA GeForce RTX 4090", "4090"),
        ("NVIDIA RTX 6000 Ada Generation", "6000-ADA"),
        ("NVIDIA RTX A6000", "A6000"),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA A10", "A10"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA GeForce RTX 5090", "5090"),
        ("Tesla V100-SXM2-16GB", "V100-16GB"),
        ("Tesla T4", "T4"),
        ("AMD Instinct MI325X", "MI325X"),
        ("AMD Instinct MI250X", "MI250X"),
    ],
)
def test_a_drivers_name_finds_its_card(driver_name, name):
    assert named_gpus(driver_name) == [name]
    machine = Machine(
        nodes=1,
        ranks_per_node=1,
        device_bytes=GPUS[name].usable_bytes,
        host_bytes=GB,
        has_gpu=True,
        gpu_type=driver_name,
        measured=True,
    )
    assert gpu_name(machine) == name


@pytest.mark.parametrize(
    "driver_name",
    [
        "NVIDIA GB200",
        "NVIDIA B300 SXM6 AC",
        "NVIDIA GeForce RTX 4080",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "RTX 4090D",
        "NVIDIA GeForce RTX 5090 D",
        "NVIDIA RTX PRO 6000D",
        "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",
        "NVIDIA H800 PCIe",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "NVIDIA A100X",
        "NVIDIA A16",
        "NVIDIA L40G",
        "NVIDIA RTX A4000",
        "Quadro RTX 6000",
        "AMD Instinct MI300A",
    ],
)
def test_a_card_of_another_name_is_not_taken_for_a_known_one(driver_name):
    """Its seconds would be those of the known one: GB200's were an MI300X's, a 4080's those of a V100."""
    assert named_gpus(driver_name) == []
    machine = unknown_gpu(driver_name)
    speeds = speeds_of(machine, dtype="bfloat16")
    assert not speeds.has_time_estimate and f"{driver_name} is in no table, so no time is estimated" in speeds.source


def unknown_gpu(driver_name: str, **changes) -> Machine:
    values = {"nodes": 1, "ranks_per_node": 1, "device_bytes": 186 * GB, "host_bytes": GB, "has_gpu": True}
    return Machine(**values | {"gpu_type": driver_name, "measured": True} | changes)


def test_a_product_is_timed_once_on_an_unknown_card_of_this_machine(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    runs = []
    monkeypatch.setattr(calibration, "has_gpu", lambda: True)
    monkeypatch.setattr(calibration, "device", lambda: "cuda:0")
    monkeypatch.setattr(calibration, "matmul_flops", lambda place: runs.append(place) or 1.5e15)
    machine = unknown_gpu("NVIDIA GB200")

    def speeds(machine: Machine, dtype: str = "bfloat16") -> Speeds:
        return speeds_for(machine, dtype=dtype)

    first = speeds(machine)
    assert (
        first.has_time_estimate
        and first.flops == pytest.approx(OTHERS * 1.5e15)
        and "a product timed here" in first.source
    )
    assert speeds(machine) == first and speeds(machine, "float32").flops == pytest.approx(first.flops / 8)
    assert runs == ["cuda:0"], "kept for later plans"
    speeds(unknown_gpu("NVIDIA H100 80GB HBM3"))
    speeds(unknown_gpu("H100", measured=False))
    assert len(runs) == 1, "known cards are not timed"
    keep("ranks", ranks_key(machine, "bfloat16"), {"flops": 7e14})
    assert speeds(machine).flops == 7e14, "calibrated"


def test_where_an_unknown_card_has_no_room_for_a_product_no_time_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(calibration, "has_gpu", lambda: True)

    def full() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(calibration, "device", full)
    machine = unknown_gpu("NVIDIA GB200")
    speeds = speeds_for(machine, dtype="bfloat16")
    assert not speeds.has_time_estimate and not (tmp_path / "dsft").exists()


def test_every_card_says_where_its_numbers_are_from():
    for name, gpu in GPUS.items():
        assert 0.9 * gpu.memory_gb * GB < gpu.usable_bytes <= gpu.memory_gb * GiB, name
        assert gpu.memory_source and bool(gpu.matmul_tflops) == bool(gpu.matmul_source), name
        assert named_gpus(name) == [name]
