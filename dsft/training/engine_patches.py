"""Replaces what DeepSpeed's engine does wrong or too much of in a training; the reasons are in runtime/patches.py."""

import functools
import importlib
import itertools
from collections.abc import Callable
from typing import Any

import torch
from deepspeed import DeepSpeedEngine
from deepspeed.accelerator import get_accelerator
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

    def clip() -> None:  # every rank has the same gradients
        engine._global_grad_norm = clip_grad_norm_(parameters, engine.gradient_clipping())

    def scaled(backward: Callable[..., Any], loss: torch.Tensor, **options: Any) -> Any:
        return backward(loss.float() * optimizer.loss_scale_config.cur_scale, **options)

    patches.replace("quick_zero_grad", lambda _: zero_grad, on=engine)
    patches.replace(
        "quick_train",
        lambda train: lambda mode=True: train(mode) if engine.module.training != mode else None,
        on=engine,
    )
    if engine.zero_optimization_stage() == 0:
        if is_alone:
            patches.replace("one_rank_reduces_none", lambda _: False, on=engine)
        if isinstance(optimizer, FP16_UnfusedOptimizer | FP16_Optimizer):
            if optimizer.loss_scale_config.use_grad_scaling:
                patches.replace("fp16_loss_scale", lambda backward: functools.partial(scaled, backward), on=engine)
            patch_16_bit_optimizer(optimizer, resumes=resumes)
        patches.replace("kept_norm", lambda _: clip, on=engine)
    elif isinstance(optimizer, DeepSpeedZeroOptimizer) and not optimizer.cpu_offload:
        if is_alone and patches.fits("one_rank_divides_none"):
            optimizer.reduce_scatter = False  # else it is not asked for what is replaced here
            patches.replace("one_rank_divides_none", lambda _: lambda gradients, dtype: gradients, on=optimizer)
        if optimizer.overlap_comm and optimizer.contiguous_gradients and not optimizer.use_multi_rank_bucket_allreduce:
            replacement = functools.partial(reduce_unwaited, optimizer)
            patches.replace("reduces_unwaited", lambda reduce: functools.partial(replacement, reduce), on=optimizer)
        if optimizer.compute_grad_norm:  # the norm of infinite gradients skips the step as well
            patches.replace("no_overflow_search", lambda _: lambda partition_gradients: None, on=optimizer)


def reduce_unwaited(
    optimizer: DeepSpeedZeroOptimizer,
    reduce: Callable[..., None],
    gradients: list[torch.Tensor],
    *args: Any,
    **options: Any,
) -> None:
    """Reduce gradients to one rank on the stream that `average_tensor` has entered, which waits for what computes them.
    DeepSpeed's own would have the host wait for the device first, to free gradients that are not contiguous.
    """
    optimizer.overlap_comm = False
    try:
        reduce(gradients, *args, **options)
    finally:
        optimizer.overlap_comm = True
    if not get_accelerator().resolves_data_dependency():
        for gradient in gradients:  # in memory of another stream, which must not reuse it before
            gradient.record_stream(get_accelerator().current_stream())


def patch_16_bit_optimizer(optimizer: FP16_UnfusedOptimizer | FP16_Optimizer, *, resumes: bool) -> None:
    """Patch an optimizer of ZeRO 0 over weights in bf16 or fp16: its states are new, a step divides by the scale that
    its loss had and the next one by the doubled scale, and the norm that it keeps is without the scale, as that of
    DeepSpeed's other optimizers.
    """
    config, grown = optimizer.loss_scale_config, []
    if not resumes and patches.fits("first_step_of_zeros"):
        # DeepSpeed has made the states by a step with zero gradients, which decays the float32 copies of weights.
        optimizer.optimizer.state.clear()
        if isinstance(optimizer, FP16_Optimizer):
            copies = zip(optimizer.fp32_groups_flat, optimizer.fp16_groups_flat, strict=True)
        else:
            chain = itertools.chain.from_iterable
            copies = zip(chain(optimizer.fp32_groups), chain(optimizer.fp16_groups), strict=True)
        with torch.no_grad():
            for copy, weight in copies:
                copy.copy_(weight)

    def update_later(update: Callable[[bool], None], skip: bool) -> None:
        used = config.cur_scale
        update(skip)
        if not skip:
            grown.append(config.cur_scale)
            config.cur_scale = used

    def step_and_grow(step: Callable[..., bool], *args: Any, **options: Any) -> bool:
        overflow = step(*args, **options)
        while grown:
            config.cur_scale = grown.pop()
        return overflow

    def unscale_and_keep(unscale: Callable[..., Any], total_norm: torch.Tensor, apply_scale: bool = True) -> Any:
        optimizer._global_grad_norm = total_norm / optimizer.loss_scale_config.cur_scale
        return unscale(total_norm, apply_scale=apply_scale)

    patches.replace("fp16_scale_update", lambda update: functools.partial(update_later, update), on=optimizer)
    patches.replace("fp16_scaled_step", lambda step: functools.partial(step_and_grow, step), on=optimizer)
    if isinstance(optimizer, FP16_UnfusedOptimizer):
        patches.replace("fp16_norm", lambda unscale: functools.partial(unscale_and_keep, unscale), on=optimizer)
