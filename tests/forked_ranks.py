"""Ranks that start in a second: forked from one process that has imported everything, and killed as suddenly as a
machine loses power.
"""

import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

from dsft.runtime import distributed


def _one_rank(rank: int, world: int, port: int, log: str, options: dict) -> None:
    from dsft.config.options import TrainConfig
    from dsft.config.reader import make_config
    from dsft.training.run import finetune

    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    distributed.start_ranks(timeout_seconds=60)
    problems: list[str] = []
    finetune(make_config(TrainConfig, options, problems), problems)
    if world == 1:
        os._exit(0)
    distributed.stop_ranks()


def train(
    world: int,
    options: dict,
    log: Path,
    *,
    kill_when: Callable[[], bool] | None = None,
    seed: int = 0,
    seconds: float = 120,
) -> bool:
    """Whether a training on `world` ranks came to its end; False where `kill_when` came true before and they were
    killed, one after the other.

    Raises:
        AssertionError: where it ended otherwise.
    """
    context, port = multiprocessing.get_context("fork"), distributed.free_port()
    processes = [
        context.Process(target=_one_rank, args=(rank, world, port, str(log), options)) for rank in range(world)
    ]
    for process in processes:
        process.start()
    until = time.monotonic() + seconds
    while any(process.is_alive() for process in processes):
        if kill_when is not None and kill_when():
            random.Random(seed).shuffle(processes)
            for process in processes:
                if process.is_alive():
                    os.kill(process.pid, signal.SIGKILL)
                process.join()
            return False
        failed = [process.exitcode for process in processes if process.exitcode]
        if failed or time.monotonic() > until:
            for process in processes:
                process.kill()
            raise AssertionError(f"exit codes {failed or 'none in time'}: {log.read_text()[-3000:]}")
        time.sleep(0.001)
    return True
