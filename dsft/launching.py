"""The `deepspeed` command line for this machine, for `dsft train` and `dsft eval`: a thin front, not a launcher."""

import os
import shlex
import signal
import subprocess
import sys

from dsft.machine import default_ranks, has_gpu
from dsft.ranks import free_port

LAUNCHER_OPTIONS = ("--hostfile", "--num_nodes", "--num_gpus", "--include", "--exclude", "--master_addr", "--master_port")
"""Passed on to `deepspeed`; everything else goes to the script."""


def deepspeed_command(module: str, argv: list[str]) -> list[str]:
    """The command that starts `module` on all ranks of this machine, or of the hosts named in `argv`."""
    launcher, script = [], []
    words = iter(argv)
    for word in words:
        name = word.partition("=")[0]
        if name not in LAUNCHER_OPTIONS:
            script.append(word)
        elif "=" in word:
            launcher.append(word)
        else:
            launcher += [word, next(words, "")]
    given = {word.partition("=")[0] for word in launcher}
    # DeepSpeed turns CUDA_VISIBLE_DEVICES into --include by itself, but ignores it beside --num_gpus.
    chosen = has_gpu() and os.environ.get("CUDA_VISIBLE_DEVICES")
    if not chosen and not given & {"--hostfile", "--num_gpus", "--include", "--exclude"}:
        launcher += ["--num_gpus", str(default_ranks())]
    if "--master_port" not in given:
        launcher += ["--master_port", str(free_port())]  # the default port fails when two jobs share a machine
    return [sys.executable, "-m", "deepspeed.launcher.runner", *launcher, "--log_level", "error", "--module", module, *script]


def launch(module: str, argv: list[str]) -> int:
    """Print and run the command; returns its exit code. Ctrl-C and SIGTERM reach the launcher."""
    command = deepspeed_command(module, argv)
    print("dsft: " + shlex.join(["deepspeed", *command[3:]]), flush=True)
    environment = os.environ | ({} if has_gpu() else {"DS_ACCELERATOR": "cpu"})
    process = subprocess.Popen(command, env=environment)
    previous = {number: signal.signal(number, lambda received, _: process.send_signal(received)) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        return process.wait()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)

