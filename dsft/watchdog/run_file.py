"""How a run ended, in its run.json: written by the rank that knows, or by the coordinator for ranks that cannot."""

import contextlib
import json
import os
from pathlib import Path


def record_failure(file: Path, error: str, *, replaces: bool = False) -> None:
    """Write into run.json that the run there has failed; one that has ended otherwise stays as it is, and so does one
    that is not there, as on a node whose disk is not rank 0's.

    Args:
        replaces: also an earlier failure, of which this one is the cause.
    """
    with contextlib.suppress(OSError, ValueError):
        content = json.loads(file.read_text(encoding="utf-8"))
        if content.get("status") in ("running", "failed")[: 1 + replaces]:
            beside = file.with_name(f"{file.name}.{os.getpid()}.tmp")
            try:
                ended = content | {"status": "failed", "error": error}
                beside.write_text(json.dumps(ended, indent=2) + "\n", encoding="utf-8")
                beside.replace(file)
            finally:
                beside.unlink(missing_ok=True)
