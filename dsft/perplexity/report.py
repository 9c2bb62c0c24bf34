"""The results of an evaluation: perplexity.json, documents.parquet and a table on the screen."""

from pathlib import Path

from datasets import Dataset, concatenate_datasets

from dsft.perplexity.evaluation import Evaluation
from dsft.runtime.console import print_table
from dsft.runtime.disk import write_json
from dsft.runtime.hardware import this_machine
from dsft.units import GiB


def write_results(folder: Path, evaluations: list[Evaluation]) -> None:
    """perplexity.json (one report for each model and data set) and documents.parquet (one row for each document of
    each).
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_json(
        folder / "perplexity.json", {"machine": str(this_machine()), "results": [one.report() for one in evaluations]}
    )
    tables = [
        Dataset.from_dict(
            {
                "model": [one.model] * one.perplexity.documents,
                "data": [one.data] * one.perplexity.documents,
                "document": range(one.perplexity.documents),
                "nats": one.perplexity.document_nats,
                "tokens": one.perplexity.document_tokens,
                "bytes": one.perplexity.document_bytes,
                "words": one.perplexity.document_words,
            }
        )
        for one in evaluations
    ]
    beside = folder / "documents.tmp"
    concatenate_datasets(tables).to_parquet(str(beside))
    beside.replace(folder / "documents.parquet")


def print_evaluation(evaluation: Evaluation) -> None:
    """One result on the screen."""
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
        rows["documents"] = ", ".join(f"{number:,} {what}" for what, number in left_out.items() if number)
    if report["verified_difference"] is not None:
        rows["verified"] = f"largest relative difference to the plain way {report['verified_difference']:.1e}"
    rows |= {
        "computed as": f"{report['options']['dtype']}, ZeRO {report['zero']}, {report['ranks']} ranks",
        "speed": f"{report['tokens_per_second']:,.0f} tokens/s, {report['seconds']:.1f} s",
        "peak memory per rank": ", ".join(
            f"{name} {value / GiB:.2f} GiB" for name, value in report["peak_memory_bytes"].items()
        ),
    }
    print_table(f"Perplexity of {report['model']} on {report['data']}", rows)
