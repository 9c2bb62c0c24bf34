"""Checks of what a run does when a rank is killed, memory runs out, weights are NaN, or it is asked to stop."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil

from dsft.checkpoints.run_folder import METRICS
from dsft.errors import EXIT_REQUEUE, EXIT_STOPPED, EXIT_USER_ERROR
from gpu.check import Failed, Row, Setting, command, launch
from gpu.ranks import ranks_below
from gpu.trainings import options

SMALLER = re.compile(
    r"(?P<share>[\d.e+]+) GiB are available; the next smaller plan is .*, by prediction (?P<wanted>[\d.e+]+) GiB"
)
"""In the message of training/run.py."""
LEFT_SECONDS = 30
"""From the end of a command to the look at what is left of it."""


def killed_rank(setting: Setting) -> Iterator[Row]:
    """Kill a rank as suddenly as the kernel does."""
    with endless_training(setting) as (process, family):
        start, before = time.monotonic(), setting.log.stat().st_size
        os.kill(ranks_below(process.pid)[-1], signal.SIGKILL)
        code = process.wait()
        text = setting.log.read_bytes()[before:].decode(errors="replace")
        yield Row(
            claim="a killed rank ends the run, which says so",
            measured=f"exit code {code} after {time.monotonic() - start:.0f} s",
            ok=code != 0 and "was killed from outside" in text,
        )
        yield nothing_left(family)


def asked_to_stop(setting: Setting) -> Iterator[Row]:
    """Send SIGUSR1, as SLURM does before the time is up."""
    with endless_training(setting) as (process, family):
        process.send_signal(signal.SIGUSR1)
        code = process.wait()
        saved = [path.parent.name for path in setting.runs.glob("endless/checkpoint-*/trainer_state.json")]
        yield Row(
            claim="SIGUSR1: the run saves and asks to be queued again",
            predicted=f"exit code {EXIT_REQUEUE}",
            measured=f"exit code {code}, {', '.join(saved) or 'no checkpoint'}",
            ok=code == EXIT_REQUEUE and bool(saved),
        )
        yield nothing_left(family)


def nan_loss(setting: Setting) -> Iterator[Row]:
    """Train a model whose embeddings are NaN."""
    words = command(setting, "train", options(setting, "nan", model=setting.path("broken"), seq_len=128, zero="1"))
    text = launch(setting, words, code=EXIT_STOPPED)
    yield Row(
        claim="a NaN loss ends the run at its step",
        predicted=f"exit code {EXIT_STOPPED}",
        measured=last_error(text),
        ok="NaN or infinite at step 1" in text,
    )


def out_of_memory(setting: Setting) -> Iterator[Row]:
    """Train with far too large a batch, although the plan says that it cannot fit."""
    changes = {"per_device_train_batch_size": 256, "memory_check": False, "activation_checkpointing": False}
    words = command(setting, "train", options(setting, "oom", **changes, zero="1"), ranks=1)
    text = launch(setting, words, code=EXIT_USER_ERROR)
    named = SMALLER.search(text)
    yield Row(
        claim="out of memory is named, with a smaller plan that fits",
        predicted=f"exit code {EXIT_USER_ERROR}",
        measured=last_error(text) + (f" ... {named[0]}" if named else ""),
        ok="out of memory" in text and named is not None and float(named["wanted"]) <= float(named["share"]),
    )


def last_error(text: str) -> str:
    errors = [line for line in text.splitlines() if "dsft: error: " in line]
    return errors[-1].partition("dsft: error: ")[2][:120] if errors else "no error was told"


@contextlib.contextmanager
def endless_training(setting: Setting) -> Iterator[tuple[subprocess.Popen, list[psutil.Process]]]:
    """Start a training of the small model that does not end by itself; gives it and its processes after its first step.

    Raises:
        Failed: where it ends before.
    """
    changes = {"model": setting.path("small"), "max_steps": 1_000_000, "seq_len": 128, "lost_timeout": 10, "zero": "2"}
    words = command(setting, "train", options(setting, "endless", **changes, save_strategy="steps"))
    process = subprocess.Popen(words, stdout=sys.stdout.fileno(), stderr=subprocess.STDOUT)
    metrics = setting.runs / "endless" / METRICS
    while not (metrics.is_file() and metrics.stat().st_size):
        if process.poll() is not None:
            raise Failed(f"the training ended with exit code {process.returncode} before its first step")
        time.sleep(0.1)
    family = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    try:
        yield process, family
    finally:
        for member in family:
            with contextlib.suppress(psutil.Error):
                member.kill()


def nothing_left(family: list[psutil.Process]) -> Row:
    deadline = time.monotonic() + LEFT_SECONDS
    while (alive := sum(process.is_running() for process in family)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return Row(claim="no process of the run is left", measured=f"{alive} of {len(family)}", ok=not alive)
