"""`dsft doctor` as ranks that srun, mpirun, torchrun, accelerate or deepspeed started: the same phases without ssh.

Rank 0 asks and delivers the report; the first rank of each host runs the phases, and in `measure` all ranks take part.
Questions and answers go through torch's TCPStore at MASTER_ADDR, not through a process group: that the ranks cannot
form one is what may have to be found out.
"""

import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, NoReturn

import torch.distributed as dist

from dsft.doctor.examine import Report, examine_through
from dsft.doctor.findings import Finding, finding
from dsft.doctor.phases import answer
from dsft.doctor.smoke import take_part
from dsft.errors import EXIT_USER_ERROR, one_line
from dsft.runtime.launcher_env import Node

JOIN_SECONDS = 20
"""For all ranks to come, after rank 0 has: srun and mpirun start them together."""
IDLE_SECONDS = 120
"""A rank that hears nothing for so long ends itself."""


class LaunchedNodes:
    """As `ssh_nodes.SshNodes`, by way of the store: rank 0 calls `run`, all others `take_part` until it says False."""

    def __init__(self, store: dist.Store, ranks: dict[str, list[int]]):
        """Args: `ranks`: by host."""
        self._store, self._ranks, self._number = store, ranks, 0
        self._rank, self._host = int(os.environ["RANK"]), socket.gethostname()
        self._held = contextlib.ExitStack()
        """What the phases leave open on this host."""
        self._silent: dict[str, Finding] = {}
        self._failures: list[Finding] = []

    def start(self, phase: str) -> None:
        """Nothing to do: these ranks have started, and have imported torch."""

    def ready(self, names: Iterable[str], **limits: float) -> dict[str, str]:
        return dict.fromkeys(names, "")

    def end(self, phase: str) -> None:
        self.run("end", {host: {} for host in self._ranks})

    def stop(self) -> None:
        """Rank 0: no more questions."""
        self._store.set(f"question {self._number}", json.dumps({"phase": "stop"}))
        self._held.close()

    def run(
        self,
        phase: str,
        inputs: dict[str, dict[str, Any]],
        *,
        timeout_seconds: float = 30.0,
        grace_seconds: float = 0.0,
        on_event: Callable[[dict[str, Any]], None] | None = None,
    ) -> dict[str, Any]:
        """On rank 0: run a phase on the hosts of `inputs`; answers by host, of those that answered."""
        inputs = {host: values for host, values in inputs.items() if host not in self._silent}
        if phase == "facts":
            inputs = {host: values | {"ranks": self._ranks[host]} for host, values in inputs.items()}
        number, deadline, answers = self._number, time.monotonic() + timeout_seconds, {}
        self._store.set(f"question {number}", json.dumps({"phase": phase, "inputs": inputs}))
        self.take_part()
        for host in inputs:
            said = self._wait(f"answer {number} {host}", deadline)
            if said is None and phase != "measure":  # the smoke test names its ranks itself
                look = f"look for its rank {self._ranks[host][0]} there: ps aux"
                self._silent[host] = finding("node-silent", host, f"no answer to {phase!r}", look)
            elif said and "failed" in said:
                words = f"{phase}: {said['failed']}"[:300]
                self._failures.append(finding("node-failed", host, words, "try it by hand there"))
            elif said:
                answers[host] = said["answer"]
        for rank in [rank for host in inputs for rank in self._ranks[host]] if on_event else []:
            for event in self._wait(f"events {number} {rank}", deadline) or []:
                on_event(event)
        return answers

    def _wait(self, key: str, deadline: float) -> Any:
        try:
            self._store.wait([key], timedelta(seconds=max(0.05, deadline - time.monotonic())))
        except (RuntimeError, dist.DistStoreError):
            return None
        return json.loads(self._store.get(key))

    def take_part(self) -> bool:
        """This rank's part in the next phase; False at the end."""
        key = f"question {self._number}"
        self._store.wait([key], timedelta(seconds=IDLE_SECONDS))
        question = json.loads(self._store.get(key))
        if question["phase"] == "stop":
            self._held.close()
            return False
        if self._host in question["inputs"]:
            phase, values, said = question["phase"], question["inputs"][self._host], {"answer": {}}
            if phase == "measure":
                self._measure(values)
                said = {"answer": {"code": 0, "last_words": ""}}
            if self._rank == self._ranks[self._host][0]:
                if phase == "end":
                    self._held.close()
                elif phase != "measure":
                    said = answer(phase, self._held, values)
                self._store.set(f"answer {self._number} {self._host}", json.dumps(said))
        self._number += 1
        return True

    def _measure(self, values: dict[str, Any]) -> None:
        """This rank's part in the smoke test; its stages go to the store as they begin, each time as a full list."""
        events: list[dict[str, Any]] = []

        def tell(**event: Any) -> None:
            events.append(event)
            self._store.set(f"events {self._number} {self._rank}", json.dumps(events))

        take_part(int(os.environ["LOCAL_RANK"]), self._rank, values, tell, store=dist.PrefixStore("smoke", self._store))

    def broken(self) -> list[Finding]:
        """Hosts that did not answer, or could not do what they were asked."""
        return [*self._silent.values(), *self._failures]


