"""Examines the nodes of a launch: three phases on all of them, whose answers become findings.

    facts    what each node is, by itself
    reach    who reaches whom, and the run's files
    measure  the smoke test: sums and rates between all ranks

and a plan of the run for these nodes, where one is named. This is the head's side; each node's is `phases.py`. Nothing
is started that outlives the examination, and nothing is left on the nodes.
"""

import contextlib
import dataclasses
import importlib
import io
import itertools
import json
import queue
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from dsft.doctor.findings import (
    Finding,
    check_clocks,
    check_disk,
    check_files,
    check_interfaces,
    check_master,
    check_names,
    check_network,
    check_node,
    check_patches,
    check_versions,
    finding,
    join,
    read_run_files,
)
from dsft.doctor.links import (
    Measured,
    check_answers,
    check_assumed,
    check_measured,
    combine,
    neighbours,
    ring_rounds,
    some_rounds,
)
from dsft.doctor.phases import MARK, NodeFacts, Reached, typed
from dsft.errors import UserError, one_line
from dsft.planner.step_time import GPUS, gpu_name, named_gpus, speeds_of
from dsft.runtime.hardware import Machine, cpu_rank_bytes, has_gpu, job_machine
from dsft.runtime.launcher_env import LOOPBACK, Node, ssh_command, ssh_problem
from dsft.runtime.patches import active_patches
from dsft.units import GiB

GROUP_SECONDS = 15  # a rank gives up waiting for another after so long
MEASURE_SECONDS = 50.0  # for the smoke test; each rank exits before (`smoke.LIFE_SECONDS`)
ANSWER_SECONDS = 30.0  # for each of the other phases
IMPORT_SECONDS = 60.0  # for torch's import, from a slow disk; it began before the other phases
GRACE_SECONDS = 15.0  # a node may take so much longer than the first one for the smoke test or its imports


@dataclass(kw_only=True)
class Report:
    """Everything about one examination."""

    nodes: list[str]
    findings: list[Finding] = field(default_factory=list)  # errors first, else in the order they were noticed
    facts: dict[str, NodeFacts] = field(default_factory=dict)
    """By node, of those that answered, in the order of `nodes`."""
    links: Measured | None = None  # None where the smoke test did not run to its end
    quick: bool = False
    plan: str = ""  # the plan that disk and memory were compared with, and why; empty without a configuration
    patches: dict[str, list[str]] = field(default_factory=dict)
    """Library -> names of dsft's patches of it (runtime/patches.py); empty in the quick part."""
    seconds: float = 0.0

    @property
    def slots(self) -> dict[str, int]:
        """Ranks by node, of the nodes that answered; `links` counts these."""
        return {node: facts.slots for node, facts in self.facts.items()}

    @property
    def has_errors(self) -> bool:
        return any(finding.severity == "error" for finding in self.findings)

    def as_dict(self) -> dict[str, Any]:
        """For --json: nodes and ranks by name."""
        rates, names = None, list(self.facts)
        if self.links:
            rates = {
                "pairs": [{"nodes": [names[a], names[b]]} | pair for (a, b), pair in sorted(self.links.pairs.items())],
                "inside_bytes_per_second": {names[node]: rate for node, rate in self.links.inside.items()},
                "flops_of_ranks": list(self.links.flops.values()),
                "collective_seconds": self.links.collective_seconds,
            }
        known = {"ok": not self.has_errors, "nodes": self.nodes, "slots": self.slots}
        return known | dataclasses.asdict(self) | {"links": rates, "seconds": round(self.seconds, 2)}


