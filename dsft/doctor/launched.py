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

JOIN_SECONDS = 20  # for all ranks to come, after rank 0 has: srun and mpirun start them together
IDLE_SECONDS = 120  # a rank that hears nothing for so long exits


class LaunchedNodes:
    """As `ssh_nodes.SshNodes`, by way of the store: rank 0 calls `run`, all others `take_part` until it says False."""

    def __init__(self, store: dist.Store, ranks: dict[str, list[int]]):
        """Args: `ranks`: by host."""
        self._store, self._ranks, self._number = store, ranks, 0
        self._rank, self._host = int(os.environ["RANK"]), socket.gethostname()
        self._held = contextlib.ExitStack()  # what the phases leave open on this host
        self.lost: dict[str, Finding] = {}
        self.failures: list[Finding] = []

    def start(self, phase: str) -> None:
        """Nothing to do: these ranks have started, and have imported torch."""

    def ready(self, names: Iterable[str], **limits: float) -> dict[str, str]:
        return dict.fromkeys(names, "")

    def end(self, phase: str) -> None:
        """On rank 0: "facts" is over, or with "stop" the examination."""
        self.run(phase if phase == "stop" else "end", {host: {} for host in self._ranks})

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
        inputs = {host: values for host, values in inputs.items() if host not in self.lost}
        if phase == "facts":
            inputs = {host: values | {"ranks": self._ranks[host]} for host, values in inputs.items()}
        number, deadline, answers = self._number, time.monotonic() + timeout_seconds, {}
        self._store.set(f"question {number}", json.dumps({"phase": phase, "inputs": inputs}))
        if not self.take_part():
            return {}
        for host in inputs:
            said = json.loads(_wait(self._store, f"answer {number} {host}", deadline) or "null")
            if said is None and phase != "measure":  # the smoke test names its ranks itself
                look = f"look for its rank {self._ranks[host][0]} there: ps aux"
                self.lost[host] = finding("node-silent", host, f"no answer to {phase!r}", look)
            elif said and "failed" in said:
                words = f"{phase}: {said['failed']}"[:300]
                self.failures.append(finding("node-failed", host, words, "try it by hand there"))
            elif said:
                answers[host] = said["answer"]
        for rank in [rank for host in inputs for rank in self._ranks[host]] if on_event else []:
            for event in json.loads(_wait(self._store, f"events {number} {rank}", deadline) or "[]"):
                on_event(event)
        return answers

    def take_part(self) -> bool:
        """This rank's part in the next phase; False at the end."""
        key, number = f"question {self._number}", self._number
        self._store.wait([key], timedelta(seconds=IDLE_SECONDS))
        question = json.loads(self._store.get(key))
        phase, values, said = question["phase"], question["inputs"].get(self._host), {"answer": {}}
        leads = self._rank == self._ranks[self._host][0]
        self._number += 1
        if phase == "stop":
            self._held.close()
            return False
        if values is None:
            return True
        if phase == "measure":
            events: list[dict[str, Any]] = []

            def report_stage(**event: Any) -> None:  # stages go to the store as they begin, each time as a full list
                events.append(event)
                self._store.set(f"events {number} {self._rank}", json.dumps(events))

            smoke = dist.PrefixStore("smoke", self._store)
            take_part(int(os.environ["LOCAL_RANK"]), self._rank, values, report_stage, store=smoke)
            said = {"answer": {"code": 0, "last_words": ""}}
        elif phase == "end" and leads:
            self._held.close()
        elif leads:
            said = answer(phase, self._held, lambda: values)
        if leads:
            self._store.set(f"answer {number} {self._host}", json.dumps(said))
        return True


def _wait(store: dist.Store, key: str, deadline: float) -> str | None:
    """The value of a key as soon as it is there; None where it is not in time."""
    try:
        store.wait([key], timedelta(seconds=max(0.05, deadline - time.monotonic())))
    except (RuntimeError, dist.DistStoreError):
        return None
    return store.get(key).decode()


def examine_launched(*, argv: list[str], quick: bool, deliver: Callable[[Report], None]) -> NoReturn:
    """Examine the nodes of this launch; rank 0 hands the report to `deliver`. Every rank's process exits here, with the
    same exit code.
    """
    rank, world, host = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), socket.gethostname()
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    holds = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"  # else torchrun's agent does
    limit, idle = timedelta(seconds=JOIN_SECONDS), timedelta(seconds=IDLE_SECONDS)
    try:
        store = dist.TCPStore(address, port, is_master=holds, timeout=limit, wait_for_workers=False)
    except (RuntimeError, OSError) as error:
        # This rank reports it itself: rank 0 only sees that it is missing.
        why = f"does not reach rank 0 at {address}:{port}: is MASTER_ADDR right, is the port open?"
        if holds:
            why = f"cannot listen on port {port} ({one_line(error)[:200]}); set another MASTER_PORT"
        print(f"dsft: error: rank {rank} on {host} {why}", file=sys.stderr, flush=True)
        _leave(EXIT_USER_ERROR)
    store = dist.PrefixStore("dsft-doctor", store)
    store.set(f"host {rank}", host)
    if rank:
        code = EXIT_USER_ERROR
        with contextlib.suppress(RuntimeError):  # rank 0 is gone; it has said why
            store.wait(["ranks"], idle)
            hosts = json.loads(store.get("ranks"))
            if sum(map(len, hosts.values())) == world:
                nodes = LaunchedNodes(store, hosts)
                while nodes.take_part():
                    pass
            # Rank 0 prints first: a launcher kills all ranks as soon as one has exited with an error.
            store.wait(["code"], idle)
            code = int(store.get("code"))
        if code:
            time.sleep(2)
        _leave(code)

    hosts: dict[str, list[int]] = {}  # ranks by host, in the order of their first ranks
    missing, deadline = [], time.monotonic() + JOIN_SECONDS
    for other in range(world):
        name = _wait(store, f"host {other}", deadline)
        (missing if name is None else hosts.setdefault(name, [])).append(other)
    store.set("ranks", json.dumps(hosts))
    report = Report(nodes=list(hosts), quick=quick)
    if missing:
        came = "; ".join(f"{host}: {', '.join(map(str, ranks))}" for host, ranks in hosts.items())
        message = f"not connected to {address}:{port} within {JOIN_SECONDS} s; connected: {came}"
        fix = (
            "does MASTER_ADDR lead to rank 0's host from every node, and no firewall drop MASTER_PORT? dsft doctor"
            " --hostfile examines that through ssh"
        )
        where = f"{'rank' if len(missing) == 1 else 'ranks'} {', '.join(map(str, missing))}"
        report.findings.append(finding("missing-ranks", where, message, fix))
    else:
        nodes = LaunchedNodes(store, hosts)
        argv = [word for word in argv if not word.startswith("--local_rank")]  # deepspeed's launcher adds it
        listed = [Node(name=host, slots=len(ranks)) for host, ranks in hosts.items()]
        with contextlib.redirect_stdout(sys.stderr):
            examine_through(nodes, report, listed, argv=argv, port=None, master=address)
        nodes.end("stop")
    deliver(report)
    code = EXIT_USER_ERROR if report.has_errors else 0
    store.set("code", str(code))
    time.sleep(1)  # the others read it from this process
    _leave(code)


def _leave(code: int) -> NoReturn:
    """Without the interpreter's shutdown: a process group with a dead peer would hang there."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
