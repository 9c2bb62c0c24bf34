"""Files of results on disk: where this user's cache lies, and JSON that is complete or not there."""

import json
import os
from pathlib import Path
from typing import Any


def user_cache() -> Path:
    """The folder `dsft` in the user's cache; XDG_CACHE_HOME is followed."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dsft"


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write beside and rename, so that a reader or a crash never sees part of a file."""
    beside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    beside.write_text(json.dumps(content, indent=2, default=str) + "\n", encoding="utf-8")
    os.replace(beside, path)
