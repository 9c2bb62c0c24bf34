"""Faults of a running training on two or three hosts: every process of it ends on all, with a code, the name of the
rank that caused it, and a free port.
"""

import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
import yaml
from conftest import ROOT, read_json

pytestmark = [pytest.mark.launch, pytest.mark.cluster]
LOST_SECONDS = 10
STEP_SECONDS = 20
CLEAN_SECONDS = 180
"""From the fault to the end of everything, at most: a lost node is noticed after 10 s, and the launcher gets 20 s to
end by itself; a busy machine takes longer.
"""
PORT = 29533
LAUNCH = f"python -m dsft.cli.main launch --no_preflight --hostfile HOSTFILE --master_port {PORT} train".split()


@pytest.fixture(scope="module")
def folder(options, tmp_path_factory) -> Path:
    """With the run.yaml of a training that would run for hours."""
    folder = tmp_path_factory.mktemp("faults")
    told = options(
        folder / "run",
        max_steps=100_000,
        logging_steps=1,
        overwrite=True,
        save_strategy="steps",
        save_steps=20,
        save_total_limit=2,
        zero="3",
        lost_timeout=LOST_SECONDS,
        step_timeout=STEP_SECONDS,
    )
    (folder / "run.yaml").write_text(yaml.safe_dump(told))
    return folder


class Job:
    """A training that would run for hours, on the first `number` hosts, past its first step."""

    def __init__(
        self, hosts, folder: Path, name: str, launcher: list[str], *words: str, number: int = 2, cwd: Path = ROOT
    ):
        self.hosts = [hosts[each] for each in range(number)]
        self.output_dir = folder / name
        self.log = folder / f"{name}.log"
        hostfile = hosts.hostfile(folder / "hostfile", [1] * number)
        command = [str(hostfile) if word == "HOSTFILE" else word for word in launcher]
        self.before = {pid for host in self.hosts for pid, _ in host.processes()}
        self.process = hosts[0].start(
            [*command, "--config", folder / "run.yaml", "--output_dir", self.output_dir, *words],
            cwd=cwd,
            stdout=self.log.open("w"),
            stderr=subprocess.STDOUT,
        )
        until = time.monotonic() + 600
        while (
            not re.search(r"^(node-0: )?step +1 ", self.screen(), re.M)
            and self.process.poll() is None
            and time.monotonic() < until
        ):
            time.sleep(0.2)
        assert self.process.poll() is None, self.screen()

    def screen(self) -> str:
        return self.log.read_text(errors="replace")

    def rank(self, number: int) -> int:
        """Process id of a rank; one rank per host."""
        return next(
            pid
            for pid, command in self.hosts[number].processes()
            if "--local_rank" in command and "launcher" not in command and "python" in command
        )

    def left(self, hosts=None) -> list[str]:
        return [command for host in hosts or self.hosts for pid, command in host.processes() if pid not in self.before]

    def ended(self, hosts=None) -> tuple[int, float]:
        """(exit code, seconds) once nothing is left on these hosts (all). Fails after CLEAN_SECONDS."""
        start = time.monotonic()
        while time.monotonic() - start < CLEAN_SECONDS and (self.process.poll() is None or self.left(hosts)):
            time.sleep(0.2)
        assert self.process.poll() is not None, f"the launcher is still there\n{self.screen()[-4000:]}"
        assert self.left(hosts) == [], self.screen()[-4000:]
        print(f"clean after {time.monotonic() - start:.0f} s")
        return self.process.returncode, time.monotonic() - start

    def only_error(self) -> str:
        """The one message on the screen."""
        errors = [line for line in self.screen().splitlines() if "dsft: error:" in line]
        assert len(errors) == 1, self.screen()[-4000:]
        return errors[0]


CALLBACK = """
import os, pathlib, time
from transformers import TrainerCallback

class Fault(TrainerCallback):
    def on_step_end(self, *_, **__):
        if os.environ["RANK"] == "1" and pathlib.Path("error.now").exists():
            raise RuntimeError("boom")
        if os.environ["RANK"] == "1" and pathlib.Path("stall.now").exists():
            time.sleep(1000)
"""
LOST = "gave no heartbeat for 10 s"
NAMED = {
    "kill 0": "rank 0 on node-0 exited without an error of its own",
    "kill 1": f"rank 1 on node-1 {LOST}",
    "stop 0": "rank 0 on node-0 was stopped",
    "stop 1": f"rank 1 on node-1 {LOST}",
    "cut 0": "rank 0 on node-0 has lost all other nodes: its node is cut off",
    "cut 1": f"rank 1 on node-1 {LOST}",
    "freeze 2": f"rank 2 on node-2 {LOST}",
    "off 1": f"rank 1 on node-1 {LOST}",
    "error 1": "rank 1 on node-1 failed: RuntimeError: boom",
    "stall 1": "rank 1 on node-1 made no progress for",
}
"""Fault and number of the node -> what the screen says."""


