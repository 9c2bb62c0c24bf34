"""Replaces what DeepSpeed's engine does wrong or too much of in a training; why stands in runtime/patches.py."""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from deepspeed import DeepSpeedEngine
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch.nn.utils import clip_grad_norm_

from dsft.runtime import patches


def import_muon(deepspeed_config: dict[str, Any]) -> None:
    """Import DeepSpeed's Muon without compiling its kernels, where another optimizer trains."""
    if str((deepspeed_config.get("optimizer") or {}).get("type")).lower() != "muon":
        with patches.replaced("muon_kernels", lambda _: lambda: lambda function: function):
            importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")


def patch_engine(engine: DeepSpeedEngine, *, resumes: bool) -> None:
    """Patch an engine that is about to train.

    Args:
        resumes: its optimizer has the states of a checkpoint.

    Raises:
        UserError: where the installed DeepSpeed differs from that of a patch so that results could be wrong.
    """
    optimizer, is_alone = engine.optimizer, engine.dp_world_size == 1
    parameters = list(engine.module.parameters())

    def zero_grad() -> None:
        for parameter in parameters:
            parameter.grad = None

    def training(train: Callable[[bool], None]) -> Callable[..., None]:
        return lambda mode=True: train(mode) if engine.module.training != mode else None

    replacements: list[tuple[str, Any, Callable[[Any], Any]]] = [
        ("quick_zero_grad", engine, lambda _: zero_grad),
        ("quick_train", engine, training),
    ]
    if engine.zero_optimization_stage() == 0:
        if is_alone:
            replacements.append(("one_rank_reduces_none", engine, lambda _: False))
        if isinstance(optimizer, FP16_UnfusedOptimizer | FP16_Optimizer):
            if not resumes and patches.fits("first_step_of_zeros"):
                undo_first_step(optimizer)
            if optimizer.loss_scale_config.use_grad_scaling:
                replacements.append(("fp16_loss_scale", engine, functools.partial(scaling_loss, optimizer)))
            replacements += later_growth(optimizer)
        if isinstance(optimizer, FP16_UnfusedOptimizer):
            replacements.append(("fp16_norm", optimizer, functools.partial(keeping_norm, optimizer)))

        def clip() -> None:  # every rank has the same gradients
            engine._global_grad_norm = clip_grad_norm_(parameters, engine.gradient_clipping())

        replacements.append(("kept_norm", engine, lambda _: clip))
    elif isinstance(optimizer, DeepSpeedZeroOptimizer) and not optimizer.cpu_offload:
        replacements += fewer_reads(optimizer, is_alone=is_alone)
    for name, owner, by in replacements:
        patches.replace(name, by, on=owner)


def undo_first_step(optimizer: FP16_UnfusedOptimizer | FP16_Optimizer) -> None:
    """Undo the step with zero gradients by which DeepSpeed has made optimizer states."""
    optimizer.optimizer.state.clear()
    with torch.no_grad():
        if isinstance(optimizer, FP16_Optimizer):
            for master, weights in zip(optimizer.fp32_groups_flat, optimizer.fp16_groups_flat, strict=True):
                master.copy_(weights)
            return
        for masters, weights in zip(optimizer.fp32_groups, optimizer.fp16_groups, strict=True):
            for master, weight in zip(masters, weights, strict=True):
                master.copy_(weight)


def scaling_loss(optimizer: FP16_UnfusedOptimizer | FP16_Optimizer, backward: Callable[..., Any]) -> Callable[..., Any]:
    """A `backward` of the loss times its scale."""

    def backward_of_scaled(loss: torch.Tensor, **options: Any) -> torch.Tensor:
        return backward(loss.float() * optimizer.loss_scale_config.cur_scale, **options)

    return backward_of_scaled


def later_growth(
    optimizer: FP16_UnfusedOptimizer | FP16_Optimizer,
) -> list[tuple[str, Any, Callable[[Any], Any]]]:
    """Replacements that let a step divide by the scale that its loss had, and the next one by the doubled scale."""
    config, grown = optimizer.loss_scale_config, []

    def updating_later(update: Callable[[bool], None]) -> Callable[[bool], None]:
        def update_later(skip: bool) -> None:
            used = config.cur_scale
            update(skip)
            if not skip:
                grown.append(config.cur_scale)
                config.cur_scale = used

        return update_later

    def growing(step: Callable[..., bool]) -> Callable[..., bool]:
        def step_and_grow(*args: Any, **options: Any) -> bool:
            overflow = step(*args, **options)
            while grown:
                config.cur_scale = grown.pop()
            return overflow

        return step_and_grow

    return [("fp16_scale_update", optimizer, updating_later), ("fp16_scaled_step", optimizer, growing)]


def keeping_norm(optimizer: FP16_UnfusedOptimizer, unscale: Callable[..., Any]) -> Callable[..., Any]:
    """An `unscale_and_clip_grads` that keeps the norm without the loss's scale, as DeepSpeed's other optimizers do."""

    def unscale_and_keep(total_norm: torch.Tensor, apply_scale: bool = True) -> torch.Tensor | float:
        optimizer._global_grad_norm = total_norm / optimizer.loss_scale_config.cur_scale
        return unscale(total_norm, apply_scale=apply_scale)

    return unscale_and_keep


def fewer_reads(optimizer: DeepSpeedZeroOptimizer, *, is_alone: bool) -> list[tuple[str, Any, Callable[[Any], Any]]]:
    """Replacements by which ZeRO 1 and 2 read gradients less often."""
    replacements: list[tuple[str, Any, Callable[[Any], Any]]] = []
    if is_alone and patches.fits("one_rank_divides_none"):
        optimizer.reduce_scatter = False  # else it is not asked for what is replaced here
        replacements.append(("one_rank_divides_none", optimizer, lambda _: lambda gradients, dtype: gradients))
    if optimizer.compute_grad_norm:  # the norm of infinite gradients skips the step as well
        replacements.append(("no_overflow_search", optimizer, lambda _: lambda partition_gradients: None))
    return replacements
