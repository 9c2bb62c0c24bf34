"""Keeps ranks of two jobs apart that meet at the same address and port, as two plain `deepspeed --hostfile` do.

rank 0 of job A          store at node-0:29500: dsft/job = A's name and a random number
rank 1 of job B          finds A's name there and ends; without this it would take the place of A's rank 1
"""

import json
import os
import secrets
import socket
from datetime import timedelta
from typing import TYPE_CHECKING

from dsft.errors import UserError

if TYPE_CHECKING:
    from torch.distributed import Store

VARIABLE = "DSFT_JOB"
"""Identifies the job, in the environment of the ranks that `dsft launch` starts."""


def job_name(output_dir: str | None) -> str:
    """What a rank knows of its job before it meets others: its launcher's id, where there is one, else the folder."""
    run_id = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    launch = os.environ.get(VARIABLE) or (run_id if run_id != "none" else "")
    return f"launch {launch}" if launch else f"output_dir={output_dir}"


def meet_own_job(job: str, *, timeout: timedelta) -> "Store":
    """Wait for rank 0 and make sure that it is of the same job. The store has to live until the process group is made,
    which takes the same one.

    Raises:
        UserError: another job meets here.
    """
    import torch.distributed as dist

    store, rank, _ = next(dist.rendezvous("env://", timeout=timeout))
    check_job(store, job, rank)
    return store


def check_job(store: "Store", job: str, rank: int) -> None:
    """Compare this rank's job with that of the store, and take this rank's place in it.

    Raises:
        UserError: it is another job's, or another process has that place.
    """
    key = f"dsft/job/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"  # torchrun's store outlives a restart
    mine = json.dumps({"job": job, "number": secrets.token_hex(8)})
    there = (store.compare_set(key, "", mine) if rank == 0 else store.get(key)).decode()
    other = json.loads(there)
    where = f"{os.environ.get('MASTER_ADDR')} port {os.environ.get('MASTER_PORT')}"
    remedy = "start the second one with another --master_port (`dsft launch` takes a port of its own)"
    if other["job"] != job:
        raise UserError(
            [
                f"rank {rank} on {socket.gethostname()} has met another job at {where}: that is {other['job']}, this is"
                f" {job}; {remedy}. Or the options of the nodes differ"
            ]
        )
    if store.add(f"{key}/{other['number']}/{rank}", 1) > 1 or (rank == 0 and there != mine):
        raise UserError(
            [
                f"rank {rank} on {socket.gethostname()}: another process is rank {rank} already at {where}, of the same"
                f" {job}; was the command given twice? Else {remedy}"
            ]
        )
