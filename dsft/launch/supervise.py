"""Looks at the nodes, runs the launcher, stays with it until nothing of the job is left, starts it again after a
failure, and returns an exit code that is true. The launchers' own are not always: DeepSpeed's is 0 when its child is
killed by a signal, torchrun's is 1 for every failure. The job itself says how it ended (`watchdog/messages.py`).
"""

import dataclasses
import os
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from dsft.checkpoints.manifest import checkpoints
from dsft.config.options import TrainConfig
from dsft.config.reader import read_config, read_file_and_flags, split_flags
from dsft.errors import (
    EXIT_REQUEUE,
    EXIT_STOPPED,
    EXIT_UNSAVED,
    EXIT_USER_ERROR,
    UserError,
    raise_if_any,
    without_second_errors,
)
from dsft.launch.environment import accelerator, launcher_environment, shared_environment
from dsft.launch.launchers import (
    MODULES,
    HostFields,
    Launcher,
    LaunchOptions,
    build_command,
    hosts_of,
    included,
    read_launch,
    shown,
    started,
)
from dsft.perplexity.of_training import read_evaluation
from dsft.run_setup.named_files import check_named_files
from dsft.runtime.console import show_text
from dsft.runtime.disk import remove_leftovers
from dsft.runtime.launcher_env import (
    CHECKS_ALONE,
    LARGEST_PORT,
    LAUNCH,
    SSH,
    WORDS,
    SshProblem,
    digest_of_words,
    free_port,
    launcher_variables,
    ssh_problem,
)
from dsft.watchdog.messages import LauncherLink, say
from dsft.watchdog.processes import LaunchGuard, signal_group

END_SECONDS = 10  # for the launcher to exit by itself after a failure or a signal; then it is terminated
KILL_SECONDS = 5
SSH_SECONDS = 15.0  # for a command that does nothing
WAIT_SECONDS = 10.0  # between two looks at nodes that are not there
DOCTOR = "dsft.cli.doctor"
QUICK = ["--quick", "--only_findings"]
SESSION_ENDED = re.compile(rb"pdsh@[^:]*: (\S+): ssh exited with exit code (\d+)")


def launch(argv: list[str]) -> int:
    """Print and run the command for `[options] train|eval [words]`, again after a failure up to `max_restarts` times;
    returns the exit code. Raises UserError: an option is wrong, the nodes cannot be found out, or the preflight found
    an error.
    """
    options, name, script = read_launch(argv)
    launcher, is_training = options.launcher, name == "train"
    if launcher.is_local and launcher_variables(os.environ):
        # One of several tasks of srun or mpirun: this process becomes that rank.
        os.execv(sys.executable, [sys.executable, "-m", MODULES[name], *script])

    # What options and files show by themselves, before launcher and ranks take seconds to start, which check more.
    # Files of a run on other nodes, and its run.json, are not read: they may lie there alone.
    problems: list[str] = []
    if is_training:
        config = read_config(TrainConfig, script, problems, also=LaunchOptions)
    else:
        config = read_evaluation(script, problems, also=LaunchOptions)
    reads_files = launcher.is_local and not options.dry_run
    if reads_files:
        problems += without_second_errors(check_named_files(config), problems)
    if reads_files or is_training or not config.run:
        raise_if_any(problems)
    # What needs torch, a tokenizer or headers of weights; one rank alone finds it by itself, as early.
    if reads_files and (launcher.ranks or 1) > 1 and (code := check_as_rank_0(name, script, launcher.ranks)):
        return code
    if options.hostfile and not options.master_port and not options.no_ssh:
        options.master_port = free_port()  # chosen here, so that the preflight looks at the one that is used
    if not options.dry_run:
        variables, notes = shared_environment(launcher, script)
        for note in notes:
            show_text(f"dsft: {note}")
        os.environ.update(variables)  # from here they reach the preflight and the ranks
        remove_leftovers()
    examines = not (options.no_preflight or options.dry_run)
    if examines and subprocess.run(preflight_command(launcher, name, script), stdin=subprocess.DEVNULL).returncode:
        docs = "above; docs/doctor.md explains each"
        raise UserError([f"the preflight found errors ({docs}); --no_preflight starts all the same"])
    os.environ.pop(LAUNCH, None)
    if is_training and "resume_from_checkpoint" not in read_file_and_flags(script, []):
        os.environ[LAUNCH] = uuid.uuid4().hex  # a restart resumes this job's run alone

    lost: list[str] = []
    try:
        for attempt in range(options.max_restarts + 1):
            if attempt and is_training:  # an evaluation resumes by itself
                script = resumed(script)
            if attempt and launcher.ssh_nodes() and not options.no_preflight:
                wait_until_examined(launcher, name, script)
            command = build_command(options, name, script)
            show_text("dsft: " + shown(command), is_command=True)
            if options.dry_run:
                return 0
            if options.no_preflight:  # DeepSpeed asks the first host for its address, and shows a traceback without one
                away = unreachable([node.name for node in launcher.ssh_nodes()[:1]])
                raise_if_any([f"{problem.node}: {problem.message}; {problem.fix}" for problem in away])
            show_text("dsft: starting the ranks")
            os.environ[WORDS] = digest_of_words(script)
            process = LauncherProcess(options, command, saves=is_training)
            code = process.run()
            lost = process.link.lost or lost  # a restart that waits for a node in vain loses none
            if code in (0, EXIT_USER_ERROR, EXIT_STOPPED, EXIT_UNSAVED, EXIT_REQUEUE) or process.interrupted:
                return code
            if attempt < options.max_restarts:
                restart = f"restart {attempt + 1} of {options.max_restarts}, from the last checkpoint"
                show_text(f"dsft: exit code {code}: {restart}", file=sys.stderr)
        words = resumed(script) if is_training else script
        if lost and (continues := without_lost(launcher, name, words, lost)):
            say(f"complete checkpoints are kept; to continue {continues}")
        return code
    finally:
        os.environ.pop(LAUNCH, None)
        os.environ.pop(WORDS, None)