def examine_launched(*, argv: list[str], quick: bool, deliver: Callable[[Report], None]) -> NoReturn:
    """Examine the nodes of this launch; rank 0 hands the report to `deliver`. Every rank's process exits here, with the
    same exit code.
    """
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    holds = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"  # else torchrun's agent does
    limit = timedelta(seconds=JOIN_SECONDS)
    try:
        store = dist.TCPStore(address, port, is_master=holds, timeout=limit, wait_for_workers=False)
    except (RuntimeError, OSError) as error:
        # This rank reports it itself: rank 0 only sees that it is missing.
        why = f"does not reach rank 0 at {address}:{port}: is MASTER_ADDR right, is the port open?"
        if holds:
            why = f"cannot listen on port {port} ({one_line(error)[:200]}); set another MASTER_PORT"
        print(f"dsft: error: rank {rank} on {socket.gethostname()} {why}", file=sys.stderr, flush=True)
        _leave(EXIT_USER_ERROR)
    store = dist.PrefixStore("dsft-doctor", store)
    store.set(f"host {rank}", socket.gethostname())
    if rank:
        _follow(store, world)

    hosts: dict[str, list[int]] = {}  # ranks by host, in the order of their first ranks
    missing, deadline = [], time.monotonic() + JOIN_SECONDS
    for other in range(world):
        try:
            store.wait([f"host {other}"], timedelta(seconds=max(0.05, deadline - time.monotonic())))
            hosts.setdefault(store.get(f"host {other}").decode(), []).append(other)
        except (RuntimeError, dist.DistStoreError):
            missing.append(other)
    store.set("ranks", json.dumps(hosts))
    report = Report(nodes=list(hosts), quick=quick)
    if missing:
        came = "; ".join(f"{host}: {_numbers(ranks)}" for host, ranks in hosts.items())
        message = f"not connected to {address}:{port} within {JOIN_SECONDS} s; connected: {came}"
        fix = (
            "does MASTER_ADDR lead to rank 0's host from every node, and no firewall drop MASTER_PORT? dsft doctor"
            " --hostfile examines that through ssh"
        )
        where = f"{'rank' if len(missing) == 1 else 'ranks'} {_numbers(missing)}"
        report.findings.append(finding("missing-ranks", where, message, fix))
    else:
        nodes = LaunchedNodes(store, hosts)
        argv = [word for word in argv if not word.startswith("--local_rank")]  # deepspeed's launcher adds it
        listed = [Node(name=host, slots=len(ranks)) for host, ranks in hosts.items()]
        with contextlib.redirect_stdout(sys.stderr):
            examine_through(nodes, report, listed, argv=argv, port=None, master=address)
        nodes.stop()
    deliver(report)
    code = EXIT_USER_ERROR if report.has_errors else 0
    store.set("code", str(code))
    time.sleep(1)  # the others read it from this process
    _leave(code)


def _follow(store: dist.Store, world: int) -> NoReturn:
    """What every rank but the first does."""
    code = EXIT_USER_ERROR
    with contextlib.suppress(RuntimeError):  # rank 0 is gone; it has said why
        store.wait(["ranks"], timedelta(seconds=IDLE_SECONDS))
        hosts = json.loads(store.get("ranks"))
        if sum(map(len, hosts.values())) == world:
            nodes = LaunchedNodes(store, hosts)
            while nodes.take_part():
                pass
        # Rank 0 prints first: a launcher kills all ranks as soon as one has ended with an error.
        store.wait(["code"], timedelta(seconds=IDLE_SECONDS))
        code = int(store.get("code"))
    if code:
        time.sleep(2)
    _leave(code)


def _numbers(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))


def _leave(code: int) -> NoReturn:
    """Without the interpreter's shutdown: a process group with a dead peer would hang there."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
