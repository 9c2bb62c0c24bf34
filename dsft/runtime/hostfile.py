"""The nodes of a launch, read from a DeepSpeed host file by DeepSpeed's own functions: what is examined is what it
starts.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from dsft.errors import UserError, one_line

DEFAULT_PORT = 29500
"""Where ranks meet by default: DeepSpeed's (deepspeed/constants.py) and torchrun's."""


@dataclass(frozen=True, kw_only=True)
class Node:
    """One machine of a launch."""

    name: str
    """As the host file writes it, and as ssh takes it; "localhost" for this machine without a host file."""
    slots: int | None
    """Ranks started there; None: one per GPU, else up to 2 CPU processes."""
    devices: tuple[int, ...] = ()
    """Numbers of the GPUs they use (`--include node:0,2`); empty: the first `slots`."""


def local_node(*, slots: int | None = None) -> Node:
    """This machine, not through ssh."""
    return Node(name="localhost", slots=slots)


def read_hosts(
    hostfile: str, *, include: str = "", exclude: str = "", num_nodes: int = -1, num_gpus: int = -1
) -> list[Node]:
    """The nodes that `deepspeed --hostfile HOSTFILE` with these options starts ranks on, the first (rank 0's) first.

    Raises:
        UserError: for a missing or malformed file, a filter that names a host or slot that is not there, or options
            that exclude each other.
    """
    if not Path(hostfile).is_file():
        here = f"seen from {os.getcwd()}"
        raise UserError([f"--hostfile {hostfile}: no such file ({here}); write one line per node, `worker-1 slots=8`"])
    if (include or exclude) and (num_nodes >= 0 or num_gpus >= 0):
        raise UserError(["--num_nodes and --num_gpus cannot be combined with --include or --exclude; keep one kind"])
    from deepspeed.launcher import runner  # here: seconds

    runner.logger.disabled = True  # it would print the file before the message below
    try:
        pool = runner.fetch_hostfile(hostfile)
    except ValueError as error:
        raise UserError([f"--hostfile {hostfile}: {one_line(error)}; a line reads `worker-1 slots=8`"]) from error
    try:
        active = runner.parse_inclusion_exclusion(pool, include, exclude)
    except ValueError as error:
        filters = {"--include": include, "--exclude": exclude}
        given = " ".join(f"{flag} {value}" for flag, value in filters.items() if value)
        hosts = ", ".join(f"{host} slots={slots}" for host, slots in pool.items())
        raise UserError([f"{given}: {one_line(error)}; {hostfile} names {hosts}"]) from error
    finally:
        runner.logger.disabled = False
    active = runner.apply_num_nodes_and_gpus(active, num_nodes, num_gpus)
    nodes = [Node(name=host, slots=len(slots), devices=tuple(slots)) for host, slots in active.items() if slots]
    if not nodes:
        raise UserError([f"--hostfile {hostfile}: no host with at least one slot is left"])
    return nodes
