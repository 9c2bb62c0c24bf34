"""`dsft launch` and its job are tied together before the ranks meet; the job is a process of the watchdog alone."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
from conftest import KERNEL, ROOT, grid, needed_cases
from test_environment import SSH

from dsft.launch.launchers import MODULES, LaunchOptions, build_command, read_launch
from dsft.launch.supervise import LauncherProcess, check_as_rank_0
from dsft.runtime.launcher_env import Node
from dsft.watchdog.messages import Connection
from dsft.watchdog.processes import descendants, start_time

RANK = """
import os, signal, sys, time
from types import SimpleNamespace
from dsft.watchdog import client
os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
LAUNCH = os.getppid()
start = lambda: client.start(SimpleNamespace(start_timeout=300, lost_timeout=60, load_timeout=300))
def sidecars():
    import psutil
    mine = f'"pid": {os.getpid()},'
    # None: a process that has just begun has no command line for a moment.
    return [each for each in psutil.process_iter(["cmdline"]) if mine in " ".join(each.info["cmdline"] or ())]
def is_tied():
    return any(connection.status == "ESTABLISHED" for each in sidecars() for connection in each.net_connections("tcp"))
def is_taken():  # by the launch, for which a connection is there as soon as its system has it
    import psutil
    return any(connection.status == "ESTABLISHED" for connection in psutil.Process(LAUNCH).net_connections("tcp"))
def wait_until_tied():
    while not (is_tied() and is_taken()):
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
options = LaunchOptions(nodes=1) if sys.argv[2:] else LaunchOptions()
sys.exit(LauncherProcess(options, [sys.executable, "-c", sys.argv[1]], saves=True).run())
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


GOES_ON = "\nwhile not os.path.exists(os.environ['FOLDER'] + '/go'):\n    time.sleep(0.1)\n"
ASKED = """
signal.signal(signal.SIGUSR1, lambda *_: say('asked')); start(); wait_until_tied(); say('ready')
while True: time.sleep(9)
"""
WORKS = {
    "ends in order": (
        "start(); wait_until_tied(); client.connect(client.endpoint()); mine = sidecars()[0]; client.close(0)\n"
        "looks = mine.num_ctx_switches().voluntary\n"
        "while mine.num_ctx_switches().voluntary < looks + 6:\n    time.sleep(0.1)\n"
        f"assert mine.is_running() and is_tied(); say('ready'){GOES_ON}"
    ),
    "before its sidecar": "say('ready'); time.sleep(1000)",
    "before the ranks meet": WAITS,
    "on another host": "to_another_host()" + WAITS,
    "comes late": f"to_another_host(); say('ready'){GOES_ON}start(); time.sleep(1000)",
    "saves": WAITS,
    "asked twice, True": ASKED,
    "asked twice, False": ASKED,
}
"""What a rank does, with a name."""


@pytest.fixture(scope="module")
def launched(request, tmp_path_factory):
    """Name -> (a launch, in a process of its own, of one rank that does this; the rank's folder). All at once, for they
    wait most of the time.
    """
    started = {}
    for name in sorted(needed_cases(request)):
        folder = tmp_path_factory.mktemp("launched")
        process = subprocess.Popen(
            [sys.executable, "-c", LAUNCH, RANK + WORKS[name]],
            cwd=ROOT,
            env=os.environ | {"FOLDER": str(folder)},
            stderr=subprocess.PIPE,
            text=True,
        )
        started[name] = process, folder
    yield started
    for process, folder in started.values():
        with suppress(FileNotFoundError, ProcessLookupError):  # one on "another host"
            os.kill(int((folder / "ready").read_text()), signal.SIGKILL)
        for pid in (*descendants(process.pid), process.pid) if process.poll() is None else ():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def when_ready(started: tuple[subprocess.Popen, Path]) -> subprocess.Popen:
    """The launch, once its rank is `ready`."""
    wait_until((started[1] / "ready").exists)
    return started[0]


def wait_until(condition) -> None:
    until = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


LAST_WORD = "start(); wait_until_tied(); client.connect(client.endpoint()); client.close(0); time.sleep(1)"
DONE = f"if not os.fork():\n    {LAST_WORD}; os._exit(0)\nos.wait(); "
KILLED_RANK = (
    "if not os.fork():\n    start(); wait_until_tied(); client.connect(client.endpoint());"
    " os.kill(os.getpid(), signal.SIGKILL)\n"
)
KILLED_WATCHDOG = (
    "if not os.fork():\n    start(); wait_until_tied(); client.connect(client.endpoint()); time.sleep(2);"
    " os.kill(sidecars()[0].pid, 9); time.sleep(1000)\n"
)


