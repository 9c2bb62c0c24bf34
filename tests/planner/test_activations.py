"""Bytes that autograd keeps, of fake tensors beside real ones."""

import pytest
import torch
from peft import LoraConfig
from transformers import AutoConfig, AutoModelForCausalLM

from dsft.config.options import TrainConfig
from dsft.models.measure import empty_model, model_size, usual_config
from dsft.planner.activations import Activations, measure_activations
from dsft.planner.memory import Job


def measured_of(config, **changes) -> Activations:
    size = model_size(empty_model(config), TrainConfig(), adapters=changes.get("adapters"))
    return measure_activations(Job(size=size, model_config=config, **changes))


WIDTHS = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "pad_token_id": 0,
}
BATCH, TIME = 2, 32


def saved_bytes(config, *, layers: int) -> int:
    """What a forward of a real model on a CPU keeps, with eager attention."""
    config.num_hidden_layers = layers
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").train()
    parameters = {p.untyped_storage().data_ptr() for p in [*model.parameters(), *model.buffers()]}
    saved = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            saved[storage.data_ptr()] = storage
        return tensor

    ids = torch.zeros(BATCH, TIME, dtype=torch.long)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(input_ids=ids, use_cache=False, attention_mask=torch.ones_like(ids))
    return sum(storage.nbytes() for storage in saved.values())


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma", "olmo2", "phi3"])
def test_a_layer_keeps_of_fake_tensors_what_it_keeps_of_real_ones(name):
    config = AutoConfig.for_model(name, **WIDTHS)
    measured = measured_of(config, dtype="float32", seq_len=TIME, attention="eager")
    of_one_layer = saved_bytes(config, layers=3) - saved_bytes(config, layers=2)
    assert measured.layers[1] * BATCH * TIME == pytest.approx(of_one_layer, rel=0.01)


def test_layers_that_differ_are_measured_apart():
    config = AutoConfig.for_model("gemma3_text", **WIDTHS)
    measured = measured_of(config, dtype="bfloat16", seq_len=TIME, attention="sdpa")
    assert len(measured.layers) == 4


def test_llama_8b_keeps_what_counting_by_hand_gives():
    config = usual_config("meta-llama/Llama-3.1-8B")
    hidden, ffn, keys = 4096, 14336, 1024
    measured = measured_of(config, dtype="bfloat16", seq_len=4096, attention="flash")
    # two norms: input in fp32, its root, the result before its weight, and the result; queries, keys, values, result
    # of attention with its sums, gate, up, the activation and its product
    norms = 2 * (4 * hidden + 4 + 2 * hidden + 2 * hidden)
    attention = 2 * (2 * hidden + 2 * keys) + 4 * 32
    by_hand = norms + attention + 4 * 2 * ffn
    assert measured.layers[0] == pytest.approx(by_hand, rel=0.03)


def test_zero_3_keeps_the_inputs_of_frozen_layers_and_liger_keeps_less():
    config = AutoConfig.for_model("llama", **WIDTHS)
    adapters = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")

    def measured(**changes):
        return measured_of(config, dtype="bfloat16", seq_len=TIME, attention="flash", **changes)

    adapted, plain = measured(adapters=adapters), measured()
    assert adapted.layers[0] < adapted.layers_zero_3[0]
    assert plain.layers == plain.layers_zero_3 and measured(liger=True).layers[0] < plain.layers[0]
