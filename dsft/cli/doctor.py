"""`dsft doctor`: options -> nodes -> examination -> table and findings, or JSON, and the exit code.

Without a launcher, each node reports its facts, here or through ssh (`doctor/node.py`). If nothing is wrong, each
starts its ranks, which join a process group like a training's and measure. Under a launcher (srun, mpirun, torchrun,
deepspeed, accelerate) each rank examines its node and measures.
"""

import dataclasses
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from rich.table import Table

from dsft.cli.commands import DoctorOptions
from dsft.config.options import EvalConfig
from dsft.config.reader import describe_unknown, field_types, own_names, read_values, training_types
from dsft.doctor.between import Finding, check_between, check_measured, check_node, finding
from dsft.doctor.node import MARK, measure_rank, node_facts
from dsft.errors import EXIT_USER_ERROR, UserError, one_line, raise_if_any
from dsft.launch import hosts_of, remote_environment
from dsft.runtime import distributed
from dsft.runtime.console import print_json, show_table, show_text
from dsft.runtime.launcher_env import LOOPBACK, SSH, free_port, map_launcher_variables, rank, world_size
from dsft.units import GiB, plural

FACTS_SECONDS = 30.0
MEASURE_SECONDS = 120.0
COLUMNS = ("node", "ranks", "devices", "memory", "/dev/shm", "address", "torch", "deepspeed", "dsft")


@dataclass(kw_only=True)
class Report:
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


def examine(options: DoctorOptions, *, output_dir: str) -> Report:
    """Examines nodes from here; `output_dir` is empty for none."""
    nodes = hosts_of(options) or {"localhost": options.num_gpus}
    variables = remote_environment(os.environ) if options.hostfile else None  # for the processes that ssh starts
    report = Report()
    first = next(iter(nodes))
    questions = {}
    for name, slots in nodes.items():
        questions[name] = {"slots": slots, "output_dir": output_dir, "quick": options.quick}
    questions[first]["port"] = options.master_port
    offsets = {}
    for name, (facts,) in _ask_all("facts", questions, variables, FACTS_SECONDS, report.findings).items():
        offsets[name] = facts.pop("clock")
        report.facts[name] = facts
    report.check(offsets)
    if not report.has_errors and (len(nodes) > 1 or not options.quick):
        address = LOOPBACK
        if len(nodes) > 1:
            address = options.master_addr or (report.facts[first]["addresses"] or [LOOPBACK])[0]
        environment = {"MASTER_ADDR": address, "MASTER_PORT": str(options.master_port or free_port())}
        first_rank = 0
        for name, facts in report.facts.items():
            questions[name] = {
                "output_dir": output_dir,
                "quick": options.quick,
                "environment": environment,
                "first": first_rank,
                "ranks": facts["slots"],
            }
            first_rank += facts["slots"]
        environment["WORLD_SIZE"] = str(first_rank)
        for name, answers in _ask_all("ranks", questions, variables, MEASURE_SECONDS, report.findings).items():
            report.measured += [answer for answer in answers if "error" not in answer]
            errors = [answer["error"] for answer in answers if "error" in answer]
            if not errors and len(answers) < questions[name]["ranks"]:
                errors = ["a rank exited without an answer"]
            if errors:
                place = f"address {address}, port {environment['MASTER_PORT']}"
                report.findings.append(finding("network-blocked", name, f"{errors[0]} ({place})"))
        report.findings += check_measured(report.measured)
    return report


def _ask_all(
    command: str,
    questions: dict[str, dict[str, Any]],
    variables: dict[str, str] | None,
    seconds: float,
    findings: list[Finding],
) -> dict[str, list[dict[str, Any]]]:
    """Asks all nodes at once; returns the answers, and adds a finding for each node without."""

    def ask(name):
        words = [sys.executable, "-m", "dsft.doctor.node", command, json.dumps(questions[name])]
        if variables is not None:
            exports = "".join(f'export {variable}="{value}"; ' for variable, value in variables.items())
            words = [*SSH, name, f"{exports}cd {shlex.quote(os.getcwd())} && exec {shlex.join(words)}"]
        return answers_of(name, words, seconds)

    with ThreadPoolExecutor(max_workers=len(questions)) as pool:
        results = dict(zip(questions, pool.map(ask, questions), strict=True))
    findings += [result for result in results.values() if isinstance(result, Finding)]
    return {name: result for name, result in results.items() if not isinstance(result, Finding)}


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
    answers = [json.loads(line.removeprefix(MARK)) for line in output.splitlines() if line.startswith(MARK)]
    if answers:
        for answer in answers:
            if "clock" in answer:
                answer["clock"] -= time.time()
        return answers
    lines = errors.strip().splitlines() or [f"exit code {process.returncode}"]
    return finding("no-answer", name, lines[-1][:300])  # from ssh, the shell there, or Python


