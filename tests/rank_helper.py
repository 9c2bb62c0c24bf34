"""Starts gloo ranks in this machine's processes, for tests of what many ranks compute."""

import os
import pickle
import tempfile
from pathlib import Path
from typing import Any

import torch.multiprocessing as mp

from dsft.runtime import distributed
from dsft.watchdog.processes import descendants


def _one_rank(rank: int, function, world: int, port: int, folder: str, arguments: tuple) -> None:
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    distributed.start_ranks(timeout_seconds=120)
    Path(folder, str(rank)).write_bytes(pickle.dumps(function(*arguments)))
    distributed.stop_ranks()


def on_ranks(world: int, function, *arguments) -> list[Any]:
    """What `function(*arguments)` returns on each of `world` ranks."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_one_rank, args=(function, world, distributed.free_port(), folder, arguments), nprocs=world)
        return [pickle.loads(Path(folder, str(rank)).read_bytes()) for rank in range(world)]


def ranks_below(pid: int) -> list[int]:
    """Process ids of the ranks that a `deepspeed` launch started, without the launchers between."""
    found = []
    for child in descendants(pid):
        try:
            command = Path(f"/proc/{child}/cmdline").read_bytes()
        except OSError:
            continue
        if b"--local_rank" in command and b"launcher" not in command:
            found.append(child)
    return sorted(found)
