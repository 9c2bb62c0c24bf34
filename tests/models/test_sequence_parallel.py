"""Windows that are spread over ranks give the nats of one rank, and what cannot be spread is refused."""

import dataclasses

import numpy as np
import pytest
import transformers
from ranks import on_ranks
from tiny import write_model

from dsft.api import evaluate_all
from dsft.config.options import EvalConfig, TrainConfig
from dsft.models.measure import measure_model
from dsft.models.probes import RowRules
from dsft.models.sequence_parallel import failed_trial, refused_model, refused_ranks
from dsft.planner.activations import attention_of

SIZES = {"vocab_size": 128, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders of models whose key heads are fewer than their heads."""
    folder = tmp_path_factory.mktemp("spread")
    return {name: str(write_model(folder / name, name)) for name in ("llama", "qwen3")}


def options_for(tiny, model: str, **changes) -> dict:
    base = {"model": [model], "data": [str(tiny / "held_out.jsonl")], "seq_len": 50, "batch_tokens": 120, "zero": "0"}
    return base | {"max_documents": 12} | changes


def _results(many: list[dict]) -> list:
    results = []
    for options in many:
        result = next(evaluate_all(EvalConfig(**options))).perplexity
        results.append((result.nats, result.tokens, result.document_nats.tolist()))
    return results


def assert_agree(results: list, expected: list) -> None:
    for (nats, tokens, documents), (wanted, wanted_tokens, wanted_documents) in zip(results, expected, strict=True):
        assert (nats, tokens) == (pytest.approx(wanted, rel=1e-6), wanted_tokens)
        np.testing.assert_allclose(documents, wanted_documents, rtol=1e-6, atol=1e-5)


def test_two_ranks_share_each_window_also_of_a_sharded_model(tiny, models):
    cases = [options_for(tiny, models["llama"]), options_for(tiny, models["qwen3"], zero="3", mode="rolling")]
    expected = _results([case | {"zero": "0"} for case in cases])
    first, second = on_ranks(2, _results, [case | {"sequence_parallel": 2} for case in cases])
    assert first == second
    assert_agree(first, expected)


@pytest.mark.exhaustive
@pytest.mark.parametrize("zero", ["0", "3"])
@pytest.mark.parametrize("model", ["llama", "qwen3"])
def test_four_ranks_share_windows_by_two_and_by_four(tiny, models, model, zero):
    cases = [options_for(tiny, models[model], zero=zero, mode=mode) for mode in ("windows", "rolling")]
    expected = _results([case | {"zero": "0"} for case in cases])
    by_two, by_four = ([case | {"sequence_parallel": size} for case in cases] for size in (2, 4))
    (both, *others) = on_ranks(4, _results, by_two + by_four)
    assert others == [both] * 3
    assert_agree(both[:2], expected)
    assert_agree(both[2:], expected)  # each key head on two ranks
    assert on_ranks(2, _results, by_two) == [both[:2]] * 2  # the same bits with one team as with two


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


def test_ranks_that_cannot_form_teams_are_told_which_numbers_can():
    assert refused_ranks(1, 3) == refused_ranks(4, 8) == ""
    assert "divide the number of ranks, which is 6" in refused_ranks(4, 6)
    assert refused_ranks(2, 1)


def test_rows_are_padded_so_that_ranks_share_them_evenly():
    rules = RowRules(limits=(20,), multiple=3)
    assert [rules.width(length) for length in (1, 8, 9, 17, 20, 21)] == [9, 9, 18, 18, 21, 24]
    assert dataclasses.replace(rules, alone=True).width(7) == 9 and RowRules().width(9) == 16


def _divergence(options: dict) -> list[float]:
    divergence = next(evaluate_all(EvalConfig(**options))).divergence
    return [divergence.kl, divergence.reverse_kl, divergence.same_top, divergence.reference_perplexity]


@pytest.mark.exhaustive
def test_a_reference_shares_the_windows_too(tiny, models):
    options = options_for(tiny, models["llama"], reference=models["qwen3"])
    expected = _divergence(options)
    for divergence in on_ranks(2, _divergence, options | {"sequence_parallel": 2}):
        assert divergence == pytest.approx(expected, abs=1e-6)
