"""A quick look at the nodes before `dsft launch` starts ranks on them: `dsft doctor --quick` as a command of its own,
by the same way as the launch.
"""

import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from dsft.config.reader import read_file_and_flags
from dsft.doctor.findings import Finding
from dsft.doctor.ssh import SSH, ssh_banner, ssh_error
from dsft.errors import UserError, raise_if_any, shown_command
from dsft.launch.commands import LaunchOptions, build_command, shown
from dsft.launch.hosts import (
    HostFields,
    hosts_of,
    hosts_through_ssh,
    nodes_through_ssh,
    read_accelerate_file,
)
from dsft.launch.shared import is_given_on_every_node, job_port

DOCTOR = "dsft.cli.doctor"
QUICK = ["--quick", "--only_findings"]
SSH_SECONDS = 15.0
"""For a command that does nothing."""
WAIT_SECONDS = 10.0
"""Between two looks at nodes that are not there."""


def examine_first(options: LaunchOptions, script: list[str]) -> None:
    """Let the doctor examine the nodes of this launch and print what is wrong; with `--hostfile` through ssh, else by
    ranks that the same launcher starts.

    Raises:
        UserError: where an error was found; nothing has been started then.
    """
    if subprocess.run(preflight_command(options, script), stdin=subprocess.DEVNULL).returncode:
        raise UserError(
            ["the preflight found errors (above; docs/doctor.md explains each); --no_preflight starts all the same"]
        )


def unreachable(names: list[str]) -> list[Finding]:
    """Why ssh does not get into these hosts, of those where it does not."""

    def try_host(name: str) -> Finding | None:
        try:
            result = subprocess.run(
                [*SSH, name, "true"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=SSH_SECONDS
            )
        except subprocess.TimeoutExpired:
            return ssh_error(name, "ssh timed out", 255, banner=ssh_banner(name))
        if result.returncode == 0:
            return None
        banner = ssh_banner(name) if "timed out" in result.stderr else ""
        return ssh_error(name, result.stderr.strip(), result.returncode, banner=banner)

    with ThreadPoolExecutor(max_workers=max(1, len(names))) as pool:
        return [entry for entry in pool.map(try_host, names) if entry]


def check_first_host(options: LaunchOptions) -> None:
    """Without a preflight: DeepSpeed asks the first host for its address, and shows a traceback where it gets none.

    Raises:
        UserError: ssh does not get in there.
    """
    lost = unreachable([node.name for node in nodes_through_ssh(options)[:1]])
    raise_if_any([f"{entry.where}: {entry.message}; {entry.fix}" for entry in lost])


def without_lost(options: LaunchOptions, name: str, script: list[str], lost: Sequence[str] = ()) -> str:
    """What goes on where nodes do not come back; empty where none is lost, none is left, or no command can be named.

    Args:
        lost: host names, as the watchdog lost them; a launch through ssh asks that.
    """
    content = read_accelerate_file(options) if options.accelerate else {}
    if options.accelerate and "zero" not in read_file_and_flags(script, []):
        engine_file = (content.get("deepspeed_config") or {}).get("deepspeed_config_file")
        if not engine_file:
            return ""
        script = [*script, "--zero", engine_file]
    before, after, launch = "", "", ["dsft", "launch"]
    if is_given_on_every_node(options):
        after = " (on each node that is left, numbered from 0)"
    if hosts := hosts_through_ssh(options) or (options if options.hostfile else None):
        nodes = hosts_of(hosts, hosts.hostfile)
        if not options.no_ssh:
            lost = [entry.where for entry in unreachable([node.name for node in nodes])]
        left = [node for node in nodes if node.name not in lost]
        number, is_known = len(nodes), len(left) == len(nodes) - len(lost)
        launch += ["--hostfile", hosts.hostfile]
        if hosts.include or hosts.num_nodes or hosts.num_gpus:  # DeepSpeed takes no --exclude beside them
            slots = {node.name: node.devices or range(node.slots or 1) for node in left}
            launch += ["--include", "@".join(f"{host}:{','.join(map(str, of))}" for host, of in slots.items())]
        else:
            launch += ["--exclude", "@".join(filter(None, [hosts.exclude, *lost]))]
        launch += ["--no_ssh"] * options.no_ssh
    elif options.slurm:
        number, is_known = int(os.environ.get("SLURM_JOB_NUM_NODES", "0")), True
        before = f"sbatch or salloc with --exclude {','.join(lost)} --nodes {number - len(lost)}, and there "
        launch += ["--slurm"] + (["--num_gpus", str(options.num_gpus)] if options.num_gpus else [])
    else:
        number, is_known = int(options.nodes or content.get("num_machines") or 1), True
        ranks = int(content.get("num_processes") or 0) // number or options.num_gpus
        address = options.master_addr or content.get("main_process_ip")
        flags = {"--nodes": number - len(lost), "--num_gpus": ranks, "--master_addr": address}
        launch += [str(word) for flag, value in flags.items() if value for word in (flag, value)]
    if not (lost and is_known and len(lost) < number):
        return ""
    return f"without {', '.join(lost)}: {before}{shown_command([*launch, name, *script])}{after}"


def wait_until_examined(options: LaunchOptions, name: str, script: list[str]) -> None:
    """Before a restart: let the doctor examine the nodes again and again until it finds no error, and print what it
    finds where that has changed.

    Raises:
        UserError: where that takes longer than `wait_for_nodes`.
    """
    deadline, before = time.monotonic() + options.wait_for_nodes, ""
    while True:
        result = subprocess.run(
            preflight_command(options, script), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
        )
        if result.returncode == 0:
            return
        if result.stdout != before:
            print(result.stdout, end="", flush=True)
            before = result.stdout
        left = deadline - time.monotonic()
        if left <= 0:
            text = "the nodes are still not ready (above); the last checkpoint is complete, the same command resumes"
            text += "; ".join(["", *filter(None, [without_lost(options, name, script)])])
            raise UserError([f"--wait_for_nodes {options.wait_for_nodes:g}: {text}"])
        print(f"dsft: the restart waits for the nodes, {left:.0f} s at most", file=sys.stderr, flush=True)
        time.sleep(min(WAIT_SECONDS, left))


def preflight_command(options: LaunchOptions, script: list[str]) -> list[str]:
    """The command that examines the nodes of a launch."""
    hosts = hosts_through_ssh(options)
    if hosts is None and options.way not in ("local", "accelerate"):
        return _by_launcher(options, script)
    # Where accelerate's file is given on each machine, each examines itself.
    keys = [field.name for field in dataclasses.fields(HostFields)] if hosts else ["num_gpus"]
    values = {key: getattr(hosts or options, key) for key in keys}
    words = [word for key, value in values.items() if value is not None for word in (f"--{key}", str(value))]
    return [sys.executable, "-m", DOCTOR, *QUICK, *words, *script]


def _by_launcher(options: LaunchOptions, script: list[str]) -> list[str]:
    """One rank of the doctor on each node, given on every node like the launch itself; on the port beside it, which the
    launch must find free.
    """
    port = None
    if options.way != "slurm":
        port = job_port(options, script) + 1
    command = build_command(dataclasses.replace(options, num_gpus=1, master_port=port), DOCTOR, [*QUICK, *script])
    print("dsft: preflight: " + shown_command(shown(command)), flush=True)
    return command
