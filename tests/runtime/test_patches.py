"""Laws of what dsft replaces in libraries: it is gone after its `with`."""

import pytest
from peft.tuners.trainable_tokens.layer import TrainableTokensLayer
from transformers import LlamaConfig
from transformers.integrations import deepspeed as transformers_deepspeed

from dsft.models.measure import empty_model
from dsft.runtime import replaced


def test_after_its_with_a_patch_is_gone_also_after_an_error():
    original = TrainableTokensLayer._collect_token_weights
    with pytest.raises(KeyError), replaced("token_rows", len):
        assert TrainableTokensLayer._collect_token_weights is len
        raise KeyError
    assert TrainableTokensLayer._collect_token_weights is original


def test_a_model_of_one_rank_is_whole_while_a_training_shards():
    config = transformers_deepspeed.HfDeepSpeedConfig({"zero_optimization": {"stage": 3}})
    try:
        model = empty_model(LlamaConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=32))
        assert all(weight.dim() and not hasattr(weight, "ds_id") for weight in model.parameters())
        assert transformers_deepspeed.is_deepspeed_zero3_enabled()
    finally:
        transformers_deepspeed.unset_hf_deepspeed_config()
        del config
