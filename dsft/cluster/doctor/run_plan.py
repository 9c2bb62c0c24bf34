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

from dsft.cluster.doctor.facts import usable_gpus
from dsft.cluster.doctor.findings import Finding, finding, join
from dsft.errors import UserError, one_line
from dsft.units import GiB

STATE_BYTES = 12
"""In a checkpoint, per trained parameter, beside the weights: fp32 master, m and v of Adam."""


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
            importlib.import_module("dsft.run_setup.preparation")

    thread = threading.Thread(target=load, daemon=True)
    thread.start()
    return thread


def plan_on(argv: list[str], facts: dict[str, dict[str, Any]], slots: dict[str, int]) -> RunPlan:
    """Plan the training that `argv` describes (none: only the assumed speeds) for the nodes with these facts."""
    from dsft.planner.speeds import speeds_of
    from dsft.runtime.hardware import Machine, has_gpu

    gpus = [gpu for one in facts.values() for gpu in usable_gpus(one)]
    ranks, host_bytes = max(slots.values()), min(one["host_bytes"] for one in facts.values())
    free = min((gpu["memory_bytes"] - gpu["used_bytes"] for gpu in gpus), default=int(0.85 * host_bytes / ranks))
    machine = Machine(
        nodes=len(facts),
        ranks_per_node=ranks,
        device_bytes=free,
        host_bytes=host_bytes,
        has_gpu=bool(gpus),
        gpu_type=gpus[0]["name"] if gpus else "",
        cores=min(one["cores"] for one in facts.values()),
        measured=True,
        host_names=tuple(sorted({one["host"] for one in facts.values()})),
    )
    found = RunPlan(speeds=speeds_of(machine, half=bool(gpus)))
    if not argv:
        return found
    if has_gpu() != machine.has_gpu:
        found.findings.append(
            finding(
                "plan-unknown",
                "here",
                f"the nodes have {'GPUs' if gpus else 'no GPUs'}, unlike this machine, so that no plan for them can be"
                " made here",
                "run dsft doctor on the first node",
            )
        )
        return found
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _plan(argv, machine, facts, found)
    except UserError as error:
        found.findings += [
            finding("plan", "here", problem, "see its way out; dsft plan shows all candidates")
            for problem in error.problems
        ]
    except (OSError, ValueError, RuntimeError) as error:
        found.findings.append(
            finding(
                "plan-unknown", "here", f"no plan could be made: {one_line(error)}", "dsft plan --model ... says more"
            )
        )
    return found


def _plan(argv: list[str], machine: Any, facts: dict[str, dict[str, Any]], found: RunPlan) -> None:
    from dsft.config.options import TrainConfig
    from dsft.config.reader import read_config
    from dsft.run_setup.preparation import check_run, plan_run

    problems: list[str] = []
    config = read_config(TrainConfig, argv, problems)
    # Data is compared on the nodes, and may be large; the folder is looked at there too.
    training = {key: value for key, value in config.training.items() if key != "output_dir"}
    config = dataclasses.replace(config, data=[], eval_data=[], eval_fraction=0.0)
    config.training = {
        key: value
        for key, value in training.items()
        if key not in ("eval_strategy", "load_best_model_at_end", "metric_for_best_model")
    }
    prepared = check_run(config, machine.world_size, problems)
    found.findings += [
        finding("configuration", "here", problem, "correct it in the configuration")
        for problem in dict.fromkeys(problems)
    ]
    if not prepared.size or problems:
        return
    width = 4 if config.dtype == "float32" else 2
    weights = width * (prepared.size.num_params if config.method == "full" else prepared.size.num_trainable)
    kept = (
        0 if str(training.get("save_strategy", "steps")) == "no" else (training.get("save_total_limit") or 2) + 1
    )  # a new one is whole before an old one goes
    found.written_bytes = weights + kept * (
        weights + (0 if training.get("save_only_model") else STATE_BYTES * prepared.size.num_trainable)
    )
    plan, why = plan_run(config, prepared, machine)
    found.text = why
    short = [node for node, one in facts.items() if one["available_bytes"] < plan.host_bytes]
    if short:
        least = min(facts[node]["available_bytes"] for node in short)
        found.findings.append(
            finding(
                "memory-low",
                join(short),
                f"the plan takes {plan.host_bytes / GiB:.1f} GiB of host memory, {least / GiB:.1f} are free",
                f"ssh {short[0]} ps aux --sort=-rss | head",
                severity="error",
            )
        )
