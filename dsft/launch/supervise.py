"""Runs the launcher, stays with it until nothing of the job is left, and returns an exit code that tells the truth.

The launchers' exit codes do not always: DeepSpeed's is 0 when its child is killed by a signal, torchrun's is 1 for
every failure. The job itself says how it ended, over `dsft/watchdog/launch_link.py`.
"""

import os
import re
import signal
import subprocess
import sys
import threading
import time
import uuid

from dsft.config.options import TrainConfig
from dsft.config.reader import read_config, read_file_and_flags, split_flags
from dsft.errors import (
    EXIT_REQUEUE,
    EXIT_STOPPED,
    EXIT_UNSAVED,
    EXIT_USER_ERROR,
    raise_if_any,
    without_second_errors,
)
from dsft.launch.environment import launcher_environment, shared_environment
from dsft.launch.launchers import MODULES, LaunchOptions, build_command, read_launch, shown
from dsft.launch.preflight import check_first_host, examine_first, wait_until_examined, without_lost
from dsft.perplexity.of_training import read_evaluation
from dsft.run_setup.named_files import check_named_files
from dsft.runtime.disk import remove_leftovers
from dsft.runtime.launcher_env import LAUNCH, WORDS, digest_of_words, free_port, launcher_variables
from dsft.watchdog.launch_link import LauncherLink, LaunchGuard, signal_group
from dsft.watchdog.messages import say

END_SECONDS = 10
"""For the launcher to end by itself after a failure or a signal; then it is ended."""
KILL_SECONDS = 5


ENDED = re.compile(rb"pdsh@[^:]*: (\S+): ssh exited with exit code (\d+)")


class SshSessions:
    """Shows what a launcher writes to standard error, and notes which hosts' sessions have ended."""

    def __init__(self, process: subprocess.Popen):
        self.ended: dict[str, int] = {}
        """Host -> exit code, where that is not 0."""
        self._stream = process.stderr
        self._thread = threading.Thread(target=self._copy, daemon=True)
        self._thread.start()

    def _copy(self) -> None:
        for line in self._stream:
            sys.stderr.buffer.write(line)
            sys.stderr.buffer.flush()
            if match := ENDED.match(line):
                self.ended[match[1].decode()] = int(match[2])

    def close(self) -> None:
        """Wait for the last words."""
        self._thread.join(timeout=2)


