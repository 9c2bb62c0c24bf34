"""The launchers below `dsft launch`: the option that chooses each, its exact command line, and its processes' names.

A new launcher is its option in `LaunchOptions` and one entry of `LAUNCHERS`.
"""

import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from dsft.errors import UserError, raise_if_any
from dsft.launch.hosts import HostFields, accelerate_runner, hosts_of, nodes_through_ssh, read_accelerate_file
from dsft.launch.shared import job_id, job_port
from dsft.runtime.distributed import free_port
from dsft.runtime.hardware import default_ranks, has_gpu
from dsft.watchdog import processes

MODULES = {"train": "dsft.train", "eval": "dsft.eval_ppl"}
RUNNERS = {
    "deepspeed": "deepspeed.launcher.runner",
    "torchrun": "torch.distributed.run",
    "accelerate launch": "accelerate.commands.launch",
}
"""A launcher as a user types it, and its module: that of this environment is started, whatever PATH says."""
QUOTED_RUNNER = "dsft.launch.quoted_runner"
"""In place of `deepspeed` where a shell would not leave the paths of the working folder and of Python as they are."""


@dataclass(kw_only=True)
class LaunchOptions(HostFields):
    """Launch: how the ranks are started; without hostfile, nodes, slurm or accelerate on all GPUs of this machine."""

    no_ssh: bool = False
    """With a host file: the same command is given on every node, and nothing goes through ssh."""
    nodes: int | None = None
    """So many nodes without a host file: the same command is given on every node, `torchrun` starts the ranks
    (Kubernetes)."""
    node_rank: int | None = None
    """Number of this node, from 0; by default from NODE_RANK or RANK, else by its place in the host file, else as
    torchrun decides."""
    slurm: bool = False
    """Inside sbatch or salloc: one srun task on each node of the allocation, `torchrun` in each."""
    accelerate: str | None = None
    """A config file of `accelerate launch`."""
    dry_run: bool = False
    """Print the command and stop."""
    no_preflight: bool = False
    """Start without a look at the nodes first (see `dsft doctor`)."""
    max_restarts: int = 0
    """So often a training that failed is started again from its last checkpoint; not after an error of the options, nor
    after Ctrl-C."""
    wait_for_nodes: float = 900
    """With a host file: seconds that a restart waits until the preflight finds no error any more."""

    @property
    def way(self) -> str:
        """How the ranks are started: a key of LAUNCHERS."""
        return next(iter(self.ways), "local")

    @property
    def ways(self) -> list[str]:
        """The options that are given and choose a launcher, of which one may be."""
        return [name for name in LAUNCHERS if name != "local" and getattr(self, name)]


def build_command(options: LaunchOptions, name: str, script: list[str]) -> list[str]:
    """The words of the command that starts `name` ("train", "eval" or a module) on all ranks.

    Raises:
        UserError: where the nodes cannot be found out, or a launcher's program is missing.
    """
    return LAUNCHERS[options.way].command(options, MODULES.get(name, name), script)


def for_pdsh(word: str) -> str:
    """A word that DeepSpeed's pdsh runner and the shell of each node turn into `word`.

    Source: `PDSHRunner.parse_user_args` in deepspeed/launcher/multinode_runner.py, which puts a word with a space, and
    no other, between double quotes and escapes none but those.
    """
    quoted = re.sub(r"([\\$`])", r"\\\1", word) if " " in word else shlex.quote(word)
    return quoted.replace("%", "%%")  # pdsh writes host, rank and user for %h, %n and %u


def for_torchrun(word: str) -> str:
    """A word that torchrun turns into `word`: it fills in ${local_rank}, and makes one dollar of two.

    Source: `macros` in torch/distributed/elastic/utils/api.py.
    """
    return word.replace("$", "$$")


def read_by_shell(path: str) -> bool:
    """Whether a shell would make something else of a path without quotes."""
    return not re.fullmatch(r"[\w@+=:,./-]+", path)


def told_to_watchdog(options: LaunchOptions) -> dict[str, str]:
    """The variable that tells the ranks' watchdog which processes above them are their launcher's."""
    return {processes.VARIABLE: ",".join(LAUNCHERS[options.way].processes)}


def shown(command: list[str]) -> list[str]:
    """The command as a user would type it: `deepspeed ...` for `python -m deepspeed.launcher.runner ...`."""
    for short, module in RUNNERS.items():
        if module in command:
            at = command.index(module)
            return [*command[: at - 2], *short.split(), *command[at + 1 :]]
    return command


