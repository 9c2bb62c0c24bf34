"""The planner's view of a run on the examined nodes: whether it fits, what it writes, and what speeds the planner
assumes.

Its imports (transformers) take seconds: `start_imports` begins them while the nodes are asked.
"""

import contextlib
import dataclasses
import importlib
import io
import threading
import warnings
from dataclasses import dataclass, field
from typing import Any

from dsft.doctor.facts import NodeFacts
from dsft.doctor.findings import Finding, finding, join
from dsft.errors import UserError, one_line
from dsft.runtime.hardware import Machine, cpu_rank_bytes, has_gpu, job_machine
from dsft.units import GiB


@dataclass(kw_only=True)
class RunPlan:
    """What the planner says; empty where there is no configuration."""

    findings: list[Finding] = field(default_factory=list)
    text: str = ""
    written_bytes: int | None = None
    """On disk at most, at the end of the run: the model and the checkpoints that are kept."""
    speeds: Any = None
    """`Speeds` that the planner assumes for these nodes without a measurement; None where there is nothing to assume
    them from.
    """


def start_imports() -> threading.Thread:
    """Import what the plan needs, in the background."""

    def load() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module("dsft.run_setup.resolve")

    thread = threading.Thread(target=load, daemon=True)
    thread.start()
    return thread


def plan_on(argv: list[str], facts: dict[str, NodeFacts], slots: dict[str, int]) -> RunPlan:
    """Plan the training that `argv` describes (none: only the assumed speeds) for the nodes with these facts."""
    from dsft.planner.step_time import speeds_of

    machine = _machine(facts, slots)
    plan = RunPlan(speeds=speeds_of(machine, dtype="bfloat16" if machine.has_gpu else "float32"))
    if not argv:
        return plan
    if has_gpu() != machine.has_gpu:
        message = (
            f"the nodes have {'GPUs' if machine.has_gpu else 'no GPUs'}, unlike this machine, so that no plan for them"
            " can be made here"
        )
        plan.findings.append(finding("plan-unknown", "here", message, "run dsft doctor on the first node"))
        return plan
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _plan(argv, machine, facts, plan)
    except UserError as error:
        fix = "see its way out; dsft plan shows all candidates"
        plan.findings += [finding("plan", "here", problem, fix) for problem in error.problems]
    except (OSError, ValueError, RuntimeError) as error:
        message = f"no plan could be made: {one_line(error)}"
        plan.findings.append(finding("plan-unknown", "here", message, "dsft plan --model ... says more"))
    return plan


def _machine(facts: dict[str, NodeFacts], slots: dict[str, int]) -> Machine:
    """The smallest of the nodes, as the planner takes it."""
    gpus = [gpu for node in facts.values() for gpu in node.usable_gpus]
    return job_machine(
        [
            Machine(
                nodes=1,
                ranks_per_node=slots[name],
                device_bytes=min(
                    (gpu.memory_bytes - gpu.used_bytes for gpu in node.usable_gpus),
                    default=cpu_rank_bytes(node.host_bytes, slots[name]),
                ),
                host_bytes=node.host_bytes,
                has_gpu=bool(gpus),
                gpu_type=gpus[0].name if gpus else "",
                cores=node.cores,
                measured=True,
                memlock_bytes=node.locked_bytes,
                host_names=(node.host,),
            )
            for name, node in facts.items()
        ]
    )


def _plan(argv: list[str], machine: Machine, facts: dict[str, NodeFacts], plan: RunPlan) -> None:
    from dsft.config.options import TrainConfig
    from dsft.config.reader import read_config
    from dsft.run_setup.checkpoint_size import checkpoint_size
    from dsft.run_setup.decisions import Draft
    from dsft.run_setup.resolve import check_run, decide_job, plan_run

    problems: list[str] = []
    options = asked = read_config(TrainConfig, argv, problems)
    # Data is compared on the nodes, and may be large; the folder is looked at there too.
    elsewhere = ("output_dir", "eval_strategy", "load_best_model_at_end", "metric_for_best_model")
    training = {name: value for name, value in options.training.items() if name not in elsewhere}
    options = dataclasses.replace(options, data=[], eval_data=[], eval_fraction=0.0, training=training)
    checked = check_run(options, machine, problems)
    fix = "correct it in the configuration"
    plan.findings += [finding("configuration", "here", problem, fix) for problem in dict.fromkeys(checked.problems)]
    if not checked.model or checked.problems:
        return
    draft = Draft(checked.options)
    job = decide_job(draft, checked.model, checked.data).job
    options = draft.options
    choice = plan_run(options, job, machine, zero_file=checked.zero_file)
    chosen, plan.text = choice.plan, choice.reason
    whole = dataclasses.replace(asked, dtype=options.dtype)
    plan.written_bytes = checkpoint_size(whole, checked.model.size, chosen.deepspeed_config).total_bytes
    short = {name: node.available_bytes for name, node in facts.items() if node.available_bytes < chosen.host_bytes}
    if short:
        needed, least = chosen.host_bytes / GiB, min(short.values()) / GiB
        message = f"the plan takes {needed:.1f} GiB of host memory, {least:.1f} are free"
        fix = f"ssh {next(iter(short))} ps aux --sort=-rss | head"
        plan.findings.append(finding("memory-low", join(list(short)), message, fix, severity="error"))