@pytest.mark.exhaustive  # on one machine: job/test_beat.py
@pytest.mark.parametrize("fault", NAMED)
def test_a_fault_on_one_of_three_hosts_ends_all_of_them_and_its_rank_is_named(hosts, folder, fault):
    kind, _, number = fault.partition(" ")
    host, rank = hosts[int(number)], int(number)
    (folder / "faulty.py").write_text(CALLBACK)
    job = Job(hosts, folder, fault.replace(" ", "-"), LAUNCH, "--callbacks", "faulty:Fault", number=3, cwd=folder)
    others = [each for each in job.hosts if each is not host]
    if kind in ("kill", "stop"):
        host.kill(job.rank(rank), signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
    elif kind == "cut":
        host.cut()
    elif kind == "freeze":
        host.freeze()
    elif kind == "off":
        host.cut()
        host.kill_all()
    else:
        (folder / f"{kind}.now").touch()
    code, seconds = job.ended(others if kind in ("freeze", "off") else job.hosts)
    print(f"{fault}: ended everywhere after {seconds:.1f} s")
    (folder / f"{kind}.now").unlink(missing_ok=True)
    assert code == 1 and NAMED[fault] in job.screen(), job.screen()[-4000:]
    if kind == "freeze":
        host.thaw()
        job.ended()
    assert hosts[0].port_is_free(PORT)


@pytest.mark.exhaustive
def test_a_cut_link_ends_torchrun_on_both_sides_as_well(hosts, folder):
    torchrun = f"torchrun --nnodes 2 --nproc_per_node 1 --master_addr node-0 --master_port {PORT} --node_rank".split()
    words = ["dsft/train.py", "--config", folder / "run.yaml", "--output_dir", folder / "torchrun"]
    before = {pid for host in (hosts[0], hosts[1]) for pid, _ in host.processes()}
    other = hosts[1].start([*torchrun, "1", *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    job = Job(hosts, folder, "torchrun", [*torchrun, "0", "dsft/train.py"])
    job.before = before
    hosts[1].cut()
    code, _ = job.ended()
    assert code != 0 and other.wait(60) != 0 and "rank 1 on node-1 gave no heartbeat" in job.only_error()


@pytest.mark.exhaustive
def test_a_killed_launch_takes_the_ranks_of_all_hosts_along(hosts, folder):
    job = Job(hosts, folder, "launch-killed", LAUNCH)
    job.process.kill()
    job.ended()
    logs = "".join(file.read_text(errors="replace") for file in (job.output_dir / "logs").iterdir())
    # The ranks miss the launcher, or ssh hangs up first and they save. pdsh, which passes on the screen, ends before.
    assert "ended by: " in logs or "asked to stop" in logs, logs[-4000:]


@pytest.mark.exhaustive
def test_a_second_ctrl_c_ends_all_hosts(hosts, folder):
    job = Job(hosts, folder, "interrupted", LAUNCH, "--lost_timeout", "120")
    hosts[1].kill(job.rank(1), signal.SIGSTOP)  # so that the first one cannot be followed
    job.process.send_signal(signal.SIGINT)
    wait_until(lambda: "a second one ends them at once" in job.screen(), job.screen)
    job.process.send_signal(signal.SIGINT)
    code, _ = job.ended()
    assert code == 130


@pytest.mark.exhaustive
def test_sigusr1_to_the_launch_saves_on_all_hosts_and_a_restart_goes_on(hosts, folder):
    job = Job(hosts, folder, "requeued", LAUNCH)
    job.process.send_signal(signal.SIGUSR1)
    code, _ = job.ended()
    assert code == 75 and read_json(job.output_dir / "run.json")["status"] == "preempted"


def left_on(*hosts) -> str:
    return "\n".join(f"{host.name}: {command}" for host in hosts for _, command in host.processes())


def wait_until(condition, why_not) -> None:
    deadline = time.monotonic() + CLEAN_SECONDS
    while not condition():
        assert time.monotonic() < deadline, why_not()
        time.sleep(0.2)


def test_a_host_whose_ssh_fails_ends_the_start_at_once_and_is_named(hosts, folder):
    keys = hosts[1].home / ".ssh/authorized_keys"
    trusted = keys.read_text()
    keys.write_text("")
    try:
        words = [str(hosts.hostfile(folder / "hostfile", [1, 1])) if word == "HOSTFILE" else word for word in LAUNCH]
        result = hosts[0].run([*words, "--config", folder / "run.yaml", "--output_dir", folder / "never"])
    finally:
        keys.write_text(trusted)
    assert result.returncode == 1 and "node-1: ssh exited with code 255" in result.stderr, result.stderr
    assert hosts[0].is_idle(), hosts[0].processes()
    assert "start_timeout" not in result.stderr


@pytest.mark.exhaustive
def test_a_restart_without_one_of_its_nodes_ends_with_the_node_named(hosts, folder):
    launch = [*LAUNCH[:4], "--max_restarts", "1", *LAUNCH[5:]]  # with a preflight
    job = Job(hosts, folder, "away", [*launch, "--overwrite", "false"])
    hosts[1].cut()
    code, _ = job.ended()
    hosts[1].heal()
    assert code == 2 and "[no-answer]" in job.screen() and "node-1" in job.screen()
