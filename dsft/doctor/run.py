"""The examination: facts of every node, then sums and rates between all ranks.

Without a launcher, one process a node is started here or through ssh: `python -m dsft.doctor.run node`. It prints its
facts as a line of JSON. Given the job's address on its input, it starts its ranks, which join a process group as a
training does, and prints what they measured. It exits when its input ends.
Under a launcher (srun, mpirun, torchrun, deepspeed, accelerate) each rank examines its node and measures.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any

from dsft.doctor.between import Finding, check_between, check_measured, check_node
from dsft.doctor.facts import node_facts, probe_file
from dsft.errors import one_line
from dsft.runtime.launcher_env import Node, ssh_command, ssh_problem

MARK = "dsft-doctor:"
"""Before each line of JSON: shells that log in may print lines too."""
FACTS_SECONDS = 30.0
JOIN_SECONDS = 60
MEASURE_SECONDS = 120.0
REDUCED_BYTES = 64 * 2**20
MATRIX = 2048


@dataclass(kw_only=True)
class Report:
    """What an examination found."""

    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By node, of the nodes that answered."""
    measured: list[dict[str, Any]] = field(default_factory=list)
    """Of each rank; empty if nothing was measured."""
    findings: list[Finding] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def has_errors(self) -> bool:
        return any(finding.severity == "error" for finding in self.findings)

    def as_dict(self) -> dict[str, Any]:
        """Returns the report for --json."""
        return {"ok": not self.has_errors} | asdict(self)


def examine(
    nodes: list[Node], *, variables: dict[str, str] | None, output_dir: str, port: int | None, master: str, quick: bool
) -> Report:
    """Examines nodes from here.

    Args:
        nodes: all nodes of the job.
        variables: environment of the processes that ssh starts; None: the only node is this machine.
        output_dir: the run's folder; empty: none.
        port: that rank 0 will listen on; None: a free one.
        master: address of rank 0; empty: the first address of the first node.
        quick: without compiling, and without measuring.
    """
    start = time.monotonic()
    report = Report()
    with contextlib.ExitStack() as held:
        processes = {node.name: held.enter_context(NodeProcess(node.name, variables)) for node in nodes}
        questions = {
            node.name: {"slots": node.slots, "output_dir": output_dir, "quick": quick, "port": None} for node in nodes
        }
        questions[nodes[0].name]["port"] = port
        answers = _ask_all(processes, questions, FACTS_SECONDS)
        offsets = {}
        for name, answer in answers.items():
            if isinstance(answer, Finding):
                report.findings.append(answer)
            else:
                report.facts[name] = answer
                offsets[name] = answer["clock"] - answer.pop("received")
        for name, facts in report.facts.items():
            report.findings += check_node(name, facts)
        report.findings += check_between(report.facts, offsets)
        if not report.has_errors and (len(nodes) > 1 or not quick):
            _measure(processes, report, master, port, quick=quick)
    report.seconds = time.monotonic() - start
    return report


def _measure(
    processes: dict[str, "NodeProcess"], report: Report, master: str, port: int | None, *, quick: bool
) -> None:
    """Lets all ranks join a process group and measure, and looks for the first node's file on the others."""
    first = next(iter(report.facts.values()))
    world = sum(facts["slots"] for facts in report.facts.values())
    address = master or (first["addresses"] or ["127.0.0.1"])[0] if len(processes) > 1 else "127.0.0.1"
    if port is None:
        with contextlib.closing(socket.socket()) as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
    questions = {}
    rank = 0
    for name, facts in report.facts.items():
        environment = {"MASTER_ADDR": address, "MASTER_PORT": str(port), "WORLD_SIZE": str(world)}
        questions[name] = {"first": rank, "ranks": facts["slots"], "environment": environment, "quick": quick}
        questions[name]["probe"] = first["probe"]
        rank += facts["slots"]
    answers = _ask_all(processes, questions, MEASURE_SECONDS)
    for name, answer in answers.items():
        if isinstance(answer, Finding):
            report.findings.append(answer)
            continue
        report.measured += answer["measured"]
        if answer["error"]:
            fix = f"can it reach {address}, port {port}? Look for a firewall, or name another --master_addr"
            report.findings.append(Finding(code="network-blocked", where=name, message=answer["error"], fix=fix))
        if first["probe"] and not answer["sees_probe"]:
            message = "does not see the output folder of the first node"
            fix = "name a folder that all nodes share as output_dir"
            report.findings.append(Finding(code="output-not-shared", where=name, message=message, fix=fix))
    if report.measured and not quick:
        report.findings += check_measured(report.measured)


