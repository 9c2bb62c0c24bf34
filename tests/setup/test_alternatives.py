"""The usual models that dsft brings along, and the longest sequence that fits."""

import json

import pytest
from transformers import MptConfig

from dsft.cli.main import main
from dsft.models.measure import USUAL_MODELS, empty_model, usual_config

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


def test_a_model_without_the_name_of_its_positions_is_planned_up_to_them(tmp_path, capsys):
    MptConfig(d_model=64, n_heads=4, n_layers=2, vocab_size=1000, max_seq_len=700).save_pretrained(tmp_path)
    words = ["--model", str(tmp_path / "config.json"), "--seq_len", "512", "--gpus", "1xH100"]
    main(["plan", *words, "--longest", "--json"])
    assert json.loads(capsys.readouterr().out)["seq_len"] == 512
