"""`dsft export` and `dsft merge`: a plain Hugging Face folder, read back before they say so.

What is wrong with the folders is told before torch is loaded, which takes seconds.
"""

import dataclasses

from dsft.checkpoints.run_folder import check_new_folder, find_adapter, find_weights
from dsft.cli.commands import ExportOptions
from dsft.runtime.console import set_up_screen
from dsft.runtime.quick_imports import quick_imports


def run_export(options: ExportOptions) -> None:
    """Export a run or a checkpoint."""
    find_weights(options.source)
    check_new_folder(options.out)
    set_up_screen()
    with quick_imports():
        from dsft.checkpoints.export import export

    print(f"dsft: written and read back: {export(**dataclasses.asdict(options))}")


def run_merge(options: ExportOptions) -> None:
    """Merge an adapter into its base model."""
    find_adapter(options.source)
    check_new_folder(options.out)
    set_up_screen()
    with quick_imports():
        from dsft.checkpoints.export import merge

    print(f"dsft: merged, written and read back: {merge(**dataclasses.asdict(options))}")
