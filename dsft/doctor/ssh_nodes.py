"""Runs the phases of the examination on all nodes, side by side: one ssh connection per host and phase, a plain process
for this machine.
"""

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from dsft.doctor.findings import Finding, finding
from dsft.doctor.phases import MARK
from dsft.runtime.launcher_env import Node
from dsft.runtime.ssh import ssh_banner, ssh_command, ssh_problem


class PhaseCommand:
    """One phase on one node, started as DeepSpeed starts its launcher there: the same Python in the same folder, with
    `variables` through ssh; without them here.
    """

    def __init__(self, node: str, phase: str, variables: dict[str, str] | None):
        words = [sys.executable, "-m", "dsft.doctor.phases", phase]
        if variables is not None:
            words = ssh_command(node, words, variables)
        self.errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        self.process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            errors="replace",
            env=os.environ | {"PYTHONPATH": ":".join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")]))},
            start_new_session=True,
        )
        self.lines: queue.Queue[dict[str, Any] | None] = queue.Queue()  # what it says, and None at its end

        def read() -> None:
            for line in self.process.stdout:
                if line.startswith(MARK):
                    self.lines.put(json.loads(line[len(MARK) :]))
            self.lines.put(None)

        threading.Thread(target=read, daemon=True).start()

    def close(self) -> None:
        """The phase exits when its input ends; ssh is given a moment to pass that on."""
        with suppress(OSError):
            self.process.stdin.close()
        try:
            self.process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.errors.close()


class SshNodes:
    """The nodes of a host file, with `variables` there; without these this machine alone."""

    def __init__(self, nodes: list[Node], variables: dict[str, str] | None):
        self._names, self._variables = [node.name for node in nodes], variables
        self._commands: dict[tuple[str, str], PhaseCommand] = {}  # by phase and node
        self._until = self._grace = 0.0
        self.lost: dict[str, Finding] = {}  # nodes that did not answer
        self.failures: list[Finding] = []  # of nodes that could not do what they were asked

    def start(self, phase: str) -> None:
        """Start a phase on all nodes ahead of its input."""
        for name in self._names:
            self._commands[phase, name] = PhaseCommand(name, phase, self._variables)

    def end(self, phase: str | None = None) -> None:
        """End a phase that has answered, or all: its ports are closed, its probe is gone."""
        commands = [self._commands.pop(key) for key in list(self._commands) if phase in (None, key[0])]
        if commands:
            with ThreadPoolExecutor(max_workers=len(commands)) as pool:
                list(pool.map(PhaseCommand.close, commands))

    def ready(self, names: Iterable[str], **limits: float) -> dict[str, str]:
        """Wait until `measure` has its imports. Returns "" by node, or its last words where it exited instead."""

        def wait(name: str) -> str | None:
            line = self._next_line("measure", name)
            return "" if "event" in line else line["answer"]["last_words"] if "answer" in line else None

        return self._side_by_side(wait, names, **limits)

    def run(
        self,
        phase: str,
        inputs: dict[str, dict[str, Any]],
        *,
        on_event: Callable[[dict[str, Any]], None] = lambda event: None,
        **limits: float,
    ) -> dict[str, Any]:
        """Run a phase on the nodes of `inputs` at the same time; answers by node, of those that answered."""

        def ask(name: str) -> Any:
            if (phase, name) not in self._commands:
                self._commands[phase, name] = PhaseCommand(name, phase, self._variables)
            stdin = self._commands[phase, name].process.stdin
            with suppress(OSError):  # its last words say why
                stdin.write(json.dumps(inputs[name]) + "\n")
                stdin.flush()
            while "event" in (line := self._next_line(phase, name)):
                on_event(line["event"])
            return line.get("answer")

        return self._side_by_side(ask, inputs, **limits)

    def _side_by_side(
        self,
        ask: Callable[[str], Any],
        names: Iterable[str],
        *,
        timeout_seconds: float = 30.0,
        grace_seconds: float = float("inf"),
    ) -> dict[str, Any]:
        """Args: `grace_seconds`: how much longer than the first to answer the others may take."""
        names = [name for name in names if name not in self.lost]
        self._until, self._grace = time.monotonic() + timeout_seconds, grace_seconds
        with ThreadPoolExecutor(max_workers=max(1, len(names))) as pool:
            answers = dict(zip(names, pool.map(ask, names), strict=True))
        return {name: answer for name, answer in answers.items() if answer is not None}

    def _next_line(self, phase: str, name: str) -> dict[str, Any]:
        """What a phase says next: {"event"} or {"answer"}; else nothing, and a finding says why: it failed, the
        connection has ended (with the last words of ssh or Python), or nothing came in time.
        """
        command, lost = self._commands[phase, name], f"no answer to {phase!r} in time"
        exit_code = None
        while (left := self._until - time.monotonic()) > 0:
            try:
                line = command.lines.get(timeout=min(0.5, left))  # the first answer ends the wait sooner
            except queue.Empty:
                continue
            if line is None:
                with suppress(subprocess.TimeoutExpired):
                    exit_code = command.process.wait(timeout=5)
                command.errors.seek(0)
                lost = command.errors.read().strip() or f"the connection ended with exit code {exit_code}"
                break
            if "failed" in line:
                words = f"{phase}: {line['failed']}"[:300]
                self.failures.append(finding("node-failed", name, words, f"ssh {name}: try it by hand"))
                return {}
            if "answer" in line or "ready" in line["event"]:
                self._until = min(self._until, time.monotonic() + self._grace)
            return line
        if not lost.startswith("no answer to 'measure'"):  # the smoke test names its ranks itself
            banner = ssh_banner(name) if "timed out" in lost else ""
            why = ssh_problem(name, lost, exit_code, banner=banner)
            self.lost[name] = finding(why.code, name, why.message, why.fix)
        return {}
