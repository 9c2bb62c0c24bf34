"""Jobs that meet at one port, on real hosts: one ends with the cause, before weights load."""

import subprocess
from pathlib import Path

import pytest
import yaml
from conftest import read_json

pytestmark = [pytest.mark.launch, pytest.mark.cluster]
SECONDS = 600


@pytest.mark.exhaustive
def test_two_plain_jobs_started_together_do_not_take_each_others_ranks(hosts, options, tmp_path):
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(options(tmp_path / "run", zero="3")))
    command = ["deepspeed", "--hostfile", hosts.hostfile(tmp_path / "hostfile", [1, 1]), "dsft/train.py", "--config"]
    files = [(tmp_path / f"{name}.log").open("w+") for name in "ab"]
    jobs = [
        hosts[0].start(
            [*command, tmp_path / "run.yaml", "--output_dir", tmp_path / name],
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
