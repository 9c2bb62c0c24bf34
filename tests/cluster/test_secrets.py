"""No command line of a launch holds a token or password, whatever starts its processes: every user of a node can read
them. Real launches, whose command lines are collected from the kernel as they run.
"""

import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml
from conftest import ROOT

from cluster.slurm import Slurm

pytestmark = [pytest.mark.launch, pytest.mark.cluster]
LAUNCH = ["python", "-m", "dsft.cli.main", "launch"]
SECONDS = 600
SECRETS = {
    "HF_TOKEN": "secret-of-hf",
    "WANDB_API_KEY": "secret-of-wandb",
    "MLFLOW_TRACKING_PASSWORD": "secret-of-mlflow",
    "MLFLOW_TRACKING_URI": "https://user:secret-of-uri@mlflow",
}
PLAIN = {"MLFLOW_EXPERIMENT_NAME": "plain-experiment"}
"""What DeepSpeed's runner does write into command lines."""


@dataclass
class Watched:
    """What every user of the machine could read, and what nobody may have read."""

    command_lines: set[str] = field(default_factory=set)
    tokens: set[str] = field(default_factory=set)
    """Of the launch, as its ranks get them."""


@contextmanager
def watching(hosts) -> Iterator[Watched]:
    """All command lines of this machine, and with it of its test hosts, every few hundredths of a second."""
    watched, ended = Watched(), threading.Event()
    earlier = {file for host in hosts for file in host.home.glob(".cache/dsft/launch-*")}  # of ranks that never started

    def watch() -> None:
        while not ended.is_set():
            for process in Path("/proc").glob("[0-9]*"):
                try:
                    line = (process / "cmdline").read_bytes().decode(errors="replace").replace("\0", " ")
                    if line not in watched.command_lines:
                        watched.command_lines.add(line)
                        environment = (process / "environ").read_bytes().decode(errors="replace")
                        if "secret-of-" in environment:  # of this test; other launches may run on this machine
                            watched.tokens |= set(re.findall(r"DSFT_LAUNCHER=[^\0]*:(?!@)(\w+)\0", environment))
                except OSError:
                    pass  # it has ended
            for host in hosts:
                for file in set(host.home.glob(".cache/dsft/launch-*")) - earlier:
                    watched.tokens.add(file.read_text() if file.exists() else "")
            time.sleep(0.02)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield watched
    finally:
        ended.set()
        thread.join()
        watched.tokens.discard("")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("way", "programs"),
    [
        ("--hostfile", ("pdsh", "ssh")),
        ("--accelerate", ("pdsh", "ssh")),
        ("--slurm", ("srun",)),
        ("tasks.sbatch", ("srun",)),
        ("mpirun", ("mpirun",)),
    ],
)
def test_no_command_line_of_a_launch_holds_a_secret(hosts, options, tmp_path, tmp_path_factory, way, programs):
    hostfile, log = hosts.hostfile(tmp_path / "hostfile", [1, 1]), tmp_path / "log.txt"
    words = {key: value for key, value in options(tmp_path / "run").items() if key != "zero" or way != "--accelerate"}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(words))
    script = ["--config", str(tmp_path / "run.yaml"), "--run_name", "of-the-test"]
    with watching(hosts) as watched:
        if way in ("--slurm", "tasks.sbatch"):
            job = tmp_path / "job.sh"
            launch = " ".join([*LAUNCH, "--slurm", "--num_gpus", "1", "train", *script])
            job.write_text(f"#!/bin/bash\ncd {ROOT}\n{launch}\n")
            command = [job] if way == "--slurm" else ["--gres=none", "scripts/slurm/tasks.sbatch", *script]
            with Slurm([hosts[0], hosts[1]], tmp_path_factory.mktemp("slurm-secrets") / "files") as slurm:
                number = slurm.submit(
                    ["--nodes=2", "--time=60", f"--output={log}", *command], RANKS_PER_NODE="1", **SECRETS
                )
                ended = slurm.wait(number, timeout=SECONDS)["JobState"] == "COMPLETED"
        else:
            command = {
                "--hostfile": [*LAUNCH, "--hostfile", hostfile, "train", *script],
                "--accelerate": [*LAUNCH, "--accelerate", accelerate_file(tmp_path, hostfile), "train", *script],
                "mpirun": ["scripts/mpi/train", *script],
            }[way]
            variables = {"HOSTFILE": str(hostfile), "NET": "10.77.0.0/24"} if way == "mpirun" else {}
            result = hosts[0].run(command, timeout=SECONDS, **SECRETS, **PLAIN, **variables)
            log.write_text(result.stdout + result.stderr)
            ended = result.returncode == 0
    assert ended, log.read_text()[-5000:]
    lines = watched.command_lines
    for program in programs:
        assert any(re.match(rf"(\S*/)?{program} ", line) and "of-the-test" in line for line in lines), program
    if way == "--hostfile":  # variables are seen where they stand in command lines
        assert any("plain-experiment" in line for line in lines)
    # What starts a rank without `dsft launch` has no token of one.
    assert bool(watched.tokens) == way.startswith("--")
    secrets = {*watched.tokens, "secret-of-"}
    assert [line for line in lines if any(secret in line for secret in secrets)] == []


def accelerate_file(folder: Path, hostfile: Path) -> Path:
    """The shipped file that starts ranks through pdsh, for these hosts."""
    settings = yaml.safe_load((ROOT / "ds_configs/accelerate/zero3_2x8_pdsh.yaml").read_text())
    engine = {"deepspeed_config_file": str(ROOT / "ds_configs/zero3.json"), "deepspeed_hostfile": str(hostfile)}
    settings |= {"num_processes": 2, "deepspeed_config": settings["deepspeed_config"] | engine}
    (folder / "accelerate.yaml").write_text(yaml.safe_dump(settings))
    return folder / "accelerate.yaml"
