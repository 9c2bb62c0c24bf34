"""A GPU that torch was not built for is refused by name."""

import pytest
import torch

from dsft.errors import UserError
from dsft.runtime.hardware import require_kernels

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
