"""What ranks and their links reach: measured, kept, and put in the place of what a plan assumes.

`dsft/speeds.json` in the user's cache keeps it by machine, so a plan for another machine sees none of it, unless
`--machine` brings it along (`Machine.carried`). The doctor's smoke test measures with the same functions: no
transformers is imported here, and what communicates needs a process group. Memory predictions are never fitted, but
for what a GPU holds outside of torch.
"""

import contextlib
import dataclasses
import json
import os
import platform
import socket
import statistics
import time
import warnings
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

from dsft.planner.step_time import ASSUMED, NARROW, Speeds, speeds_of
from dsft.planner.zero_layout import OPTIMIZERS
from dsft.runtime.disk import user_cache
from dsft.runtime.distributed import device, free_port, max_over_ranks, start_ranks, wait_for_all
from dsft.runtime.hardware import FREE_SHARE, Machine, ask_gpu, has_gpu, peak_resident_bytes
from dsft.units import DTYPE_BYTES, MiB, write_json

REPEATS = 5
EXCHANGE_SECONDS = 0.12
"""Aimed at for one timed exchange; its size follows from a first small one, so that slow links do not take minutes."""
FEWEST_BYTES = MiB // 4
MOST_BYTES = {"cuda": 128 * MiB, "cpu": 32 * MiB}
TIMED_NUMBERS = {"cuda": 2**28, "cpu": 16 * MiB // 4}
"""Of fp32, in a timed collective over all ranks and in a timed update: 1 GiB on a GPU, to make a launch short."""
USED_BYTES = {"cuda": (2**10, 2**20, 2**28), "cpu": (2**10, 2**20)}
"""Of collectives after which a communicator has all its buffers: NCCL makes those of a protocol at its first use."""


def seconds_of(
    run: Callable[[], object], place: torch.device, repeats: int = REPEATS, *, warm_up: bool = True
) -> list[float]:
    """Time some runs, the GPU's work included, after one that warms up. The fastest is a rate; the median of ten the
    latency of a small message.
    """
    if warm_up:
        run()
    seconds = []
    for _ in range(repeats):
        if place.type == "cuda":
            torch.cuda.synchronize(place)
        start = time.perf_counter()
        run()
        if place.type == "cuda":
            torch.cuda.synchronize(place)
        seconds.append(time.perf_counter() - start)
    return seconds


def _half(place: torch.device) -> torch.dtype:
    emulates = place.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.float16 if emulates else torch.bfloat16


def matmul_flops(place: torch.device) -> float:
    """Operations per second of a matrix product; short ones on a CPU: that its cores are taken away for a moment is no
    fault of this rank. Of random numbers: a GPU multiplies equal ones faster, since its clock falls with the power that
    bits take that change.
    """
    size, dtype, repeats = (8192, _half(place), 5) if place.type == "cuda" else (512, torch.float32, 20)
    matrix = torch.randn(size, size, device=place, dtype=dtype)
    return 2 * size**3 / min(seconds_of(lambda: matrix @ matrix, place, repeats))


def all_reduce_bytes(place: torch.device, group: dist.ProcessGroup | None = None) -> float:
    """Bytes per second that a rank gets in an all-reduce over its group, everything twice."""
    ranks = dist.get_world_size(group)
    numbers = torch.ones(MOST_BYTES[place.type] // 4, device=place)
    best = min(seconds_of(lambda: dist.all_reduce(numbers, group=group), place, 3))
    return 2 * 4 * numbers.numel() * (ranks - 1) / ranks / best


def exchange_rate(peer: int, place: torch.device) -> tuple[float, float]:
    """(bytes per second received while as much is sent, seconds of the smallest message) with one other rank.

    With gloo, whose sends torch waits for in steps of milliseconds, the latter is not that of the network.
    """
    small = (torch.zeros(16, device=place), torch.zeros(16, device=place))
    _exchange(peer, *small)  # connects, and waits until the other is there
    latency = statistics.median(seconds_of(lambda: _exchange(peer, *small), place, 10))
    most = MOST_BYTES[place.type]
    sent, received = torch.ones(most // 4, device=place), torch.zeros(most // 4, device=place)
    few = FEWEST_BYTES // 4
    (first,) = seconds_of(lambda: _exchange(peer, sent[:few], received[:few]), place, 1, warm_up=False)
    wanted = torch.tensor([EXCHANGE_SECONDS * FEWEST_BYTES / first], dtype=torch.float64)
    peer_wants = torch.zeros(1, dtype=torch.float64)
    _exchange(peer, wanted, peer_wants)
    count = int(min(most, max(FEWEST_BYTES, min(wanted.item(), peer_wants.item())))) // 4
    best = min(seconds_of(lambda: _exchange(peer, sent[:count], received[:count]), place, 3, warm_up=False))
    return 4 * count / best, latency


def _exchange(peer: int, sent: torch.Tensor, received: torch.Tensor) -> None:
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, sent, peer), dist.P2POp(dist.irecv, received, peer)]):
        work.wait()


