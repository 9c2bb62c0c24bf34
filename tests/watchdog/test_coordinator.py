"""The coordinator's decisions, with sidecars that are plain connections and a clock that the test moves."""

import time
from collections.abc import Callable

import pytest

from dsft.watchdog.coordinator import Coordinator, JobState
from dsft.watchdog.deadlines import COLLECT_SECONDS, COLLECT_STACKS_SECONDS, LEAVE_SECONDS, RANK_0_FIRST_SECONDS
from dsft.watchdog.messages import Poller, Server, connect, listen
from dsft.watchdog.root_cause import Failure

LOST_SECONDS = 60.0


class Job:
    """A coordinator and the connections of its two sidecars."""

    def __init__(self):
        self.screen: list[str] = []
        server = Server(listen(), "token")
        self.coordinator = Coordinator(server, 2, LOST_SECONDS, say=self.screen.append)
        self.now = time.monotonic()
        address = ("127.0.0.1", server.listener.getsockname()[1])
        self.sidecars = [connect(address, "token") for _ in range(2)]
        for rank, sidecar in enumerate(self.sidecars):
            sidecar.send("hello", host=f"node-{rank}")
            self.send(rank, "join")
        self.step_until(lambda: len(self.coordinator.members) == 2)

    def send(self, rank: int, kind: str, **fields) -> None:
        self.sidecars[rank].send(kind, rank=rank, **fields)

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
def job():
    job = Job()
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
    job.step_until(lambda: any(node.last_heard == job.now for node in job.coordinator.nodes.values()))
    assert job.coordinator.state is JobState.RUNNING
    job.after(2)
    assert job.coordinator.state is JobState.COLLECTING
    job.after(COLLECT_SECONDS)
    assert "rank 1 on node-1 gave no sign of life for 60 s" in job.screen[0]


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
        "all 2 ranks are being ended; 1 more failed after it; its log: /logs/rank_1.log on node-1",
    ]


def test_a_rank_that_ends_with_an_error_is_followed_by_the_others(job):
    job.send(1, "close", exit_code=2, lines=["data=/x: not on this node"])
    assert job.is_in(JobState.LEAVING)
    job.send(0, "failed", failure=Failure.ERROR, text="RuntimeError: Connection closed by peer", log="")
    job.after(RANK_0_FIRST_SECONDS + 0.1)
    assert job.screen == ["error: rank 1 on node-1: data=/x: not on this node"] and not job.is_told(0, "end")
    job.after(LEAVE_SECONDS)
    assert job.is_told(0, "end") and len(job.screen) == 1


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
