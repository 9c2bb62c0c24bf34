"""`dsft launch` on real hosts: it examines the nodes, prints the launcher's command, and trains."""

from pathlib import Path

import pytest
import yaml
from conftest import read_json
from ranks import run_entry
from tiny import write_texts

from cluster.test_launchers import STEPS, assert_same_training

pytestmark = [pytest.mark.launch, pytest.mark.cluster]
LAUNCH = ["python", "-m", "dsft.cli.main", "launch"]
SECONDS = 600
RUN_NAME = "R&D of $HOME on %h; 'one' \\ \"two\""


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
    """The first way, which the others must agree with: (result, losses). The shells of the hosts greet who logs in."""
    greetings = [host.home / ".bashrc" for host in four_hosts]
    for file in greetings:
        file.write_text("echo Welcome; printf again\n")
    hostfile = four_hosts.hostfile(folder / "hostfile", [1, 1])
    words = f"--hostfile {hostfile} train --config {folder}/run.yaml --output_dir {folder}/ssh --zero 3".split()
    command = [*LAUNCH, *words, "--run_name", RUN_NAME]
    result = four_hosts[0].run(command, timeout=SECONDS, HF_HOME="/tmp/elsewhere")
    for file in greetings:
        file.unlink()
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
        and "deepspeed.launcher.runner" in result.stdout
    )
    assert len(losses) == STEPS
    assert result.stdout.count("dsft: done: ") == 1  # rank 0 alone speaks
    content = read_json(folder / "ssh" / "run.json")
    alone = run_entry("dsft.train", ["--config", folder / "run.yaml", "--output_dir", folder / "one", "--zero", "3"])
    assert alone.returncode == 0, alone.stderr
    assert_same_training(content, read_json(folder / "one" / "run.json"))
    assert yaml.safe_load((folder / "ssh" / "options.yaml").read_text())["run_name"] == RUN_NAME
    assert content["plan"]["zero"] == "3" and content["config"]["run_name"] == RUN_NAME
    assert all(
        (folder / "ssh" / "logs" / f"rank_{rank}.log").read_text().startswith(f"# rank {rank} on node-{rank}")
        for rank in (0, 1)
    )


def test_what_the_preflight_finds_stops_the_launch(hosts, folder):
    hostfile = folder / "unknown"
    hostfile.write_text("node-0 slots=1\nnowhere slots=1\n")
    words = f"--hostfile {hostfile} train --config {folder}/run.yaml --output_dir {folder}/never".split()
    result = hosts[0].run([*LAUNCH, *words], timeout=SECONDS)
    assert result.returncode == 2 and "[no-answer]" in result.stdout
    assert "--no_preflight starts all the same" in result.stderr
    assert not (folder / "never").exists()
