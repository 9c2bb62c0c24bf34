"""The examination: facts of every node, then sums and rates between all ranks.

Without a launcher, each node reports its facts, here or through ssh (`python -m dsft.doctor.run facts`). If nothing is
wrong, each starts its ranks (`ranks`), which join a process group like a training's and measure. Both print their
answers as lines of JSON.
Under a launcher (srun, mpirun, torchrun, deepspeed, accelerate) each rank examines its node and measures.
"""

import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from dsft.doctor.between import Finding, check_between, check_measured, check_node, finding
from dsft.doctor.facts import node_facts
from dsft.errors import one_line
from dsft.runtime import distributed
from dsft.runtime.disk import PROBE, existing_parent
from dsft.runtime.hardware import has_gpu
from dsft.runtime.launcher_env import LOOPBACK, SSH, free_port

MARK = "dsft-doctor:"
"""Before each line of JSON: login shells may print lines too."""
FACTS_SECONDS = 30.0
JOIN_SECONDS = 60
MEASURE_SECONDS = 120.0
REDUCED_BYTES = 64 * 2**20
MATRIX = 2048


@dataclass(kw_only=True)
class Report:
    """The result of an examination."""

    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By node, for the nodes that answered."""
    measured: list[dict[str, Any]] = field(default_factory=list)
    """For each rank; empty if nothing was measured."""
    findings: list[Finding] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def has_errors(self) -> bool:
        return any(each.severity == "error" for each in self.findings)

    def check(self, clock_offsets: dict[str, float]) -> None:
        """Adds the findings of facts and measurements."""
        for name, facts in self.facts.items():
            self.findings += check_node(name, facts)
        self.findings += check_between(self.facts, clock_offsets)
        self.findings += check_measured(self.measured)


def examine(
    nodes: dict[str, int | None],
    *,
    variables: dict[str, str] | None,
    output_dir: str,
    port: int | None,
    master: str,
    quick: bool,
) -> Report:
    """Examines nodes from here.

    Args:
        nodes: all nodes of the job, that of rank 0 first -> their ranks; None for one per GPU, else one.
        variables: environment of the processes that ssh starts; None if the only node is this machine.
        output_dir: the run's folder; empty for none.
        port: that rank 0 will listen on; None for a free one.
        master: address of rank 0; empty for the first address of the first node.
        quick: without compiling and measuring.
    """
    start = time.monotonic()
    report = Report()
    first = next(iter(nodes))
    questions = {}
    for name, slots in nodes.items():
        questions[name] = {"slots": slots, "output_dir": output_dir, "quick": quick, "port": None}
    questions[first]["port"] = port
    offsets = {}
    for name, answer in _ask_all("facts", questions, variables, FACTS_SECONDS).items():
        if isinstance(answer, Finding):
            report.findings.append(answer)
        else:
            report.facts[name] = answer[0]
            offsets[name] = answer[0].pop("clock")
    report.check(offsets)
    if not report.has_errors and (len(nodes) > 1 or not quick):
        address = LOOPBACK
        if len(nodes) > 1:
            address = master or (report.facts[first]["addresses"] or [LOOPBACK])[0]
        environment = {"MASTER_ADDR": address, "MASTER_PORT": str(port or free_port())}
        first_rank = 0
        for name, facts in report.facts.items():
            questions[name] = {"output_dir": output_dir, "quick": quick, "environment": environment}
            questions[name] |= {"first": first_rank, "ranks": facts["slots"]}
            first_rank += facts["slots"]
        environment["WORLD_SIZE"] = str(first_rank)
        for name, answers in _ask_all("ranks", questions, variables, MEASURE_SECONDS).items():
            if isinstance(answers, Finding):
                report.findings.append(answers)
                continue
            report.measured += [answer for answer in answers if "error" not in answer]
            errors = [answer["error"] for answer in answers if "error" in answer]
            if not errors and len(answers) < questions[name]["ranks"]:
                errors = ["a rank exited without an answer"]
            if errors:
                place = f"address {address}, port {environment['MASTER_PORT']}"
                report.findings.append(finding("network-blocked", name, f"{errors[0]} ({place})"))
        report.findings += check_measured(report.measured)
    report.seconds = time.monotonic() - start
    return report


def _ask_all(
    command: str, questions: dict[str, dict[str, Any]], variables: dict[str, str] | None, seconds: float
) -> dict[str, list[dict[str, Any]] | Finding]:
    """Asks all nodes at once; returns the answers in the order of the questions."""

    def ask(name: str) -> list[dict[str, Any]] | Finding:
        words = [sys.executable, "-m", "dsft.doctor.run", command, json.dumps(questions[name])]
        if variables is not None:
            exports = "".join(f'export {variable}="{value}"; ' for variable, value in variables.items())
            words = [*SSH, name, f"{exports}cd {shlex.quote(os.getcwd())} && exec {shlex.join(words)}"]
        return answers_of(name, words, seconds)

    with ThreadPoolExecutor(max_workers=len(questions)) as pool:
        return dict(zip(questions, pool.map(ask, questions), strict=True))


def answers_of(name: str, words: list[str], seconds: float) -> list[dict[str, Any]] | Finding:
    """Returns the printed answers of a node, with `clock` as seconds ahead of this machine's, or a finding."""
    process = subprocess.Popen(
        words,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    with process:
        try:
            output, errors = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # including ranks on this machine
            return finding("no-answer", name, f"no answer within {seconds:.0f} s")
    lines = [line.removeprefix(MARK) for line in output.splitlines() if line.startswith(MARK)]
    if lines:
        answers = [json.loads(line) for line in lines]
        for answer in answers:
            if "clock" in answer:
                answer["clock"] -= time.time()
        return answers
    lines = errors.strip().splitlines() or [f"exit code {process.returncode}"]
    return finding("no-answer", name, lines[-1][:300])  # from ssh, the shell there, or Python


# ---- on a node


def start_ranks(question: dict[str, Any]) -> None:
    """Starts this node's ranks, which print their measurements, and waits for them."""
    ranks = []
    for local in range(question["ranks"]):
        variables = os.environ | question["environment"]
        variables |= {"RANK": str(question["first"] + local), "LOCAL_RANK": str(local)}
        words = [sys.executable, "-m", "dsft.doctor.run", "rank", json.dumps(question)]
        ranks.append(subprocess.Popen(words, env=variables))
    for rank in ranks:
        rank.wait()


# ---- on a rank


def measure_rank(*, output_dir: str, quick: bool) -> dict[str, Any]:
    """Joins the process group of RANK and WORLD_SIZE, and measures with the other ranks.

    Returns:
        rank, host, whether it sees a file that rank 0 creates in the output folder, whether the sum of an all-reduce
        was wrong, its bytes per second, flops of a matrix product.
    """
    import torch
    import torch.distributed as dist
    from torch.utils.benchmark import Timer

    on_gpu = has_gpu()
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    device = distributed.device()
    if not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", timeout=timedelta(seconds=JOIN_SECONDS))
    rank = dist.get_rank()
    world = dist.get_world_size()
    numbers = torch.full((1024,), float(rank + 1), device=device)
    dist.all_reduce(numbers)
    is_wrong = not torch.equal(numbers, torch.full_like(numbers, world * (world + 1) / 2))
    measured = {"rank": rank, "host": socket.gethostname(), "is_wrong": is_wrong, "flops": 0.0, "bytes_per_second": 0.0}
    with contextlib.ExitStack() as stack:

        def make_probe() -> str | None:
            with contextlib.suppress(OSError):  # the facts contain the reason
                folder = existing_parent(Path(output_dir))
                return stack.enter_context(tempfile.NamedTemporaryFile(prefix=PROBE, dir=folder)).name
            return None

        probe = distributed.on_rank_0(make_probe) if output_dir else None
        measured["sees_output"] = probe is None or os.path.exists(probe)
        distributed.wait_for_all()
    if quick:
        return measured

    def seconds_of(operation: Callable[[], object]) -> float:
        timer = Timer("operation()", globals={"operation": operation}, num_threads=torch.get_num_threads())
        return timer.timeit(3).mean

    block = torch.zeros(REDUCED_BYTES // 4, device=device)
    measured["bytes_per_second"] = REDUCED_BYTES / seconds_of(lambda: dist.all_reduce(block))
    matrix = torch.ones(MATRIX, MATRIX, device=device, dtype=torch.bfloat16 if on_gpu else torch.float32)
    dist.barrier()
    measured["flops"] = 2 * MATRIX**3 / seconds_of(lambda: matrix @ matrix)
    dist.barrier()
    return measured


def examine_launched(*, output_dir: str, quick: bool) -> Report:
    """Examines the nodes of this launch; collective over all ranks. Every rank returns the report.

    Raises:
        RuntimeError: a rank did not join in time; torch's error says how many did.
    """
    start = time.monotonic()
    measured = measure_rank(output_dir=output_dir, quick=quick)
    hosts = distributed.from_all([measured["host"]])
    facts = None
    if hosts.index(measured["host"]) == measured["rank"]:  # the first of its node
        facts = node_facts(slots=hosts.count(measured["host"]), output_dir=output_dir, quick=quick)
    answers = distributed.from_all([(measured, facts)])
    report = Report()
    for host, (measured, facts) in zip(hosts, answers, strict=True):
        report.measured.append(measured)
        if facts:
            report.facts[host] = facts
    report.check({})
    report.seconds = time.monotonic() - start
    return report


def main() -> None:
    """Answers as `facts`, `ranks` or `rank` of this node."""
    question = json.loads(sys.argv[2])
    if sys.argv[1] == "ranks":
        start_ranks(question)
        return
    if sys.argv[1] == "facts":
        answer = node_facts(**question)
    else:
        try:
            answer = measure_rank(output_dir=question["output_dir"], quick=question["quick"])
        except Exception as error:  # from torch and NCCL, many classes
            answer = {"error": one_line(error)[:400]}
    # In one write, as a separate line: the ranks of a node share one output, and a shell's greeting may lack a newline.
    os.write(1, f"\n{MARK}{json.dumps(answer)}\n".encode())
    os._exit(0)  # other ranks may have exited already, and a shutdown would wait for them


if __name__ == "__main__":
    main()
