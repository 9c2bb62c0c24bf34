"""GPUs and their driver as nvidia-smi tells them: no context is made on a GPU, and torch is not imported."""

import shutil
import subprocess
from typing import Any

from dsft.units import MiB

QUERY = "index,name,memory.total,memory.used,driver_version,ecc.errors.uncorrected.volatile.total,temperature.gpu"


def gpu_facts() -> dict[str, Any]:
    """{"driver", "list": [{index, name, memory_bytes, used_bytes, ecc_errors, celsius}], "error"}; the error is empty
    where there is none, or no GPU.
    """
    if not shutil.which("nvidia-smi"):
        return {"driver": "", "list": [], "error": ""}
    try:
        result = subprocess.run(
            ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=15,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"driver": "", "list": [], "error": f"nvidia-smi: {' '.join(str(error).split())[:200]}"}
    if result.returncode:
        text = " ".join((result.stdout + result.stderr).split())[:200]
        return {"driver": "", "list": [], "error": "" if "No devices were found" in text else f"nvidia-smi: {text}"}
    return parse_gpus(result.stdout)


def parse_gpus(text: str) -> dict[str, Any]:
    """The answer to `QUERY`. Numbers that a GPU does not have ("[N/A]") are 0."""
    gpus, driver = [], ""
    for line in filter(None, text.splitlines()):
        index, name, total, used, driver, errors, celsius = (part.strip() for part in line.split(","))
        gpus.append(
            {
                "index": _number(index),
                "name": name,
                "memory_bytes": _number(total) * MiB,
                "used_bytes": _number(used) * MiB,
                "ecc_errors": _number(errors),
                "celsius": _number(celsius),
            }
        )
    return {"driver": driver, "list": gpus, "error": ""}


def _number(text: str) -> int:
    return int(text) if text.isdigit() else 0