def examine_launched(*, output_dir: str, quick: bool) -> Report:
    """Examines the nodes of this launch, on every rank. Raises torch's RuntimeError if a rank does not join in time."""
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
    return report


def run(options: DoctorOptions, run_words: list[str]) -> None:
    """Examines the nodes and prints the report; exits with code 2 if it has an error. Raises UserError."""
    problems = []
    known = [*training_types(), *field_types(EvalConfig, DoctorOptions)]  # a preflight may be for either kind of run
    values = own_names(read_values(run_words, problems) or {}, known, [])
    problems += [f"{name}: {describe_unknown(name, known)}" for name in values if name not in known]
    raise_if_any(problems)
    output_dir = str(values.get("output_dir") or "")
    if not options.hostfile:
        map_launcher_variables()
    is_launched = not options.hostfile and world_size() > 1 and "LOCAL_RANK" in os.environ
    start = time.monotonic()
    if is_launched:
        try:
            report = examine_launched(output_dir=output_dir, quick=options.quick)
        except RuntimeError as error:
            place = f"{os.environ['MASTER_ADDR']}, port {os.environ['MASTER_PORT']}"
            raise UserError(f"rank {rank()} could not join the others at {place}: {one_line(error)}") from None
    else:
        report = examine(options, output_dir=output_dir)
    report.seconds = time.monotonic() - start
    if not is_launched or rank() == 0:
        if options.json:
            print_json({"ok": not report.has_errors} | dataclasses.asdict(report))
        else:
            show(report, only_findings=options.only_findings)
    code = EXIT_USER_ERROR if report.has_errors else 0
    if is_launched:
        sys.stdout.flush()
        os._exit(code)  # other ranks may have exited: without shutdown of the group
    if code:
        sys.exit(code)


def show(report: Report, *, only_findings: bool) -> None:
    """Prints a row per node, the rates, and each finding with its fix."""
    if report.facts and not only_findings:
        table = Table(*COLUMNS, caption="GiB free", caption_justify="left")
        for node, facts in report.facts.items():
            gpus = facts["gpus"]
            versions = facts["versions"]
            shm = facts["free_bytes"].get("/dev/shm")
            table.add_row(
                node,
                str(facts["slots"]),
                f"{len(gpus)} x {gpus[0]['name']}" if gpus else f"{facts['cores']} cores",
                f"{facts['available_bytes'] / GiB:.0f}",
                "" if shm is None else f"{shm / GiB:.1f}",
                next(iter(facts["addresses"]), ""),
                versions["torch"],
                versions["deepspeed"],
                versions["dsft commit"][:8],
            )
        show_table(table)
    if report.measured and report.measured[0]["flops"] and not only_findings:
        rate = min(each["bytes_per_second"] for each in report.measured)
        flops = [each["flops"] / 1e12 for each in report.measured]
        show_text(
            f"all-reduce over {plural(len(flops), 'rank')}: {rate / 1e9:.2f} GB/s; matrix products:"
            f" {min(flops):.3g} to {max(flops):.3g} TFLOP/s per rank"
        )
    for each in report.findings:
        show_text(f"{each.severity}: {each.where}: {each.message}  [{each.code}]")
        show_text(f"    fix: {each.fix}")
    kinds = Counter(each.severity for each in report.findings)
    words = ", ".join(plural(count, kind) for kind, count in kinds.items()) or "nothing found"
    ranks = sum(facts["slots"] for facts in report.facts.values())
    show_text(
        f"dsft doctor: {plural(len(report.facts), 'node')}, {plural(ranks, 'rank')}, {words}; {report.seconds:.1f} s"
    )


if __name__ == "__main__":  # for launchers of modules: `accelerate launch --module dsft.cli.doctor`
    from dsft.cli.main import main

    main(["doctor", *sys.argv[1:]])
