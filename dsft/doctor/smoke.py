"""The doctor's ranks: those of the smoke test, and those of a launcher that examine without ssh.

    python -m dsft.doctor.smoke      the ranks of one node, started by the phase `measure`

imports torch, then waits for a line of JSON (`options` of `measure_all`, the master's address); forks a process per
slot (torch is imported once, CUDA not yet touched) and writes a line for each stage of each rank, so that whoever does
not answer can be named.

`examine_launched` is `dsft doctor` as ranks of srun, mpirun, torchrun, accelerate or deepspeed: rank 0 asks; the first
rank of each host runs the phases, and in `measure` all take part. Questions and answers go through torch's TCPStore at
MASTER_ADDR: that the ranks cannot form a process group is what may have to be found out.
"""

import contextlib
import json
import os
import signal
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from dsft.doctor.examine import ANSWER_SECONDS, MEASURE_SECONDS, Report, examine
from dsft.doctor.findings import Finding, finding
from dsft.doctor.links import SLOW, combine, slow_keys
from dsft.doctor.phases import answer, say
from dsft.errors import EXIT_USER_ERROR, one_line
from dsft.planner.calibration import all_reduce_bytes, exchange_rate, matmul_flops, seconds_of
from dsft.runtime.launcher_env import Node

LIFE_SECONDS = 40  # a rank that has not finished by then ends, wherever it waits; the head names it by the last it said
CHECKED = 2**18  # numbers in the sum that must be right
SUSPECTS = 4  # so many outliers are measured again, alone: next to others a link or a core may just have been busy
AGAIN = 5  # chances that an outlier is given; one that is slow takes 4 s
JOIN_SECONDS = 20  # for all ranks to come, after rank 0 has: srun and mpirun start them together
IDLE_SECONDS = 120  # a rank that hears nothing for so long exits


def main() -> None:
    say(event={"ready": True})
    line = sys.stdin.readline()
    if not line:
        return  # the test is not wanted
    options = json.loads(line)
    if options["devices"]:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, options["devices"]))
    children = []
    for local, rank in enumerate(options["nodes"][options["node"]]):
        if pid := os.fork():
            children.append(pid)
            continue
        signal.alarm(LIFE_SECONDS)
        os.environ |= {
            "RANK": str(rank),
            "WORLD_SIZE": str(sum(map(len, options["nodes"]))),
            "LOCAL_RANK": str(local),
            "MASTER_ADDR": options["master"],
            "MASTER_PORT": str(options["port"]),
        }
        is_done = take_part(local, rank, options, lambda **event: say(event=event))
        os._exit(0 if is_done else 1)  # no shutdown of the interpreter: other ranks may be gone already
    sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0 for pid in children))


def take_part(
    local: int, rank: int, options: dict[str, Any], report: Callable[..., None], *, store: dist.Store | None = None
) -> bool:
    """Join the process group as one rank and measure with the others. Returns whether it came to the end. `local`: its
    place among the node's ranks, and number of its GPU; `report` gets each stage as it begins, with the last one what
    was measured, or why it failed; `store`: where the ranks meet, by default at MASTER_ADDR and MASTER_PORT.
    """
    try:
        if options["interface"]:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", options["interface"])
        report(rank=rank, stage="starting")
        device = torch.device("cuda", local) if options["gpu"] else torch.device("cpu")
        if options["gpu"]:
            torch.cuda.set_device(local)
        torch.set_num_threads(1)  # cores are compared, not how many of them the slots leave to each rank
        report(rank=rank, stage="joining the others")
        world = sum(map(len, options["nodes"]))
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if options["gpu"] else "gloo",
            timeout=timedelta(seconds=options["group_seconds"]),
            **({"store": store, "rank": rank, "world_size": world} if store else {}),
        )
        everyone = measure_all(rank, device, options, lambda stage: report(rank=rank, stage=stage))
        report(rank=rank, stage="done", measured=everyone[rank])
        dist.barrier()
    except (RuntimeError, ValueError, OSError) as error:  # torch's errors of the network and of CUDA are RuntimeErrors
        report(rank=rank, failed=" ".join(f"{type(error).__name__}: {error}".split())[:600])
        return False
    return True


