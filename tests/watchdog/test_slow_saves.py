"""A save on a slow file system takes as long as it takes: its limit counts from the last MiB that moved."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

from dsft.checkpoints.manifest import HashedFile, checkpoint_folder, integrity_errors
from dsft.checkpoints.save import Saves, StagedSave
from dsft.config.options import TrainConfig
from dsft.units import MiB
from dsft.watchdog import client, sidecar
from dsft.watchdog.messages import Connection
from dsft.watchdog.sidecar import Sidecar

PIECE = 2 * MiB
NUM_PIECES = 48


def save(output_dir: Path, num_pieces: int) -> bool:
    """Save a checkpoint with a shard of so many pieces, as a training does; True where it stands."""
    staged_save, engine = StagedSave(checkpoint_folder(output_dir, 10)), TorchCheckpointEngine()
    engine.zipfile_serialization = True  # as DeepSpeed's configurations have it
    shard = {str(number): torch.zeros(PIECE, dtype=torch.uint8) for number in range(num_pieces)}

    def write() -> None:
        staged_save.staged.mkdir(parents=True)
        (staged_save.staged / "model.safetensors").write_bytes(bytes(PIECE))
        with staged_save.noting_errors_of(engine):
            engine.save(shard, path=str(staged_save.staged / "optim_states.pt"))

    with client.phase("saving"):
        return staged_save.run(write, lambda folder: [], needed_bytes=1, facts={"step": 10}, saves=Saves())


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
    options |= {"listener": None, "stacks_file": "", "pid": os.getpid()}
    options["started_by"] = {"launchers": [], "ssh_session": None, "launchers_over_ssh": []}
    with monkeypatch.context() as patched:
        patched.setattr(os, "dup", lambda descriptor: sidecar_end.detach())
        beside = Sidecar(options)
    sender = Connection(rank_end)
    monkeypatch.setattr(client, "_client", client._Client(TrainConfig(save_timeout=save_timeout), sender, None))
    return beside


def test_a_save_may_take_four_times_its_limit_while_bytes_are_written(tmp_path, monkeypatch):
    limit, clock, reports = 1800.0, SimpleNamespace(now=0.0), []
    monkeypatch.setattr(sidecar, "time", SimpleNamespace(monotonic=lambda: clock.now))
    beside = sidecar_of_this_process(monkeypatch, limit)
    monkeypatch.setattr(beside, "_report", lambda failure, text: reports.append(text))

    def pass_time(seconds: float) -> None:
        beside._read_rank()
        clock.now += seconds
        beside._inspect_rank(clock.now)

    sync = os.fsync
    monkeypatch.setattr(HashedFile, "write", write_slowly(lambda pieces: pass_time(pieces * limit / 2)))
    monkeypatch.setattr(os, "fsync", lambda descriptor: sync(descriptor) or pass_time(limit / 20))
    with client.phase("saving"):
        assert save(tmp_path, 8) and reports == [] and clock.now > 4 * limit
        assert integrity_errors(checkpoint_folder(tmp_path, 10), hashes=True) == []
        pass_time(limit / 2)
        pass_time(1.1 * limit)
    assert reports == ["made no progress for 1800 s, in phase saving"]


def save_until_the_sidecar_ends_it(output_dir: str) -> None:
    """As a rank with a sidecar of its own and a limit of 8 s."""
    import time

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
