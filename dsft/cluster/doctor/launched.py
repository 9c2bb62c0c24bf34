"""`dsft doctor` as ranks that srun, mpirun, torchrun, accelerate or deepspeed started: the same examination without
ssh.

Rank 0 asks and prints; of each host the first rank answers, and in the smoke test all. Questions and answers go through
torch's TCPStore at
MASTER_ADDR, not through a process group: that the ranks cannot form one is what may have to be found out.
"""

import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NoReturn

import torch.distributed as dist

from dsft.cluster.doctor.agent import Agent
from dsft.cluster.doctor.examine import examine_through
from dsft.cluster.doctor.findings import Report, finding
from dsft.cluster.doctor.smoke import take_part
from dsft.errors import EXIT_USER_ERROR
from dsft.runtime.hostfile import Node

JOIN_SECONDS = 20
"""For all ranks to come, after rank 0 has: srun and mpirun start them together."""
IDLE_SECONDS = 120
"""A rank that hears nothing for so long ends itself."""
STOP = {"do": "stop"}


class LaunchedNodes:
    """As `Sessions`: carries rank 0's questions to the first rank of each host, by way of the store."""

    def __init__(self, store: dist.Store, ranks: dict[str, list[int]]):
        self.store, self.ranks, self.number = store, ranks, 0
        self.rank, self.host = int(os.environ["RANK"]), socket.gethostname()
        self.agent = Agent()
        self.all: dict[str, Any] = {}
        self.silent: dict[str, str] = {}
        """Host -> the question that it did not answer."""
        self.failures: list[tuple[str, str]] = []

    @property
    def standing(self) -> list[str]:
        return [host for host in self.ranks if host not in self.silent]

    def ask(
        self,
        do: str,
        *,
        timeout_seconds: float = 20.0,
        grace_seconds: float = 0.0,
        each: dict[str, dict[str, Any]] | None = None,
        on_event: Callable[[dict[str, Any]], None] | None = None,
        **values: Any,
    ) -> dict[str, Any]:
        """On rank 0: answers by host."""
        hosts = [host for host in self.standing if each is None or host in each]
        self.store.set(
            f"question {self.number}",
            json.dumps({"do": do, "each": {host: values | (each or {}).get(host, {}) for host in hosts}}),
        )
        self.answer()
        question, deadline, answers = self.number - 1, time.monotonic() + timeout_seconds, {}
        for host in hosts:
            answer = self._wait(f"answer {question} {host}", deadline)
            if answer is None:
                self.silent.setdefault(host, do)
            elif "failed" in answer:
                self.failures.append((host, f"{do}: {answer['failed']}"))
            else:
                answers[host] = answer["answer"]
        for rank in [rank for ranks in self.ranks.values() for rank in ranks] if on_event else []:
            for event in self._wait(f"events {question} {rank}", deadline) or []:
                on_event(event | {"rank": rank})
        return answers

    def _wait(self, key: str, deadline: float) -> Any:
        try:
            self.store.wait([key], timedelta(seconds=max(0.05, deadline - time.monotonic())))
        except (RuntimeError, dist.DistStoreError):
            return None
        return json.loads(self.store.get(key))

    def answer(self) -> bool:
        """Take this rank's part in the next question; False at the end."""
        key = f"question {self.number}"
        self.store.wait([key], timedelta(seconds=IDLE_SECONDS))
        question = json.loads(self.store.get(key))
        self.number += 1
        if question == STOP:
            return False
        mine = question["each"].get(self.host)
        if mine is None:
            return True
        if question["do"] == "smoke":
            self._smoke(mine)
        if self.rank == self.ranks[self.host][0]:
            self.store.set(f"answer {self.number - 1} {self.host}", json.dumps(self._do(question["do"], mine)))
        return True

    def _do(self, do: str, values: dict[str, Any]) -> dict[str, Any]:
        try:
            if do == "smoke":
                return {"answer": {"code": 0, "last_words": ""}}
            if do in ("warm_up", "ready"):
                return {"answer": None}  # torch is here already
            answer = getattr(self.agent, do)(**values)
        except Exception as error:  # becomes a finding
            return {"failed": f"{type(error).__name__}: {error}"}
        return {"answer": answer | {"ranks": self.ranks[self.host]} if do == "hello" else answer}

    def _smoke(self, options: dict[str, Any]) -> None:
        """This rank's part; its stages go to the store as they begin, each time as a whole list."""
        events: list[dict[str, Any]] = []

        def tell(**content: Any) -> None:
            events.append(content)
            self.store.set(f"events {self.number - 1} {self.rank}", json.dumps(events))

        try:
            take_part(
                int(os.environ["LOCAL_RANK"]), self.rank, options, tell, store=dist.PrefixStore("smoke", self.store)
            )
        except (RuntimeError, ValueError, OSError) as error:
            tell(failed=" ".join(f"{type(error).__name__}: {error}".split())[:600])