def calibrate(machine: Machine, *, dtype: str) -> tuple[Path, int]:
    """Measure with one rank and with as many as the machine has, and keep the results; takes up to a minute. Where GPUs
    are, also what these hold outside of torch.

    Returns the file, and the bytes of a GPU that other programs hold: above 0, what it holds outside of torch is not
    kept.
    """
    measured: dict[str, float] = {}
    for ranks in sorted({1, machine.ranks_per_node}):
        measured |= on_new_ranks(_measure_rank, ranks, dtype)  # one rank alone measures copies from the host, for both
        alike = dataclasses.replace(machine, ranks_per_node=ranks)
        path = keep("ranks", ranks_key(alike, dtype), measured)
    if not machine.has_gpu:
        return path, 0
    others, context, *after = measure_outside(machine.ranks_per_node)
    if not others:
        outside = {"context_bytes": context, "communicators_bytes": [held - context for held in after]}
        keep("outside", gpus_key(machine), outside)
    return path, others


def measure_outside(ranks: int) -> list[int]:
    """Measure on new ranks what a GPU holds beyond torch's allocator; returns bytes of other programs, those of the
    context, and those after each further communicator.
    """
    others, held = 0, [0] * ranks
    for gpu in range(ranks if has_gpu() else 0):
        left, total = ask_gpu(gpu)
        others = max(others, total - left if left < FREE_SHARE * total else 0)
        # Taken off below: this process's own context, which asking has made, is on the GPU beside the rank's.
        held[gpu] = total - torch.cuda.mem_get_info(gpu)[0]
    return [others, *on_new_ranks(_outside_of_rank, ranks, held)]


def on_new_ranks(function: Callable[..., Any], ranks: int, *arguments: Any) -> Any:
    """Call a function of a module on new processes, which have the variables of ranks; returns rank 0's result."""
    import torch.multiprocessing as multiprocessing

    results = multiprocessing.get_context("spawn").SimpleQueue()
    multiprocessing.spawn(_begin, args=(ranks, free_port(), results, function, arguments), nprocs=ranks, join=True)
    return results.get()


def _begin(rank: int, ranks: int, port: int, results: Any, function: Callable[..., Any], arguments: tuple) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    result = function(*arguments)
    if rank == 0:
        results.put(result)


def _measure_rank(dtype: str) -> dict[str, float]:
    """Measure all ranks at once, since they share cores, memory and links: the best run of the slowest rank."""
    warnings.filterwarnings("ignore", category=FutureWarning)  # of torch about names that DeepSpeed calls
    start_ranks()
    place, ranks = device(), dist.get_world_size()
    measured = {"flops": _training_flops(place, getattr(torch, dtype))}
    # A rank's own memory, in an update by fused AdamW.
    weights = torch.nn.Parameter(torch.randn(TIMED_NUMBERS[place.type], device=place))
    weights.grad = torch.randn_like(weights)
    adam = torch.optim.AdamW([weights], fused=True)
    moved = weights.numel() * OPTIMIZERS["adamw_torch_fused"].update_bytes
    measured["device_bytes"] = moved / max_over_ranks(min(seconds_of(adam.step, place)))
    if ranks > 1:
        measured |= _collectives(place, ranks)
    elif place.type == "cuda":  # from pinned host memory
        host = torch.empty(256 * MiB, dtype=torch.uint8, pin_memory=True)
        there = torch.empty_like(host, device=place, pin_memory=False)
        copying = min(seconds_of(lambda: there.copy_(host, non_blocking=True), place))
        measured["host_link_bytes"] = host.numel() / copying
    wait_for_all()
    dist.destroy_process_group()
    return measured


