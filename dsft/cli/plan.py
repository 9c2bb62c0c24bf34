"""`dsft plan`: options of a training and a machine (this one measured, or one on paper) -> what the training would
decide.

Problems of the options are reported before torch is loaded, which takes seconds; plan_answers.py does the work.
"""

import dataclasses
import json
import math
import os
import shutil
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

from dsft.cli.commands import HardwareFields, PlanOptions
from dsft.config.options import TrainConfig
from dsft.config.reader import read_config
from dsft.errors import UserError, one_line, raise_if_any, without_second_errors
from dsft.planner.step_time import GPUS, choose_gpu, named_gpus
from dsft.run_setup.named_files import NOT_NEEDED, check_named_files
from dsft.runtime import quick_imports
from dsft.runtime.console import show_text
from dsft.runtime.hardware import Machine, has_gpu, parse_bytes, require_seen_gpus, split_gpus, this_machine
from dsft.runtime.launcher_env import read_hosts
from dsft.units import GB

ASSUMED_GPU = "A100-80GB"
MACHINES = Path(__file__).parent.parent / "planner" / "machines.toml"
MOST_GPUS_PER_NODE = 72
"""GB200 NVL72, the largest machine that is sold as one."""
MOST_GPUS = 100_000
"""Of the largest clusters that are known."""
QUESTIONS, ALONE = "perplexity longest largest", "--perplexity, --longest and --largest"
CONFLICTS = [
    ("record", f"json all explain write {QUESTIONS} cheapest prices several_nodes", "--record: is one row of one plan"),
    ("cheapest prices", "gpus gpu_type nodes hostfile machine", "--cheapest tries machines of its own"),
    ("cheapest prices", f"{QUESTIONS} explain", "--cheapest is a question of its own"),
    ("cheapest prices", "write calibrate dollars_per_gpu_hour", "--cheapest is of many machines and their prices"),
    ("perplexity", "longest largest", f"{ALONE} are questions of their own"),
    ("longest", "largest", f"{ALONE} are questions of their own"),
    (QUESTIONS, "write explain", f"{ALONE} make no plan of a training"),
    (QUESTIONS, "several_nodes", f"{ALONE} take one number of nodes"),
    ("several_nodes", "write explain", "--write and --explain take one number of nodes"),
]
"""(Options that ask for something, those that have no place in its answer, why)."""


def run(options: PlanOptions, argv: Sequence[str]) -> None:
    """Print what a training with the options of `argv` would decide, or what else `options` ask for. Raises UserError
    with every problem of the options, of the machine, or of the model.
    """
    numbers = ("tokens_per_step", "tokens", "dollars_per_gpu_hour")
    given = {name: getattr(options, name) for name in numbers if getattr(options, name) is not None}
    raise_if_any([f"--{name} {value}: must be above 0" for name, value in given.items() if not value > 0])
    problems: list[str] = []
    asked = {name for name, value in vars(options).items() if value}
    asked |= {"several_nodes"} if "," in (options.nodes or "") else set()
    for answered, others, why in CONFLICTS:
        needless = [f"--{name}" for name in others.split() if name in asked]
        if needless and not asked.isdisjoint(answered.split()):
            left_out = " and ".join(needless).replace("--several_nodes", "several --nodes")
            problems.append(f"{why}; leave out {left_out}")
    is_told_in_full = "--config" not in [word.partition("=")[0] for word in argv] and (options.gpus or options.gpu_type)
    if options.record and not is_told_in_full:
        problems.append("--record: others must be able to ask the same; write the job's options and --gpus")
    training = read_config(TrainConfig, argv, problems, also=PlanOptions)
    not_needed = NOT_NEEDED + options.largest * ("model: missing",)
    problems = [problem for problem in problems if not problem.startswith(not_needed)]
    files = check_named_files(dataclasses.replace(training, data=[], eval_data=[]))  # a plan takes data that is to come
    raise_if_any([*problems, *without_second_errors(files, problems)])
    source, priced = read_prices(options) if options.cheapest or options.prices else ("", [])
    machines = [] if priced else read_machines(options)
    with quick_imports():
        from dsft.cli.plan_answers import answer, show_cheapest

    if not has_gpu():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed warns that there is no GPU
    if priced:
        show_cheapest(options, training, priced, source)
    else:
        answer(options, training, machines, words=tuple(argv))


def read_prices(options: PlanOptions) -> tuple[str, list[tuple[Machine, float | None]]]:
    """Read where the prices of `--cheapest` are from, and its machines with the dollars of one GPU for an hour, None
    where there is no price. Raises UserError where the file cannot be read, or an entry of it is no machine.
    """
    path = Path(options.prices).expanduser() if options.prices else MACHINES
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
        entries = content["machine"]
        if not entries or not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            raise ValueError("machine is no list of tables")
    except OSError as error:
        raise UserError(f"--prices {path}: {error.strerror}; name another file") from None
    except (KeyError, ValueError) as error:
        raise UserError(
            f"--prices {path}: {one_line(error)}; write [[machine]] tables like those of {MACHINES}"
        ) from None
    priced, hardware = [], {field.name for field in dataclasses.fields(HardwareFields)}
    for number, entry in enumerate(entries, 1):
        dollars = entry.pop("dollars_per_gpu_hour", None)
        problems = [f"unknown key {name}" for name in entry if name not in hardware]
        if not entry.get("gpus"):
            problems.append("it needs gpus, such as 8xH100")
        if not (dollars is None or (type(dollars) in (int, float) and 0 <= dollars < math.inf)):
            problems.append(f"dollars_per_gpu_hour = {dollars!r} is no price; write a number, or leave it out")
        try:
            raise_if_any(problems)
            changes = {name: str(value) for name, value in entry.items()}
            priced += [(machine, dollars) for machine in read_machines(dataclasses.replace(options, **changes))]
        except UserError as error:
            raise UserError([f"--prices {path}: machine {number}: {each}" for each in error.problems]) from None
    return str(content.get("source", path)), priced


