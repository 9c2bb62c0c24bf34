"""The variables of this shell on other nodes: one list, for the ranks as for the doctor that examines before them."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from dsft.launch.environment import accelerator, forwarded, launcher_environment, remote_environment
from dsft.launch.launchers import build_command, read_launch
from dsft.launch.supervise import LauncherProcess, launch, resumed
from dsft.runtime.launcher_env import ssh_command
from dsft.watchdog.messages import LauncherLink, connect_to_launcher

PDSH = """#!/bin/bash
while [ "$1" != -w ]; do shift; done
shift 2
command="$*"
shown=" -c 'import os; print(dict(os.environ))' #"
command=${command//\\%\\%/$'\\x01'}
command=${command//\\%h/node}
command=${command//\\%n/0}
command=${command//$'\\x01'/%}
echo "$command" >> "$HOME/command_lines"
exec env -i HOME="$HOME" bash -c "${command/ -u -m deepspeed.launcher.launch/$shown}"
"""
"""Runs its command here, in an environment as empty as a remote shell's, with Python in the place of the ranks."""
SSH = """#!/bin/bash
while [ "$1" = -o ]; do shift 2; done
[ "$2" = hostname ] && exec hostname
echo "$*" >> "$HOME/command_lines"
exec env -i HOME="$HOME" bash -c "${*:2}"
"""
SET = {
    "HF_HOME": "/data/hf",
    "NCCL_DEBUG": "INFO",
    "UCX_TLS": "tcp,self",
    "OMP_NUM_THREADS": "3",
    "XDG_CACHE_HOME": "/data/cache and more",
    "NCCL_DEBUG_FILE": "/tmp/nccl.%h.%p",
    "WANDB_NAME": "a `b` $HOME 'c' \\ \"d\" %n",
    "UCX_NOTE": "$HOME",
    "PYTHONPATH": "/data/lib",
    "HF_TOKEN": "t",
    "EDITOR": "vi",
}
REMOTE_SHELL = {"HOME", "PWD", "SHLVL", "_", "OLDPWD"}


@pytest.fixture
def shell(tmp_path, monkeypatch):
    for name, text in {"pdsh": PDSH, "ssh": SSH}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(tmp_path))
    for name, value in SET.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    Path("hosts").write_text("node-0 slots=1\nnode-1 slots=1\n")
    lines = "HF_HOME=/own\nMY_OWN=$HOME/mine\nDSFT_LAUNCHER=10.0.0.1:1:of-an-earlier-launch\n"
    Path(".deepspeed_env").write_text(lines)


BUILD_FOR_CUDA = """
import torch
torch.cuda.is_available, torch.cuda._is_compiled, torch.version.cuda = (lambda: False), (lambda: True), "13.0"
import torch.utils.cpp_extension as extension
assert extension.CUDA_HOME == "/usr"
"""


@pytest.mark.exhaustive
def test_a_build_of_torch_for_cuda_does_not_tell_each_time_that_there_is_no_gpu(monkeypatch):
    def stderr_with(**variables: str) -> str:
        environment = os.environ | {"CUDA_HOME": "/usr"} | variables
        command = [sys.executable, "-c", BUILD_FOR_CUDA]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stderr

    monkeypatch.setenv("TORCH_LOGS", "+torch.distributed")
    assert "No CUDA runtime is found" in stderr_with()
    variables = accelerator()
    assert "No CUDA runtime is found" not in stderr_with(**variables)
    assert variables["TORCH_LOGS"].startswith("+torch.distributed,")


def test_the_doctor_sees_the_environment_of_the_ranks_and_no_command_line_of_pdsh_or_ssh_holds_a_token(
    shell, monkeypatch, tmp_path, capfd
):
    """The launch's own goes to a file of the node's owner; DeepSpeed exports all of MLFLOW_*, passwords too."""
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "secret-1")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://user:secret-2@mlflow")
    monkeypatch.setenv("WANDB_BASE_URL", "https://user:secret-3@wandb")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "plain")
    options, name, script = read_launch(
        ["--hostfile", "hosts", "--master_addr", "node-0", "--master_port", "1", "train"]
    )
    process = LauncherProcess(options, build_command(options, name, script), saves=False)
    token = process.link.server.token
    process.run()
    lines = (tmp_path / "command_lines").read_text()
    ranks = eval(capfd.readouterr().out)
    launcher = ranks["DSFT_LAUNCHER"]
    assert ranks["MLFLOW_EXPERIMENT_NAME"] == "plain" and "deepspeed.launcher.launch" in lines
    assert not [secret for secret in (token, "secret-1", "secret-2", "secret-3") if secret in lines + str(ranks)]
    words = [sys.executable, "-c", "import os; print(dict(os.environ))"]
    command = ssh_command("node-1", words, remote_environment(os.environ))
    assert "secret" not in " ".join(command)
    doctor = eval(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert "of-an-earlier-launch" not in ranks.pop("DSFT_LAUNCHER")
    assert "deepspeed" in ranks.pop("DSFT_LAUNCHER_PROCESSES").split(",")
    for variables in (ranks, doctor):
        for name in REMOTE_SHELL:
            variables.pop(name, None)
    assert ranks == doctor
    assert ranks["HF_HOME"] == "/own" and ranks["MY_OWN"] == f"{tmp_path}/mine" and ranks["DS_ACCELERATOR"] == "cpu"
    assert ranks["PYTHONPATH"] == f"{os.getcwd()}:/data/lib" and ranks["XDG_CACHE_HOME"] == SET["XDG_CACHE_HOME"]
    assert "HF_TOKEN" not in ranks and "EDITOR" not in ranks
    # Both of the "nodes" are this machine.
    [file] = (tmp_path / ".cache/dsft").iterdir()
    assert file.read_text() == token and file.stat().st_mode & 0o777 == 0o600
    monkeypatch.setenv("DSFT_LAUNCHER", launcher)
    with pytest.raises(ConnectionRefusedError):  # the token was found; the launch has ended
        connect_to_launcher(0, "node-0")
    assert not file.exists() and connect_to_launcher(0, "node-0") is None


@pytest.mark.parametrize(
    ("way", "is_told"),
    [
        ([], True),
        (["--nodes", "2"], True),
        (["--hostfile", "hosts"], True),  # DeepSpeed's runner here, which hands on what its file has
        (["--slurm"], False),
        (["--accelerate", "pdsh.yaml"], False),
    ],
)
def test_a_login_node_without_gpus_starts_no_cpu_ranks_on_nodes_that_have_some(way, is_told, shell, monkeypatch):
    engine = {"deepspeed_multinode_launcher": "pdsh", "deepspeed_hostfile": "hosts"}
    Path("pdsh.yaml").write_text(yaml.safe_dump({"num_machines": 2, "num_processes": 2, "deepspeed_config": engine}))
    monkeypatch.delenv("DS_ACCELERATOR")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "localhost")
    launcher = read_launch([*way, "train"])[0].launcher
    environment, path = launcher_environment(launcher, launcher.ssh_nodes(), link := LauncherLink())
    link.close()
    assert (environment.get("DS_ACCELERATOR") == "cpu") == is_told
    if path:
        assert "DS_ACCELERATOR" not in path.read_text()
        path.unlink()
    assert "DS_ACCELERATOR" not in remote_environment(os.environ)


def test_secrets_and_values_of_several_lines_stay_here():
    plain = {"HF_HOME": "/hf", "NCCL_DEBUG": "INFO", "TOKENIZERS_PARALLELISM": "false", "NCCL_IB_PKEY": "0x8001"}
    others = {"HF_TOKEN": "t", "WANDB_API_KEY": "k", "HF_X": "a\nb", "EDITOR": "vi", "CUDA_VISIBLE_DEVICES": "0"}
    assert forwarded(plain | others) == plain | {"PYTHONPATH": os.getcwd()}


def test_a_token_that_others_could_read_or_have_written_is_none(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".cache/dsft").mkdir(parents=True)
    file = tmp_path / f".cache/dsft/launch-1-{socket.gethostname()}"
    file.write_text("token")
    file.chmod(0o644)
    monkeypatch.setenv("DSFT_LAUNCHER", "127.0.0.1:1:@launch-1")
    assert connect_to_launcher(0, "node-0") is None


def test_accelerate_leaves_no_file_of_variables_in_the_working_folder(tmp_path, monkeypatch):
    """It appends every variable, secrets too, to DeepSpeed's file of them."""
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text("num_processes: 2\n")
    options, _, _ = read_launch(["--accelerate", "config.yaml", "train"])
    environment, path = launcher_environment(options.launcher, [], link := LauncherLink())
    assert environment["DS_ENV_FILE"] == str(path) and path.parent != tmp_path
    path.unlink()
    link.close()


def test_a_command_given_on_every_node_is_one_job_of_several_launches(monkeypatch, tmp_path):
    """The ranks of all nodes must meet; and each `dsft launch` tells its restarts from those of an earlier one."""
    seen = []

    def note_variables(process: LauncherProcess) -> int:
        process.link.close()
        seen.append((os.environ["DSFT_JOB"], os.environ["DSFT_LAUNCH"]))
        return 0

    monkeypatch.setattr(LauncherProcess, "run", note_variables)
    monkeypatch.setenv("DSFT_JOB", "an earlier one")
    monkeypatch.setenv("MASTER_ADDR", "node-0")
    for node in ("0", "1"):
        monkeypatch.setenv("NODE_RANK", node)
        words = ["train", "--model", "m", "--data", "d", "--output_dir", str(tmp_path)]
        assert launch(["--nodes", "2", "--num_gpus", "1", "--no_preflight", *words]) == 0
    (job, first), (same_job, second) = seen
    assert job == same_job != "an earlier one" and first != second


def test_a_job_is_told_apart_only_where_its_user_did_not_ask_to_resume(monkeypatch, tmp_path):
    seen = []

    def note_launch(process: LauncherProcess) -> int:
        process.link.close()
        seen.append("DSFT_LAUNCH" in os.environ)
        return 0

    monkeypatch.setattr(LauncherProcess, "run", note_launch)
    monkeypatch.setenv("DSFT_JOB", "an earlier one")
    monkeypatch.setenv("MASTER_ADDR", "node-0")
    file, words = tmp_path / "run.yaml", ["--model", "m", "--data", "d", "--output_dir", str(tmp_path)]
    for text, config in (
        ("overwrite: true", ["--config", str(file), "--overwrite", "true"]),
        ("overwrite: true", resumed(["--config", str(file)])),
        ("overwrite: true", ["--resume-from-checkpoint=auto"]),
        ("resume_from_checkpoint: auto", ["--config", str(file)]),
        ("resume_from_checkpoint: auto", [f"--config={file}"]),
    ):
        file.write_text(f"{text}\n")
        launch(["--nodes", "2", "--node_rank", "0", "--num_gpus", "1", "--no_preflight", "train", *config, *words])
    assert seen == [True, False, False, False, False]
