"""What a user needs to know when memory runs out: the plan, what was measured, and the next smaller plan."""

import contextlib
import functools

from dsft.errors import one_line
from dsft.planner.plans import Plan
from dsft.run_setup.resolve import ResolvedRun, smaller_plan
from dsft.runtime.hardware import Memory, memory_errors_explained, peak_memory_bytes
from dsft.units import GiB
from dsft.watchdog import client as watchdog

PARTS = {"evaluating": "while evaluating", "saving": "while saving"}
"""Phases of the watchdog that are parts of a training, in words."""


def out_of_memory_explained(run: ResolvedRun, when: str) -> contextlib.AbstractContextManager[None]:
    """Turn a failed allocation inside a `with` into one clear error on this rank.

    Args:
        when: in words, for the message.
    """
    return memory_errors_explained(functools.partial(_explanation, run, when))


def _explanation(run: ResolvedRun, when: str, error: BaseException, memory: Memory) -> str:
    when = PARTS.get(watchdog.current_phase, when)
    plan, machine = run.plan, run.machine
    on_gpu = machine.has_gpu and memory == "GPU"
    measured = peak_memory_bytes()["gpu" if on_gpu else "host"]
    predicted, there = (
        (plan.device_bytes, machine.device_bytes)
        if on_gpu
        else (plan.host_bytes / plan.ranks_per_node, machine.host_bytes / machine.ranks_per_node)
    )
    where = "GPU" if on_gpu else f"rank's {memory} memory"
    try:
        smaller = smaller_plan(run.job, machine, plan)
    except Exception:  # there may be no memory for a search: the cause is said all the same
        smaller = None
    way_out = (
        f"the next smaller plan is {smaller.label}, by prediction {smaller.device_bytes / GiB:.3g} GiB:"
        f" {flags_of(smaller)}"
        if smaller
        else "no smaller plan is known: use more GPUs or nodes, method lora, or a smaller seq_len"
    )
    return (
        f"{when} ({one_line(error)}): the plan is {plan.label}, {predicted / GiB:.3g} GiB were"
        f" predicted for this {where}, {measured / GiB:.3g} GiB were taken at most, {there / GiB:.3g} GiB are its"
        f" share; {way_out}"
    )


def flags_of(plan: Plan) -> str:
    """The options that ask for a plan."""
    return (
        f"--zero {plan.zero} --per_device_train_batch_size {plan.micro_batch} --gradient_accumulation_steps"
        f" {plan.accumulation} --activation_checkpointing {plan.activation_checkpointing}"
    )
