"""`dsft doctor`: options -> nodes -> examination -> screen (nodes, versions that differ, links, findings) or JSON, and
the exit code.
"""

import contextlib
import json
import os
import sys

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dsft.cli.commands import DoctorOptions
from dsft.doctor.checks import differences
from dsft.doctor.examine import Report, examine
from dsft.doctor.facts import NodeFacts
from dsft.doctor.findings import Finding
from dsft.doctor.links import in_rate
from dsft.errors import EXIT_USER_ERROR, UserError, raise_if_any
from dsft.launch.environment import remote_environment
from dsft.launch.launchers import hosts_of, number_problems
from dsft.runtime.console import show_table
from dsft.runtime.launcher_env import Node, map_launcher_variables
from dsft.units import GiB, plural


def run(options: DoctorOptions, run_words: list[str]) -> None:
    """Examine and print. The process ends with exit code 2 where an error was found."""
    if not options.hostfile and _is_launched():
        from dsft.doctor.launched import examine_launched  # imports torch

        # Does not come back.
        examine_launched(argv=run_words, quick=options.quick, deliver=lambda report: _print(report, options))
    with contextlib.redirect_stdout(sys.stderr):  # what libraries print
        report = examine(
            _nodes(options),
            argv=run_words,
            quick=options.quick,
            master_port=options.master_port,
            master_addr=options.master_addr or "",
            variables=remote_environment(os.environ) if options.hostfile else None,
        )
    _print(report, options)
    if report.has_errors:
        sys.exit(EXIT_USER_ERROR)


def _is_launched() -> bool:
    """Whether srun, mpirun, torchrun, deepspeed or accelerate started this process as one of several."""
    map_launcher_variables()
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def _print(report: Report, options: DoctorOptions) -> None:
    if options.json:
        print(json.dumps(report.as_dict(), indent=2), flush=True)
    else:
        show(report, only_findings=options.only_findings)


def _nodes(options: DoctorOptions) -> list[Node]:
    raise_if_any(number_problems(options))
    if options.hostfile:
        return hosts_of(options)
    if options.include or options.exclude or (options.num_nodes or 1) > 1:
        raise UserError(["--include, --exclude and --num_nodes choose among the hosts of --hostfile; name one"])
    return [Node(name="localhost", slots=options.num_gpus)]


COLOURS = {"error": "bold red", "warning": "yellow", "note": "cyan"}


def show(report: Report, *, only_findings: bool = False) -> None:
    """Print it; `only_findings` leaves the tables out where nothing is wrong, for a launch."""
    # In a file or a pipe nothing is broken over lines, so that commands stay complete.
    console = Console(width=None if sys.stdout.isatty() else 240, highlight=False)
    if report.facts and not only_findings:
        show_table(_node_table(report))
    rows = differences(report.facts)
    if rows:
        show_table(_versions(rows, list(report.facts)))
    if report.links and not only_findings:
        for line in link_lines(report):
            console.print(line, soft_wrap=True)
    if not only_findings:
        for library, names in report.patches.items():
            console.print(f"patches of {library}: {', '.join(names)}", soft_wrap=True)
    if report.plan and not only_findings:
        console.print(f"plan: {report.plan}", soft_wrap=True)
    for finding in report.sorted_findings():
        if not (only_findings and finding.severity == "note"):
            _print_finding(console, finding)
    console.print(summary(report), soft_wrap=True)


def summary(report: Report) -> str:
    """One line."""
    counts = {severity: sum(finding.severity == severity for finding in report.findings) for severity in COLOURS}
    words = ", ".join(f"{plural(count, severity)}" for severity, count in counts.items() if count) or "nothing found"
    ranks = sum(report.slots.values())
    return (
        f"dsft doctor: {plural(len(report.nodes), 'node')}, {plural(ranks, 'rank')},"
        f" {words}; {report.seconds:.1f} s{', quick part' if report.quick else ''}"
    )


