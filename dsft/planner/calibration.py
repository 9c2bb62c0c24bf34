"""Measures how fast this machine's CPU ranks or GPU really are, for the time model alone; memory predictions are never fitted.

    dsft plan --model X --calibrate

writes `~/.cache/dsft/speeds.json` (XDG_CACHE_HOME is followed), which later plans for this machine read. Remove the file to go back to data sheets.
"""

import dataclasses
import json
import math
import os
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from dsft.machine import Machine, MiB
from dsft.planner.hardware import Speeds
from dsft.planner.step_time import ADAM_BYTES
from dsft.ranks import free_port

REPEATS = 5


def calibration_file() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dsft" / "speeds.json"


def calibrated(speeds: Speeds, machine: Machine, *, half: bool) -> Speeds:
    """`speeds` with what was measured on this machine for so many ranks in this precision, where something was."""
    path = calibration_file()
    if not machine.measured or not path.is_file():
        return speeds
    measured = json.loads(path.read_text(encoding="utf-8")).get(_key(machine, half))
    if measured is None:
        return speeds
    date = measured.pop("date")
    return dataclasses.replace(speeds, **measured, source=f"measured on this machine on {date}")


def calibrate(machine: Machine, *, half: bool) -> Path:
    """Measure with one rank and with as many as the machine has, and keep the results; takes about 20 seconds. Returns the file."""
    path = calibration_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    known = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    for ranks in {1, machine.ranks_per_node}:
        results = multiprocessing.get_context("spawn").SimpleQueue()
        of_ranks = dataclasses.replace(machine, ranks_per_node=ranks)
        multiprocessing.spawn(_measure, args=(ranks, free_port(), of_ranks, half, results), nprocs=ranks, join=True)
        known[_key(of_ranks, half)] = results.get() | {"date": datetime.now(timezone.utc).date().isoformat()}
    path.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    return path


def _key(machine: Machine, half: bool) -> str:
    return f"{machine.gpu_type or 'cpu'} x {machine.ranks_per_node}, {'half' if half else 'float32'}"


def _measure(rank: int, ranks: int, port: int, machine: Machine, half: bool, results) -> None:
    """All ranks at once, since they share cores, memory and links; rank 0 reports the slowest of them."""
    device = torch.device("cuda", rank) if machine.has_gpu else torch.device("cpu")
    if machine.has_gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(max(1, machine.cores // ranks))
    dist.init_process_group("nccl" if machine.has_gpu else "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    dtype = torch.bfloat16 if half else torch.float32
    size = 8192 if machine.has_gpu else 1024
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    many = 64 * MiB // 4 if machine.has_gpu else 16 * MiB // 4
    x, out = torch.randn(many, device=device), torch.zeros(many * ranks, device=device)
    tiny, tiny_out = torch.zeros(8, device=device), torch.zeros(8 * ranks, device=device)
    weights = torch.nn.Parameter(torch.randn(many, device=device))
    weights.grad = torch.randn_like(weights)
    adam = torch.optim.AdamW([weights], fused=True)

    def seconds(run: Callable[[], object]) -> float:
        slowest = torch.tensor(_best_seconds(run, machine.has_gpu), device=device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return slowest.item()

    found = {"flops": 2 * size**3 / seconds(lambda: a @ b)}
    found["device_bytes"] = many * ADAM_BYTES / seconds(adam.step)
    if ranks > 1:
        found["collective_seconds"] = seconds(lambda: dist.all_gather_into_tensor(tiny_out, tiny))
        found["link_bytes"] = 4 * many * (ranks - 1) / seconds(lambda: dist.all_gather_into_tensor(out, x))
    if rank == 0:
        results.put(found)
    dist.barrier()
    dist.destroy_process_group()


def _best_seconds(run: Callable[[], object], on_gpu: bool) -> float:
    best = math.inf
    for _ in range(REPEATS):
        if on_gpu:
            torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        if on_gpu:
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return best
