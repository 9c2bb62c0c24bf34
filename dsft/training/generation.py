"""What the model answers to some prompts while it is trained, always with the likeliest token."""

import contextlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence

import deepspeed
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from dsft.data.training_data import Prompt
from dsft.models.tokenizer import generate
from dsft.runtime import distributed
from dsft.watchdog import client as watchdog

MAX_NEW_TOKENS = 64


class Heartbeats(BaseStreamer):
    """Tells the watchdog of each token."""

    def put(self, value: object) -> None:
        watchdog.heartbeat()

    def end(self) -> None:
        watchdog.heartbeat()


def answers_to(prompts: Sequence[Prompt], model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return an answer to each prompt, the same on every rank: the ranks take turns, and each answer is made by one
    rank alone. Collective.
    """
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

    Without the hooks of DeepSpeed, each of which would gather a module's weights in step with the other ranks, release
    them, and note in which order modules are used.
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
