"""Decides which changes a resume accepts or refuses; restores a checkpoint on other ranks, ZeRO stages and offloads.

Refused are changes to which the saved states do not fit: other trained parameters, data or order, sequences per step or
kind of optimizer. Other options have their new values; the log reports those that change a step.

DeepSpeed reads its shards only on the ranks and in the stage that wrote them. Its universal checkpoint needs three
times the fp32 weights on disk, sets all groups' hyperparameters to the first one's in stage 3 (stage3.py,
load_hp_checkpoint_state_from_checkpoint_dir_stage3), and does not support frozen weights there.
"""

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

from dsft.checkpoints.manifest import read_manifest
from dsft.checkpoints.run_folder import FROM_WEIGHTS
from dsft.checkpoints.save import Shapes, trained_shapes
from dsft.errors import UserError
from dsft.models.weight_files import FP32, ZeroShards
from dsft.units import JsonObject

TAKEN = (
    *("learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "max_steps", "num_train_epochs"),
    *("weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm", "label_smoothing_factor"),
)
"""Options of a step that may change on a resume, in the manifest beside the identity."""

TRAINED_ELEMENTS = "trained elements"  # in a run's identity: number of trained elements, tied weights once


def run_identity(
    shapes: Shapes,
    *,
    data: JsonObject,
    seed: int,
    sequences_per_step: int,
    options: JsonObject,
) -> JsonObject:
    """Return the identity of a run, with the names for messages: `shapes` of the trained parameters by name, the
    `data`'s identity, sequences per step over all ranks, and `options` that a resume cannot change.
    """
    names_and_shapes = json.dumps(sorted(shapes.items()))
    return {
        "trained tensors": len(shapes),
        TRAINED_ELEMENTS: sum(map(math.prod, shapes.values())),
        "names and shapes of what is trained": hashlib.sha256(names_and_shapes.encode()).hexdigest()[:16],
        **data,
        "seed of the order": seed,
        "sequences per step": sequences_per_step,
        **options,
    }


def optimizer_kind(name: str) -> str:
    """Return a name for all optimizers with the same states: "lion" for "paged_lion_32bit" and "Lion"."""
    kind = name.lower().removeprefix("paged_").removesuffix("_fused").removesuffix("_torch").removesuffix("_32bit")
    return {"adam": "adamw"}.get(kind, kind.replace("_bnb", ""))


def earlier_values(checkpoint: str, section: str, now: JsonObject) -> JsonObject:
    """Return the values that differ from `now`, as they were when `checkpoint` was saved. One without a manifest is
    another tool's, and is not compared.

    Args:
        section: of the manifest: "run_identity", or "options" for those of TAKEN.
    """
    then = read_manifest(checkpoint).get(section, {})
    differing = [name for name, value in now.items() if then.get(name, value) != value]
    return {name: then[name] for name in differing}


def check_identity(checkpoint: str, now: JsonObject) -> None:
    """Raise UserError with each difference of a run from the one that saved `checkpoint`."""
    earlier = earlier_values(checkpoint, "run_identity", now)
    if earlier:
        changed = "; ".join(f"{name}: {value} then, {now[name]} now" for name, value in earlier.items())
        raise UserError(
            f"resume_from_checkpoint: {checkpoint} belongs to another run ({changed}); use the options of that run, or"
            f" {FROM_WEIGHTS}"
        )


TOPOLOGY = {
    "world_size": "ranks",
    "zero_stage": "ZeRO stage",
    "offload": "offload",
    "sub_group_size": "elements of a sub group",
    "optimizer_in_json": "optimizer in the JSON",
}
"""Facts that the layout of a checkpoint's shards depends on: key in the manifest -> name in messages."""


def topology_change(checkpoint: str, now: JsonObject) -> str:
    """Return the first difference of `now` (keys of TOPOLOGY) from a checkpoint's; empty if DeepSpeed can load it."""
    then = read_manifest(checkpoint)
    if not then:
        return "it has no manifest: it is another tool's"
    if then["zero_stage"] == now["zero_stage"] == 0:
        return ""  # nothing is sharded
    if now["nvme"] or then.get("nvme"):
        return "offload to NVMe"
    for key, name in TOPOLOGY.items():
        if then.get(key, now[key]) != now[key]:
            return f"{name} {then[key]} -> {now[key]}"
    return ""


def restore(engine: Any, scheduler: Any, checkpoint: str) -> None:
    """Set weights, optimizer states and counters of a DeepSpeed engine, fresh from `deepspeed.initialize`. Collective.
    Raises UserError if the checkpoint is of another model or optimizer.

    Args:
        scheduler: of the learning rate; with a DeepSpeed optimizer, `engine.lr_scheduler`.
        checkpoint: of ZeRO stage 1, 2 or 3.
    """
    optimizer = engine.optimizer
    swaps = [getattr(optimizer, name, False) for name in ("swap_optimizer", "params_in_nvme_and_cpu")]
    is_on_nvme = read_manifest(checkpoint).get("nvme") or any(swaps)
    is_in_two_places = hasattr(optimizer, "backup_optimizer")  # an offload's ratio below 1
    if is_on_nvme or is_in_two_places or not hasattr(optimizer, "_optimizer_step"):
        raise UserError(
            f"{checkpoint}: is resumed only in ZeRO stage 1, 2 or 3 with weights and states in GPU or host memory;"
            f" choose such a zero, or {FROM_WEIGHTS}"
        )
    if "muon" in type(optimizer.optimizer).__name__.lower():
        raise UserError(
            f"{checkpoint}: states of Muon are resumed only on the ranks and in the ZeRO stage that wrote them; use"
            f" these, or {FROM_WEIGHTS}"
        )
    shards = ZeroShards(checkpoint)
    trained = trained_shapes(engine.module)
    for name in sorted(trained.keys() | shards.shapes.keys()):
        then = shards.shapes.get(name)
        now = trained.get(name)
        if then != now:
            raise UserError(
                f"{checkpoint}: belongs to another model or adapter ({name} is {list(then) if then else 'not'} there,"
                f" {list(now) if now else 'not'} here); use the model and adapter options of its run"
            )
    is_stage_3 = hasattr(optimizer, "fp32_partitioned_groups_flat")
    if is_stage_3:
        flats = optimizer.fp32_partitioned_groups_flat
        optimizer.checkpoint_event_prologue()  # partitions all parameters
    else:
        flats = optimizer.single_partition_of_fp32_groups
    states = []
    for group, flat in enumerate(flats):  # a step with zero gradients creates the states, which are overwritten
        gradient = flat.grad
        flat.grad = torch.zeros_like(flat) if gradient is None else gradient.zero_()
        optimizer._optimizer_step(group)
        flat.grad = gradient
        states.append(optimizer.optimizer.state[flat])
    state_names = set()
    for state in states:
        for name, value in state.items():
            if torch.is_tensor(value) and value.dim() > 0:
                state_names.add(name)
    if state_names != shards.states:
        raise UserError(
            f"{checkpoint}: its optimizer keeps {', '.join(sorted(shards.states)) or 'nothing'}, this one"
            f" {', '.join(sorted(state_names)) or 'nothing'}; use the optim it was trained with, or"
            f" {FROM_WEIGHTS}"
        )
    for name, parameter in engine.module.named_parameters():
        mapping = getattr(parameter, "_hp_mapping", None)
        if is_stage_3 and parameter.requires_grad:  # each is split into equal parts; the last are padded
            part = parameter.ds_tensor.ds_numel
            start = dist.get_rank(parameter.ds_process_group) * part
            for state in (FP32, *state_names):
                piece = shards.read(name, state, start, start + part)
                padded = functional.pad(piece, (0, part - len(piece)))
                optimizer.set_local_hp_param(padded, parameter, None if state == FP32 else state)
        elif mapping is not None:  # the concatenation is split: parameters outside this rank's part have no mapping
            low = mapping.lp_fragment_address
            high = mapping.hp_fragment_address
            group = mapping.param_group_index
            for state in (FP32, *state_names):
                flat = flats[group].data if state == FP32 else states[group][state]
                piece = shards.read(name, state, low.start, low.start + low.numel)
                flat.narrow(0, high.start, high.numel).copy_(piece)
    # Adam's bias correction continues. Optimizers count by state or by parameter group, in a tensor or a number.
    for counter in (*states, *optimizer.param_groups):
        if "step" in counter and shards.step is not None:
            step = counter["step"]
            counter["step"] = step.fill_(shards.step) if torch.is_tensor(step) else shards.step
    # Recompute the model's weights from the fp32 masters.
    if is_stage_3:
        for group in range(len(flats)):
            optimizer._reassign_or_swap_out_partitioned_parameters(group)
        optimizer.checkpoint_event_epilogue()
    else:
        optimizer.update_lp_params()
    for name in ("global_steps", "global_samples", "skipped_steps"):
        setattr(engine, name, shards.model_state.get(name, getattr(engine, name)))
    engine.micro_steps = engine.global_steps * engine.gradient_accumulation_steps()
    if engine.fp16_enabled() and shards.loss_scaler is not None:
        optimizer.loss_scaler = shards.loss_scaler
    _set_schedule(scheduler, optimizer, shards, checkpoint)


def _set_schedule(scheduler: Any, optimizer: Any, shards: ZeroShards, checkpoint: str) -> None:
    """Set the learning rate schedule: DeepSpeed saves its own scheduler's, the Trainer writes a file."""
    from transformers.trainer import SCHEDULER_NAME  # imports datasets and pandas, which a plan does not need

    then = shards.model_state.get("lr_scheduler")
    now = scheduler.state_dict()
    if not then:
        then = torch.load(Path(checkpoint) / SCHEDULER_NAME, weights_only=True)
    if then.keys() != now.keys():
        raise UserError(
            f"{checkpoint}: has another learning-rate schedule; use the lr_scheduler_type, or the"
            " scheduler in the DeepSpeed JSON, of its run"
        )
    if "_last_lr" not in then:  # DeepSpeed's scheduler, which computes rates and betas from its step
        scheduler.load_state_dict(then)
        scheduler.step(scheduler.last_batch_iteration)
        return
    num_groups = len(optimizer.param_groups)
    for key in ("_last_lr", "base_lrs"):  # a callback may have changed them
        if key in then and len(then[key]) != num_groups:  # groups without parameters: the others share a rate
            then[key] = then[key][:1] * num_groups
    if "lr_lambdas" in now:
        then["lr_lambdas"] = now["lr_lambdas"]
    scheduler.load_state_dict(then)
    for group, rate in zip(optimizer.param_groups, then["_last_lr"], strict=True):
        group["lr"] = rate
