"""What code runs here: versions of packages, the commit of dsft and a hash of its files, and whether the operators that
DeepSpeed compiles can be. Imports no package by itself.
"""

import contextlib
import hashlib
import importlib.metadata
import os
import shlex
import shutil
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from packaging.version import Version

from dsft.errors import one_line

PACKAGE = Path(__file__).resolve().parent.parent  # folder of dsft
TESTED_PACKAGES = ("torch", "deepspeed", "transformers", "accelerate", "peft", "datasets")
"""Whose newest tested versions stand in constraints.txt."""
PACKAGES = ("dsft", *TESTED_PACKAGES, "safetensors")
NUMERIC_PACKAGES = (*TESTED_PACKAGES, "tokenizers", "numpy")
OPTIONAL_PACKAGES = ("bitsandbytes", "flash_attn", "kernels", "liger-kernel", "triton")
"""They compute where they are installed, and something else computes where they are not."""


def version_of(name: str, *, missing: str = "not installed") -> str:
    """Return the version of a package, or `missing` where it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return missing


def versions(*others: str) -> dict[str, str]:
    """Versions of Python and of every package that a run's numbers depend on; of `others` where they are installed.
    Raises PackageNotFoundError: one of PACKAGES is not installed.
    """
    installed = {"python": sys.version.split()[0]} | {name: importlib.metadata.version(name) for name in PACKAGES}
    return installed | {name: version for name in others if (version := version_of(name, missing=""))}


def numeric_versions() -> dict[str, str]:
    """Versions of what changes the numbers or the tokens of a run; of Python without the last digit, which does not."""
    python = ".".join(map(str, sys.version_info[:2]))
    return {"python": python} | {name: version_of(name) for name in (*NUMERIC_PACKAGES, *OPTIONAL_PACKAGES)}


def untested_versions(installed: Mapping[str, str] | None = None) -> list[str]:
    """Name each package that is newer than the newest version that dsft was tested with; by default of this
    environment.
    """
    installed = installed or {name: importlib.metadata.version(name) for name in TESTED_PACKAGES}
    file = "constraints.txt"
    path = PACKAGE / file if (PACKAGE / file).is_file() else PACKAGE.parent / file  # a wheel has it inside
    if not path.is_file():  # a copy of the package alone, as on nodes that share no folder
        return []
    untested = []
    for line in path.read_text(encoding="utf-8").splitlines():
        name, _, pin = line.partition("==")
        newest = pin.partition(";")[0].strip()
        if name.strip() in installed and newest:
            version = installed[name.strip()]
            # 2.13.0a0+nv25.9 and 2.13.0.post1 are 2.13.0
            if Version(Version(version).base_version) > Version(newest):
                untested.append(f"{name.strip()} {version} (tested up to {newest})")
    return untested


def git_commit() -> str | None:
    """Commit of the dsft checkout, with "+changes" where files differ from it; None outside a checkout."""
    command = ["git", "-C", PACKAGE.parent, "describe", "--always", "--abbrev=40", "--dirty=+changes"]
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.strip() or None
    except OSError:
        return None  # no git on this machine


def code_hash() -> str:
    """Hash the package's Python files and chat templates: two nodes may both say "+changes" and run different code."""
    total = hashlib.sha256()
    for path in sorted(path for suffix in ("py", "jinja") for path in PACKAGE.rglob(f"*.{suffix}")):
        total.update(str(path.relative_to(PACKAGE)).encode() + b"\0" + path.read_bytes())
    return total.hexdigest()[:12]


def compiler() -> str:
    """Return the C++ compiler that torch calls: CXX may also hold flags, or ccache before it."""
    return (shlex.split(os.environ.get("CXX", "")) or ["c++"])[0]


def compile_error() -> str:
    """Return what DeepSpeed's operators need to be compiled and is not there; empty if all is."""
    headers = Path(sysconfig.get_paths()["include"], "Python.h")
    if not shutil.which(compiler()):
        return f"{compiler()} is not there"
    return "" if headers.is_file() else f"{headers} is not there"


def offload_problems(deepspeed_config: Mapping[str, Any], *, has_gpu: bool = False) -> list[str]:
    """Say why the optimizer, which DeepSpeed compiles for an offload or a GPU at its first use, cannot be compiled."""
    optimizer = deepspeed_config.get("optimizer") or {}
    offload = (deepspeed_config.get("zero_optimization") or {}).get("offload_optimizer") or {}
    if (optimizer.get("params") or {}).get("torch_adam"):
        return []
    if offload.get("device", "none") == "none":
        kind = str(optimizer.get("type")).lower()
        reason = nvcc_problem() if has_gpu and kind in FUSED else ""
        return [f"zero: optimizer.type {kind}: nvcc cannot compile it ({reason}); AdamW needs none"] if reason else []
    from deepspeed.git_version_info import installed_ops
    from torch.utils.cpp_extension import _get_build_directory

    if installed_ops.get("cpu_adam"):
        return []
    with contextlib.suppress(OSError):  # it makes the folder
        if Path(_get_build_directory("cpu_adam", verbose=False), "cpu_adam.so").is_file():
            return []
    if not (reason := compile_error()):
        return []
    return [
        f"zero: with offload DeepSpeed compiles its CPUAdam, which {socket.gethostname()} cannot ({reason}): apt-get"
        " install g++ python3-dev, or take a zero without offload"
    ]


FUSED = ("adam", "adamw", "lamb", "lion")
"""Types of optimizers that DeepSpeed compiles for a GPU."""


def nvcc_problem() -> str:
    """Return why nvcc cannot compile FusedAdam; empty if it can, or did before."""
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
