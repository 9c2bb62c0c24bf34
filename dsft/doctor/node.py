"""What `dsft doctor` runs on each node: its facts (host, versions, GPUs, memory, disks, clock), and the sums and rates
of its ranks. `dsft/cli/doctor.py` starts it, here or through ssh, with a question as JSON:

    python -m dsft.doctor.node facts|ranks|rank QUESTION

Answers are printed as lines of JSON. Facts need no torch.
"""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from dsft.errors import one_line
from dsft.runtime.disk import PROBE, existing_parent, free_bytes, user_cache, write_error
from dsft.runtime.hardware import cpu_count, free_host_bytes, has_gpu
from dsft.runtime.launcher_env import interface_error, reachable_addresses
from dsft.runtime.software import PACKAGES, code_hash, compile_error, git_commit, numeric_versions, version_of
from dsft.units import MiB

MARK = "dsft-doctor:"
"""Before each line of JSON: login shells may print lines too."""
JOIN_SECONDS = 60
REDUCED_BYTES = 64 * MiB
MATRIX = 2048
GPU_QUERY = "index,name,memory.total,memory.used,driver_version,ecc.errors.uncorrected.volatile.total"


def node_facts(
    *, slots: int | None, output_dir: str = "", port: int | None = None, quick: bool = True
) -> dict[str, Any]:
    """Returns the facts of this node, in about a second.

    Args:
        slots: ranks that start here; None for one per GPU, or one on a node without GPUs.
        port: the port that rank 0 will listen on, if it starts here.
        quick: without compiling a program.
    """
    gpus = []
    gpu_error = ""
    if os.environ.get("DS_ACCELERATOR") != "cpu":
        gpus, gpu_error = read_gpus()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and not visible.startswith(("GPU-", "MIG-")):
        chosen = visible.replace(" ", "").split(",")
        gpus = [gpu for gpu in gpus if str(gpu["index"]) in chosen]
    folders = [user_cache(), Path("/dev/shm")]
    output_error = ""
    if output_dir:
        parent = existing_parent(Path(output_dir))
        folders.insert(0, parent)
        if error := write_error(parent):
            output_error = f"{parent}: {error}"
    return {
        "host": socket.gethostname(),
        "addresses": [address for address in reachable_addresses() if ":" not in address],
        "slots": slots or len(gpus) or 1,
        "gpus": gpus,
        "gpu_error": gpu_error,
        "cores": cpu_count(),
        "available_bytes": free_host_bytes(),
        "free_bytes": {str(folder): free_bytes(folder) for folder in folders},
        "versions": {
            **numeric_versions(),
            **{name: version_of(name) for name in PACKAGES},
            "dsft commit": git_commit() or "no checkout",
            "dsft code": code_hash(),
            "GPU driver": next((gpu["driver"] for gpu in gpus), "none"),
            "GPU type": ", ".join(sorted({gpu["name"] for gpu in gpus})) or "none",
        },
        "output_error": output_error,
        "port_error": port_error(port) if port else "",
        "interface_error": interface_error(),
        "compile_error": "" if quick else compile_error(),
        "clock": time.time(),
    }


def read_gpus() -> tuple[list[dict[str, Any]], str]:
    """Returns (all GPUs in nvidia-smi's list, its error or an empty text)."""
    if not shutil.which("nvidia-smi"):
        return [], ""
    command = ["nvidia-smi", f"--query-gpu={GPU_QUERY}", "--format=csv,noheader,nounits"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=15)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [], f"nvidia-smi: {one_line(error)}"
    if result.returncode == 0:
        return parse_gpus(result.stdout), ""
    text = result.stdout + result.stderr
    return [], "" if "No devices were found" in text else f"nvidia-smi: {text.strip()}"


def parse_gpus(text: str) -> list[dict[str, Any]]:
    """Returns the GPUs of nvidia-smi's table; memory in bytes, uncorrectable memory errors since the driver started."""
    gpus = []
    for line in text.strip().splitlines():
        index, name, total, used, driver, errors = line.split(", ")
        gpu = {
            "index": int(index),
            "name": name,
            "memory_bytes": _number(total) * MiB,
            "used_bytes": _number(used) * MiB,
            "driver": driver,
            "ecc_errors": _number(errors),
        }
        gpus.append(gpu)
    return gpus


