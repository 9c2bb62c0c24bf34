"""Records the results of an evaluation while it runs, so that an interrupted one resumes where it was.

Each rank appends a line for each batch it scored to a file of its own, in a folder named by the fingerprint
(`identity.py`) of model, data and options. Batches do not depend on the number of ranks, so another number may resume.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

from dsft.runtime import distributed


class ResumeLog:
    """Knows the scored batches of an earlier evaluation, and records those of this one, below `folder`.

    Collective: every rank makes one.
    """

    def __init__(self, folder: Path, key: str):
        self.folder = folder / "partial" / key[:32]
        self.folder.mkdir(parents=True, exist_ok=True)
        # Nodes may not share the folder, so what is known is the union over all ranks, before anyone appends.
        self._known = {batch: line for batch, *line in distributed.from_all(list(self._lines()))}
        self._file = (self.folder / f"rank-{distributed.rank()}.jsonl").open("a", encoding="utf-8")

    def known(self) -> dict[int, list]:
        """Return index of a batch -> what else its line holds, the same on every rank: the sums of its pieces first."""
        return self._known

    def record(self, line: list) -> None:
        """Append the line of a batch: its index, the sums of its pieces, and what `recording.py` adds to these.

        Python's repr of a float, as JSON has it, gives the same bits back.
        """
        self._file.write(f"\n{json.dumps(line)}")
        self._file.flush()

    def remove(self) -> None:
        """Remove the lines, which are not needed any more once the result is known. Collective."""
        self._file.close()
        distributed.wait_for_all()
        shutil.rmtree(self.folder, ignore_errors=True)  # on every rank, since nodes may not share the folder

    def _lines(self) -> Iterator[list]:
        for path in sorted(self.folder.glob("rank-*.jsonl")):
            for line in path.read_text(encoding="utf-8").splitlines():
                try:
                    yield json.loads(line)
                except ValueError:
                    continue  # the line that was being written when the rank was killed
