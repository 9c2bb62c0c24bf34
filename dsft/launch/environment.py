"""The environment of a launch: what of this shell's reaches the other nodes, where the ranks find the launch, and what
all of them are given alike: the job's id, and the configuration of where it was started.
"""

import os
import re
import secrets
import shlex
import subprocess
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from dsft.config.reader import LONGEST_SENT, SENT_FILES, pack_files, read_file_and_flags, read_flags
from dsft.launch.launchers import Launcher
from dsft.runtime.console import OPERATOR_LOG
from dsft.runtime.disk import ENV_FILE
from dsft.runtime.hardware import has_gpu, require_seen_gpus
from dsft.runtime.launcher_env import JOB, LAUNCH, LOOPBACK, WORDS, Node, own_addresses
from dsft.watchdog import processes
from dsft.watchdog.messages import TOKEN_FOLDER, VARIABLE, LauncherLink

FORWARDED = re.compile(
    r"(HF|HUGGINGFACE|TRANSFORMERS|TOKENIZERS|NCCL|GLOO|UCX|FI|TORCH|TORCHINDUCTOR|TRITON|PYTORCH|"
    r"OMP|MKL|DS|DSFT|DEEPSPEED|WANDB|MLFLOW|TRACKIO)_\w+|XDG_CACHE_HOME|LD_LIBRARY_PATH|CUDA_HOME"
)
OF_ONE_START = (VARIABLE, processes.VARIABLE)  # variables of a launcher's process and its own ranks
OF_ONE_LAUNCH = (*OF_ONE_START, LAUNCH, WORDS, JOB, SENT_FILES)  # a file of accelerate's may hold an earlier one's
SECRET = re.compile(r"TOKEN(?!IZERS)|(?<!IB_P)KEY|SECRET|PASSW|CREDENTIAL")  # NCCL_IB_PKEY numbers a partition
"""In the name of a variable that is never forwarded: every user of a node can read another's command lines."""
PASSWORD_IN_URL = re.compile(r"//[^/@\s]*:[^/@\s]+@")
SAVE_TOKEN = (
    "umask 077; mkdir -p {folder} && cd {folder} && find . -name 'launch-*' -mtime +1 -delete; cat > {name}-$(uname -n)"
)
"""What a node does with its standard input; removes what was left by nodes that never read theirs."""
SEND_TOKEN_SECONDS = 30.0
MOST_SESSIONS = 64
SSH_OPTIONS = "-o BatchMode=yes -o ServerAliveInterval=15 -o ServerAliveCountMax=4"
"""No prompt that nobody sees, and an end within a minute where a link is cut; ssh alone would wait for hours."""


