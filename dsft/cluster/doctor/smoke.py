"""The smoke test's ranks on one node: `python -m dsft.cluster.doctor.smoke`, started by the phase `measure`.

Imports torch, then waits for a line of JSON with the ranks, the master's address and the pairs; forks a process per
slot (torch is imported once, CUDA not yet touched) and writes a line for each stage of each rank, so that whoever does
not answer can be named.
"""

import json
import os
import signal
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dsft.cluster.doctor.measuring import Place, measure_all
from dsft.cluster.doctor.phase import MARK

LIFE_SECONDS = 30
"""A rank that has not finished by then ends, wherever it waits; the head names it by the last it said."""


def main() -> None:
    _write(ready=True)
    line = sys.stdin.readline()
    if not line:
        return  # the test is not wanted
    options = json.loads(line)
    ranks = options["nodes"][options["node"]]
    if options["devices"]:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, options["devices"]))
    children = [pid for local, rank in enumerate(ranks) if (pid := _fork(local, rank, options))]
    sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0 for pid in children))


def _fork(local: int, rank: int, options: dict[str, Any]) -> int:
    if pid := os.fork():
        return pid
    try:
        _run(local, rank, options)
    except (RuntimeError, ValueError, OSError) as error:  # torch's errors of the network and of CUDA are RuntimeErrors
        _write(rank=rank, failed=" ".join(f"{type(error).__name__}: {error}".split())[:600])
        os._exit(1)
    os._exit(0)  # no shutdown of the interpreter: other ranks may be gone already


def _run(local: int, rank: int, options: dict[str, Any]) -> None:
    signal.alarm(LIFE_SECONDS)
    world = sum(len(ranks) for ranks in options["nodes"])
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(local),
        "MASTER_ADDR": options["master"],
        "MASTER_PORT": str(options["port"]),
    }
    take_part(local, rank, options, lambda **content: _write(rank=rank, **content))


def take_part(
    local: int, rank: int, options: dict[str, Any], tell: Callable[..., None], *, store: dist.Store | None = None
) -> None:
    """Join the process group as one rank and measure with the others.

    Args:
        local: number of the GPU, and place among the node's ranks.
        tell: takes each stage as it begins, and with the last one what was measured.
        store: where the ranks meet; by default at MASTER_ADDR and MASTER_PORT.
    """
    if options["interface"]:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", options["interface"])
    tell(stage="starting")
    if options["gpu"]:
        torch.cuda.set_device(local)
    torch.set_num_threads(1)  # cores are compared, not how many of them the slots leave to each rank
    tell(stage="joining the others")
    meeting = (
        {}
        if store is None
        else {"store": store, "rank": rank, "world_size": sum(len(ranks) for ranks in options["nodes"])}
    )
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if options["gpu"] else "gloo",
        timeout=timedelta(seconds=options["group_seconds"]),
        **meeting,
    )
    place = Place(
        rank=rank,
        nodes=options["nodes"],
        rounds=[[tuple(pair) for pair in pairs] for pairs in options["rounds"]],
        device=torch.device("cuda", local) if options["gpu"] else torch.device("cpu"),
    )
    everyone = measure_all(place, lambda stage: tell(stage=stage))
    tell(stage="done", measured=everyone[rank])
    dist.barrier()


def _write(**content: Any) -> None:
    """One write, so that lines of several ranks do not mix."""
    os.write(1, (MARK + json.dumps(content) + "\n").encode())


if __name__ == "__main__":
    main()
