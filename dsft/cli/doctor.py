"""`dsft doctor`: options -> nodes -> examination -> screen or JSON, and the exit code."""

import contextlib
import json
import os
import sys

from dsft.cli.commands import DoctorOptions
from dsft.cluster.doctor.findings import Report
from dsft.errors import EXIT_USER_ERROR, UserError


def run(options: DoctorOptions, run_words: list[str]) -> None:
    """Examine and print. The process ends with exit code 2 where an error was found."""
    if not options.hostfile and under_launcher():
        from dsft.cluster.doctor.launched import examine_launched

        examine_launched(
            argv=run_words, quick=options.quick, deliver=lambda report: _print(report, options)
        )  # does not come back
    from dsft.cluster.doctor.examine import examine

    nodes = _nodes(options)
    with contextlib.redirect_stdout(sys.stderr):  # what libraries print
        report = examine(
            nodes,
            argv=run_words,
            quick=options.quick,
            master_port=options.master_port,
            master_addr=options.master_addr,
            ssh=bool(options.hostfile),
        )
    _print(report, options)
    if report.has_errors:
        sys.exit(EXIT_USER_ERROR)


def _print(report: Report, options: DoctorOptions) -> None:
    if options.json:
        print(json.dumps(report.as_dict(), indent=2), flush=True)
    else:
        from dsft.cli.doctor_report import show

        show(report, only_findings=options.only_findings)


def _nodes(options: DoctorOptions) -> list:
    from dsft.runtime.hostfile import local_node, read_hosts

    if options.hostfile:
        return read_hosts(
            options.hostfile,
            include=options.include,
            exclude=options.exclude,
            num_nodes=options.num_nodes or -1,
            num_gpus=options.num_gpus or -1,
        )
    if options.include or options.exclude or (options.num_nodes or 1) > 1:
        raise UserError(["--include, --exclude and --num_nodes choose among the hosts of --hostfile; name one"])
    return [local_node(slots=options.num_gpus or None)]


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
