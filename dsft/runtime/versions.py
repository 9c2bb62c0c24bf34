"""Which code runs here: versions of Python and packages, the commit of dsft and a hash of its files. Imports none of
the packages.
"""

import hashlib
import importlib.metadata
import subprocess
import sys
from pathlib import Path

PACKAGES = ("dsft", "torch", "deepspeed", "transformers", "accelerate", "peft", "datasets", "safetensors")


def versions() -> dict[str, str]:
    """Versions of Python and of every package that a run's numbers depend on.

    Raises:
        PackageNotFoundError: where one is not installed.
    """
    return {"python": sys.version.split()[0]} | {name: importlib.metadata.version(name) for name in PACKAGES}


def git_commit() -> str | None:
    """Commit of the dsft checkout, with "+changes" where files differ from it; None outside a checkout."""
    root = Path(__file__).resolve().parent.parent.parent
    try:
        describe = subprocess.run(
            ["git", "-C", root, "describe", "--always", "--abbrev=40", "--dirty=+changes"],
            capture_output=True,
            text=True,
        )
    except OSError:
        return None  # no git on this machine
    return describe.stdout.strip() or None


def code_hash() -> str:
    """Hash all Python files of the package: two nodes may both say "+changes" and run different code."""
    folder = Path(__file__).resolve().parent.parent
    total = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        total.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes())
    return total.hexdigest()[:12]
