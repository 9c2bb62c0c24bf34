"""Tells whether DeepSpeed's FusedAdam can be compiled here. Its AdamW is that one on a GPU, without offload."""

from typing import Any

from dsft.errors import one_line


def fused_adam_problem() -> str:
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


def takes_fused_adam(deepspeed_config: dict[str, Any]) -> bool:
    """Tell whether a configuration makes DeepSpeed compile FusedAdam on a GPU."""
    optimizer = deepspeed_config.get("optimizer") or {}
    offload = (deepspeed_config.get("zero_optimization") or {}).get("offload_optimizer") or {}
    is_adam = str(optimizer.get("type")).lower() in ("adam", "adamw")
    is_torch = (optimizer.get("params") or {}).get("torch_adam", False)
    return is_adam and not is_torch and offload.get("device", "none") == "none"


def with_torch_adam(deepspeed_config: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a configuration that takes torch's Adam instead, with the same parameters."""
    optimizer = deepspeed_config["optimizer"]
    parameters = (optimizer.get("params") or {}) | {"torch_adam": True}
    return deepspeed_config | {"optimizer": optimizer | {"params": parameters}}
