"""Describes the running code: versions, commit, a hash of dsft's files, and whether operators can be compiled."""

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
"""Their newest tested versions are in constraints.txt."""
PACKAGES = ("dsft", *TESTED_PACKAGES, "safetensors")
NUMERIC_PACKAGES = (*TESTED_PACKAGES, "tokenizers", "numpy")
OPTIONAL_PACKAGES = ("bitsandbytes", "flash_attn", "kernels", "liger-kernel", "triton")
"""If they are installed they compute, else something else does."""


NOT_INSTALLED = "not installed"


def version_of(name: str) -> str:
    """Return the version of a package, or NOT_INSTALLED."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return NOT_INSTALLED


def versions(*others: str) -> dict[str, str]:
    """Return the versions of Python and every package that a run's results depend on, and of installed `others`."""
    of_packages = {name: version_of(name) for name in (*PACKAGES, *others)}
    installed = {name: version for name, version in of_packages.items() if version != NOT_INSTALLED}
    return {"python": sys.version.split()[0]} | installed


def numeric_versions() -> dict[str, str]:
    """Return the versions that can change a run's results or tokens; Python's without its patch number."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return {"python": python} | {name: version_of(name) for name in (*NUMERIC_PACKAGES, *OPTIONAL_PACKAGES)}


def untested_versions(installed: Mapping[str, str]) -> list[str]:
    """Name the packages that are newer than the newest version that dsft was tested with."""
    untested = []
    for folder in (PACKAGE, PACKAGE.parent):  # a wheel contains the file; a bare copy of the package does not
        file = folder / "constraints.txt"
        lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
        for line in lines:
            name, _, newest = line.partition("==")
            # 2.13.0a0+nv25.9 and 2.13.0.post1 are 2.13.0
            if name in installed and Version(Version(installed[name]).base_version) > Version(newest):
                untested.append(f"{name} {installed[name]} (tested up to {newest})")
    return untested


def git_commit() -> str | None:
    """Return the commit of the dsft checkout, with "+changes" if files differ from it; None outside a checkout."""
    command = ["git", "-C", PACKAGE.parent, "describe", "--always", "--abbrev=40", "--dirty=+changes"]
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.strip() or None
    except OSError:
        return None  # no git on this machine


def code_hash() -> str:
    """Hash the package's Python files and chat templates: two nodes with "+changes" may run different code."""
    total = hashlib.sha256()
    for path in sorted([*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.jinja")]):
        name = str(path.relative_to(PACKAGE))
        total.update(name.encode() + b"\0" + path.read_bytes())
    return total.hexdigest()[:12]


def compiler() -> str:
    """Return the C++ compiler that torch calls: CXX may also contain flags, or ccache first."""
    return (shlex.split(os.environ.get("CXX", "")) or ["c++"])[0]


def compile_error() -> str:
    """Return what is missing to compile DeepSpeed's operators; empty if nothing is."""
    headers = Path(sysconfig.get_paths()["include"], "Python.h")
    if not shutil.which(compiler()):
        return f"{compiler()} is not there"
    return "" if headers.is_file() else f"{headers} is not there"


FUSED = {"adam": "FusedAdam", "adamw": "FusedAdam", "lamb": "FusedLamb", "lion": "FusedLion"}
"""Type of optimizer in a DeepSpeed JSON -> the operator that DeepSpeed compiles for it on a GPU."""
ON_CPU = {"lion": "CPULion", "adagrad": "CPUAdagrad"}
"""The same for an offloaded one; CPUAdam for all others."""


def optimizer_problems(deepspeed_config: Mapping[str, Any], *, has_gpu: bool = False) -> list[str]:
    """Compile the optimizer, which DeepSpeed would do after loading the model; return why it cannot be compiled."""
    optimizer = deepspeed_config.get("optimizer") or {}
    offload = (deepspeed_config.get("zero_optimization") or {}).get("offload_optimizer") or {}
    kind = str(optimizer.get("type")).lower()
    if (optimizer.get("params") or {}).get("torch_adam"):
        return []
    if offload.get("device", "none") != "none":
        operator = ON_CPU.get(kind, "CPUAdam")
    elif has_gpu and kind in FUSED:
        operator = FUSED[kind]
    else:
        return []
    from deepspeed.accelerator import get_accelerator

    try:
        get_accelerator().create_op_builder(f"{operator}Builder").load(verbose=False)
    except Exception as error:  # no toolkit, another CUDA version, no compiler: many classes
        reason = compile_error() or one_line(error)
        return [
            f"zero: {socket.gethostname()} cannot compile DeepSpeed's {operator} ({reason}): apt-get install g++"
            " python3-dev (on a GPU, nvcc of torch's CUDA), or take a zero without it"
        ]
    return []
