"""A quick look at the nodes before `dsft launch` starts ranks on them: `dsft doctor --quick` as a command of its own,
by the same way as the launch.
"""

import dataclasses
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from dsft.errors import UserError, raise_if_any
from dsft.launch.hosts import HostFields
from dsft.launch.launchers import Launcher, build_command, shown
from dsft.runtime.ssh import SSH, SshProblem, ssh_banner, ssh_problem

DOCTOR = "dsft.cli.doctor"
QUICK = ["--quick", "--only_findings"]
SSH_SECONDS = 15.0
"""For a command that does nothing."""
WAIT_SECONDS = 10.0
"""Between two looks at nodes that are not there."""


def examine_first(launcher: Launcher, script: list[str]) -> None:
    """Let the doctor examine the nodes of this launch and print what is wrong; with `--hostfile` through ssh, else by
    ranks that the same launcher starts.

    Raises:
        UserError: where an error was found; nothing has been started then.
    """
    if subprocess.run(preflight_command(launcher, script), stdin=subprocess.DEVNULL).returncode:
        raise UserError(
            ["the preflight found errors (above; docs/doctor.md explains each); --no_preflight starts all the same"]
        )


def unreachable(names: list[str]) -> list[SshProblem]:
    """Why ssh does not get into these hosts, of those where it does not."""

    def try_host(name: str) -> SshProblem | None:
        try:
            result = subprocess.run(
                [*SSH, name, "true"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=SSH_SECONDS
            )
        except subprocess.TimeoutExpired:
            return ssh_problem(name, "ssh timed out", 255, banner=ssh_banner(name))
        if result.returncode == 0:
            return None
        banner = ssh_banner(name) if "timed out" in result.stderr else ""
        return ssh_problem(name, result.stderr.strip(), result.returncode, banner=banner)

    with ThreadPoolExecutor(max_workers=max(1, len(names))) as pool:
        return [problem for problem in pool.map(try_host, names) if problem]


def check_first_host(launcher: Launcher) -> None:
    """Without a preflight: DeepSpeed asks the first host for its address, and shows a traceback where it gets none.

    Raises:
        UserError: ssh does not get in there.
    """
    lost = unreachable([node.name for node in launcher.ssh_nodes()[:1]])
    raise_if_any([f"{problem.node}: {problem.message}; {problem.fix}" for problem in lost])


def without_lost(launcher: Launcher, name: str, script: list[str], lost: Sequence[str] = ()) -> str:
    """The command that continues where nodes do not come back; empty where none is lost, none is left, or no command
    can be named.

    Args:
        lost: host names, as the watchdog lost them; of hosts that are reached through ssh, that is asked instead.
    """
    if nodes := launcher.ssh_nodes():
        lost = [problem.node for problem in unreachable([node.name for node in nodes])]
    command = launcher.without(lost, [name, *script])
    return command and f"without {', '.join(lost)}: {command}"


def wait_until_examined(launcher: Launcher, name: str, script: list[str]) -> None:
    """Before a restart: let the doctor examine the nodes again and again until it finds no error, and print what it
    finds where that has changed.

    Raises:
        UserError: where that takes longer than `wait_for_nodes`.
    """
    deadline, before = time.monotonic() + launcher.options.wait_for_nodes, ""
    while True:
        result = subprocess.run(
            preflight_command(launcher, script), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
        )
        if result.returncode == 0:
            return
        if result.stdout != before:
            print(result.stdout, end="", flush=True)
            before = result.stdout
        left = deadline - time.monotonic()
        if left <= 0:
            text = "the nodes are still not ready (above); the last checkpoint is complete, the same command resumes"
            text += "; ".join(["", *filter(None, [without_lost(launcher, name, script)])])
            raise UserError([f"--wait_for_nodes {launcher.options.wait_for_nodes:g}: {text}"])
        print(f"dsft: the restart waits for the nodes, {left:.0f} s at most", file=sys.stderr, flush=True)
        time.sleep(min(WAIT_SECONDS, left))


def preflight_command(launcher: Launcher, script: list[str]) -> list[str]:
    """The command that examines the nodes of a launch."""
    options, hosts = launcher.options, launcher.ssh_hosts()
    if launcher.is_examined_by_ranks:
        # One rank of the doctor on each node, given on every node like the launch itself.
        port = launcher.preflight_port(script)
        by_ranks = dataclasses.replace(options, num_gpus=1, master_port=port)
        command = build_command(by_ranks, DOCTOR, [*QUICK, *script])
        print("dsft: preflight: " + shown(command), flush=True)
        return command
    keys = [field.name for field in dataclasses.fields(HostFields)] if hosts else ["num_gpus"]
    values = {key: getattr(hosts or options, key) for key in keys}
    words = [word for key, value in values.items() if value is not None for word in (f"--{key}", str(value))]
    return [sys.executable, "-m", DOCTOR, *QUICK, *words, *script]
