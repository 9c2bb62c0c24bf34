"""Runs the checks one after the other, each in a process of its own with its own limit."""

import contextlib
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil

from gpu.check import SLOWER, Check, Row, Setting

OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
LEAST_SECONDS = 20
"""Of the time that is left, for a check to begin."""
END_SECONDS = 10
"""A check that is over its time has so long to end before it is killed."""
LAST_LINES = 15
"""Of what a failed check printed, in the JSON."""


def run_checks(checks: Iterable[Check], setting: Setting, *, seconds: float) -> Iterator[tuple[str, list[Row]]]:
    """Run each check, while `seconds` for all last; yields its name and rows when it is done."""
    deadline = time.monotonic() + seconds - END_SECONDS
    for check in checks:
        left = deadline - time.monotonic()
        if reason := check.lacks(setting):
            rows = [skipped(reason)]
        elif left < LEAST_SECONDS:
            rows = [skipped(f"no time was left: a larger --minutes, or --only {check.name}")]
        else:
            rows = run_check(check, setting.of(check.name), left=left)
        yield check.name, rows


def skipped(reason: str) -> Row:
    return Row(claim="", measured=f"skipped: {reason}")


def run_check(check: Check, setting: Setting, *, left: float) -> list[Row]:
    """Run one check in its process; returns what it found out until its end, or until its time was over."""
    limit = check.seconds * (1 if setting.has_gpu else SLOWER)
    setting.runs.mkdir()
    streams = {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT}
    with setting.log.open("ab") as log:
        worker = subprocess.Popen(worker_command(setting), stdout=log, env=os.environ | OFFLINE, **streams)
        try:
            code = worker.wait(timeout=min(limit, left))
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end_all(worker)
    rows = rows_of(setting)
    shutil.rmtree(setting.runs, ignore_errors=True)
    if code is None and left < limit:
        rows.append(skipped(f"not done when the time was over, after {left:.0f} s: a larger --minutes"))
    elif code is None:
        rows.append(failed(setting, f"not done after {limit:.0f} s"))
    elif code:
        rows.append(failed(setting, last_line(setting)))
    return rows


def worker_command(setting: Setting) -> list[str]:
    return [sys.executable, Path(__file__).with_name("worker.py"), json.dumps(dataclasses.asdict(setting))]


def end_all(worker: subprocess.Popen) -> None:
    """End a check's process with all that it started, where they still run."""
    if worker.poll() is not None:
        return
    family = [*psutil.Process(worker.pid).children(recursive=True), psutil.Process(worker.pid)]
    for member in family:
        with contextlib.suppress(psutil.Error):
            member.terminate()
    for member in psutil.wait_procs(family, END_SECONDS)[1]:
        member.kill()
    worker.wait()


def rows_of(setting: Setting) -> list[Row]:
    """Read the rows that a check has written, without a last line that it did not end."""
    path = setting.path(f"{setting.check}.jsonl")
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.is_file() else []
    return [Row(**json.loads(line)) for line in lines if line.endswith("\n")]


def failed(setting: Setting, reason: str) -> Row:
    lines = setting.log.read_text(encoding="utf-8", errors="replace").splitlines()
    return Row(claim="the check runs", measured=reason, ok=False, details={"last lines": lines[-LAST_LINES:]})


def last_line(setting: Setting) -> str:
    lines = setting.log.read_text(encoding="utf-8", errors="replace").split("\n")
    told = (
        [line for line in lines if "dsft: error:" in line] or [line for line in lines if line.strip()] or ["no words"]
    )
    return told[-1].strip()[:160]