def measure_all(
    rank: int, device: torch.device, options: dict[str, Any], report: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Every rank's measurements, on every rank, for `links.combine`; all of it is collective. `options`: "node": this
    rank's; "nodes": the ranks of each; "rounds": pairs of nodes that exchange side by side.
    """
    node, nodes, world = options["node"], options["nodes"], dist.get_world_size()
    mine: dict[str, Any] = {"pairs": {}, "again": [], "slow": [], "sent": 0, "sent_again": 0, "inside": 0.0}

    def gather(value: Any) -> list[Any]:
        everyone: list[Any] = [None] * world
        dist.all_gather_object(everyone, value)
        return everyone

    def measure_pair(pair: tuple[int, int]) -> float:
        """Exchange with the rank of the same number on the pair's other node, if it has one; keep the better of this
        and an earlier time. Returns the bytes per second that this rank got.
        """
        other, local = pair[pair[0] == node], nodes[node].index(rank)
        if local >= len(nodes[other]):
            return 0.0
        rate, seconds = exchange_rate(nodes[other][local], device)
        before = mine["pairs"].get(other, (0.0, seconds))
        mine["pairs"][other] = (max(rate, before[0]), min(seconds, before[1]))
        return rate

    def rate_alone(pair: tuple[int, int]) -> float:
        """In the slower direction, over all ranks of the pair; the same on every rank."""
        rates = gather(measure_pair(pair) if node in pair else 0.0)
        return min(sum(rates[rank] for rank in nodes[of]) for of in pair)

    before = tcp_segments()
    report("adding up numbers of all ranks")
    # An all-reduce against plain arithmetic: whole numbers below 2^24 are exact in fp32.
    numbers = torch.arange(CHECKED, dtype=torch.int64)
    expected = sum((numbers * (other + 1)) % 97 for other in range(world))
    total = ((numbers * (rank + 1)) % 97).to(device, torch.float32)
    dist.all_reduce(total)
    mine["wrong"] = not torch.equal(total.cpu().to(torch.int64), expected)
    few = torch.zeros(16, device=device)
    mine["collective_seconds"] = statistics.median(seconds_of(lambda: dist.all_reduce(few), device, 10))
    report("exchanging with other nodes")
    for pair in (pair for pairs in options["rounds"] for pair in pairs if node in pair):
        measure_pair(pair)
    report("exchanging inside the node")
    if len(nodes[node]) > 1:
        # The only groups that are made: torch names such a group by how many a rank has, which must be the same for all
        # its members.
        mine["inside"] = all_reduce_bytes(device, dist.new_group(nodes[node], use_local_synchronization=True))
    report("multiplying matrices")
    dist.barrier()
    mine["flops"] = matmul_flops(device)

    report("measuring outliers again")
    total = combine(gather(mine), nodes)
    rates = total.pair_rates
    reference = max(rates, key=rates.__getitem__, default=(0, 0))
    for pair in slow_keys(rates, reference=rates.get(reference, 0.0))[:SUSPECTS]:
        # In turns with the fastest pair while all others wait: what keeps the cores of all nodes busy makes both slow.
        is_slow, fastest, references = True, 0.0, []
        while is_slow and len(references) < AGAIN:
            references.append(rate_alone(reference))
            fastest = max(fastest, rate_alone(pair))
            is_slow = fastest < SLOW * statistics.median(references)
        if node in pair:
            other = pair[pair[0] == node]
            mine["again"].append(other)
            mine["slow"] += [other] * is_slow
    for suspect in slow_keys(total.flops)[:SUSPECTS]:
        for _ in range(AGAIN if suspect == rank else 0):
            time.sleep(0.05)
            mine["flops"] = max(mine["flops"], matmul_flops(device))
        dist.barrier()
    mine["sent"], mine["sent_again"] = (now - then for now, then in zip(tcp_segments(), before, strict=True))
    return gather(mine)


def tcp_segments(proc: Path = Path("/proc/net")) -> tuple[int, int]:
    """(sent, lost and sent again) of TCP by this machine so far: OutSegs and RetransSegs (RFC 4022), without those that
    the other side had already (duplicate SACKs, RFC 3708): a busy machine answers late, and loses nothing.
    """
    counts: dict[str, int] = {}
    for file, protocol in (("snmp", "Tcp:"), ("netstat", "TcpExt:")):
        lines = (proc / file).read_text(encoding="utf-8").splitlines()
        names, values = (line.split()[1:] for line in lines if line.startswith(f"{protocol} "))
        counts |= zip(names, map(int, values), strict=True)
    return counts["OutSegs"], max(0, counts["RetransSegs"] - counts["TCPDSACKRecv"])


class LaunchedNodes:
    """As `examine.SshNodes`, by way of the store: rank 0 calls `run`, all others `take_part` until it says False."""

    def __init__(self, store: dist.Store, ranks: dict[str, list[int]]):
        """Args: `ranks`: by host."""
        self._store, self._ranks, self._number = store, ranks, 0
        self._rank, self._host = int(os.environ["RANK"]), socket.gethostname()
        self._held = contextlib.ExitStack()  # what the phases leave open on this host
        self.lost: dict[str, Finding] = {}
        self.failures: list[Finding] = []
        self.events: list[dict[str, Any]] = []

    def start(self, phase: str) -> None:
        """Nothing to do: these ranks have started, and have imported torch."""

    def ready(self, names: Iterable[str]) -> dict[str, str]:
        return dict.fromkeys(names, "")

    def end(self, phase: str) -> None:
        """On rank 0: "facts" is over, or with "stop" the examination."""
        self.run(phase if phase == "stop" else "end", {host: {} for host in self._ranks})

    def run(self, phase: str, inputs: dict[str, dict[str, Any]]) -> dict[str, Any]:
        """On rank 0: run a phase on the hosts of `inputs`; answers by host, of those that answered."""
        inputs = {host: values for host, values in inputs.items() if host not in self.lost}
        if phase == "facts":
            inputs = {host: values | {"ranks": self._ranks[host]} for host, values in inputs.items()}
        deadline = time.monotonic() + (MEASURE_SECONDS if phase == "measure" else ANSWER_SECONDS)
        number, answers = self._number, {}
        self._store.set(f"question {number}", json.dumps({"phase": phase, "inputs": inputs}))
        if not self.take_part():
            return {}
        for host in inputs:
            said = json.loads(_wait(self._store, f"answer {number} {host}", deadline) or "null")
            if said is None and phase != "measure":  # the smoke test names its ranks itself
                look = f"look for its rank {self._ranks[host][0]} there: ps aux"
                self.lost[host] = finding("node-silent", host, f"no answer to {phase!r}", look)
            elif said and "failed" in said:
                self.failures.append(finding("node-failed", host, said["failed"], "try it by hand there"))
            elif said:
                answers[host] = said["answer"]
        for rank in [rank for host in inputs for rank in self._ranks[host]] if phase == "measure" else []:
            self.events += json.loads(_wait(self._store, f"events {number} {rank}", deadline) or "[]")
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
    if missing:
        came = "; ".join(f"{host}: {', '.join(map(str, ranks))}" for host, ranks in hosts.items())
        message = f"not connected to {address}:{port} within {JOIN_SECONDS} s; connected: {came}"
        fix = (
            "does MASTER_ADDR lead to rank 0's host from every node, and no firewall drop MASTER_PORT? dsft doctor"
            " --hostfile examines that through ssh"
        )
        where = f"{'rank' if len(missing) == 1 else 'ranks'} {', '.join(map(str, missing))}"
        report = Report(nodes=list(hosts), quick=quick, findings=[finding("missing-ranks", where, message, fix)])
    else:
        nodes = LaunchedNodes(store, hosts)
        argv = [word for word in argv if not word.startswith("--local_rank")]  # deepspeed's launcher adds it
        listed = [Node(name=host, slots=len(ranks)) for host, ranks in hosts.items()]
        with contextlib.redirect_stdout(sys.stderr):
            report = examine(nodes, listed, argv=argv, quick=quick, port=None, master=address)
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


if __name__ == "__main__":
    main()
