"""The decisions of the coordinator, with sidecars that are plain connections and a clock that the test moves."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from conftest import ROOT

from dsft.watchdog import messages
from dsft.watchdog.coordinator import (
    COLLECT_SECONDS,
    COLLECT_STACKS_SECONDS,
    LEAVE_SECONDS,
    RANK_0_FIRST_SECONDS,
    Coordinator,
    JobState,
    record_failure,
)
from dsft.watchdog.messages import Connection, Failure, Poller, Server, connect, listen

LOST_SECONDS = 60.0


class Job:
    """A coordinator and the connections of its two sidecars, by a clock that the test moves."""

    def __init__(self, monkeypatch):
        self.now = time.monotonic()
        monkeypatch.setattr(messages, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.screen: list[str] = []
        server = Server(listen(), "token")
        self.coordinator = Coordinator(server, 2, LOST_SECONDS, say=self.screen.append)
        address = ("127.0.0.1", server.listener.getsockname()[1])
        self.sidecars = [connect(address, "token") for _ in range(2)]
        for rank, sidecar in enumerate(self.sidecars):
            sidecar.send("hello", rank=rank, host=f"node-{rank}")
        self.step_until(lambda: len(self.coordinator.members) == 2)

    def send(self, rank: int, kind: str, **fields) -> None:
        self.sidecars[rank].send(kind, **fields)

    def step_until(self, condition) -> None:
        """Let the coordinator read until `condition` holds, without moving its clock."""
        until = time.monotonic() + 10
        while not condition() and time.monotonic() < until:
            self.coordinator.step(self.now)
        assert condition()

    def has_left(self, rank: int) -> Callable[[], bool]:
        return lambda: self.coordinator.members[rank].is_gone

    def is_in(self, state: JobState) -> bool:
        self.step_until(lambda: self.coordinator.state is state)
        return True

    def after(self, seconds: float) -> None:
        self.now += seconds
        self.coordinator.step(self.now)

    def is_told(self, rank: int, kind: str) -> bool:
        if not self.sidecars[rank].closed:
            poller = Poller()
            poller.add(self.sidecars[rank])
            poller.ready(0.2)
            poller.close()
        return kind in [message["type"] for message in self.sidecars[rank].read()]


@pytest.fixture
def job(monkeypatch):
    job = Job(monkeypatch)
    yield job
    for source in (job.coordinator.server, *job.sidecars):
        source.close()


def test_a_sidecar_that_is_gone_ends_the_other_ranks(job):
    job.sidecars[1].close()
    assert job.is_in(JobState.COLLECTING) and not job.is_told(0, "end")
    job.after(COLLECT_SECONDS)
    assert job.screen[0].startswith("error: rank 1 on node-1 is gone with its watchdog") and job.is_told(0, "end")


def test_a_silent_sidecar_is_lost_after_the_users_limit(job):
    job.after(LOST_SECONDS - 1)
    job.sidecars[0].send("heartbeat")
    job.step_until(lambda: any(connection.last_heard == job.now for connection in job.coordinator.sidecars))
    assert job.coordinator.state is JobState.RUNNING
    job.after(2)
    assert job.coordinator.state is JobState.COLLECTING
    job.after(COLLECT_SECONDS)
    assert "rank 1 on node-1 gave no heartbeat for 60 s" in job.screen[0]


def test_a_node_that_is_lost_after_the_others_have_left_is_named(job, launch):
    """The launch is told too: without a word it took the watchdog of rank 0 for gone."""
    job.send(0, "close", exit_code=0, lines=[])
    job.step_until(job.has_left(0))
    job.sidecars[1].close()
    assert job.is_in(JobState.COLLECTING) and not job.coordinator.is_over()
    job.after(COLLECT_SECONDS)
    assert job.screen[0].startswith("error: rank 1 on node-1 is gone with its watchdog")
    job.sidecars[0].close()
    job.step_until(job.coordinator.is_over)
    [failed] = launch.read()
    assert failed["type"] == "failed" and failed["lost"] == ["node-1"]


def test_silence_counts_from_the_end_of_a_pause(job):
    job.now += LOST_SECONDS + 1
    job.coordinator.poller.count_silence_from(job.now)
    job.after(LOST_SECONDS - 1)
    assert job.coordinator.state is JobState.RUNNING
    job.after(2)
    assert job.coordinator.state is JobState.COLLECTING


def test_a_stall_asks_for_stacks_and_waits_for_them(job):
    job.send(0, "failed", failure=Failure.STALLED, text="made no progress", log="")
    assert job.is_in(JobState.COLLECTING) and job.is_told(1, "write stacks")
    job.after(COLLECT_SECONDS)
    assert job.coordinator.state is JobState.COLLECTING
    job.after(COLLECT_STACKS_SECONDS - COLLECT_SECONDS)
    assert job.coordinator.state is JobState.ENDING and job.screen[0] == "error: rank 0 on node-0 made no progress"


def test_the_cause_is_named_though_its_consequence_was_reported_first(job):
    job.send(0, "failed", failure=Failure.ERROR, text="RuntimeError: Connection closed by peer", log="")
    assert job.is_in(JobState.COLLECTING)
    job.send(1, "failed", failure=Failure.DIED, text="was killed", log="/logs/rank_1.log")
    job.step_until(lambda: len(job.coordinator.reports) == 2)
    job.after(COLLECT_SECONDS)
    assert job.screen == [
        "error: rank 1 on node-1 was killed",
        "terminating all 2 ranks; 1 more failed after it; its log: /logs/rank_1.log on node-1",
    ]


def test_a_rank_that_ends_with_an_error_is_followed_by_the_others(job):
    job.send(1, "close", exit_code=2, lines=["data=/x: not on this node"])
    assert job.is_in(JobState.LEAVING)
    job.send(0, "failed", failure=Failure.ERROR, text="RuntimeError: Connection closed by peer", log="")
    job.after(RANK_0_FIRST_SECONDS + 0.1)
    assert job.screen == ["error: rank 1 on node-1: data=/x: not on this node"] and not job.is_told(0, "end")
    job.after(LEAVE_SECONDS)
    assert job.is_told(0, "end") and len(job.screen) == 1


def test_a_rank_that_said_why_it_ended_explains_a_connection_that_broke_sooner(job):
    """Its peers may notice its end before its sidecar has."""
    job.send(0, "failed", failure=Failure.ERROR, text="RuntimeError: Connection closed by peer", log="")
    assert job.is_in(JobState.COLLECTING)
    job.send(1, "close", exit_code=2, lines=["out of memory in training"])
    job.step_until(lambda: job.coordinator.exit_codes)
    job.after(COLLECT_SECONDS)
    assert job.screen == ["error: rank 1 on node-1: out of memory in training"] and job.is_told(0, "end")


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_message_that_rank_0_prints_is_not_printed_again(job, order):
    for rank in order:
        job.send(rank, "close", exit_code=2, lines=["data=/x: not there"])
        job.step_until(job.has_left(rank))
    job.after(RANK_0_FIRST_SECONDS + 0.1)
    assert job.coordinator.is_over() and job.screen == []


def test_ranks_that_end_in_order_leave_one_after_the_other(job):
    for rank in (1, 0):
        job.send(rank, "close", exit_code=0, lines=[])
        job.step_until(job.has_left(rank))
        job.after(1)
        assert job.coordinator.state is JobState.RUNNING and job.coordinator.is_over() == (rank == 0)
    assert job.screen == []


def test_the_place_of_a_rank_is_taken_once(job):
    """Also by one that proves the token: it neither replaces the rank nor ends it."""
    address = ("127.0.0.1", job.coordinator.server.listener.getsockname()[1])
    second = connect(address, "token")
    second.send("hello", rank=1, host="node-2")
    second.send("close", exit_code=0, lines=[])
    job.step_until(lambda: list(second.read()) == [] and second.closed)
    assert job.coordinator.members[1].host == "node-1" and not job.coordinator.members[1].is_gone
    assert job.coordinator.state is JobState.RUNNING and job.coordinator.exit_codes == []


def test_a_sidecar_that_sends_nonsense_is_lost_alone(job):
    job.sidecars[1].send("failed", failure="sneezed", text="", log="")
    assert job.is_in(JobState.COLLECTING)
    job.after(COLLECT_SECONDS)
    assert "rank 1 on node-1 is gone with its watchdog" in job.screen[0] and job.is_told(0, "end")


@pytest.fixture
def launch(job, tmp_path):
    """The end of `dsft launch` of a connection to the coordinator, whose run has begun."""
    here, there = socket.socketpair()
    job.coordinator.launcher, launch = Connection(here), Connection(there)
    job.coordinator.run_file = tmp_path / "run.json"
    job.coordinator.run_file.write_text('{"status": "running"}')
    yield launch
    for source in (job.coordinator.launcher, launch):
        source.close()


@pytest.mark.parametrize(("fate", "error"), [("ends", "ended by dsft launch"), ("is gone", "dsft launch is gone")])
def test_a_launch_that_ends_or_is_gone_ends_all_ranks_and_the_run_has_failed(job, launch, tmp_path, fate, error):
    if fate == "ends":
        launch.send("end")
    else:
        launch.close()
    assert job.is_in(JobState.ENDING) and job.is_told(0, "end") and job.is_told(1, "end")
    assert json.loads((tmp_path / "run.json").read_text()) == {"status": "failed", "error": error}
    assert job.screen == [f"{error}: terminating all 2 ranks"] * (fate == "is gone")


def test_a_launch_is_told_the_largest_exit_code_and_the_run_has_failed_by_the_first_error(job, launch, tmp_path):
    for rank, code in ((1, 2), (0, 0)):
        job.send(rank, "close", exit_code=code, lines=["data=/x: not there"] * bool(code))
        job.step_until(job.has_left(rank))
    job.coordinator.finish()
    assert [message for message in launch.read() if message["type"] == "done"] == [{"type": "done", "exit_code": 2}]
    error = "rank 1 on node-1: data=/x: not there"
    assert json.loads((tmp_path / "run.json").read_text()) == {"status": "failed", "error": error}
    assert job.screen == [f"error: {error}"]


@pytest.mark.parametrize(
    ("content", "replaces", "is_recorded"),
    [
        ('{"status": "running", "step": 3}', False, True),
        ('{"status": "failed", "error": "first"}', False, False),
        ('{"status": "failed", "error": "first"}', True, True),
        ('{"status": "done"}', True, False),
        ('{"status": "preempted"}', True, False),
        ("{", True, False),
        (None, True, False),
    ],
)
def test_a_failure_is_recorded_where_the_run_has_not_ended_otherwise(tmp_path, content, replaces, is_recorded):
    file = tmp_path / "run.json"
    if content is not None:
        file.write_text(content)
    record_failure(file, "second", replaces=replaces)
    if is_recorded:
        assert json.loads(file.read_text()) == json.loads(content) | {"status": "failed", "error": "second"}
    else:
        assert (file.read_text() if file.exists() else None) == content


def test_a_rank_that_comes_while_the_job_ends_is_ended(job):
    job.sidecars[1].close()
    assert job.is_in(JobState.COLLECTING)
    job.after(COLLECT_SECONDS)
    late = connect(("127.0.0.1", job.coordinator.server.listener.getsockname()[1]), "token")
    late.send("hello", rank=2, host="node-2")
    told: list = []
    job.step_until(lambda: told.extend(late.read()) or told)
    assert told == [{"type": "end"}]
    late.close()


@pytest.mark.parametrize("ranks", [64, pytest.param(2048, marks=pytest.mark.exhaustive)])
def test_a_large_job_loses_no_connection_at_the_usual_limit_of_files(ranks):
    """Soft limit 1024; what it costs is measured by the same script."""
    words = ["--ranks", ranks, "--seconds", 2 if ranks < 100 else 60]
    script = [sys.executable, ROOT / "benchmarks/watchdog_scale.py", *map(str, words)]
    command = ["sh", "-c", 'ulimit -Sn 1024 && exec "$@"', "sh", *map(str, script)]
    result = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert "lost connections: 0 of" in result.stdout and "exit code 0" in result.stdout, result.stdout + result.stderr
