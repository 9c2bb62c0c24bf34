"""What DeepSpeed's engine leaves out, or does too much of."""

import contextlib
import functools
import importlib
from collections.abc import Iterator
from typing import Any, Literal

import torch
from deepspeed import DeepSpeedEngine
from deepspeed.runtime import compiler
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch.nn.utils import clip_grad_norm_


def import_muon(deepspeed_config: dict[str, Any]) -> None:
    """Import DeepSpeed's Muon without compiling its kernels, where another optimizer trains: DeepSpeed asks whether it
    is Muon (`is_zero_supported_optimizer`), and to compile imports Inductor, 1 s of CPU time on each rank.
    """
    if str((deepspeed_config.get("optimizer") or {}).get("type")).lower() == "muon":
        return
    compile_kernels = compiler.compile
    compiler.compile = lambda: lambda function: function
    try:
        importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
    finally:
        compiler.compile = compile_kernels


def mend(engine: DeepSpeedEngine, *, resumes: bool) -> None:
    """Mend an engine that is about to train.

    Args:
        resumes: its optimizer has the states of a checkpoint.
    """
    parameters = list(engine.module.parameters())
    engine.zero_grad = functools.partial(_forget_gradients, parameters)
    engine.train = functools.partial(_train, engine)
    if engine.zero_optimization_stage() == 0:
        if engine.dp_world_size == 1:
            engine.enable_backward_allreduce = False  # it would copy all gradients, and copy them back
        if not resumes and isinstance(engine.optimizer, FP16_UnfusedOptimizer | FP16_Optimizer):
            _forget_first_step(engine.optimizer)
        if isinstance(engine.optimizer, FP16_UnfusedOptimizer | FP16_Optimizer):
            _scale_loss(engine)
            _grow_scale_after_step(engine.optimizer)
        if isinstance(engine.optimizer, FP16_UnfusedOptimizer):
            _keep_norm_without_scale(engine.optimizer)
        engine.clip_fp32_gradients = functools.partial(_clip, engine, parameters)
    elif isinstance(engine.optimizer, DeepSpeedZeroOptimizer) and not engine.optimizer.cpu_offload:
        _spare_gradients(engine.optimizer, alone=engine.dp_world_size == 1)


@contextlib.contextmanager
def averaged_weights(model: DeepSpeedEngine | torch.nn.Module) -> Iterator[None]:
    """Evaluate or save inside a `with` the average that a schedule-free optimizer makes, and train on from the point
    where gradients are taken. Collective. Nothing changes under other optimizers, and where it is the average already.
    """
    is_swapped = swap_in(model, "eval")
    yield
    if is_swapped:  # after an error ranks may be apart, and to gather the weights is collective
        swap_in(model, "train")


def swap_in(model: DeepSpeedEngine | torch.nn.Module, point: Literal["train", "eval"]) -> bool:
    """Put the weights to one of a schedule-free optimizer's two points; returns whether they were at the other.
    Collective.
    """
    optimizer = model.optimizer if isinstance(model, DeepSpeedEngine) else None
    averaging = optimizer.optimizer if isinstance(optimizer, DeepSpeedZeroOptimizer) else optimizer
    if averaging is None or averaging.param_groups[0].get("train_mode", point == "train") == (point == "train"):
        return False
    getattr(averaging, point)()
    if averaging is not optimizer:  # it has changed this rank's share in float32, not what computes
        optimizer.update_lp_params()
    return True


def _forget_gradients(parameters: list[torch.nn.Parameter]) -> None:
    """As the engine does, without a walk through all modules."""
    for parameter in parameters:
        parameter.grad = None


def _train(engine: DeepSpeedEngine, mode: bool = True) -> None:
    """As the engine does, where the mode is another: the Trainer asks for each micro batch."""
    if engine.module.training != mode:
        DeepSpeedEngine.train(engine, mode)


def _forget_first_step(optimizer: FP16_UnfusedOptimizer | FP16_Optimizer) -> None:
    """Undo the step with zero gradients by which DeepSpeed makes optimizer states in bf16 and fp16: it decays the
    weights, and Adam counts it (`initialize_optimizer_states`).
    """
    optimizer.optimizer.state.clear()
    with torch.no_grad():
        if isinstance(optimizer, FP16_Optimizer):
            for master, weights in zip(optimizer.fp32_groups_flat, optimizer.fp16_groups_flat, strict=True):
                master.copy_(weights)
            return
        for masters, weights in zip(optimizer.fp32_groups, optimizer.fp16_groups, strict=True):
            for master, weight in zip(masters, weights, strict=True):
                master.copy_(weight)


def _scale_loss(engine: DeepSpeedEngine) -> None:
    """Scale the loss in fp16: `backward` scales it under ZeRO 1 to 3 alone, while the step divides by the scale always,
    so that gradients are 65,536 times too small.
    """
    if not engine.optimizer.loss_scale_config.use_grad_scaling:
        return
    backward = engine.backward

    def backward_of_scaled(loss: torch.Tensor, **options: Any) -> torch.Tensor:
        return backward(loss.float() * engine.optimizer.loss_scale_config.cur_scale, **options)

    engine.backward = backward_of_scaled


def _grow_scale_after_step(optimizer: FP16_UnfusedOptimizer | FP16_Optimizer) -> None:
    """Let a step divide by the scale that its loss had: DeepSpeed doubles it before, now and then, and halves that
    step's gradients.
    """
    config, update, step, grown = optimizer.loss_scale_config, optimizer._update_scale, optimizer.step, []

    def update_later(skip: bool) -> None:
        used = config.cur_scale
        update(skip)
        if not skip:
            grown.append(config.cur_scale)
            config.cur_scale = used

    def step_and_grow(*args: Any, **options: Any) -> bool:
        overflow = step(*args, **options)
        while grown:
            config.cur_scale = grown.pop()
        return overflow

    optimizer._update_scale, optimizer.step = update_later, step_and_grow


def _keep_norm_without_scale(optimizer: FP16_UnfusedOptimizer) -> None:
    """Keep the gradients' norm without the loss's scale, as DeepSpeed's other optimizers do."""
    unscale = optimizer.unscale_and_clip_grads

    def unscale_and_keep(total_norm: torch.Tensor, apply_scale: bool = True) -> torch.Tensor | float:
        optimizer._global_grad_norm = total_norm / optimizer.loss_scale_config.cur_scale
        return unscale(total_norm, apply_scale=apply_scale)

    optimizer.unscale_and_clip_grads = unscale_and_keep


def _spare_gradients(optimizer: DeepSpeedZeroOptimizer, *, alone: bool) -> None:
    """Read gradients of ZeRO 1 and 2 less often: a single rank reduces none, and none are searched for infinite numbers
    before their norm, which leaves out the step as well (`step`), is computed.
    """
    if alone:
        optimizer.reduce_scatter = False
        optimizer.gradient_reduction_w_predivide = lambda gradients, communication_dtype: gradients
    if optimizer.compute_grad_norm:
        optimizer.check_overflow = lambda partition_gradients: None


def _clip(engine: DeepSpeedEngine, parameters: list[torch.nn.Parameter]) -> None:
    """Clip fp32 gradients, and keep their norm for `get_global_grad_norm`: DeepSpeed forgets it, and adds it up
    parameter by parameter. Every rank has the same gradients.
    """
    engine._global_grad_norm = clip_grad_norm_(parameters, engine.gradient_clipping())
