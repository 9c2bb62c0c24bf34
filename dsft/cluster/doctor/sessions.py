"""Conversations with the agents of all nodes, side by side: one ssh connection per host, a plain process for this
machine.

A conversation that breaks says why in `Session.lost`; `trouble.py` turns that into a finding.
"""

import json
import os
import queue
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from dsft.cluster.doctor.agent import MARK
from dsft.runtime.hostfile import Node

SSH = [
    "ssh",
    "-o",
    "BatchMode=yes",
    "-o",
    "ConnectTimeout=5",
    "-o",
    "ServerAliveInterval=3",
    "-o",
    "ServerAliveCountMax=3",
]
EXPORTED = ("MLFLOW", "PYTHON", "MV2", "UCX", "NCCL")
"""Variables that DeepSpeed's launcher hands to the nodes, by how their names begin (deepspeed/launcher/runner.py,
EXPORT_ENVS and the accelerator's).
"""


def exported_variables() -> dict[str, str]:
    """What `deepspeed --hostfile` sets on the nodes: variables of this shell by name, PYTHONPATH, and the lines of
    `.deepspeed_env`.
    """
    found = {name: value for name, value in os.environ.items() if name.startswith(EXPORTED)}
    found["PYTHONPATH"] = os.getcwd() + (f":{os.environ['PYTHONPATH']}" if os.environ.get("PYTHONPATH") else "")
    for folder in (Path.home(), Path()):
        file = folder / os.environ.get("DS_ENV_FILE", ".deepspeed_env")
        if file.is_file():
            found |= dict(line.strip().split("=", 1) for line in file.read_text().splitlines() if "=" in line)
    return found


def agent_command(node: Node, *, ssh: bool) -> list[str]:
    """As DeepSpeed starts its own launcher there: the same Python in the same folder."""
    if not ssh:
        return [sys.executable, "-m", "dsft.cluster.doctor.agent"]
    exports = "".join(f"export {name}={shlex.quote(value)}; " for name, value in exported_variables().items())
    return [
        *SSH,
        node.name,
        f"{exports}cd {shlex.quote(os.getcwd())} && exec {shlex.quote(sys.executable)} -m dsft.cluster.doctor.agent",
    ]


class StragglerDeadline:
    """How much longer than the first to answer the others may take."""

    def __init__(self, seconds: float):
        self._seconds, self._end = seconds, float("inf")

    def one_answered(self) -> None:
        self._end = min(self._end, time.monotonic() + self._seconds)

    def left(self) -> float:
        return self._end - time.monotonic()


class Session:
    """One agent."""

    def __init__(self, node: Node, *, ssh: bool):
        self.node = node
        self.lost = ""
        """What was said last before the connection ended (ssh's or Python's error); empty while it stands."""
        self.exit_code: int | None = None
        self.failures: list[str] = []
        environment = os.environ if ssh else os.environ | {"PYTHONPATH": exported_variables()["PYTHONPATH"]}
        self._process = subprocess.Popen(
            agent_command(node, ssh=ssh),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=environment,
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

    def request(
        self,
        do: str,
        *,
        timeout_seconds: float,
        patience: "StragglerDeadline",
        on_event: Callable[[dict[str, Any]], None] | None = None,
        **values: Any,
    ) -> Any:
        """The agent's answer; None, with `lost` set, where the connection broke or no answer came in time.

        Where the agent could not do it the answer is None too, and its words go to `failures`.
        """
        if self.lost:
            return None
        try:
            self._process.stdin.write(json.dumps({"do": do} | values) + "\n")
            self._process.stdin.flush()
        except OSError:
            pass  # its last words are read below
        deadline = time.monotonic() + timeout_seconds
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, min(0.5, deadline - time.monotonic(), patience.left())))
            except queue.Empty:
                if time.monotonic() < deadline and patience.left() > 0:
                    continue
                self.lost = f"no answer to {do!r} in time"
                return None
            if line is None:
                self._ended()
                return None
            if "answer" in line:
                patience.one_answered()
                return line["answer"]
            if "failed" in line:
                self.failures.append(f"{do}: {line['failed']}")
                return None
            if on_event:
                on_event(line["event"])

    def _ended(self) -> None:
        try:
            self.exit_code = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self.exit_code = None
        self._error_reader.join(timeout=2)
        self.lost = "".join(self._errors).strip() or f"the connection ended with exit code {self.exit_code}"

    def close(self) -> None:
        """The agent ends when its input does; ssh is given a moment to pass that on."""
        try:
            self._process.stdin.close()
        except OSError:
            pass
        try:
            self._process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Sessions:
    """The agents of all nodes, asked at the same time."""

    def __init__(self, nodes: list[Node], *, ssh: bool):
        self.all = {node.name: Session(node, ssh=ssh) for node in nodes}

    def __enter__(self) -> "Sessions":
        return self

    def __exit__(self, *error: Any) -> None:
        with ThreadPoolExecutor(max_workers=len(self.all)) as pool:
            list(pool.map(Session.close, self.all.values()))

    @property
    def standing(self) -> list[str]:
        return [name for name, session in self.all.items() if not session.lost]

    def ask(
        self,
        do: str,
        *,
        timeout_seconds: float = 20.0,
        grace_seconds: float = float("inf"),
        each: dict[str, dict[str, Any]] | None = None,
        on_event: Callable[[dict[str, Any]], None] | None = None,
        **values: Any,
    ) -> dict[str, Any]:
        """Answers by node name, of those that answered.

        Args:
            each: values that differ, by node name; only these nodes are asked.
            grace_seconds: how much longer than the first to answer the others may take.
        """
        patience = StragglerDeadline(grace_seconds)
        names = [name for name in self.standing if each is None or name in each]
        if not names:
            return {}
        with ThreadPoolExecutor(max_workers=len(names)) as pool:
            futures = {
                name: pool.submit(
                    self.all[name].request,
                    do,
                    timeout_seconds=timeout_seconds,
                    patience=patience,
                    on_event=on_event,
                    **values | (each or {}).get(name, {}),
                )
                for name in names
            }
            answers = {name: future.result() for name, future in futures.items()}
        return {
            name: answer
            for name, answer in answers.items()
            if not (self.all[name].lost or (answer is None and self.all[name].failures))
        }
