"""The hosts of a launch, and the launchers below `dsft launch`: one value for each, which answers whatever differs
between them. A new launcher is a class here with its entry in LAUNCHERS, and the option in `LaunchOptions` that chooses
it.

    python -m dsft.launch.launchers --hostfile hosts --module dsft.train ...     as `deepspeed`, see `quoting`
"""

import dataclasses
import os
import re
import secrets
import shlex
import shutil
import socket
import sys
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from dsft.config.reader import read_file_and_flags, read_flags, read_options
from dsft.errors import UserError, one_line, raise_if_any, shown_command
from dsft.runtime.hardware import default_ranks, has_gpu
from dsft.runtime.launcher_env import (
    DEFAULT_PORT,
    SINGLE_PROCESS_ENV,
    Node,
    first_host,
    free_port,
    port_of_job,
    read_hosts,
)
from dsft.units import plural
from dsft.watchdog import processes

MODULES = {"train": "dsft.train", "eval": "dsft.eval_ppl"}
RUNNERS = {
    "deepspeed": "deepspeed.launcher.runner",
    "torchrun": "torch.distributed.run",
    "accelerate launch": "accelerate.commands.launch",
}
"""A launcher as a user types it, and its module: that of this environment is started, whatever PATH says."""
QUOTED_RUNNER = "dsft.launch.launchers"  # in place of `deepspeed`, where `PLAIN_PATH` does not match
IDENTIFYING = ("output_dir", "run", "model", "data", "adapter")  # tell jobs of one working folder and file apart
EVERY_NODE = " (on each node that is left, numbered from 0)"
PLAIN_PATH = re.compile(r"[\w@+=:,./-]+")  # a path that a shell leaves as it is without quotes


@dataclass(kw_only=True)
class HostFields:
    """Hosts: those of a host file; without one this machine."""

    hostfile: str | None = None
    """DeepSpeed's host file: one line per node, `name slots=N`; reached through ssh from here."""
    include: str | None = None
    """Hosts and GPUs of the host file to use, as DeepSpeed writes it: node-0@node-1:0,2"""
    exclude: str | None = None
    """Hosts and GPUs of the host file to leave out, in the same form."""
    num_nodes: int | None = None
    """Number of hosts of the host file to use, the first ones."""
    num_gpus: int | None = None
    """Ranks on each node; by default its GPUs, without GPUs 2."""
    master_addr: str | None = None
    """Address of the first node, to which all ranks connect; by default that of the first host. Where the command is
    given on every node MASTER_ADDR goes before it."""
    master_port: int | None = None
    """By default a free port, under SLURM one derived from the job. Where the command is given on every node
    MASTER_PORT, else one derived from the working folder, --config and what the run reads and writes."""


def hosts_of(options: HostFields) -> list[Node]:
    """The nodes that take part, the first (rank 0's) first. Raises as `read_hosts`."""
    return read_hosts(
        options.hostfile,
        include=options.include or "",
        exclude=options.exclude or "",
        num_nodes=-1 if options.num_nodes is None else options.num_nodes,
        num_gpus=-1 if options.num_gpus is None else options.num_gpus,
    )


def included(nodes: Sequence[Node]) -> str:
    """The --include that names these nodes and GPUs of a host file."""
    return "@".join(f"{node.name}:{','.join(map(str, node.devices))}" for node in nodes)


@dataclass(kw_only=True)
class LaunchOptions(HostFields):
    """Launch: how the ranks are started; without hostfile, nodes, slurm or accelerate on all GPUs of this machine."""

    no_ssh: bool = False
    """With a host file: the same command is given on every node, and nothing goes through ssh."""
    nodes: int | None = None
    """Number of nodes, without a host file: the same command is given on every node, `torchrun` starts the ranks
    (Kubernetes)."""
    node_rank: int | None = None
    """Number of this node, from 0; by default from NODE_RANK or RANK, else by its place in the host file, else as
    torchrun decides."""
    slurm: bool = False
    """Inside sbatch or salloc: one srun task on each node of the allocation, `torchrun` in each."""
    accelerate: str | None = None
    """A config file of `accelerate launch`."""
    bind_cores_to_rank: bool = False
    """DeepSpeed's launcher ties each rank to cores of its own and the memory beside them, for offload (numactl)."""
    dry_run: bool = False
    """Print the command and stop."""
    no_preflight: bool = False
    """Start without examining the nodes first (see `dsft doctor`)."""
    max_restarts: int = 0
    """Number of times that a job is restarted after a fault, a training from its last checkpoint; not after exit codes
    2, 3, 4 and 75, nor after Ctrl-C."""
    wait_for_nodes: float = 900
    """With a host file: seconds that a restart waits until the preflight finds no error any more."""

    @property
    def ways(self) -> list[str]:
        """The given options that choose a launcher, of which one may be given."""
        return [name for name in LAUNCHERS if name != "local" and getattr(self, name)]

    @property
    def launcher(self) -> "Launcher":
        return LAUNCHERS[next(iter(self.ways), "local")](self)


