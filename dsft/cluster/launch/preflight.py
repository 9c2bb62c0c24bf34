"""A quick look at the nodes before `dsft launch` starts ranks on them: `dsft doctor --quick`, by the same way as the
launch.
"""

import dataclasses
import os
import shlex
import subprocess
import sys
from pathlib import Path

import yaml

from dsft.cluster.launch.commands import build_command, hosts_of, shown
from dsft.cluster.launch.options import LaunchOptions
from dsft.errors import UserError
from dsft.runtime.hostfile import DEFAULT_PORT

DOCTOR = "dsft.cluster.doctor"
QUICK = ["--quick", "--only_findings"]


def examine_first(options: LaunchOptions, script: list[str]) -> None:
    """Examine the nodes of this launch and print what is found; with `--hostfile` through ssh, else by ranks that the
    same launcher starts.

    Raises:
        UserError: where an error was found; nothing has been started then.
    """
    hostfile = options.hostfile or _accelerate_hostfile(options)
    if hostfile and not options.no_ssh:
        code = _through_ssh(options, hostfile, script)
    elif options.way in (
        "local",
        "accelerate",
    ):  # accelerate's file may be given on each machine: then each examines itself
        number = ["--num_gpus", str(options.num_gpus)] if options.num_gpus else []
        code = subprocess.run([sys.executable, "-m", DOCTOR, *QUICK, *number, *script]).returncode
    else:
        code = _by_launcher(options, script)
    if code:
        raise UserError(
            ["the preflight found errors (above; docs/doctor.md explains each); --no_preflight starts all the same"]
        )


def _through_ssh(options: LaunchOptions, hostfile: str, script: list[str]) -> int:
    from dsft.cli.doctor_report import show
    from dsft.cluster.doctor.examine import examine

    report = examine(
        hosts_of(options, hostfile),
        argv=script,
        quick=True,
        master_port=options.master_port,
        master_addr=options.master_addr or "",
    )
    show(report, only_findings=True)
    return int(report.has_errors)


def _by_launcher(options: LaunchOptions, script: list[str]) -> int:
    """One rank of the doctor on each node, given on every node like the launch itself; on the port beside it, which the
    launch must find free.
    """
    port = (
        None
        if options.way == "slurm"
        else (options.master_port or int(os.environ.get("MASTER_PORT", DEFAULT_PORT))) + 1
    )
    command = build_command(dataclasses.replace(options, num_gpus=1, master_port=port), DOCTOR, [*QUICK, *script])
    print("dsft: preflight: " + shlex.join(shown(command)), flush=True)
    return subprocess.run(command, stdin=subprocess.DEVNULL).returncode


def _accelerate_hostfile(options: LaunchOptions) -> str | None:
    """The host file that an accelerate config names for its pdsh launcher."""
    if not options.accelerate:
        return None
    content = yaml.safe_load(Path(options.accelerate).read_text(encoding="utf-8")) or {}
    return (content.get("deepspeed_config") or {}).get("deepspeed_hostfile")