def examine(
    nodes: Any,
    listed: list[Node],
    *,
    argv: list[str],
    quick: bool,
    port: int | None,
    master: str,
    port_asked: bool = False,
) -> Report:
    """Examine `listed` and measure the links between them, whoever runs the phases.

    Args:
        nodes: `SshNodes`, or `smoke.LaunchedNodes`, which has the same methods.
        argv: options of the run as `dsft train` takes them; its files are compared, and in the full examination it is
            planned. Empty: no run.
        quick: for every launch: without plan, compiling and the links of every pair (a ring of neighbours instead).
        port: that rank 0 will listen on; None where the launch has begun.
        master: address of rank 0; empty: the first of the first node that answers.
        port_asked: the user has named the port; else that it is busy is only a warning.
    """
    start, files = time.monotonic(), read_run_files(argv)
    report = Report(nodes=[node.name for node in listed], quick=quick)
    imports = threading.Thread(target=importlib.import_module, args=("dsft.run_setup.resolve",), daemon=True)
    if not quick:  # what the plan imports takes seconds: while the nodes are asked
        imports.start()
    nodes.start("measure")  # ahead of its input: what it imports takes seconds
    inputs = {"master_port": port, "output_dir": files.output_dir, "is_full": not quick}
    answers = nodes.run(
        "facts", {node.name: inputs | {"slots": node.slots, "devices": list(node.devices)} for node in listed}
    )
    report.facts = facts = _typed(NodeFacts, answers, report)
    if facts:
        first, names = next(iter(facts)), list(facts)
        master, taken = master or facts[first].address or LOOPBACK, facts[first].master_port_taken

        # Every node connects to others, of many to a sample with the first, and to the master's port where it is free.
        # The first connects to all: it compares their clocks.
        inputs = {}
        for number, name in enumerate(names):
            targets = []
            if port and not taken and name != first:
                targets.append({"kind": "master", "name": first, "address": master, "port": port})
            numbers = range(1, len(names)) if name == first else sorted({0, *neighbours(len(names), number)})
            for other in [names[i] for i in numbers]:
                address = master if other == first else facts[other].address or other
                target = {"name": other, "port": facts[other].open_port}
                targets += [target | {"kind": "open", "address": address}, target | {"kind": "name", "address": other}]
            inputs[name] = {
                "targets": targets,
                "names": [other for other in report.nodes if other != name],
                "master": master,
                "sources": [*files.data, *files.models],
                "hub_names": files.hub_names,
                "config": files.config,
                "probe": facts[first].probe if name != first else "",
            }
        reached = _typed(Reached, nodes.run("reach", inputs), report)
        nodes.end("facts")

        # The interface that leads to the others, by node. From the first, a name of its own may lead to its loopback.
        used = {name: facts[name].interface_of(answer.outgoing) for name, answer in reached.items()}
        if first in used and (reached[first].outgoing.startswith("127.") or not used[first]):
            used[first] = facts[first].interface_of(facts[first].address)
        seen = reached[first].connections if first in reached else []
        clocks = {first: 0.0} | {other.name: other.clock_ahead for other in seen if other.kind == "open" and other.host}
        unkept = [name for name, node in facts.items() if not node.clock_synchronized]
        network = [
            *(check_master(first, master, port, taken, reached, port_asked=port_asked) if port else []),
            *check_network(facts, reached),
        ]
        for name, node in facts.items():
            report.findings += check_node(name, node, quick=quick, nvme=files.nvme)
        report.findings += [
            *check_versions(facts),
            *check_clocks(clocks, not_synchronized=unkept),
            *check_names(facts, reached),
            *check_interfaces(facts, used),
            *network,
            *check_files(files, first, facts, reached),
        ]

        why_not = ""
        if any(entry.severity == "error" and entry.code != "master-port-busy" for entry in network):
            why_not = "the nodes do not reach each other, or too slowly"
        elif any(entry.code == "slots" for entry in report.findings):
            why_not = "there are more slots than GPUs or cores"
        elif len({bool(node.usable_gpus) for node in facts.values()}) > 1:
            why_not = "some nodes have GPUs that ranks can use, others have not"
        if why_not:
            message = f"the smoke test was skipped: {why_not}"
            report.findings.append(finding("smoke-skipped", "all nodes", message, "fix the errors about this first"))
        else:
            # Between nodes a firewall may open this one only; on one machine another examination may be at the default.
            is_free = port and not taken and (port_asked or len(facts) > 1)
            free_port = port if is_free else facts[first].open_port
            report.findings += _measure(nodes, report, reached, used, master, free_port)

        written_bytes = speeds = None
        if not quick:
            imports.join()
            written_bytes, speeds = plan_on(report, argv)
        if files.output_dir:
            report.findings += check_disk(files, facts, written_bytes)
        if report.links and speeds:
            report.findings += check_assumed(report.links, names, speeds)
    if not quick:  # on this node; that the others have the same versions is checked above
        patches = active_patches()
        for name, patch in patches.items():
            report.patches.setdefault(patch.library, []).append(name)
        report.findings += check_patches(report.nodes[0], patches.values())
    noticed = [*nodes.lost.values(), *nodes.failures, *report.findings]
    report.findings = sorted(noticed, key=lambda entry: ("error", "warning", "note").index(entry.severity))
    report.seconds = time.monotonic() - start
    return report


