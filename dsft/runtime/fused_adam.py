"""Tells whether the optimizers that DeepSpeed compiles by nvcc can be compiled here. Its AdamW is one on a GPU, without
offload.
"""

from typing import Any

from dsft.errors import one_line

FUSED = ("adam", "adamw", "lamb", "lion")
OF_FUSED_ADAM_ALONE = {"bias_correction": True, "set_grad_none": None}
"""Parameters that torch's Adam does not have, with the value by which it works; None for any."""


def nvcc_problem() -> str:
    """Return why nvcc cannot compile FusedAdam, or that it need not: empty where it can, or was before."""
    import torch
    from deepspeed.git_version_info import installed_ops
    from deepspeed.ops.op_builder.builder import assert_no_cuda_mismatch

    if installed_ops.get("fused_adam") or torch.version.hip:
        return ""
    try:
        assert_no_cuda_mismatch("fused_adam")
    except Exception as error:  # no toolkit, one of another CUDA, or a compiler whose version cannot be read
        return one_line(error)
    return ""


def fused_optimizer(deepspeed_config: dict[str, Any]) -> str:
    """Name the optimizer that a configuration makes DeepSpeed compile for a GPU; empty for none."""
    optimizer = deepspeed_config.get("optimizer") or {}
    offload = (deepspeed_config.get("zero_optimization") or {}).get("offload_optimizer") or {}
    kind = str(optimizer.get("type")).lower()
    is_torch = (optimizer.get("params") or {}).get("torch_adam", False)
    return kind if kind in FUSED and not is_torch and offload.get("device", "none") == "none" else ""


def with_torch_adam(deepspeed_config: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a configuration that takes torch's Adam instead, with the same parameters."""
    optimizer = deepspeed_config["optimizer"]
    parameters = {
        name: value
        for name, value in (optimizer.get("params") or {}).items()
        if OF_FUSED_ADAM_ALONE.get(name, ...) not in (value, None)
    }
    return deepspeed_config | {"optimizer": optimizer | {"params": parameters | {"torch_adam": True}}}
