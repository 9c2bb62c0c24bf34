"""Checks with several ranks on one GPU (`--share N`), where each tells NCCL that it is a host of its own: NCCL refuses
two ranks of a host on one GPU. They talk over loopback; on CPUs over gloo. dsft takes two ranks each for a node.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from dsft.errors import EXIT_REQUEUE, EXIT_STOPPED, EXIT_UNSAVED, EXIT_USER_ERROR, RANK_0_SECONDS
from dsft.runtime.launcher_env import LOOPBACK, free_port
from dsft.units import in_gib
from gpu.check import SLOWER, Row, Setting
from gpu.examine import last_line
from gpu.faults import nothing_left
from gpu.perplexities import evaluation, same_bits
from gpu.trainings import compared, options

STEPS = 4
ALONE = {"zero": "1", "sequence_parallel": 1}
"""Changes of a training for one rank."""
NCCL = dict.fromkeys(("NCCL_IB_DISABLE", "NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE"), "1")
NCCL |= {"NCCL_SOCKET_IFNAME": "=lo", "GLOO_SOCKET_IFNAME": "lo", "NCCL_MULTI_RANK_GPU_ENABLE": "1"}  # 1: NCCL 2.31


def start(ranks: int, work: list, **environment: str) -> list[subprocess.Popen]:
    """Start ranks of share_rank.py as a launcher does, whose own exit code would hide theirs."""
    words = [sys.executable, Path(__file__).with_name("share_rank.py"), json.dumps(work, default=str)]
    job = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": min(2, ranks), "MASTER_ADDR": LOOPBACK, "MASTER_PORT": free_port()}
    job |= {"LOCAL_RANK": 0, "SHARE_CHECK": os.getpid()}  # all on GPU 0
    processes = []
    for rank in range(ranks):
        names = {"RANK": rank, "NCCL_HOSTID": f"rank-{rank}", "SHARE_HOST": f"share-{rank // 2}"}
        variables = {name: str(value) for name, value in (job | names).items()}
        variables = os.environ | NCCL | environment | variables
        processes.append(subprocess.Popen(words, env=variables, stdout=sys.stdout.fileno(), stderr=subprocess.STDOUT))
    return processes


def finish(ranks: list[subprocess.Popen]) -> list[int]:
    """Wait for ranks; returns their exit codes. Those that hang are ended with their check, at its limit."""
    return [rank.wait() for rank in ranks]


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def collectives(setting: Setting) -> Iterator[Row]:
    """Add up and gather known numbers: if this fails, no other check can run."""
    codes = finish(start(setting.share, [("collectives", {"output_dir": setting.runs})]))
    place = "ranks on one GPU" if setting.has_gpu else "CPU ranks"
    yield Row(
        claim=f"all-reduce, all-gather and reduce-scatter of known numbers, {setting.share} {place}",
        measured=last_line(setting) if any(codes) else f"right, {read_json(setting.runs / 'backend-0.json')}",
        ok=not any(codes),
    )


def trainings(setting: Setting, changes_by_name: dict[str, dict[str, Any]]) -> list:
    """Compose trainings whose steps have the same sequences on any number of ranks."""
    shape = {"per_device_train_batch_size": 1, "global_batch_size": setting.share, "max_steps": STEPS}
    shape |= {"learning_rate": 1e-4, "activation_checkpointing": False, "tf32": False}
    work = []
    for name, changes in changes_by_name.items():
        is_packed = changes.get("packing", False)
        data = setting.path("demo", "instructions" if is_packed else "corpus", "train.jsonl")
        work.append(("train", options(setting, name, data=data, **shape, **changes)))
    return work


def beside_one_rank(*cases: dict[str, Any]) -> Callable[[Setting], Iterator[Row]]:
    """Make a check: trainings on all ranks have the losses and gradient norms of one rank."""

    def check(setting: Setting) -> Iterator[Row]:
        on_all = {name_of(changes): changes for changes in cases}
        references = {name: f"one rank, {name_of(changes | ALONE)}" for name, changes in on_all.items()}
        alone = {references[name]: changes | ALONE for name, changes in on_all.items()}
        jobs = [start(1, trainings(setting, alone)), start(setting.share, trainings(setting, on_all))]
        for job in jobs:
            finish(job)
        for name, reference in references.items():
            yield same_training(setting, name, reference, steps=STEPS)

    return check


def name_of(changes: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in changes.items())


def same_training(setting: Setting, name: str, reference: str, *, steps: int) -> Row:
    """Compare the last losses and norms, and the saved weights, of two trainings."""
    from safetensors.torch import load_file  # here: seconds

    folders = [setting.runs / reference, setting.runs / name]
    runs = [read_json(folder / "run.json") for folder in folders]
    expected, got = (load_file(next((folder / "final").glob("*.safetensors"))) for folder in folders)
    apart = max((expected[key].double() - weight.double()).abs().max().item() for key, weight in got.items())
    limits = {"loss": 1e-6, "grad_norm": 1e-6}
    if runs[0]["config"]["dtype"] == "bfloat16":  # weights and sums of gradients have 2 to 3 digits
        limits = {"loss": 1e-4, "grad_norm": 1e-3}
    logs, off = {}, {}
    for key in limits:
        logs[key] = [[entry[key] for entry in run["results"]["log"] if key in entry][-steps:] for run in runs]
        if logs[key][1] or key == "loss":  # ZeRO 0 in float32 logs no norm
            off[key] = max(abs(value / other - 1) for other, value in zip(*logs[key], strict=True))
    return Row(
        claim=f"{name}: losses within {limits['loss']:g} and norms within {limits['grad_norm']:g}",
        predicted=f"as {reference}",
        measured=", ".join(f"{key} {value:.1e} off" for key, value in off.items()) + f"; weights {apart:.1e} apart",
        ok=all(value <= limits[key] for key, value in off.items()),
        details=logs,
    )


def checkpoints(setting: Setting) -> Iterator[Row]:
    """Train on from the middle of a training, on other numbers of ranks and in another stage."""
    whole = {"dtype": "float32", "zero": "3", "save_strategy": "steps", "save_steps": STEPS // 2}
    resumed = {
        "dtype": "float32",
        "zero": "3",
        "resume_from_checkpoint": setting.runs / "whole" / f"checkpoint-{STEPS // 2}",
    }
    on_all = {"whole": whole, "resumed on all ranks": resumed, "resumed under ZeRO 1": resumed | {"zero": "1"}}
    jobs = [(setting.share, on_all), (2, {"resumed on 2 ranks": resumed}), (1, {"resumed on one rank": resumed})]
    for ranks, cases in jobs:
        finish(start(ranks, trainings(setting, cases)))
        for name in [each for each in cases if each != "whole"]:
            yield same_training(setting, name, "whole", steps=STEPS // 2)


def perplexity(setting: Setting) -> Iterator[Row]:
    """Score the held-out text on 1, 2 and all ranks, each with the model whole and under ZeRO-3."""
    first = None
    for ranks in sorted({1, 2, setting.share}):
        folders = {zero: setting.runs / f"{ranks}-{zero}" for zero in ("0", "3")}
        finish(start(ranks, [("evaluate", evaluation(setting, out, zero=zero)) for zero, out in folders.items()]))
        for zero, out in folders.items():
            (report,) = read_json(out / "perplexity.json")["results"]
            first = first or report
            yield same_bits(f"{ranks} ranks, ZeRO {zero}", first, report)


def memory(setting: Setting) -> Iterator[Row]:
    """Compare peaks, and what ranks hold outside of torch, with the plans."""
    for ranks, zero in sorted({(2, "3"), (setting.share, "3"), (setting.share, "2")}):
        name = f"{ranks} ranks, ZeRO {zero}"
        finish(start(ranks, [("train", options(setting, name, zero=zero, activation_checkpointing=True))]))
        run = read_json(setting.runs / name / "run.json")
        for row in compared(run, tiny=setting.tiny, machine=f"{ranks} ranks on one device"):
            yield replace(row, claim=f"{name}: {row.claim}")
        if setting.has_gpu:
            planned = sum(term["num_bytes"] for term in run["plan"]["terms"] if term["phase"] == "outside")
            outside = read_json(setting.runs / name / "outside-0.json")
            texts = {"predicted": in_gib(planned), "measured": in_gib(outside)}
            yield Row(claim=f"{name}: outside of torch at most the plan's", **texts, ok=outside <= planned)


FAULTS = {
    "sigkill": ("exited without an error of its own", 1, "failed", 5),
    "sigstop": ("gave no heartbeat", 1, "failed", 20),
    "out-of-memory": ("out of memory", EXIT_USER_ERROR, "failed", 5),
    "save": ("could not be saved", EXIT_UNSAVED, "failed", 5),
    "nan": ("NaN or infinite at step 3", EXIT_STOPPED, "stopped", 5),
    "sigint": ("asked to stop", EXIT_REQUEUE, "preempted", 5),
}
"""Fault -> what the documentation promises: words on the screen, exit code, status in run.json, seconds."""


def fault(name: str) -> Callable[[Setting], Iterator[Row]]:
    """Make a check: all ranks end as documented, and the last one is named if it alone has failed."""

    def check(setting: Setting) -> Iterator[Row]:
        text, code, status, seconds = FAULTS[name]
        changes = {"model": setting.path("small"), "seq_len": 128, "zero": "2", "lost_timeout": 10}
        changes |= {"save_strategy": "steps", "save_steps": 2, "callbacks": ["gpu.share_rank:Fault"]}
        used_mib = used_gpu_mib() if setting.has_gpu else 0
        codes = finish(start(setting.share, [("train", options(setting, "run", **changes))], SHARE_FAULT=name))
        took = time.time() - (setting.runs / "run" / "struck").stat().st_mtime
        got = read_json(setting.runs / "run" / "run.json")["status"]
        last = setting.share - 1
        rank = "" if name in ("nan", "sigint") else f"rank {last} on share-{last // 2}"
        expected = [code] * last + [-9 if name in ("sigkill", "sigstop") else code]
        lines = [line for line in setting.log.read_text(errors="replace").splitlines() if text in line and rank in line]
        limit = (seconds + RANK_0_SECONDS + 2) * (1 if setting.has_gpu else SLOWER)  # others end after rank 0
        yield Row(
            claim=f"{rank} {text}: all ranks end within {limit} s",
            predicted=f"exit codes {expected}, {status}",
            measured=f"exit codes {codes}, {got}, {took:.0f} s: {lines[0][:160] if lines else last_line(setting)}",
            ok=codes == expected and got == status and bool(lines) and took <= limit,
        )
        mine = {"SHARE_CHECK": str(os.getpid())}.items()  # guards have left the tree of the ranks
        yield nothing_left(
            [each for each in psutil.process_iter(["environ"]) if mine <= (each.info["environ"] or {}).items()]
        )
        if setting.has_gpu:
            more_mib = used_gpu_mib() - used_mib
            yield Row(claim="no GPU memory of the run is left", measured=f"{more_mib} MiB", ok=more_mib < 64)

    return check


def used_gpu_mib() -> int:
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    words = ["nvidia-smi", f"--id={gpu}", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return int(subprocess.run(words, capture_output=True, text=True, check=True).stdout)
