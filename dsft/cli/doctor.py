"""`dsft doctor`: options -> nodes -> examination -> tables and findings, or JSON, and the exit code."""

import contextlib
import json
import os
import sys

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dsft.cli.commands import DoctorOptions
from dsft.config.options import EvalConfig
from dsft.config.reader import field_types, read_flags, training_types
from dsft.doctor.examine import Report, SshNodes, examine
from dsft.doctor.findings import differences
from dsft.doctor.links import in_rate
from dsft.errors import EXIT_USER_ERROR, nearest, raise_if_any
from dsft.launch.environment import remote_environment
from dsft.launch.launchers import hosts_of
from dsft.runtime.console import show_table, show_text
from dsft.runtime.launcher_env import DEFAULT_PORT, LOOPBACK, Node, map_launcher_variables
from dsft.units import GiB, in_columns, plural

COLOURS = {"error": "bold red", "warning": "yellow", "note": "cyan"}
NUMBERS = ("slots", "memory", "shm", "disk", "MTU")
COLUMNS = ("node", "host", "slots", "devices", *NUMBERS[1:-1], "address", "MTU", "Python", "torch", "deepspeed", "dsft")


def run(options: DoctorOptions, run_words: list[str]) -> None:
    """Examine and print. The process ends with exit code 2 where an error was found. Raises UserError for unknown
    options, before seconds go into examining; other faults of options are findings.
    """

    def deliver(report: Report) -> None:
        if options.json:
            print(json.dumps(report.as_dict(), indent=2), flush=True)
        else:
            show(report, only_findings=options.only_findings)

    is_launched = False
    if not options.hostfile:
        map_launcher_variables()
        # srun, mpirun, torchrun, deepspeed or accelerate started this process as one of several. Kubernetes counts pods
        # in WORLD_SIZE, and sets no LOCAL_RANK.
        is_launched = int(os.environ.get("WORLD_SIZE", "1")) > 1 and "LOCAL_RANK" in os.environ
    problems: list[str] = []
    known = [*training_types(), *field_types(EvalConfig, DoctorOptions), "config"]  # a preflight may be of either run
    flags = read_flags(run_words, problems)
    problems += [f"{name}: unknown key{nearest(name, known)}" for name in flags if name not in known]
    raise_if_any(problems)
    if is_launched:
        from dsft.doctor.smoke import examine_launched  # imports torch

        # Does not come back.
        examine_launched(argv=run_words, quick=options.quick, deliver=deliver)
    if not options.hostfile and (options.include or options.exclude or (options.num_nodes or 1) > 1):
        problems.append("--include, --exclude and --num_nodes choose among the hosts of --hostfile; name one")
    raise_if_any(problems)
    with contextlib.redirect_stdout(sys.stderr):  # what libraries print
        listed = hosts_of(options) if options.hostfile else [Node(name="localhost", slots=options.num_gpus)]
        nodes = SshNodes(listed, remote_environment(os.environ) if options.hostfile else None)
        try:
            report = examine(
                nodes,
                listed,
                argv=run_words,
                quick=options.quick,
                port=options.master_port or DEFAULT_PORT,
                port_asked=options.master_port is not None,
                master=options.master_addr or "" if options.hostfile else LOOPBACK,
            )
        finally:
            nodes.end()
    deliver(report)
    if report.has_errors:
        sys.exit(EXIT_USER_ERROR)


