"""Chooses a DeepSpeed configuration: predicts memory and time of every candidate, from the very configuration that
training would get (`plan.deepspeed_config`), and takes the fastest that fits. Pure arithmetic. Also what is shown of
many plans, a row with a hash for docs/predictions.md, and a plan as files.
"""

import dataclasses
import datetime
import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

import yaml

from dsft.config.deepspeed import stage
from dsft.config.options import HALF_PRECISION
from dsft.errors import UserError
from dsft.planner.activations import Job, exchange_term
from dsft.planner.candidates import (
    CHECKPOINT_EVERY,
    NO_FP32_SUMS,
    batches,
    candidate_names,
    gradient_types,
    settings,
    wants_fp32_sums,
)
from dsft.planner.states import (
    copied_terms,
    late_bytes,
    load_terms,
    quantised_room,
    sample_terms,
    state_terms,
    workspace_terms,
)
from dsft.planner.step_time import GPUS, TIME_RANGES, OutsideMemory, Speeds, StepTime, step_time
from dsft.planner.zero_layout import OVERHEAD, Term, ZeroLayout, peak_bytes, resolve_auto
from dsft.runtime.hardware import Machine
from dsft.runtime.software import code_hash, version_of
from dsft.units import Batch, GiB, in_gib, plural

WORTH_IT = 1.15
"""The predicted gain from which offload, hpZ or more memory are worth their trouble: less is within the predictions'
error.
"""
ROOMY = 0.8
"""Share of a GPU's memory up to which a plan leaves enough free; a fuller one gives way to a roomier one that takes at
most 5 % longer.
"""
HOST_SHARE = 0.95
"""Of a node's memory; the rest is the system's."""
FRAGMENTATION = 0.03
"""Of what torch allocates, what its allocator holds beyond it where memory is short (with expandable segments)."""
ZERO_3_FRAGMENTATION = 0.07
"""The same under ZeRO-3 while memory lasts: gathered parameters of many sizes come and go."""
RESERVE_BYTES = 2**29
"""Left free on a GPU, under ZeRO-3 where a plan can be had that does: published messages of full ones had up to 0.3 GiB
more outside of torch than is assumed, and Llama 2 7B with LoRA ran out of memory on an A100 of 39.39 GiB that it would
have filled to 39.1.
"""
PASSED_OVER = "3-offload-partial"
"""Taken only where nothing else fits: no run has shown the speed of a part of the optimizer on the host."""
MEMORY_ERROR = 0.1
"""Largest difference of a published peak from its prediction (tests/planner/test_published.py)."""
BEST = 3
"""Plans that fit and are shown."""


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What a plan, of a training or of an evaluation, takes of a machine."""

    terms: tuple[Term, ...]
    """Every part of the prediction."""
    device_bytes: int
    """Peak on one GPU (one rank, on CPU), context and communication buffers included."""
    host_bytes: int
    """Host memory of one node, all its ranks together."""
    fits: bool
    low_headroom: bool
    """Whether it fits, but leaves less on the GPU than fragmentation under ZeRO-3 and the reserve may take."""
    limiting_resource: str
    """Of "GPU memory", "host memory", "NVMe" and "locked memory" what is too small, joined by " and "; empty where it
    fits.
    """

    @property
    def has_room(self) -> bool:
        return self.fits and not self.low_headroom


def add_up(
    terms: list[Term], machine: Machine, outside: OutsideMemory, *, communicators: int, stage: int
) -> dict[str, Any]:
    """Return what the terms add up to on a machine, and what a GPU holds beyond them: the fields of `Needs`.

    Args:
        communicators: of NCCL, that the GPUs of a run make; 0 with one GPU.
        stage: of ZeRO.
    """
    allocated = peak_bytes(terms, "device")
    if machine.has_gpu:
        num_bytes = outside.total_bytes(communicators)
        how = (
            f"{outside.context_bytes / GiB:.1f} GiB context + {(num_bytes - outside.context_bytes) / GiB:.1f} GiB"
            f" for {plural(communicators, 'communicator')} of NCCL, {'measured' if outside.measured else 'assumed'}"
            f" + {FRAGMENTATION:.0%} of what is allocated"
        )
        terms = [*terms, Term(OVERHEAD, num_bytes + int(FRAGMENTATION * allocated), how)]
    device, host, nvme = (peak_bytes(terms, place) for place in ("device", "host", "nvme"))
    if not machine.has_gpu:
        host += machine.ranks_per_node * device  # CPU ranks hold everything in host memory
    locked = sum(term.num_bytes for term in terms if term.name.startswith("swap buffers")) // machine.ranks_per_node
    limit = machine.memlock_bytes
    missing = {
        # Under ZeRO-3 torch's cache has blocks of gathered parameters to give back.
        "GPU memory": machine.has_gpu and device + (RESERVE_BYTES if stage < 3 else 0) > machine.device_bytes,
        "host memory": host > HOST_SHARE * machine.host_bytes,
        "NVMe": nvme > machine.nvme_bytes,
        "locked memory": bool(nvme) and limit is not None and locked > limit,  # of one rank, for transfers to NVMe
    }
    fits = not any(missing.values())
    # What fragmentation under ZeRO-3 and the reserve may take.
    reserve = RESERVE_BYTES + (int((ZERO_3_FRAGMENTATION - FRAGMENTATION) * allocated) if stage == 3 else 0)
    return {
        "terms": tuple(terms),
        "device_bytes": device,
        "host_bytes": host,
        "fits": fits,
        "low_headroom": machine.has_gpu and fits and device + reserve > machine.device_bytes,
        "limiting_resource": " and ".join(name for name, is_missing in missing.items() if is_missing),
    }


P = TypeVar("P", bound=Needs)


def with_room(plans: Iterable[P]) -> list[P]:
    """Return the plans that fit and leave the reserve; where none does, those that fit."""
    fitting = [plan for plan in plans if plan.fits]
    return [plan for plan in fitting if plan.has_room] or fitting


@dataclass(frozen=True, kw_only=True)
class Plan(Needs):
    """One DeepSpeed configuration with its predicted memory and time."""

    zero: str
    """Name as the option `zero` takes it: 0, 1, 2, 3, 3-hpz, 2-offload ... or the path of a DeepSpeed JSON."""
    activation_checkpointing: bool
    checkpoint_every: int
    """With it, each so manieth layer is computed again."""
    micro_batch: int
    """Sequences of one forward on one rank."""
    accumulation: int
    """Micro batches of one optimizer step."""
    sequence_parallel: int
    """Ranks that share each micro batch."""
    deepspeed_config: dict[str, Any]
    """What training gets; "auto" numbers are left to transformers."""
    changes: tuple[str, ...]
    """Of the named configuration, so that it fits: "memory not pinned" ..."""
    activation_bytes: int
    """Of the terms, activations, logits and loss of one micro batch on one rank."""
    time: StepTime
    ranks_per_node: int
    has_gpu: bool
    has_time_estimate: bool
    """Whether `time` is good for more than an order (Speeds.has_time_estimate)."""

    @property
    def is_unbenchmarked(self) -> bool:
        """Whether its speed rests on an overlap that no run has shown: offload and hpZ."""
        return "offload" in self.zero or self.zero in ("3-hpz", "3-nvme")

    @property
    def label(self) -> str:
        """Name, what was changed to fit, and batch."""
        changed = f" ({', '.join(self.changes)})" if self.changes else ""
        checkpointing = " with activation checkpointing" if self.activation_checkpointing else ""
        if checkpointing and self.checkpoint_every > 1:
            checkpointing += f" of one layer in {self.checkpoint_every}"
        batch = f"micro batch {self.micro_batch} x {self.accumulation} accumulated"
        if self.sequence_parallel > 1:
            batch += f", {self.sequence_parallel} ranks to a sequence"
        return f"ZeRO {self.zero}{checkpointing}{changed}, {batch}"


speed_of = attrgetter("time.tokens_per_second")
"""Of a plan, over all ranks."""


def fastest_of(plans: list[Plan], machine: Machine) -> tuple[list[Plan], bool]:
    """Return those that are within 1 % of the fastest, and whether they leave a fifth of the memory free: a roomier one
    is preferred up to a loss of 5 %.
    """
    roomy = [plan for plan in plans if plan.device_bytes <= ROOMY * machine.device_bytes]
    fastest, fastest_roomy = (max(map(speed_of, some), default=0.0) for some in (plans, roomy))
    is_roomy = fastest_roomy >= 0.95 * fastest
    some, least = (roomy, fastest_roomy) if is_roomy else (plans, fastest)
    return [plan for plan in some if speed_of(plan) >= 0.99 * least], is_roomy


def all_plans(
    job: Job, machine: Machine, speeds: Speeds, *, zero: str = "auto", zero_file: dict[str, Any] | None = None
) -> list[Plan]:
    """The best plan of each candidate (configuration, activation checkpointing): over its micro batches, the fastest
    that fits, else the smallest. Where checkpointing is open, that of some layers is a candidate too, for micro batches
    that fit with that of all layers and not without.

    Of equally fast ones it is the largest of those that leave a fifth of the memory free, else the smallest.

    Args:
        zero: "auto" for all candidates, else the one of that name, whatever it adds up gradients in.
        zero_file: the content of the DeepSpeed JSON where `zero` is a path.
    """
    best, all_layers = [], job.checkpoint_every or 1
    for name in candidate_names(job, machine) if zero == "auto" else [zero]:
        tried = list(batches(job, machine))
        if zero == "auto" and name in NO_FP32_SUMS:  # none whose gradients should be added up in fp32
            tried = [batch for batch in tried if not wants_fp32_sums(job, batch.accumulation)]
        if not tried:
            continue
        computed_again = [0, all_layers] if job.checkpointing is None else [all_layers * job.checkpointing]
        fitted = partial(_fitted, name, zero_file, job, machine, speeds)
        plans = [[fitted(batch, every) for batch in tried] for every in computed_again]
        if job.checkpointing is None and job.checkpoint_every is None:
            some_layers = []
            for batch, without, with_all in zip(tried, *plans, strict=True):
                if with_all.has_room and not without.has_room:
                    fewer = (fitted(batch, every) for every in CHECKPOINT_EVERY)
                    some_layers.append(next((plan for plan in fewer if plan.has_room), None))
            plans.append([plan for plan in some_layers if plan])
        for candidates in filter(None, plans):
            if fitting := with_room(candidates):
                fastest, is_roomy = fastest_of(fitting, machine)
                best.append(fastest[-1 if is_roomy else 0])
            else:
                best.append(candidates[0])
    return best


def choose(plans: list[Plan], machine: Machine) -> Plan:
    """Return the fastest that fits, with room if one leaves some; where nothing fits, the closest to fitting.

    A gain below 1 % is no reason to leave a simpler one, one below 15 % none for offload or hpZ. Where none that is
    about as fast leaves a fifth of the memory free, it is the smallest within 5 %.
    """
    fitting = with_room(plans)
    if not fitting:
        return min(plans, key=lambda plan: shortage(plan, machine))
    fitting = [plan for plan in fitting if plan.zero != PASSED_OVER] or fitting
    measured = [plan for plan in fitting if not plan.is_unbenchmarked]
    if max(map(speed_of, fitting)) < WORTH_IT * max(map(speed_of, measured), default=0.0):
        fitting = measured
    fastest, is_roomy = fastest_of(fitting, machine)
    if is_roomy:
        return fastest[0]
    close = [plan for plan in fitting if speed_of(plan) >= 0.95 * max(map(speed_of, fitting))]
    return min(close, key=lambda plan: plan.device_bytes)


def _fitted(
    name: str,
    zero_file: dict[str, Any] | None,
    job: Job,
    machine: Machine,
    speeds: Speeds,
    batch: Batch,
    every: int,
) -> Plan:
    """Predict one candidate with the first of its settings that fits (with room, if one does), else with the last and
    leanest.

    Args:
        every: each so manieth layer is computed again; 0 is none.
    """
    plans, shared_by = [], job.sequence_parallel
    is_sharded = name.startswith("3") if zero_file is None else stage(zero_file) == 3
    traced = job.activations_of_shards if is_sharded else job.activations
    tokens = -(-batch.micro * job.seq_len // shared_by)
    offloads = every and job.checkpoint_offload and machine.has_gpu  # without a GPU it lies there anyhow
    activations = traced.terms(tokens, every, offloading_ranks=machine.ranks_per_node if offloads else 0)
    again = traced.checkpointed_layers(every)
    if shared_by > 1:
        if job.attention != "flash":  # each rank has the mask of full rows
            once, whole = traced.once, tokens * shared_by
            of_rows = {"num_bytes": once.num_bytes(whole), "formula": once.formula(whole)}
            activations[0] = dataclasses.replace(activations[0], **of_rows)
        layers = traced.num_layers - len(again) + bool(again)  # of those that are computed again, one at a time
        activations.append(exchange_term(job.size, tokens, shared_by, job.dtype, layers=layers))
    recomputed = len(again) / traced.num_layers
    traffic_bytes = sum(
        share * traffic.num_bytes(tokens)
        for share, traffic in ((1 - recomputed, traced.traffic), (recomputed, traced.traffic_checkpointed))
    )
    for deepspeed_config, changes in (
        (typed, changes)
        for config, changes in settings(name, zero_file, job, machine)
        for typed in gradient_types(config, job, batch.accumulation, decides=zero_file is None)
    ):
        layout = ZeroLayout(
            job.size,
            deepspeed_config | {"gradient_accumulation_steps": batch.accumulation},
            machine,
            dtype=job.dtype,
            optimizer=job.optimizer,
        )
        states = state_terms(layout)
        held = traced.as_gradients_come(activations, late_bytes(layout, states))
        terms = states + load_terms(layout) + held + workspace_terms(machine, threads=2)
        terms += quantised_room(layout, states, activations)
        terms += sample_terms(layout) if job.samples else []
        terms += copied_terms(layout) if job.async_save else []
        plan = Plan(
            zero=name,
            activation_checkpointing=every > 0,
            checkpoint_every=every or 1,
            micro_batch=batch.micro,
            accumulation=batch.accumulation,
            sequence_parallel=shared_by,
            deepspeed_config=deepspeed_config,
            changes=changes,
            activation_bytes=peak_bytes(held, "device"),
            time=step_time(
                layout,
                speeds,
                batch,
                seq_len=job.seq_len,
                recomputed=recomputed,
                traffic_bytes=traffic_bytes,
                offloaded_bytes=sum(traced.layers_input[index].num_bytes(tokens) for index in again) if offloads else 0,
                compiled=job.compiled,
            ),
            ranks_per_node=machine.ranks_per_node,
            has_gpu=machine.has_gpu,
            has_time_estimate=speeds.has_time_estimate,
            **add_up(
                terms,
                machine,
                speeds.outside,
                communicators=layout.communicators + (shared_by > 1),
                stage=layout.stage,
            ),
        )
        plans.append(plan)
        if plan.has_room:
            break
    return next(iter(with_room(plans)), plan)


def shortage(plan: Needs, machine: Machine) -> float:
    """Return how much of the scarcest resource a plan asks for, over what is there."""
    device = (plan.device_bytes + RESERVE_BYTES) / machine.device_bytes if machine.has_gpu else 0.0
    nvme = peak_bytes(plan.terms, "nvme") / machine.nvme_bytes if machine.nvme_bytes else 0.0
    return max(device, nvme, plan.host_bytes / (HOST_SHARE * machine.host_bytes))


def nearest_miss(chosen: Plan, plans: list[Plan], machine: Machine) -> Plan | None:
    """Find the closest to fitting of those that do not fit and would be worth more memory, if there is one."""
    largest = max(gpu.usable_bytes for gpu in GPUS.values())  # a card that somebody sells
    misses = [
        plan
        for plan in plans
        if not plan.fits
        and speed_of(plan) >= WORTH_IT * speed_of(chosen)
        and (not machine.has_gpu or plan.device_bytes + RESERVE_BYTES <= largest)
    ]
    return min(misses, key=lambda plan: shortage(plan, machine), default=None)


def available(machine: Machine) -> str:
    """Say what memory a machine has, to be appended."""
    device = f"{in_gib(machine.device_bytes)} per {machine.place}"
    return f"; available: {device} and {in_gib(machine.host_bytes)} per host"


def reason(
    chosen: Plan,
    plans: list[Plan],
    machine: Machine,
    *,
    zero: str = "auto",
    resumes: bool = False,
    beside_table: bool = False,
) -> str:
    """Say in one sentence why.

    Args:
        beside_table: in at most 25 words, without what a table of plans shows: label, speed, and what the machine has.
    """
    label, have = (f"ZeRO {chosen.zero}", "") if beside_table else (chosen.label, available(machine))
    if not chosen.fits:
        if zero != "auto":
            return f"zero={zero} cannot fit: {label} needs {need(chosen)}{have}."
        if beside_table:
            return f"nothing fits; {label} comes closest, and needs {need(chosen)}."
        return f"nothing fits; the closest to fitting is {label}, which needs {need(chosen)}{have}."
    time, speed = chosen.time, ""
    if chosen.has_time_estimate and not beside_table:
        seconds = f"{time.step_seconds:.3g} s per step"
        if time.range_seconds:
            least, most = time.range_seconds
            seconds += f" ({least:.3g} to {most:.3g})"
        per_gpu = f", {time.tokens_per_second / machine.world_size:,.0f} per GPU" if machine.has_gpu else ""
        speed = f" ({seconds}, {time.tokens_per_second:,.0f} tokens/s{per_gpu} predicted)"
    why = f"{label} is the fastest that fits{speed}"
    fastest = max((plan for plan in plans if plan.fits), key=speed_of)
    gain = speed_of(fastest) / speed_of(chosen)
    if gain > 1.01:
        if fastest.low_headroom and not chosen.low_headroom:
            doubt = "with little headroom"
        elif fastest.zero == PASSED_OVER or (fastest.is_unbenchmarked and not chosen.is_unbenchmarked):
            doubt = "predicted, not benchmarked"
        else:
            doubt = f"in {in_gib(fastest.device_bytes)} instead of {in_gib(chosen.device_bytes)} per {machine.place}"
        why = f"{label} is chosen{speed}; ZeRO {fastest.zero} would gain {gain - 1:.0%}, {doubt}"
    if zero != "auto":
        why = f"zero={zero} ({'as the resumed run began' if resumes else 'requested'}): {label} fits{speed}"
    if chosen.checkpoint_every > 1 and not beside_table:
        alike = (plan for plan in plans if plan.zero == chosen.zero and plan.activation_checkpointing)
        all_layers = next((plan for plan in alike if plan.checkpoint_every == 1), None)
        if all_layers and speed_of(chosen) > speed_of(all_layers):
            why += f", {speed_of(chosen) / speed_of(all_layers) - 1:.0%} faster than with all layers computed again"
    return f"{why}{', with little headroom' * chosen.low_headroom}{have}."


def faster_with(chosen: Plan, plans: list[Plan], machine: Machine) -> str:
    """Say in one sentence what the next better configuration would need; empty where there is none."""
    nearest = nearest_miss(chosen, plans, machine) if chosen.fits else None
    if nearest is None:
        return ""
    gain = speed_of(nearest) / speed_of(chosen)
    return f"With {need(nearest)}, {nearest.label} would fit, {gain:.1f} times as fast."


def need(plan: Plan) -> str:
    """Say what a plan that does not fit asks for."""
    needs = {
        "GPU memory": f"{in_gib(plan.device_bytes + RESERVE_BYTES)} per GPU",
        "host memory": f"{in_gib(plan.host_bytes / HOST_SHARE)} of memory per host",
        "NVMe": f"{in_gib(peak_bytes(plan.terms, 'nvme'))} of NVMe per node",
        "locked memory": "unlimited locked memory (ulimit -l) for NVMe",
    }
    return " and ".join(needs[name] for name in plan.limiting_resource.split(" and "))


def as_dict(plan: Plan) -> dict[str, Any]:
    """For JSON: everything, with the sums that tables show."""
    return dataclasses.asdict(plan) | {"tokens_per_second": plan.time.tokens_per_second}


def checkpointing_flags(plan: Plan, job: Job) -> str:
    """The options of `dsft train` for the plan's activation checkpointing."""
    flags = f"--activation_checkpointing {str(plan.activation_checkpointing).lower()}"
    if plan.checkpoint_every > 1:
        how = {"every_n_layers": plan.checkpoint_every} | ({"offload": True} if job.checkpoint_offload else {})
        flags += f" --activation_checkpointing_kwargs '{json.dumps(how)}'"
    return flags


