"""The environment of a launch: what of this shell's reaches the other nodes, and where the ranks find the launch."""

import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path

from dsft.cluster.launch.commands import LaunchOptions, told_to_watchdog
from dsft.runtime.hardware import has_gpu, require_seen_gpus
from dsft.runtime.hostfile import Node
from dsft.runtime.launcher_env import LOOPBACK, first_host, own_addresses
from dsft.watchdog import processes
from dsft.watchdog.launcher_link import VARIABLE, LauncherLink

FORWARDED = re.compile(
    r"(HF|HUGGINGFACE|TRANSFORMERS|TOKENIZERS|NCCL|GLOO|UCX|FI|TORCH|TORCHINDUCTOR|TRITON|PYTORCH|"
    r"OMP|MKL|DS|DSFT|DEEPSPEED|WANDB|MLFLOW|TRACKIO)_\w+|XDG_CACHE_HOME|LD_LIBRARY_PATH|CUDA_HOME"
)
OF_ONE_LAUNCH = (VARIABLE, processes.VARIABLE)
"""Variables of a launch and its own ranks."""
SECRET = re.compile(r"TOKEN|KEY|SECRET|PASSW|CREDENTIAL")
"""Never forwarded: every user of a node can read another's command lines."""
SSH_OPTIONS = "-o BatchMode=yes -o ServerAliveInterval=15 -o ServerAliveCountMax=4"
"""No prompt that nobody sees, and an end within a minute where a link is cut; ssh alone would wait for hours."""


def forwarded(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that a remote shell gets; those that DeepSpeed's quoting would break are left out."""
    return {
        name: value
        for name, value in environment.items()
        if FORWARDED.fullmatch(name)
        and name not in OF_ONE_LAUNCH
        and not (SECRET.search(name) and name != "TOKENIZERS_PARALLELISM")
        and value
        and not re.search(r"[\"'$`\\\n]", value)
    }


def remote_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that `dsft launch --hostfile` and `dsft doctor --hostfile` set on the other nodes, for an
    environment here: what DeepSpeed hands on by itself, what is added to it, and the lines of `.deepspeed_env`.
    """
    from deepspeed.launcher.runner import EXPORT_ENVS  # here: seconds

    exported = {name: value for name, value in environment.items() if name.startswith(tuple(EXPORT_ENVS))}
    exported["PYTHONPATH"] = ":".join(filter(None, [os.getcwd(), environment.get("PYTHONPATH")]))
    return exported | forwarded(environment) | accelerator() | _own_lines()


def accelerator() -> dict[str, str]:
    """What tells DeepSpeed that there is no GPU.

    Raises:
        UserError: where there are GPUs that torch does not see.
    """
    require_seen_gpus()
    return {} if has_gpu() else {"DS_ACCELERATOR": "cpu"}


def launcher_environment(
    options: LaunchOptions, nodes: list[Node], link: LauncherLink
) -> tuple[dict[str, str], Path | None]:
    """The environment of a launcher, and the file of variables that it takes to the other nodes, if any.

    Args:
        nodes: those that it reaches through ssh.
        link: waits for the ranks.
    """
    names = [node.name for node in nodes]
    if options.way == "slurm":
        names = [first_host(os.environ["SLURM_JOB_NODELIST"])]
    elif options.way == "accelerate" and not nodes:
        names = [options.master_addr or os.environ.get("MASTER_ADDR") or LOOPBACK]
    added = link.variable(own_addresses(names) if names else [LOOPBACK]) | told_to_watchdog(options) | accelerator()
    environment = os.environ | added
    if not nodes and options.way != "accelerate":
        return environment, None
    # accelerate appends all variables, secrets too, to this file, which would stay in the working folder.
    env_file = write_env_file(_own_lines() if options.accelerate else forwarded(os.environ) | added | _own_lines())
    ssh = f"{os.environ.get('PDSH_SSH_ARGS_APPEND', '')} {SSH_OPTIONS}".strip()
    return environment | {"DS_ENV_FILE": str(env_file), "PDSH_SSH_ARGS_APPEND": ssh}, env_file


def _own_lines() -> dict[str, str]:
    """The user's own `.deepspeed_env` files, in the order in which DeepSpeed reads them; the later one wins."""
    variables: dict[str, str] = {}
    for folder in (Path.home(), Path.cwd()):
        file = folder / os.environ.get("DS_ENV_FILE", ".deepspeed_env")
        if file.is_file():
            lines = [line.strip() for line in file.read_text().splitlines() if "=" in line]
            variables |= dict(line.split("=", 1) for line in lines)
    # Those of an earlier launch: accelerate writes them there.
    return {name: value for name, value in variables.items() if name not in OF_ONE_LAUNCH}


def write_env_file(variables: dict[str, str]) -> Path:
    """A temporary file for DeepSpeed's DS_ENV_FILE."""
    descriptor, path = tempfile.mkstemp(prefix="dsft-env-")
    with open(descriptor, "w") as file:
        file.writelines(f"{name}={value}\n" for name, value in variables.items())
    return Path(path)
