"""One of several ranks that share a GPU: python tests/gpu/share_rank.py WORK_JSON. share.py sets its variables."""

import gc
import json
import os
import resource
import signal
import socket
import sys
import threading
import time
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)  # this folder's modules are `gpu.files`, not `files`
socket.gethostname = lambda: os.environ["SHARE_HOST"]  # dsft takes ranks of one name for a node

import torch
import torch.distributed as dist
from transformers import TrainerCallback

import dsft
from dsft.runtime import distributed
from dsft.runtime.hardware import has_gpu
from dsft.units import MiB, write_json


def collectives(*, output_dir: str) -> None:
    """Add up and gather known numbers; rank 0 writes over which backend."""
    distributed.start_ranks(timeout_seconds=60)
    rank, world = dist.get_rank(), dist.get_world_size()
    numbers = torch.arange(world, device=distributed.device(), dtype=torch.float32)
    sums = world * numbers + numbers.sum()
    reduced, gathered, scattered = numbers + rank, torch.empty_like(numbers), torch.empty_like(numbers[:1])
    dist.all_reduce(reduced)
    dist.all_gather_into_tensor(gathered, numbers[rank : rank + 1].clone())
    dist.reduce_scatter_tensor(scattered, numbers + rank)
    assert torch.equal(reduced, sums) and torch.equal(gathered, numbers), (reduced, gathered)
    assert scattered.item() == sums[rank], (scattered, sums)
    version = torch.cuda.nccl.version() if has_gpu() else ""
    write_json(Path(output_dir, f"backend-{rank}.json"), f"{dist.get_backend()} {version}")


class Fault(TrainerCallback):
    """Strikes the last rank in its third step; Ctrl-C strikes all."""

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        fault = os.environ["SHARE_FAULT"]
        if state.global_step != 2:
            return
        if fault != "sigint" and args.process_index < args.world_size - 1:
            time.sleep(2)  # the last rank waits for this one in a collective
            return
        Path(args.output_dir, "struck").touch()
        embedding = model.get_input_embeddings()
        match fault:
            case "save":  # no file of more than a MiB can be written
                resource.setrlimit(resource.RLIMIT_FSIZE, (MiB, MiB))
            case "out-of-memory":
                embedding.register_forward_pre_hook(lambda _, ids: torch.empty(2**50, device=ids[0].device))
            case "nan":
                embedding.register_forward_hook(lambda module, ids, output: output * float("nan"))
            case _:
                threading.Timer(1, os.kill, (os.getpid(), signal.Signals[fault.upper()])).start()


def measure_outside(output_dir: str) -> None:
    """Write what a rank holds on the GPU beside torch's tensors, if no other program holds any."""
    torch.cuda.empty_cache()
    distributed.wait_for_all()
    free, total = torch.cuda.mem_get_info()
    outside = (total - free) / dist.get_world_size() - torch.cuda.memory_reserved()
    write_json(Path(output_dir, f"outside-{dist.get_rank()}.json"), outside)
    distributed.wait_for_all()


if __name__ == "__main__":
    distributed.set_library_variables()  # read when the GPU is first used
    if has_gpu():
        torch.cuda.set_per_process_memory_fraction(1 / int(os.environ["WORLD_SIZE"]))
    functions = {"collectives": collectives, "train": dsft.train, "evaluate": dsft.evaluate}
    for name, options in json.loads(sys.argv[1]):
        functions[name](**options)
        gc.collect()
        if has_gpu():
            measure_outside(options["output_dir"])
    distributed.stop_ranks()
