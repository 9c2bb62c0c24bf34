"""Examines the nodes of a launch: facts -> checks -> smoke test -> report. The head's side; each node's is `agent.py`.

    report = examine(read_hosts("hostfile"), argv=["--config", "run.yaml"], quick=True)
    show(report)

Nothing is started that outlives this call, and nothing is left on the nodes.
"""

import time
from typing import Any

from dsft.cluster.doctor.check_between import (
    check_clocks,
    check_interfaces,
    check_master,
    check_names,
    check_network,
    check_versions,
    interface_of,
)
from dsft.cluster.doctor.check_links import check_assumed, check_measured
from dsft.cluster.doctor.check_node import check_node
from dsft.cluster.doctor.facts import usable_gpus
from dsft.cluster.doctor.findings import Finding, Report, finding
from dsft.cluster.doctor.run_files import RunFiles, check_disk, examine_files, read_run_files
from dsft.cluster.doctor.run_plan import RunPlan, plan_on, start_imports
from dsft.cluster.doctor.run_smoke import run_smoke
from dsft.cluster.doctor.sessions import Sessions
from dsft.cluster.doctor.trouble import broken_session
from dsft.planner.measured_links import keep_links
from dsft.runtime.hostfile import DEFAULT_PORT, Node


def examine(
    nodes: list[Node],
    *,
    argv: list[str] = (),
    quick: bool = False,
    master_port: int | None = None,
    master_addr: str = "",
    ssh: bool = True,
) -> Report:
    """Examine `nodes` and measure the links between them.

    Args:
        argv: options of the run as `dsft train` takes them; its files are compared, and in the full examination it is
            planned. Empty: no run.
        quick: for every launch: without plan, compiling and the links of every pair (a ring of neighbours instead).
        master_port: the port rank 0 will listen on; None: DeepSpeed's default, and that it is busy is only a warning.
        master_addr: as `--master_addr` of DeepSpeed; empty: the first address of the first node.
        ssh: False for this machine alone.
    """
    report = Report(nodes=[node.name for node in nodes], quick=quick)
    with Sessions(nodes, ssh=ssh) as sessions:
        examine_through(
            sessions,
            report,
            nodes,
            argv=list(argv),
            port=master_port or DEFAULT_PORT,
            port_asked=master_port is not None,
            master=master_addr if ssh else "127.0.0.1",
        )
        report.findings = [*_broken(sessions), *report.findings]
    return report


def examine_through(
    sessions: Sessions,
    report: Report,
    nodes: list[Node],
    *,
    argv: list[str],
    port: int | None,
    port_asked: bool,
    master: str,
) -> None:
    """The examination, whoever carries questions and answers (`Sessions`, or `launched.LaunchedNodes`). Fills `report`.

    Args:
        port: rank 0's to come; None where the launch has begun.
        master: address of rank 0; empty: the first of the first node that answers.
    """
    start = time.monotonic()
    files, imports = read_run_files(argv), None if report.quick else start_imports()
    folders = [files.output_dir] if files and files.output_dir else []
    report.facts = sessions.ask(
        "hello", each={node.name: {"slots": node.slots} for node in nodes}, master_port=port, folders=folders
    )
    report.slots = {node: facts["slots"] for node, facts in report.facts.items()}
    if report.facts:
        sessions.ask(
            "warm_up",
            each={
                node.name: {"devices": list(node.devices) if usable_gpus(report.facts[node.name]) else []}
                for node in nodes
                if node.name in report.facts
            },
        )
        first = next(node.name for node in nodes if node.name in report.facts)
        master = master or next(iter(report.facts[first]["network"]["addresses"]), "127.0.0.1")
        reached = _reach(report, sessions, first, master, port)
        used = {
            node: interface_of(report.facts[node], master if node == first else answer["outgoing"])
            for node, answer in reached.items()
        }
        _check_nodes(report, sessions, reached, used, nvme=bool(files and files.nvme))
        network = [
            *(check_master(first, master, port, report.facts, reached, asked=port_asked) if port else []),
            *check_network(report.facts, reached),
        ]
        report.findings += network
        if files:
            report.findings += examine_files(sessions, files, report.facts)
        if why_not := _why_not_measured(report, network):
            report.findings.append(
                finding(
                    "smoke-skipped",
                    "all nodes",
                    f"the smoke test was left out: {why_not}",
                    "mend the errors about this first",
                )
            )
        else:
            _measure(
                report,
                sessions,
                master,
                report.facts[first]["open_port"] if report.facts[first]["master_port_taken"] or not port else port,
                used,
                reached,
            )
        _plan(report, argv, files, imports)
    report.seconds = time.monotonic() - start


