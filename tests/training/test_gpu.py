"""What only a GPU shows. Skipped, with the reason, on machines without one."""

import importlib.util

import pytest
import torch
from conftest import flags, read_json

from dsft.models.quantization import FORMATS

pytestmark = [
    pytest.mark.launch,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: torch.cuda.is_available() is false here"),
]


@pytest.fixture(autouse=True)
def on_gpu(monkeypatch):
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)


@pytest.mark.parametrize("zero", ["auto", "3"])
def test_training_takes_bfloat16_and_reports_gpu_memory(run, options, tmp_path, zero):
    result = run(["dsft", "train", *flags(options(tmp_path / "run", zero=zero))])
    assert result.returncode == 0, result.stderr
    content = read_json(tmp_path / "run" / "run.json")
    assert content["config"]["dtype"] == "bfloat16" and content["results"]["peak_gpu_gib"] > 0


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="needs the package bitsandbytes")
@pytest.mark.parametrize("quantization", FORMATS)
def test_qlora_trains_over_a_quantised_base(run, options, tmp_path, quantization):
    result = run(
        ["dsft", "train", *flags(options(tmp_path / "run", method="qlora", quantization=quantization, zero="2"))]
    )
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "run" / "final" / "adapter_config.json").is_file()
