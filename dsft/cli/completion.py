"""`dsft completion bash|zsh|fish`: prints what teaches a shell the commands of `dsft` and their options.

    source <(dsft completion bash)

`shtab` writes it, from a parser that is made of the same fields as help. That parser reads no command line.
"""

import argparse
import re

import shtab

from dsft.cli.commands import COMMANDS, Command, CompletionOptions
from dsft.cli.help import FieldDoc, class_groups, command_groups


def print_completion(options: CompletionOptions) -> None:
    """Print the script for a shell."""
    print(shtab.complete(all_commands(), options.shell))


def all_commands() -> argparse.ArgumentParser:
    """Make the parser of all commands."""
    parser = argparse.ArgumentParser(prog="dsft")
    commands = parser.add_subparsers()
    for name, command in COMMANDS.items():
        of_command = commands.add_parser(name, help=command.summary)
        if name == "launch":
            of_command.add_argument("command", choices=["train", "eval"])
        if name == "launch" or command.run_options:
            of_command.add_argument("--config", help="YAML file with options of the run").complete = shtab.FILE
        for field in _fields(name, command):
            _add(of_command, field)
    return parser


def _fields(name: str, command: Command) -> list[FieldDoc]:
    """Returns all options of a command: its own and those of the run that it takes beside."""
    groups = command_groups(command)
    if command.run_options:
        groups = groups + class_groups(command.run_options)
    if name == "launch":
        groups = groups + command_groups(COMMANDS["train"])
    return list({field.name: field for group in groups for field in group.fields}.values())


def _add(parser: argparse.ArgumentParser, field: FieldDoc) -> None:
    words = {"true|false": ["true", "false"]}.get(field.placeholder.strip("[]"))
    if words is None and re.fullmatch(r"[a-z0-9][\w.-]*(\|[\w.-]+)+", field.placeholder):
        words = field.placeholder.split("|")
    # Of what shtab takes over, only the first sentence fits beside the option.
    text = re.split(r"(?<=[.;:]) ", field.text)[0].rstrip(".;:").replace("%", "%%")
    argument = parser.add_argument(field.name if field.is_positional else f"--{field.name}", help=text, choices=words)
    if words is None:
        argument.complete = shtab.FILE
