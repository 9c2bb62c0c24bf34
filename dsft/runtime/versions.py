"""Which code runs here: versions of Python and packages, the commit of dsft and a hash of its files. Imports none of
the packages.
"""

import hashlib
import importlib.metadata
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from packaging.version import Version

PACKAGES = ("dsft", "torch", "deepspeed", "transformers", "accelerate", "peft", "datasets", "safetensors")
NUMERIC_PACKAGES = ("torch", "deepspeed", "transformers", "accelerate", "peft", "tokenizers", "datasets", "numpy")
TESTED_PACKAGES = ("torch", "deepspeed", "transformers", "accelerate", "peft", "datasets")
"""Whose versions dsft was tested between: constraints-oldest.txt to constraints.txt."""
OPTIONAL_PACKAGES = ("bitsandbytes", "flash_attn", "kernels", "liger-kernel", "triton")
"""They compute where they are installed, and something else computes where they are not."""


def versions(*others: str) -> dict[str, str]:
    """Versions of Python and of every package that a run's numbers depend on.

    Args:
        others: packages that count where they are installed.

    Raises:
        PackageNotFoundError: where one of PACKAGES is not installed.
    """
    installed = {"python": sys.version.split()[0]} | {name: importlib.metadata.version(name) for name in PACKAGES}
    return installed | {name: version for name in others if (version := _version_of(name))}


def _version_of(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def numeric_versions() -> dict[str, str]:
    """Versions of what changes the numbers or the tokens of a run; of Python without the last digit, which does not."""
    installed = {"python": ".".join(map(str, sys.version_info[:2]))}
    for name in (*NUMERIC_PACKAGES, *OPTIONAL_PACKAGES):
        installed[name] = _version_of(name) or "not installed"
    return installed


def untested_versions(installed: Mapping[str, str] | None = None) -> list[str]:
    """Name each package that is newer than the newest version that dsft was tested with, or older than the oldest.

    Args:
        installed: package -> version; by default those of this environment.
    """
    installed = installed or {name: importlib.metadata.version(name) for name in TESTED_PACKAGES}
    oldest, newest = (_pinned(f"constraints{which}.txt") for which in ("-oldest", ""))
    return [
        f"{name} {installed[name]} (tested: {oldest[name]} to {newest[name]})"
        for name in TESTED_PACKAGES
        if not _release(oldest[name]) <= _release(installed[name]) <= _release(newest[name])
    ]


def _release(version: str) -> tuple[int, ...]:
    """Return the numbers of a version: 2.13.0+cu130 is 2.13.0, and 2.13."""
    release = Version(version).release
    return release + (0,) * (4 - len(release))


def _pinned(file: str) -> dict[str, str]:
    """Read the versions that a file of constraints names."""
    package = Path(__file__).resolve().parent.parent
    path = package / file if (package / file).is_file() else package.parent / file  # a wheel has it inside
    lines = (line.split("==") for line in path.read_text(encoding="utf-8").splitlines() if "==" in line)
    return {name.strip(): version.split(";")[0].strip() for name, version in lines}


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


def code_folder() -> Path:
    """Returns the checkout that dsft runs from; where it was installed from a wheel, the package itself."""
    package = Path(__file__).resolve().parent.parent
    return package.parent if (package.parent / "pyproject.toml").is_file() else package


def code_hash() -> str:
    """Hash the package's Python files and chat templates: two nodes may both say "+changes" and run different code."""
    folder = Path(__file__).resolve().parent.parent
    total = hashlib.sha256()
    for path in sorted(path for suffix in ("py", "jinja") for path in folder.rglob(f"*.{suffix}")):
        total.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes())
    return total.hexdigest()[:12]
