"""The test hosts are what they claim: separate machines to each other, and no change to this one."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from cluster.hosts import TestHosts


def test_hosts_have_own_names_addresses_and_files(hosts):
    command = (
        "hostname; hostname -I; pwd; ls -d /dev/shm/mine* /tmp/mine 2>/dev/null; touch /dev/shm/mine-$(hostname)"
        " /tmp/mine"
    )
    seen = [host.run(["bash", "-c", command]).stdout.split() for host in hosts]
    assert [words[:2] for words in seen] == [
        ["node-0", "10.77.0.1"],
        ["node-1", "10.77.0.2"],
        ["node-2", "10.77.0.3"],
        ["node-3", "10.77.0.4"],
    ]
    assert all(len(words) == 3 for words in seen), seen  # nobody saw another's files
    assert not list(Path("/dev/shm").glob("mine-*"))


def test_every_host_reaches_every_other_through_ssh_and_pdsh_without_a_prompt(hosts):
    names = [host.name for host in hosts]
    for host in hosts:
        result = host.run(["pdsh", "-S", "-R", "ssh", "-w", ",".join(names), "hostname; which python deepspeed"])
        assert result.returncode == 0 and result.stdout.count("/deepspeed") == result.stdout.count("/python") == 4, (
            result
        )
    assert all(host.is_idle() for host in hosts)


def test_a_cut_host_is_lost_silently_and_comes_back(hosts):
    listening = hosts[1].start(
        [
            "python",
            "-uc",
            (
                "import socket; s = socket.create_server(('', 5000)); print('up'); c, _ = s.accept(); print(c.recv(9));"
                " print(c.recv(9))"
            ),
        ]
    )
    assert listening.stdout.readline() == "up\n"
    assert not hosts[1].port_is_free(5000) and hosts[0].port_is_free(5000)
    sender = (
        "import signal, socket, time; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1]);"
        " c = socket.create_connection(('node-1', 5000)); c.send(b'a'); print('sent', flush=True);"
        " signal.sigwait([signal.SIGUSR1]); c.send(b'b'); print('sent', flush=True); time.sleep(600)"
    )
    sending = hosts[0].start(["python", "-c", sender])
    assert sending.stdout.readline() == "sent\n" and listening.stdout.readline() == "b'a'\n"
    hosts[1].cut()
    sending.send_signal(signal.SIGUSR1)
    assert sending.stdout.readline() == "sent\n"
    time.sleep(0.5)
    assert sending.poll() is None and listening.poll() is None  # neither has noticed
    hosts[1].heal()
    assert listening.stdout.readline() == "b'b'\n"  # the kernel sent it again


def test_signals_reach_a_command_and_no_other(hosts):
    process = hosts[2].start(["bash", "-c", "trap 'echo got it; exit 7' USR1; echo up; while :; do sleep 0.05; done"])
    assert process.stdout.readline() == "up\n"
    process.send_signal(signal.SIGUSR1)
    assert process.communicate(timeout=60)[0] == "got it\n" and process.returncode == 7
    sleeper = hosts[2].start(["sleep", "600"])
    other = hosts[3].start(["sleep", "601"])
    deadline = time.monotonic() + 60
    while not (hosts[2].processes() and hosts[3].processes()) and time.monotonic() < deadline:
        time.sleep(0.02)
    [(pid, command)] = hosts[2].processes()
    assert command == "sleep 600"
    with pytest.raises(AssertionError, match="no process of"):
        hosts[3].kill(pid)
    hosts[2].kill(pid)
    assert sleeper.wait(60) in (-signal.SIGKILL, 128 + signal.SIGKILL) and other.poll() is None


def test_a_frozen_host_answers_nobody_until_it_thaws(hosts):
    hosts[3].freeze()
    with pytest.raises(subprocess.TimeoutExpired):
        hosts[0].run(["ssh", "node-3", "hostname"], timeout=1)
    hosts[3].thaw()
    assert hosts[0].run(["ssh", "node-3", "hostname"], timeout=60).stdout == "node-3\n"


def mounts_here() -> list[str]:
    """Where something is mounted, but for what tests of another worker mount in their own folders."""
    mounted = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    return [path for path in mounted if "/popen-gw" not in path]


def test_hosts_stand_side_by_side_and_leave_nothing(hosts):
    interfaces, mounts = sorted(os.listdir("/sys/class/net")), mounts_here()
    with TestHosts(2) as others:
        assert others[0].run(["ssh", "node-1", "hostname -I"]).stdout.strip() == hosts[1].address == others[1].address
        others[1].start(["sleep", "60"])
        pids = [process.pid for host in others for process in host.all_processes()]
        assert len(pids) >= 2 and sorted(os.listdir("/sys/class/net")) == interfaces
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids) and not others.folder.exists()
    assert (sorted(os.listdir("/sys/class/net")), mounts_here()) == (interfaces, mounts)


@pytest.mark.exhaustive
def test_hosts_end_with_the_process_that_started_them_even_after_kill_9(hosts, tmp_path):
    script = (
        "import sys, time; sys.path.insert(0, 'tests')\nfrom cluster.hosts import TestHosts\nhosts ="
        " TestHosts(2).__enter__(); print(*(host.init_pid for host in hosts), flush=True); time.sleep(60)"
    )
    process = subprocess.Popen(
        ["python", "-c", script],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(tmp_path)},
        cwd=Path(__file__).parents[2],
    )
    pids = process.stdout.readline().split()
    assert len(pids) == 2 and all(Path(f"/proc/{pid}").exists() for pid in pids)
    process.kill()
    process.wait()
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
