"""The watchdog: which failure is named, and that nothing of a job outlives it. Real ranks."""

import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from conftest import KERNEL, ROOT
from ranks import started_entry

from dsft.config.options import TrainConfig
from dsft.runtime import distributed
from dsft.watchdog import client, messages
from dsft.watchdog.coordinator import first_cause
from dsft.watchdog.messages import LARGEST_BYTES, MOST_STRANGERS, Connection, Failure, Report, Server, connect, listen
from dsft.watchdog.processes import Process, descendants, end, start_time

FAULTS = (
    "none",
    "paused",
    "exception",
    "user-error",
    "same-error",
    "killed",
    "frozen",
    "stalled",
    "stalled beside a full disk",
    "stalled before a full screen",
    "launcher",
)
WAITING_RANK = """
import os, pathlib, sys, time
from types import SimpleNamespace
from dsft.watchdog import client
os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
client.start(SimpleNamespace(start_timeout=300, lost_timeout=60))
pathlib.Path(sys.argv[1]).touch()
time.sleep(1000)
"""
RANK_1 = WAITING_RANK.replace('"RANK": "0", "WORLD_SIZE": "1"', '"RANK": "1", "WORLD_SIZE": "2"').replace(
    "lost_timeout=60))",
    'lost_timeout=60, load_timeout=300)); client.connect(client.Endpoint(int(sys.argv[2]), "secret"))',
)
CROWDED_RANK_0 = """
import os, socket, time
from types import SimpleNamespace
from dsft.watchdog import client, messages
os.environ |= {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
client.listen = lambda: socket.create_server(("127.0.0.1", 0), backlog=0)
client.start(SimpleNamespace(start_timeout=300, lost_timeout=60, load_timeout=300))
address, crowd = ("127.0.0.1", client.endpoint().port), [socket.socket() for _ in range(4)]
for each in crowd:
    each.setblocking(False)
    each.connect_ex(address)
client.connect(client.endpoint())
rank_1 = messages.connect(address, client.endpoint().token)
rank_1.send("hello", rank=1, host="node-1")
while not list(rank_1.read()) and not rank_1.closed:
    time.sleep(0.05)
print("answered" if not rank_1.closed else "hung up")
rank_1.send("close", exit_code=0, lines=[])
client.close()
"""
LOADING_RANK = """
import os, pathlib, sys, time
from types import SimpleNamespace
folder = pathlib.Path(__file__).parent
if os.fork():
    os.wait()
    sys.exit()
from dsft.watchdog import client
(folder / "pid").write_text(str(os.getpid()))
(folder / "pid").rename(folder / "loading")
while not (folder / "loaded").exists():
    time.sleep(0.05)
os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
client.start(SimpleNamespace(start_timeout=300, lost_timeout=60))
time.sleep(1000)
"""
SWEEP = """
import os, pathlib, subprocess, sys
folder = pathlib.Path(__file__).parent
rank = subprocess.Popen([sys.executable, folder / "rank.py", folder / "ready"], stdin=subprocess.DEVNULL)
(folder / "rank").write_text(str(rank.pid))
(folder / "rank").rename(folder / "started")
while sys.argv[1] == "leaves":
    if (folder / "ready").exists():
        sys.exit()
rank.wait()
while not (folder / "go").exists():
    pass
print("goes on")
"""
"""A user's script around a run."""
CLOSED = "Traceback ...\nRuntimeError: [../gloo/transport/tcp/pair.cc:537] Connection closed by peer [10.0.0.2]:37"


def test_limits_of_a_planned_run_hold_from_its_next_phase_on(monkeypatch):
    sent = []
    sidecar = SimpleNamespace(send=lambda kind, **message: sent.append(message))
    monkeypatch.setattr(client, "_client", client._Client(TrainConfig(), sidecar))
    client.set_phase("training")
    client.set_limits(TrainConfig(step_timeout=900.0))
    client.set_phase("training")
    assert [message["limit"] for message in sent] == [300.0, 900.0]


RANK = ROOT / "tests/workers/watched_rank.py"