def show(report: Report, *, only_findings: bool) -> None:
    """Print it; `only_findings` leaves the tables out where nothing is wrong, for a launch."""
    # In a file or a pipe nothing is broken over lines, so that commands stay complete.
    console = Console(width=None if sys.stdout.isatty() else 240, highlight=False)
    if report.facts and not only_findings:
        table = Table(caption="GiB free; shm: /dev/shm; MTU of the first address's interface", caption_justify="left")
        for name in COLUMNS:
            table.add_column(name, no_wrap=True, justify="right" if name in NUMBERS else "left")
        for node in report.nodes:
            facts = report.facts.get(node)
            if not facts:
                table.add_row(node, "no answer")
                continue
            gpus, versions = facts.usable_gpus, facts.versions
            card = facts.network.interfaces.get(facts.interface_of(facts.address))
            known = f"{len(gpus)} x {gpus[0].name} {gpus[0].memory_bytes / GiB:.0f} GiB" if gpus else ""
            free = [num_bytes for num_bytes in facts.disks.values() if num_bytes is not None]
            table.add_row(
                node,
                facts.host,
                str(facts.slots),
                known or f"{facts.cores} cores",
                f"{facts.available_bytes / GiB:.0f}",
                f"{(facts.shm_bytes or 0) / GiB:.1f}",
                f"{min(free, default=0) / GiB:.0f}",
                facts.address,
                str(card.mtu) if card else "",
                *(versions[name] for name in ("python", "torch", "deepspeed")),
                versions["dsft commit"][:8] + "+" * versions["dsft commit"].endswith("+changes"),
            )
        show_table(table)
    if rows := differences(report.facts):
        table = Table("", *report.facts, title="Versions that differ", title_justify="left")
        for row, versions in rows.items():
            table.add_row(row, *versions.values())
        show_table(table)
    if not only_findings:
        lines, links, names = [], report.links, list(report.slots)
        if links:  # with many nodes the slowest and the fastest pair
            ordered = sorted(links.pairs.items(), key=lambda item: item[1]["bytes_per_second"])
            shown = ordered if len(ordered) <= 6 else [ordered[0], ordered[-1]]
            for (a, b), pair in shown:
                rate = in_rate(pair["bytes_per_second"])
                lines.append(f"link {names[a]} - {names[b]}: {rate} each way, {pair['seconds'] * 1e6:,.0f} µs")
            if len(shown) < len(ordered):
                lines.append(f"({len(ordered)} links measured; the slowest and the fastest are shown)")
            if links.inside:
                node = min(links.inside, key=lambda number: links.inside[number])
                slowest = f" in the slowest, {names[node]}" if len(links.inside) > 1 else ""
                lines.append(f"inside the nodes: {in_rate(links.inside[node])} per rank in an all-reduce{slowest}")
            result = "wrong"
            if not links.wrong:
                result = (
                    f"right, {links.collective_seconds * 1e6:,.0f} µs for the smallest; slowest rank"
                    f" {min(links.flops.values()) / 1e12:.3g} TFLOP/s, fastest {max(links.flops.values()) / 1e12:.3g}"
                )
            lines.append(f"all-reduce over all {len(links.flops)} ranks: {result}")
        lines += [f"patches of {library}: {', '.join(names)}" for library, names in report.patches.items()]
        lines += [f"plan: {report.plan}"] if report.plan else []
        for line in lines:
            show_text(line)
    for finding in report.findings:
        if not (only_findings and finding.severity == "note"):
            head = f"{finding.severity}: {finding.where}: {finding.message}  [{finding.code}]"
            head = in_columns(head, is_terminal=console.is_terminal)
            console.print(Text(head, style=COLOURS[finding.severity]), soft_wrap=True)
            for name, text in (("why", finding.why), ("fix", finding.fix)):
                show_text(f"    {name}: {text}")
    counts = {severity: sum(finding.severity == severity for finding in report.findings) for severity in COLOURS}
    words = ", ".join(plural(count, severity) for severity, count in counts.items() if count) or "nothing found"
    show_text(
        f"dsft doctor: {plural(len(report.nodes), 'node')}, {plural(sum(report.slots.values()), 'rank')},"
        f" {words}; {report.seconds:.1f} s{', quick part' if report.quick else ''}"
    )


if __name__ == "__main__":  # for launchers that start a module: `accelerate launch --module dsft.cli.doctor`
    from dsft.cli.main import main

    main(["doctor", *sys.argv[1:]])
