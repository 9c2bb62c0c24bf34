"""What all ranks of a launch are given alike: the job's id, its port, and the configuration of where it is started."""

import os
import secrets
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

from dsft.config.reader import LONGEST_SENT, SENT_FILES, pack_files, read_file_and_flags, read_flags
from dsft.launch.hosts import hosts_through_ssh
from dsft.runtime.launcher_env import JOB

if TYPE_CHECKING:
    from dsft.launch.commands import LaunchOptions


IDENTIFYING = ("output_dir", "run", "model", "data", "adapter")
"""Options that tell jobs of one working folder and one name of a file apart."""


def job_id(options: "LaunchOptions", script: list[str]) -> str:
    """An id that another job does not have; the same on all nodes where the command is given on each of them: from the
    working folder, and from what the job reads and writes, as its words and its file say. Not from the file's whole
    content: nodes whose files differ in anything else should meet, and be told in what.
    """
    if not is_given_on_every_node(options):
        return secrets.token_hex(4)
    values = read_file_and_flags(script, []) or read_flags(script, [])  # problems are reported by the ranks
    named = {key: str(values.get(key)) for key in ("config", *IDENTIFYING)}
    return f"{zlib.crc32(repr((os.getcwd(), options.nodes, options.hostfile, named)).encode()):08x}"


def job_port(options: "LaunchOptions", script: list[str]) -> int:
    """Where the nodes of a job meet that cannot ask each other for a free port: what the user says, else a port that
    two jobs seldom have in common.
    """
    given = options.master_port or os.environ.get("MASTER_PORT")
    return int(given or 20000 + int(job_id(options, script), 16) % 10000)


def is_given_on_every_node(options: "LaunchOptions") -> bool:
    """Whether several launches are one job."""
    return options.way == "nodes" or options.no_ssh or (options.way == "accelerate" and not hosts_through_ssh(options))


def shared_environment(options: "LaunchOptions", script: list[str]) -> tuple[dict[str, str], list[str]]:
    """(variables for all ranks, what to tell the user)."""
    variables = {JOB: job_id(options, script)}
    if options.way == "local" or is_given_on_every_node(options):
        return variables, []
    paths, notes = _named_files(script)
    packed = pack_files(paths)
    if len(packed) > LONGEST_SENT:
        return variables, [f"{' and '.join(paths)}: too long to be sent; every node needs a copy of the same content"]
    return variables | {SENT_FILES: packed}, notes


def _named_files(script: list[str]) -> tuple[list[str], list[str]]:
    """(the run's small files that lie here, what to tell the user of those that are not sent)."""
    values = read_file_and_flags(script, [])  # problems are reported by the ranks
    config = read_flags(script, []).get("config")
    named = [path for path in (config, values.get("zero"), values.get("chat_template")) if isinstance(path, str)]
    paths = [path for path in named if Path(path).expanduser().is_file()]
    flags = read_flags(script, [])
    secret = [key for key in values if key.endswith("_token") and values[key] and key not in flags]
    if secret and config in paths:
        paths.remove(config)
        note = (
            f"{config} holds {', '.join(secret)} and is not sent to the nodes, where every user could read it: every"
            " node needs a copy. `hf auth login` on each node keeps a token out of it"
        )
        return paths, [note]
    return paths, []


def set_shared(options: "LaunchOptions", script: list[str]) -> None:
    """Set these variables here, from where they go to the preflight and the ranks."""
    variables, notes = shared_environment(options, script)
    for note in notes:
        print(f"dsft: {note}", flush=True)
    os.environ.update(variables)
