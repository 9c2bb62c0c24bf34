"""Launcher variables of a rank (RANK, WORLD_SIZE and the others), and hosts: nodes, addresses, ports, ssh.

torchrun, deepspeed and accelerate set these variables themselves; for mpirun and srun they are derived.
"""

import contextlib
import ipaddress
import os
import re
import secrets
import socket
import zlib
from collections import deque
from collections.abc import Mapping

import psutil

from dsft.errors import UserError

# Variables that `dsft launch` sets.
LAUNCH = "DSFT_LAUNCH"  # an id of the launch: its restarts distinguish their own run from one that `overwrite` replaces
OPTIONS_FILE = "options.yaml"  # in output_dir: the options of all ranks of a launch
ENV_FILE = "launch.env"  # in output_dir: variables for DeepSpeed to set on the nodes
CHECKS_ALONE = "DSFT_CHECKS_ALONE"  # rank 0's entry runs alone before all ranks, for checks that need no other rank

MPI_NAMES = {
    "OpenMPI": tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
    "MPICH or Intel MPI": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}
"""Rank, number of ranks, and the same within the node, in the variables of each mpirun."""
MPI_LOCAL_RANK = "OMPI_COMM_WORLD_LOCAL_RANK"
LEFT_OVER = (
    "ACCELERATE_MIXED_PRECISION",
    "ACCELERATE_USE_CPU",
    "ACCELERATE_TORCH_DEVICE",
    "ACCELERATE_DYNAMO_BACKEND",
    "ACCELERATE_USE_MEGATRON_LM",
)
"""Variables of an earlier `accelerate launch`, which would override `dtype`, the machine and `torch_compile`."""
LOOPBACK = "127.0.0.1"
SINGLE_PROCESS_ENV = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": LOOPBACK}
"""Launcher variable -> its value in a process without a launcher. MASTER_PORT is any free port."""
INTERFACE_VARIABLES = {"GLOO_SOCKET_IFNAME": "{}", "NCCL_SOCKET_IFNAME": "={}"}
"""Form of the interface's name for each library; without "=" NCCL treats it as a prefix."""


def world_size() -> int:
    """Return the number of ranks over all nodes, set by the launcher; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """Return this process's rank over all nodes, from 0."""
    return int(os.environ.get("RANK", "0"))