def check_as_rank_0(name: str, script: list[str], ranks: int) -> int:
    """Let the entry of the ranks check what needs no other rank, in a process whose memory, on a GPU too, is free again
    when ranks start; returns its exit code.
    """
    print("dsft: checking options, data and models before ranks start", flush=True)
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(ranks), "LOCAL_SIZE": str(ranks)}
    quiet = {"TRANSFORMERS_VERBOSITY": "error", "PYTHONWARNINGS": "ignore"}  # the ranks warn
    process = subprocess.Popen(
        [sys.executable, "-m", MODULES[name], *script],
        env=os.environ | accelerator() | place | quiet | {CHECKS_ALONE: "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C comes to this process alone
    )
    guard = LaunchGuard(process.pid, signal.SIGKILL)  # also where this process is killed
    try:
        code = process.wait()
    finally:
        signal_group(process.pid, signal.SIGKILL)
        process.wait()
        guard.close()
    if code < 0:
        say(f"error: the check before the start was killed by signal {-code} (9: out of memory, or kill -9)")
    return code if code >= 0 else 128 - code


def resumed(script: list[str]) -> list[str]:
    """The words of a training with `--resume_from_checkpoint auto`, once, whatever they said of it; as they are where
    they name a checkpoint and the training has none of its own yet.
    """
    training = read_config(TrainConfig, script, []).training
    is_named = training.get("resume_from_checkpoint", "auto") != "auto"
    if is_named and not checkpoints(training.get("output_dir", "")):
        return script
    _, others = split_flags(script, {"resume_from_checkpoint": str})
    return [*others, "--resume_from_checkpoint", "auto"]


class LauncherProcess:
    """One start of the job. After `run`, `interrupted` is the signal that ended it (0: none)."""

    def __init__(self, options: LaunchOptions, command: list[str], *, saves: bool):
        """Args: `saves`: the ranks save and exit where they are asked to."""
        self.launcher, self.command, self.saves = options.launcher, command, saves
        self.nodes = self.launcher.ssh_nodes()
        # On SIGTERM, deepspeed's launcher ends through pdsh whatever it has started on these nodes: other jobs too.
        # The ranks exit by themselves.
        self.first_signal = signal.SIGKILL if self.nodes else signal.SIGTERM
        self.link = LauncherLink()
        self.interrupted = 0
        self._process: subprocess.Popen | None = None
        self._end_at: float | None = None
        self._for_ranks: list[int] = []
        self._is_asked = False

    def run(self) -> int:
        """Returns the exit code. SIGUSR1, a first SIGTERM and a first Ctrl-C ask the ranks to save and exit; SIGHUP and
        a second one of them terminate the ranks on all nodes.
        """
        link, sessions = self.link, {}  # host -> exit code of its ssh session, where that is not 0
        environment, env_file = launcher_environment(self.launcher, self.nodes, link)
        stderr = subprocess.PIPE if self.nodes else None
        self._process = process = subprocess.Popen(
            self.command, env=environment, stdin=subprocess.DEVNULL, stderr=stderr, start_new_session=True
        )
        # Through ssh the ranks' last words still come.
        guard = LaunchGuard(process.pid, 0 if self.nodes else signal.SIGTERM, process.stderr)

        def show_errors() -> None:
            for line in process.stderr or ():
                sys.stderr.buffer.write(line)
                sys.stderr.buffer.flush()
                if match := SESSION_ENDED.match(line):
                    sessions[match[1].decode()] = int(match[2])

        shows = threading.Thread(target=show_errors, daemon=True)
        shows.start()
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
        handlers = {number: signal.signal(number, self._signalled) for number in numbers}
        try:
            while process.poll() is None:
                self._listen()
                first_rank = 0
                for node in self.nodes:  # the start waits in vain for one whose ssh exited before its ranks came
                    code = sessions.get(node.name)
                    ranks = range(first_rank, first_rank + (node.slots or 0))
                    if code is not None and link.sidecars.keys().isdisjoint(ranks) and link.coordinator is None:
                        sessions.clear()
                        if code == EXIT_USER_ERROR:  # it has said what is wrong
                            link.exit_code = code
                        elif not link.failure:
                            exited = f"ssh exited with code {code}"
                            link.failure = f"{node.name}: {exited} before its ranks connected; see above"
                            say(f"error: {link.failure}")
                    first_rank = ranks.stop
                if (link.failure or link.exit_code) and self._end_at is None:
                    self._end()
                if self._end_at is not None and time.monotonic() > self._end_at:
                    self._kill()
            # The ranks say how the job ended, which may take them longer than the launcher.
            until = time.monotonic() + END_SECONDS
            while True:
                self._listen()
                if self._is_explained() or not link.speaks or time.monotonic() > until:
                    break
            if not self._is_explained():
                if process.returncode and link.speaks:
                    say(f"the launcher exited with code {process.returncode}: terminating all ranks")
                link.tell("end")
        finally:
            self._kill()
            shows.join(timeout=2)  # the last words
            for number, handler in handlers.items():
                signal.signal(number, handler)
            link.close()
            guard.close()
            if env_file:
                env_file.unlink(missing_ok=True)
        code = process.returncode
        if self.interrupted:
            return 128 + self.interrupted
        # On one machine the launcher has seen each rank exit; elsewhere 0 counts also where an ssh session died.
        launcher_knows = self.launcher.is_local and code != 0 and not link.exit_code
        if link.exit_code is not None and not launcher_knows:
            return link.exit_code
        if link.failure and not 0 < code < 128:
            return 1  # also where a launcher that waited for a lost node had to be terminated
        # DeepSpeed's launcher returns 247 for a child that was killed (-9 as a byte), pdsh 255 for a lost session.
        return 128 - code if code < 0 else min(code, 1) if code > 128 else code

    def _is_explained(self) -> bool:
        return bool(self.interrupted or self.link.failure) or self.link.exit_code is not None

    def _listen(self) -> None:
        """Read what the ranks' watchdogs say, and send them the signals that have come for them."""
        link = self.link
        link.read(wait_seconds=0.2)
        # Rank 0's sidecar has exited without a word on how the job went.
        if link.coordinator and link.coordinator.closed and not self._is_explained():
            link.failure = (
                "the watchdog beside rank 0 is gone: its node went down, or it was killed; terminating all ranks"
            )
            say(f"error: {link.failure}")
        while self._for_ranks and link.sidecars:
            link.tell("signal", number=self._for_ranks.pop())

    def _signalled(self, number: int, _: Any) -> None:
        if number == signal.SIGUSR1:
            self._for_ranks.append(number)
            return
        name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        if number != signal.SIGHUP and self.saves and self.link.sidecars and not self._is_asked:
            self._is_asked = True
            self._for_ranks.append(signal.SIGUSR1)
            say(f"{name}: asked the ranks to save and exit; a second one terminates them at once")
            return
        if not self.interrupted:
            say(f"{name}: terminating all ranks")
        self.interrupted = number
        self._end()

    def _end(self) -> None:
        """Ask all ranks to exit, and the launcher where no rank has come to be asked; later it is terminated."""
        self._end_at = self._end_at or time.monotonic() + END_SECONDS
        self.link.tell("end")
        if not self.link.sidecars:
            signal_group(self._process.pid, self.first_signal)

    def _kill(self) -> None:
        """Terminate the launcher and what it left here, such as an ssh to a node that does not answer."""
        process = self._process
        if process.poll() is None:
            signal_group(process.pid, self.first_signal)
            try:
                process.wait(KILL_SECONDS)
            except subprocess.TimeoutExpired:
                pass
        signal_group(process.pid, signal.SIGKILL)
        process.wait()


def preflight_command(launcher: Launcher, name: str, script: list[str]) -> list[str]:
    """The command that examines the nodes of a launch before it: `dsft doctor --quick`, started the same way. With a
    host file it goes through ssh; else ranks of the doctor do it, one a node, which the same launcher starts.
    """
    options, hosts, words = launcher.options, launcher.ssh_hosts(), [*QUICK, *script]
    if name == "eval":  # whose folder the nodes need not share, as that of a training without checkpoints
        words += ["--save_strategy", "no"]
    if launcher.is_examined_by_ranks and not hosts:
        port = launcher.port(script) if launcher.has_port_beside else None
        if port:  # beside the launch's own
            port += 1 if port < LARGEST_PORT else -1
        changes: dict[str, Any] = {} if launcher.is_local else {"num_gpus": 1}
        if options.hostfile and (options.include or options.exclude):  # beside which DeepSpeed takes no --num_gpus
            firsts = [dataclasses.replace(node, devices=node.devices[:1]) for node in hosts_of(options)]
            changes = {"include": included(firsts), "exclude": None}
        command = build_command(dataclasses.replace(options, master_port=port, **changes), DOCTOR, words)
        show_text("dsft: preflight: " + shown(command), is_command=True)
        return command
    here = {"num_gpus": launcher.ranks, "master_port": options.master_port}
    named = {field.name: getattr(hosts, field.name) for field in dataclasses.fields(HostFields)} if hosts else here
    return started(DOCTOR, named, *words)


def wait_until_examined(launcher: Launcher, name: str, script: list[str]) -> None:
    """Before a restart: let the doctor examine the nodes again and again until it finds no error, and print what it
    finds where that has changed. Raises UserError: that takes longer than `wait_for_nodes`.
    """
    deadline, before = time.monotonic() + launcher.options.wait_for_nodes, ""
    while True:
        result = subprocess.run(
            preflight_command(launcher, name, script), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
        )
        if result.returncode == 0:
            return
        findings = result.stdout.rstrip().rpartition("\n")[0]  # the last line has the seconds that it took
        if findings != before:
            print(result.stdout, end="", flush=True)
            before = findings
        left = deadline - time.monotonic()
        if left <= 0:
            continues = "the same command continues"
            if name == "train":
                resumes = "the same command with --resume_from_checkpoint auto resumes"
                continues = f"the last checkpoint is complete, {resumes}"
            text = f"the nodes are still not ready (above); {continues}"
            text += "; ".join(["", *filter(None, [without_lost(launcher, name, script)])])
            raise UserError([f"--wait_for_nodes {launcher.options.wait_for_nodes:g}: {text}"])
        show_text(f"dsft: the restart waits for the nodes, {left:.0f} s at most", file=sys.stderr)
        time.sleep(min(WAIT_SECONDS, left))


def unreachable(names: list[str]) -> list[SshProblem]:
    """Why ssh does not get into these hosts, of those where it does not."""

    def try_host(name: str) -> SshProblem | None:
        command, quiet = [*SSH, name, "true"], {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
        try:
            result = subprocess.run(command, **quiet, timeout=SSH_SECONDS)
        except subprocess.TimeoutExpired:
            return ssh_problem(name, "ssh timed out", 255)
        return ssh_problem(name, result.stderr.strip(), result.returncode) if result.returncode else None

    with ThreadPoolExecutor(max_workers=max(1, len(names))) as pool:
        return [problem for problem in pool.map(try_host, names) if problem]


def without_lost(launcher: Launcher, name: str, script: list[str], lost: Sequence[str] = ()) -> str:
    """The command that continues where nodes do not come back; empty where none is lost, none is left, or no command
    can be named. `lost`: host names, as the watchdog lost them; hosts that are reached through ssh are tried instead.
    """
    if nodes := launcher.ssh_nodes():
        lost = [problem.node for problem in unreachable([node.name for node in nodes])]
    command = launcher.without(lost, [name, *script])
    return command and f"without {', '.join(lost)}: {command}"
