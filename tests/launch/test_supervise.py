"""`dsft launch` and its job are tied together before the ranks meet; the job is a process of the watchdog alone."""

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress

import pytest
from conftest import KERNEL, ROOT
from test_environment import SSH

from dsft.launch.launchers import LaunchOptions, build_command, read_launch
from dsft.launch.supervise import LauncherProcess
from dsft.watchdog.processes import descendants, start_time

RANK = """
import os, signal, sys, time
from types import SimpleNamespace
from dsft.watchdog import client
os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
start = lambda: client.start(SimpleNamespace(start_timeout=300, lost_timeout=60, load_timeout=300))
def sidecars():
    import psutil
    mine = f'"pid": {os.getpid()},'
    # None: a process that has just begun has no command line for a moment.
    return [each for each in psutil.process_iter(["cmdline"]) if mine in " ".join(each.info["cmdline"] or ())]
def is_tied():
    return any(connection.status == "ESTABLISHED" for each in sidecars() for connection in each.net_connections("tcp"))
def wait_until_tied():
    while not is_tied():
        time.sleep(0.1)
    time.sleep(3)  # the launch looks five times a second
def to_another_host():
    if os.fork():
        time.sleep(1000)  # as an ssh
    session = os.getpid()
    if os.fork():
        os._exit(0)
    os.setsid()
    while os.getppid() == session:  # whose end would be that of a launcher, as its command line reads
        time.sleep(0.01)
def say(word):
    path = os.environ["FOLDER"] + "/" + word
    open(path + "-", "w").write(str(os.getpid()))
    os.rename(path + "-", path)
"""
LAUNCH = """
import sys
from dsft.launch.launchers import LaunchOptions
from dsft.launch.supervise import LauncherProcess
sys.exit(LauncherProcess(LaunchOptions(), [sys.executable, "-c", sys.argv[1]], saves=True).run())
"""
PDSH = """#!/bin/bash
echo "$*" >> "$FOLDER/calls"
[[ "$*" == *pkill* ]] || exec sleep 1000
"""
WAITS = """
start()
signal.signal(signal.SIGUSR1, lambda *_: (client.close(75), os._exit(75)))
wait_until_tied()
say("ready")
time.sleep(1000)
"""


@pytest.fixture
def launch(tmp_path, monkeypatch):
    """Starts a launch, in a process of its own, of one rank that does this; gives it once the rank is `ready`."""
    monkeypatch.setenv("FOLDER", str(tmp_path))
    started = []

    def start(work: str) -> subprocess.Popen:
        process = subprocess.Popen(
            [sys.executable, "-c", LAUNCH, RANK + work], cwd=ROOT, stderr=subprocess.PIPE, text=True
        )
        started.append(process)
        wait_until((tmp_path / "ready").exists)
        return process

    yield start
    with suppress(FileNotFoundError, ProcessLookupError):  # one on "another host"
        os.kill(int((tmp_path / "ready").read_text()), signal.SIGKILL)
    for process in started:
        for pid in (*descendants(process.pid), process.pid) if process.poll() is None else ():
            os.kill(pid, signal.SIGKILL)


def wait_until(condition) -> None:
    until = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


LAST_WORD = "start(); wait_until_tied(); client.connect([client.endpoint()]); client.close(0); time.sleep(1)"


def exit_code(work: str, **options) -> int:
    return LauncherProcess(LaunchOptions(**options), [sys.executable, "-c", RANK + work], saves=True).run()


def test_a_run_that_is_done_has_exit_code_0_though_its_launcher_ends_with_255(monkeypatch):
    """As pdsh does where an ssh session died on the way."""
    monkeypatch.chdir(ROOT)
    assert exit_code(f"if not os.fork():\n    {LAST_WORD}; os._exit(0)\nos.wait(); sys.exit(255)", nodes=1) == 0


@pytest.mark.parametrize(
    ("end", "said"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "was killed by signal 9 after its work was done"),
        ("os._exit(3)", "exited with 3 after its work was done"),
    ],
    ids=["killed", "another code"],
)
@pytest.mark.parametrize(
    ("reaps", "waits"),
    [
        ("", "time.sleep(10); os.wait()"),
        # The kernel reaps it at once, sooner than its watchdog can look.
        pytest.param(
            "signal.signal(signal.SIGCHLD, signal.SIG_IGN)",
            "time.sleep(10)",
            marks=pytest.mark.skipif(KERNEL < (6, 15), reason="keeps no exit code of a process that was reaped"),
        ),
    ],
    ids=["reaped later", "reaped at once"],
)
def test_a_rank_killed_between_its_last_word_and_its_exit_has_failed(monkeypatch, capfd, end, said, reaps, waits):
    """Whenever its launcher reaps it, whose own exit code is 0, as DeepSpeed's is for some that were killed."""
    monkeypatch.chdir(ROOT)
    as_usual = "signal.signal(signal.SIGCHLD, signal.SIG_DFL)"
    work = f"{reaps}\nif not os.fork():\n    {as_usual}; {LAST_WORD}; {end}\n"
    assert exit_code(f"{work}{waits}; sys.exit(0)") == 1
    assert said in capfd.readouterr().err


def test_the_code_of_a_launcher_on_this_machine_counts_where_nobody_else_has_seen_the_exit(monkeypatch):
    monkeypatch.chdir(ROOT)
    assert exit_code(f"if not os.fork():\n    {LAST_WORD}; os._exit(0)\nos.wait(); sys.exit(247)") == 1