def examine_launched(*, argv: list[str], quick: bool, deliver: Callable[[Report], None]) -> NoReturn:
    """Examine the nodes of this launch; rank 0 hands the report to `deliver`. Every rank's process ends here, with the
    same exit code.
    """
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    argv = [word for word in argv if not word.startswith("--local_rank")]  # deepspeed's launcher adds it
    store = _meet(rank)
    store.set(f"host {rank}", socket.gethostname())
    if rank:
        _follow(store)
    hosts, missing = _wait_for_ranks(store, world)
    store.set("ranks", json.dumps(hosts))
    report = Report(nodes=list(hosts), quick=quick)
    if missing:
        came = "; ".join(f"{host}: {_numbers(ranks)}" for host, ranks in hosts.items())
        report.findings.append(
            finding(
                "missing-ranks",
                f"{'ranks' if len(missing) > 1 else 'rank'} {_numbers(missing)}",
                f"did not come to {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']} within {JOIN_SECONDS} s;"
                f" there are {came}",
                "does MASTER_ADDR lead to rank 0's host from every node, and no firewall drop MASTER_PORT? dsft doctor"
                " --hostfile examines that through ssh",
            )
        )
    else:
        nodes = LaunchedNodes(store, hosts)
        with contextlib.redirect_stdout(sys.stderr):
            examine_through(
                nodes,
                report,
                [Node(name=host, slots=len(ranks)) for host, ranks in hosts.items()],
                argv=argv,
                port=None,
                port_asked=False,
                master=os.environ["MASTER_ADDR"],
            )
        report.findings = [
            *(
                finding(
                    "node-silent", host, f"no answer to {do!r}", f"look for its rank {hosts[host][0]} there: ps aux"
                )
                for host, do in nodes.silent.items()
                if do != "smoke"
            ),
            *(finding("node-failed", host, words[:300], "try it by hand there") for host, words in nodes.failures),
            *report.findings,
        ]
        store.set(f"question {nodes.number}", json.dumps(STOP))
    deliver(report)
    code = EXIT_USER_ERROR if report.has_errors else 0
    store.set("code", str(code))
    time.sleep(1)  # the others read it from this process
    _leave(code)


def _follow(store: dist.Store) -> NoReturn:
    """What every rank but the first does."""
    code = EXIT_USER_ERROR
    with contextlib.suppress(RuntimeError):  # rank 0 is gone; it has said why
        store.wait(["ranks"], timedelta(seconds=IDLE_SECONDS))
        hosts = json.loads(store.get("ranks"))
        if sum(map(len, hosts.values())) == int(os.environ["WORLD_SIZE"]):
            nodes = LaunchedNodes(store, hosts)
            while nodes.answer():
                pass
        # Rank 0 prints first: a launcher kills all ranks as soon as one has ended with an error.
        store.wait(["code"], timedelta(seconds=IDLE_SECONDS))
        code = int(store.get("code"))
    if code:
        time.sleep(2)
    _leave(code)


def _meet(rank: int) -> dist.Store:
    """The store at MASTER_ADDR; under torchrun its agent holds it. A rank that does not get there says so itself: rank
    0 only sees that it is missing.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    holds = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        store = dist.TCPStore(
            host, port, is_master=holds, timeout=timedelta(seconds=JOIN_SECONDS), wait_for_workers=False
        )
    except (RuntimeError, OSError) as error:
        why = (
            f"cannot listen on port {port} ({' '.join(str(error).split())[:200]}); set another MASTER_PORT"
            if holds
            else f"does not reach rank 0 at {host}:{port}: is MASTER_ADDR right, is the port open?"
        )
        print(f"dsft: error: rank {rank} on {socket.gethostname()} {why}", file=sys.stderr, flush=True)
        _leave(EXIT_USER_ERROR)
    return dist.PrefixStore("dsft-doctor", store)


def _wait_for_ranks(store: dist.Store, world: int) -> tuple[dict[str, list[int]], list[int]]:
    """(ranks by host, in the order of their first ranks; ranks that did not come)."""
    hosts: dict[str, list[int]] = {}
    missing, deadline = [], time.monotonic() + JOIN_SECONDS
    for rank in range(world):
        try:
            store.wait([f"host {rank}"], timedelta(seconds=max(0.05, deadline - time.monotonic())))
            hosts.setdefault(store.get(f"host {rank}").decode(), []).append(rank)
        except (RuntimeError, dist.DistStoreError):
            missing.append(rank)
    return hosts, missing


def _numbers(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))


def _leave(code: int) -> NoReturn:
    """Without the interpreter's shutdown: a process group with a dead peer would hang there."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
