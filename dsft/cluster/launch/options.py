"""The options of `dsft launch`; all other words belong to the training or evaluation."""

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass

from dsft.config.reader import read_options
from dsft.errors import raise_if_any

MODULES = {"train": "dsft.train", "eval": "dsft.eval_ppl"}
WAYS = ("hostfile", "nodes", "slurm", "accelerate")
"""Options that choose how ranks on other nodes are started; `commands.BUILDERS` has a function for each."""


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
    """Only the first so many hosts of the host file."""
    num_gpus: int | None = None
    """Ranks on each node; by default its GPUs, without GPUs 2."""
    master_addr: str | None = None
    """Address of the first node, to which all ranks connect; by default that of the first host, or MASTER_ADDR."""
    master_port: int | None = None
    """By default MASTER_PORT; else a free port where one command starts all ranks, and one derived from --config and
    --output_dir where the command is given on every node."""


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
        """How the ranks are started: "local", or one of WAYS."""
        return next((name for name in WAYS if getattr(self, name)), "local")


def read_launch(argv: list[str]) -> tuple[LaunchOptions, str, list[str]]:
    """(options, "train" or "eval", words of the script) from `[options] train|eval [words]`; options may also stand
    among the words.

    Raises:
        UserError: for an unknown word before train or eval, a value that is none, or two ways at once.
    """
    problems: list[str] = []
    values, words = read_options(LaunchOptions, argv, problems)
    options = LaunchOptions(**values)
    if not words or words[0] not in MODULES:
        problems.append(
            f"dsft launch: {(words or ['nothing'])[0]!r} stands where train or eval is expected; before them"
            f" stand only {', '.join('--' + field.name for field in dataclasses.fields(LaunchOptions))}"
        )
    _check(options, problems)
    raise_if_any(problems)
    return options, words[0], words[1:]


def _check(options: LaunchOptions, problems: list[str]) -> None:
    ways = [name for name in WAYS if getattr(options, name)]
    if len(ways) > 1:
        problems.append(f"--{' and --'.join(ways)}: one way to start the nodes at a time")
    for name in ("include", "exclude", "num_nodes"):
        if getattr(options, name) is not None and options.way not in ("hostfile", "local"):
            problems.append(f"--{name} chooses from a host file; --{options.way} takes its nodes from elsewhere")
    if options.no_ssh and not (options.hostfile or options.nodes):
        problems.append("--no_ssh: name the nodes, with --hostfile, or --nodes N and MASTER_ADDR")
    for name in ("num_nodes", "num_gpus", "nodes", "node_rank", "master_port", "max_restarts", "wait_for_nodes"):
        if (getattr(options, name) or 0) < 0:
            problems.append(f"{name}={getattr(options, name)}: needs a number of 0 or more")
    for name in ("hostfile", "include", "exclude", "accelerate", "master_addr"):
        if getattr(options, name) == "":  # "$HOSTS" of a variable that is not set: not this machine instead
            problems.append(f"--{name}: needs a value")
    for key in ("hostfile", "accelerate"):
        path = getattr(options, key)
        if path and not os.path.isfile(path):
            problems.append(f"--{key} {path}: there is no such file")


def given_node_rank(options: LaunchOptions, environment: Mapping[str, str]) -> int | None:
    """This node's number, as the user or the cluster says: Kubernetes' training operator sets RANK (of the pod) and
    PET_NODE_RANK.
    """
    if options.node_rank is not None:
        return options.node_rank
    names = ("NODE_RANK", "PET_NODE_RANK") + (("RANK",) if "LOCAL_RANK" not in environment else ())
    return next((int(environment[name]) for name in names if environment.get(name, "").isdigit()), None)
