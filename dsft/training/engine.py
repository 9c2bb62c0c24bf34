"""DeepSpeed's engine in a training: the first states of ZeRO 0 (see runtime/patches.py), and answers of a model that
ZeRO-3 shards.
"""

import contextlib
import itertools
from collections import OrderedDict
from collections.abc import Iterator, Sequence

import deepspeed
import torch
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from dsft.data.training_data import Prompt
from dsft.job import beat as watchdog
from dsft.models.tokenizer import generate
from dsft.runtime import distributed, patches

MAX_NEW_TOKENS = 64
"""Of a sample, decoded greedily."""


def take_back_first_step(optimizer: object) -> None:
    """Reset the states and fp32 weights of ZeRO 0's half-precision optimizer: DeepSpeed has initialised them by a step
    with zero gradients, which decays the weights and which Adam counts.
    """
    is_zero_0 = isinstance(optimizer, FP16_UnfusedOptimizer | FP16_Optimizer)
    if not is_zero_0 or not patches.is_applied("first_step_of_zeros"):
        return
    optimizer.optimizer.state.clear()
    if isinstance(optimizer, FP16_Optimizer):
        copies = zip(optimizer.fp32_groups_flat, optimizer.fp16_groups_flat, strict=True)
    else:
        chain = itertools.chain.from_iterable
        copies = zip(chain(optimizer.fp32_groups), chain(optimizer.fp16_groups), strict=True)
    with torch.no_grad():
        for copy, weight in copies:
            copy.copy_(weight)


def answers_to(prompts: Sequence[Prompt], model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return rank 0's answer to each prompt, on every rank. Collective."""
    was_training = model.training
    model.eval()
    answers = []
    with gathered(model):
        if distributed.rank() == 0:
            for prompt in prompts:
                watchdog.heartbeat()
                ids = generate(model, tokenizer, prompt.ids, max_new_tokens=MAX_NEW_TOKENS)
                answers.append(tokenizer.decode(ids, skip_special_tokens=True))
    model.train(was_training)
    distributed.wait_long("samples are generated")
    return distributed.from_all(answers)


@contextlib.contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """Gather all weights that ZeRO-3 shards on every rank inside a `with`. Collective.

    DeepSpeed's hooks, which gather and release modules in step with the other ranks, are removed meanwhile.
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
            module._forward_pre_hooks = before
            module._forward_hooks = after