def test_a_launcher_that_ends_at_once_with_a_killed_rank_does_not_hide_the_cause(monkeypatch, capfd):
    """The watchdog collects for seconds what else has failed; DeepSpeed's launcher may end sooner."""
    monkeypatch.chdir(ROOT)
    killed = "start(); wait_until_tied(); client.connect([client.endpoint()]); os.kill(os.getpid(), signal.SIGKILL)"
    assert exit_code(f"if not os.fork():\n    {killed}\nos.wait(); sys.exit(247)") == 1
    assert "was killed from outside" in capfd.readouterr().err


def test_the_end_of_a_rank_in_order_counts_once_it_has_exited(launch, tmp_path):
    """Not because it said so."""
    wait = "while not os.path.exists(os.environ['FOLDER'] + '/go'):\n    time.sleep(0.1)\n"
    process = launch(
        "start(); wait_until_tied(); client.connect([client.endpoint()]); mine = sidecars()[0]; client.close(0)\n"
        "looks = mine.num_ctx_switches().voluntary\n"
        "while mine.num_ctx_switches().voluntary < looks + 6:\n    time.sleep(0.1)\n"
        f"assert mine.is_running() and is_tied(); say('ready')\n{wait}"
    )
    (tmp_path / "go").touch()
    assert process.wait(120) == 0


@pytest.mark.parametrize(("status", "code"), [(247, 1), (255, 1), (0, 0), (4, 4)])
def test_a_launcher_whose_ranks_never_came_has_a_documented_exit_code(status, code):
    assert exit_code(f"sys.exit({status})") == code


@pytest.mark.parametrize("status", [247, 0])
def test_a_killed_watchdog_of_rank_0_is_named_and_has_exit_code_1(monkeypatch, capfd, status):
    """DeepSpeed's launcher returns 247 for a killed child, or 0."""
    monkeypatch.chdir(ROOT)
    work = (
        "start(); wait_until_tied(); client.connect([client.endpoint()]); time.sleep(2); os.kill(sidecars()[0].pid, 9);"
        " time.sleep(1000)"
    )
    assert exit_code(f"if not os.fork():\n    {work}\nos.wait(); sys.exit({status})") == 1
    assert "the watchdog beside rank 0 is gone" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("work", "code"),
    [
        ("start(); client.close(2, ['x']); time.sleep(100)", 2),
        ("start(); client._report_error(ValueError, ValueError(3), None)", 1),
    ],
    ids=["says why", "exception"],
)
def test_a_rank_that_fails_before_the_others_came_ends_the_launch_with_its_code(monkeypatch, work, code):
    monkeypatch.chdir(ROOT)
    assert exit_code(work) == code


@pytest.mark.parametrize(
    "work",
    ["say('ready'); time.sleep(1000)", WAITS, "to_another_host()" + WAITS],
    ids=["before its sidecar", "before the ranks meet", "on another host"],
)
def test_a_killed_launch_leaves_nothing_before_the_ranks_have_met(launch, work, tmp_path):
    process = launch(work)
    family = {*descendants(process.pid), int((tmp_path / "ready").read_text())}
    assert len(family) >= 2
    process.kill()
    process.wait()
    wait_until(lambda: not any(start_time(pid) for pid in family))


def test_ending_a_launch_ends_no_other_job_on_its_nodes(tmp_path, monkeypatch):
    """DeepSpeed's launcher, asked to end, has pdsh end whatever it has started on these nodes."""
    for name, text in {"pdsh": PDSH, "ssh": SSH}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("FOLDER", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hosts").write_text("node-0 slots=1\nnode-1 slots=1\n")
    words = ["--hostfile", "hosts", "--master_addr", "node-0", "--master_port", "1", "train"]
    options, name, script = read_launch(words)
    launch = LauncherProcess(options, build_command(options, name, script), saves=True)
    calls = tmp_path / "calls"

    def hang_up() -> None:
        wait_until(calls.exists)
        os.kill(os.getpid(), signal.SIGHUP)

    thread = threading.Thread(target=hang_up)
    thread.start()
    assert launch.run() == 128 + signal.SIGHUP
    thread.join()
    [call] = calls.read_text().splitlines()
    assert "deepspeed.launcher.launch" in call and "pkill" not in call


def test_a_rank_that_comes_after_its_launch_was_killed_ends(launch, tmp_path):
    wait = "\nwhile not os.path.exists(os.environ['FOLDER'] + '/go'):\n    time.sleep(0.1)\n"
    process = launch(f"to_another_host(); say('ready'){wait}start(); time.sleep(1000)")
    process.kill()
    process.wait()
    (tmp_path / "go").touch()
    rank = int((tmp_path / "ready").read_text())
    wait_until(lambda: start_time(rank) is None)
    assert "was started by a dsft launch that is gone" in process.stderr.read()


def test_ctrl_c_asks_the_ranks_to_save_and_a_second_one_ends_them_at_once(launch):
    process = launch(WAITS)
    process.send_signal(signal.SIGINT)
    assert process.wait(120) == 75
    asked = "dsft: Ctrl-C: asked the ranks to save and exit; a second one terminates them at once\n"
    assert process.stderr.read() == asked


def test_a_second_ctrl_c_ends_the_ranks_at_once(launch):
    notes = "signal.signal(signal.SIGUSR1, lambda *_: say('asked')); start(); wait_until_tied(); say('ready')"
    process = launch(f"{notes}\nwhile True: time.sleep(9)")
    family = descendants(process.pid)
    process.send_signal(signal.SIGINT)
    wait_until(lambda: os.path.exists(os.environ["FOLDER"] + "/asked"))
    process.send_signal(signal.SIGINT)
    assert process.wait(120) == 130
    wait_until(lambda: not any(start_time(pid) for pid in family))
    assert process.stderr.read().splitlines()[1:] == ["dsft: Ctrl-C: terminating all ranks"]
