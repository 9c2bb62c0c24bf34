"""What a training is given, and the figures of it that run.json shows."""

import pytest
from tiny import write_pairs

from dsft.config.options import TrainConfig
from dsft.data.training_data import UNUSED_TEMPLATE, check_sources, load_training_data
from dsft.errors import UserError
from dsft.models.tokenizer import load_tokenizer
from dsft.units import Batch


@pytest.fixture(scope="module")
def tokenizer(tiny):
    return load_tokenizer(TrainConfig(model=str(tiny / "model")))


@pytest.fixture
def load(tokenizer, tmp_path):
    path = str(write_pairs(tmp_path / "pairs.jsonl", 31))

    def make(pack=False, **options):
        options = {"seq_len": 32, "too_long": "truncate", "model": "unused"} | options
        options["data_cache"] = str(tmp_path / "cache")
        config = TrainConfig(data=[path], packing=pack, **options)
        problems: list[str] = []
        data = check_sources([path], config, tokenizer, key="data", problems=problems)
        assert problems == []
        return load_training_data(config, data, [], tokenizer)

    return make


def test_rows_that_do_not_use_a_chat_template_are_noted(tiny, tmp_path):
    tokenizer, path = load_tokenizer(TrainConfig(model=str(tiny / "chat"))), str(tiny / "pairs.jsonl")
    for as_chat in (False, True):
        config = TrainConfig(data=[path], seq_len=256, as_chat=as_chat, data_cache=str(tmp_path))
        sources = check_sources([path], config, tokenizer, key="data", problems=[])
        data = load_training_data(config, sources, [], tokenizer)
        assert data.uses_chat_template == as_chat and (UNUSED_TEMPLATE in data.notes) != as_chat


def test_an_epoch_without_a_full_step_is_refused_where_the_rest_is_left_out(load):
    """transformers asked for max_steps instead."""
    load().require_a_full_step(Batch(31, 1, 1))
    with pytest.raises(UserError, match="dataloader_drop_last: the data has 31 sequences, and a step needs 32"):
        load().require_a_full_step(Batch(32, 1, 1))


def test_a_seed_of_the_data_of_0_is_a_seed(load):
    def held_out(**training):
        items = load(eval_fraction=0.5, training=training).held_out
        return sorted(tuple(item["input_ids"]) for (item,) in items)

    assert held_out(data_seed=0, seed=5) == held_out(seed=0) != held_out(seed=5)
