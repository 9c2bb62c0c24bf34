"""GPUs that torch does not see are no reason to train on the CPU in silence."""

import pytest

from dsft.cluster.launch.environment import accelerator
from dsft.errors import UserError
from dsft.runtime import hardware
from dsft.runtime.hardware import require_seen_gpus


@pytest.fixture(autouse=True)
def gpus_of_the_driver(tmp_path, monkeypatch):
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(hardware, "GPU_FILES", str(tmp_path / "nvidia[0-9]*"))
    for name in ("DS_ACCELERATOR", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


@pytest.mark.parametrize("start", [require_seen_gpus, accelerator])
def test_gpus_that_torch_does_not_see_are_named(start):
    with pytest.raises(UserError, match="does not see; it is .* DS_ACCELERATOR=cpu"):
        start()


@pytest.mark.parametrize(("name", "value"), [("DS_ACCELERATOR", "cpu"), ("CUDA_VISIBLE_DEVICES", "")])
def test_cpu_ranks_that_are_asked_for_start(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    require_seen_gpus()


def test_a_machine_without_gpus_needs_no_word(monkeypatch, tmp_path):
    monkeypatch.setattr(hardware, "GPU_FILES", str(tmp_path / "none[0-9]*"))
    require_seen_gpus()