def write_plan(folder: Path, plan: Plan, job: Job, machine: Machine, *, max_grad_norm: float) -> list[Path]:
    """Write deepspeed.json and accelerate.yaml to `folder`; returns their paths.

    Raises:
        UserError: where one of them exists already, or the folder cannot be written.
    """
    paths = [folder / "deepspeed.json", folder / "accelerate.yaml"]
    existing = [str(path) for path in paths if path.exists()]
    if existing:
        raise UserError([f"--write {folder}: {', '.join(existing)} exists; choose another folder or remove it"])
    zero = plan.deepspeed_config["zero_optimization"]
    resolved = resolve_auto(zero, job.size.hidden_size)
    # Without "auto", but for what only the training's options say (learning rate and the like).
    config = plan.deepspeed_config | {
        "train_micro_batch_size_per_gpu": plan.micro_batch,
        "gradient_accumulation_steps": plan.accumulation,
        "train_batch_size": job.batch(plan.micro_batch, plan.accumulation, machine).sequences,
        "gradient_clipping": max_grad_norm,
        **{
            key: plan.deepspeed_config.get(key, {}) | {"enabled": job.dtype == dtype}
            for key, dtype in HALF_PRECISION.items()
        },
        "zero_optimization": {key: value for key, value in resolved.items() if key in zero},
    }
    launcher = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "DEEPSPEED",
        "deepspeed_config": {
            "deepspeed_config_file": str(paths[0].resolve()),
            "zero3_init_flag": zero.get("stage") == 3,
            "deepspeed_multinode_launcher": "standard",
        },
        "num_machines": machine.nodes,
        "num_processes": machine.world_size,
        "machine_rank": 0,
        "main_process_ip": "127.0.0.1" if machine.nodes == 1 else "10.0.0.1",
        "main_process_port": 29500,
        "main_training_function": "main",
        "use_cpu": not machine.has_gpu,
    }
    head = (
        f"# accelerate launch --config_file {paths[1].resolve()} dsft/train.py --config run.yaml"
        f" {checkpointing_flags(plan, job)}\n"
    )
    if machine.nodes > 1:
        head += "# Set main_process_ip to the first machine's address, and machine_rank to 1, 2 ... on the others.\n"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        paths[0].write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        paths[1].write_text(head + yaml.safe_dump(launcher, sort_keys=False), encoding="utf-8")
    except OSError as error:
        raise UserError([f"--write {folder}: cannot be written ({error.strerror})"]) from error
    return paths


