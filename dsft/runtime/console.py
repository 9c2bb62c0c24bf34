"""What the user sees: lines of rank 0 only, and libraries that are quiet on the other ranks."""

import logging
import os
import sys
import warnings

from dsft.runtime.distributed import rank


def say(line: str) -> None:
    """Print on rank 0."""
    if rank() == 0:
        print(f"dsft: {line}", flush=True)


def set_up_screen() -> None:
    """Let rank 0 show warnings, and on a terminal progress bars; the other ranks show only errors. Entry points call
    it, no import does.
    """
    import datasets
    import huggingface_hub
    import transformers

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # tokenizers warn after a fork otherwise
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING if rank() == 0 else logging.ERROR)
    transformers.logging.set_verbosity_warning()
    transformers.logging.disable_progress_bar()  # of loading and saving weights
    # At each start it says that the Trainer gave the model the tokenizer's end tokens.
    logging.getLogger("transformers.trainer_utils").setLevel(logging.ERROR)
    if rank():
        transformers.logging.set_verbosity_error()
    if rank() or not bars_are_seen():
        datasets.disable_progress_bars()
        huggingface_hub.utils.disable_progress_bars()


def bars_are_seen() -> bool:
    """Tell whether progress bars reach a terminal or a notebook. In a file they would be carriage returns."""
    return sys.stderr.isatty() or "ipykernel" in sys.modules


def print_table(title: str, rows: dict[str, str]) -> None:
    """Print two columns: name and value."""
    from rich.console import Console
    from rich.table import Table

    table = Table("", "", title=title, show_header=False, title_justify="left", title_style="bold")
    table.columns[1].overflow = "fold"
    for name, value in rows.items():
        table.add_row(name, value)
    # In a file or a pipe nothing is broken over lines, so that paths stay in one piece.
    Console(width=None if sys.stdout.isatty() else 240).print(table)