def after_its_last_word(end: str, *, is_reaped_at_once: bool) -> str:
    """A rank that ends like this once its work is done, under a launcher that has exit code 0 for it, as DeepSpeed's
    has for some that were killed. Reaped at once: by the kernel, sooner than its watchdog can look.
    """
    ignored, reaped = ("IGN", "time.sleep(10)") if is_reaped_at_once else ("DFL", "time.sleep(10); os.wait()")
    rank = f"signal.signal(signal.SIGCHLD, signal.SIG_DFL); {LAST_WORD}; {end}"
    return f"signal.signal(signal.SIGCHLD, signal.SIG_{ignored})\nif not os.fork():\n    {rank}\n{reaped}; sys.exit(0)"


# Name -> (what the launcher does, the exit code of the launch, what it prints).
ENDS = {
    # As pdsh does where an ssh session died on the way.
    "done, launcher 255, on several nodes": (f"{DONE}sys.exit(255)", 0, ""),
    # The code of a launcher on this machine counts where nobody else has seen the exit.
    "done, launcher 247": (f"{DONE}sys.exit(247)", 1, ""),
    # The watchdog collects for seconds what else has failed; DeepSpeed's launcher may end sooner.
    "killed, launcher ends at once": (f"{KILLED_RANK}os.wait(); sys.exit(247)", 1, "was killed from outside"),
    # DeepSpeed's launcher returns 247 for a killed child, or 0.
    "watchdog of rank 0 killed, launcher 247": (
        f"{KILLED_WATCHDOG}os.wait(); sys.exit(247)",
        1,
        "the watchdog beside rank 0 is gone",
    ),
    "watchdog of rank 0 killed, launcher 0": (
        f"{KILLED_WATCHDOG}os.wait(); sys.exit(0)",
        1,
        "the watchdog beside rank 0 is gone",
    ),
    **{
        f"no rank came, launcher {status}": (f"sys.exit({status})", code, "")
        for status, code in ((247, 1), (255, 1), (0, 0), (4, 4))
    },
    "refused before the ranks met": ("start(); client.close(2, ['x']); time.sleep(100)", 2, ""),
    "exception before the ranks met": ("start(); client._report_error(ValueError, ValueError(3), None)", 1, ""),
} | {
    f"{end} after its last word, reaped {'at once' if is_reaped_at_once else 'later'}": (
        after_its_last_word(code, is_reaped_at_once=is_reaped_at_once),
        1,
        said,
    )
    for end, code, said in (
        ("killed", "os.kill(os.getpid(), signal.SIGKILL)", "was killed by signal 9 after its work was done"),
        ("exited with 3", "os._exit(3)", "exited with 3 after its work was done"),
    )
    # Before Linux 6.15 nothing keeps the exit code of a process that was reaped.
    for is_reaped_at_once in ((False, True) if KERNEL >= (6, 15) else (False,))
}


KINDS = [
    "done, launcher 255, on several nodes",
    "killed, launcher ends at once",
    "watchdog of rank 0 killed, launcher 247",
    "no rank came, launcher 247",
    "refused before the ranks met",
    "killed after its last word, reaped later",
]
"""One of each kind, for the quick tests."""