@dataclass
class Launcher:
    """A way to start the ranks, for the options of one launch. What a subclass does not answer itself holds for one
    that is called on every node.
    """

    options: LaunchOptions

    ranks = None  # their number on this machine, where it is known before they start
    processes = ()  # programs and modules of its processes above a rank, as `processes.LAUNCHERS` has them
    is_local = False  # all ranks run on this machine: it has the run's files, and its launcher sees each rank exit
    exports_everything = False  # it writes all variables of this shell, secrets too, to the file that DS_ENV_FILE names
    is_examined_by_ranks = True
    """Where it reaches no hosts through ssh, it starts the preflight, one rank a node; else `dsft doctor` examines this
    machine."""
    has_port_beside = True  # the port after its own is nobody's: the preflight takes it, and leaves the launch's free

    @property
    def is_given_on_every_node(self) -> bool:
        """Several launches, one a node, are one job."""
        return self.ssh_hosts() is None

    def command(self, module: str, script: list[str]) -> list[str]:
        """The command line that starts `module` with these words on all ranks. Raises UserError: the nodes cannot be
        found out, or a program is missing.
        """
        raise NotImplementedError

    @property
    def variables(self) -> dict[str, str]:
        """Of its process's environment, beside those that every launch sets."""
        return {}

    def ssh_hosts(self) -> HostFields | None:
        """What names the hosts that it reaches from this machine through ssh; None where there are none. Raises
        UserError: a file that names them cannot be read.
        """
        return None

    def ssh_nodes(self) -> list[Node]:
        """These hosts, the first (rank 0's) first. Raises as `ssh_hosts` and `read_hosts`."""
        return hosts_of(hosts) if (hosts := self.ssh_hosts()) else []

    def peers(self) -> list[str]:
        """Hosts that are not reached through ssh, from which ranks connect to this process."""
        return []

    def without(self, lost: Sequence[str], words: list[str]) -> str:
        """The command that continues without the nodes `lost`, with `words` from train or eval on; empty where no node
        is left, or none can be named.
        """
        return ""

    def job_id(self, script: list[str]) -> str:
        """An id that another job does not have. The same on all nodes where the command is given on each of them: from
        the working folder, and from what the job reads and writes.
        """
        if not self.is_given_on_every_node:
            return secrets.token_hex(4)
        values = read_file_and_flags(script, []) or read_flags(script, [])  # problems are reported by the ranks
        # Not the whole file: nodes whose copies differ otherwise should meet, and report in what.
        named = {key: str(values.get(key)) for key in ("config", *IDENTIFYING)}
        job = (os.getcwd(), self.options.nodes, self.options.hostfile, named)
        return f"{zlib.crc32(repr(job).encode()):08x}"

    def port(self, script: list[str]) -> int:
        """Where nodes meet that cannot ask each other for a free port: the user's, else one derived from the job."""
        given = self.options.master_port or os.environ.get("MASTER_PORT")
        return int(given or port_of_job(int(self.job_id(script), 16)))

    def node_rank(self, number: int, named: str) -> int | None:
        """This node's number, as the user or the cluster sets it; None where neither does. Raises UserError where so
        many nodes (`number`), which `named` shows, have no node of this number.
        """
        # Kubernetes' training operator sets RANK (of the pod) and PET_NODE_RANK.
        names = ("NODE_RANK", "PET_NODE_RANK") + (("RANK",) if "LOCAL_RANK" not in os.environ else ())
        by_cluster = (int(os.environ[name]) for name in names if os.environ.get(name, "").isdigit())
        rank = next(by_cluster, None) if self.options.node_rank is None else self.options.node_rank
        if rank is not None and rank >= number:
            raise UserError(f"node rank {rank}: nodes are numbered from 0 to {number - 1} ({named})")
        return rank


