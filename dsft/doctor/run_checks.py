"""Findings about a run on the examined nodes: its files, which have to be on each with the same content, and its plan,
with what it writes and the speeds that the planner assumes.

The options are read without transformers, whose import takes seconds: `start_imports` begins it for the plan while the
nodes are asked.
"""

import contextlib
import dataclasses
import importlib
import io
import os
import threading
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from dsft.config.reader import read_file_and_flags, read_flags, sent_files
from dsft.data.sources import is_path
from dsft.doctor.facts import NodeFacts
from dsft.doctor.findings import Finding, finding, join
from dsft.doctor.phases import FileContent, Reached
from dsft.errors import UserError, one_line
from dsft.runtime.hardware import Machine, cpu_rank_bytes, has_gpu, job_machine
from dsft.units import GiB, plural

FEWEST_FREE_BYTES = GiB
"""Where the run's needs are not known."""


@dataclass(frozen=True, kw_only=True)
class RunFiles:
    """What a run reads and writes, as its options name it."""

    data: list[str] = field(default_factory=list)
    models: list[str] = field(default_factory=list)
    """Model, tokenizer and adapter."""
    output_dir: str = ""
    saves: bool = True
    """Whether checkpoints are written while training."""
    nvme: bool = False
    config: str = ""
    """Path of its YAML file."""
    config_is_sent: bool = False
    """`dsft launch` sends that of the first node to all."""

    @property
    def hub_names(self) -> list[str]:
        """Of NAME:CONFIG:SPLIT the name, of every source that may lie on the hub."""
        return [source.partition(":")[0] for source in (*self.data, *self.models) if not is_path(source)]


def read_run_files(argv: list[str]) -> RunFiles:
    """The files that `dsft train` or `dsft eval` with these options would use; none without options."""
    problems: list[str] = []  # reported by the plan, or by training itself
    values = read_file_and_flags(argv, problems) or {}
    config = "".join(_words(read_flags(argv, []).get("config"))[:1])
    keys = ("data", "eval_data", "model", "tokenizer", "adapter", "output_dir", "zero")
    words = {key: _words(values.get(key)) for key in keys}
    return RunFiles(
        data=words["data"] + words["eval_data"],
        models=[*dict.fromkeys(words["model"] + words["tokenizer"] + words["adapter"])],
        output_dir="".join(words["output_dir"][:1]),
        saves=str(values.get("save_strategy", "steps")) != "no",
        nvme="nvme" in "".join(words["zero"]),
        config=config,
        config_is_sent=config in sent_files(),
    )


def _words(value: Any) -> list[str]:
    return list(map(str, value)) if isinstance(value, list) else [] if value in (None, True) else [str(value)]


def check_files(
    files: RunFiles, first: str, facts: dict[str, NodeFacts], reached: dict[str, Reached]
) -> Iterator[Finding]:
    """Data and model the same everywhere, the output folder writable everywhere and shared."""
    if files.config:
        yield from check_config(files, {node: answer.config for node, answer in reached.items()})
    named_on_hub: set[str] = set()
    for source in (*files.data, *files.models):
        seen = {node: answer.contents[source] for node, answer in reached.items()}
        yield from check_content(source, seen, "data" if source in files.data else "model")
        if not any(seen.values()) and not is_path(source):
            name = source.partition(":")[0]
            if name in named_on_hub:  # two splits of one data set
                continue
            named_on_hub.add(name)
            yield from check_hub(
                name,
                {node: answer.cached[name] for node, answer in reached.items()},
                [node for node in facts if facts[node].hub_offline],
                is_data=source in files.data,
            )
    if files.output_dir:
        errors = {node: answer.output_error for node, answer in facts.items()}
        seen = {node: answer.sees_probe for node, answer in reached.items() if answer.sees_probe is not None}
        yield from check_output(files, first, errors, seen)


def check_config(files: RunFiles, seen: dict[str, dict[str, str] | None]) -> Iterator[Finding]:
    """`seen`: the configuration file on each node. Where `dsft launch` sends one, a difference is a note."""
    lacking = [node for node, values in seen.items() if values is None]
    if len(lacking) == len(seen):
        return  # reported by the reader of options
    read = {node: values for node, values in seen.items() if values is not None}
    first = next(iter(read))
    odd, texts = lacking[:], [f"it is not on {join(lacking)}"] if lacking else []
    for key in dict.fromkeys(key for values in read.values() for key in values):
        nodes: dict[str, list[str]] = {}
        for node, values in read.items():
            nodes.setdefault(values.get(key, "not set"), []).append(node)
        if len(nodes) > 1:
            texts.append(f"{key} is " + ", ".join(f"{value[:80]} on {join(on)}" for value, on in nodes.items()))
            odd += [node for node in read if read[node].get(key) != read[first].get(key)]
    if odd:
        copy = f"rsync -a {os.path.abspath(files.config)} {{}}:{os.path.abspath(files.config)}"
        fix = f"on {first}: {copy.format(odd[0])}; `dsft launch --hostfile` sends the one from where it is started"
        severity = "note" if files.config_is_sent else None
        message = f"{files.config}: {'; '.join(texts)}"
        yield finding("config-differs", join([*dict.fromkeys(odd)]), message, fix, severity=severity)