def _runner(module: str, flags: dict[str, object]) -> list[str]:
    """A launcher with its flags; True stands for a flag without a value, None for one that is left out."""
    words = [sys.executable, "-m", module]
    for flag, value in flags.items():
        if value is not None:
            words += [f"--{flag}"] if value is True else [f"--{flag}", str(value)]
    return words


def _deepspeed(options: LaunchOptions, module: str, script: list[str]) -> list[str]:
    runner, keys = RUNNERS["deepspeed"], ("hostfile", "include", "exclude", "num_nodes", "num_gpus")
    flags: dict[str, object] = {key: getattr(options, key) for key in keys}
    address, port = options.master_addr, options.master_port
    if options.no_ssh:
        first = hosts_of(options, options.hostfile)[0].name
        flags |= {"no_ssh": True, "node_rank": _place_in_hostfile(options)}
        address = address or os.environ.get("MASTER_ADDR", first)
        port = job_port(options, script)  # the same on all nodes
    elif options.hostfile and not shutil.which("pdsh"):
        raise UserError(
            [
                "--hostfile: DeepSpeed starts other nodes through pdsh, which is not here; apt-get install pdsh, or"
                " give the command on every node with --no_ssh"
            ]
        )
    if options.way == "local" and not (options.include or options.exclude):
        flags |= _local_gpus(options.num_gpus)
    # The default port fails when two jobs share a machine. What an error is, dsft says itself; as critical the
    # launcher does not repeat the command of each rank that ended with another code than 0.
    flags |= {"master_addr": address, "master_port": port or free_port(), "log_level": "critical"}
    if len(nodes_through_ssh(options)) > 1:  # for one node alone DeepSpeed takes neither pdsh nor ssh
        script = [for_pdsh(word) for word in script]
        if read_by_shell(os.getcwd()) or read_by_shell(sys.executable):
            runner = QUOTED_RUNNER
    return [*_runner(runner, flags), "--module", module, *script]


