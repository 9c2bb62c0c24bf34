"""A save on a slow file system takes as long as it takes: its limit counts from the last MiB that moved."""

import mmap
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, grid
from deepspeed import comm
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from ranks import on_ranks, trained

from dsft.checkpoints import manifest
from dsft.checkpoints.manifest import HashedFile, checkpoint_folder, discard, integrity_errors
from dsft.checkpoints.save import Saves, StagedSave
from dsft.config.options import TrainConfig
from dsft.runtime import distributed
from dsft.units import MiB
from dsft.watchdog import client, sidecar
from dsft.watchdog.messages import Connection
from dsft.watchdog.sidecar import Sidecar

PIECE = 2 * MiB
NUM_PIECES = 48
LIMIT = 1800.0
"""Seconds without progress, of a save."""


def save(output_dir: Path, num_pieces: int) -> bool:
    """Save a checkpoint with a shard of so many pieces, as a training does; True where it stands."""
    staged_save, engine = StagedSave(checkpoint_folder(output_dir, 10), Saves()), TorchCheckpointEngine()
    engine.zipfile_serialization = True  # as DeepSpeed's configurations have it
    shard = {str(number): torch.zeros(PIECE, dtype=torch.uint8) for number in range(num_pieces)}

    def write() -> None:
        staged_save.staged.mkdir(parents=True)
        (staged_save.staged / "model.safetensors").write_bytes(bytes(num_pieces * PIECE))
        with staged_save.noting_errors_of(engine):
            engine.save(shard, path=str(staged_save.staged / "optim_states.pt"))

    with client.phase("saving"):
        staged_save.begin(write, needed_bytes=1)
        return staged_save.complete(lambda folder: [], facts={"step": 10})


def write_slowly(take: Callable[[float], None]):
    """HashedFile.write on a slow file system: `take` is called with the pieces that each write moved."""
    write = HashedFile.write

    def slow_write(self: HashedFile, piece) -> int:
        num_bytes = write(self, piece)
        self.file.flush()
        take(num_bytes / PIECE)
        return num_bytes

    return slow_write


def sidecar_of_this_process(monkeypatch, save_timeout: float) -> Sidecar:
    """As `client.start` starts it, but called here instead of in a process of its own."""
    rank_end, sidecar_end = socket.socketpair()
    options = {"rank": 0, "world_size": 1, "local_rank": 0, "lost_timeout": 60.0, "start_timeout": 300.0}
    options |= {"listener": None, "stacks": -1, "pid": os.getpid()}
    options["started_by"] = {"launchers": [], "ssh_session": None, "launchers_over_ssh": []}
    with monkeypatch.context() as patched:
        patched.setattr(os, "dup", lambda descriptor: sidecar_end.detach())
        beside = Sidecar(options)
    sender = Connection(rank_end)
    monkeypatch.setattr(client, "_client", client._Client(TrainConfig(save_timeout=save_timeout), sender))
    return beside


@pytest.fixture
def watched(monkeypatch):
    """A sidecar with a limit of half an hour, and its clock: `pass_time(seconds)`, `now` and `reports`."""
    clock, reports = SimpleNamespace(now=0.0), []
    monkeypatch.setattr(sidecar, "time", SimpleNamespace(monotonic=lambda: clock.now))
    beside = sidecar_of_this_process(monkeypatch, LIMIT)
    monkeypatch.setattr(beside, "_report", lambda failure, text: reports.append(text))

    def pass_time(seconds: float) -> None:
        beside._read_rank()
        clock.now += seconds
        beside._inspect_rank(clock.now)

    return SimpleNamespace(pass_time=pass_time, clock=clock, reports=reports)


def test_a_save_may_take_four_times_its_limit_while_bytes_are_written(tmp_path, monkeypatch, watched):
    sync, pass_time = os.fsync, watched.pass_time
    monkeypatch.setattr(HashedFile, "write", write_slowly(lambda pieces: pass_time(pieces * LIMIT / 2)))
    monkeypatch.setattr(os, "fsync", lambda descriptor: sync(descriptor) or pass_time(LIMIT / 20))
    with client.phase("saving"):
        assert save(tmp_path, 8) and watched.reports == [] and watched.clock.now > 4 * LIMIT
        assert integrity_errors(checkpoint_folder(tmp_path, 10), hashes="all") == []
        pass_time(LIMIT / 2)
        pass_time(1.1 * LIMIT)
    assert watched.reports == ["made no progress for 1800 s, in phase saving"]


