"""DeepSpeed's AdamW is compiled by nvcc at the first step; where that cannot be, torch's is taken."""

import pytest

from dsft.errors import UserError
from dsft.run_setup import resolve
from dsft.runtime.operators import nvcc_problem

ADAMW = {"zero_optimization": {"stage": 2}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}
CPU_ADAM = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}, "optimizer": {"type": "AdamW"}}
CASES = [
    (ADAMW, {"lr": 1e-4, "torch_adam": True}),
    (ADAMW | {"optimizer": {"type": "adam"}}, {"torch_adam": True}),
    (ADAMW | {"optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}, {"torch_adam": True}),
    (
        ADAMW
        | {"optimizer": {"type": "AdamW", "params": {"bias_correction": True, "set_grad_none": True, "eps": 1e-6}}},
        {"eps": 1e-6, "torch_adam": True},
    ),
    (ADAMW | {"optimizer": {"type": "SGD", "params": {"lr": 1e-4}}}, {"lr": 1e-4}),
    (CPU_ADAM, None),
]


@pytest.fixture
def without_toolkit(monkeypatch):
    import torch.utils.cpp_extension

    monkeypatch.setattr(torch.utils.cpp_extension, "CUDA_HOME", None)
    monkeypatch.setattr(resolve, "has_gpu", lambda: True)


@pytest.mark.parametrize(("content", "parameters"), CASES)
def test_without_nvcc_torch_s_adam_is_taken(without_toolkit, content, parameters):
    taken, notes = resolve._with_an_adam_that_compiles(content)
    assert taken["optimizer"].get("params") == parameters
    assert bool(notes) == (taken != content) and all("CUDA_HOME does not exist" in note for note in notes)


def test_without_nvcc_an_optimizer_that_torch_lacks_is_refused(without_toolkit):
    with pytest.raises(UserError, match="optimizer.type lion: nvcc cannot compile it .*CUDA_HOME does not exist"):
        resolve._with_an_adam_that_compiles(ADAMW | {"optimizer": {"type": "Lion", "params": {"lr": 1e-4}}})


def test_a_toolkit_of_another_cuda_is_named(tmp_path, monkeypatch):
    import torch.utils.cpp_extension

    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 11.8, V11.8.89'\n")
    nvcc.chmod(0o755)
    monkeypatch.setattr(torch.utils.cpp_extension, "CUDA_HOME", str(tmp_path))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert "11.8 does not match the version torch was compiled with 13.0" in nvcc_problem()
    monkeypatch.setattr(torch.version, "cuda", "11.8")
    assert nvcc_problem() == ""
