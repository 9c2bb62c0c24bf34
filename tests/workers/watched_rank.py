"""A rank of two that works, or fails in the way named on the command line, watched by its thread."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import psutil
import torch.distributed as dist

from dsft.config.options import TimeoutFields
from dsft.errors import UserError, ends_with_clear_errors
from dsft.job import beat as watchdog

TIMEOUTS = TimeoutFields(start_timeout=60, load_timeout=60, step_timeout=4, save_timeout=60, lost_timeout=5)


@ends_with_clear_errors
def main() -> None:
    fault, folder, rank = sys.argv[1], Path(sys.argv[2]), int(os.environ["RANK"])
    watchdog.start(TIMEOUTS)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    watchdog.connect()
    watchdog.progress.log = folder / f"rank_{rank}.log"
    (folder / f"pid_{rank}").write_text(str(os.getpid()))
    for step in range(40 if fault in ("none", "paused") else 400):
        dist.barrier()
        watchdog.set_phase("training")
        watchdog.heartbeat(step)
        time.sleep(0.05)
        if step == 10:
            fail(fault, rank, folder)
    dist.barrier()
    watchdog.close()
    os._exit(0)


def fail(fault: str, rank: int, folder: Path) -> None:
    if fault == "exception" and rank == 1:
        raise RuntimeError("this GPU has had enough")
    if fault == "same-error":
        time.sleep(0.3 * (rank == 0))  # rank 0 speaks, though the other is first
        raise UserError(["data=/x: not there"])
    if fault == "user-error" and rank == 1:
        raise UserError(["data=/x: not on this node"])
    if fault.startswith(f"killed {rank}"):
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == f"stopped {rank}":
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault == "holds the interpreter" and rank == 1:
        ctypes.PyDLL(None).sleep(1000)
    if fault == f"stalled {rank}":
        wait_for_nothing()
    if fault == "launcher" and rank == 0:
        os.kill(os.getppid(), signal.SIGKILL)
    if fault == "paused" and rank == 0:
        pause_job(folder)


def pause_job(folder: Path) -> None:
    """Stop the ranks and their guards for longer than `lost_timeout`, as `docker pause` and `scontrol suspend` do."""
    ranks = [path.read_text() for path in folder.glob("pid_*")]
    assert len(ranks) == 2
    guards = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if any("guard.py" in word for word in words) and set(ranks) & set(words):
            guards.append(str(process.pid))
    assert len(guards) == 2
    pids = " ".join([*guards, *ranks])
    subprocess.Popen(["sh", "-c", f"kill -STOP {pids}; sleep 12; kill -CONT {pids}"], start_new_session=True)


def wait_for_nothing() -> None:
    time.sleep(1000)


if __name__ == "__main__":
    try:
        main()
    except Exception as error:
        sys.excepthook(type(error), error, error.__traceback__)  # multiprocessing, which forks ranks, calls none
        os._exit(1)