def shortlist(chosen: Plan, plans: list[Plan], machine: Machine) -> list[Plan]:
    """The choice, the next fastest that fit, and the nearest that does not fit and is worth it; where nothing fits, the
    two closest to fitting. In the order of `plans`.
    """
    others = sorted((plan for plan in plans if plan.fits and plan is not chosen), key=speed_of, reverse=True)
    shown = [chosen, *others[: BEST - 1]]
    if chosen.fits:
        shown.append(nearest_miss(chosen, plans, machine))
    else:
        shown += sorted((plan for plan in plans if plan is not chosen), key=lambda plan: shortage(plan, machine))[:1]
    return [plan for plan in plans if any(plan is kept for kept in shown)]


@dataclass(frozen=True, kw_only=True)
class RunCost:
    """What it takes to train on so many tokens."""

    tokens: float
    """Of all epochs together, without padding."""
    epochs: float | None
    """Where an epoch's tokens are known."""
    steps: float
    hours: float
    least_hours: float
    """By the spread of the published steps."""
    most_hours: float
    gpu_hours: float
    dollars: float | None


def run_cost(
    plan: Plan,
    machine: Machine,
    *,
    tokens: float,
    epochs: float | None,
    steps: float,
    dollars: float | None = None,
    step_seconds: float | None = None,
) -> RunCost:
    """Count the hours of so many steps, without loading, evaluation and saving.

    Args:
        dollars: of one GPU for an hour.
        step_seconds: where they are not the plan's, whose sequences are full.
    """
    hours = steps * (step_seconds or plan.time.step_seconds) / 3600
    least, most = TIME_RANGES.get(plan.time.kind, (1.0, 1.0))
    gpu_hours = hours * machine.world_size
    return RunCost(
        tokens=tokens,
        epochs=epochs,
        steps=steps,
        hours=hours,
        least_hours=least * hours,
        most_hours=most * hours,
        gpu_hours=gpu_hours,
        dollars=None if dollars is None else gpu_hours * dollars,
    )