def _typed(kind: Any, answers: dict[str, dict[str, Any]], report: Report) -> dict[str, Any]:
    """The answers by node as values of `kind`, of the nodes that run the same dsft."""
    values = {}
    for name, answer in answers.items():
        try:
            values[name] = typed(kind, answer)
        except (AttributeError, TypeError) as error:
            message = f"another version of dsft answers there ({error})"
            fix = f"copy the checkout to {name}, or install the same version there"
            report.findings.append(finding("no-dsft", name, message, fix))
    return values


def _measure(
    nodes: Any, report: Report, reached: dict[str, Reached], used: dict[str, str], master: str, port: int
) -> list[Finding]:
    """The smoke test on all nodes that answered: what it shows, or which ranks did not come to its end. Sets
    `report.links`, and keeps its rates for plans.
    """
    facts, names = report.facts, list(report.facts)
    # A launcher may have dealt the ranks to the nodes in turn; the doctor's own go node by node.
    ends = zip(facts.values(), itertools.accumulate(report.slots.values()), strict=True)
    ranks = [node.ranks or list(range(end - node.slots, end)) for node, end in ends]
    node_of = {rank: name for name, of_node in zip(names, ranks, strict=True) for rank in of_node}

    ready = nodes.ready(names)
    not_started = {name: words for name, words in ready.items() if words}
    if not_started or len(ready) < len(names):
        # Ranks that were ready were not started, and are not at fault.
        others = {rank: "done" for rank, name in node_of.items() if name in ready}
        return check_answers(others, [], node_of, not_started)
    own_name = any(entry.code == "own-name" for entry in report.findings)
    inputs = {
        name: {
            "node": number,
            "nodes": ranks,
            "rounds": (ring_rounds if report.quick else some_rounds)(len(names)),
            "master": master,
            "port": port,
            "group_seconds": GROUP_SECONDS,
            "gpu": bool(facts[name].usable_gpus),
            "devices": facts[name].devices if facts[name].usable_gpus else [],
            # gloo has to be told which one to use where a node's own name leads elsewhere.
            "interface": used.get(name, "") if own_name else "",
        }
        for number, name in enumerate(names)
    }
    answers, events = nodes.run("measure", inputs), nodes.events
    measured = {event["rank"]: event["measured"] for event in events if "measured" in event}
    if len(measured) < len(node_of):
        stages = {event["rank"]: event["stage"] for event in events if "stage" in event}  # the last one that began
        failures = [(event["rank"], event["failed"]) for event in events if "failed" in event]
        spoke = {node_of[rank] for rank in stages}
        ended = {name: answer["last_words"] for name, answer in answers.items() if answer["code"]}
        not_started = {name: words for name, words in ended.items() if name not in spoke}
        return check_answers(stages, failures, node_of, not_started)

    report.links = links = combine([measured[rank] for rank in sorted(measured)], ranks)
    if not any(node.usable_gpus for node in facts.values()):
        # Between CPU ranks the time of the smallest message is that of a plain socket (see `exchange_rate`).
        connections = [(name, other) for name, answer in reached.items() for other in answer.connections]
        for pair, rates in links.pairs.items():
            ends = {names[node] for node in pair}
            between = [link.seconds for name, link in connections if link.kind == "open" and {name, link.name} == ends]
            rates["seconds"] = min(between, default=rates["seconds"])
    if links.pairs:
        # with torch, which DeepSpeed's reader of host files has loaded
        from dsft.planner.calibration import keep, links_key

        rates = {
            "network_bytes": links.network_bytes,
            "link_bytes": min(links.inside.values(), default=0.0),
            "collective_seconds": links.collective_seconds,
        }
        # For later plans, under the hosts' own names and under those of the host file.
        for hosts in {tuple(node.host for node in facts.values()), tuple(names)}:
            keep("links", links_key(hosts), rates)
    return list(check_measured(links, node_of, facts, used))