def test_a_save_may_take_longer_than_its_limit_to_reach_the_disk(tmp_path, monkeypatch, watched):
    monkeypatch.setattr(manifest, "PART_BYTES", PIECE)
    monkeypatch.setattr(os, "fdatasync", lambda descriptor: watched.pass_time(LIMIT / 2))

    class SlowMap:
        def __init__(self, descriptor, length):
            self.mapped = mmap.mmap(descriptor, length)

        def __len__(self) -> int:
            return len(self.mapped)

        def flush(self, start: int, num_bytes: int) -> None:
            self.mapped.flush(start, num_bytes)
            with pytest.raises(OSError, match="Invalid argument"):  # the system is asked: it wants whole pages
                self.mapped.flush(start + 1, num_bytes - 1)
            watched.pass_time(LIMIT / 2)

    monkeypatch.setattr(manifest, "mmap", SimpleNamespace(mmap=SlowMap))
    assert save(tmp_path, 4) and watched.reports == [] and watched.clock.now >= 4 * LIMIT
    assert integrity_errors(checkpoint_folder(tmp_path, 10), hashes="all") == []


def test_a_removal_may_take_longer_than_the_limit(tmp_path, monkeypatch, watched):
    for number in range(8):
        (tmp_path / "checkpoint-1" / f"global_step{number}").mkdir(parents=True)
        (tmp_path / "checkpoint-1" / f"global_step{number}" / "optim_states.pt").touch()
    monkeypatch.setattr(client, "POLL_SECONDS", -1)  # each heartbeat is sent
    unlink = os.unlink
    monkeypatch.setattr(os, "unlink", lambda *path, **at: unlink(*path, **at) or watched.pass_time(LIMIT / 2))
    with client.phase("saving"):
        assert discard(tmp_path / "checkpoint-1") == [] and watched.clock.now >= 4 * LIMIT
    assert watched.reports == [] and list(tmp_path.iterdir()) == []


def saved_with_a_slow_last_rank(options: dict) -> tuple[float, float]:
    """Times at which this rank had written its shards, and at which ZeRO-3 gathered parameters after that."""
    times, gather = {}, DeepSpeedZeroOptimizer_Stage3.checkpoint_event_epilogue
    save_shards = TorchCheckpointEngine.save

    def save_slowly(*args) -> None:
        save_shards(*args)
        time.sleep(distributed.rank())
        times["written"] = time.monotonic()

    def gather_in_time(optimizer: DeepSpeedZeroOptimizer_Stage3) -> None:
        if "written" in times:
            times.setdefault("gathered", time.monotonic())  # later ones are of the final model
        gather(optimizer)

    def wait_in_time(*args, **options) -> None:
        if "written" in times:
            times.setdefault("gathered", time.monotonic())  # ZeRO 2 gathers nothing, and waits at a barrier
        barrier(*args, **options)

    barrier, comm.barrier = comm.barrier, wait_in_time
    TorchCheckpointEngine.save = save_slowly
    DeepSpeedZeroOptimizer_Stage3.checkpoint_event_epilogue = gather_in_time
    trained(options)
    return times["written"], times["gathered"]


@pytest.mark.launch
@pytest.mark.parametrize("zero", grid(["2", "3"], ["3"]))
def test_no_rank_waits_in_a_collective_while_another_writes(options, tmp_path, zero):
    case = options(tmp_path / "run", zero=zero, save_strategy="steps", save_steps=2)
    written, gathered = zip(*on_ranks(2, saved_with_a_slow_last_rank, case), strict=True)
    assert min(gathered) >= max(written)


def save_until_the_sidecar_ends_it(output_dir: str) -> None:
    """As a rank with a sidecar of its own and a limit of 8 s."""
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    client.start(SimpleNamespace(start_timeout=300, lost_timeout=60, save_timeout=8))
    HashedFile.write = write_slowly(lambda pieces: time.sleep(pieces / 2))
    with client.phase("saving"):
        if save(Path(output_dir), NUM_PIECES):
            Path(output_dir, "saved").touch()
        time.sleep(1000)


@pytest.mark.exhaustive
def test_a_sidecar_waits_for_a_slow_save_and_ends_a_stalled_one(tmp_path):
    code = f"import test_slow_saves; test_slow_saves.save_until_the_sidecar_ends_it({str(tmp_path)!r})"
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "tests", Path(__file__).parent)))
    rank = subprocess.Popen(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": paths}, stderr=subprocess.PIPE, text=True
    )
    _, said = rank.communicate()
    assert (tmp_path / "saved").exists() and rank.returncode < 0, said
    assert "made no progress for 8 s, in phase saving" in said