def forwarded(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that a remote shell gets: those that DeepSpeed hands on by itself (`main` in
    deepspeed/launcher/runner.py), and FORWARDED beside them.
    """
    from deepspeed.launcher.runner import EXPORT_ENVS  # here: seconds

    given = {
        name: value
        for name, value in environment.items()
        if "\n" not in value  # DeepSpeed's file of variables has one in each line
        and not is_secret(name, value)
        and (name.startswith(tuple(EXPORT_ENVS)) or (FORWARDED.fullmatch(name) and name not in OF_ONE_START and value))
    }
    return given | {"PYTHONPATH": ":".join(filter(None, [os.getcwd(), environment.get("PYTHONPATH")]))}


def is_secret(name: str, value: str) -> bool:
    """Whether a variable may not stand in a command line: by its name, or as it holds an address with a password."""
    return bool(SECRET.search(name) or PASSWORD_IN_URL.search(value))


def remote_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that `dsft doctor --hostfile` sets on the other nodes, as `dsft launch --hostfile` does."""
    return _in_double_quotes(forwarded(environment))


def _in_double_quotes(variables: Mapping[str, str]) -> dict[str, str]:
    """Text between double quotes, by name: `variables`, which a node's shell reads as they are here, and the user's own
    lines, which it reads itself ($HOME in one is that of each node).
    """
    quoted = {name: re.sub(r"([\\\"$`])", r"\\\1", value) for name, value in variables.items()}
    return quoted | _own_lines()


def accelerator() -> dict[str, str]:
    """The variables by which DeepSpeed knows that there is no GPU, and torch that this is no news. Raises UserError:
    there are GPUs that torch does not see.
    """
    require_seen_gpus()
    if has_gpu():
        return {}
    # A build of torch for CUDA would say in each of the launcher's processes that no CUDA runtime is found.
    logs = ",".join(filter(None, [os.environ.get("TORCH_LOGS"), f"-{OPERATOR_LOG}"]))
    return {"DS_ACCELERATOR": "cpu", "TORCH_LOGS": logs}


def shared_environment(launcher: Launcher, script: list[str]) -> tuple[dict[str, str], list[str]]:
    """(variables for all ranks and the preflight before them, notes for the user)."""
    variables = {JOB: launcher.job_id(script)}
    if launcher.is_local or launcher.is_given_on_every_node:
        return variables, []
    values, flags = read_file_and_flags(script, []) or {}, read_flags(script, [])  # problems are reported by the ranks
    named = [flags.get("config"), values.get("zero"), values.get("chat_template")]
    paths = [path for path in named if isinstance(path, str) and Path(path).expanduser().is_file()]
    notes = []
    secret = [key for key in values if key.endswith("_token") and values[key] and key not in flags]
    if secret and flags.get("config") in paths:
        paths.remove(flags["config"])
        notes.append(
            f"{flags['config']} holds {', '.join(secret)} and is not sent to the nodes, where every user could read it:"
            " every node needs a copy. `hf auth login` on each node keeps a token out of it"
        )
    packed = pack_files(paths)
    if len(packed) > LONGEST_SENT:
        return variables, [f"{' and '.join(paths)}: too long to be sent; every node needs a copy of the same content"]
    return variables | {SENT_FILES: packed}, notes


def launcher_environment(
    launcher: Launcher, nodes: list[Node], link: LauncherLink
) -> tuple[dict[str, str], Path | None]:
    """The environment of a launcher, and the file of variables that it takes to the other nodes, if any.

    Args:
        nodes: those that it reaches through ssh. On each the launch's token is saved, through the standard input of an
            ssh, in a file that its owner alone reads (`connect_to_launcher` of the watchdog). A node where that fails
            starts its ranks all the same: its watchdog prints a note.
        link: waits for the ranks.
    """
    peers = [node.name for node in nodes] or launcher.peers()
    addresses = own_addresses(peers) if peers else [LOOPBACK]
    ssh, token_file = f"{os.environ.get('PDSH_SSH_ARGS_APPEND', '')} {SSH_OPTIONS}".strip(), None
    if nodes:
        token_file = f"launch-{secrets.token_hex(8)}"
        script = f"sh -c {shlex.quote(SAVE_TOKEN.format(folder=TOKEN_FOLDER, name=token_file))}"

        def send(node: Node) -> None:
            with suppress(OSError, subprocess.TimeoutExpired):
                subprocess.run(
                    ["ssh", *shlex.split(ssh), "-o", "ConnectTimeout=10", node.name, script],
                    input=link.server.token.encode(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    timeout=SEND_TOKEN_SECONDS,
                )

        with ThreadPoolExecutor(min(len(nodes), MOST_SESSIONS)) as pool:
            list(pool.map(send, nodes))
    added = link.variable(addresses, token_file=token_file) | launcher.variables
    added[processes.VARIABLE] = ",".join(launcher.processes)
    environment = os.environ | added
    # Not for other nodes, which may have GPUs where a login node has none: srun and accelerate hand on all variables.
    if launcher.is_local or launcher.is_given_on_every_node or (nodes and not launcher.exports_everything):
        environment |= accelerator()
    if not (nodes or launcher.exports_everything):
        return environment, None
    if nodes:  # DeepSpeed writes MLFLOW_TRACKING_PASSWORD, accelerate every variable into the command lines of pdsh
        environment = {name: value for name, value in environment.items() if not is_secret(name, value)}
    env_file = write_env_file({} if launcher.exports_everything else forwarded(os.environ) | added)
    return environment | {"DS_ENV_FILE": str(env_file), "PDSH_SSH_ARGS_APPEND": ssh}, env_file


def _own_lines() -> dict[str, str]:
    """The user's own `.deepspeed_env` files, in the order in which DeepSpeed reads them; the later one wins."""
    files = [folder / os.environ.get("DS_ENV_FILE", ".deepspeed_env") for folder in (Path.home(), Path.cwd())]
    lines = [line.strip() for file in files if file.is_file() for line in file.read_text().splitlines() if "=" in line]
    variables = dict(line.split("=", 1) for line in lines)
    return {name: value for name, value in variables.items() if name not in OF_ONE_LAUNCH}


def write_env_file(variables: Mapping[str, str]) -> Path:
    """A temporary file for DeepSpeed's DS_ENV_FILE, for what a launcher appends to it would stay in the working folder:
    `variables` and the user's own lines. It stays open as long as this process: later launches see that it is needed.
    """
    # DeepSpeed puts a value between double quotes (`add_export` in multinode_runner.py); pdsh writes the host for %h.
    lines = _in_double_quotes({name: value.replace("%", "%%") for name, value in variables.items()})
    descriptor, path = tempfile.mkstemp(prefix=ENV_FILE)
    with open(descriptor, "w", closefd=False) as file:
        file.writelines(f"{name}={value}\n" for name, value in lines.items())
    return Path(path)
