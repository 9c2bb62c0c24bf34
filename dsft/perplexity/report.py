"""Writes the results of an evaluation: perplexity.json, documents.parquet and the rows of a table for the screen."""

from pathlib import Path

from datasets import Dataset, concatenate_datasets

from dsft.perplexity.evaluation import Evaluation
from dsft.runtime.disk import write_json
from dsft.runtime.hardware import this_machine
from dsft.units import GiB


def write_results(folder: Path, evaluations: list[Evaluation]) -> None:
    """Write perplexity.json (a report for each model and data set) and documents.parquet (a row for each document)."""
    folder.mkdir(parents=True, exist_ok=True)
    reports = [evaluation.report() for evaluation in evaluations]
    write_json(folder / "perplexity.json", {"machine": str(this_machine()), "results": reports})
    beside = folder / "documents.tmp"
    concatenate_datasets([_documents(evaluation) for evaluation in evaluations]).to_parquet(str(beside))
    beside.replace(folder / "documents.parquet")


def _documents(evaluation: Evaluation) -> Dataset:
    result = evaluation.perplexity
    return Dataset.from_dict(
        {
            "model": [evaluation.model] * result.documents,
            "data": [evaluation.data] * result.documents,
            "document": range(result.documents),
            "nats": result.document_nats,
            "tokens": result.document_tokens,
            "bytes": result.document_bytes,
            "words": result.document_words,
        }
    )


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
