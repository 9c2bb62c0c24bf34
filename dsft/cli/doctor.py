"""`dsft doctor`: options -> nodes -> examination -> screen or JSON, and the exit code."""

import contextlib
import json
import os
import sys

from dsft.cli.commands import DoctorOptions
from dsft.cli.doctor_report import show
from dsft.doctor.examine import Report, examine
from dsft.errors import EXIT_USER_ERROR, UserError, raise_if_any
from dsft.launch.environment import remote_environment
from dsft.launch.hosts import hosts_of, number_problems
from dsft.runtime.launcher_env import Node, local_node, map_launcher_variables


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
    return [local_node(slots=options.num_gpus)]


if __name__ == "__main__":  # for launchers that start a module: `accelerate launch --module dsft.cli.doctor`
    from dsft.cli.main import main

    main(["doctor", *sys.argv[1:]])
