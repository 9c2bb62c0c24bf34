"""`dsft launch` on real hosts, in each of its ways: it looks at the nodes first, prints the launcher's command, and
trains.
"""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from conftest import ROOT, read_json
from launch.words import WORDS
from ranks import run_entry
from tiny import write_texts

from cluster.slurm import Slurm
from cluster.test_launchers import STEPS, assert_same_training
from dsft.checkpoints.manifest import integrity_errors

pytestmark = [pytest.mark.launch, pytest.mark.cluster]
LAUNCH = ["python", "-m", "dsft.cli.main", "launch"]
SECONDS = 600
RUN_NAME = "R&D of $HOME on %h; 'one' \\ \"two\""
START_WORDS = """
import subprocess, sys
from dsft.launch.launchers import build_command, read_launch
from launch.words import WORDS
options, _, _ = read_launch([*sys.argv[1:], "train"])
sys.exit(subprocess.call(build_command(options, "launch.words", WORDS)))
"""


@pytest.fixture(scope="module")
def folder(options, tiny, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("launch")
    batch = {"global_batch_size": 12, "per_device_train_batch_size": 1, "max_steps": STEPS, "logging_steps": 1}
    data = {"data": str(write_texts(folder / "train.jsonl", 120)), "eval_data": str(tiny / "held_out.jsonl")}
    told = options(folder / "run", **batch, **data, eval_on_start=True)
    (folder / "run.yaml").write_text(yaml.safe_dump(told))
    return folder


def trained(output_dir: Path) -> list[float]:
    """Losses of a run that ended well on two ranks of two nodes."""
    content = read_json(output_dir / "run.json")
    assert content["status"] == "done" and content["world_size"] == 2 and "2 nodes x 1 CPU rank" in content["machine"]
    return [entry["loss"] for entry in content["results"]["log"] if "loss" in entry]


@pytest.fixture(scope="module")
def through_ssh(four_hosts, folder):
    """The first way, which the others must agree with: (result, losses)."""
    hostfile = four_hosts.hostfile(folder / "hostfile", [1, 1])
    result = four_hosts[0].run(
        [
            *LAUNCH,
            "--hostfile",
            hostfile,
            "train",
            "--config",
            folder / "run.yaml",
            "--output_dir",
            folder / "ssh",
            "--zero",
            "3",
            "--run_name",
            RUN_NAME,
        ],
        timeout=SECONDS,
        HF_HOME="/tmp/elsewhere",
    )
    assert result.returncode == 0, (result.stdout + result.stderr)[-5000:]
    assert all(host.is_idle() for host in four_hosts)
    return result, trained(folder / "ssh")


def test_a_host_file_is_examined_then_deepspeed_starts_the_ranks_that_train_what_one_process_trains(
    through_ssh, folder
):
    result, losses = through_ssh
    assert (
        "dsft doctor: 2 nodes, 2 ranks" in result.stdout  # of a busy machine it may say that something is slow
        and "error:" not in result.stdout
        and "dsft: deepspeed --hostfile" in result.stdout
    )
    assert len(losses) == STEPS
    assert result.stdout.count("dsft: done: ") == 1  # rank 0 alone speaks
    content = read_json(folder / "ssh" / "run.json")
    alone = run_entry("dsft.train", ["--config", folder / "run.yaml", "--output_dir", folder / "one", "--zero", "3"])
    assert alone.returncode == 0, alone.stderr
    assert_same_training(content, read_json(folder / "one" / "run.json"))
    assert content["plan"]["zero"] == "3" and content["config"]["run_name"] == RUN_NAME
    assert all(
        (folder / "ssh" / "logs" / f"rank_{rank}.log").read_text().startswith(f"# rank {rank} on node-{rank}")
        for rank in (0, 1)
    )


def test_what_the_preflight_finds_stops_the_launch(hosts, folder):
    hostfile = folder / "unknown"
    hostfile.write_text("node-0 slots=1\nnowhere slots=1\n")
    result = hosts[0].run(
        [*LAUNCH, "--hostfile", hostfile, "train", "--config", folder / "run.yaml", "--output_dir", folder / "never"],
        timeout=SECONDS,
    )
    assert (
        result.returncode == 2
        and "[unknown-host]" in result.stdout
        and "--no_preflight starts all the same" in result.stderr
    )
    assert not (folder / "never").exists()


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "way",
    [["--nodes", "2", "--num_gpus", "1"], ["--hostfile", "HOSTFILE", "--no_ssh"], ["--accelerate", "FILE"]],
    ids=["torchrun", "deepspeed", "accelerate"],
)
def test_the_same_command_on_every_node_needs_no_ssh(hosts, folder, through_ssh, way):
    settings = yaml.safe_load((ROOT / "ds_configs/accelerate/zero3_2x8.yaml").read_text()) | {
        "num_processes": 2,
        "main_process_ip": hosts[0].name,
    }
    (folder / "accelerate.yaml").write_text(yaml.safe_dump(settings))
    paths = {"HOSTFILE": str(hosts.hostfile(folder / "no-ssh", [1, 1])), "FILE": str(folder / "accelerate.yaml")}
    output_dir = folder / f"{way[0].strip('-')}-run"
    zero = [] if way[0] == "--accelerate" else ["--zero", "3"]  # accelerate's file says the stage
    words = [
        *LAUNCH,
        *(paths.get(word, word) for word in way),
        "train",
        "--config",
        folder / "run.yaml",
        "--output_dir",
        output_dir,
        *zero,
    ]
    other = hosts[1].start(words, stdout=None, stderr=None, NODE_RANK="1", MASTER_ADDR="node-0")
    result = hosts[0].run(words, timeout=SECONDS, NODE_RANK="0", MASTER_ADDR="node-0")
    assert (result.returncode, other.wait(SECONDS)) == (0, 0), (result.stdout + result.stderr)[-5000:]
    assert trained(output_dir) == through_ssh[1]
    assert "dsft doctor: " in result.stdout


