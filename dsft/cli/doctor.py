"""`dsft doctor`: options -> nodes -> examination -> screen or JSON, and the exit code."""

import argparse
import contextlib
import json
import os
import sys

from dsft.cluster.doctor.findings import Report
from dsft.errors import EXIT_USER_ERROR, UserError

DESCRIPTION = """Examines the machines of a run before any training process starts, in less than half a minute:
drivers, versions, ports, clocks, folders, memory and disk against the plan, then sums and rates between all nodes.

    dsft doctor                                          this machine
    dsft doctor --hostfile H --config run.yaml           every host of H through ssh, and the run's files and plan
    dsft doctor --hostfile H --quick                     what dsft launch does by default
    srun -n 16 dsft doctor                               the ranks that a launcher starts, without ssh: also
                                                         mpirun -n 16 dsft doctor, torchrun, deepspeed and
                                                         accelerate launch ... --module dsft.cli.doctor

Options that are not listed here are the run's own, as dsft train takes them (--model, --data, --output_dir ...).
Exit code 0 without errors, 2 with. What each finding means: docs/doctor.md."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.formatter_class = DESCRIPTION, argparse.RawDescriptionHelpFormatter
    parser.add_argument("--hostfile", help="DeepSpeed's: one line per node, `name slots=N`")
    parser.add_argument("--include", default="", help="as deepspeed's: node-1@node-2:0,2")
    parser.add_argument("--exclude", default="", help="as deepspeed's")
    parser.add_argument("--num_nodes", type=int, default=-1, help="the first so many hosts")
    parser.add_argument("--num_gpus", type=int, default=-1, help="so many slots per node")
    parser.add_argument(
        "--master_addr",
        default="",
        help="default: the first address that `hostname -I` prints on the first node, as deepspeed",
    )
    parser.add_argument(
        "--master_port", type=int, help="of the launch to come (default: 29500, and a warning where it is busy)"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="without plan, compiler and the links of every pair (a ring of neighbours instead)",
    )
    parser.add_argument("--only_findings", action="store_true", help="without the tables, where nothing is wrong")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Examine and print. The process ends with exit code 2 where an error was found."""
    if not options.hostfile and under_launcher():
        from dsft.cluster.doctor.launched import examine_launched

        examine_launched(
            argv=options.run_options, quick=options.quick, deliver=lambda report: _print(report, options)
        )  # does not come back
    from dsft.cluster.doctor.examine import examine

    nodes = _nodes(options)
    with contextlib.redirect_stdout(sys.stderr):  # what libraries print
        report = examine(
            nodes,
            argv=options.run_options,
            quick=options.quick,
            master_port=options.master_port,
            master_addr=options.master_addr,
            ssh=bool(options.hostfile),
        )
    _print(report, options)
    if report.has_errors:
        sys.exit(EXIT_USER_ERROR)


def _print(report: Report, options: argparse.Namespace) -> None:
    if options.json:
        print(json.dumps(report.as_dict(), indent=2), flush=True)
    else:
        from dsft.cli.doctor_report import show

        show(report, only_findings=options.only_findings)


def _nodes(options: argparse.Namespace) -> list:
    from dsft.runtime.hostfile import local_node, read_hosts

    if options.hostfile:
        return read_hosts(
            options.hostfile,
            include=options.include,
            exclude=options.exclude,
            num_nodes=options.num_nodes,
            num_gpus=options.num_gpus,
        )
    if options.include or options.exclude or options.num_nodes > 1:
        raise UserError(["--include, --exclude and --num_nodes choose among the hosts of --hostfile; name one"])
    return [local_node(slots=options.num_gpus if options.num_gpus > 0 else None)]


def under_launcher() -> bool:
    """Whether srun, mpirun, torchrun or accelerate started this process as one of several; MPI's and SLURM's variables
    become RANK and WORLD_SIZE.
    """
    try:
        from dsft.runtime.launcher_env import map_launcher_variables
    except ImportError:
        pass
    else:
        map_launcher_variables()
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


if __name__ == "__main__":  # for launchers that start a module: `accelerate launch --module dsft.cli.doctor`
    from dsft.cli.main import main

    main(["doctor", *sys.argv[1:]])
