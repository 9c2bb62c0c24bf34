"""One rank is killed 20 times, at seeded moments and in the middle of saves; the run restarts by itself and ends as if
nothing had happened.
"""

import os
import random
import re
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from conftest import ROOT, flags, read_json
from ranks import holds, ranks_below
from safetensors.torch import load_file

from dsft.checkpoints.manifest import checkpoints, integrity_errors

KILLS = 20
STEPS = 300
pytestmark = [pytest.mark.launch, pytest.mark.exhaustive]


def deepspeed_buffers(port: str) -> list[Path]:
    """What DeepSpeed's CPU collectives of ranks that met at `port` hold in shared memory, 66 MiB for each rank."""
    return list(Path("/dev/shm").glob(f"deepspeed_*_{port}_*"))


def wait_for(condition, process: subprocess.Popen, seconds: float = 600) -> bool:
    """Whether `condition()` came to hold before the process ended."""
    until = time.monotonic() + seconds
    while not holds(condition) and process.poll() is None and time.monotonic() < until:
        time.sleep(0.002)
    return holds(condition)


@pytest.mark.timeout(4000)  # half an hour beside other work
def test_twenty_kills_change_nothing_but_the_time(run, options, tmp_path):
    words = {
        "max_steps": STEPS,
        "save_strategy": "steps",
        "save_steps": 2,
        "save_total_limit": 2,
        "logging_steps": 1,
        "zero": "2",
        "lost_timeout": 10,
    }
    uninterrupted = run(["dsft", "train", "--num_gpus", "2", *flags(options(tmp_path / "uninterrupted", **words))])
    assert uninterrupted.returncode == 0, uninterrupted.stderr[-3000:]
    out, log = tmp_path / "killed", tmp_path / "log.txt"
    command = [
        "dsft",
        "launch",
        "--no_preflight",
        "--max_restarts",
        str(KILLS),
        "--num_gpus",
        "2",
        "train",
        *flags(options(out, **words)),
    ]
    with log.open("w") as file:
        process = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
    chance, seen, in_saves = random.Random(7), set(), 0
    for kill in range(KILLS):
        lives = log.read_text(errors="replace").count("step ")
        assert wait_for(
            lambda lives=lives: (
                log.read_text(errors="replace").count("step ") > lives and len(ranks_below(process.pid)) == 2
            ),
            process,
        ), log.read_text(errors="replace")[-3000:]
        time.sleep(chance.uniform(0, 1))
        if kill % 2:
            in_saves += wait_for(lambda: any((out / ".saving").glob("*/*")), process, seconds=10)
        ranks = ranks_below(process.pid)
        seen |= set(ranks)
        os.kill(chance.choice(ranks), signal.SIGKILL)
        assert wait_for(
            lambda kill=kill: f"restart {kill + 1} of {KILLS}" in log.read_text(errors="replace"), process
        ), log.read_text(errors="replace")[-3000:]
        assert all(integrity_errors(folder, hash_tensors=True) == [] for folder in checkpoints(out))
    code = process.wait(300)
    text = log.read_text(errors="replace")
    assert code == 0, text[-3000:]
    print(f"{KILLS} kills, {in_saves} of them while saving")
    assert in_saves >= KILLS // 4
    losses, expected = (
        [
            (entry["step"], entry["loss"])
            for entry in read_json(folder / "run.json")["results"]["log"]
            if "loss" in entry
        ]
        for folder in (out, tmp_path / "uninterrupted")
    )
    assert losses == expected and len(losses) == STEPS
    weights, known = (load_file(folder / "final" / "model.safetensors") for folder in (out, tmp_path / "uninterrupted"))
    assert weights.keys() == known.keys() and all(weights[name].equal(known[name]) for name in known)
    assert "is incomplete" not in text and text.count("killed from outside") == KILLS
    assert not any(psutil.pid_exists(pid) for pid in seen)
    ports = set(re.findall(r"--master_port (\d+)", text))
    assert ports and not any(deepspeed_buffers(port) for port in ports)
