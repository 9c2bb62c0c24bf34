"""What the user sees: lines of rank 0 only, and libraries kept quiet elsewhere."""

import logging
import os
import sys
import warnings

import datasets
import transformers

from dsft.machine import GiB, Machine
from dsft.model_size import ModelSize
from dsft.plan import ZeroPlan
from dsft.ranks import rank


def say(line: str) -> None:
    """Print on rank 0."""
    if rank() == 0:
        print(f"dsft: {line}", flush=True)


def set_up_screen() -> None:
    """Called by entry points, never on import: rank 0 shows warnings and progress bars, the other ranks only errors."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # tokenizers warn after a fork otherwise
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING if rank() == 0 else logging.ERROR)
    transformers.logging.set_verbosity_warning() if rank() == 0 else transformers.logging.set_verbosity_error()
    if rank():
        datasets.disable_progress_bars()
        transformers.logging.disable_progress_bar()


def print_table(title: str, rows: dict[str, str]) -> None:
    """Two columns on the screen: name and value."""
    from rich.console import Console
    from rich.table import Table

    table = Table("", "", title=title, show_header=False, title_justify="left", title_style="bold")
    table.columns[1].overflow = "fold"
    for name, value in rows.items():
        table.add_row(name, value)
    # In a file or a pipe nothing is broken over lines, so that paths stay whole.
    Console(width=None if sys.stdout.isatty() else 240).print(table)


def print_plans(chosen: ZeroPlan, candidates: list[ZeroPlan], size: ModelSize, machine: Machine) -> None:
    """The table of all candidates, the chosen one marked, and the reason."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    device = "GPU" if machine.has_gpu else "rank"
    console.print(f"{size.num_params / 1e9:,.3f} B parameters, {size.num_trainable / 1e9:,.3f} B trained; {machine}", soft_wrap=True)
    table = Table(caption=f"GiB per {device}; host: GiB per node; ckpt: activation checkpointing", caption_justify="left")
    for name in ("", "ZeRO", "ckpt", "states", "activations", "peak", "host", "fits"):
        table.add_column(name, no_wrap=True)
    for plan in candidates:
        same = (plan.zero, plan.activation_checkpointing) == (chosen.zero, chosen.activation_checkpointing)
        numbers = (plan.state_bytes, plan.activation_bytes, plan.device_bytes, plan.host_bytes)
        table.add_row("->" if same else "", plan.zero, "on" if plan.activation_checkpointing else "off",
                      *(f"{number / GiB:,.1f}" for number in numbers), "yes" if plan.fits else f"no: {plan.binds}")
    console.print(table)
    console.print(chosen.reason, soft_wrap=True)