def record(job: str, plan: str, memory: str, seconds: str, speed: str) -> str:
    """The row as Markdown: job, plan, GiB of a GPU, seconds of a step, tokens/s of a GPU, versions, date, and hash."""
    libraries = [f"{name} {version_of(name)}" for name in ("torch", "deepspeed", "transformers")]
    versions = ", ".join([f"dsft {version_of('dsft')}", f"code {code_hash()[:8]}", *libraries])
    cells = [job, plan, memory, seconds, speed, versions, datetime.date.today().isoformat()]
    cells = [" ".join(cell.replace("|", "/").split()) for cell in cells]
    return f"| {' | '.join([*cells, hash_of(cells)])} |"


def hash_of(cells: Sequence[str]) -> str:
    """16 hexadecimal digits of the SHA-256 of the cells before it, with a line feed between them, in UTF-8."""
    return hashlib.sha256("\n".join(cells).encode()).hexdigest()[:16]


def predicted(command: str, plan: Plan, *, ranks: int) -> str:
    """The row of a plan: memory and time with their ranges, as published figures of that kind lie about the plan's."""
    gib = plan.device_bytes / GiB
    memory = f"{gib:.1f} ({gib * (1 - MEMORY_ERROR):.1f} to {gib * (1 + MEMORY_ERROR):.1f})"
    seconds = f"{plan.time.step_seconds:.3g}"
    if plan.time.range_seconds:
        seconds += " ({:.3g} to {:.3g})".format(*plan.time.range_seconds)
    else:
        seconds += f" (no range: {plan.time.kind})"
    if not plan.fits:
        memory += ", does not fit"
    return record(f"`{command}`", plan.label, memory, seconds, f"{plan.time.tokens_per_second / ranks:,.0f}")