class DeepSpeed(Launcher):
    """`deepspeed`, on this machine or on the hosts of a file."""

    processes = processes.LAUNCHERS["deepspeed"]

    def start(self, module: str, script: list[str], runner: str = RUNNERS["deepspeed"], **flags: Any) -> list[str]:
        keys = ("hostfile", "include", "exclude", "num_nodes", "num_gpus")
        # As critical, DeepSpeed does not repeat the command of each rank that failed; the ranks report their errors.
        given = {key: getattr(self.options, key) for key in keys} | flags | {"log_level": "critical"}
        given["bind_cores_to_rank"] = self.options.bind_cores_to_rank or None
        return started(runner, given, "--module", module, *script)


class Local(DeepSpeed):
    """On this machine: one rank is a process of `dsft launch` itself, several are DeepSpeed's launcher's."""

    is_local = True
    is_given_on_every_node = False
    has_port_beside = False  # each launch takes a free one

    @property
    def is_examined_by_ranks(self) -> bool:
        return self.ranks is None  # DeepSpeed alone knows which GPUs a filter leaves

    @cached_property
    def visible(self) -> list[str] | None:
        """The GPUs that CUDA_VISIBLE_DEVICES names; None where it is not set, or there are none."""
        named = os.environ.get("CUDA_VISIBLE_DEVICES") if has_gpu() else None
        return [word.strip() for word in named.split(",")] if named else None

    @cached_property
    def ranks(self) -> int | None:
        """Their number: the user's, or one for each GPU; None where --include or --exclude names them."""
        options = self.options
        if options.include or options.exclude:
            return None
        return options.num_gpus or (len(self.visible) if self.visible else default_ranks())

    @property
    def processes(self) -> tuple[str, ...]:
        return () if self.ranks == 1 else super().processes

    @property
    def variables(self) -> dict[str, str]:
        return SINGLE_PROCESS_ENV | {"LOCAL_SIZE": "1"} if self.ranks == 1 else {}

    def command(self, module: str, script: list[str]) -> list[str]:
        """The ranks on the GPUs of CUDA_VISIBLE_DEVICES where that is set, else on the first ones."""
        options, visible = self.options, self.visible
        if self.ranks == 1:  # DeepSpeed's launcher would take as much CPU time as the rank's own start
            return [sys.executable, "-u", "-m", module, *script]
        flags: dict[str, Any] = {}  # DeepSpeed takes no --num_nodes, not even 1, beside the GPUs of that variable
        if self.ranks and not visible:
            if has_gpu() and self.ranks > default_ranks():
                raise UserError(f"--num_gpus {self.ranks}: this machine has {plural(default_ranks(), 'GPU')}; lower it")
            flags = {"num_gpus": self.ranks}
        elif self.ranks:
            given, chosen = ",".join(visible), visible[: self.ranks]
            if not all(gpu.isdigit() for gpu in visible):
                raise UserError(
                    f"CUDA_VISIBLE_DEVICES={given}: DeepSpeed's launcher knows GPUs by number alone; give numbers"
                    " (nvidia-smi -L), or start with torchrun: --nodes 1 --master_addr 127.0.0.1"
                )
            if self.ranks > len(visible):
                named = f"CUDA_VISIBLE_DEVICES={given} names {len(visible)}"
                raise UserError(f"--num_gpus {self.ranks}: {named}; lower it, or add more")
            # DeepSpeed turns all of that variable into --include by itself, but takes the first GPUs of the machine
            # beside --num_gpus (`main` in deepspeed/launcher/runner.py).
            flags = {"num_gpus": None, "include": None if chosen == visible else f"localhost:{','.join(chosen)}"}
        # DeepSpeed's default port fails when two jobs share a machine.
        port = options.master_port or free_port()
        return self.start(module, script, **flags, num_nodes=None, master_addr=options.master_addr, master_port=port)