@pytest.fixture(scope="module", params=["forked", pytest.param("torchrun", marks=pytest.mark.exhaustive)])
def ended(request, tmp_path_factory):
    """(exit code, screen, all stacks as they were saved, processes left) of a job of two ranks per fault, all at once:
    forked, or under torchrun as "launcher" always is.
    """
    folders = {fault: tmp_path_factory.mktemp(fault) for fault in FAULTS}
    launched = FAULTS if request.param == "torchrun" else ("launcher",)
    results = {}
    with ExitStack() as stack:
        forked = {
            fault: stack.enter_context(started_entry(str(RANK), [fault, folder], world=2))
            for fault, folder in folders.items()
            if fault not in launched
        }
        jobs = {}
        for fault in launched:
            words = ["--nproc_per_node", "2", "--master_port", distributed.free_port(), RANK, fault, folders[fault]]
            jobs[fault] = subprocess.Popen(
                [sys.executable, "-m", "torch.distributed.run", *map(str, words)],
                env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        for fault, folder in folders.items():
            if fault in jobs:
                screen, _ = jobs[fault].communicate(timeout=600)
                code = jobs[fault].returncode
            else:
                result, _ = forked[fault]()
                code, screen = result.returncode, result.stdout + result.stderr
            pids = [int(path.read_text()) for path in folder.glob("pid_*")]
            assert len(pids) == 2, screen
            until = time.monotonic() + 120
            while time.monotonic() < until and any(start_time(pid) for pid in pids):
                time.sleep(0.2)
            file = folder / "stacks.txt"
            stacks = file.read_text() if file.is_file() else ""
            results[fault] = (code, screen, stacks, [pid for pid in pids if start_time(pid)])
    return results


@pytest.mark.launch
def test_no_rank_outlives_a_fault_and_the_exit_code_tells(ended):
    assert {fault: left for fault, (_, _, _, left) in ended.items() if left} == {}
    assert [fault for fault, (code, _, _, _) in ended.items() if code == 0] == ["none", "paused"]
    assert "error" not in ended["none"][1] + ended["paused"][1]


@pytest.mark.launch
@pytest.mark.parametrize(
    ("fault", "named"),
    [
        ("exception", "error: rank 1 on HOST: RuntimeError: this GPU has had enough"),
        ("user-error", "error: rank 1 on HOST: data=/x: not on this node"),
        ("same-error", "error: data=/x: not there"),
        ("killed", "error: rank 0 on HOST was killed from outside"),
        ("frozen", "error: rank 1 on HOST is stopped (SIGSTOP)"),
        ("stalled", "made no progress for 4 s, in phase training, step "),
        ("launcher", "lost its launcher"),
    ],
)
def test_the_first_failure_is_named_with_its_rank_and_host(ended, fault, named):
    screen = ended[fault][1]
    assert named.replace("HOST", socket.gethostname()) in screen, screen
    assert screen.count("dsft: error:") == 1, screen


@pytest.mark.launch
def test_a_stall_shows_the_stacks_of_all_ranks(ended):
    screen = ended["stalled"][1]
    assert "in wait_for_nothing" in screen and "in barrier" in screen
    assert "all stacks: " in screen


@pytest.mark.launch
def test_a_sidecar_that_cannot_write_stacks_ends_the_job_all_the_same(ended):
    """/dev/full fails with ENOSPC; what comes after the failed write shows that the coordinator lives."""
    _, screen, stacks, _ = ended["stalled beside a full disk"]
    assert "in wait_for_nothing" in screen and "terminating all 2 ranks" in screen
    assert "all stacks: " not in screen and not stacks
    _, screen, stacks, _ = ended["stalled before a full screen"]
    assert "in wait_for_nothing" in stacks and "all 2 ranks" not in screen


@pytest.mark.launch
def test_an_error_comes_with_its_traceback_once(ended):
    assert ended["exception"][1].count('raise RuntimeError("this GPU has had enough")') == 1


def test_a_failure_that_another_explains_is_not_the_cause():
    closed, died = Report(0, "a", Failure.ERROR, CLOSED), Report(1, "b", Failure.DIED, "was killed")
    error = Report(2, "c", Failure.ERROR, "Traceback\nValueError: 3")
    stalled = Report(0, "a", Failure.STALLED, "made no progress")
    assert first_cause([closed, died]) == died
    assert first_cause([closed, error, died]) == error
    assert first_cause([stalled, closed]) == stalled
    assert first_cause([stalled, died]) == died
    assert closed.sentence().startswith("rank 0 on a: RuntimeError: ")


def test_messages_survive_pieces():
    here, there = socket.socketpair()
    connection = Connection(here)
    there.sendall(b'{"step": 1}\n{"st')
    assert list(connection.read()) == [{"step": 1}]
    there.sendall(b'ep": 2}\n')
    assert list(connection.read()) == [{"step": 2}] and not connection.closed


@pytest.mark.parametrize("line", [b"GET / HTTP/1.1\n", b"3\n", b"\xff\n", b"[]\n", b"x" * LARGEST_BYTES])
def test_a_connection_that_breaks_the_protocol_is_closed(line):
    here, there = socket.socketpair()
    connection = Connection(here)
    sender = threading.Thread(target=there.sendall, args=(line,))
    sender.start()
    until = time.monotonic() + 60
    while not connection.closed and time.monotonic() < until:
        assert list(connection.read()) == []
    sender.join()
    assert connection.closed


def test_a_sender_never_waits_for_a_peer_that_does_not_read():
    here, _there = socket.socketpair()
    connection = Connection(here)
    while not connection.closed:
        connection.send("heartbeat", filler="x" * 10_000)
    assert len(connection._unsent) < 2 * LARGEST_BYTES


@pytest.fixture
def server():
    server = Server(listen(), "secret")
    yield server
    server.close()


def address_of(server: Server, host: str = "127.0.0.1") -> tuple[str, int]:
    return host, server.listener.getsockname()[1]


def accepted_by(server: Server, condition: Callable[[list], bool]) -> list[tuple[Connection, dict]]:
    """What the server accepts until that is enough."""
    accepted: list = []
    wait_until(lambda: accepted.extend(server.accept()) or condition(accepted))
    return accepted


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_server_accepts_only_who_proves_the_token(server, host):
    if host == "::1" and not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 here")
    address = address_of(server, host)
    friend, silent, late, wrong = (connect(address, token) for token in ("secret", "secret", "secret", "guess"))
    plain = socket.create_connection(address)
    plain.sendall(b"f" * 32 + b'\n{"type": "hello", "rank": 0}\n')
    friend.send("hello", rank=1)
    friend.send("heartbeat")
    late.send("end")
    wrong.send("hello", rank=2)
    ((connection, hello),) = accepted_by(server, lambda accepted: accepted and len(server.strangers) == 1)
    assert hello["rank"] == 1
    beats: list = []
    wait_until(lambda: beats.extend(connection.read()) or beats)
    assert beats == [{"type": "heartbeat"}]
    for refused in (late, wrong):
        wait_until(lambda refused=refused: list(refused.read()) == [] and refused.closed)
    assert plain.recv(1) == b"" and list(silent.read()) == [] and not silent.closed


@pytest.mark.parametrize("attack", ["added", "repeated", "sent back", "whole session again"])
def test_a_line_that_is_added_repeated_or_sent_back_ends_the_connection(server, attack):
    """By someone between, who sees every line and has no token."""
    friend = connect(address_of(server), "secret")
    friend.send("hello")
    ((connection, _),) = accepted_by(server, bool)
    connection.send("end")
    told: list = []
    wait_until(lambda: told.extend(friend.read()) or told)
    hello, end = (line_of(each, kind) for each, kind in ((friend, "hello"), (connection, "end")))
    if attack == "whole session again":
        again = socket.create_connection(address_of(server))
        again.sendall(f"{friend.session}\n".encode() + hello)
        wait_until(lambda: list(server.accept()) == [] and readable(again))
        assert again.recv(1) == b"" and not connection.closed
        return
    added = b"0" * 64 + b' {"type": "close", "exit_code": 0}\n'
    friend.connection.sendall({"added": added, "repeated": hello, "sent back": end}[attack])
    wait_until(lambda: list(connection.read()) == [] and connection.closed)


def line_of(connection: Connection, kind: str) -> bytes:
    """Its first line."""
    text = json.dumps({"type": kind}).encode()
    return connection._proof(connection._directions[0], 0, text) + text + b"\n"


def readable(connection: socket.socket) -> bool:
    return bool(select.select([connection], [], [], 0)[0])


def test_1100_strangers_and_a_full_table_of_files_end_no_server(server, monkeypatch):
    """From a host that has no part in the job; the usual soft limit is 1024."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, limits[1]))
    try:
        flood = [socket.create_connection(address_of(server)) for _ in range(1100)]
        accepted_by(server, lambda _: len(server.strangers) == MOST_STRANGERS)
        friend = connect(address_of(server), "secret")
        friend.send("hello", rank=1)
        assert [hello["rank"] for _, hello in accepted_by(server, bool)] == [1]
        assert len(server.strangers) <= MOST_STRANGERS

        late = connect(address_of(server), "secret")
        late.send("hello", rank=2)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))  # no new file at all
        assert list(server.accept()) == [] and not server.strangers
        resource.setrlimit(resource.RLIMIT_NOFILE, (4096, limits[1]))
        assert [hello["rank"] for _, hello in accepted_by(server, bool)] == [2]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for stranger in flood:
            stranger.close()


def test_strangers_that_speak_while_others_take_their_places_end_no_server(server):
    """Both are read in one pass, the listener first."""
    flood = [socket.create_connection(address_of(server)) for _ in range(MOST_STRANGERS)]
    accepted_by(server, lambda _: len(server.strangers) == MOST_STRANGERS)
    flood += [socket.create_connection(address_of(server)) for _ in range(100)]
    for stranger in flood[:200]:
        stranger.sendall(b"nonsense\n")
    friend = connect(address_of(server), "secret")
    friend.send("hello", rank=1)
    assert [hello["rank"] for _, hello in accepted_by(server, bool)] == [1]
    accepted_by(server, lambda _: len(server.strangers) <= MOST_STRANGERS - 100)
    for stranger in flood:
        stranger.close()


def test_a_stranger_gets_seconds(server, monkeypatch):
    monkeypatch.setattr(messages, "STRANGER_SECONDS", 0.2)
    stranger = socket.create_connection(address_of(server))
    stranger.sendall(b"a")
    accepted_by(server, lambda _: len(server.strangers) == 1)
    accepted_by(server, lambda _: not server.strangers)
    assert stranger.recv(1) == b""


def test_processes_are_read_from_proc():
    child = subprocess.Popen(["sh", "-c", "sleep 30 & wait"])
    try:
        time.sleep(0.3)
        family = descendants(child.pid)
        assert len(family) == 1 and start_time(child.pid) and child.pid in descendants(os.getpid())
    finally:
        for pid in (*descendants(child.pid), child.pid):
            os.kill(pid, 9)
        child.wait()
    assert start_time(child.pid) is None


@pytest.mark.parametrize(("end", "code"), [("exit 3", 3), ("kill -9 $$", -9), ("exit 0", 0)])
def test_the_exit_code_of_a_process_is_known_before_its_parent_reaps_it_and_with_its_pidfd_after(end, code):
    child = subprocess.Popen(["sh", "-c", f"read line; {end}"], stdin=subprocess.PIPE)
    process, pidfd = Process.of(child.pid), os.pidfd_open(child.pid)
    assert process.exit_code(pidfd) is None
    child.stdin.close()
    wait_until(lambda: not process.is_alive())
    assert process.exit_code() == code
    child.wait()
    assert process.exit_code() is None
    assert process.exit_code(pidfd) == (code if KERNEL >= (6, 15) else None)
    os.close(pidfd)


def test_a_process_of_another_user_is_waited_for_without_an_error(monkeypatch):
    """The launcher above a task of srun is slurmstepd, which runs as root."""

    def refuse(pid: int, number: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "kill", refuse)
    end([Process.of(os.getppid())], [(0, 0.0), (signal.SIGTERM, 0.0)])


def test_a_sidecar_is_not_in_the_process_tree_of_its_rank(tmp_path):
    """DeepSpeed's launcher ends that tree, and waits for it."""
    rank = subprocess.Popen([sys.executable, "-c", WAITING_RANK, str(tmp_path / "ready")], cwd=ROOT)
    try:
        wait_until((tmp_path / "ready").exists)
        [sidecar] = sidecars_of(rank.pid)
        assert descendants(rank.pid) == []
    finally:
        rank.kill()
        rank.wait()
    wait_until(lambda: start_time(sidecar) is None)


def test_a_launcher_that_is_killed_while_its_rank_loads_libraries_is_missed(tmp_path):
    (tmp_path / "torchrun").write_text(LOADING_RANK)
    launcher = subprocess.Popen(
        [sys.executable, tmp_path / "torchrun"],
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{Path(psutil.__file__).parent.parent}"},
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_until((tmp_path / "loading").exists)
    launcher.kill()
    launcher.wait()
    (tmp_path / "loaded").touch()
    rank = int((tmp_path / "loading").read_text())
    wait_until(lambda: start_time(rank) is None)
    assert f"lost its launcher: process {launcher.pid} is gone" in launcher.stderr.read()


@pytest.fixture
def rank_1(tmp_path):
    """Starts rank 1 of two, whose coordinator is at a port of this test."""
    ranks = []

    def start(port: int) -> subprocess.Popen:
        words = [sys.executable, "-c", RANK_1, str(tmp_path / "ready"), str(port)]
        ranks.append(subprocess.Popen(words, cwd=ROOT, stderr=subprocess.PIPE, text=True))
        wait_until((tmp_path / "ready").exists)
        return ranks[0]

    yield start
    ranks[0].kill()
    ranks[0].wait()
    wait_until(lambda: sidecars_of(ranks[0].pid) == [])


def test_a_rank_whose_coordinator_hangs_up_is_ended_once_that_has_spoken(server, rank_1):
    """Before, it may have been too full for another connection, which is tried again."""
    rank = rank_1(address_of(server)[1])
    for answers in (False, True):
        ((connection, hello),) = accepted_by(server, bool)
        assert hello["rank"] == 1 and rank.poll() is None
        if answers:
            connection.send("heartbeat")
            beats: list = []
            wait_until(lambda connection=connection, beats=beats: beats.extend(connection.read()) or beats)
        connection.close()
    assert rank.wait(60) == -signal.SIGTERM
    assert f"error: {socket.gethostname()} has lost rank 0's node" in rank.stderr.read()


def test_a_coordinator_that_cannot_be_reached_is_said_and_leaves_the_rank_alone(rank_1):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    rank = rank_1(port)
    [sidecar] = sidecars_of(rank.pid)
    assert f"{socket.gethostname()} cannot reach 127.0.0.1:{port}" in rank.stderr.readline()
    looks = voluntary_switches(sidecar)
    wait_until(lambda: voluntary_switches(sidecar) > looks + 4)
    assert rank.poll() is None


def test_ranks_that_fill_the_queue_of_the_coordinators_port_do_not_keep_rank_0_from_accepting_them():
    """Its own sidecar waited in that queue for 20 s, and then nobody watched. Older kernels let 128 wait."""
    words = [sys.executable, "-c", CROWDED_RANK_0]
    result = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (result.stdout, result.stderr) == ("answered\n", "")


@pytest.mark.parametrize("name", ["dsft", "deepspeed", "accelerate", "torchrun"])
def test_a_script_around_a_run_is_no_launcher_whatever_its_folder_is_called(name, tmp_path):
    """The sidecar of a killed rank ended it, and with that pytest's own workers in a clone named dsft."""
    sweep, folder = start_sweep(tmp_path / name, "waits")
    wait_until((folder / "ready").exists)
    rank = int((folder / "started").read_text())
    [sidecar] = sidecars_of(rank)
    os.kill(rank, signal.SIGKILL)
    wait_until(lambda: start_time(sidecar) is None)
    (folder / "go").touch()
    assert sweep.communicate(timeout=60)[0] == "goes on\n" and sweep.returncode == 0


def test_a_run_outlives_the_script_that_started_it_under_nohup(tmp_path):
    sweep, folder = start_sweep(tmp_path / "dsft", "leaves", before=["setsid", "nohup"])
    assert sweep.wait(60) == 0
    wait_until((folder / "ready").exists)
    rank = int((folder / "started").read_text())
    [sidecar] = sidecars_of(rank)
    looks = voluntary_switches(sidecar)
    wait_until(lambda: voluntary_switches(sidecar) > looks + 4)  # at its rank, twice a second
    assert start_time(rank)
    os.kill(rank, signal.SIGKILL)
    wait_until(lambda: start_time(sidecar) is None)


def start_sweep(folder: Path, ending: str, before: Sequence[str] = ()) -> tuple[subprocess.Popen, Path]:
    """A script that runs from FOLDER/.venv/bin/python and has started a rank, without a terminal."""
    python = folder / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    (folder / "rank.py").write_text(WAITING_RANK)
    (folder / "sweep.py").write_text(SWEEP)
    sweep = subprocess.Popen(
        [*before, python, folder / "sweep.py", ending],
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{Path(psutil.__file__).parent.parent}"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )
    return sweep, folder


def sidecars_of(rank: int) -> list[int]:
    mine = f'"pid": {rank},'
    return [each.pid for each in psutil.process_iter(["cmdline"]) if mine in " ".join(each.info["cmdline"] or ())]


def voluntary_switches(pid: int) -> int:
    return psutil.Process(pid).num_ctx_switches().voluntary


def wait_until(condition) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_sidecar_loads_no_library_but_psutil():
    code = client.SIDECAR[-1].replace("os.fork() and os._exit(0); ", "").replace("; main()", "; print(*sys.modules)")
    result = subprocess.run([sys.executable, "-S", "-E", "-c", code], capture_output=True, text=True, check=True)
    modules = {name.partition(".")[0] for name in result.stdout.split()}
    assert modules - sys.stdlib_module_names <= {"__main__", "dsft", "psutil"}
