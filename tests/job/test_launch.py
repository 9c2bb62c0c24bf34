"""`dsft launch` on one machine: its commands, its file of options, and what it asks of the ranks. Several hosts:
tests/cluster.
"""

import os
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest
import yaml
from conftest import flags, read_json

from dsft.config.options import EvalConfig, LaunchOptions, TrainConfig
from dsft.config.reader import read_config, read_yaml
from dsft.errors import UserError
from dsft.launch import _Job, _values, forwarded, hosts_of, launch, read_launch
from dsft.perplexity.of_training import read_evaluation

TRAIN = ["--model", "m", "--data", "d", "--output_dir", "o"]


@pytest.mark.parametrize(
    "words",
    [
        [*TRAIN, "--learning_rate", "1e-4", "--bf16", "--run_name", "R&D of $HOME", "--zero=3"],
        [*TRAIN, "--lora_target_modules", "q_proj", "v_proj", "--method", "lora", "--resume_from_checkpoint"],
    ],
)
def test_ranks_that_read_the_file_have_the_options_of_the_command_line(words, tmp_path):
    (tmp_path / "run.yaml").write_text("seq_len: 128\nwarmup_steps: 3\n")
    words = [*words, "--config", str(tmp_path / "run.yaml")]
    problems: list[str] = []
    config = read_config(TrainConfig, words, problems)
    (tmp_path / "options.yaml").write_text(yaml.safe_dump(_values("train", words, config)))
    assert read_config(TrainConfig, ["--config", str(tmp_path / "options.yaml")], problems) == config
    assert problems == []


@pytest.mark.parametrize("words", [["--seq_len", "512"], [], ["--protocol", "gptq"], ["--mode", "sliding"]])
def test_an_evaluation_that_reads_the_file_is_the_same(words, tmp_path):
    words = ["--model", "a", "b", "--data", "d.jsonl", "--output_dir", "o", *words]
    problems: list[str] = []
    config = read_evaluation(words, problems)
    (tmp_path / "options.yaml").write_text(yaml.safe_dump(_values("eval", words, config)))
    again = read_evaluation(["--config", str(tmp_path / "options.yaml")], problems)
    assert again == config and problems == [] and isinstance(again, EvalConfig)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--num_gpus", "2"], "expected train or eval"),
        (["--slurm", "train"], "got '--slurm' (removed; sbatch scripts/slurm"),
        (["--num-nodes=2", "train"], "got '--num-nodes=2' (removed; --include names the hosts"),
        (["--hostfile=", "train"], "--hostfile: needs a value"),
    ],
)
def test_a_launch_that_cannot_be_is_refused(words, named):
    with pytest.raises(UserError, match=re.escape(named)):
        read_launch(words)


def test_hosts_to_leave_out_need_a_host_file():
    with pytest.raises(UserError, match="choose among the hosts of --hostfile"):
        hosts_of(LaunchOptions(exclude="node-1"))


def test_a_path_that_a_shell_reads_otherwise_is_refused_with_a_host_file(tmp_path, monkeypatch):
    monkeypatch.setattr("dsft.launch.shutil.which", lambda name: name)
    (tmp_path / "hosts").write_text("localhost slots=2\n")
    words = ["--model", "m", "--data", "d", "--output_dir", str(tmp_path / "my runs & more")]
    with pytest.raises(UserError, match="unquoted"):
        launch(["--hostfile", str(tmp_path / "hosts"), "--dry_run", "train", *words])


def test_a_restart_that_is_refused_keeps_the_options_of_the_run_that_it_continues(tmp_path, monkeypatch):
    (tmp_path / "options.yaml").write_text("model: old")
    codes = iter([1, 2])
    monkeypatch.setattr("dsft.launch._Job.run", lambda _: next(codes))
    monkeypatch.setattr("dsft.launch.check_named_files", lambda *_: None)
    words = ["--model", "m", "--data", "d", "--output_dir", str(tmp_path)]
    assert launch(["--no_preflight", "--num_gpus", "1", "--max_restarts", "1", "train", *words]) == 2
    assert read_yaml(str(tmp_path / "options.yaml"), [])["model"] == "m"


