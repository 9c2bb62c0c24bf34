"""Threads of each rank: its part of a node's cores, for CPU ranks and for the optimizer of offload on GPU ranks."""

import os
import socket
from collections.abc import Set

from dsft.runtime.hardware import cpu_count

ONE_THREAD_BY_DEFAULT = {"TORCHELASTIC_RUN_ID", "ACCELERATE_USE_DEEPSPEED"}
"""Variables of launchers that set OMP_NUM_THREADS to 1 where nothing is asked for."""


def share_cores(ranks: int) -> bool:
    """Give this rank its part of the cores among the `ranks` of its node; False where the environment says how many.

    Left alone each would take all of them. torchrun gives each a single one where OMP_NUM_THREADS is not set
    (torch/distributed/run.py), and so does accelerate, over pdsh too (accelerate/utils/launch.py).
    """
    if os.environ.get("OMP_NUM_THREADS") == "1" and not ONE_THREAD_BY_DEFAULT.isdisjoint(os.environ):
        del os.environ["OMP_NUM_THREADS"]
    is_free = "OMP_NUM_THREADS" not in os.environ
    _set_threads(int(os.environ.get("OMP_NUM_THREADS", max(1, cpu_count() // ranks))))
    return is_free


def own_cores() -> tuple[str, frozenset[int]]:
    """Return this machine's name, and the cores that this process may run on."""
    return socket.gethostname(), frozenset(os.sched_getaffinity(0))


def use_bound_cores(cores_of_ranks: list[tuple[str, Set[int]]], *, ranks: int) -> None:
    """Give a rank that its launcher tied to some of the node's cores (mpirun, srun) as many threads as its part of all:
    its own divided once more would lie idle.

    Args:
        cores_of_ranks: `own_cores` of every rank.
        ranks: of this node.
    """
    host, mine = own_cores()
    of_node = frozenset().union(*(cores for name, cores in cores_of_ranks if name == host))
    if mine != of_node:
        _set_threads(max(1, min(len(mine), len(of_node) // ranks)))


def _set_threads(number: int) -> None:
    import torch

    os.environ["OMP_NUM_THREADS"] = str(number)
    torch.set_num_threads(number)
