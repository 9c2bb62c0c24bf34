"""Whether DeepSpeed's operators can be compiled here: a program of one line, with the compiler and the headers they
need.
"""

import os
import shutil
import subprocess
import sysconfig

PROGRAM = "#include <Python.h>\n#include <omp.h>\nint main() { return omp_get_max_threads() == 0; }\n"


def compile_error() -> str:
    """The compiler's first complaint; empty where it compiles, or where there is no compiler (which is said
    elsewhere).
    """
    compiler = shutil.which(os.environ.get("CXX") or "c++")
    if not compiler:
        return ""
    command = [compiler, "-x", "c++", "-fopenmp", f"-I{sysconfig.get_paths()['include']}", "-fsyntax-only", "-"]
    try:
        result = subprocess.run(command, input=PROGRAM, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return " ".join(str(error).split())[:200]
    lines = [line for line in result.stderr.splitlines() if "error" in line]
    return (
        "" if not result.returncode else (lines or [result.stderr.strip() or f"exit code {result.returncode}"])[0][:200]
    )