class LauncherProcess:
    """One start of the job. After `run`, `interrupted` tells which signal ended it (0: none)."""

    def __init__(self, options: LaunchOptions, command: list[str], *, saves: bool):
        """Args: `saves`: the ranks save and end where they are asked to."""
        self.launcher, self.command, self.saves = options.launcher, command, saves
        self.nodes = self.launcher.ssh_nodes()
        # On SIGTERM, deepspeed's launcher ends through pdsh whatever it has started on these nodes: other jobs too.
        # The ranks end by themselves.
        self.first_signal = signal.SIGKILL if self.nodes else signal.SIGTERM
        self.link = LauncherLink()
        self.interrupted = 0
        self._end_at: float | None = None
        self._for_ranks: list[int] = []
        self._is_asked = False

    def run(self) -> int:
        """Returns the exit code. SIGUSR1, a first SIGTERM and a first Ctrl-C ask the ranks to save and end; SIGHUP and
        a second one of them end the ranks on all nodes.
        """
        environment, env_file = launcher_environment(self.launcher, self.nodes, self.link)
        stderr = subprocess.PIPE if self.nodes else None
        process = subprocess.Popen(
            self.command, env=environment, stdin=subprocess.DEVNULL, stderr=stderr, start_new_session=True
        )
        # Through ssh the ranks' last words still come.
        guard = LaunchGuard(process.pid, 0 if self.nodes else signal.SIGTERM, process.stderr)
        sessions = SshSessions(process) if self.nodes else None
        handlers = {
            number: signal.signal(number, lambda received, _: self._signalled(received, process))
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        }
        handlers[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, lambda *_: self._for_ranks.append(signal.SIGUSR1))
        try:
            while process.poll() is None:
                self._listen()
                if sessions:
                    self._look_at(sessions)
                self._enforce_deadline(process)
            self._wait_for_outcome()
            if not self._is_explained():
                if process.returncode and self.link.speaks:
                    say(f"the launcher exited with code {process.returncode}: terminating all ranks")
                self.link.tell("end")
        finally:
            end_launcher(process, self.first_signal)
            if sessions:
                sessions.close()
            for number, handler in handlers.items():
                signal.signal(number, handler)
            self.link.close()
            guard.close()
            if env_file:
                env_file.unlink(missing_ok=True)
        return self._code(process.returncode)

    def _listen(self) -> None:
        self.link.read(wait_seconds=0.2)
        # Rank 0's sidecar has ended without a word on how the job went.
        if self.link.coordinator and self.link.coordinator.closed and not self._is_explained():
            self._fail(
                "the watchdog beside rank 0 is gone: its node went down, or it was killed; terminating all ranks"
            )
        while self._for_ranks and self.link.sidecars:
            self.link.tell("signal", number=self._for_ranks.pop())

    def _wait_for_outcome(self) -> None:
        """Once the launcher has ended: let the ranks say how the job ended, which may take them longer."""
        until = time.monotonic() + END_SECONDS
        self._listen()
        while self.link.speaks and not self._is_explained() and time.monotonic() < until:
            self._listen()

    def _is_explained(self) -> bool:
        return bool(self.interrupted or self.link.failure) or self.link.exit_code is not None

    def _look_at(self, sessions: SshSessions) -> None:
        """End a start that waits for a node whose ssh has ended before its ranks came."""
        first_rank = 0
        for node in self.nodes:
            code = sessions.ended.get(node.name)
            if code is not None and first_rank not in self.link.sidecars and self.link.coordinator is None:
                sessions.ended.clear()
                if code == EXIT_USER_ERROR:  # it has said what is wrong
                    self.link.exit_code = code
                else:
                    self._fail(f"{node.name}: ssh exited with code {code} before its ranks connected; see above")
            first_rank += node.slots or 0

    def _fail(self, cause: str) -> None:
        if not self.link.failure:
            self.link.failure = cause
            say(f"error: {cause}")

    def _signalled(self, number: int, process: subprocess.Popen) -> None:
        name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        if number != signal.SIGHUP and self.saves and self.link.sidecars and not self._is_asked:
            self._is_asked = True
            self._for_ranks.append(signal.SIGUSR1)
            say(f"{name}: asked the ranks to save and exit; a second one terminates them at once")
            return
        if not self.interrupted:
            say(f"{name}: terminating all ranks")
        self.interrupted = number
        self._end(process)

    def _enforce_deadline(self, process: subprocess.Popen) -> None:
        if (self.link.failure or self.link.exit_code) and self._end_at is None:
            self._end(process)
        if self._end_at is not None and time.monotonic() > self._end_at:
            end_launcher(process, self.first_signal)

    def _end(self, process: subprocess.Popen) -> None:
        """Ask all ranks to end, and the launcher where no rank has come to be asked; later it is ended."""
        self._end_at = self._end_at or time.monotonic() + END_SECONDS
        self.link.tell("end")
        if not self.link.sidecars:
            signal_group(process.pid, self.first_signal)

    def _code(self, returncode: int) -> int:
        if self.interrupted:
            return 128 + self.interrupted
        # On one machine the launcher has seen each rank exit; elsewhere 0 counts also where an ssh session died.
        launcher_knows = self.launcher.is_local and returncode != 0 and not self.link.exit_code
        if self.link.exit_code is not None and not launcher_knows:
            return self.link.exit_code
        if self.link.failure and not 0 < returncode < 128:
            return 1  # also where a launcher that waited for a lost node had to be ended
        # DeepSpeed's launcher returns 247 for a child that was killed (-9 as a byte), pdsh 255 for a lost session.
        return 128 - returncode if returncode < 0 else min(returncode, 1) if returncode > 128 else returncode


