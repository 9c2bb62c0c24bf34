"""The `dsft` command: everything that is not itself launched on many ranks.

dsft train --config run.yaml      prints and runs the right command for this machine: `deepspeed`, or a single rank
dsft --help                       all commands
dsft train --help [all]           the common options of a command, or all of them
"""

import errno
import pkgutil
import sys

from dsft.cli.commands import COMMANDS
from dsft.cli.help import command_help, commands_help
from dsft.config.reader import read_command, read_flags, read_options
from dsft.errors import EXIT_USER_ERROR, UserError, ends_with_clear_errors, nearest, raise_if_any
from dsft.runtime import quick_imports, quiet_libraries
from dsft.runtime.console import show_text
from dsft.runtime.launcher_env import unset_single_process_env

FULL = (errno.ENOSPC, errno.EDQUOT)
"""Codes of the OSError for a full disk, or a quota."""
SLOW = ("preview", "prepare", "plan", "export", "merge", "chat")
"""Commands that are silent for seconds while they load libraries."""
SYNONYMS = {
    "sft": "train",
    "finetune": "train",
    "evaluate": "eval",
    "perplexity": "eval",
    "inference": "chat",
    "generate": "chat",
}
"""Commands of other programs -> dsft's."""


@ends_with_clear_errors
def main(argv: list[str] | None = None) -> None:
    if argv is None:  # a separate process; a caller's may have a process group from these variables
        unset_single_process_env()
        argv = sys.argv[1:]
    name, *words = argv or ["--help"]
    if name == "help":
        name, *words = [*words, "--help"]
    if name in ("-h", "--help"):
        show_text(commands_help())
        sys.exit(0 if argv else EXIT_USER_ERROR)
    if name in ("--version", "version"):
        from importlib.metadata import version  # takes a seventh of the time of `dsft --help`

        print(f"dsft {version('dsft')}")
        return
    name = SYNONYMS.get(name, name)
    if name not in COMMANDS:
        raise UserError(f"unknown command {name!r}; dsft --help lists them{nearest(name, [*COMMANDS, *SYNONYMS])}")
    if {"-h", "--help"} & set(words):
        if name == "launch":
            name = next((word for word in words if word in ("train", "eval")), name)
        show_text(command_help(name, everything="all" in words))
        return
    quiet_libraries()
    if name in ("train", "eval", "launch"):
        from dsft.launch import launch

        if name != "launch":
            if not words:
                raise UserError("name a YAML file, as dsft init writes it, or options such as --model and --data")
            words = [name, *words]
            flags, _ = read_flags(words, {"no_preflight": bool})
            if not flags:
                words.insert(0, "--no_preflight")
        sys.exit(launch(words))
    run_command(name, words)


def run_command(name: str, words: list[str]) -> None:
    """Parse the options of a command and call it. Raises UserError with every word that cannot be used."""
    command = COMMANDS[name]
    if command.run_options:
        problems = []
        values, run_words = read_options(command.options, words, problems)
        raise_if_any(problems)
        arguments = (command.options(**values), run_words)
    else:
        arguments = (read_command(command.options, words),)
    if name in SLOW and sys.stderr.isatty():
        print("dsft: loading PyTorch and transformers", file=sys.stderr)
    with quick_imports():
        function = pkgutil.resolve_name(command.function)
    try:
        function(*arguments)
    except OSError as error:  # about a file that the command's words name
        if error.filename is None and error.errno not in FULL:
            raise
        where = f"{error.filename}: " if error.filename else ""
        raise UserError(f"{where}{error.strerror}; name another file, folder or disk") from error


if __name__ == "__main__":
    main()