def test_an_evaluation_in_the_folder_of_a_run_keeps_the_options_of_the_training(tmp_path, monkeypatch):
    (tmp_path / "options.yaml").write_text("model: of_training")
    monkeypatch.setattr("dsft.launch._Job.run", lambda _: 0)
    monkeypatch.setattr("dsft.launch.check_named_files", lambda *_: None)
    words = ["--model", "m", "--data", "d", "--output_dir", str(tmp_path)]
    assert launch(["--no_preflight", "--num_gpus", "1", "eval", *words]) == 0
    assert read_yaml(str(tmp_path / "options.yaml"), [])["model"] == "of_training"
    assert read_yaml(str(tmp_path / "eval_options.yaml"), [])["model"] == ["m"]


def test_what_pdsh_prints_is_read_to_its_end_without_a_screen(tmp_path, monkeypatch):
    """Else its pipe fills, and the ranks wait for a reader."""
    fields = {"nodes": ["a"], "store": None, "env_file": tmp_path, "saves": True, "lost_timeout": 1.0}
    job = _Job(command=[], **fields)
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stderr", full)
        job.process = subprocess.Popen(["sh", "-c", "seq 20000 >&2"], stderr=subprocess.PIPE)
        job._show_errors()
        assert job.process.wait(10) == 0


def test_a_job_keeps_its_code_on_a_disk_that_is_read_only_by_now(tmp_path):
    (tmp_path / "file").touch()
    fields = {"nodes": [], "store": None, "env_file": tmp_path / "file" / "env", "saves": True, "lost_timeout": 1.0}
    assert _Job(command=["sh", "-c", "exit 4"], **fields).run() == 4


def test_no_secret_reaches_a_command_line():
    environment = {"HF_TOKEN": "s", "HF_HOME": "/a", "MLFLOW_TRACKING_URI": "https://u:p@host", "NCCL_IB_PKEY": "1"}
    assert forwarded(environment).keys() == {"HF_HOME", "NCCL_IB_PKEY", "PYTHONPATH"}


@pytest.mark.launch
def test_ctrl_c_during_the_check_before_the_start_is_one_line(options, tmp_path):
    """A terminal sends it to every process of the foreground, also to one that still imports."""
    words = flags(options(tmp_path / "run"))
    command = [sys.executable, "-m", "dsft.cli.main", "launch", "--no_preflight", "--num_gpus", "2", "train", *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)
    assert process.stdout.readline().startswith(b"dsft: checking options")
    while not (checks := psutil.Process(process.pid).children()):
        time.sleep(0.05)
    assert os.getpgid(checks[0].pid) == process.pid  # or a closed terminal's SIGHUP would leave it running
    os.killpg(process.pid, signal.SIGINT)
    assert process.communicate()[0] == b"dsft: interrupted (Ctrl-C)\n" and process.returncode == 130


@pytest.mark.launch
def test_a_launch_that_is_terminated_asks_its_ranks_to_save_and_returns_their_code(options, tmp_path):
    words = flags(options(tmp_path / "run", max_steps=100_000, logging_steps=1))
    command = [sys.executable, "-m", "dsft.cli.main", "launch", "--no_preflight", "--num_gpus", "2", "train", *words]
    with (tmp_path / "log").open("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=os.environ)
        while not re.search(r"^step +3 ", (tmp_path / "log").read_text(), re.M) and process.poll() is None:
            time.sleep(0.2)
        process.send_signal(signal.SIGTERM)
        code = process.wait()
    text = (tmp_path / "log").read_text()
    assert code == 75 and "asked the ranks to save and exit" in text, text
    assert read_json(tmp_path / "run" / "run.json")["status"] == "preempted"
