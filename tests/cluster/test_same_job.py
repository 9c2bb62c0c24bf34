"""Nodes that were told different things, and jobs that meet at one port, on real hosts: an end with the cause, before
weights load.
"""

import subprocess
from pathlib import Path

import pytest
import yaml
from conftest import ROOT, read_json

from cluster.test_doctor import changed
from dsft.checkpoints.manifest import integrity_errors


def in_place_of(host, path: Path, other: Path):
    """`other` stands at `path` on this host alone."""
    return changed(host, f"mount --bind {other} {path}", f"umount {path}")


pytestmark = [pytest.mark.launch, pytest.mark.cluster]
SECONDS = 600


@pytest.fixture(scope="module")
def folder(options, tmp_path_factory) -> Path:
    """A run.yaml in configs/; a stale one in stale/."""
    folder = tmp_path_factory.mktemp("same_job")
    told = options(folder / "run", zero="3")
    for name, changes in (("configs", {}), ("stale", {"learning_rate": 0.001}), ("empty", None)):
        (folder / name).mkdir()
        if changes is not None:
            (folder / name / "run.yaml").write_text(yaml.safe_dump(told | changes))
    return folder


@pytest.mark.exhaustive  # on ranks with host names of their own: laws/test_agreement.py
def test_a_stale_configuration_and_code_on_one_host_end_the_job_on_both(hosts, folder, tmp_path):
    source, code = ROOT / "dsft/api.py", tmp_path / "api.py"
    code.write_text(source.read_text() + "\n# another state of the checkout\n")
    command = ["deepspeed", "--hostfile", hosts.hostfile(tmp_path / "hostfile", [1, 1]), "--master_port", "29534"]
    with in_place_of(hosts[1], folder / "configs", folder / "stale"), in_place_of(hosts[1], source, code):
        result = hosts[0].run(
            [*command, "dsft/train.py", "--config", folder / "configs/run.yaml", "--output_dir", tmp_path / "run"],
            timeout=SECONDS,
        )
    text = result.stdout + result.stderr
    assert result.returncode == 2 and not (tmp_path / "run" / "run.json").exists(), text[-5000:]
    assert "learning_rate differs between the ranks: 0.01 on node-0 (rank 0), 0.001 on node-1 (rank 1)" in text
    assert "code of dsft differs between the ranks" in text and text.count("dsft: error:") == 2
    assert all(host.is_idle() for host in hosts)


@pytest.mark.exhaustive  # on forked ranks: laws/test_agreement.py
def test_a_rank_that_meets_another_job_ends_and_takes_nobodys_place(hosts, folder, tmp_path):
    """Rank 1 of the job "other" is there before rank 1 of the job whose rank 0 comes first."""
    command = ["deepspeed", "--hostfile", hosts.hostfile(tmp_path / "hostfile", [1, 1]), "--no_ssh", "--master_addr"]
    words = [hosts[0].address, "dsft/train.py", "--config", folder / "configs/run.yaml", "--output_dir"]

    def start(number: int, name: str):
        log = (tmp_path / f"{name}-{number}.log").open("w")
        place = ["--node_rank", str(number)]
        return hosts[number].start(
            [*command[:4], *place, *command[4:], *words, tmp_path / name], stdout=log, stderr=subprocess.STDOUT
        )

    other, first = start(1, "other"), start(0, "first")
    assert other.wait(SECONDS) == 2, (tmp_path / "other-1.log").read_text()[-4000:]
    told = (tmp_path / "other-1.log").read_text()
    assert f"is used by another job, output_dir={tmp_path / 'first'}" in told
    assert start(1, "first").wait(SECONDS) == first.wait(SECONDS) == 0, (tmp_path / "first-0.log").read_text()[-4000:]
    assert read_json(tmp_path / "first" / "run.json")["status"] == "done"
    assert all(host.is_idle() for host in hosts)


@pytest.mark.exhaustive
def test_two_plain_jobs_started_together_do_not_take_each_others_ranks(hosts, folder, tmp_path):
    command = ["deepspeed", "--hostfile", hosts.hostfile(tmp_path / "hostfile", [1, 1]), "dsft/train.py", "--config"]
    files = [(tmp_path / f"{name}.log").open("w+") for name in "ab"]
    jobs = [
        hosts[0].start(
            [*command, folder / "configs/run.yaml", "--output_dir", tmp_path / name],
            stdout=file,
            stderr=subprocess.STDOUT,
        )
        for name, file in zip("ab", files, strict=True)
    ]
    codes = [job.wait(SECONDS) for job in jobs]
    logs = [Path(file.name).read_text() for file in files]
    assert sorted(code == 0 for code in codes) == [False, True], "\n".join(log[-4000:] for log in logs)
    lost, log = next((name, log) for name, code, log in zip("ab", codes, logs, strict=True) if code)
    other = {"a": "b", "b": "a"}[lost]
    assert read_json(tmp_path / other / "run.json")["status"] == "done" and not (tmp_path / lost / "run.json").exists()
    assert "29500" in log and all(host.is_idle() for host in hosts), log[-4000:]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("strategy", "code"), [("no", 0), ("steps", 4)])
def test_on_hosts_that_share_no_output_folder_the_final_model_is_saved_and_verified(
    hosts, folder, tmp_path, strategy, code
):
    run, separate = tmp_path / "run", tmp_path / "separate"
    run.mkdir(), separate.mkdir()
    command = ["deepspeed", "--hostfile", hosts.hostfile(tmp_path / "hostfile", [1, 1]), "--master_port", "29536"]
    words = ["--config", folder / "configs/run.yaml", "--output_dir", run, "--save_strategy", strategy]
    with in_place_of(hosts[1], run, separate):
        result = hosts[0].run([*command, "dsft/train.py", *words, "--save_steps", "1"], timeout=SECONDS)
    text = result.stdout + result.stderr
    assert result.returncode == code, text[-5000:]
    if strategy == "no":
        assert integrity_errors(run / "final", hashes="all") == [] and (run / "final" / "model.safetensors").is_file()
        assert read_json(run / "run.json")["status"] == "done"
    assert ("do all nodes share the output folder?" in text) == (strategy == "steps")