def _training_flops(place: torch.device, dtype: torch.dtype) -> float:
    """Operations per second in training a few layers: what matrix products reach between norms, attention and loss. The
    model is gone when this returns.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    widths, (batch, seq_len) = (
        ({"hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32}, (2, 2048))
        if place.type == "cuda"
        else ({"hidden_size": 768, "intermediate_size": 2048, "num_attention_heads": 12}, (1, 256))
    )
    torch.manual_seed(0)
    config = LlamaConfig(**widths, num_hidden_layers=2, vocab_size=8192)
    model = LlamaForCausalLM(config).to(place, dtype)
    labels_BT = torch.randint(0, config.vocab_size, (batch, seq_len), device=place)
    active = sum(p.numel() for p in model.parameters()) - config.vocab_size * config.hidden_size
    per_token = 3 * (2 * active + 2 * seq_len * config.hidden_size * config.num_hidden_layers)
    seconds = max_over_ranks(
        min(seconds_of(lambda: model(input_ids=labels_BT, labels=labels_BT).loss.backward(), place))
    )
    # `Speeds.flops` is that of wide products on a GPU, on CPU ranks that of a model like this.
    narrow = 1 + NARROW / config.hidden_size if place.type == "cuda" else 1
    return narrow * batch * seq_len * per_token / seconds


def _collectives(place: torch.device, ranks: int) -> dict[str, float]:
    """Rates of DeepSpeed's collectives, which on CPUs are not torch's, as `Speeds` names them."""
    import deepspeed.comm as comm

    numbers = TIMED_NUMBERS[place.type] // ranks * ranks
    whole, part = (torch.ones(count, device=place) for count in (numbers, numbers // ranks))
    few, few_gathered = torch.zeros(8, device=place), torch.zeros(8 * ranks, device=place)
    received = 4 * numbers * (ranks - 1) / ranks
    timed = {
        "link_bytes": (received, lambda: comm.all_gather_into_tensor(whole, part)),
        "reduce_bytes": (received, lambda: comm.reduce_scatter_tensor(part, whole)),
        "all_reduce_bytes": (2 * received, lambda: comm.all_reduce(whole)),
    }
    latency = max_over_ranks(min(seconds_of(lambda: comm.all_gather_into_tensor(few_gathered, few), place)))
    rates = {name: num_bytes / max_over_ranks(min(seconds_of(run, place))) for name, (num_bytes, run) in timed.items()}
    return {"collective_seconds": latency} | rates


def _outside_of_rank(held: list[int]) -> list[int]:
    """Measure on each rank, collectively; returns bytes of the GPU that this process's allocator does not hold (without
    a GPU, the peak of resident memory) after the context, and after each communicator.

    Args:
        held: bytes of each GPU before the ranks began.
    """
    rank, ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    if has_gpu():
        torch.cuda.set_device(rank)
    place, counts = device(), []
    # What a training has loaded by its first step: kernels of products and of attention, and NCCL's buffers for small
    # messages and large ones in each of DeepSpeed's collectives.
    heads_BHTD = torch.randn(1, 8, 1024, 128, device=place, dtype=_half(place), requires_grad=True)
    attended_BHTD = functional.scaled_dot_product_attention(heads_BHTD, heads_BHTD, heads_BHTD, is_causal=True)
    (attended_BHTD @ attended_BHTD.transpose(-1, -2)).sum().backward()
    for communicators in range(1 + (len(ASSUMED.communicators_bytes) if ranks > 1 else 0)):
        if communicators == 1:
            dist.init_process_group("nccl" if place.type == "cuda" else "gloo")
        if communicators:
            group = dist.new_group() if communicators > 1 else dist.group.WORLD
            for num_bytes in USED_BYTES[place.type]:
                whole = torch.ones(num_bytes // 4 // ranks * ranks, device=place)
                part = whole.chunk(ranks)[rank].clone()
                dist.all_reduce(whole, group=group)
                dist.all_gather_into_tensor(whole, part, group=group)
                dist.reduce(whole, 0, group=group)
                if place.type == "cuda":
                    dist.reduce_scatter_tensor(part, whole, group=group)
        taken = peak_resident_bytes()
        if place.type == "cuda":
            torch.cuda.synchronize(place)
            free, total = torch.cuda.mem_get_info(place)
            taken = total - free - torch.cuda.memory_reserved(place)
        counts.append(taken - held[rank])
    if ranks > 1:
        dist.destroy_process_group()
    return counts


def speeds_file() -> Path:
    return user_cache() / "speeds.json"


def speeds_for(machine: Machine, *, dtype: str) -> Speeds:
    """Return the speeds that a plan counts on: assumed ones, and in their place what was measured of this machine's
    ranks in this precision, of its GPUs, and of the links between its nodes. A GPU that is in no table multiplies once
    for it. A damaged entry counts as none.
    """
    path, speeds = speeds_file(), speeds_of(machine, dtype=dtype)
    kept, damaged = _read(path), (AttributeError, KeyError, TypeError, ValueError)

    # Ranks.
    measured = None
    if machine.carried:
        measured = machine.carried["ranks"] if machine.carried["bits"] == 8 * DTYPE_BYTES[dtype] else None
    elif machine.measured:
        measured = kept.get("ranks", {}).get(ranks_key(machine, dtype))
        if not kept and path.is_file():
            note = f"{path} cannot be read; remove it, or measure again with --calibrate"
            speeds = dataclasses.replace(speeds, source=f"{speeds.source} ({note})")
    with contextlib.suppress(*damaged):
        values = {name: float(value) for name, value in measured.items() if name != "date"}
        source = f"measured {'there' if machine.carried else 'on this machine'} on {measured['date']}"
        speeds = dataclasses.replace(speeds, **values, source=source, has_time_estimate=True)

    # A product, where this machine's GPU is in no table: timed once, and kept for later plans. Where it cannot be timed
    # no time is estimated.
    if not speeds.has_time_estimate and machine.has_gpu and machine.measured:
        key = f"{socket.gethostname()}, {machine.gpu_type}"
        try:
            products = float(kept["products"][key]["matmul_flops"])
        except damaged:
            products = 0.0
            if has_gpu():
                with contextlib.suppress(RuntimeError):  # torch.OutOfMemoryError and cuBLAS's own
                    products = matmul_flops(device())
                torch.cuda.empty_cache()
            if products:
                with contextlib.suppress(OSError):  # a cache that cannot be written
                    keep("products", key, {"matmul_flops": products})
        speeds = speeds_of(machine, dtype=dtype, products=products)

    # Memory outside of torch, on one node: between nodes NCCL has other buffers.
    if machine.exists and machine.nodes == 1:
        carried = machine.carried.get("outside")
        measured = carried if machine.carried else kept.get("outside", {}).get(gpus_key(machine))
        with contextlib.suppress(*damaged):
            context_bytes, each = int(measured["context_bytes"]), tuple(map(int, measured["communicators_bytes"]))
            values = {"communicators_bytes": each} if len(each) == len(ASSUMED.communicators_bytes) else {}
            outside = dataclasses.replace(speeds.outside, context_bytes=context_bytes, measured=True, **values)
            speeds = dataclasses.replace(speeds, outside=outside)

    # Links between these nodes; a single node keeps its own.
    if machine.nodes > 1 and machine.host_names:
        measured = kept.get("links", {}).get(links_key(machine.host_names))
        with contextlib.suppress(*damaged):
            values = {name: float(measured[name]) for name in ("network_bytes", "collective_seconds")}
            if measured["link_bytes"] > 0 and machine.ranks_per_node > 1:
                inside = float(measured["link_bytes"])
                values |= dict.fromkeys(("link_bytes", "reduce_bytes", "all_reduce_bytes"), inside)
            date = measured["date"]
            source = f"{speeds.source}; links between these nodes measured by dsft doctor on {date}"
            speeds = dataclasses.replace(speeds, **values, source=source)
    return speeds


def to_carry(machine: Machine, *, dtype: str) -> dict[str, Any]:
    """Return what is kept of this machine, without its name: `Machine.carried` on another."""
    kept = _read(speeds_file())
    ranks = kept.get("ranks", {}).get(ranks_key(machine, dtype))
    return {"bits": 8 * DTYPE_BYTES[dtype], "ranks": ranks, "outside": kept.get("outside", {}).get(gpus_key(machine))}


def keep(section: str, key: str, measured: dict[str, Any]) -> Path:
    """Keep what was measured; returns the file.

    Args:
        section: ranks, with fields of `Speeds`, under `ranks_key`. outside, with fields of `OutsideMemory`, under
            `gpus_key`. links, under `links_key`: network_bytes that a node gets from another each second over the
            slowest link; link_bytes that a rank gets inside the slowest node, 0 with one rank per node;
            collective_seconds. products: matmul_flops of a GPU that is in no table.
    """
    path = speeds_file()
    content = _read(path)
    content[section] = content.get(section, {}) | {key: measured | {"date": datetime.now(UTC).date().isoformat()}}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, content)
    return path


def ranks_key(machine: Machine, dtype: str) -> str:
    """Name this host, its CPU, the cores that may be used and GPU, how many ranks share them, and in how many bits they
    compute.
    """
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    cpu = names[0] if names else platform.machine()
    return (
        f"{socket.gethostname()}, {machine.cores} x {cpu}, {machine.gpu_type or 'no GPU'}:"
        f" {machine.ranks_per_node} ranks, {8 * DTYPE_BYTES[dtype]} bits"
    )


def gpus_key(machine: Machine) -> str:
    return f"{socket.gethostname()}, {machine.gpu_type}: {machine.ranks_per_node} ranks"


def links_key(host_names: Iterable[str]) -> str:
    return ",".join(sorted(set(host_names)))


def _read(path: Path) -> dict[str, dict[str, Any]]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    sections = content.items() if isinstance(content, dict) else ()
    return {name: entries for name, entries in sections if isinstance(entries, dict)}
