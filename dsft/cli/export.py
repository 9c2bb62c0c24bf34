"""`dsft export` and `dsft merge`: a plain Hugging Face folder, read back before they say so."""

import dataclasses

from dsft.checkpoints.export import export, merge
from dsft.cli.commands import ExportOptions
from dsft.runtime.console import set_up_screen


def run_export(options: ExportOptions) -> None:
    """Export a run or a checkpoint."""
    set_up_screen()
    print(f"dsft: written and read back: {export(**dataclasses.asdict(options))}")


def run_merge(options: ExportOptions) -> None:
    """Merge an adapter into its base model."""
    set_up_screen()
    print(f"dsft: merged, written and read back: {merge(**dataclasses.asdict(options))}")
