"""Keeps what is scored while an evaluation runs: lines to resume from, sums of groups, and tokens.

tokens.parquet/FINGERPRINT/    parts of a table with a row for each scored token, each written by one rank

A part is complete or not there. A batch is noted for resuming only when the part with its tokens is on disk, and parts
that no note names are removed at the next start: no token is lost or written twice.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import pyarrow
import pyarrow.parquet
import torch

from dsft.perplexity.resume import ResumeLog
from dsft.perplexity.windows import Windows
from dsft.runtime import distributed

PART_TOKENS = 1 << 20
"""Tokens in memory before a part is written: 24 MiB."""


class TokenParts:
    """Writes the scored tokens of this rank, a part at a time."""

    def __init__(self, folder: Path, windows: Windows, kept: set[str]):
        """
        Args:
            kept: names of the parts of an interrupted evaluation that count; others are removed. Collective.
        """
        self.folder, self.windows = folder, windows
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.iterdir():
            if path.name not in kept:
                path.unlink(missing_ok=True)  # another rank of this node may have been first
        distributed.wait_for_all()
        self.tables: list[pyarrow.Table] = []
        self.name = ""

    @property
    def is_full(self) -> bool:
        return sum(map(len, self.tables)) >= PART_TOKENS

    def add(self, batch: int, windows: list[int], nats_N: np.ndarray) -> None:
        """Take the tokens of a batch."""
        self.name = self.name or f"batch-{batch:08d}-rank-{distributed.rank()}.parquet"
        places = np.concatenate([self.windows.scored_places(window) for window in windows])
        documents = np.searchsorted(self.windows.document_ends, places, side="right")
        starts = np.concatenate([[0], self.windows.document_ends])[documents]
        columns = {
            "document": documents.astype(np.int64),
            "position": (places - starts).astype(np.int64),
            "token": np.asarray(self.windows.tokens[places]).astype(np.int32),
            "nats": nats_N,
        }
        self.tables.append(pyarrow.table(columns))

    def write(self) -> str | None:
        """Write what was added as a part; its name, None where nothing was added."""
        if not self.tables:
            return None
        name, beside = self.name, self.folder / f"{self.name}.tmp"
        pyarrow.parquet.write_table(pyarrow.concat_tables(self.tables), beside)
        beside.replace(self.folder / name)
        self.tables, self.name = [], ""
        return name


class Observer(Protocol):
    """Adds something up over all tokens."""

    def see(self, windows: list[int], columns_KN: np.ndarray) -> list:
        """Take a batch; return what the line of the batch keeps of it."""

    def recall(self, recorded: list) -> None:
        """Take what `see` returned for a batch of an interrupted evaluation."""


class Recorder:
    """Takes every batch that this rank scores, and knows those of an interrupted evaluation."""

    def __init__(
        self, windows: Windows, *, log: ResumeLog | None, observers: Sequence[Observer] = (), tokens: Path | None = None
    ):
        """
        Args:
            observers: the same ones, in the same order, when an evaluation resumes.
            tokens: folder of the scored tokens. With it the recorder is collective.
        """
        self.log, self.observers = log, observers
        lines = log.known() if log else {}
        parts = {line[2] for line in lines.values() if len(line) > 2}
        self.tokens = TokenParts(tokens, windows, parts) if tokens else None
        self._known = {batch: line[0] for batch, line in lines.items()}
        if distributed.rank() == 0:  # the sums of all ranks are added up: each batch counts once
            for line in lines.values():
                for observer, recorded in zip(observers, line[1] if observers else [], strict=True):
                    observer.recall(recorded)
        self._pending: list[list] = []

    def known(self) -> dict[int, list[list[float]]]:
        """Return index of a batch -> sums of its pieces, [K][pieces], the same on every rank."""
        return self._known

    def record(self, batch: int, windows: list[int], columns_KN: torch.Tensor, piece_sums: list[list[float]]) -> None:
        """Take a scored batch.

        Args:
            columns_KN: of its scored tokens, window by window; nats first.
            piece_sums: [K][pieces].
        """
        recorded = [observer.see(windows, columns_KN.numpy()) for observer in self.observers]
        if self.tokens:
            self.tokens.add(batch, windows, columns_KN[0].numpy())
        self._pending.append([batch, piece_sums, recorded])
        if not self.tokens or self.tokens.is_full:
            self.flush()

    def flush(self) -> None:
        """Put everything on disk."""
        part = self.tokens.write() if self.tokens else None
        if self.log:
            for line in self._pending:
                self.log.record([*line, part] if part else line)
        self._pending = []
