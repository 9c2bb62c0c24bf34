"""Feed-forwards of some tokens at a time: the loss and gradients of all at once."""

import pytest
import torch
import transformers
from conftest import grid
from peft import LoraConfig
from tiny import ARCHITECTURES, COMMON

from dsft.models.feed_forward import tile_feed_forwards
from dsft.models.size import empty_model, feed_forwards
from dsft.models.trials import small_model, trains_the_same

ADAPTERS = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear")
BLOOM = (transformers.BloomConfig, {"hidden_size": 64, "n_layer": 2, "n_head": 4})  # passes a residual along
ALL = {**ARCHITECTURES, "bloom": BLOOM}
DENSE = [name for name in ALL if name != "mixtral"]


@pytest.mark.parametrize("adapters", [None, ADAPTERS])
@pytest.mark.parametrize("architecture", grid(DENSE, ["llama", "gpt2", "qwen2_moe", "bloom"]))
def test_tiles_have_the_loss_and_gradients_of_all_tokens(architecture, adapters):
    cls, values = ALL[architecture]
    assert trains_the_same(tile_feed_forwards, cls(**values), adapters=adapters)


def test_a_tile_has_an_eighth_of_the_tokens():
    cls, values = ALL["llama"]
    model, widths = small_model(cls(**values)), []
    assert tile_feed_forwards(model)
    model.model.layers[0].mlp.up_proj.register_forward_hook(lambda module, args, out: widths.append(out.shape[1]))
    model(input_ids=torch.ones(2, 20, dtype=torch.long)).logits.sum().backward()
    assert widths == 16 * [5]  # of 40 tokens, in the forward and once more in the backward


def test_routed_experts_and_layers_without_a_feed_forward_of_their_own_have_no_tiles():
    of_experts = transformers.GptOssConfig(**(COMMON | {"num_local_experts": 4, "head_dim": 8}))
    for config in (ALL["mixtral"][0](**ALL["mixtral"][1]), transformers.OPTConfig(**COMMON), of_experts):
        assert feed_forwards(empty_model(config)) == []
        assert not trains_the_same(tile_feed_forwards, config)
    cls, values = ALL["qwen2_moe"]
    assert len(feed_forwards(empty_model(cls(**values)))) == 2  # the shared expert of each layer