def link_lines(report: Report) -> list[str]:
    """Measured rates in a few lines; with many nodes the slowest and the fastest pair."""
    links, names, lines = report.links, list(report.slots), []
    ordered = sorted(links.pairs.items(), key=lambda item: item[1]["bytes_per_second"])
    shown = ordered if len(ordered) <= 6 else [ordered[0], ordered[-1]]
    for (a, b), pair in shown:
        lines.append(
            f"link {names[a]} - {names[b]}: {in_rate(pair['bytes_per_second'])} each way,"
            f" {pair['seconds'] * 1e6:,.0f} µs"
        )
    if len(shown) < len(ordered):
        lines.append(f"({len(ordered)} links measured; the slowest and the fastest are shown)")
    if links.inside:
        node = min(links.inside, key=lambda number: links.inside[number])
        lines.append(
            f"inside the nodes: {in_rate(links.inside[node])} per rank in an"
            f" all-reduce{f' in the slowest, {names[node]}' if len(links.inside) > 1 else ''}"
        )
    lines.append(
        f"all-reduce over all {len(links.flops)} ranks: right, {links.collective_seconds * 1e6:,.0f} µs for the"
        f" smallest; slowest rank {min(links.flops.values()) / 1e12:.3g} TFLOP/s, fastest"
        f" {max(links.flops.values()) / 1e12:.3g}"
        if not links.wrong
        else f"all-reduce over all {len(links.flops)} ranks: wrong"
    )
    return lines


COLUMNS = ("node", "host", "slots", "devices", "memory", "shm", "disk", "address", "MTU")
VERSIONS = ("Python", "torch", "deepspeed", "dsft")
NUMBERS = ("slots", "memory", "shm", "disk", "MTU")


def _node_table(report: Report) -> Table:
    table = Table(caption="GiB free; shm: /dev/shm; MTU of the first address's interface", caption_justify="left")
    for name in COLUMNS + VERSIONS:
        table.add_column(name, no_wrap=True, justify="right" if name in NUMBERS else "left")
    for node in report.nodes:
        facts = report.facts.get(node)
        silent = ("no answer", *[""] * (len(COLUMNS + VERSIONS) - 2))
        table.add_row(node, *(_row(facts) if facts else silent))
    return table


def _row(facts: NodeFacts) -> tuple[str, ...]:
    gpus, versions = facts.usable_gpus, facts.versions
    card = facts.network.interfaces.get(facts.interface_of(facts.address))
    devices = f"{len(gpus)} x {gpus[0].name} {gpus[0].memory_bytes / GiB:.0f} GiB" if gpus else f"{facts.cores} cores"
    free = [num_bytes for num_bytes in facts.disks.values() if num_bytes is not None]
    return (
        facts.host,
        str(facts.slots),
        devices,
        f"{facts.available_bytes / GiB:.0f}",
        f"{(facts.shm_bytes or 0) / GiB:.1f}",
        f"{min(free, default=0) / GiB:.0f}",
        facts.address,
        str(card.mtu) if card else "",
        versions["python"],
        versions["torch"],
        versions["deepspeed"],
        versions["dsft commit"][:8] + "+" * versions["dsft commit"].endswith("+changes"),
    )


def _versions(rows: dict[str, dict[str, str]], nodes: list[str]) -> Table:
    table = Table(title="Versions that differ", title_justify="left")
    table.add_column("")
    for node in nodes:
        table.add_column(node)
    for row, versions in rows.items():
        table.add_row(row, *(versions[node] for node in nodes))
    return table


def _print_finding(console: Console, finding: Finding) -> None:
    head = f"{finding.severity}: {finding.where}: {finding.message}  [{finding.code}]"
    console.print(Text(head, style=COLOURS[finding.severity]), soft_wrap=True)
    console.print(Text(f"    why: {finding.why}"), soft_wrap=True)
    console.print(Text(f"    fix: {finding.fix}"), soft_wrap=True)


if __name__ == "__main__":  # for launchers that start a module: `accelerate launch --module dsft.cli.doctor`
    from dsft.cli.main import main

    main(["doctor", *sys.argv[1:]])
