"""DeepSpeed's engine in a training: what dsft replaces in it (the reasons are in runtime/patches.py), the averaged
weights of a schedule-free optimizer, and answers of a model that ZeRO-3 shards.
"""

import contextlib
import functools
import importlib
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import deepspeed
import torch
from deepspeed import DeepSpeedEngine
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import nn
from torch.nn.utils import clip_grad_norm_
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from dsft.data.training_data import Prompt
from dsft.job import beat as watchdog
from dsft.models.tokenizer import generate
from dsft.runtime import distributed, patches

MAX_NEW_TOKENS = 64
"""Of an answer to a prompt, always with the likeliest token."""


def import_muon(deepspeed_config: dict[str, Any]) -> None:
    """Import DeepSpeed's Muon without compiling its kernels, where another optimizer trains."""
    if str((deepspeed_config.get("optimizer") or {}).get("type")).lower() != "muon":
        with patches.replaced("muon_kernels", lambda _: lambda: lambda function: function):
            importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")


def patch_engine(engine: DeepSpeedEngine, *, resumes: bool) -> None:
    """Patch an engine that is about to train; `resumes`: its optimizer has the states of a checkpoint.
    Raises UserError where the installed DeepSpeed differs from a patch's so that results could be wrong.
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

    def reduce_unwaited(reduce: Callable[..., None], gradients: list[torch.Tensor], *args: Any, **options: Any) -> None:
        # To one rank, on the stream that `average_tensor` has entered, which waits for what computes the gradients.
        # DeepSpeed's own would have the host wait for the device first, to free those that are not contiguous.
        optimizer.overlap_comm = False
        try:
            reduce(gradients, *args, **options)
        finally:
            optimizer.overlap_comm = True
        if not get_accelerator().resolves_data_dependency():
            for gradient in gradients:  # in memory of another stream, which must not reuse it before
                gradient.record_stream(get_accelerator().current_stream())

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
            patches.replace("reduces_unwaited", lambda reduce: functools.partial(reduce_unwaited, reduce), on=optimizer)
        if optimizer.compute_grad_norm:  # the norm of infinite gradients skips the step as well
            patches.replace("no_overflow_search", lambda _: lambda partition_gradients: None, on=optimizer)
    elif hasattr(optimizer, "backup_optimizer"):
        patches.replace(
            "partial_offload", lambda step: functools.partial(step_with_both, optimizer, step), on=optimizer
        )


def step_with_both(optimizer: DeepSpeedZeroOptimizer_Stage3, step: Callable[[int], None], group: int) -> None:
    """Update a sub group of ZeRO-3 whose optimizer is offloaded in part. The Adam of those that stay on the GPU takes
    the schedule of the offloaded one, and keeps its states with that one's, which checkpoints hold.
    """
    on_gpu, offloaded = optimizer.backup_optimizer, optimizer.optimizer
    on_gpu.state = offloaded.state
    for settings, scheduled in zip(on_gpu.param_groups, offloaded.param_groups, strict=True):
        settings.update({name: scheduled[name] for name in ("lr", "betas", "eps", "weight_decay")})
    if state := offloaded.state.get(optimizer.fp32_partitioned_groups_flat[group]):
        # A checkpoint's may be of the other kind: torch's Adam counts in a tensor, CPUAdam in a number.
        is_offloaded = optimizer.subgroup_to_device[group] == "cpu"
        state["step"] = int(state["step"]) if is_offloaded else torch.tensor(float(state["step"]))
    step(group)


def patch_16_bit_optimizer(optimizer: FP16_UnfusedOptimizer | FP16_Optimizer, *, resumes: bool) -> None:
    """Patch ZeRO 0's optimizer over 16-bit weights: its states are new, each step divides by the scale that its loss
    had (the next by the doubled one), and the norm that it keeps is without the scale, as in other stages.
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


@contextlib.contextmanager
def averaged_weights(model: DeepSpeedEngine | nn.Module) -> Iterator[None]:
    """Evaluate or save a schedule-free optimizer's average inside a `with`; others change nothing. Collective."""
    is_swapped = swap_in(model, "eval")
    yield
    if is_swapped:  # after an error ranks may be apart, and to gather the weights is collective
        swap_in(model, "train")


def swap_in(model: DeepSpeedEngine | nn.Module, point: Literal["train", "eval"]) -> bool:
    """Put a schedule-free optimizer's weights to one of its points; return whether they were elsewhere. Collective."""
    optimizer = model.optimizer if isinstance(model, DeepSpeedEngine) else None
    averaging = optimizer.optimizer if isinstance(optimizer, DeepSpeedZeroOptimizer) else optimizer
    if averaging is None or averaging.param_groups[0].get("train_mode", point == "train") == (point == "train"):
        return False
    getattr(averaging, point)()
    if averaging is not optimizer:  # it has changed this rank's share in float32, not what computes
        optimizer.update_lp_params()
    return True


class Heartbeats(BaseStreamer):
    """Tells the watchdog of each token."""

    def put(self, value: object = None) -> None:
        watchdog.heartbeat()

    end = put


def answers_to(prompts: Sequence[Prompt], model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return an answer to each prompt, the same on every rank; each is made by one rank alone. Collective."""
    rank, world = distributed.rank(), distributed.world_size()
    was_training = model.training
    model.eval()
    with gathered(model):
        # No collective in here: ranks stop at different tokens.
        answers = [
            generate(model, tokenizer, prompt.ids, max_new_tokens=MAX_NEW_TOKENS, streamer=Heartbeats())
            for prompt in prompts[rank::world]
        ]
    model.train(was_training)
    distributed.wait_long("samples are generated")
    every = distributed.from_all([answers])
    return [every[number % world][number // world] for number in range(len(prompts))]


@contextlib.contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """Hold all weights on every rank inside a `with`, where ZeRO-3 shards them. Collective.

    Without DeepSpeed's hooks, which gather and release modules in step with the other ranks.
    """
    if not is_deepspeed_zero3_enabled():
        yield
        return
    modules = list(model.modules())
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        hooks = [(module._forward_pre_hooks, module._forward_hooks) for module in modules]
        for module in modules:
            module._forward_pre_hooks, module._forward_hooks = OrderedDict(), OrderedDict()
        yield
        for module, (before, after) in zip(modules, hooks, strict=True):
            module._forward_pre_hooks, module._forward_hooks = before, after
