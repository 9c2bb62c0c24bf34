"""RANK, WORLD_SIZE and the others for processes that mpirun or srun started, and the network interface between the
nodes.

torchrun, deepspeed and accelerate set these variables themselves, and then nothing is changed. Called before anything
reads RANK: it decides which
process prints. No process group is made here.
"""

import ipaddress
import os
import re
import socket
import zlib
from collections.abc import Mapping

from dsft.errors import UserError

MPI_NAMES = {
    "OpenMPI": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "MPICH or Intel MPI": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    "MVAPICH": ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
}
"""Rank, number of ranks, and the same within the node, as each mpirun says them."""
INTERFACE_VARIABLES = {"GLOO_SOCKET_IFNAME": "{}", "NCCL_SOCKET_IFNAME": "={}"}
"""How each library wants the interface's name; without "=" NCCL takes it for the beginning of a name."""


def unset_single_process_env() -> None:
    """Remove the variables of a rank without others: a notebook that trained leaves them to the commands it starts, and
    its process group has the port.
    """
    if (
        os.environ.get("WORLD_SIZE") == "1" and "LOCAL_RANK" in os.environ
    ):  # a pod alone in its job has no LOCAL_RANK, and needs the others
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(name, None)


def map_launcher_variables() -> None:
    """Set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_SIZE, MASTER_ADDR and MASTER_PORT where only MPI's or SLURM's own are
    there. Safe to call again.

    Raises:
        UserError: MPI over several nodes without MASTER_ADDR, which only the user knows.
    """
    found = launcher_variables(os.environ)
    for name, value in found.items():
        os.environ.setdefault(name, value)
    if found and "MASTER_ADDR" not in os.environ:
        raise UserError(
            [
                "mpirun started these ranks on several nodes and MASTER_ADDR is not set: give the first node's address,"
                " export MASTER_ADDR=HOST and mpirun -x MASTER_ADDR (scripts/mpi does)"
            ]
        )


def launcher_variables(given: Mapping[str, str]) -> dict[str, str]:
    """The variables for this process from those in `given`; empty where RANK is there already or the process is the
    only one.

    MPI goes before SLURM: mpirun inside a SLURM allocation starts its processes through srun, whose variables are those
    of its helpers.
    """
    if "RANK" in given:
        return {}
    for rank, size, local_rank, local_size in MPI_NAMES.values():
        if all(name in given for name in (rank, size, local_rank, local_size)) and int(given[size]) > 1:
            found = _ranks(given[rank], given[size], given[local_rank], given[local_size])
            if found["WORLD_SIZE"] == found["LOCAL_SIZE"]:
                found["MASTER_ADDR"] = "127.0.0.1"
            job = given.get("PMIX_NAMESPACE") or given.get("OMPI_MCA_ess_base_jobid") or given.get("SLURM_JOB_ID", "")
            return found | {"MASTER_PORT": str(20000 + zlib.crc32(job.encode()) % 10000)}
    if _is_slurm_task(given):
        nodes = given.get("SLURM_STEP_NODELIST") or given["SLURM_JOB_NODELIST"]
        local_size = _tasks_of_node(given["SLURM_STEP_TASKS_PER_NODE"], int(given["SLURM_NODEID"]))
        # With --gpus-per-task each task sees its own GPU alone, as number 0.
        visible = len(given["CUDA_VISIBLE_DEVICES"].split(",")) if given.get("CUDA_VISIBLE_DEVICES") else local_size
        found = _ranks(
            given["SLURM_PROCID"],
            given["SLURM_STEP_NUM_TASKS"],
            str(int(given["SLURM_LOCALID"]) % visible),
            str(local_size),
        )
        return found | {
            "MASTER_ADDR": first_host(nodes),
            "MASTER_PORT": str(20000 + int(given["SLURM_JOB_ID"]) % 10000),
        }
    return {}


def _ranks(rank: str, size: str, local_rank: str, local_size: str) -> dict[str, str]:
    return {
        "RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": local_rank,
        "LOCAL_SIZE": local_size,
        "LOCAL_WORLD_SIZE": local_size,
    }


def _is_slurm_task(given: Mapping[str, str]) -> bool:
    """One of several tasks of an srun. A batch script has SLURM_NTASKS and SLURM_PROCID as well, but no step; an
    interactive shell is a step of one task.
    """
    return int(given.get("SLURM_STEP_NUM_TASKS", "1")) > 1 and "SLURM_STEP_ID" in given and "SLURM_PROCID" in given


def first_host(nodes: str) -> str:
    """The first name of a SLURM node list: node-0 of `node-[0-3,7],login`. Needs no scontrol, which a container may
    lack.
    """
    return re.sub(r"\[([^],-]+)[^]]*]", r"\1", nodes).split(",")[0]


def _tasks_of_node(counts: str, node: int) -> int:
    """Tasks of node number `node` in SLURM's `2(x3),1`."""
    each = [
        int(number) for number, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", counts) for _ in range(int(times or 1))
    ]
    return each[node]


def choose_interface() -> None:
    """Where ranks run on several nodes: GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name the interface that leads to
    MASTER_ADDR, unless set.

    gloo would take the address of the host's own name, which Debian's installer writes as 127.0.1.1 into /etc/hosts:
    other nodes cannot connect to that.
    """
    several_nodes = int(os.environ.get("WORLD_SIZE", "1")) > int(
        os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE", "1")
    )
    if several_nodes and not all(name in os.environ for name in INTERFACE_VARIABLES):
        interface = interface_towards(os.environ["MASTER_ADDR"])
        for name, form in INTERFACE_VARIABLES.items():
            if interface:
                os.environ.setdefault(name, form.format(interface))


def interface_towards(address: str) -> str | None:
    """Name of this machine's interface for connections to `address`; None where it cannot be told. Never the loopback
    one, also where `address` is this machine.
    """
    import psutil

    states = psutil.net_if_stats()
    interfaces = {
        name: [one.address.partition("%")[0] for one in addresses]
        for name, addresses in psutil.net_if_addrs().items()
        if name in states and states[name].isup
    }
    own = {one: name for name, addresses in interfaces.items() for one in addresses if _is_reachable(one)}
    # The address itself; where that is this machine's name on 127.0.1.1, the way to anywhere else (192.0.2.1 belongs to
    # nobody).
    for destination in (address, "192.0.2.1"):
        name = own.get(outgoing_address(destination))
        if name:
            return name
    names = set(own.values())
    return names.pop() if len(names) == 1 else None


def _is_reachable(text: str) -> bool:
    """Whether other machines could connect to this address of an interface (which may be a hardware address)."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    return not (address.is_loopback or address.is_link_local)


def outgoing_address(destination: str) -> str | None:
    """This machine's own address on the way to `destination`, as the kernel routes it (no packet is sent); None without
    a way there.
    """
    try:
        family, kind, _, _, target = socket.getaddrinfo(destination, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)
            return probe.getsockname()[0].partition("%")[0]
    except OSError:
        return None