def _check_nodes(
    report: Report, sessions: Sessions, reached: dict[str, dict[str, Any]], used: dict[str, str], *, nvme: bool
) -> None:
    """What the facts show, of each node and between them."""
    facts = report.facts
    if not report.quick:
        for node, error in sessions.ask("compiles").items():
            facts[node]["compile_error"] = error
    for node in report.slots:
        report.findings += check_node(node, facts[node], report.slots[node], quick=report.quick, nvme=nvme)
    report.findings += [
        *check_versions(facts),
        *check_clocks(_clocks(sessions)),
        *check_names(facts, reached),
        *check_interfaces(facts, used),
    ]


def _why_not_measured(report: Report, network: list[Finding]) -> str:
    """Why the smoke test could not work; empty where it can."""
    if any(one.severity == "error" and one.code != "master-port-busy" for one in network):
        return "the nodes do not reach each other"
    if any(one.code == "slots" for one in report.findings):
        return "there are more slots than GPUs or cores"
    if len({bool(usable_gpus(facts)) for facts in report.facts.values()}) > 1:
        return "some nodes have GPUs that ranks can use, others have not"
    return ""


def _measure(
    report: Report, sessions: Sessions, master: str, port: int, used: dict[str, str], reached: dict[str, dict[str, Any]]
) -> None:
    """The smoke test, what it shows, and its rates kept for plans."""
    own_name = any(one.code == "own-name" for one in report.findings)
    sessions.ask("close_ports")
    found, ranks = run_smoke(report, sessions, master=master, port=port, interfaces=used if own_name else {})
    report.findings += found
    if report.links:
        if not any(usable_gpus(facts) for facts in report.facts.values()):
            _take_round_trips(report, reached)
        report.findings += check_measured(report.links, list(report.slots), ranks, report.facts, used)
        _keep(report)


def _take_round_trips(report: Report, reached: dict[str, dict[str, Any]]) -> None:
    """Between CPU ranks the time of the smallest message is that of a plain socket (see `measuring.exchange_rate`)."""
    names = list(report.slots)
    for pair, found in report.links.pairs.items():
        ends = {names[node] for node in pair}
        found["seconds"] = min(
            target["seconds"]
            for node in ends
            for target in reached[node]["targets"]
            if target["kind"] == "open" and {node, target["name"]} == ends
        )


def _reach(report: Report, sessions: Sessions, first: str, master: str, port: int | None) -> dict[str, dict[str, Any]]:
    """Let every node connect to every other, and to the master's port."""
    facts, each = report.facts, {}
    for node in facts:
        targets = (
            [{"kind": "master", "name": first, "address": master, "port": port}]
            if port and node != first and not facts[first]["master_port_taken"]
            else []
        )
        for other in facts:
            if other != node:
                address = master if other == first else next(iter(facts[other]["network"]["addresses"]), other)
                targets.append({"kind": "open", "name": other, "address": address, "port": facts[other]["open_port"]})
                targets.append({"kind": "name", "name": other, "address": other, "port": facts[other]["open_port"]})
        each[node] = {"targets": targets, "names": [name for name in report.nodes if name != node]}
    return sessions.ask("reach", each=each, master=master)


def _clocks(sessions: Sessions) -> dict[str, float]:
    """Seconds by which each node's clock is ahead of this machine's; half the round trip is taken off."""
    before = time.time()
    there = sessions.ask("clock")
    middle = (before + time.time()) / 2
    return {node: clock - middle for node, clock in there.items()}


def _plan(report: Report, argv: list[str], files: RunFiles | None, imports: Any) -> None:
    """The plan on what was found, and disk space and rates held against it. Quick: only what needs no plan."""
    run = RunPlan()
    if imports:
        imports.join()
        run = plan_on(argv, report.facts, report.slots)
        report.plan = run.text
        report.findings += run.findings
    if files and files.output_dir:
        report.findings += check_disk(files, report.facts, run.written_bytes)
    if report.links and run.speeds:
        report.findings += check_assumed(report.links, list(report.slots), run.speeds, run.speeds.source)


def _keep(report: Report) -> None:
    """Measured rates for later plans, under the hosts' own names and under those of the host file."""
    if not report.links.pairs:
        return
    for names in {tuple(one["host"] for one in report.facts.values()), tuple(report.facts)}:
        keep_links(
            names,
            network_bytes=report.links.network_bytes,
            link_bytes=min(report.links.inside.values(), default=0.0),
            collective_seconds=report.links.collective_seconds,
        )


def _broken(sessions: Sessions) -> list[Finding]:
    """Conversations that ended early."""
    found = []
    for name, session in sessions.all.items():
        if session.lost and not session.lost.startswith(
            ("no answer to 'ready'", "no answer to 'smoke'")
        ):  # that test names its ranks itself
            found.append(broken_session(name, session.lost, session.exit_code))
        found += [
            finding("node-failed", name, words[:300], f"ssh {name}: try it by hand") for words in session.failures
        ]
    return found
