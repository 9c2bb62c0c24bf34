"""The hosts of a launch: the options that name them, DeepSpeed's host file, and the file of `accelerate launch`."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from dsft.errors import UserError, one_line
from dsft.runtime.launcher_env import Node, read_hosts


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
    """Address of the first node, to which all ranks connect; by default that of the first host, or MASTER_ADDR."""
    master_port: int | None = None
    """By default MASTER_PORT; else a free port where one command starts all ranks, and one derived from the working
    folder, --config and output_dir where the command is given on every node."""


def hosts_of(options: HostFields) -> list[Node]:
    """The nodes of the host file that take part, the first (rank 0's) first.

    Raises:
        UserError: as `read_hosts`.
    """
    return read_hosts(
        options.hostfile,
        include=options.include or "",
        exclude=options.exclude or "",
        num_nodes=-1 if options.num_nodes is None else options.num_nodes,
        num_gpus=-1 if options.num_gpus is None else options.num_gpus,
    )


def number_problems(options: HostFields) -> list[str]:
    """List the numbers of nodes and ranks below 1: 0 does not mean all."""
    given = {name: getattr(options, name) for name in ("num_nodes", "num_gpus")}
    return [
        f"--{name} {number}: must be 1 or more; leave it out for all"
        for name, number in given.items()
        if number is not None and number < 1
    ]


def read_accelerate_file(path: str) -> dict[str, Any]:
    """The settings of accelerate's file.

    Raises:
        UserError: the file cannot be read, or has none.
    """
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"--accelerate {path}: cannot be read: {one_line(error)}") from error
    if not isinstance(content, dict):
        raise UserError(f"--accelerate {path}: expected `key: value` lines")
    return content


def accelerate_runner(content: Mapping[str, Any]) -> str:
    """What accelerate hands the words of a run to: "torchrun", DeepSpeed's launcher of several nodes ("pdsh", "nossh"
    ...), or "" where it starts the one process itself.

    Source: `launch_command` in accelerate/commands/launch.py and `prepare_deepspeed_cmd_env` in accelerate/utils.
    """
    if (content.get("num_machines") or 1) > 1:
        launcher = (content.get("deepspeed_config") or {}).get("deepspeed_multinode_launcher") or "pdsh"
        return "torchrun" if launcher == "standard" else launcher
    is_alone = content.get("use_cpu") or content.get("distributed_type", "NO") in ("NO", "MULTI_CPU")
    return "" if is_alone else "torchrun"


def accelerate_hosts(path: str, content: Mapping[str, Any]) -> HostFields | None:
    """The hosts that accelerate reaches through pdsh and ssh; None where each machine starts its own ranks.

    Source: `prepare_deepspeed_cmd_env` in accelerate/utils/launch.py.

    Raises:
        UserError: the file names no hosts.
    """
    engine, nodes = content.get("deepspeed_config") or {}, content.get("num_machines") or 1
    if nodes == 1 or accelerate_runner(content) in ("torchrun", "nossh"):
        return None
    if not engine.get("deepspeed_hostfile"):
        remedy = "add it, or deepspeed_multinode_launcher: standard, and give the command on every machine"
        raise UserError(f"--accelerate {path}: names no deepspeed_hostfile for {nodes} machines; {remedy}")
    include, exclude = (engine.get(f"deepspeed_{kind}_filter") for kind in ("inclusion", "exclusion"))
    return HostFields(
        hostfile=engine["deepspeed_hostfile"],
        include=include,
        exclude=exclude,
        num_gpus=None if include or exclude else (content.get("num_processes") or 1) // nodes,
        master_addr=content.get("main_process_ip"),
        master_port=content.get("main_process_port"),
    )