class NodeProcess:
    """The examination's process on one node, here or through ssh."""

    def __init__(self, name: str, variables: dict[str, str] | None):
        words = [sys.executable, "-m", "dsft.doctor.run", "node"]
        self.name = name
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            words if variables is None else ssh_command(name, words, variables),
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            text=True,
            errors="replace",
            start_new_session=True,
        )

    def __enter__(self) -> "NodeProcess":
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        try:
            self.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def ask(self, question: dict[str, Any], seconds: float) -> dict[str, Any] | Finding:
        """Returns the node's answer, or the finding why there is none."""
        timer = threading.Timer(seconds, self.process.kill)
        timer.start()
        try:
            with contextlib.suppress(OSError):  # it has exited; its last words say why
                self.process.stdin.write(json.dumps(question) + "\n")
                self.process.stdin.flush()
            for line in self.process.stdout:
                if line.startswith(MARK):
                    return json.loads(line.removeprefix(MARK)) | {"received": time.time()}
            is_late = not timer.is_alive()
        finally:
            timer.cancel()
        words = self.process.stderr.read().strip()
        code = self.process.wait()
        if is_late:
            message = f"no answer within {seconds:.0f} s; {words[-200:]}".rstrip("; ")
            return Finding(code="node-silent", where=self.name, message=message, fix=f"ssh {self.name}: try it by hand")
        name, message, fix = ssh_problem(self.name, words, code)
        return Finding(code=name, where=self.name, message=message, fix=fix)


def _ask_all(
    processes: dict[str, NodeProcess], questions: dict[str, dict[str, Any]], seconds: float
) -> dict[str, dict[str, Any] | Finding]:
    """Asks all nodes at the same time; returns the answers in the order of the questions."""
    with ThreadPoolExecutor(max_workers=len(questions)) as pool:
        waiting = {name: pool.submit(processes[name].ask, question, seconds) for name, question in questions.items()}
        return {name: answer.result() for name, answer in waiting.items()}


# ---- on a node


def serve_node() -> None:
    """Answers the examination on this node: first its facts, then what its ranks measure."""
    question = json.loads(sys.stdin.readline())
    with probe_file(question["output_dir"]) as probe:
        facts = node_facts(**question) | {"probe": probe}
        print(MARK + json.dumps(facts), flush=True)
        if line := sys.stdin.readline():
            print(MARK + json.dumps(measure_here(json.loads(line))), flush=True)
            sys.stdin.readline()


