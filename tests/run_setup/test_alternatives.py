"""The largest of the usual models that fits a machine."""

import json
from unittest import mock

import pytest
from tiny import ARCHITECTURES
from transformers import MptConfig

from dsft.cli.main import main
from dsft.config.options import TrainConfig
from dsft.models.size import empty_model
from dsft.planner.step_time import GPUS
from dsft.run_setup.alternatives import METHODS, USUAL_MODELS, largest_models, usual_config
from dsft.runtime.hardware import Machine
from dsft.units import GB

BILLIONS = {
    "Qwen/Qwen2.5-0.5B": 0.494,
    "meta-llama/Llama-3.2-1B": 1.236,
    "meta-llama/Llama-3.2-3B": 3.213,
    "mistralai/Mistral-7B-v0.3": 7.248,
    "meta-llama/Llama-3.1-8B": 8.030,
    "Qwen/Qwen2.5-14B": 14.770,
    "Qwen/Qwen2.5-32B": 32.764,
    "mistralai/Mixtral-8x7B-v0.1": 46.703,
    "meta-llama/Llama-3.1-70B": 70.554,
    "Qwen/Qwen2.5-72B": 72.706,
    "meta-llama/Llama-3.1-405B": 405.853,
}
"""Parameters, as the models' pages on huggingface.co state them."""


def num_params(name: str) -> int:
    return sum(parameter.numel() for parameter in empty_model(usual_config(name)).parameters())


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", USUAL_MODELS)
def test_a_usual_model_has_its_published_number_of_parameters(name):
    assert num_params(name) == pytest.approx(1e9 * BILLIONS[name], rel=1e-3)


def test_the_usual_models_stand_in_the_order_of_their_parameters():
    assert list(BILLIONS) == list(USUAL_MODELS) and sorted(BILLIONS, key=BILLIONS.get) == list(USUAL_MODELS)


@pytest.mark.exhaustive
def test_the_largest_that_fits_is_named_with_the_next(capsys):
    _, values = ARCHITECTURES["llama"]
    small, large = {"model_type": "llama", **values}, USUAL_MODELS["meta-llama/Llama-3.1-405B"]
    large = large | {"num_hidden_layers": 4}  # 17 B parameters
    with mock.patch.dict(USUAL_MODELS, {"small": small, "large": large}, clear=True):
        main(["plan", "--largest", "--gpus", "1xT4", "--host_memory", "16GB", "--seq_len", "32", "--json"])
        rows = {row["method"]: row for row in json.loads(capsys.readouterr().out)}
        assert rows.keys() == set(METHODS)
        assert rows["full"]["fits"] == ["small"] and rows["full"]["too_large"] == ["large"]
        assert all(row["plan"]["fits"] for row in rows.values())
        main(["plan", "--largest", "--gpus", "1xT4", "--host_memory", "16GB", "--seq_len", "32"])
        assert "full: up to small (ZeRO" in (text := capsys.readouterr().out) and "; not large" in text


def test_experts_that_qlora_leaves_plain_may_not_fit_where_a_larger_model_does(capsys, cheap_traces):
    widths = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
    models = {
        "experts": {"model_type": "mixtral", **widths, "num_hidden_layers": 8, "vocab_size": 32000},  # 11.6 B
        "dense": {"model_type": "llama", **widths, "num_hidden_layers": 64, "vocab_size": 32000},  # 14.2 B
    }
    with mock.patch.dict(USUAL_MODELS, models, clear=True):
        main(["plan", "--largest", "--gpus", "1xT4", "--host_memory", "64GB", "--seq_len", "32", "--json"])
    row = next(row for row in json.loads(capsys.readouterr().out) if row["method"] == "qlora")
    assert row["plan"]["fits"] and (row["fits"], row["too_large"]) == (["dense"], ["experts"])


def test_what_is_asked_for_is_asked_of_the_largest_too_and_leaves_out_methods_that_it_refuses(capsys, cheap_traces):
    with mock.patch.dict(USUAL_MODELS, {"small": {"model_type": "llama", **ARCHITECTURES["llama"][1]}}, clear=True):
        main(["plan", "--largest", "--gpus", "8xH100", "--zero", "3", "--seq_len", "32", "--json"])
    rows = json.loads(capsys.readouterr().out)
    assert [(row["method"], row["plan"]["zero"]) for row in rows] == [("full", "3"), ("lora", "3")]


def test_a_model_with_too_few_positions_is_none_of_those_that_fit(capsys, cheap_traces):
    small = {"model_type": "llama", **ARCHITECTURES["llama"][1]}
    models = {"short": small | {"max_position_embeddings": 16}, "small": small | {"max_position_embeddings": 32}}
    with mock.patch.dict(USUAL_MODELS, models, clear=True):
        main(["plan", "--largest", "--gpus", "8xH100", "--seq_len", "32", "--json"])
    assert {tuple(row["fits"]) for row in json.loads(capsys.readouterr().out)} == {("small",)}


def test_a_model_without_the_name_of_its_positions_is_planned_up_to_them(tmp_path, capsys, cheap_traces):
    MptConfig(d_model=64, n_heads=4, n_layers=2, vocab_size=1000, max_seq_len=700).save_pretrained(tmp_path)
    words = ["--model", str(tmp_path / "config.json"), "--seq_len", "512", "--gpus", "1xH100"]
    main(["plan", *words, "--longest", "--json"])
    assert json.loads(capsys.readouterr().out)["seq_len"] == 512


def test_what_the_longest_sequence_takes_of_a_machine_without_gpus_is_a_rank_s(tiny, capsys, cheap_traces):
    main(["plan", "--model", str(tiny / "model"), "--seq_len", "64", "--longest"])
    assert capsys.readouterr().out.endswith("GiB per rank\n")


def test_a_machine_without_gpus_is_asked_for_no_qlora(capsys, cheap_traces):
    with mock.patch.dict(USUAL_MODELS, {"small": {"model_type": "llama", **ARCHITECTURES["llama"][1]}}, clear=True):
        main(["plan", "--largest", "--seq_len", "32", "--json"])
    assert [row["method"] for row in json.loads(capsys.readouterr().out)] == ["full", "lora"]


@pytest.mark.exhaustive
def test_8_gpus_of_80_gb_take_a_70b_lora_and_an_8b_in_full():
    machine = Machine(
        nodes=1,
        ranks_per_node=8,
        device_bytes=GPUS["A100-80GB"].usable_bytes,
        host_bytes=500 * GB,
        has_gpu=True,
        gpu_type="A100-80GB",
    )
    rows = {row.method: row for row in largest_models(TrainConfig(seq_len=2048), machine, attention=None)}
    assert "meta-llama/Llama-3.1-8B" in rows["full"].fits and "meta-llama/Llama-3.1-70B" not in rows["full"].fits
    assert "meta-llama/Llama-3.1-70B" in rows["lora"].fits and "meta-llama/Llama-3.1-405B" in rows["lora"].too_large
    assert "meta-llama/Llama-3.1-70B" in rows["qlora"].fits