def ranks_per_node() -> int:
    """Return the number of ranks on this node. The deepspeed launcher sets LOCAL_SIZE, torchrun LOCAL_WORLD_SIZE."""
    # accelerate leaves a LOCAL_WORLD_SIZE of 1 in a notebook, which launchers started there inherit.
    return int(os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE") or world_size())


def launchers_of(given: Mapping[str, str]) -> list[str]:
    """Return the launchers that started this rank, for run.json; empty without one."""
    signs = {
        "torchrun": "TORCHELASTIC_RUN_ID",
        "mpirun": "OMPI_COMM_WORLD_RANK",
        "srun": "SLURM_STEP_ID",
        "accelerate": "ACCELERATE_CONFIG_DS_FIELDS",
        "deepspeed": "CROSS_RANK",
    }
    return [name for name, variable in signs.items() if variable in given]


def interface_error() -> str:
    """Return the problem of an interface in NCCL's or gloo's variables that is not on this node; empty if all are."""
    present = list(psutil.net_if_addrs())
    for variable in INTERFACE_VARIABLES:
        value = os.environ.get(variable, "")
        if not value or value.startswith("^"):  # "^" excludes interfaces
            continue
        prefixes = tuple(value.lstrip("=").split(","))
        if not any(name.startswith(prefixes) for name in present):
            return f"{variable}={value}, but the interfaces are {', '.join(present)}"
    return ""


def unset_single_process_env() -> None:
    """Remove the variables of a single process, which a notebook that trained passes to the commands it starts."""
    # A pod alone in its job has no LOCAL_RANK, and needs the others.
    if os.environ.get("WORLD_SIZE") == "1" and "LOCAL_RANK" in os.environ:
        for name in (*SINGLE_PROCESS_ENV, "MASTER_PORT"):
            os.environ.pop(name, None)


def map_launcher_variables() -> None:
    """Set RANK, WORLD_SIZE and the others from MPI's or SLURM's own. Raises UserError for what only the user knows."""
    if problem := interface_error():
        raise UserError(problem)
    for name in LEFT_OVER:
        os.environ.pop(name, None)
    variables = launcher_variables(os.environ)
    for name, value in variables.items():
        os.environ.setdefault(name, value)
    if os.environ.get("LOCAL_RANK", "0") != os.environ.get(MPI_LOCAL_RANK, "0"):  # from an mpirun around the launcher
        os.environ.pop(MPI_LOCAL_RANK, None)  # DeepSpeed asserts that they are equal
    if variables and "MASTER_ADDR" not in os.environ:
        raise UserError(
            "mpirun started these ranks on several nodes and MASTER_ADDR is not set: set it to the first node,"
            " export MASTER_ADDR=HOST and mpirun -x MASTER_ADDR (scripts/mpi does)"
        )


def launcher_variables(given: Mapping[str, str]) -> dict[str, str]:
    """Derive the variables of this process from `given` ones; empty if RANK is set or it is the only process."""
    if "RANK" in given:
        return {}
    # MPI takes precedence: mpirun inside a SLURM allocation starts its processes through srun, whose variables describe
    # its helpers.
    for names in MPI_NAMES.values():
        if all(name in given for name in names) and int(given[names[1]]) > 1:
            rank, size, local_rank, local_size = (given[name] for name in names)
            job = given.get("PMIX_NAMESPACE") or given.get("OMPI_MCA_ess_base_jobid") or given.get("SLURM_JOB_ID", "")
            address = LOOPBACK if size == local_size else None
            number = zlib.crc32(job.encode())
            break
    else:
        # One of several tasks of an srun. A batch script also has SLURM_NTASKS and SLURM_PROCID, but no step; an
        # interactive shell is a step with one task.
        rank = given.get("SLURM_PROCID")
        size = given.get("SLURM_STEP_NUM_TASKS", "1")
        if rank is None or int(size) < 2 or "SLURM_STEP_ID" not in given:
            return {}
        tasks_of_nodes = []
        for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", given["SLURM_STEP_TASKS_PER_NODE"]):  # 2(x3),1
            tasks_of_nodes += [count] * int(times or 1)
        local_size = tasks_of_nodes[int(given["SLURM_NODEID"])]
        # With --gpus-per-task each task sees only its own GPU, as number 0.
        visible = given.get("CUDA_VISIBLE_DEVICES")
        num_gpus = len(visible.split(",")) if visible else int(local_size)
        local_rank = str(int(given["SLURM_LOCALID"]) % num_gpus)
        address = first_host(given.get("SLURM_STEP_NODELIST") or given["SLURM_JOB_NODELIST"])
        number = int(given["SLURM_JOB_ID"])
    variables = {
        "RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": local_rank,
        "LOCAL_SIZE": local_size,
        "LOCAL_WORLD_SIZE": local_size,
        "MASTER_PORT": str(20_000 + number % 10_000),  # rarely shared
    }
    if address:
        variables["MASTER_ADDR"] = address
    return variables


_reserved: deque[socket.socket] = deque(maxlen=64)  # returned ports, held until this process exits


def free_port() -> int:
    """Return a free TCP port that no other launch gets while this process runs; not an ephemeral one (ip(7))."""
    while True:
        holder = socket.socket()
        with contextlib.suppress(OSError):
            holder.bind(("", 20_000 + secrets.randbelow(12_768)))
            # From now on such a bind fails on this port; torch's store, which sets the same option, can still listen.
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            _reserved.append(holder)
            return holder.getsockname()[1]
        holder.close()


def first_host(nodes: str) -> str:
    """Return the first name of a SLURM node list: node-0 of `node-[0-3,7],login`. A container may lack scontrol."""
    return re.sub(r"\[([^],-]+)[^]]*]", r"\1", nodes).split(",")[0]


def choose_interface() -> None:
    """Set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the interface that leads to MASTER_ADDR, if ranks run on several
    nodes and the user has not set them. Never the loopback one, which gloo uses if /etc/hosts has the host's own name
    at 127.0.1.1 (Debian's installer).
    """
    if world_size() <= ranks_per_node() or all(name in os.environ for name in INTERFACE_VARIABLES):
        return
    interface_of = reachable_addresses()
    # The route to the address; if that is this machine's name on 127.0.1.1, to anywhere else (192.0.2.1 belongs to
    # nobody); without a route, any interface.
    ways = [outgoing_address(os.environ["MASTER_ADDR"]), outgoing_address("192.0.2.1"), *interface_of]
    address = next((each for each in ways if each in interface_of), None)
    if address is not None:
        for variable, form in INTERFACE_VARIABLES.items():
            os.environ.setdefault(variable, form.format(interface_of[address]))


def reachable_addresses() -> dict[str, str]:
    """Return the addresses of this machine that others could connect to -> the interface, which is up."""
    states = psutil.net_if_stats()
    interface_of = {}
    for name, entries in psutil.net_if_addrs().items():
        if name not in states or not states[name].isup:
            continue
        for entry in entries:
            if entry.family in (socket.AF_INET, socket.AF_INET6):
                text = entry.address.partition("%")[0]
                address = ipaddress.ip_address(text)
                if not address.is_loopback and not address.is_link_local:
                    interface_of[text] = name
    return interface_of


def outgoing_address(destination: str) -> str | None:
    """Return this machine's address on the route to `destination` (no packet is sent); None without a route."""
    try:
        targets = socket.getaddrinfo(destination, 9, type=socket.SOCK_DGRAM)
    except OSError:
        return None
    for family, kind, _, _, target in targets:  # this machine may have no route to a name's IPv4 address
        with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
            probe.connect(target)
            return probe.getsockname()[0].partition("%")[0]
    return None


def address_of(host: str) -> str | None:
    """Return the address at which other machines reach `host`; None if it is unknown here, such as an alias of ssh."""
    try:
        address = socket.gethostbyname(host)
    except OSError:
        return None
    # A loopback address is this machine's own name in Debian's /etc/hosts.
    return outgoing_address("192.0.2.1") if ipaddress.ip_address(address).is_loopback else address


SSH = ["ssh", "-oBatchMode=yes", "-oConnectTimeout=5", "-oServerAliveInterval=3", "-oServerAliveCountMax=3"]
