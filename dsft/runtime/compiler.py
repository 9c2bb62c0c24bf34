"""Tells whether this machine can compile what DeepSpeed's offload needs."""

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
    if offload.get("device", "none") == "none" or parameters.get("torch_adam") or _is_compiled():
        return []
    compiler = compiler_words()[0]
    reason = compile_error() if shutil.which(compiler) else f"{compiler} is not there"
    if not reason:
        return []
    return [
        f"zero: with offload DeepSpeed compiles its CPUAdam, which {socket.gethostname()} cannot ({reason}): apt-get"
        " install g++ python3-dev, or take a zero without offload"
    ]


def _is_compiled() -> bool:
    from deepspeed.git_version_info import installed_ops
    from torch.utils.cpp_extension import _get_build_directory

    name = "cpu_adam"
    if installed_ops.get(name):
        return True
    try:
        return Path(_get_build_directory(name, verbose=False), f"{name}.so").is_file()
    except OSError:  # it makes the folder
        return False


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