def _local_gpus(number: int | None) -> dict[str, object]:
    """The flags that choose so many GPUs of this machine, or all; of CUDA_VISIBLE_DEVICES where that is set.

    DeepSpeed turns all of that variable into --include by itself, but takes the first GPUs of the machine beside
    --num_gpus (`main` in deepspeed/launcher/runner.py).

    Raises:
        UserError: where the variable names fewer, or names them otherwise than by numbers.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") if has_gpu() else None
    if not visible:
        return {"num_gpus": default_ranks() if number is None else number}
    gpus = [word.strip() for word in visible.split(",")]
    if not all(gpu.isdigit() for gpu in gpus):
        way_out = "give numbers (nvidia-smi -L), or start with torchrun: --nodes 1 --master_addr 127.0.0.1"
        raise UserError([f"CUDA_VISIBLE_DEVICES={visible}: DeepSpeed's launcher knows GPUs by number alone; {way_out}"])
    if number is not None and number > len(gpus):
        raise UserError(
            [f"--num_gpus {number}: CUDA_VISIBLE_DEVICES={visible} names {len(gpus)}; lower it, or add more"]
        )
    chosen = gpus[:number]
    return {"num_gpus": None, "include": None if chosen == gpus else f"localhost:{','.join(chosen)}"}


def _place_in_hostfile(options: LaunchOptions) -> int:
    rank = given_node_rank(options, os.environ)
    if rank is not None:
        return rank
    names = {socket.gethostname(), socket.getfqdn(), socket.gethostname().split(".")[0]}
    hosts = [node.name for node in hosts_of(options, options.hostfile)]
    for place, host in enumerate(hosts):
        if host in names:
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
    port = job_port(options, script)
    rank = given_node_rank(options, os.environ)
    if rank is not None and rank >= options.nodes:
        raise UserError(
            [f"node rank {rank}: nodes are numbered from 0 to {options.nodes - 1} (--nodes {options.nodes})"]
        )
    flags = {
        "nnodes": options.nodes,
        "nproc_per_node": options.num_gpus or default_ranks(),
        "rdzv_id": job_id(options, script),  # agents of two jobs at one address and port do not meet
    }
    if rank is None:
        flags |= {"rdzv_backend": "c10d", "rdzv_endpoint": f"{address}:{port}"}
    else:
        flags |= {"node_rank": rank, "master_addr": address, "master_port": port}
    return [*_runner(RUNNERS["torchrun"], flags), "--module", module, *map(for_torchrun, script)]


def _srun(options: LaunchOptions, module: str, script: list[str]) -> list[str]:
    """One srun task on each node of the job, with torchrun in each."""
    job, node_list = os.environ.get("SLURM_JOB_ID"), os.environ.get("SLURM_JOB_NODELIST")
    if not job or not node_list:
        raise UserError(
            ["--slurm: this is no SLURM job; call it inside sbatch or salloc, or submit scripts/slurm/torchrun.sbatch"]
        )
    hosts = subprocess.run(
        ["scontrol", "show", "hostnames", node_list], capture_output=True, text=True, check=True
    ).stdout.split()
    port = options.master_port or 20000 + int(job) % 10000  # jobs that share a node must not meet
    flags = {
        "nnodes": len(hosts),
        "nproc_per_node": options.num_gpus or os.environ.get("SLURM_GPUS_ON_NODE") or default_ranks(),
        "rdzv_backend": "c10d",
        "rdzv_endpoint": f"{options.master_addr or hosts[0]}:{port}",
        "rdzv_id": job,
    }
    nodes = ["--nodes", str(len(hosts)), "--ntasks", str(len(hosts)), "--ntasks-per-node", "1"]
    torchrun = [*_runner(RUNNERS["torchrun"], flags), "--module", module, *map(for_torchrun, script)]
    return ["srun", *nodes, "--kill-on-bad-exit=1", *torchrun]


def _accelerate(options: LaunchOptions, module: str, script: list[str]) -> list[str]:
    flags = {
        "config_file": options.accelerate,
        "machine_rank": given_node_rank(options, os.environ),
        "main_process_ip": options.master_addr,
        "main_process_port": options.master_port,
    }
    # A file, because accelerate's pdsh form takes no module.
    file = Path(__file__).resolve().parents[1] / f"{module.rpartition('.')[2]}.py"
    runner = accelerate_runner(read_accelerate_file(options))
    if runner == "pdsh" and len(nodes_through_ssh(options)) > 1:
        paths = {"the working folder": os.getcwd(), "Python's path": sys.executable, "dsft's folder": str(file.parent)}
        raise_if_any(
            [
                f"{place} {path!r}: accelerate starts DeepSpeed's own runner, which hands paths to each node's shell"
                " unquoted; give the hosts to dsft launch --hostfile, which quotes them, or move it to a path of"
                " letters, digits and _ + = : , . / - alone"
                for place, path in paths.items()
                if read_by_shell(path)
            ]
        )
        script = [for_pdsh(word) for word in script]
    elif runner == "torchrun":
        script = [for_torchrun(word) for word in script]
    return [*_runner(RUNNERS["accelerate launch"], flags), str(file), *script]


def given_node_rank(options: LaunchOptions, environment: Mapping[str, str]) -> int | None:
    """This node's number, as the user or the cluster says: Kubernetes' training operator sets RANK (of the pod) and
    PET_NODE_RANK.
    """
    if options.node_rank is not None:
        return options.node_rank
    names = ("NODE_RANK", "PET_NODE_RANK") + (("RANK",) if "LOCAL_RANK" not in environment else ())
    return next((int(environment[name]) for name in names if environment.get(name, "").isdigit()), None)


@dataclass(frozen=True)
class Launcher:
    """A way to start the ranks."""

    command: Callable[[LaunchOptions, str, list[str]], list[str]]
    """Writes its command line for a module and the words of that."""
    processes: tuple[str, ...]
    """What the command lines of its processes contain."""


LAUNCHERS = {
    "local": Launcher(_deepspeed, processes.LAUNCHERS["deepspeed"]),
    "hostfile": Launcher(_deepspeed, processes.LAUNCHERS["deepspeed"]),
    "nodes": Launcher(_torchrun, processes.LAUNCHERS["torchrun"]),
    "slurm": Launcher(_srun, processes.LAUNCHERS["srun"] + processes.LAUNCHERS["torchrun"]),
    "accelerate": Launcher(_accelerate, processes.LAUNCHERS["accelerate"] + processes.LAUNCHERS["deepspeed"]),
}
"""The option that chooses it, or "local" without one -> the launcher."""
