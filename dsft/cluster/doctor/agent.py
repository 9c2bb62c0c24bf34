"""The doctor's part on a node: `python -m dsft.cluster.doctor.agent`, started through ssh, answers the head over its
standard
input and output.

Each line in is a JSON command {"do": ...}, each line out begins with MARK (login scripts may print too). It ends when
its input ends, that is
when the head or the connection is gone, and takes its children along. Never imports torch; the smoke test's process
does, in the background.
"""

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

from dsft.cluster.doctor import paths
from dsft.cluster.doctor.facts import node_facts, slots_here
from dsft.cluster.doctor.ports import Listener, connect_all, listen, outgoing_address, resolve

MARK = "dsft-doctor:"
LIFE_SECONDS = 180
"""An agent that is older ends itself, whatever the connection says."""


class Agent:
    """What this node can be asked to do: one method per command, each takes the command's values and returns the
    answer.
    """

    def __init__(self):
        self.listeners: list[Listener] = []
        self.smoke_process: subprocess.Popen | None = None
        self.smoke_errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115

    def hello(self, *, slots: int | None, master_port: int | None, folders: list[str]) -> dict[str, Any]:
        """Facts, and two open ports: the master's where one is asked for, and another."""
        facts = node_facts(folders=folders)
        facts |= {"slots": slots or slots_here(facts), "master_port_taken": ""}
        if master_port:
            master, facts["master_port_taken"] = listen(master_port)
            self.listeners += [master] if master else []
        other = Listener()
        self.listeners.append(other)
        return facts | {"open_port": other.port}

    def clock(self) -> float:
        return time.time()

    def reach(self, *, targets: list[dict[str, Any]], names: list[str], master: str) -> dict[str, Any]:
        return {"targets": connect_all(targets), "names": resolve(names), "outgoing": outgoing_address(master)}

    def close_ports(self) -> None:
        for listener in self.listeners:
            listener.close()
        self.listeners.clear()

    def contents(self, *, sources: list[str]) -> dict[str, Any]:
        return paths.contents(sources)

    def cached(self, *, names: list[str]) -> dict[str, bool]:
        return paths.cached(names)

    def output(self, *, folder: str, probe: str) -> dict[str, str]:
        return {"writing": paths.try_writing(folder), "probe": paths.leave_probe(folder, probe) if probe else ""}

    def sees(self, *, path: str) -> bool:
        return paths.sees(path)

    def remove(self, *, path: str) -> None:
        os.unlink(path)

    def compiles(self) -> str:
        """Why a small program with Python's headers cannot be compiled; empty where it can. DeepSpeed compiles so at
        first use.
        """
        from dsft.cluster.doctor.compiling import compile_error

        return compile_error()

    def warm_up(self, *, devices: list[int]) -> None:
        """Start the smoke test's process, which imports torch while other things are asked."""
        chosen = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, devices))} if devices else {}
        self.smoke_process = subprocess.Popen(
            [sys.executable, "-m", "dsft.cluster.doctor.smoke"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.smoke_errors,
            text=True,
            env=os.environ | chosen,
            start_new_session=True,
        )

    def ready(self) -> str | None:
        """Wait until torch is imported there; else the process's last words."""
        while line := self.smoke_process.stdout.readline():
            if line.startswith(MARK):
                return None
        return self._last_words() or f"exit code {self.smoke_process.wait()}"

    def _last_words(self) -> str:
        self.smoke_errors.seek(0)
        return self.smoke_errors.read()[-2000:]

    def smoke(self, **options: Any) -> dict[str, Any]:
        """Run this node's ranks; what they say goes on to the head as it comes."""
        process = self.smoke_process
        try:
            process.stdin.write(json.dumps(options) + "\n")
            process.stdin.flush()
        except BrokenPipeError:
            pass  # its exit code and last words say why
        for line in process.stdout:
            if line.startswith(MARK):
                _say({"event": json.loads(line[len(MARK) :])})
        return {"code": process.wait(), "last_words": self._last_words()}

    def stop(self) -> None:
        if self.smoke_process and self.smoke_process.poll() is None:
            os.killpg(self.smoke_process.pid, signal.SIGKILL)  # its ranks too


def _say(content: dict[str, Any]) -> None:
    sys.stdout.write(MARK + json.dumps(content) + "\n")
    sys.stdout.flush()


def _read_commands(commands: queue.Queue, agent: Agent) -> None:
    for line in sys.stdin:
        commands.put(json.loads(line))
    agent.stop()
    os._exit(0)


def main() -> None:
    agent, commands = Agent(), queue.Queue()
    threading.Thread(target=_read_commands, args=(commands, agent), daemon=True).start()
    deadline = time.monotonic() + LIFE_SECONDS
    try:
        while time.monotonic() < deadline:
            try:
                command = commands.get(timeout=1)
            except queue.Empty:
                continue
            try:
                _say({"answer": getattr(agent, command.pop("do"))(**command)})
            except Exception as error:  # the head reports it as a finding; the next command may well work
                _say({"failed": f"{type(error).__name__}: {error}"})
    finally:
        agent.stop()
        os._exit(0)


if __name__ == "__main__":
    main()
