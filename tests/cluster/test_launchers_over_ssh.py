"""A launcher and the ranks that it has started through ssh on its own machine: where one is gone the other ends.

A small launcher stands for `deepspeed --hostfile` and pdsh; ssh, sshd and the watchdog are real.
"""

import subprocess

import pytest
from conftest import ROOT

from cluster.test_faults import left_on, wait_until

pytestmark = [pytest.mark.launch, pytest.mark.cluster]
RUNNER = """
import subprocess, sys
sessions = [subprocess.Popen(["ssh", *words.split(" ", 1)]) for words in sys.argv[1:]]
sys.exit(max(session.wait() for session in sessions))
"""
"""Stands for `deepspeed --hostfile` and pdsh: (host, command) pairs."""
RANK = """
import os, sys, time
if os.fork():
    os.wait()
    sys.exit(1)
from types import SimpleNamespace
from dsft.watchdog import client
os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
client.start(SimpleNamespace(start_timeout=300, lost_timeout=60))
print("ready", os.getpid(), flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize(
    ("killed", "told", "code"),
    [
        ("runner", "lost its launcher", -9),
        ("session", "", 255),  # nobody is there to be told
        ("rank", "was killed from outside", 1),
        pytest.param("rank beside a lost node", "was killed from outside", 255, marks=pytest.mark.exhaustive),
    ],
)
def test_a_launcher_and_its_ranks_that_ssh_joins_on_one_host_end_together(hosts, tmp_path, killed, told, code):
    """Before the rendezvous. From a lost node nothing comes, and its session stays."""
    (tmp_path / "deepspeed").write_text(RUNNER)
    (tmp_path / "ds").write_text(RANK)
    rank = f"node-0 PYTHONPATH={ROOT} python {tmp_path}/ds"
    with (tmp_path / "ssh.log").open("w") as log:
        runner = hosts[0].start(
            ["python", tmp_path / "deepspeed", rank, *["node-1 sleep 1000"] * ("lost node" in killed)],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    screen = (tmp_path / "ssh.log").read_text
    wait_until(lambda: "ready" in screen(), screen)
    if killed == "runner":
        runner.kill()
    elif killed == "session":
        hosts[0].kill(next(process.pid for process in hosts[0].all_processes() if "@notty" in process.cmdline()[0]))
    else:
        hosts[0].kill(
            max(pid for pid, command in hosts[0].processes() if command.startswith("python") and "/ds" in command)
        )
    wait_until(lambda: runner.poll() is not None and not hosts[0].processes(), lambda: screen() + left_on(hosts[0]))
    assert told in screen() and runner.returncode == code