class HostFile(DeepSpeed):
    def ssh_hosts(self) -> HostFields | None:
        return None if self.options.no_ssh else self.options

    def command(self, module: str, script: list[str]) -> list[str]:
        options, address = self.options, self.options.master_addr
        if not options.no_ssh:
            if not shutil.which("pdsh"):
                raise UserError(
                    "--hostfile: DeepSpeed starts other nodes through pdsh, which is not here; apt-get install pdsh, or"
                    " give the command on every node with --no_ssh"
                )
            is_plain = PLAIN_PATH.fullmatch(os.getcwd()) and PLAIN_PATH.fullmatch(sys.executable)
            runner = RUNNERS["deepspeed"] if is_plain else QUOTED_RUNNER
            place = {
                "force_multi": len(self.ssh_nodes()) == 1,  # else DeepSpeed starts the ranks of one node here
                "master_addr": address,
                "master_port": options.master_port or free_port(),
            }
            return self.start(module, [for_pdsh(word) for word in script], runner, **place)
        hosts, name = [node.name for node in hosts_of(options)], socket.gethostname()
        rank = self.node_rank(len(hosts), f"--hostfile {options.hostfile}: {', '.join(hosts)}")
        if rank is None:
            names = {name, socket.getfqdn(), name.split(".")[0]}
            rank = next((place for place, host in enumerate(hosts) if host in names), None)
        if rank is None:
            raise UserError(
                f"--no_ssh: {name} is not in {options.hostfile} ({', '.join(hosts)}); name this node's number with"
                " --node_rank or NODE_RANK"
            )
        place = {"node_rank": rank, "master_addr": address or os.environ.get("MASTER_ADDR", hosts[0])}
        return self.start(module, script, no_ssh=True, **place, master_port=self.port(script))

    def without(self, lost: Sequence[str], words: list[str]) -> str:
        return fewer_hosts(self.options, lost, words, no_ssh=self.options.no_ssh)


class Torchrun(Launcher):
    """`torchrun` on every node, as Kubernetes starts them."""

    processes = processes.LAUNCHERS["torchrun"]

    def start(self, module: str, script: list[str], **flags: Any) -> list[str]:
        return started(RUNNERS["torchrun"], flags, "--module", module, *for_torchrun(script))

    def command(self, module: str, script: list[str]) -> list[str]:
        options = self.options
        address = options.master_addr or os.environ.get("MASTER_ADDR")
        if not address:
            raise UserError(
                f"--nodes {options.nodes}: the first node's address is not known; set --master_addr or MASTER_ADDR, the"
                " same on every node"
            )
        rank = self.node_rank(options.nodes, f"--nodes {options.nodes}")
        place = {"node_rank": rank, "master_addr": address, "master_port": self.port(script)}
        if rank is None:
            place = {"rdzv_backend": "c10d", "rdzv_endpoint": f"{address}:{self.port(script)}"}
        # The id, because agents of two jobs at one address and port do not meet.
        ranks, job = options.num_gpus or default_ranks(), self.job_id(script)
        return self.start(module, script, nnodes=options.nodes, nproc_per_node=ranks, rdzv_id=job, **place)

    def without(self, lost: Sequence[str], words: list[str]) -> str:
        options = self.options
        return fewer_nodes(options.nodes, lost, options.num_gpus, options.master_addr, words)


class Slurm(Torchrun):
    """One srun task on each node of the job, with torchrun in each."""

    processes = processes.LAUNCHERS["srun"] + processes.LAUNCHERS["torchrun"]
    is_given_on_every_node = False
    has_port_beside = False  # it is the next job's

    def command(self, module: str, script: list[str]) -> list[str]:
        options = self.options
        job, nodes = (os.environ.get(name) for name in ("SLURM_JOB_ID", "SLURM_JOB_NUM_NODES"))
        if not (job and nodes and os.environ.get("SLURM_JOB_NODELIST")):
            raise UserError(
                "--slurm: this is no SLURM job; call it inside sbatch or salloc, or submit"
                " scripts/slurm/torchrun.sbatch"
            )
        port = options.master_port or port_of_job(int(job))  # jobs that share a node must not meet
        torchrun = self.start(
            module,
            script,
            nnodes=nodes,
            nproc_per_node=options.num_gpus or os.environ.get("SLURM_GPUS_ON_NODE") or default_ranks(),
            rdzv_backend="c10d",
            rdzv_endpoint=f"{options.master_addr or self.peers()[0]}:{port}",
            rdzv_id=job,
        )
        place = ["--nodes", nodes, "--ntasks", nodes, "--ntasks-per-node", "1", "--kill-on-bad-exit=1"]
        return ["srun", *place, *torchrun]

    def peers(self) -> list[str]:
        return [first_host(os.environ["SLURM_JOB_NODELIST"])]

    def without(self, lost: Sequence[str], words: list[str]) -> str:
        left = int(os.environ.get("SLURM_JOB_NUM_NODES", "0")) - len(lost)
        if not lost or left <= 0:
            return ""
        flags = flag_words({"slurm": True, "num_gpus": self.options.num_gpus})
        command = shown_command(["dsft", "launch", *flags, *words])
        return f"sbatch or salloc with --exclude {','.join(lost)} --nodes {left}, and there {command}"


