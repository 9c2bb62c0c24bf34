"""A rank of two that works, or fails in the way named on the command line, watched by its sidecar."""

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
from dsft.errors import UserError, ends_with_clear_errors, on_exit
from dsft.runtime.distributed import on_rank_0
from dsft.watchdog import client as watchdog

TIMEOUTS = TimeoutFields(start_timeout=60, load_timeout=60, step_timeout=4, save_timeout=60, lost_timeout=5)


@ends_with_clear_errors
def main() -> None:
    fault, folder, rank = sys.argv[1], Path(sys.argv[2]), int(os.environ["RANK"])
    if rank == 0 and fault == "stalled beside a full disk":
        (folder / "stacks.txt").symlink_to("/dev/full")
    if rank == 0 and fault == "stalled before a full screen":
        os.dup2(os.open("/dev/full", os.O_WRONLY), 2)  # the sidecar's too
    watchdog.start(TIMEOUTS)
    on_exit(watchdog.close)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    watchdog.connect(on_rank_0(watchdog.endpoint))
    watchdog.set_file("log", folder / f"rank_{rank}.log")
    (folder / f"pid_{rank}").write_text(str(os.getpid()))
    for step in range(40 if fault in ("none", "paused") else 400):
        dist.barrier()
        watchdog.set_phase("training")
        watchdog.heartbeat(step)
        time.sleep(0.05)
        if step == 10:
            fail(fault, rank, folder)
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
    if fault == "killed" and rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "frozen" and rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault.startswith("stalled") and rank == 1:
        wait_for_nothing()
    if fault == "launcher" and rank == 0:
        os.kill(os.getppid(), signal.SIGKILL)
    if fault == "paused" and rank == 0:
        pause_job(folder)


def pause_job(folder: Path) -> None:
    """Stop ranks and sidecars for longer than `lost_timeout`, as `docker pause` and `scontrol suspend` do."""
    ranks = [int(path.read_text()) for path in folder.glob("pid_*")]
    assert len(ranks) == 2
    commands = [(each.pid, " ".join(each.info["cmdline"] or ())) for each in psutil.process_iter(["cmdline"])]
    sidecars = [pid for pid, command in commands if any(f'"pid": {rank},' in command for rank in ranks)]
    assert len(sidecars) == 2
    pids = " ".join(map(str, [*sidecars, *ranks]))
    subprocess.Popen(["sh", "-c", f"kill -STOP {pids}; sleep 12; kill -CONT {pids}"], start_new_session=True)


def wait_for_nothing() -> None:
    time.sleep(1000)


if __name__ == "__main__":
    try:
        main()
    except Exception as error:
        sys.excepthook(type(error), error, error.__traceback__)  # multiprocessing, which forks ranks, calls none
        os._exit(1)
