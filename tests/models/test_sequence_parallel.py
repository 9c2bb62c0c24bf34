"""Windows that are spread over ranks give the nats of one rank, and what cannot be spread is refused."""

import dataclasses
import random

import numpy as np
import pytest
import torch
import transformers
from conftest import grid
from ranks import on_ranks
from tiny import windows_of_sequences, write_model
from transformers import AutoModelForCausalLM

from dsft.config.options import TrainConfig
from dsft.data.epoch import sequence
from dsft.models.measure import measure_model
from dsft.models.probes import RowRules
from dsft.models.sequence_parallel import failed_trial, refused_model, team_of
from dsft.perplexity.scoring import evaluate_windows
from dsft.planner.activations import attention_of

SIZES = {"vocab_size": 128, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}


def _document_nats(folder: str, sizes: tuple[int, ...]) -> list[list[float]]:
    """Of a model's windows, whatever number of ranks shares each."""
    chance = random.Random(0)
    rows = [np.array(chance.choices(range(5, 128), k=length)) for length in (50, 31, 8, 2, 49, 17)]
    windows = windows_of_sequences([sequence(row, row > 0) for row in rows])
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    options = {"pad_token_id": 0, "batch_tokens": 120, "device": torch.device("cpu"), "collective_forward": False}
    results = [evaluate_windows(model, windows, team=team_of(size), **options) for size in sizes]
    return [result.document_nats.tolist() for result in results]


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
@pytest.mark.parametrize("world", grid([2, 4], [2]))
def test_ranks_that_share_windows_have_the_nats_of_one(tmp_path, architecture, world):
    """With 4, two teams of 2 take turns, and each key head is on two ranks of a team of 4."""
    folder = str(write_model(tmp_path / "model", architecture))
    (expected,) = _document_nats(folder, (1,))
    sizes = tuple(size for size in (1, 2, 4) if size <= world)
    first, *others = on_ranks(world, _document_nats, folder, sizes)
    assert all(other == first for other in others)
    for nats in first:
        np.testing.assert_allclose(nats, expected, rtol=1e-6, atol=1e-5)


REFUSED = {
    "heads": (transformers.LlamaConfig, {"num_attention_heads": 5, "num_key_value_heads": 5, "hidden_size": 40}, {}),
    "eager": (transformers.LlamaConfig, {}, {"attn_implementation": "eager"}),
    "recurrent": (transformers.MambaConfig, {}, {}),
    "layers": (transformers.Qwen3NextConfig, {"num_hidden_layers": 4}, {}),
    "sliding": (transformers.MistralConfig, {"sliding_window": 64}, {"seq_len": 64}),
    "rope": (
        transformers.LlamaConfig,
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
        {},
    ),
    "positions": (transformers.LlamaConfig, {"max_position_embeddings": 101}, {"seq_len": 101}),
}
SAID = {
    "heads": "5 heads and 5 key heads cannot be shared by 2 ranks",
    "eager": "use sdpa or flash_attention_2",
    "recurrent": "linear_attention pass tokens on outside of attention",
    "layers": "linear_attention pass tokens on outside of attention",
    "sliding": "or seq_len below 64",
    "rope": "rotary angles (dynamic)",
    "positions": "use seq_len 100 or less",
}
TAKEN = {
    "llama": (transformers.LlamaConfig, {}, {}),
    "gpt2": (transformers.GPT2Config, {"n_embd": 64, "n_head": 4, "n_layer": 2}, {}),
    "below the sliding window": (transformers.MistralConfig, {"sliding_window": 64}, {"seq_len": 63}),
    "mixture of experts": (transformers.MixtralConfig, {"num_local_experts": 4}, {}),
}


def _refusals(folders: dict[str, str], options: dict[str, dict]) -> dict[str, str]:
    said = {}
    for name, folder in folders.items():
        of_model = dict(options[name])
        seq_len = of_model.pop("seq_len", 32)
        facts = measure_model(TrainConfig(model=folder, **of_model))
        attention = attention_of(facts, seq_len=seq_len, masked=False)
        said[name] = refused_model(
            facts, size=2, world=2, seq_len=seq_len, attention=attention, model=name
        ) or failed_trial(facts, size=2, model=name)
    return said


def test_what_the_engine_cannot_spread_is_refused_before_weights_load(tmp_path):
    cases = REFUSED | TAKEN
    for name, (config, values, _) in cases.items():
        common = {"pad_token_id": None} | (
            {} if config is transformers.GPT2Config else SIZES | {"num_hidden_layers": 2}
        )
        config(**common | values).save_pretrained(tmp_path / name)
    said = on_ranks(
        2, _refusals, {name: str(tmp_path / name) for name in cases}, {name: cases[name][2] for name in cases}
    )
    assert said[0] == said[1]
    for name, words in SAID.items():
        assert words in said[0][name] and "\n" not in said[0][name], (name, said[0][name])
    assert {name: said[0][name] for name in TAKEN} == dict.fromkeys(TAKEN, "")


def test_rows_are_padded_so_that_ranks_share_them_evenly():
    rules = RowRules(limits=(20,), multiple=3)
    assert [rules.width(length) for length in (1, 8, 9, 17, 20, 21)] == [9, 9, 18, 18, 21, 24]
    assert dataclasses.replace(rules, alone=True).width(7) == 9 and RowRules().width(9) == 16