@pytest.mark.exhaustive
def test_slurm(hosts, folder, through_ssh, tmp_path_factory):
    files = tmp_path_factory.mktemp("slurm-launch") / "files"
    with Slurm([hosts[0], hosts[1]], files) as slurm:
        script = folder / "job.sh"
        script.write_text(
            f"#!/bin/bash\ncd {ROOT}\npython -m dsft.cli.main launch --slurm --num_gpus 1 train --config"
            f" {folder}/run.yaml --output_dir {folder}/slurm --zero 3\n"
        )
        ended = slurm.wait(slurm.submit(["--nodes=2", f"--output={folder}/slurm.txt", script]), timeout=SECONDS)
    log = (folder / "slurm.txt").read_text()
    assert ended["JobState"] == "COMPLETED", log[-5000:]
    assert (
        trained(folder / "slurm") == through_ssh[1]
        and "dsft doctor: 2 nodes, 2 ranks" in log
        and "dsft: srun --nodes 2" in log
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("way", ["hostfile", "no ssh", "nodes", "accelerate", "slurm", "mpirun"])
def test_a_folder_whose_name_a_shell_reads_otherwise_trains_in_it_and_keeps_the_model(
    way, hosts, options, tmp_path, tmp_path_factory
):
    """Every path is relative to it, and its Python lies in it too."""
    folder = tmp_path / "my runs & more"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / ".venv"], check=True)
    (folder / "run.yaml").write_text(yaml.safe_dump(options("out")))
    settings = yaml.safe_load((ROOT / "ds_configs/accelerate/zero3_2x8.yaml").read_text())
    engine = settings["deepspeed_config"] | {"deepspeed_config_file": str(ROOT / "ds_configs/zero3.json")}
    settings |= {"num_processes": 2, "main_process_ip": "node-0", "deepspeed_config": engine}
    (folder / "accelerate.yaml").write_text(yaml.safe_dump(settings))
    hosts.hostfile(folder / "hosts", [1, 1])
    train = ["train", "--config", "run.yaml"] + ([] if way == "accelerate" else ["--zero", "3"])
    launch = [folder / ".venv/bin/python", *LAUNCH[1:]]
    commands = {
        "hostfile": [*launch, "--hostfile", "hosts", *train],
        "no ssh": [*launch, "--hostfile", "hosts", "--no_ssh", *train],
        "nodes": [*launch, "--nodes", "2", "--num_gpus", "1", *train],
        "accelerate": [*launch, "--accelerate", "accelerate.yaml", *train],
        "slurm": [*launch, "--slurm", "--num_gpus", "1", *train],
        "mpirun": [ROOT / "scripts/mpi/train", *train[1:]],
    }
    paths = [str(ROOT), *(path for path in sys.path if path.endswith("site-packages"))]
    variables = {"PYTHONPATH": ":".join(paths), "MASTER_ADDR": "node-0", "NET": "10.77.0.0/24", "HOSTFILE": "hosts"}
    variables |= {"SCRIPT": str(ROOT / "dsft/train.py")}
    if way == "slurm":
        (tmp_path / "job.sh").write_text(
            f"#!/bin/bash\nexport PYTHONPATH={variables['PYTHONPATH']}\ncd {shlex.quote(str(folder))}\n"
            f"{shlex.join(map(str, commands[way]))}\n"
        )
        with Slurm([hosts[0], hosts[1]], tmp_path_factory.mktemp("slurm-folder") / "files") as slurm:
            number = slurm.submit(["--nodes=2", f"--output={tmp_path}/log.txt", tmp_path / "job.sh"])
            slurm.wait(number, timeout=SECONDS)
        text = (tmp_path / "log.txt").read_text()
    else:
        both = way in ("no ssh", "nodes", "accelerate")
        others = [
            hosts[1].start(commands[way], cwd=folder, stdout=None, stderr=None, NODE_RANK="1", **variables)
            for _ in range(both)
        ]
        result = hosts[0].run(commands[way], cwd=folder, timeout=SECONDS, NODE_RANK="0", **variables)
        text = result.stdout + result.stderr
        assert [other.wait(SECONDS) for other in others] == [0] * both, text[-5000:]
    content = read_json(folder / "out" / "run.json") if (folder / "out/run.json").is_file() else text[-6000:]
    assert content["status"] == "done" and content["world_size"] == 2
    assert integrity_errors(folder / "out" / "final", hashes="all") == []
    assert not (hosts[0].home / "out").exists()