def _number(text: str) -> int:
    """Parses a number of nvidia-smi; 0 for [N/A]."""
    return int(text) if text.isdigit() else 0


def port_error(port: int) -> str:
    """Returns why rank 0 cannot listen on the port; empty if it can."""
    try:
        socket.create_server(("", port)).close()
    except OSError as error:
        return f"port {port}: {os.strerror(error.errno)}; ss -ltnp names the process"
    return ""


def start_ranks(question: dict[str, Any]) -> None:
    """Starts this node's ranks, which print their measurements, and waits for them."""
    ranks = []
    for local in range(question["ranks"]):
        variables = os.environ | question["environment"]
        variables |= {"RANK": str(question["first"] + local), "LOCAL_RANK": str(local)}
        words = [sys.executable, "-m", "dsft.doctor.node", "rank", json.dumps(question)]
        ranks.append(subprocess.Popen(words, env=variables))
    for rank in ranks:
        rank.wait()


def measure_rank(*, output_dir: str, quick: bool) -> dict[str, Any]:
    """Joins the process group of RANK and WORLD_SIZE, and measures with the other ranks.

    Returns:
        rank, host, whether it sees a file that rank 0 creates in the output folder, whether the sum of an all-reduce
        was wrong, its bytes per second, flops of a matrix product.
    """
    import torch
    import torch.distributed as dist
    from torch.utils.benchmark import Timer

    from dsft.runtime import distributed

    on_gpu = has_gpu()
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    device = distributed.device()
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", timeout=timedelta(seconds=JOIN_SECONDS))
    rank = dist.get_rank()
    world = dist.get_world_size()
    numbers = torch.full((1024,), float(rank + 1), device=device)
    dist.all_reduce(numbers)
    is_wrong = not torch.equal(numbers, torch.full_like(numbers, world * (world + 1) / 2))
    with contextlib.ExitStack() as stack:
        probe = None
        if rank == 0 and output_dir:
            with contextlib.suppress(OSError):  # the facts contain the reason
                folder = existing_parent(Path(output_dir))
                probe = stack.enter_context(tempfile.NamedTemporaryFile(prefix=PROBE, dir=folder)).name
        probe = distributed.from_all([probe])[0]
        sees_output = probe is None or os.path.exists(probe)
        dist.barrier()
    measured = {
        "rank": rank,
        "host": socket.gethostname(),
        "is_wrong": is_wrong,
        "sees_output": sees_output,
        "flops": 0.0,
        "bytes_per_second": 0.0,
    }
    if quick:
        return measured

    def seconds_of(statement, **variables):
        timer = Timer(statement, globals=variables, num_threads=torch.get_num_threads())
        return timer.timeit(3).mean

    block = torch.zeros(REDUCED_BYTES // 4, device=device)
    measured["bytes_per_second"] = REDUCED_BYTES / seconds_of("dist.all_reduce(block)", dist=dist, block=block)
    matrix = torch.ones(MATRIX, MATRIX, device=device, dtype=torch.bfloat16 if on_gpu else torch.float32)
    dist.barrier()
    measured["flops"] = 2 * MATRIX**3 / seconds_of("matrix @ matrix", matrix=matrix)
    dist.barrier()
    return measured


def main() -> None:
    """Answers as `facts`, `ranks` or `rank` of this node."""
    question = json.loads(sys.argv[2])
    if sys.argv[1] == "ranks":
        start_ranks(question)
        return
    if sys.argv[1] == "facts":
        answer = node_facts(**question)
    else:
        try:
            answer = measure_rank(output_dir=question["output_dir"], quick=question["quick"])
        except Exception as error:  # from torch and NCCL, many classes
            answer = {"error": one_line(error)[:400]}
    # In one write, as a separate line: the ranks of a node share one output, and a shell's greeting may lack a newline.
    os.write(1, f"\n{MARK}{json.dumps(answer)}\n".encode())
    os._exit(0)  # other ranks may have exited already, and a shutdown would wait for them


if __name__ == "__main__":
    main()
