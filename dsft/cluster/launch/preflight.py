"""A quick look at the nodes before `dsft launch` starts ranks on them: `dsft doctor --quick` as a command of its own,
by the same way as the launch.
"""

import dataclasses
import shlex
import subprocess
import sys
import time
from pathlib import Path

import yaml

from dsft.cluster.launch.commands import LaunchOptions, build_command, shown
from dsft.cluster.launch.shared import job_port
from dsft.errors import UserError

DOCTOR = "dsft.cli.doctor"
QUICK = ["--quick", "--only_findings"]
WAIT_SECONDS = 10.0
"""Between two looks at nodes that are not there."""


def examine_first(options: LaunchOptions, script: list[str]) -> None:
    """Let the doctor examine the nodes of this launch and print what is wrong; with `--hostfile` through ssh, else by
    ranks that the same launcher starts.

    Raises:
        UserError: where an error was found; nothing has been started then.
    """
    if subprocess.run(_command(options, script), stdin=subprocess.DEVNULL).returncode:
        raise UserError(
            ["the preflight found errors (above; docs/doctor.md explains each); --no_preflight starts all the same"]
        )


def wait_until_examined(options: LaunchOptions, script: list[str]) -> None:
    """Before a restart: let the doctor examine the nodes again and again until it finds no error, and print what it
    finds where that has changed.

    Raises:
        UserError: where that takes longer than `wait_for_nodes`.
    """
    deadline, before = time.monotonic() + options.wait_for_nodes, ""
    while True:
        result = subprocess.run(_command(options, script), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
        if result.returncode == 0:
            return
        if result.stdout != before:
            print(result.stdout, end="", flush=True)
            before = result.stdout
        left = deadline - time.monotonic()
        if left <= 0:
            text = "the nodes are still not ready (above); the last checkpoint is complete, the same command resumes"
            raise UserError([f"--wait_for_nodes {options.wait_for_nodes:g}: {text}"])
        print(f"dsft: the restart waits for the nodes, {left:.0f} s at most", file=sys.stderr, flush=True)
        time.sleep(min(WAIT_SECONDS, left))


def _command(options: LaunchOptions, script: list[str]) -> list[str]:
    hostfile = options.hostfile or _accelerate_hostfile(options)
    keys: tuple[str, ...] = ()
    if hostfile and not options.no_ssh:
        keys = ("include", "exclude", "num_nodes", "num_gpus", "master_addr", "master_port")
    elif options.way in ("local", "accelerate"):  # accelerate's file may be given on each machine: each examines itself
        hostfile, keys = None, ("num_gpus",)
    else:
        return _by_launcher(options, script)
    values = {"hostfile": hostfile} | {key: getattr(options, key) for key in keys}
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
    print("dsft: preflight: " + shlex.join(shown(command)), flush=True)
    return command


def _accelerate_hostfile(options: LaunchOptions) -> str | None:
    """The host file that an accelerate config names for its pdsh launcher."""
    if not options.accelerate:
        return None
    content = yaml.safe_load(Path(options.accelerate).read_text(encoding="utf-8")) or {}
    return (content.get("deepspeed_config") or {}).get("deepspeed_hostfile")