def plan_on(report: Report, argv: list[str]) -> tuple[int | None, Any]:
    """Plan the training that `argv` describes for the nodes of `report`, with its text and findings there. Returns the
    bytes that the run needs on its disk (the model and the checkpoints that are kept; None: not known), and the
    planner's `Speeds` that it assumes for these nodes without a measurement.
    """
    from dsft.config.options import TrainConfig, decide
    from dsft.config.reader import read_config
    from dsft.run_setup.arguments import checkpoint_size, needed_bytes
    from dsft.run_setup.resolve import plan_run, resolve_offline

    facts, machine, written = report.facts, machine_of(report.facts), None
    speeds = speeds_of(machine, dtype="bfloat16" if machine.has_gpu else "float32")
    if not argv:
        return None, speeds
    if has_gpu() != machine.has_gpu:
        kind = "GPUs" if machine.has_gpu else "no GPUs"
        message = f"the nodes have {kind}, unlike this machine, so that no plan for them can be made here"
        report.findings.append(finding("plan-unknown", "here", message, "run dsft doctor on the first node"))
        return None, speeds
    problems: list[str] = []
    code, fix = "plan", "see its way out; dsft plan shows all candidates"
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            asked = read_config(TrainConfig, argv, problems)
            # Data is compared on the nodes, and may be large; the folder is looked at there too.
            elsewhere = ("output_dir", "eval_strategy", "load_best_model_at_end", "metric_for_best_model")
            training = {name: value for name, value in asked.training.items() if name not in elsewhere}
            options = dataclasses.replace(asked, data=[], eval_data=[], eval_fraction=0.0, training=training)
            try:
                run = resolve_offline(options, machine, starts=True, problems=problems)
            except UserError:
                code, fix = "configuration", "correct it in the configuration"
                raise
            choice = plan_run(run.options, run.job, machine, zero_file=run.zero_file)
            chosen, report.plan = choice.plan, choice.reason
            whole = decide(asked, run.decisions)
            size = checkpoint_size(whole, run.model.size, chosen.deepspeed_config)
            written = needed_bytes(whole.training["output_dir"], size)
        free = {name: node.available_bytes for name, node in facts.items() if node.available_bytes < chosen.host_bytes}
        if free:
            needed, least = chosen.host_bytes / GiB, min(free.values()) / GiB
            message = f"the plan takes {needed:.1f} GiB of host memory, {least:.1f} are free"
            fix = f"ssh {next(iter(free))} ps aux --sort=-rss | head"
            report.findings.append(finding("memory-low", join(list(free)), message, fix, severity="error"))
    except UserError as error:
        report.findings += [finding(code, "here", problem, fix) for problem in dict.fromkeys(error.problems)]
    except (OSError, ValueError, RuntimeError) as error:
        message = f"no plan could be made: {one_line(error)}"
        report.findings.append(finding("plan-unknown", "here", message, "dsft plan --model ... says more"))
    return written, speeds


def machine_of(facts: dict[str, NodeFacts]) -> Machine:
    """The smallest of the nodes, as the planner takes it."""
    gpus = [gpu for node in facts.values() for gpu in node.rank_gpus]
    machines = []
    for node in facts.values():
        free = [gpu.memory_bytes - gpu.used_bytes for gpu in node.rank_gpus]
        machine = Machine(
            nodes=1,
            ranks_per_node=node.slots,
            device_bytes=min(free, default=cpu_rank_bytes(node.host_bytes, node.slots)),
            host_bytes=node.host_bytes,
            has_gpu=bool(gpus),
            gpu_type=gpus[0].name if gpus else "",
            interconnect=node.interconnect,
            cores=node.cores,
            measured=True,
            memlock_bytes=node.locked_bytes,
            host_names=(node.host,),
        )
        machines.append(machine)
    machine = job_machine(machines)
    if named_gpus(machine.gpu_type):  # nvidia-smi counts what the driver keeps, too
        usable_bytes = GPUS[gpu_name(machine)].usable_bytes
        machine = dataclasses.replace(machine, device_bytes=min(machine.device_bytes, usable_bytes))
    return machine


class PhaseCommand:
    """One phase on one node, started as DeepSpeed starts its launcher there: the same Python in the same folder, with
    `variables` through ssh; without them here. What it says goes to `lines` with the node's name, and None at its end.
    """

    def __init__(self, node: str, phase: str, variables: dict[str, str] | None, lines: queue.Queue):
        words = [sys.executable, "-m", "dsft.doctor.phases", phase]
        if variables is not None:
            words = ssh_command(node, words, variables)
        self.errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        self.process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            errors="replace",
            start_new_session=True,
        )

        def read() -> None:
            for line in self.process.stdout:
                if line.startswith(MARK):
                    lines.put((node, json.loads(line[len(MARK) :])))
            lines.put((node, None))

        threading.Thread(target=read, daemon=True).start()

    def last_words(self) -> tuple[str, int | None]:
        """Of ssh or Python once its output has ended, and its exit code."""
        exit_code = None
        with suppress(subprocess.TimeoutExpired):
            exit_code = self.process.wait(timeout=5)
        self.errors.seek(0)
        return self.errors.read().strip() or f"the connection ended with exit code {exit_code}", exit_code

    def close(self) -> None:
        """The phase exits when its input ends; ssh is given a moment to pass that on."""
        with suppress(OSError):
            self.process.stdin.close()
        try:
            self.process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.errors.close()


