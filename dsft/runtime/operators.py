"""The operators that DeepSpeed compiles: whether this machine can. Its AdamW is compiled by nvcc on a GPU, and with
offload by the C++ compiler.
"""

import contextlib
import os
import shlex
import shutil
import socket
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

from dsft.errors import one_line

PROGRAM = "#include <Python.h>\n#include <omp.h>\nint main() { return omp_get_max_threads() == 0; }\n"
COMPILE_SECONDS = 15


def offload_problems(deepspeed_config: dict[str, Any]) -> list[str]:
    """Say why the optimizer of an offload, which DeepSpeed compiles at its first use, cannot be compiled here."""
    offload = (deepspeed_config.get("zero_optimization") or {}).get("offload_optimizer") or {}
    parameters = (deepspeed_config.get("optimizer") or {}).get("params") or {}
    if offload.get("device", "none") == "none" or parameters.get("torch_adam"):
        return []
    from deepspeed.git_version_info import installed_ops
    from torch.utils.cpp_extension import _get_build_directory

    if installed_ops.get("cpu_adam"):
        return []
    with contextlib.suppress(OSError):  # it makes the folder
        if Path(_get_build_directory("cpu_adam", verbose=False), "cpu_adam.so").is_file():
            return []
    compiler = compiler_words()[0]
    reason = compile_error() if shutil.which(compiler) else f"{compiler} is not there"
    if not reason:
        return []
    return [
        f"zero: with offload DeepSpeed compiles its CPUAdam, which {socket.gethostname()} cannot ({reason}): apt-get"
        " install g++ python3-dev, or take a zero without offload"
    ]


def compiler_words() -> list[str]:
    """Return the command of the C++ compiler, as torch calls it: CXX may hold flags, or ccache before it."""
    return shlex.split(os.environ.get("CXX") or "c++") or ["c++"]


def compile_error() -> str:
    """The compiler's first complaint about a program of one line, with the headers that DeepSpeed's operators need;
    empty where it compiles, where there is no compiler, and where that takes too long to know.
    """
    words = compiler_words()
    if not shutil.which(words[0]):
        return ""
    command = [*words, "-x", "c++", "-fopenmp", f"-I{sysconfig.get_paths()['include']}", "-fsyntax-only", "-"]
    try:
        result = subprocess.run(command, input=PROGRAM, capture_output=True, text=True, timeout=COMPILE_SECONDS)
    except subprocess.TimeoutExpired:  # a busy machine
        return ""
    except OSError as error:
        return one_line(error)[:200]
    if not result.returncode:
        return ""
    lines = [line for line in result.stderr.splitlines() if "error" in line]
    return (lines or [result.stderr.strip() or f"exit code {result.returncode}"])[0][:200]


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
