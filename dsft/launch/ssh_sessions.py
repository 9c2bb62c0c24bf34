"""The ssh sessions of a launch, as pdsh tells of them on standard error."""

import re
import subprocess
import sys
import threading

ENDED = re.compile(rb"pdsh@[^:]*: (\S+): ssh exited with exit code (\d+)")


class SshSessions:
    """Shows what a launcher writes to standard error, and notes which hosts' sessions have ended."""

    def __init__(self, process: subprocess.Popen):
        self.ended: dict[str, int] = {}
        """Host -> exit code, where that is not 0."""
        self._stream = process.stderr
        self._thread = threading.Thread(target=self._copy, daemon=True)
        self._thread.start()

    def _copy(self) -> None:
        for line in self._stream:
            sys.stderr.buffer.write(line)
            sys.stderr.buffer.flush()
            if match := ENDED.match(line):
                self.ended[match[1].decode()] = int(match[2])

    def close(self) -> None:
        """Wait for the last words."""
        self._thread.join(timeout=2)
