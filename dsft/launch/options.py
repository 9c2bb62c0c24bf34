"""Reads and checks the options of `dsft launch`; all other words belong to the training or evaluation."""

import dataclasses
import os

from dsft.config.reader import read_options
from dsft.errors import raise_if_any
from dsft.launch.commands import MODULES, LaunchOptions
from dsft.launch.hosts import number_problems


def read_launch(argv: list[str]) -> tuple[LaunchOptions, str, list[str]]:
    """(options, "train" or "eval", words of the script) from `[options] train|eval [words]`; options may also stand
    among the words. The first words of an evaluation are its models.

    Raises:
        UserError: for an unknown word before train or eval, a value that is none, or two ways at once.
    """
    problems: list[str] = []
    values, words = read_options(LaunchOptions, argv, problems)
    options = LaunchOptions(**values)
    if not words or words[0] not in MODULES:
        problems.append(
            f"dsft launch: {(words or ['nothing'])[0]!r} stands where train or eval is expected; before them"
            f" stand only {', '.join('--' + field.name for field in dataclasses.fields(LaunchOptions))}"
        )
    _check(options, problems)
    raise_if_any(problems)
    name, *script = words
    if name == "eval" and script and not script[0].startswith("--"):
        script = ["--model", *script]
    return options, name, script


def _check(options: LaunchOptions, problems: list[str]) -> None:
    if len(options.ways) > 1:
        problems.append(f"--{' and --'.join(options.ways)}: one way to start the nodes at a time")
    for name in ("include", "exclude", "num_nodes"):
        if getattr(options, name) is not None and options.way not in ("hostfile", "local"):
            problems.append(f"--{name} chooses from a host file; --{options.way} takes its nodes from elsewhere")
    if options.no_ssh and not (options.hostfile or options.nodes):
        problems.append("--no_ssh: name the nodes, with --hostfile, or --nodes N and MASTER_ADDR")
    problems += number_problems(options)
    if options.nodes == 0:
        problems.append("--nodes 0: must be 1 or more")
    for name in ("nodes", "node_rank", "master_port", "max_restarts", "wait_for_nodes"):
        if (getattr(options, name) or 0) < 0:
            problems.append(f"{name}={getattr(options, name)}: needs a number of 0 or more")
    for name in ("hostfile", "include", "exclude", "accelerate", "master_addr"):
        if getattr(options, name) == "":  # "$HOSTS" of a variable that is not set: not this machine instead
            problems.append(f"--{name}: needs a value")
    for key in ("hostfile", "accelerate"):
        path = getattr(options, key)
        if path and not os.path.isfile(path):
            problems.append(f"--{key} {path}: there is no such file")
