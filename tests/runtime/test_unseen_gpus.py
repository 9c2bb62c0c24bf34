"""GPUs that torch does not see are no reason to train on the CPU in silence."""

import contextlib

import pytest

from dsft.cli.commands import PlanOptions
from dsft.cli.plan_machine import read_machines
from dsft.errors import UserError
from dsft.launch.environment import accelerator
from dsft.runtime import hardware
from dsft.runtime.hardware import require_seen_gpus


@pytest.fixture(autouse=True)
def gpus_of_the_driver(tmp_path, monkeypatch):
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(hardware, "GPU_FILES", str(tmp_path / "nvidia[0-9]*"))
    monkeypatch.setattr(hardware, "AMD_FILE", str(tmp_path / "kfd"))
    monkeypatch.setattr(hardware, "AMD_MEMORY", str(tmp_path / "card*"))
    for name in ("DS_ACCELERATOR", *hardware.HIDING):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


@pytest.mark.parametrize("start", [require_seen_gpus, accelerator, lambda: read_machines(PlanOptions())])
def test_gpus_that_torch_does_not_see_are_named(start):
    with pytest.raises(UserError, match="does not see; it is .* DS_ACCELERATOR=cpu"):
        start()


@pytest.mark.parametrize(
    ("name", "value"), [("DS_ACCELERATOR", "cpu"), ("CUDA_VISIBLE_DEVICES", ""), ("HIP_VISIBLE_DEVICES", "-1")]
)
def test_cpu_ranks_that_are_asked_for_start(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    require_seen_gpus()
    assert not read_machines(PlanOptions())[0].has_gpu


def test_a_plan_on_paper_asks_for_no_gpu_here():
    assert read_machines(PlanOptions(gpus="8xH100"))[0].gpu_type == "H100"


def test_a_machine_without_gpus_needs_no_word(monkeypatch, tmp_path):
    monkeypatch.setattr(hardware, "GPU_FILES", str(tmp_path / "none[0-9]*"))
    require_seen_gpus()


@pytest.mark.parametrize(("gigabytes", "is_refused"), [(192, True), (1, False)])
def test_amd_s_cards_are_named_but_not_a_processor_s_own_graphics(monkeypatch, tmp_path, gigabytes, is_refused):
    monkeypatch.setattr(hardware, "GPU_FILES", str(tmp_path / "none[0-9]*"))
    (tmp_path / "kfd").touch()
    (tmp_path / "card1").write_text(f"{gigabytes * 10**9}\n")
    with pytest.raises(UserError, match="kfd.* ROCm version") if is_refused else contextlib.nullcontext():
        require_seen_gpus()
