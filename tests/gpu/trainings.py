"""Checks that are trainings: memory and time against the plan, resuming, packing. Each reads the run's own files."""

import json
import math
from collections.abc import Callable, Iterator
from typing import Any

from dsft.runtime.hardware import this_machine
from dsft.units import in_gib
from gpu.check import Failed, Row, Setting, command, launch
from gpu.ranks import OwnMemory

STEPS = 6
MEMORY_ERROR = 0.1
"""Of a measured peak, from its plan."""
GPU_NOISE = 1e-3
"""Of a loss: the backward of attention adds up in another order each time."""
COMPARED = ("GPU memory allocated", "GPU memory reserved", "host memory of a node", "time of a step")
"""Of the plan's figures; all are in the JSON."""
SHOWN = ("GPU memory reserved",)
"""Of these, what is no claim: what torch's allocator keeps beside tensors follows from the order in which they came."""


def options(setting: Setting, name: str, **changes: Any) -> dict[str, Any]:
    """Compose the options of a short training of `base` on full sequences, and change some."""
    return {
        "model": setting.path("base"),
        "data": setting.path("demo", "corpus", "train.jsonl"),
        "output_dir": setting.runs / name,
        "seq_len": 128 if setting.tiny else 2048,
        "per_device_train_batch_size": 2,
        "max_steps": STEPS,
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
    } | changes


def train(setting: Setting, name: str, **changes: Any) -> dict[str, Any]:
    """Train; returns its run.json.

    Raises:
        Failed: where it does not end well, or a loss is no number.
    """
    launch(setting, command(setting, "train", options(setting, name, **changes)))
    run = json.loads((setting.runs / name / "run.json").read_text(encoding="utf-8"))
    if not all(math.isfinite(loss) for loss in losses(run)):
        raise Failed("a loss is no number")
    return run


def losses(run: dict[str, Any]) -> list[float]:
    return [entry["loss"] for entry in run["results"]["log"] if "loss" in entry]


def planned_training(**changes: Any) -> Callable[[Setting], Iterator[Row]]:
    """Make a check: this training takes the memory that its plan says."""

    def check(setting: Setting) -> Iterator[Row]:
        yield from compared(train(setting, "run", **changes), tiny=setting.tiny)

    return check


def compared(run: dict[str, Any], *, tiny: bool, machine: str = "") -> Iterator[Row]:
    """Compare the plan's figures in a run.json with the measured ones; of a tiny model's, nothing is claimed."""
    figures = run["results"]["plan_check"]
    mfu = [entry["mfu"] for entry in run["results"]["log"] if "mfu" in entry]
    if not machine:  # this process takes memory of the GPU to know it
        here = this_machine()
        machine = f"{here.ranks_per_node} x {here.gpu_type or 'CPU rank'}"
    for name, figure in figures.items():
        if name not in COMPARED or (name == "host memory of a node" and "GPU memory allocated" in figures):
            continue
        is_time, ratio = name == "time of a step", figure["measured"] / figure["predicted"]
        is_claim = name not in SHOWN and not is_time
        low, high = 1 - MEMORY_ERROR, 1 + MEMORY_ERROR
        texts = [f"{figure[key]:.3g} s" if is_time else in_gib(figure[key]) for key in ("predicted", "measured")]
        yield Row(
            claim=f"{name}: " + (f"{low:.2g} to {high:.2g} of the plan" if is_claim else "no claim"),
            predicted=texts[0],
            measured=texts[1] + (f", MFU {mfu[-1]:.0%}" if is_time and mfu else ""),
            ok=None if tiny or not is_claim else low <= ratio <= high,
            details={"plan_check": figures, "plan": run["plan"]["reason"], "machine": machine},
        )
    if tiny:
        yield Row(claim="it trains", measured=f"loss {losses(run)[-1]:.3f}", ok=True)


SAVING = {"zero": "3", "save_strategy": "steps", "save_steps": STEPS // 2, "activation_checkpointing": True}


def resume(setting: Setting) -> Iterator[Row]:
    """Train on from a checkpoint in the middle, and compare with the run that was not interrupted."""
    with OwnMemory() as while_saving:
        whole = train(setting, "whole", **SAVING)
    checkpoint = setting.runs / "whole" / f"checkpoint-{STEPS // 2}"
    with OwnMemory() as while_resuming:
        resumed = train(setting, "resumed", **SAVING | {"save_strategy": "no"}, resume_from_checkpoint=checkpoint)
    expected, got = losses(whole)[STEPS // 2 :], losses(resumed)[-(STEPS - STEPS // 2) :]
    difference = max(abs(loss / other - 1) for loss, other in zip(got, expected, strict=True))
    tolerance = GPU_NOISE if setting.has_gpu else 0.0
    yield Row(
        claim="a resumed training has the losses of one without a break",
        predicted=", ".join(f"{loss:.6f}" for loss in expected),
        measured=f"{difference:.1e} off" if difference else "the same bits",
        ok=difference <= tolerance,
    )
    for name, run, memory in (("saving", whole, while_saving), ("resuming", resumed, while_resuming)):
        planned, peak = run["plan"]["host_bytes"], memory.peak_bytes
        yield Row(
            claim=f"host memory while {name} is at most the plan's",
            predicted=in_gib(planned),
            measured=in_gib(peak),
            ok=None if setting.tiny else peak <= planned * (1 + MEMORY_ERROR),
        )


def packed_training(setting: Setting) -> Iterator[Row]:
    """Train on packed instructions."""
    data = setting.path("demo", "instructions", "train.jsonl")
    run = train(setting, "packed", data=data, packing=True, zero="1")
    yield Row(claim="packed instructions train", measured=f"loss {losses(run)[-1]:.3f}", ok=True)
    yield from (row for row in compared(run, tiny=setting.tiny) if row.predicted)
