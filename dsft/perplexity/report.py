"""Keeps the results of evaluations in a folder, and writes the rows of a table for the screen.

perplexity.json       a report for each model and data set; a new result replaces the one of the same two names
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
from dsft.perplexity.result import DOCUMENT_COLUMNS, Evaluation
from dsft.runtime import distributed
from dsft.runtime.disk import write_json
from dsft.units import GiB


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
        self.reports: dict[tuple[str, str], dict[str, Any]] = {}
        """(model, data) -> report. On rank 0."""
        self.documents: dict[tuple[str, str], pyarrow.Table] = {}
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
            columns = {name: self.documents[key][name].to_numpy() for name in DOCUMENT_COLUMNS}
            nats = math.fsum(columns["nats"])
            # The two files are written one after the other; a kill between them leaves other documents.
            if len(columns["nats"]) == report["documents"] and math.isclose(nats, report["nats"], rel_tol=1e-12):
                return Evaluation.known(report, columns)
        return None

    def _add(self, evaluation: Evaluation) -> None:
        key = evaluation.model, evaluation.data
        self.reports.pop(key, None)
        self.documents.pop(key, None)
        self.reports[key] = evaluation.report()
        self.documents[key] = pyarrow.table(evaluation.documents())
        self.folder.mkdir(parents=True, exist_ok=True)
        beside = self.folder / "documents.tmp"
        pyarrow.parquet.write_table(pyarrow.concat_tables(self.documents.values()), beside)
        beside.replace(self.folder / "documents.parquet")
        write_json(self.folder / "perplexity.json", {"results": list(self.reports.values())})

    def _read(self) -> None:
        path = self.folder / "perplexity.json"
        if not path.is_file():
            return
        try:
            reports = json.loads(path.read_text(encoding="utf-8"))["results"]
            table = pyarrow.parquet.read_table(self.folder / "documents.parquet")
            self.reports = {(report["model"], report["data"]): report for report in reports}
            self.documents = {key: _rows_of(table, *key) for key in self.reports}
        except (OSError, ValueError, LookupError, TypeError, pyarrow.ArrowException) as error:
            raise UserError(
                [
                    f"output_dir: {self.folder} holds a perplexity.json with documents.parquet beside it that cannot be"
                    f" read ({type(error).__name__}: {error}); remove both, or name another folder"
                ]
            ) from None


def _rows_of(table: pyarrow.Table, model: str, data: str) -> pyarrow.Table:
    is_model = pyarrow.compute.equal(table["model"], model)
    rows = table.filter(pyarrow.compute.and_(is_model, pyarrow.compute.equal(table["data"], data)))
    return rows.replace_schema_metadata(None)


def summary(evaluation: Evaluation) -> dict[str, str]:
    """Return the rows of a table about one result."""
    report = evaluation.report()
    rows = {
        "perplexity": f"{report['perplexity']:.4f}",
        "scored": f"{report['tokens']:,} tokens of {report['documents']:,} documents ({report['mode']})",
        "nats per token": f"{report['nats_per_token']:.6f}",
    }
    if report["bytes"]:
        rows["per text"] = (
            f"word perplexity {report['word_perplexity']:,.4f}, byte perplexity {report['byte_perplexity']:.4f},"
            f" {report['bits_per_byte']:.4f} bits per byte"
        )
    left_out = {"without a token to score": report["unscored_documents"], "truncated": report["truncated_documents"]}
    if any(left_out.values()):
        rows["documents"] = ", ".join(f"{number:,} {reason}" for reason, number in left_out.items() if number)
    if report["verified_difference"] is not None:
        rows["verified"] = f"largest relative difference to the plain way {report['verified_difference']:.1e}"
    peaks = report["peak_memory_bytes"]
    return rows | {
        "computed as": f"{report['options']['dtype']}, ZeRO {report['zero']}, {report['ranks']} ranks",
        "speed": f"{report['tokens_per_second']:,.0f} tokens/s, {report['seconds']:.1f} s",
        "peak memory per rank": ", ".join(f"{name} {value / GiB:.2f} GiB" for name, value in peaks.items()),
    }
