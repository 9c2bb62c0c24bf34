"""Runs the launcher, stays with it until nothing of the job is left, and returns an exit code that tells the truth.

The launchers' exit codes do not always: DeepSpeed's is 0 when its child is killed by a signal, torchrun's is 1 for
every failure. The job itself says how it ended, over `dsft/watchdog/launcher_link.py`.
"""

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

from dsft.cluster.launch.commands import build_command, hosts_of, shown
from dsft.cluster.launch.environment import SSH_OPTIONS, forwarded, write_env_file
from dsft.cluster.launch.options import MODULES, LaunchOptions, read_launch
from dsft.cluster.launch.preflight import examine_first
from dsft.config.reader import split_flags
from dsft.errors import EXIT_REQUEUE, EXIT_STOPPED, EXIT_UNSAVED, EXIT_USER_ERROR
from dsft.runtime.distributed import free_port
from dsft.runtime.hardware import has_gpu
from dsft.runtime.launcher_env import launcher_variables, outgoing_address
from dsft.watchdog.launcher_link import LauncherLink

END_SECONDS = 10
"""For the launcher to end by itself after a failure or a signal; then it is ended."""
KILL_SECONDS = 5


class LauncherProcess:
    """One start of the job. After `run`, `interrupted` tells which signal ended it (0: none)."""

    def __init__(self, options: LaunchOptions, command: list[str], *, saves: bool):
        """Args: `saves`: the ranks save and end where they are asked to."""
        self.options, self.command, self.saves = options, command, saves
        self.link = LauncherLink()
        self.interrupted = 0
        self._end_at: float | None = None
        self._for_ranks: list[int] = []
        self._is_asked = False

    def run(self) -> int:
        """Returns the exit code. SIGUSR1 and a first SIGTERM ask the ranks to save and end; Ctrl-C, SIGHUP and a second
        SIGTERM end them on all nodes.
        """
        environment, env_file = self._environment()
        process = subprocess.Popen(self.command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True)
        handlers = {
            number: signal.signal(number, lambda received, _: self._signalled(received, process))
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        }
        handlers[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, lambda *_: self._for_ranks.append(signal.SIGUSR1))
        try:
            while process.poll() is None:
                self._listen()
                self._see_to_the_end(process)
            self._listen()
            if self.link.exit_code is None:
                self.link.end_ranks(f"the launcher has ended with exit code {process.returncode}")
        finally:
            end_group(process)
            for number, handler in handlers.items():
                signal.signal(number, handler)
            self.link.close()
            if env_file:
                env_file.unlink(missing_ok=True)
        return self._code(process.returncode)

    def _environment(self) -> tuple[dict[str, str], Path | None]:
        """For the launcher; with a host file also the file of variables that it takes to the other nodes."""
        first = self.options.master_addr or os.environ.get("MASTER_ADDR") or "127.0.0.1"
        if self.options.hostfile:
            first = hosts_of(self.options, self.options.hostfile)[0].name
        added = self.link.variable(outgoing_address(first) or "127.0.0.1") | (
            {} if has_gpu() else {"DS_ACCELERATOR": "cpu"}
        )
        environment = os.environ | added
        if not self.options.hostfile or self.options.no_ssh:
            return environment, None
        env_file = write_env_file(forwarded(os.environ | added))
        ssh = f"{os.environ.get('PDSH_SSH_ARGS_APPEND', '')} {SSH_OPTIONS}".strip()
        return environment | {"DS_ENV_FILE": str(env_file), "PDSH_SSH_ARGS_APPEND": ssh}, env_file

    def _listen(self) -> None:
        self.link.read(wait_seconds=0.2)
        while self._for_ranks and self.link.coordinator:
            self.link.signal_ranks(self._for_ranks.pop())

    def _signalled(self, number: int, process: subprocess.Popen) -> None:
        if number == signal.SIGTERM and self.saves and self.link.coordinator and not self._is_asked:
            self._is_asked = True
            self._for_ranks.append(signal.SIGUSR1)
            os.write(2, b"dsft: SIGTERM: the ranks are asked to save and end; a second one ends them at once\n")
            return
        self.interrupted = number
        self.link.end_ranks(f"dsft launch got {signal.Signals(number).name}")
        signal_group(process, number)
        self._end_at = self._end_at or time.monotonic() + END_SECONDS

    def _see_to_the_end(self, process: subprocess.Popen) -> None:
        if (self.link.failure or self.link.exit_code) and self._end_at is None:
            self._end_at = time.monotonic() + END_SECONDS
        if self._end_at is not None and time.monotonic() > self._end_at:
            end_group(process)

    def _code(self, returncode: int) -> int:
        if self.interrupted:
            return 128 + self.interrupted
        if self.link.exit_code:
            return self.link.exit_code
        if self.link.failure and not 0 < returncode < 128:
            return 1  # also where a launcher that waited for a lost node had to be ended
        return returncode if returncode >= 0 else 128 - returncode


def signal_group(process: subprocess.Popen, number: int) -> None:
    """To the launcher and what it started here."""
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        pass


def end_group(process: subprocess.Popen) -> None:
    """End the launcher and what it left here, such as an ssh to a node that does not answer."""
    if process.poll() is None:
        signal_group(process, signal.SIGTERM)
        try:
            process.wait(KILL_SECONDS)
        except subprocess.TimeoutExpired:
            pass
    signal_group(process, signal.SIGKILL)
    process.wait()


def resumed(script: list[str]) -> list[str]:
    """Returns the words of a training with `--resume_from_checkpoint auto`, once, whatever they said of it."""
    _, others = split_flags(script, {"resume_from_checkpoint": str})
    return [*others, "--resume_from_checkpoint", "auto"]


def launch(argv: list[str]) -> int:
    """Print and run the command for `[options] train|eval [words]`, again after a failure up to `max_restarts` times;
    returns the exit code.

    Raises:
        UserError: where an option is wrong, or the nodes cannot be found out.
    """
    options, name, script = read_launch(argv)
    if options.way == "local" and launcher_variables(os.environ):
        # One of several tasks of srun or mpirun: this process becomes that rank.
        os.execv(sys.executable, [sys.executable, "-m", MODULES[name], *script])
    if options.hostfile and options.master_port is None and not options.no_ssh:
        options.master_port = free_port()  # chosen here, so that the preflight looks at the one that is used
    if not (options.no_preflight or options.dry_run):
        examine_first(options, script)
    for attempt in range(options.max_restarts + 1):
        if attempt and name == "train":  # an evaluation resumes by itself
            script = resumed(script)
        command = build_command(options, name, script)
        print("dsft: " + shlex.join(shown(command)), flush=True)
        if options.dry_run:
            return 0
        process = LauncherProcess(options, command, saves=name == "train")
        code = process.run()
        if (
            code in (0, EXIT_USER_ERROR, EXIT_STOPPED, EXIT_UNSAVED, EXIT_REQUEUE)
            or process.interrupted
            or attempt == options.max_restarts
        ):
            return code
        print(
            f"dsft: exit code {code}: restart {attempt + 1} of {options.max_restarts}, from the last checkpoint",
            file=sys.stderr,
            flush=True,
        )
    raise AssertionError("the loop returns")
