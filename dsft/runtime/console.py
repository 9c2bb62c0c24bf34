"""The output for the user: lines of rank 0 only, quiet libraries on the other ranks, and one log file per rank."""

import contextlib
import json
import logging
import os
import re
import socket
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from dsft.job import beat as watchdog
from dsft.runtime.launcher_env import rank, world_size
from dsft.units import printable

if TYPE_CHECKING:
    from rich.table import Table
    from tqdm import tqdm

LINE_SECONDS = 60.0  # between two lines of progress without a bar; shorter work has none
LINE = "{desc}: {percentage:.0f}%, {n_fmt} of {total_fmt}, {elapsed}<{remaining}, {rate_fmt}{postfix}"

OPERATOR_LOG = "torch.utils.cpp_extension"  # warns without a GPU that no CUDA runtime is found
NO_LIMIT = 1000  # columns of a file, wider than any table
LEAST_WIDTH = 80  # of a table; in less Rich drops columns, and the terminal wraps lines


def say(line: str) -> None:
    """Print on rank 0."""
    if rank() == 0:
        show_text(f"dsft: {line}")


def set_up_screen() -> None:
    """Let rank 0 show warnings, and on a terminal progress bars; the other ranks show only errors."""
    import datasets
    import transformers
    from huggingface_hub.utils import are_progress_bars_disabled, enable_progress_bars

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # or tokenizers warn after a fork
    for category in (FutureWarning, DeprecationWarning):
        warnings.filterwarnings("ignore", category=category)
    for message in (
        "Input and output embeddings are no longer tied",  # during peft's merge; dsft ties equal weights again
        r"barrier\(\): using the device",  # DeepSpeed names no GPU for a single rank
        "OMP_NUM_THREADS/MKL_NUM_THREADS unset",  # accelerate chooses as torch does
    ):
        warnings.filterwarnings("ignore", message=message)
    level = logging.ERROR if rank() else logging.WARNING
    logging.getLogger("DeepSpeed").setLevel(level)
    transformers.logging.set_verbosity(level)
    shows_bars = bars_are_seen() and not rank()
    shows_downloads = shows_bars and not are_progress_bars_disabled()
    transformers.logging.disable_progress_bar()  # of loading and saving weights, and of the hub's downloads
    if shows_downloads:
        enable_progress_bars()
    logging.getLogger(OPERATOR_LOG).setLevel(logging.ERROR)
    # At each start it reports that the Trainer set the model's end tokens to the tokenizer's.
    logging.getLogger("transformers.trainer_utils").setLevel(logging.ERROR)
    if not shows_bars:
        datasets.disable_progress_bars()


def bars_are_seen() -> bool:
    """Return whether progress bars reach a terminal or a notebook. In a file they would be carriage returns."""
    return sys.stderr.isatty() or "ipykernel" in sys.modules


class _Lines:  # the stream of a progress bar without a screen
    def write(self, text: str) -> None:
        if line := text.strip():
            print(line, file=sys.stderr, flush=True)


def progress_bar(*, is_shown: bool, **options: Any) -> "tqdm":
    """Return a tqdm bar that disappears at its end; without a terminal, a line each minute shows progress."""
    from tqdm.auto import tqdm

    if not bars_are_seen():
        options |= {
            "file": _Lines(),
            "mininterval": LINE_SECONDS,
            "miniters": 1,  # by time alone; or tqdm skips lines depending on the size of steps
            "delay": LINE_SECONDS,
            "bar_format": LINE,
        }
    return tqdm(disable=not is_shown, leave=False, dynamic_ncols=True, **options)


def show_table(table: "Table") -> None:
    """Print a table as wide as the terminal; in a file or a pipe paths and commands stay in one piece."""
    from rich.console import Console
    from rich.segment import Segments

    for column in table.columns:
        column.overflow = "fold"
    width = None if sys.stdout.isatty() else NO_LIMIT
    console = Console(width=width, highlight=False, markup=False, emoji=False)  # a path may contain [brackets]
    console.width = max(console.width, LEAST_WIDTH)
    segments = [segment._replace(text=printable(segment.text)) for segment in console.render(table)]
    console.print(Segments(segments), crop=False)


def show_text(text: str, *, file: TextIO | None = None) -> None:
    """Print a text to the screen and the rank's log file. Text that cannot be printed is dropped."""
    screen = file or sys.stdout
    with _printing_on(screen):
        print(printable(text), file=screen, flush=True)


def print_json(content: Any) -> None:
    """Print JSON to standard output, which may be a file. Raises OSError if its disk is full."""
    with _printing_on(sys.stdout, BrokenPipeError):
        print(json.dumps(content, indent=2), flush=True)


@contextlib.contextmanager
def _printing_on(screen: TextIO, dropped: type[OSError] = OSError) -> Iterator[None]:
    """Drop text that a closed pipe or terminal, or a full disk, refuses: none of them must end a training."""
    try:
        yield
    except dropped:
        with contextlib.suppress(OSError, ValueError), open(os.devnull, "wb") as null:
            os.dup2(null.fileno(), screen.fileno())


LOGS = "logs"  # in the run's folder, with a file per rank, on its node: `rank_3.log`
COLOUR = re.compile(r"\033\[[\d;]*m")


class _Both:
    """A stream that also writes to a file, without progress bars and colours; what cannot be written is dropped."""

    def __init__(self, screen: TextIO, file: TextIO | None):
        self.screen = screen
        self.file = file

    def write(self, text: str) -> int:
        if self.file and "\r" not in text:  # without progress bars
            with contextlib.suppress(OSError):
                self.file.write(COLOUR.sub("", text))
        with _printing_on(self.screen):
            self.screen.write(text)
        return len(text)

    def flush(self) -> None:
        with _printing_on(self.screen):
            self.screen.flush()

    def __getattr__(self, name: str):
        return getattr(self.screen, name)


def _watch_screen(file: TextIO | None) -> None:
    """Print to the screen and the file from now on, which replaces the file of an earlier run in this process."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, _Both):
            stream = stream.screen
        setattr(sys, name, _Both(stream, file))


def log_to_files(output_dir: str, *, append: bool) -> None:
    """Write this rank's output to its file from now on; rank 0 also to the screen. A single rank has no file."""
    if world_size() == 1:
        _watch_screen(None)
        return
    path = Path(output_dir) / LOGS / f"rank_{rank()}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("a" if append else "w", encoding="utf-8", buffering=1)
    file.write(f"# rank {rank()} on {socket.gethostname()}, process {os.getpid()}, {time.ctime()}\n")
    watchdog.progress.log = path.resolve()
    if rank() == 0:
        _watch_screen(file)
        return
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(file.fileno(), stream.fileno())
        stream.reconfigure(line_buffering=True)