class Accelerate(Launcher):
    """`accelerate launch` with a file of the user's."""

    processes = processes.LAUNCHERS["accelerate"] + processes.LAUNCHERS["deepspeed"]
    exports_everything = True
    is_examined_by_ranks = False  # where its file is given on each machine, each examines itself

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Of the user's file. Raises UserError: it cannot be read, or has none."""
        path = self.options.accelerate
        try:
            content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise UserError(f"--accelerate {path}: cannot be read: {one_line(error)}") from error
        if not isinstance(content, dict):
            raise UserError(f"--accelerate {path}: expected `key: value` lines")
        engine, nodes = content.get("deepspeed_config") or {}, content.get("num_machines") or 1
        port = content.get("main_process_port")
        port = DEFAULT_PORT if port is None else port  # 0: accelerate takes a free one
        return content | {"deepspeed_config": engine, "num_machines": nodes, "main_process_port": port}

    @property
    def ranks(self) -> int | None:
        """On each machine."""
        return int(self.settings.get("num_processes") or 0) // self.settings["num_machines"] or None

    @property
    def runner(self) -> str:
        """What accelerate hands the words of a run to: "torchrun", DeepSpeed's launcher of several nodes ("pdsh",
        "nossh" ...), or "" where it starts the one process itself (`launch_command` in accelerate/commands/launch.py).
        """
        if self.settings["num_machines"] > 1:
            launcher = self.settings["deepspeed_config"].get("deepspeed_multinode_launcher") or "pdsh"
            return "torchrun" if launcher == "standard" else launcher
        is_alone = self.settings.get("use_cpu") or self.settings.get("distributed_type", "NO") in ("NO", "MULTI_CPU")
        return "" if is_alone else "torchrun"

    def ssh_hosts(self) -> HostFields | None:
        """Those that accelerate reaches through pdsh and ssh; None where each machine starts its own ranks
        (`prepare_deepspeed_cmd_env` in accelerate/utils/launch.py).
        """
        settings, given = self.settings, self.options
        engine, nodes = settings["deepspeed_config"], settings["num_machines"]
        if nodes == 1 or self.runner in ("torchrun", "nossh"):
            return None
        if not engine.get("deepspeed_hostfile"):
            remedy = "add it, or deepspeed_multinode_launcher: standard, and give the command on every machine"
            names = f"names no deepspeed_hostfile for {nodes} machines"
            raise UserError(f"--accelerate {given.accelerate}: {names}; {remedy}")
        include, exclude = (engine.get(f"deepspeed_{kind}_filter") for kind in ("inclusion", "exclusion"))
        return HostFields(
            hostfile=engine["deepspeed_hostfile"],
            include=include,
            exclude=exclude,
            num_gpus=None if include or exclude else self.ranks,
            master_addr=given.master_addr or settings.get("main_process_ip"),
            master_port=given.master_port or settings["main_process_port"] or None,
        )

    def command(self, module: str, script: list[str]) -> list[str]:
        machines = self.settings["num_machines"]
        flags = {
            "config_file": self.options.accelerate,
            "machine_rank": self.node_rank(machines, f"--accelerate {self.options.accelerate}")
            if machines > 1
            else None,
            "main_process_ip": self.options.master_addr,
            "main_process_port": self.options.master_port,
        }
        # A file, because accelerate's pdsh form takes no module.
        file = Path(__file__).resolve().parents[1] / f"{module.rpartition('.')[2]}.py"
        if self.runner == "pdsh" and len(self.ssh_nodes()) > 1:
            why = (
                "accelerate starts DeepSpeed's own runner, which hands paths to each node's shell unquoted; give the"
                " hosts to dsft launch --hostfile, which quotes them, or move it to a path of letters, digits and"
                " _ + = : , . / - alone"
            )
            places = {"the working folder": os.getcwd(), "Python's path": sys.executable}
            places |= {"dsft's folder": str(file.parent)}
            unsafe = {place: path for place, path in places.items() if not PLAIN_PATH.fullmatch(path)}
            raise_if_any([f"{place} {path!r}: {why}" for place, path in unsafe.items()])
            script = [for_pdsh(word) for word in script]
        elif self.runner == "torchrun":
            script = for_torchrun(script)
        return started(RUNNERS["accelerate launch"], flags, str(file), *script)

    def without(self, lost: Sequence[str], words: list[str]) -> str:
        """Not through accelerate, whose file names the nodes: the same run by the host file or by torchrun."""
        if "zero" not in (read_file_and_flags(words[1:], []) or {}):
            if not (engine_file := self.settings["deepspeed_config"].get("deepspeed_config_file")):
                return ""
            words = [*words, "--zero", engine_file]
        if hosts := self.ssh_hosts():
            return fewer_hosts(hosts, lost, words)
        address = self.options.master_addr or self.settings.get("main_process_ip")
        return fewer_nodes(self.settings["num_machines"], lost, self.ranks, address, words)


