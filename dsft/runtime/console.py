"""What the user sees: lines of rank 0 only, and libraries that are quiet on the other ranks."""

import logging
import os
import sys
import warnings
from typing import TYPE_CHECKING, Any

from dsft.runtime.distributed import rank

if TYPE_CHECKING:
    from tqdm import tqdm

LINE_SECONDS = 60.0
"""Between two lines about progress, where no bar is seen; shorter work has none."""
LINE = "{desc}: {percentage:.0f}%, {n_fmt} of {total_fmt}, {elapsed}<{remaining}, {rate_fmt}{postfix}"


def say(line: str) -> None:
    """Print on rank 0."""
    if rank() == 0:
        print(f"dsft: {line}", flush=True)


def set_up_screen() -> None:
    """Let rank 0 show warnings, and on a terminal progress bars; the other ranks show only errors. Entry points call
    it, no import does.
    """
    import datasets
    import transformers
    from huggingface_hub.utils import are_progress_bars_disabled, enable_progress_bars

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # tokenizers warn after a fork otherwise
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING if rank() == 0 else logging.ERROR)
    transformers.logging.set_verbosity_warning()
    shows_downloads = not (rank() or are_progress_bars_disabled()) and bars_are_seen()
    transformers.logging.disable_progress_bar()  # of loading and saving weights, and the hub's of downloads with them
    if shows_downloads:
        enable_progress_bars()
    # At each start it says that the Trainer gave the model the tokenizer's end tokens.
    logging.getLogger("transformers.trainer_utils").setLevel(logging.ERROR)
    if rank():
        transformers.logging.set_verbosity_error()
    if rank() or not bars_are_seen():
        datasets.disable_progress_bars()


def bars_are_seen() -> bool:
    """Tell whether progress bars reach a terminal or a notebook. In a file they would be carriage returns."""
    return sys.stderr.isatty() or "ipykernel" in sys.modules


class _Lines:
    """Takes what a progress bar draws, and writes it to standard error as lines."""

    def write(self, text: str) -> None:
        if line := text.strip():
            print(line, file=sys.stderr, flush=True)

    def flush(self) -> None:
        sys.stderr.flush()


def progress_bar(*, is_shown: bool, **options: Any) -> "tqdm":
    """Make a bar that vanishes at its end; where none would be seen, a line each minute says how far the work is.

    Args:
        options: of tqdm.
    """
    from tqdm.auto import tqdm

    if not bars_are_seen():
        options |= {"file": _Lines(), "mininterval": LINE_SECONDS, "delay": LINE_SECONDS, "bar_format": LINE}
        options["miniters"] = 1  # by the time alone; else tqdm leaves lines out by the size of the steps
    return tqdm(disable=not is_shown, leave=False, dynamic_ncols=True, **options)


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
