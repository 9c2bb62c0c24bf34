"""Runs the phases of the examination on all nodes, side by side: one ssh connection per host and phase, a plain process
for this machine.
"""

import json
import os
import queue
import subprocess
import sys
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


class StragglerDeadline:
    """How much longer than the first to answer the others may take."""

    def __init__(self, seconds: float):
        self._seconds, self._end = seconds, float("inf")

    def answered(self) -> None:
        self._end = min(self._end, time.monotonic() + self._seconds)

    def left(self) -> float:
        return self._end - time.monotonic()


class PhaseCommand:
    """One phase on one node, started as DeepSpeed starts its launcher there: the same Python in the same folder, with
    `variables` through ssh; without them here.
    """

    def __init__(self, node: Node, phase: str, variables: dict[str, str] | None):
        self.phase, self.exit_code = phase, None
        words = [sys.executable, "-m", "dsft.doctor.phases", phase]
        if variables is not None:
            words = ssh_command(node.name, words, variables)
        self._process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=os.environ | {"PYTHONPATH": ":".join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")]))},
            start_new_session=True,
        )
        self._errors: list[str] = []
        self._lines: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._error_reader = threading.Thread(target=lambda: self._errors.extend(self._process.stderr), daemon=True)
        self._error_reader.start()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self._process.stdout:
            if line.startswith(MARK):
                self._lines.put(json.loads(line[len(MARK) :]))
        self._lines.put(None)

    def send(self, values: dict[str, Any]) -> None:
        """Its input."""
        with suppress(OSError):  # its last words say why
            self._process.stdin.write(json.dumps(values) + "\n")
            self._process.stdin.flush()

    def next_line(self, deadline: float, stragglers: StragglerDeadline) -> dict[str, Any]:
        """What it says next: {"event"}, {"answer"}, {"failed"}; {"lost"} with the last words of ssh or Python where
        the connection has ended, or nothing came in time.
        """
        while deadline > time.monotonic() and stragglers.left() > 0:
            try:
                line = self._lines.get(timeout=max(0.0, min(0.5, deadline - time.monotonic(), stragglers.left())))
            except queue.Empty:
                continue
            if line is None:
                with suppress(subprocess.TimeoutExpired):
                    self.exit_code = self._process.wait(timeout=5)
                self._error_reader.join(timeout=2)
                words = "".join(self._errors).strip()
                return {"lost": words or f"the connection ended with exit code {self.exit_code}"}
            if "answer" in line or "ready" in line.get("event", {}):
                stragglers.answered()
            return line
        return {"lost": f"no answer to {self.phase!r} in time"}

    def close(self) -> None:
        """The phase ends when its input does; ssh is given a moment to pass that on."""
        with suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class SshNodes:
    """The nodes of a host file, with `variables` there; without these this machine alone."""

    def __init__(self, nodes: list[Node], variables: dict[str, str] | None):
        self._nodes = {node.name: node for node in nodes}
        self._variables = variables
        self._commands: dict[tuple[str, str], PhaseCommand] = {}
        """By phase and node."""
        self._lost: dict[str, Finding] = {}
        self._failures: list[Finding] = []

    def __enter__(self) -> "SshNodes":
        return self

    def __exit__(self, *error: Any) -> None:
        self._close(list(self._commands))

    def start(self, phase: str) -> None:
        """Start a phase on all nodes ahead of its input: what it imports takes seconds."""
        for name in self._nodes:
            self._commands[phase, name] = PhaseCommand(self._nodes[name], phase, self._variables)

    def end(self, phase: str) -> None:
        """End a phase that has answered: its ports are closed, its probe is gone."""
        self._close([key for key in self._commands if key[0] == phase])

    def _close(self, keys: list[tuple[str, str]]) -> None:
        commands = [self._commands.pop(key) for key in keys]
        if commands:
            with ThreadPoolExecutor(max_workers=len(commands)) as pool:
                list(pool.map(PhaseCommand.close, commands))

    def ready(self, names: Iterable[str], *, timeout_seconds: float, grace_seconds: float) -> dict[str, str]:
        """Wait until `measure` has its imports. Returns "" by node, or its last words where it ended instead."""

        def wait(name: str, deadline: float, stragglers: StragglerDeadline) -> str | None:
            line = self._commands["measure", name].next_line(deadline, stragglers)
            if "event" in line:
                return ""
            return line["answer"]["last_words"] if "answer" in line else self._note(name, "measure", line)

        return self._side_by_side(wait, names, timeout_seconds, grace_seconds)

    def run(
        self,
        phase: str,
        inputs: dict[str, dict[str, Any]],
        *,
        timeout_seconds: float = 30.0,
        grace_seconds: float = float("inf"),
        on_event: Callable[[dict[str, Any]], None] = lambda event: None,
    ) -> dict[str, Any]:
        """Run a phase on the nodes of `inputs` at the same time; answers by node, of those that answered.

        Args:
            grace_seconds: how much longer than the first to answer the others may take.
        """

        def ask(name: str, deadline: float, stragglers: StragglerDeadline) -> Any:
            if (phase, name) not in self._commands:
                self._commands[phase, name] = PhaseCommand(self._nodes[name], phase, self._variables)
            self._commands[phase, name].send(inputs[name])
            while "event" in (line := self._commands[phase, name].next_line(deadline, stragglers)):
                on_event(line["event"])
            return line["answer"] if "answer" in line else self._note(name, phase, line)

        return self._side_by_side(ask, inputs, timeout_seconds, grace_seconds)

    def _side_by_side(
        self, ask: Callable[..., Any], names: Iterable[str], timeout_seconds: float, grace_seconds: float
    ) -> dict[str, Any]:
        names = [name for name in names if name not in self._lost]
        if not names:
            return {}
        deadline, stragglers = time.monotonic() + timeout_seconds, StragglerDeadline(grace_seconds)
        with ThreadPoolExecutor(max_workers=len(names)) as pool:
            answers = dict(zip(names, pool.map(lambda name: ask(name, deadline, stragglers), names), strict=True))
        return {name: answer for name, answer in answers.items() if answer is not None}

    def _note(self, name: str, phase: str, line: dict[str, Any]) -> None:
        """Keep why a node did not answer."""
        if "failed" in line:
            words = f"{phase}: {line['failed']}"[:300]
            self._failures.append(finding("node-failed", name, words, f"ssh {name}: try it by hand"))
        elif not line["lost"].startswith("no answer to 'measure'"):  # the smoke test names its ranks itself
            banner = ssh_banner(name) if "timed out" in line["lost"] else ""
            why = ssh_problem(name, line["lost"], self._commands[phase, name].exit_code, banner=banner)
            self._lost[name] = finding(why.code, name, why.message, why.fix)

    def broken(self) -> list[Finding]:
        """Nodes that did not answer, or could not do what they were asked."""
        return [*self._lost.values(), *self._failures]
