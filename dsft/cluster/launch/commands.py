"""The exact command line of the launcher below `dsft launch`: deepspeed, torchrun (also under srun) or accelerate."""

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

from dsft.cluster.launch.options import MODULES, LaunchOptions, given_node_rank
from dsft.errors import UserError
from dsft.runtime.distributed import free_port
from dsft.runtime.hardware import default_ranks, has_gpu
from dsft.runtime.hostfile import DEFAULT_PORT, Node, read_hosts

RUNNERS = {
    "deepspeed": "deepspeed.launcher.runner",
    "torchrun": "torch.distributed.run",
    "accelerate launch": "accelerate.commands.launch",
}


def build_command(options: LaunchOptions, name: str, script: list[str]) -> list[str]:
    """The command that starts `name` ("train", "eval" or a module) on all ranks, in words.

    Raises:
        UserError: where the nodes cannot be found out, or a launcher's program is missing.
    """
    builders = {
        "local": _deepspeed,
        "hostfile": _deepspeed,
        "nodes": _torchrun,
        "slurm": _srun,
        "accelerate": _accelerate,
    }
    return builders[options.way](options, MODULES.get(name, name), script)


def shown(command: list[str]) -> list[str]:
    """The command as a user would type it: `deepspeed ...` for `python -m deepspeed.launcher.runner ...`."""
    for short, module in RUNNERS.items():
        if module in command:
            at = command.index(module)
            return [*command[: at - 2], *short.split(), *command[at + 1 :]]
    return command


def _runner(name: str) -> list[str]:
    return [sys.executable, "-m", RUNNERS[name]]  # of this very environment, whatever PATH says


def _deepspeed(options: LaunchOptions, module: str, script: list[str]) -> list[str]:
    words = [
        (f"--{key}", str(getattr(options, key)))
        for key in ("hostfile", "include", "exclude", "num_nodes", "num_gpus", "master_addr")
        if getattr(options, key) is not None
    ]
    port = options.master_port
    if options.no_ssh:
        first = hosts_of(options, options.hostfile)[0].name
        words += [("--no_ssh",), ("--node_rank", str(_place_in_hostfile(options)))] + [
            ("--master_addr", os.environ.get("MASTER_ADDR", first))
        ] * (options.master_addr is None)
        port = port or int(os.environ.get("MASTER_PORT", DEFAULT_PORT))  # the same on all nodes
    elif options.hostfile and not shutil.which("pdsh"):
        raise UserError(
            [
                "--hostfile: DeepSpeed starts other nodes through pdsh, which is not here; apt-get install pdsh, or"
                " give the command on every node with --no_ssh"
            ]
        )
    # DeepSpeed turns CUDA_VISIBLE_DEVICES into --include by itself, but ignores it beside --num_gpus.
    chosen = has_gpu() and os.environ.get("CUDA_VISIBLE_DEVICES")
    if (
        options.way == "local"
        and not chosen
        and options.num_gpus is None
        and not options.include
        and not options.exclude
    ):
        words.append(("--num_gpus", str(default_ranks())))
    words.append(("--master_port", str(port or free_port())))  # the default port fails when two jobs share a machine
    return [
        *_runner("deepspeed"),
        *(word for pair in words for word in pair),
        "--log_level",
        "error",
        "--module",
        module,
        *script,
    ]


def hosts_of(options: LaunchOptions, hostfile: str) -> list[Node]:
    """The nodes of `hostfile` that take part, the first (rank 0's) first.

    Raises:
        UserError: as `read_hosts`.
    """
    return read_hosts(
        hostfile,
        include=options.include or "",
        exclude=options.exclude or "",
        num_nodes=options.num_nodes or -1,
        num_gpus=options.num_gpus or -1,
    )


def _place_in_hostfile(options: LaunchOptions) -> int:
    rank = given_node_rank(options, os.environ)
    if rank is not None:
        return rank
    own_names = {socket.gethostname(), socket.getfqdn(), socket.gethostname().split(".")[0]}
    hosts = [node.name for node in hosts_of(options, options.hostfile)]
    for place, host in enumerate(hosts):
        if host in own_names:
            return place
    raise UserError(
        [
            f"--no_ssh: {socket.gethostname()} stands not in {options.hostfile} ({', '.join(hosts)}); say which of them"
            " this node is with --node_rank or NODE_RANK"
        ]
    )


def _torchrun(options: LaunchOptions, module: str, script: list[str]) -> list[str]:
    address = options.master_addr or os.environ.get("MASTER_ADDR")
    if not address:
        raise UserError(
            [
                f"--nodes {options.nodes}: the first node's address is not known; set --master_addr or MASTER_ADDR, the"
                " same on every node"
            ]
        )
    port = options.master_port or int(os.environ.get("MASTER_PORT", DEFAULT_PORT))
    rank = given_node_rank(options, os.environ)
    if rank is not None and rank >= options.nodes:
        raise UserError(
            [f"node rank {rank}: nodes are numbered from 0 to {options.nodes - 1} (--nodes {options.nodes})"]
        )
    where = ["--rdzv_backend", "c10d", "--rdzv_endpoint", f"{address}:{port}", "--rdzv_id", "dsft"]
    if rank is not None:
        where = ["--node_rank", str(rank), "--master_addr", address, "--master_port", str(port)]
    return [
        *_runner("torchrun"),
        "--nnodes",
        str(options.nodes),
        "--nproc_per_node",
        str(options.num_gpus or default_ranks()),
        *where,
        "--module",
        module,
        *script,
    ]


def _srun(options: LaunchOptions, module: str, script: list[str]) -> list[str]:
    job, node_list = os.environ.get("SLURM_JOB_ID"), os.environ.get("SLURM_JOB_NODELIST")
    if not job or not node_list:
        raise UserError(
            ["--slurm: this is no SLURM job; call it inside sbatch or salloc, or submit scripts/slurm/torchrun.sbatch"]
        )
    hosts = subprocess.run(
        ["scontrol", "show", "hostnames", node_list], capture_output=True, text=True, check=True
    ).stdout.split()
    ranks = options.num_gpus or int(os.environ.get("SLURM_GPUS_ON_NODE", default_ranks()))
    port = options.master_port or 20000 + int(job) % 10000  # jobs that share a node must not meet
    head = f"{options.master_addr or hosts[0]}:{port}"
    return [
        "srun",
        "--nodes",
        str(len(hosts)),
        "--ntasks",
        str(len(hosts)),
        "--ntasks-per-node",
        "1",
        "--kill-on-bad-exit=1",
        *_runner("torchrun"),
        "--nnodes",
        str(len(hosts)),
        "--nproc_per_node",
        str(ranks),
        "--rdzv_backend",
        "c10d",
        "--rdzv_endpoint",
        head,
        "--rdzv_id",
        job,
        "--module",
        module,
        *script,
    ]


def _accelerate(options: LaunchOptions, module: str, script: list[str]) -> list[str]:
    given = {
        "machine_rank": given_node_rank(options, os.environ),
        "main_process_ip": options.master_addr,
        "main_process_port": options.master_port,
    }
    words = [word for key, value in given.items() if value is not None for word in (f"--{key}", str(value))]
    file = (
        Path(__file__).resolve().parent.parent.parent / f"{module.rpartition('.')[2]}.py"
    )  # accelerate's pdsh form takes no module
    return [*_runner("accelerate launch"), "--config_file", options.accelerate, *words, str(file), *script]
