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

PACKAGE = Path(__file__).resolve().parent.parent  # folder of dsft
PACKAGES = ("dsft", "torch", "deepspeed", "transformers", "accelerate", "peft", "datasets", "safetensors")
NUMERIC_PACKAGES = ("torch", "deepspeed", "transformers", "accelerate", "peft", "tokenizers", "datasets", "numpy")
TESTED_PACKAGES = ("torch", "deepspeed", "transformers", "accelerate", "peft", "datasets")
"""Whose versions dsft was tested between: constraints-oldest.txt to constraints.txt."""
OPTIONAL_PACKAGES = ("bitsandbytes", "flash_attn", "kernels", "liger-kernel", "triton")
"""They compute where they are installed, and something else computes where they are not."""


def versions(*others: str) -> dict[str, str]:
    """Versions of Python and of every package that a run's numbers depend on; of `others` where they are installed.

    Raises:
        PackageNotFoundError: where one of PACKAGES is not installed.
    """
    installed = {"python": sys.version.split()[0]} | {name: importlib.metadata.version(name) for name in PACKAGES}
    return installed | {name: version for name in others if (version := version_of(name, missing=""))}


def version_of(name: str, *, missing: str = "not installed") -> str:
    """Return the version of a package, or `missing` where it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return missing


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

    def release(version: str) -> Version:  # 2.13.0+cu130 is 2.13.0, and 2.13
        return Version(Version(version).base_version)

    return [
        f"{name} {installed[name]} (tested: {oldest[name]} to {newest[name]})"
        for name in TESTED_PACKAGES
        if not release(oldest[name]) <= release(installed[name]) <= release(newest[name])
    ]


def git_commit() -> str | None:
    """Commit of the dsft checkout, with "+changes" where files differ from it; None outside a checkout."""
    try:
        describe = subprocess.run(
            ["git", "-C", PACKAGE.parent, "describe", "--always", "--abbrev=40", "--dirty=+changes"],
            capture_output=True,
            text=True,
        )
    except OSError:
        return None  # no git on this machine
    return describe.stdout.strip() or None


def code_folder() -> Path:
    """Returns the checkout that dsft runs from; where it was installed from a wheel, the package itself."""
    return PACKAGE.parent if (PACKAGE.parent / "pyproject.toml").is_file() else PACKAGE


def code_hash() -> str:
    """Hash the package's Python files and chat templates: two nodes may both say "+changes" and run different code."""
    total = hashlib.sha256()
    for path in sorted(path for suffix in ("py", "jinja") for path in PACKAGE.rglob(f"*.{suffix}")):
        total.update(str(path.relative_to(PACKAGE)).encode() + b"\0" + path.read_bytes())
    return total.hexdigest()[:12]
