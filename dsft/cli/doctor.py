"""`dsft doctor`: options -> nodes -> examination -> table and findings, or JSON, and the exit code."""

import dataclasses
import os
import sys
from collections import Counter

from rich.table import Table

from dsft.cli.commands import DoctorOptions
from dsft.config.options import EvalConfig
from dsft.config.reader import describe_unknown, field_types, own_names, read_values, training_types
from dsft.doctor.run import Report, examine, examine_launched
from dsft.errors import EXIT_USER_ERROR, UserError, one_line, raise_if_any
from dsft.launch import hosts_of, remote_environment
from dsft.runtime.console import print_json, show_table, show_text
from dsft.runtime.launcher_env import map_launcher_variables, rank, world_size
from dsft.units import GiB, plural

COLUMNS = ("node", "ranks", "devices", "memory", "/dev/shm", "address", "torch", "deepspeed", "dsft")


def run(options: DoctorOptions, run_words: list[str]) -> None:
    """Examines the nodes and prints the report. The process exits with code 2 if an error was found.

    Raises:
        UserError: unknown options.
    """
    problems: list[str] = []
    known = [*training_types(), *field_types(EvalConfig, DoctorOptions)]  # a preflight may be for either kind of run
    values = own_names(read_values(run_words, problems) or {}, known, [])
    problems += [f"{name}: {describe_unknown(name, known)}" for name in values if name not in known]
    raise_if_any(problems)
    output_dir = str(values.get("output_dir") or "")
    if not options.hostfile:
        map_launcher_variables()
    is_launched = not options.hostfile and world_size() > 1 and "LOCAL_RANK" in os.environ
    if is_launched:
        try:
            report = examine_launched(output_dir=output_dir, quick=options.quick)
        except RuntimeError as error:
            place = f"{os.environ['MASTER_ADDR']}, port {os.environ['MASTER_PORT']}"
            raise UserError(f"rank {rank()} could not join the others at {place}: {one_line(error)}") from None
    else:
        report = examine(
            hosts_of(options) or {"localhost": options.num_gpus},
            variables=remote_environment(os.environ) if options.hostfile else None,
            output_dir=output_dir,
            port=options.master_port,
            master=options.master_addr or "",
            quick=options.quick,
        )
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
            f" {min(flops):.3g} TFLOP/s on the slowest rank, {max(flops):.3g} on the fastest"
        )
    for finding in report.findings:
        show_text(f"{finding.severity}: {finding.where}: {finding.message}  [{finding.code}]")
        show_text(f"    fix: {finding.fix}")
    kinds = Counter(finding.severity for finding in report.findings)
    words = ", ".join(plural(count, kind) for kind, count in kinds.items()) or "nothing found"
    ranks = sum(facts["slots"] for facts in report.facts.values())
    show_text(
        f"dsft doctor: {plural(len(report.facts), 'node')}, {plural(ranks, 'rank')}, {words}; {report.seconds:.1f} s"
    )


if __name__ == "__main__":  # for launchers of modules: `accelerate launch --module dsft.cli.doctor`
    from dsft.cli.main import main

    main(["doctor", *sys.argv[1:]])