def read_machines(options: PlanOptions) -> list[Machine]:
    """The machine that the hardware options describe, once for each number of nodes. Raises UserError for an impossible
    number, a text that cannot be read, and GPUs of this machine that torch does not see.
    """
    hosts = {node.name: node.slots for node in read_hosts(options.hostfile)} if options.hostfile else {}
    if hosts and options.nodes:
        raise UserError(f"--nodes {options.nodes}: --hostfile {options.hostfile} has {len(hosts)}; keep one")
    words = (options.nodes or "1").split(",")
    nodes = [len(hosts)] if hosts else [int(word) if word.strip().isdecimal() else 0 for word in words]
    if min(nodes) < 1:
        raise UserError(
            f"--nodes {options.nodes}: write a number of at least 1, or several with commas, for example 1,2,4,8"
        )
    slots = max(hosts.values(), default=None)

    # ---- one node: measured elsewhere, this one, or on paper
    if options.machine:
        machine = read_machine(Path(options.machine).expanduser())
        for name in ("gpus", "gpu_type"):
            if asked := getattr(options, name):
                raise UserError(f"--{name} {asked}: --machine {options.machine} contains it; keep one")
        if slots and slots != machine.ranks_per_node:
            raise UserError(
                f"--machine {options.machine}: a plan for {machine.ranks_per_node} ranks; --hostfile"
                f" {options.hostfile} has at most {slots} per node"
            )
    elif options.gpus or options.gpu_type:
        machine = _on_paper(options, slots)
    elif not hosts:
        require_seen_gpus()
        machine = this_machine()
    elif has_gpu():
        machine = dataclasses.replace(this_machine(), ranks_per_node=slots)
    else:
        show_text(
            f"dsft: no GPU here to take as a sample: {ASSUMED_GPU} assumed; --gpus 8xH100 or --gpu_type changes that",
            file=sys.stderr,
        )
        machine = _on_paper(options, slots)

    # ---- what single options say of it
    changes = {"host_bytes": parse_bytes(options.host_memory)} if options.host_memory else {}
    if options.nvme and Path(options.nvme).is_dir():
        changes |= {"nvme_bytes": shutil.disk_usage(options.nvme).free, "nvme_path": options.nvme}
    elif options.nvme:
        changes["nvme_bytes"] = parse_bytes(options.nvme)
    if options.interconnect:

        def is_network(link: str) -> bool:
            return not link.lower().startswith(("nvlink", "pcie"))

        # Where links within a node or its network alone are named, the other one stays as it was read.
        asked = options.interconnect.split("+")
        kinds = {is_network(link) for link in asked}
        kept = [link for link in machine.interconnect.split("+") if link and is_network(link) not in kinds]
        changes["interconnect"] = "+".join(sorted([*asked, *kept], key=is_network))
    if machine.ranks_per_node * max(nodes) > MOST_GPUS:
        raise UserError(
            f"{machine.ranks_per_node * max(nodes):,} GPUs: the largest clusters have {MOST_GPUS:,}; lower --nodes"
        )
    changes["host_names"] = tuple(sorted(hosts))
    changes["num_ranks"] = sum(hosts.values()) if len(set(hosts.values())) > 1 else 0
    return [dataclasses.replace(machine, nodes=number, **changes) for number in nodes]


def _on_paper(options: PlanOptions, slots: int | None) -> Machine:
    """A node of this many GPUs by name or size. Args: `slots`: of the host file."""
    number, word = split_gpus(options.gpus) if options.gpus else (slots or 8, "")
    if slots and number != slots:
        raise UserError(
            f"--gpus {options.gpus}: --hostfile {options.hostfile} has at most {slots} per node; make them the same"
        )
    if number > MOST_GPUS_PER_NODE:
        raise UserError(f"--gpus {options.gpus}: no node has more than {MOST_GPUS_PER_NODE} GPUs; use --nodes")
    gpu_type, size = options.gpu_type or "", 0
    if named_gpus(word):
        if gpu_type:
            raise UserError(f"--gpus {options.gpus} and --gpu_type {gpu_type} both name the card; keep one")
        gpu_type = word
    elif word:
        size = parse_bytes(word)
    name = choose_gpu(gpu_type or ("" if options.gpus else ASSUMED_GPU), size)
    gpu = GPUS[name]
    whole = not size or size >= 0.98 * gpu.usable_bytes or size >= 0.98 * gpu.memory_gb * GB
    return Machine(
        nodes=1,
        ranks_per_node=number,
        device_bytes=gpu.usable_bytes if whole else size,
        host_bytes=1000 * GB,
        has_gpu=True,
        gpu_type=name,
    )


def read_machine(path: Path) -> Machine:
    """Read what `dsft plan --calibrate --json` printed there. Raises UserError where nothing was measured."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))["machine"]
        carried = {name: fields["carried"][name] for name in ("bits", "ranks", "outside")}
        machine = Machine(**fields | {"measured": False, "carried": carried, "host_names": ()})
    except OSError as error:
        raise UserError(f"--machine {path}: {error.strerror}") from None
    except (KeyError, TypeError, ValueError):
        machine = None
    if not (machine and machine.carried["ranks"]):
        raise UserError(f"--machine {path}: no measured rates in it; write it with dsft plan --calibrate --json")
    return machine
