"""Measures how fast this machine's CPU ranks or GPU really are, for the time model alone; memory predictions are never
fitted.

    dsft plan --model X --calibrate

writes `~/.cache/dsft/speeds.json` (XDG_CACHE_HOME is followed), which later plans for this machine read. Remove the
file to go back to data sheets.
"""

import dataclasses
import json
import math
import os
import time
import warnings
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import torch
import torch.multiprocessing as multiprocessing
from transformers import LlamaConfig, LlamaForCausalLM

from dsft.planner.measured_links import with_links
from dsft.planner.speeds import Speeds
from dsft.planner.step_time import ADAM_BYTES
from dsft.runtime.disk import write_json
from dsft.runtime.distributed import device, free_port, max_over_ranks, start_ranks, wait_for_all
from dsft.runtime.hardware import Machine
from dsft.units import MiB

REPEATS = 5


def calibration_file() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dsft" / "speeds.json"


def calibrated(speeds: Speeds, machine: Machine, *, half: bool) -> Speeds:
    """`speeds` with what was measured on this machine for so many ranks in this precision, and between its nodes by
    `dsft doctor`, where something was.
    """
    return with_links(_calibrated(speeds, machine, half=half), machine)


def _calibrated(speeds: Speeds, machine: Machine, *, half: bool) -> Speeds:
    path = calibration_file()
    if not machine.measured or not path.is_file():
        return speeds
    try:
        measured = json.loads(path.read_text(encoding="utf-8")).get(_key(machine, half))
        if measured is None:
            return speeds
        date = measured.pop("date")
    except (ValueError, KeyError, AttributeError):
        return dataclasses.replace(
            speeds, source=f"{speeds.source} ({path} cannot be read; remove it, or measure anew with --calibrate)"
        )
    return dataclasses.replace(speeds, **measured, source=f"measured on this machine on {date}")


def calibrate(machine: Machine, *, half: bool) -> Path:
    """Measure with one rank and with as many as the machine has, and keep the results; takes up to a minute. Returns
    the file.
    """
    path = calibration_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        known = {}
    for ranks in {1, machine.ranks_per_node}:
        results = multiprocessing.get_context("spawn").SimpleQueue()
        of_ranks = dataclasses.replace(machine, ranks_per_node=ranks)
        multiprocessing.spawn(_measure, args=(ranks, free_port(), of_ranks, half, results), nprocs=ranks, join=True)
        known[_key(of_ranks, half)] = results.get() | {"date": datetime.now(UTC).date().isoformat()}
    write_json(path, known)
    return path


def _key(machine: Machine, half: bool) -> str:
    return f"{machine.gpu_type or 'cpu'} x {machine.ranks_per_node}, {'half' if half else 'float32'}"


def _measure(rank: int, ranks: int, port: int, machine: Machine, half: bool, results) -> None:
    """All ranks at once, since they share cores, memory and links; rank 0 reports the slowest of them."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    warnings.filterwarnings("ignore", category=FutureWarning)  # of torch about names that DeepSpeed calls
    start_ranks()  # as training: DeepSpeed's collectives are not torch's
    import deepspeed.comm as comm

    place = device()
    tokens, model, labels_BT = _small_model(place, torch.bfloat16 if half else torch.float32)
    many = 64 * MiB // 4 if machine.has_gpu else 16 * MiB // 4
    x, out, scattered = (
        torch.randn(many, device=place),
        torch.zeros(many * ranks, device=place),
        torch.zeros(many // ranks, device=place),
    )
    tiny, tiny_out = torch.zeros(8, device=place), torch.zeros(8 * ranks, device=place)
    weights = torch.nn.Parameter(torch.randn(many, device=place))
    weights.grad = torch.randn_like(weights)
    adam = torch.optim.AdamW([weights], fused=True)

    def seconds(run: Callable[[], object]) -> float:
        return max_over_ranks(_best_seconds(run, machine.has_gpu))

    config = model.config
    active = sum(p.numel() for p in model.parameters()) - config.vocab_size * config.hidden_size
    flops = 3 * tokens * (2 * active + 2 * labels_BT.shape[1] * config.hidden_size * config.num_hidden_layers)
    found = {
        "flops": flops / seconds(lambda: model(input_ids=labels_BT, labels=labels_BT).loss.backward()),
        "device_bytes": many * ADAM_BYTES / seconds(adam.step),
    }
    if ranks > 1:
        others = (ranks - 1) / ranks
        found |= {
            "collective_seconds": seconds(lambda: comm.all_gather_into_tensor(tiny_out, tiny)),
            "link_bytes": 4 * many * ranks * others / seconds(lambda: comm.all_gather_into_tensor(out, x)),
            "reduce_bytes": 4 * many * others / seconds(lambda: comm.reduce_scatter_tensor(scattered, x)),
            "all_reduce_bytes": 2 * 4 * many * others / seconds(lambda: comm.all_reduce(x)),
        }
    if rank == 0:
        results.put(found)
    wait_for_all()
    torch.distributed.destroy_process_group()


def _small_model(place: torch.device, dtype: torch.dtype) -> tuple[int, LlamaForCausalLM, torch.Tensor]:
    """(tokens of a batch, a model of a few layers, the batch): what products of matrices reach between norms, attention
    and loss.
    """
    wide = (
        {"hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32}
        if place.type == "cuda"
        else {"hidden_size": 768, "intermediate_size": 2048, "num_attention_heads": 12}
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**wide, num_hidden_layers=2, vocab_size=8192)).to(place, dtype)
    shape = (2, 2048) if place.type == "cuda" else (1, 256)
    return shape[0] * shape[1], model, torch.randint(0, 8192, shape, device=place)


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