LAUNCHERS: dict[str, type[Launcher]] = {
    "local": Local,
    "hostfile": HostFile,
    "nodes": Torchrun,
    "slurm": Slurm,
    "accelerate": Accelerate,
}
"""The option that chooses it, or "local" without one -> the launcher."""


def build_command(options: LaunchOptions, name: str, script: list[str]) -> list[str]:
    """The words of the command that starts `name` ("train", "eval" or a module) on all ranks; raises as
    `Launcher.command`.
    """
    return options.launcher.command(MODULES.get(name, name), script)


def read_launch(argv: list[str]) -> tuple[LaunchOptions, str, list[str]]:
    """(options, "train" or "eval", words of the script) from `[options] train|eval [words]`; options may also stand
    among the words. The first words of an evaluation are its models. Raises UserError: an unexpected word before train
    or eval, an invalid value, or two launchers at once.
    """
    problems: list[str] = []
    values, words = read_options(LaunchOptions, argv, problems)
    launcher = (options := LaunchOptions(**values)).launcher
    if not words or words[0] not in MODULES:
        known = ", ".join(f"--{field.name}" for field in dataclasses.fields(LaunchOptions))
        got = repr(words[0]) if words else "nothing"
        problems.append(f"dsft launch: expected train or eval, got {got}; the options before them are {known}")
    if len(options.ways) > 1:
        problems.append(f"--{' and --'.join(options.ways)}: choose one way to start the nodes")
    for name in ("include", "exclude", "num_nodes"):
        value, here = getattr(options, name), "1" if name == "num_nodes" else "localhost(:[0-9,]+)?"
        if value and not isinstance(launcher, DeepSpeed):
            problems.append(f"--{name} chooses from a host file; --{options.ways[0]} takes its nodes from elsewhere")
        elif value and isinstance(launcher, Local) and not re.fullmatch(here, str(value)):
            problems.append(f"--{name} {value}: it chooses from a host file; name one with --hostfile")
    if options.accelerate and options.num_gpus:
        problems.append(f"--num_gpus {options.num_gpus}: --accelerate takes the ranks from its file (num_processes)")
    if isinstance(launcher, Local) and sum(map(bool, (options.num_gpus, options.include, options.exclude))) > 1:
        problems.append("--num_gpus, --include and --exclude cannot be combined; keep one")
    if options.node_rank is not None and not options.accelerate and not launcher.is_given_on_every_node:
        way = ", or give --no_ssh too where each node gets a command of its own" if options.hostfile else ""
        problems.append(f"--node_rank {options.node_rank}: this one command starts all ranks; leave it out{way}")
    if options.bind_cores_to_rank and not isinstance(launcher, DeepSpeed):
        problems.append(f"--bind_cores_to_rank is of DeepSpeed's launcher, and --{options.ways[0]} takes another")
    elif options.bind_cores_to_rank and not shutil.which("numactl"):
        problems.append("--bind_cores_to_rank: numactl is not here; apt-get install numactl, on every node")
    if options.no_ssh and not (options.hostfile or options.nodes):
        problems.append("--no_ssh: name the nodes, with --hostfile, or --nodes N and MASTER_ADDR")
    for name, value in vars(options).items():
        if value == "":  # "$HOSTS" of a variable that is not set: not this machine instead
            problems.append(f"--{name}: needs a value")
        elif name in ("hostfile", "accelerate") and value and not os.path.isfile(value):
            problems.append(f"--{name} {value}: there is no such file")
    raise_if_any(problems)
    name, *script = words
    if name == "eval" and script and not script[0].startswith("--"):
        script = ["--model", *script]
    return options, name, script