def check_content(source: str, seen: dict[str, FileContent | None], kind: str) -> Iterator[Finding]:
    """`seen`: one file, folder or glob on each node; `kind`: "data" or "model"."""
    there, missing = [node for node in seen if seen[node]], [node for node in seen if not seen[node]]
    copy = f"rsync -aR {source} {{}}:/" if os.path.isabs(source) else f"rsync -a {source} {{}}:{os.getcwd()}/{source}"
    if not there:
        if missing and is_path(source):
            message = f"{source} does not exist (seen from {os.getcwd()})"
            yield finding(f"{kind}-missing", join(missing), message, f"correct {kind}, or copy it there")
        return
    if missing:
        fix = f"on {there[0]}: {copy.format(missing[0])}; or mount the same folder on every node"
        yield finding(f"{kind}-missing", join(missing), f"{source} is on {join(there)} but not there", fix)
        return
    usual = Counter(seen.values()).most_common(1)[0][0]  # of equally many, the first node's
    odd = [node for node, content in seen.items() if content != usual]
    if odd:
        texts = [
            f"{join([node for node in seen if seen[node] == content])}: {plural(content.files, 'file')},"
            f" {content.bytes:,} bytes, hash {content.hash}"
            for content in dict.fromkeys(seen.values())
        ]
        good = next(node for node in seen if node not in odd)
        fix = f"on {good}: {copy.format(odd[0])}; or mount the same folder on every node"
        yield finding(f"{kind}-differs", join(odd), f"{source} differs ({'; '.join(texts)})", fix)


def check_hub(name: str, cached: dict[str, bool], offline: list[str], *, is_data: bool) -> Iterator[Finding]:
    """A name on the hub: in the cache of each node, or to be downloaded by it.

    Args:
        offline: nodes that may not download.
    """
    lacking = [node for node in cached if not cached[node]]
    barred = [node for node in lacking if node in offline]
    download = f"hf download {name}{' --repo-type dataset' if is_data else ''}"
    if barred:
        message = f"{name} is neither a file nor in the hub's cache, and HF_HUB_OFFLINE is set"
        fix = f"on {barred[0]}: HF_HUB_OFFLINE=0 {download}; or name an existing folder"
        yield finding("hub-offline", join(barred), message, fix)
    elif lacking:
        fix = f"on each: {download}; or one HF_HOME that all nodes share"
        yield finding("hub-download", join(lacking), f"{name} is not in the hub's cache yet", fix)


def check_output(files: RunFiles, first: str, errors: dict[str, str], seen: dict[str, bool]) -> Iterator[Finding]:
    """`errors`: why each node cannot write to the folder (empty: it can); `seen`: whether the others see what `first`
    wrote.
    """
    folder = files.output_dir
    for node, problem in errors.items():
        message = f"output_dir={folder}: {problem}"
        if "No space" in problem or "quota" in problem.lower():
            yield finding("disk", node, message, f"ssh {node} df -h {folder}; another output_dir, or make room")
        elif problem:
            fix = f"on {node}: mkdir -p {folder} && ls -ld {folder}; chown, remount, or another output_dir"
            yield finding("output-not-writable", node, message, fix)
    apart = [node for node, sees in seen.items() if not sees]
    if apart:
        # The last model is gathered on rank 0, so that without checkpoints nothing is lost.
        yield finding(
            "output-not-shared",
            join(apart),
            f"output_dir={folder}: a file made on {first} does not show there",
            "mount one network folder (NFS, Lustre ...) there on every node and set output_dir to it; without"
            " checkpoints (--save_strategy no) local disks do",
            severity="error" if files.saves else "note",
        )


def check_disk(files: RunFiles, facts: dict[str, NodeFacts], needed_bytes: int | None) -> Iterator[Finding]:
    """Free space for what the run writes (`needed_bytes`, None where it is not known)."""
    for name, node in facts.items():
        free = node.disks.get(files.output_dir)
        if free is None:
            continue
        if needed_bytes and free < needed_bytes:
            yield finding(
                "disk",
                name,
                f"output_dir={files.output_dir}: {free / GiB:.1f} GiB free, the run writes about"
                f" {needed_bytes / GiB:.1f} (weights and checkpoints)",
                "another output_dir, a smaller save_total_limit, or save_only_model: true",
            )
        elif not needed_bytes and free < FEWEST_FREE_BYTES:
            message = f"output_dir={files.output_dir}: {free / GiB:.2f} GiB free"
            fix = f"ssh {name} df -h {files.output_dir}; another output_dir, or make room"
            yield finding("disk", name, message, fix, severity="warning")


@dataclass(kw_only=True)
class RunPlan:
    """What the planner decides; empty where there is no configuration."""

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
    from dsft.run_setup.resolve import plan_run, resolve_offline

    problems: list[str] = []
    options = asked = read_config(TrainConfig, argv, problems)
    # Data is compared on the nodes, and may be large; the folder is looked at there too.
    elsewhere = ("output_dir", "eval_strategy", "load_best_model_at_end", "metric_for_best_model")
    training = {name: value for name, value in options.training.items() if name not in elsewhere}
    options = dataclasses.replace(options, data=[], eval_data=[], eval_fraction=0.0, training=training)
    try:
        run = resolve_offline(options, machine, starts=True, problems=problems)
    except UserError as error:
        fix = "correct it in the configuration"
        plan.findings += [finding("configuration", "here", problem, fix) for problem in dict.fromkeys(error.problems)]
        return
    choice = plan_run(run.options, run.job, machine, zero_file=run.zero_file)
    chosen, plan.text = choice.plan, choice.reason
    whole = dataclasses.replace(asked, dtype=run.options.dtype)
    plan.written_bytes = checkpoint_size(whole, run.model.size, chosen.deepspeed_config).total_bytes
    short = {name: node.available_bytes for name, node in facts.items() if node.available_bytes < chosen.host_bytes}
    if short:
        needed, least = chosen.host_bytes / GiB, min(short.values()) / GiB
        message = f"the plan takes {needed:.1f} GiB of host memory, {least:.1f} are free"
        fix = f"ssh {next(iter(short))} ps aux --sort=-rss | head"
        plan.findings.append(finding("memory-low", join(list(short)), message, fix, severity="error"))