class SshNodes:
    """Runs the phases on all nodes of a host file, side by side: one ssh connection per host and phase, with
    `variables` there; without these, plain processes of this machine.
    """

    def __init__(self, nodes: list[Node], variables: dict[str, str] | None):
        self._names, self._variables = [node.name for node in nodes], variables
        self._commands: dict[tuple[str, str], PhaseCommand] = {}  # by phase and node
        self._lines: dict[str, queue.Queue] = defaultdict(queue.Queue)  # by phase
        self.lost: dict[str, Finding] = {}  # nodes that did not answer
        self.failures: list[Finding] = []  # of nodes that could not do what they were asked
        self.events: list[dict[str, Any]] = []  # of the smoke test's ranks, in the order they came

    def start(self, phase: str, names: Iterable[str] | None = None) -> None:
        """Start a phase, ahead of its input, on these nodes or on all."""
        for name in self._names if names is None else names:
            self._commands[phase, name] = PhaseCommand(name, phase, self._variables, self._lines[phase])

    def end(self, phase: str | None = None) -> None:
        """End a phase that has answered, or all: its ports are closed, its probe is gone."""
        commands = [self._commands.pop(key) for key in list(self._commands) if phase in (None, key[0])]
        if commands:
            with ThreadPoolExecutor(max_workers=len(commands)) as pool:
                list(pool.map(PhaseCommand.close, commands))

    def ready(self, names: Iterable[str]) -> dict[str, str]:
        """Wait until `measure` has its imports. Returns "" by node, or its last words where it exited instead."""
        lines = self._listen("measure", names, IMPORT_SECONDS)
        return {name: "" if "event" in line else line["answer"]["last_words"] for name, line in lines.items()}

    def run(self, phase: str, inputs: dict[str, dict[str, Any]]) -> dict[str, Any]:
        """Run a phase on the nodes of `inputs` at the same time; answers by node, of those that answered."""
        names = [name for name in inputs if name not in self.lost]
        if phase not in self._lines:
            self.start(phase, names)
        for name in names:
            stdin = self._commands[phase, name].process.stdin
            with suppress(OSError):  # its last words say why
                stdin.write(json.dumps(inputs[name]) + "\n")
                stdin.flush()
        lines = self._listen(phase, names, MEASURE_SECONDS if phase == "measure" else ANSWER_SECONDS)
        return {name: lines[name]["answer"] for name in names if name in lines}

    def _listen(self, phase: str, names: Iterable[str], seconds: float) -> dict[str, dict[str, Any]]:
        """Wait for the answer of each node, or {"event"}: it is ready. Of others a finding says why there is none: the
        phase failed, the connection has ended, or nothing came in time.
        """
        waiting, answers, broken = [name for name in names if name not in self.lost], {}, []
        until = time.monotonic() + seconds
        while waiting:
            try:
                name, line = self._lines[phase].get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                if phase != "measure":  # the smoke test names its ranks itself
                    broken += [(name, f"no answer to {phase!r} in time", None) for name in waiting]
                break
            if name not in waiting:  # it was lost in another phase
                continue
            if line and "event" in line and "ready" not in line["event"]:
                self.events.append(line["event"])
                continue
            waiting.remove(name)
            if line is None:
                broken.append((name, *self._commands[phase, name].last_words()))
            elif "failed" in line:
                self.failures.append(finding("node-failed", name, line["failed"], f"ssh {name}: try it by hand"))
            else:
                answers[name] = line
                if phase == "measure":
                    until = min(until, time.monotonic() + GRACE_SECONDS)
        with ThreadPoolExecutor(max_workers=max(1, len(broken))) as pool:  # some ask the node's port 22
            for why in pool.map(lambda end: ssh_problem(*end), broken):
                self.lost[why.node] = finding(why.code, why.node, why.message, why.fix)
        return answers
