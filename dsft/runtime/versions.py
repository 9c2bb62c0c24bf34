"""Which code runs here: versions of Python and packages, the commit of dsft and a hash of its files. Imports none of
the packages.
"""

import hashlib
import importlib.metadata
import subprocess
import sys
from pathlib import Path

PACKAGES = ("dsft", "torch", "deepspeed", "transformers", "accelerate", "peft", "datasets", "safetensors")
NUMERIC_PACKAGES = ("torch", "deepspeed", "transformers", "accelerate", "peft", "tokenizers", "datasets", "numpy")
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