def for_pdsh(word: str) -> str:
    """A word that DeepSpeed's pdsh runner and the shell of each node turn into `word`: `PDSHRunner.parse_user_args` in
    deepspeed/launcher/multinode_runner.py puts one with a space, and no other, between double quotes and escapes none
    but those.
    """
    quoted = re.sub(r"([\\$`])", r"\\\1", word) if " " in word else shlex.quote(word)
    return quoted.replace("%", "%%")  # pdsh writes host, rank and user for %h, %n and %u


def for_torchrun(script: list[str]) -> list[str]:
    """Words that torchrun turns into `script`: it fills in ${local_rank}, and makes one dollar of two (`macros` in
    torch/distributed/elastic/utils/api.py).
    """
    return [word.replace("$", "$$") for word in script]


def flag_words(flags: Mapping[str, object]) -> list[str]:
    """The words of a command line; True is a flag without a value, None and False are flags that are not given."""
    given = {flag: value for flag, value in flags.items() if value is not None and value is not False}
    return [word for flag, value in given.items() for word in (f"--{flag}", str(value))[: 1 if value is True else 2]]


def started(module: str, flags: Mapping[str, object], *words: str) -> list[str]:
    """The command that runs a module of this environment with these flags, then `words`."""
    return [sys.executable, "-m", module, *flag_words(flags), *words]


def shown(command: list[str]) -> str:
    """The command as a user would type it: `deepspeed ...` for `/.../python -m deepspeed.launcher.runner ...`."""
    for short, module in RUNNERS.items():
        if module in command:
            at = command.index(module)
            return shown_command([*command[: at - 2], *short.split(), *command[at + 1 :]])
    return shown_command(["python" if word == sys.executable else word for word in command])


def fewer_hosts(hosts: HostFields, lost: Sequence[str], words: list[str], *, no_ssh: bool = False) -> str:
    """The launch on these hosts but those `lost`; empty where no host is lost or left, or a lost one is not among
    them.
    """
    nodes = hosts_of(hosts)
    left = [node for node in nodes if node.name not in lost]
    if not lost or not left or len(left) != len(nodes) - len(lost):
        return ""
    if hosts.include or hosts.num_nodes or hosts.num_gpus:  # DeepSpeed takes no --exclude beside them
        filters = {"include": included(left)}
    else:
        filters = {"exclude": "@".join(filter(None, [hosts.exclude, *lost]))}
    flags = flag_words({"hostfile": hosts.hostfile} | filters | {"no_ssh": no_ssh})
    return shown_command(["dsft", "launch", *flags, *words]) + EVERY_NODE * no_ssh


def fewer_nodes(number: int, lost: Sequence[str], ranks: int | None, address: str | None, words: list[str]) -> str:
    """The launch on `number` nodes but the lost ones, each of which is given the command; empty where none is left."""
    if not 0 < len(lost) < number:
        return ""
    flags = flag_words({"nodes": number - len(lost), "num_gpus": ranks, "master_addr": address})
    return shown_command(["dsft", "launch", *flags, *words]) + EVERY_NODE


def quoting(runner: type) -> type:
    """DeepSpeed's runner for pdsh, which writes `cd FOLDER;` and Python's path as they are (`cd my runs;` stays in the
    home folder), with these quoted. Words of the run are quoted by `for_pdsh`, variables in the file of them.
    """

    class QuotedRunner(runner):
        def get_cmd(self, environment: dict, active_resources: dict) -> tuple[list[str], list[str], dict]:
            command, kill_command, environment = super().get_cmd(environment, active_resources)
            # What pdsh (which fills in %h, %n and %u) and the shell of each node turn into the paths.
            folder, python = (shlex.quote(path).replace("%", "%%") for path in (os.path.abspath("."), sys.executable))
            quoted = {f"cd {os.path.abspath('.')};": f"cd {folder} &&", sys.executable: python}
            missing = [word for word in quoted if word not in command]
            assert not missing, f"this DeepSpeed writes another command than 0.19.8: {missing} not in {command}"
            return [quoted.get(word, word) for word in command], kill_command, environment

    return QuotedRunner


if __name__ == "__main__":
    from deepspeed.launcher.runner import main

    from dsft.runtime import patches

    patches.replace("pdsh_quotes", quoting)
    main()
