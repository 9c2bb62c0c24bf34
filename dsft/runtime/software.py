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

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from dsft.errors import one_line

PACKAGE = Path(__file__).resolve().parent.parent  # folder of dsft
TESTED_PACKAGES = ("torch", "deepspeed", "transformers", "accelerate", "peft", "datasets")
"""Whose versions dsft was tested between: constraints-oldest.txt to constraints.txt."""
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
    """Name each package that is newer than the newest version that dsft was tested with, or older than the oldest; by
    default of this environment.
    """
    installed = installed or {name: importlib.metadata.version(name) for name in TESTED_PACKAGES}
    pins = []
    for file in ("constraints-oldest.txt", "constraints.txt"):
        path = PACKAGE / file if (PACKAGE / file).is_file() else PACKAGE.parent / file  # a wheel has it inside
        if not path.is_file():  # a copy of the package alone, as on nodes that share no folder
            return []
        lines = (line.split("==") for line in path.read_text(encoding="utf-8").splitlines() if "==" in line)
        pins.append({name.strip(): version.split(";")[0].strip() for name, version in lines})
    oldest, newest = pins
    tested = {name: SpecifierSet(f">={oldest[name]},<={newest[name]}") for name in TESTED_PACKAGES}
    return [
        f"{name} {installed[name]} (tested: {oldest[name]} to {newest[name]})"
        for name, specifier in tested.items()
        if not specifier.contains(Version(installed[name]).base_version)  # 2.13.0a0+nv25.9 and 2.13.0.post1 are 2.13.0
    ]


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


PROGRAM = "#include <Python.h>\n#include <omp.h>\nint main() { return omp_get_max_threads() == 0; }\n"
COMPILE_SECONDS = 15


def compiler_words() -> list[str]:
    """Return the command of the C++ compiler, as torch calls it: CXX may hold flags, or ccache before it."""
    return shlex.split(os.environ.get("CXX") or "c++") or ["c++"]


def compile_error() -> str:
    """The compiler's first complaint about a program of one line, with the headers that DeepSpeed's operators need, or
    that there is no compiler; empty where it compiles, and where that takes too long to know.
    """
    words = compiler_words()
    if not shutil.which(words[0]):
        return f"{words[0]} is not there"
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
    """Return why nvcc cannot compile FusedAdam; empty where it can, or did before."""
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