def end_launcher(process: subprocess.Popen, first_signal: int) -> None:
    """End the launcher and what it left here, such as an ssh to a node that does not answer."""
    if process.poll() is None:
        signal_group(process.pid, first_signal)
        try:
            process.wait(KILL_SECONDS)
        except subprocess.TimeoutExpired:
            pass
    signal_group(process.pid, signal.SIGKILL)
    process.wait()


def resumed(script: list[str]) -> list[str]:
    """Returns the words of a training with `--resume_from_checkpoint auto`, once, whatever they said of it."""
    _, others = split_flags(script, {"resume_from_checkpoint": str})
    return [*others, "--resume_from_checkpoint", "auto"]


def asks_to_resume(script: list[str]) -> bool:
    """Whether the words of a training, or its YAML file, say from where it resumes."""
    return "resume_from_checkpoint" in read_file_and_flags(script, [])


def check_script(name: str, script: list[str], *, files: bool) -> None:
    """Say what is wrong with the options of a run before launcher and ranks take seconds to start, which check more.

    Args:
        files: look at the files that they name too; those of a run on other nodes may lie there alone.

    Raises:
        UserError: with all problems that options and files show by themselves.
    """
    problems: list[str] = []
    if name == "train":
        options = read_config(TrainConfig, script, problems)
    else:
        options = read_evaluation(script, problems)
        if options.run and not files:  # its run.json may lie there alone too
            return
    if files:
        problems += without_second_errors(check_named_files(options), problems)
    raise_if_any(problems)


def launch(argv: list[str]) -> int:
    """Print and run the command for `[options] train|eval [words]`, again after a failure up to `max_restarts` times;
    returns the exit code.

    Raises:
        UserError: where an option is wrong, or the nodes cannot be found out.
    """
    options, name, script = read_launch(argv)
    launcher = options.launcher
    if launcher.is_local and launcher_variables(os.environ):
        # One of several tasks of srun or mpirun: this process becomes that rank.
        os.execv(sys.executable, [sys.executable, "-m", MODULES[name], *script])
    check_script(name, script, files=launcher.is_local and not options.dry_run)
    if options.hostfile and options.master_port is None and not options.no_ssh:
        options.master_port = free_port()  # chosen here, so that the preflight looks at the one that is used
    if not options.dry_run:
        variables, notes = shared_environment(launcher, script)
        for note in notes:
            print(f"dsft: {note}", flush=True)
        os.environ.update(variables)  # from here they reach the preflight and the ranks
        remove_leftovers()
    if not (options.no_preflight or options.dry_run):
        examine_first(launcher, script)
    os.environ.pop(LAUNCH, None)
    if name == "train" and not asks_to_resume(script):
        os.environ[LAUNCH] = uuid.uuid4().hex  # a restart resumes this job's run alone
    try:
        return _run_with_restarts(options, name, script)
    finally:
        os.environ.pop(LAUNCH, None)
        os.environ.pop(WORDS, None)


def _run_with_restarts(options: LaunchOptions, name: str, script: list[str]) -> int:
    launcher, lost = options.launcher, []
    for attempt in range(options.max_restarts + 1):
        if attempt and name == "train":  # an evaluation resumes by itself
            script = resumed(script)
        if attempt and launcher.ssh_nodes() and not options.no_preflight:
            wait_until_examined(launcher, name, script)
        command = build_command(options, name, script)
        print("dsft: " + shown(command), flush=True)
        if options.dry_run:
            return 0
        if options.no_preflight:
            check_first_host(launcher)
        os.environ[WORDS] = digest_of_words(script)
        process = LauncherProcess(options, command, saves=name == "train")
        code = process.run()
        lost = process.link.lost or lost  # a restart that waits for a node in vain loses none
        if code in (0, EXIT_USER_ERROR, EXIT_STOPPED, EXIT_UNSAVED, EXIT_REQUEUE) or process.interrupted:
            return code
        if attempt < options.max_restarts:
            print(
                f"dsft: exit code {code}: restart {attempt + 1} of {options.max_restarts}, from the last checkpoint",
                file=sys.stderr,
                flush=True,
            )
    command = lost and without_lost(launcher, name, resumed(script) if name == "train" else script, lost)
    if command:
        say(f"complete checkpoints are kept; to continue {command}")
    return code
