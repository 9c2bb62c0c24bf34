"""The smoke test's ranks on one node: `python -m dsft.doctor.smoke`, started by the agent, one process per slot.

Imports torch, then waits for a line of JSON with the ranks, the master's address and the pairs; forks a process per slot (torch is imported
once, CUDA not yet touched) and writes a line for each stage of each rank, so that whoever does not answer can be named.
"""

import json
import os
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dsft.doctor.agent import MARK
from dsft.doctor.measuring import Place, measure_all


def main() -> None:
    line = sys.stdin.readline()
    if not line:
        return  # the test is not wanted
    options = json.loads(line)
    ranks = options["nodes"][options["node"]]
    children = [pid for local, rank in enumerate(ranks) if (pid := _fork(local, rank, options))]
    sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0 for pid in children))


def _fork(local: int, rank: int, options: dict[str, Any]) -> int:
    if pid := os.fork():
        return pid
    try:
        _run(local, rank, options)
    except (RuntimeError, ValueError, OSError) as error:  # torch's errors of the network and of CUDA are RuntimeErrors
        _tell(rank, failed=" ".join(f"{type(error).__name__}: {error}".split())[:600])
        os._exit(1)
    os._exit(0)  # no shutdown of the interpreter: other ranks may be gone already


def _run(local: int, rank: int, options: dict[str, Any]) -> None:
    world = sum(len(ranks) for ranks in options["nodes"])
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(local), "MASTER_ADDR": options["master"], "MASTER_PORT": str(options["port"])}
    if options["interface"]:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", options["interface"])
    _tell(rank, stage="starting")
    if options["gpu"]:
        torch.cuda.set_device(local)
    else:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // len(options["nodes"][options["node"]])))
    _tell(rank, stage="joining the others")
    dist.init_process_group("cpu:gloo,cuda:nccl" if options["gpu"] else "gloo", timeout=timedelta(seconds=options["group_seconds"]))
    place = Place(rank=rank, nodes=options["nodes"], rounds=[[tuple(pair) for pair in pairs] for pairs in options["rounds"]],
                  device=torch.device("cuda", local) if options["gpu"] else torch.device("cpu"))
    everyone = measure_all(place, lambda stage: _tell(rank, stage=stage))
    _tell(rank, stage="done", measured=everyone[rank])
    dist.barrier()


def _tell(rank: int, **content: Any) -> None:
    """One write, so that lines of several ranks do not mix."""
    os.write(1, (MARK + json.dumps({"rank": rank} | content) + "\n").encode())


if __name__ == "__main__":
    main()
