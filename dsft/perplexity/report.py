"""Keeps the results of evaluations in a folder.

perplexity.json       a report for each model, data set and protocol; a new result replaces the one of these names
documents.parquet     a row for each document of these
"""

import json
import math
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.compute
import pyarrow.parquet

from dsft.errors import UserError
from dsft.perplexity.divergence import COLUMNS
from dsft.perplexity.result import DOCUMENT_COLUMNS, Evaluation
from dsft.runtime import distributed
from dsft.runtime.disk import write_json

Key = tuple[str, str, str]
"""Model, data, protocol; the last is empty without one."""


class Results:
    """Holds the results in a folder, of this evaluation and of earlier ones; rank 0 reads and writes.

    Collective: every rank makes one.
    """

    def __init__(self, folder: Path):
        """
        Raises:
            UserError: where a file that is there cannot be read.
        """
        self.folder = folder
        self.reports: dict[Key, dict[str, Any]] = {}
        """On rank 0."""
        self.documents: dict[Key, pyarrow.Table] = {}
        distributed.on_rank_0(self._read)

    def known(self, fingerprint: str, *, verified: bool) -> Evaluation | None:
        """Find the result of an evaluation that was the same in everything that counts. Collective.

        Args:
            verified: only one of which documents were scored again.
        """
        return distributed.on_rank_0(lambda: self._known(fingerprint, verified))

    def add(self, evaluation: Evaluation) -> None:
        """Put a result, new or known, behind all others; a new one is on the disk from then on. Collective."""
        distributed.on_rank_0(lambda: self._add(evaluation))

    def _known(self, fingerprint: str, verified: bool) -> Evaluation | None:
        for key, report in self.reports.items():
            if report.get("fingerprint") != fingerprint or (verified and report["verified_difference"] is None):
                continue
            # The two files are written one after the other; a kill between them leaves other documents.
            if self.is_whole(key):
                return self.evaluation(key)
        return None

    def is_whole(self, key: Key) -> bool:
        """Tell whether the documents of a result are those that its report counts. On rank 0."""
        report, nats = self.reports[key], self.documents[key]["nats"].to_numpy()
        return len(nats) == report["documents"] and math.isclose(math.fsum(nats), report["nats"], rel_tol=1e-12)

    def evaluation(self, key: Key) -> Evaluation:
        """Make the evaluation again whose report and documents are those of `key`. On rank 0."""
        report, table = self.reports[key], self.documents[key]
        names = DOCUMENT_COLUMNS + (COLUMNS[1:] if report["divergence"] else ())
        return Evaluation.known(report, {name: table[name].to_numpy() for name in names})

    def _add(self, evaluation: Evaluation) -> None:
        key = evaluation.key
        self.reports.pop(key, None)
        self.documents.pop(key, None)
        self.reports[key] = evaluation.report()
        self.documents[key] = pyarrow.table(evaluation.documents())
        self.folder.mkdir(parents=True, exist_ok=True)
        beside = self.folder / "documents.tmp"
        pyarrow.parquet.write_table(pyarrow.concat_tables(self.documents.values(), promote_options="default"), beside)
        beside.replace(self.folder / "documents.parquet")
        write_json(self.folder / "perplexity.json", {"results": list(self.reports.values())})

    def _read(self) -> None:
        path = self.folder / "perplexity.json"
        if not path.is_file():
            return
        try:
            reports = json.loads(path.read_text(encoding="utf-8"))["results"]
            table = pyarrow.parquet.read_table(self.folder / "documents.parquet")
            if "protocol" not in table.column_names:  # of an earlier dsft
                table = table.add_column(2, "protocol", pyarrow.array([""] * len(table), pyarrow.string()))
            self.reports = {
                (report["model"], report["data"], report.get("protocol") or ""): report for report in reports
            }
            self.documents = {key: _rows_of(table, *key) for key in self.reports}
        except (OSError, ValueError, LookupError, TypeError, pyarrow.ArrowException) as error:
            raise UserError(
                [
                    f"output_dir: {self.folder} holds a perplexity.json with documents.parquet beside it that cannot be"
                    f" read ({type(error).__name__}: {error}); remove both, or name another folder"
                ]
            ) from None


def _rows_of(table: pyarrow.Table, *key: str) -> pyarrow.Table:
    for name, value in zip(("model", "data", "protocol"), key, strict=True):
        table = table.filter(pyarrow.compute.equal(table[name], value))
    return table.replace_schema_metadata(None)