def measure_here(question: dict[str, Any]) -> dict[str, Any]:
    """Starts this node's ranks and returns what they measured, and the error of one that failed."""
    ranks = []
    for local in range(question["ranks"]):
        variables = os.environ | question["environment"]
        variables |= {"RANK": str(question["first"] + local), "LOCAL_RANK": str(local)}
        words = [sys.executable, "-m", "dsft.doctor.run", "rank", *["quick"] * question["quick"]]
        rank = subprocess.Popen(words, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        ranks.append(rank)
    measured = []
    error = ""
    for rank in ranks:
        output, words = rank.communicate()
        lines = [line for line in output.splitlines() if line.startswith(MARK)]
        if lines:
            measured.append(json.loads(lines[-1].removeprefix(MARK)))
        elif not error:
            error = (words.strip().splitlines() or [f"a rank ended with exit code {rank.returncode}"])[-1][:400]
    return {
        "measured": measured,
        "error": error,
        "sees_probe": not question["probe"] or os.path.exists(question["probe"]),
    }


# ---- on a rank


def measure_rank(*, quick: bool) -> dict[str, Any]:
    """Joins the process group of RANK and WORLD_SIZE, and measures with the other ranks.

    Returns:
        rank, host, whether the sum of an all-reduce was wrong, its bytes per second, flops of a matrix product.
    """
    import torch
    import torch.distributed as dist

    has_gpu = torch.cuda.is_available() and os.environ.get("DS_ACCELERATOR") != "cpu"
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if has_gpu else torch.device("cpu")
    if has_gpu:
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if has_gpu else "gloo", timeout=timedelta(seconds=JOIN_SECONDS))
    rank = dist.get_rank()
    world = dist.get_world_size()
    numbers = torch.full((1024,), float(rank + 1), device=device)
    dist.all_reduce(numbers)
    is_wrong = not torch.equal(numbers, torch.full_like(numbers, world * (world + 1) / 2))
    measured = {"rank": rank, "host": socket.gethostname(), "is_wrong": is_wrong, "flops": 0.0, "bytes_per_second": 0.0}
    if quick:
        return measured

    def seconds_of(operation: Any) -> float:
        operation()
        best = float("inf")
        for _ in range(3):
            if has_gpu:
                torch.cuda.synchronize()
            start = time.perf_counter()
            operation()
            if has_gpu:
                torch.cuda.synchronize()
            best = min(best, time.perf_counter() - start)
        return best

    block = torch.zeros(REDUCED_BYTES // 4, device=device)
    measured["bytes_per_second"] = REDUCED_BYTES / seconds_of(lambda: dist.all_reduce(block))
    matrix = torch.ones(MATRIX, MATRIX, device=device, dtype=torch.bfloat16 if has_gpu else torch.float32)
    dist.barrier()
    measured["flops"] = 2 * MATRIX**3 / seconds_of(lambda: matrix @ matrix)
    dist.barrier()
    return measured


def examine_launched(*, output_dir: str, quick: bool) -> Report:
    """Examines the nodes of this launch; collective over all ranks. Every rank returns the report.

    Raises:
        RuntimeError: a rank did not join in time; torch's error names how many did.
    """
    import torch.distributed as dist

    start = time.monotonic()
    measured = measure_rank(quick=quick)
    rank = dist.get_rank()
    world = dist.get_world_size()
    hosts: list[str] = [""] * world
    dist.all_gather_object(hosts, socket.gethostname())
    leads = hosts.index(hosts[rank]) == rank
    with probe_file(output_dir if rank == 0 else "") as probe:
        probes = [probe]
        dist.broadcast_object_list(probes, src=0)
        answer = {"measured": measured, "sees_probe": not probes[0] or os.path.exists(probes[0])}
        if leads:
            answer["facts"] = node_facts(slots=hosts.count(hosts[rank]), output_dir=output_dir, quick=quick)
        answers: list[dict[str, Any]] = [{}] * world
        dist.all_gather_object(answers, answer)
    report = Report(measured=[each["measured"] for each in answers])
    for host, each in zip(hosts, answers, strict=True):
        if "facts" not in each:
            continue
        report.facts[host] = each["facts"]
        report.findings += check_node(host, each["facts"])
        if not each["sees_probe"]:
            message = "does not see the output folder of the first node"
            fix = "name a folder that all nodes share as output_dir"
            report.findings.append(Finding(code="output-not-shared", where=host, message=message, fix=fix))
    report.findings += check_between(report.facts, {})
    if not quick:
        report.findings += check_measured(report.measured)
    report.seconds = time.monotonic() - start
    return report


if __name__ == "__main__":
    if sys.argv[1] == "node":
        serve_node()
    else:
        try:
            print(MARK + json.dumps(measure_rank(quick="quick" in sys.argv)), flush=True)
        except Exception as error:  # of torch and of NCCL, of many kinds: the head shows it
            print(one_line(error), file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)  # other ranks may have exited already, and a shutdown would wait for them
