"""What of this shell's environment reaches the other nodes, beyond what DeepSpeed forwards (PYTHON*, NCCL_*)."""

import os
import re
import tempfile
from pathlib import Path

FORWARDED = re.compile(
    r"(HF|HUGGINGFACE|TRANSFORMERS|TOKENIZERS|NCCL|GLOO|UCX|FI|TORCH|TORCHINDUCTOR|TRITON|PYTORCH|"
    r"OMP|MKL|DS|DSFT|DEEPSPEED|WANDB|MLFLOW|TRACKIO)_\w+|XDG_CACHE_HOME|LD_LIBRARY_PATH|CUDA_HOME"
)
SECRET = re.compile(r"TOKEN|KEY|SECRET|PASSW|CREDENTIAL")
"""Never forwarded: every user of a node can read another's command lines."""
SSH_OPTIONS = "-o BatchMode=yes -o ServerAliveInterval=15 -o ServerAliveCountMax=4"
"""No prompt that nobody sees, and an end within a minute where a link is cut; ssh alone would wait for hours."""


def forwarded(environment: dict[str, str]) -> dict[str, str]:
    """The variables that a remote shell gets; those that DeepSpeed's quoting would break are left out."""
    return {
        name: value
        for name, value in environment.items()
        if FORWARDED.fullmatch(name)
        and not (SECRET.search(name) and name != "TOKENIZERS_PARALLELISM")
        and value
        and not re.search(r"[\"'$`\\\n]", value)
    }


def write_env_file(variables: dict[str, str]) -> Path:
    """A temporary file for DeepSpeed's DS_ENV_FILE: `variables`, and over them those of the user's own .deepspeed_env
    files.
    """
    lines = [f"{name}={value}" for name, value in variables.items()]
    name = os.environ.get("DS_ENV_FILE", ".deepspeed_env")
    for folder in (Path.home(), Path.cwd()):  # the order in which DeepSpeed reads them; the later one wins
        if (folder / name).is_file():
            lines += [line for line in (folder / name).read_text().splitlines() if "=" in line]
    descriptor, path = tempfile.mkstemp(prefix="dsft-env-")
    os.write(descriptor, ("\n".join(lines) + "\n").encode())
    os.close(descriptor)
    return Path(path)
