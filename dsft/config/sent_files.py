"""Files that one `dsft launch` sends to its nodes along with the command: the configuration, and those that it names.

They travel in an environment variable, which every user of a node can read there: a file with a token in it is not
sent.
"""

import base64
import functools
import json
import os
import zlib
from collections.abc import Iterable
from pathlib import Path

VARIABLE = "DSFT_FILES"
LONGEST = 60_000
"""Characters of the variable. The kernel allows 131,072 for the whole command of a node (MAX_ARG_STRLEN)."""


def pack(paths: Iterable[str]) -> str:
    """The contents of text files by their paths as the options name them, for the variable."""
    contents = {path: Path(path).expanduser().read_text(encoding="utf-8") for path in paths}
    return base64.urlsafe_b64encode(zlib.compress(json.dumps(contents).encode())).decode()


def read_text(path: str | Path) -> str:
    """The file as the launch has sent it; else as it is on this node.

    Raises:
        OSError, UnicodeDecodeError: it cannot be read.
    """
    sent = sent_files().get(str(path))
    return Path(path).expanduser().read_text(encoding="utf-8") if sent is None else sent


def sent_files() -> dict[str, str]:
    """What was sent to this process: path -> content."""
    return _unpack(os.environ.get(VARIABLE, ""))


@functools.cache
def _unpack(packed: str) -> dict[str, str]:
    return json.loads(zlib.decompress(base64.urlsafe_b64decode(packed))) if packed else {}
