"""`dsft export` and `dsft merge`: a plain Hugging Face folder, read back before they say so."""

import dataclasses

from dsft.checkpoints.export import export, merge
from dsft.cli.commands import ExportOptions


def run_export(options: ExportOptions) -> None:
    """Export a run or a checkpoint."""
    print(f"dsft: written and read back: {export(**dataclasses.asdict(options))}")


def run_merge(options: ExportOptions) -> None:
    """Merge an adapter into its base model."""
    print(f"dsft: merged, written and read back: {merge(**dataclasses.asdict(options))}")