@pytest.fixture(scope="module", autouse=True)
def launches(request):
    """A launch for each selected one of ENDS; all at once, and beside the tests of this file: they wait most of the
    time.
    """
    items = [item for item in request.session.items if item.path == request.path and "ended" in item.fixturenames]
    selected = {item.callspec.params["name"] for item in items}
    launches = {
        name: subprocess.Popen(
            [sys.executable, "-c", LAUNCH, RANK + work, *(["nodes"] if "several nodes" in name else [])],
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name, (work, _, _) in ENDS.items()
        if name in selected
    }
    yield launches
    for process in launches.values():
        for pid in (*descendants(process.pid), process.pid) if process.poll() is None else ():
            os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def ended(launches) -> dict[str, tuple[int, str]]:
    """(exit code, what was printed) of each."""
    printed = {name: process.communicate(timeout=300)[1] for name, process in launches.items()}
    return {name: (process.returncode, printed[name]) for name, process in launches.items()}


@pytest.mark.cases("ends in order")
def test_the_end_of_a_rank_in_order_counts_once_it_has_exited(launched):
    """Not because it said so."""
    _, folder = launched["ends in order"]
    process = when_ready(launched["ends in order"])
    (folder / "go").touch()
    assert process.wait(120) == 0


KILLED = ["before its sidecar", "before the ranks meet", "on another host"]


@pytest.mark.cases("{name}")
@pytest.mark.parametrize("name", grid(KILLED, [KILLED[0], KILLED[2]]))
def test_a_killed_launch_leaves_nothing_before_the_ranks_have_met(launched, name):
    process = when_ready(launched[name])
    family = {*descendants(process.pid), int((launched[name][1] / "ready").read_text())}
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


def test_the_first_rank_of_a_node_is_not_always_the_one_that_connects_to_the_launch(monkeypatch, capfd):
    """DeepSpeed numbers the second of two uneven nodes from another one: ranks 3 and 4 are local ranks 1 and 0."""
    ended = "import sys, time; print('pdsh@a: b: ssh exited with exit code 5', file=sys.stderr); time.sleep(1)"
    launch = LauncherProcess(LaunchOptions(num_gpus=1), [sys.executable, "-c", ended], saves=False)
    launch.nodes = [Node(name="a", slots=3), Node(name="b", slots=2)]
    ends = [socket.socketpair() for _ in range(2)]
    launch.link.sidecars = {rank: Connection(mine) for rank, (mine, _) in zip((0, 4), ends, strict=True)}
    Connection(ends[1][1]).send("done", exit_code=5)
    monkeypatch.setattr("dsft.launch.supervise.launcher_environment", lambda *_: (os.environ, None))
    assert launch.run() == 5 and "before its ranks connected" not in capfd.readouterr().err


@pytest.mark.cases("comes late")
def test_a_rank_that_comes_after_its_launch_was_killed_ends(launched):
    _, folder = launched["comes late"]
    process = when_ready(launched["comes late"])
    process.kill()
    process.wait()
    (folder / "go").touch()
    rank = int((folder / "ready").read_text())
    wait_until(lambda: start_time(rank) is None)
    assert "was started by a dsft launch that is gone" in process.stderr.read()


@pytest.mark.cases("saves")
def test_ctrl_c_asks_the_ranks_to_save_and_a_second_one_ends_them_at_once(launched):
    process = when_ready(launched["saves"])
    process.send_signal(signal.SIGINT)
    assert process.wait(120) == 75
    asked = "dsft: Ctrl-C: asked the ranks to save and exit; a second one terminates them at once\n"
    assert process.stderr.read() == asked


@pytest.mark.cases("asked twice, {is_stopped}")
@pytest.mark.parametrize("is_stopped", grid([False, True], [True]))
def test_a_second_ctrl_c_ends_the_ranks_at_once(launched, is_stopped):
    """Also one that is stopped, and cannot follow the first."""
    _, folder = launched[f"asked twice, {is_stopped}"]
    process = when_ready(launched[f"asked twice, {is_stopped}"])
    family = descendants(process.pid)
    if is_stopped:
        os.kill(int((folder / "ready").read_text()), signal.SIGSTOP)
    process.send_signal(signal.SIGINT)
    if is_stopped:
        assert "a second one terminates them at once" in process.stderr.readline()
    else:
        wait_until((folder / "asked").exists)
    process.send_signal(signal.SIGINT)
    assert process.wait(120) == 130
    wait_until(lambda: not any(start_time(pid) for pid in family))
    assert process.stderr.read().splitlines()[-1:] == ["dsft: Ctrl-C: terminating all ranks"]


def test_a_check_before_the_start_that_is_killed_is_named_with_its_signal(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(MODULES, "train", "killed")
    (tmp_path / "killed.py").write_text("import os; os.kill(os.getpid(), 9)")
    assert check_as_rank_0("train", [], 2) == 137
    assert "the check before the start was killed by signal 9" in capfd.readouterr().err


CHECKS = """
import os, signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # as in a terminal; a shell's background jobs ignore it
from dsft.launch.supervise import MODULES, check_as_rank_0
MODULES["train"] = "waits"
os.chdir(os.environ["FOLDER"])
check_as_rank_0("train", [], 2)
"""


@pytest.mark.parametrize("number", grid([signal.SIGKILL, signal.SIGTERM, signal.SIGINT], [signal.SIGKILL]))
def test_a_check_before_the_start_ends_with_its_launch(tmp_path, monkeypatch, number):
    monkeypatch.setenv("FOLDER", str(tmp_path))
    (tmp_path / "waits.py").write_text(
        "import os, pathlib, time; pathlib.Path('-').touch(); os.rename('-', f'{os.getpid()}.pid'); time.sleep(1000)"
    )
    command, environment = [sys.executable, "-c", CHECKS], os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_until(lambda: list(tmp_path.glob("*.pid")))
    (pid,) = (int(path.stem) for path in tmp_path.glob("*.pid"))
    process.send_signal(number)
    process.wait(60)
    wait_until(lambda: start_time(pid) is None)


# Last: their launches have ended meanwhile.
@pytest.mark.parametrize("name", grid(ENDS, KINDS))
def test_a_launch_has_the_exit_code_and_the_message_of_how_its_ranks_ended(ended, name):
    _, code, said = ENDS[name]
    assert ended[name][0] == code and said in ended[name][1], ended[name]