def words_in(log: str) -> dict[int, list[str]]:
    """Rank -> what its process was given, as `launch/words.py` prints it."""
    return {int(rank): json.loads(words) for rank, words in re.findall(r"words of rank (\d+): (\[.*\])", log)}


@pytest.mark.exhaustive
def test_the_rank_of_a_single_node_runs_there_and_not_where_it_is_launched(hosts, tmp_path):
    hostfile = hosts.hostfile(tmp_path / "hostfile", [1], first=1)
    command = ["python", "-c", START_WORDS, "--hostfile", hostfile]
    result = hosts[0].run(command, timeout=SECONDS, PYTHONPATH=str(ROOT / "tests"))
    assert words_in(result.stdout) == {0: WORDS} and "node-1: words of rank 0" in result.stdout, result.stderr[-3000:]


@pytest.mark.exhaustive
@pytest.mark.parametrize("way", ["ssh", "torchrun", "script of torchrun", "script of mpirun", "slurm"])
def test_words_that_a_shell_understands_reach_every_rank(way, hosts, tmp_path, tmp_path_factory):
    hostfile = hosts.hostfile(tmp_path / "hostfile", [1, 1])
    start, file = ["python", "-c", START_WORDS], str(ROOT / "tests/launch/words.py")
    variables = {"PYTHONPATH": str(ROOT / "tests"), "SCRIPT": file, "NET": "10.77.0.0/24", "RANKS_PER_NODE": "1"}
    commands = {
        "ssh": [*start, "--hostfile", hostfile],
        "torchrun": [*start, "--nodes", "2", "--num_gpus", "1", "--master_addr", "node-0"],
        "script of torchrun": ["scripts/torchrun/train", *WORDS],
        "script of mpirun": ["scripts/mpi/train", *WORDS],
        "slurm": [*start, "--slurm", "--num_gpus", "1"],
    }
    if way == "slurm":
        job, log = tmp_path / "job.sh", tmp_path / "log.txt"
        words = shlex.join(map(str, commands[way]))
        job.write_text(f"#!/bin/bash\ncd {ROOT}\nexport PYTHONPATH={ROOT}/tests\n{words}\n")
        with Slurm([hosts[0], hosts[1]], tmp_path_factory.mktemp("slurm-words") / "files") as slurm:
            slurm.wait(slurm.submit(["--nodes=2", f"--output={log}", job]), timeout=SECONDS)
        assert words_in(log.read_text()) == {0: WORDS, 1: WORDS}
        return
    other = tmp_path / "other"
    other.touch()
    is_given_on_both = "torchrun" in way
    others = [hosts[1].start(commands[way], stdout=other.open("w"), **variables)] if is_given_on_both else []
    result = hosts[0].run(commands[way], timeout=SECONDS, HOSTFILE=str(hostfile), **variables)
    for process in others:
        process.wait(SECONDS)
    seen = words_in(result.stdout) | words_in(other.read_text())
    assert seen == {0: WORDS, 1: WORDS}, result.stdout[-3000:] + result.stderr[-3000:]
