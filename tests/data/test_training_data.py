"""What a training is given, and the figures of it that run.json shows."""

import pytest
from tiny import write_pairs

from dsft.config.options import TrainConfig
from dsft.data.epoch import EpochSampler, PaddedToFullSteps
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

    def make(pack=False, limits=(), **options):
        options = {"seq_len": 32, "too_long": "truncate", "model": "unused"} | options
        options["data_cache"] = str(tmp_path / "cache")
        config = TrainConfig(data=[path], packing=pack, **options)
        problems: list[str] = []
        data = check_sources([path], config, tokenizer, key="data", problems=problems)
        assert problems == []
        return load_training_data(config, data, [], tokenizer, limits=limits)

    return make


def test_rows_that_do_not_use_a_chat_template_are_noted(tiny, tmp_path):
    tokenizer, path = load_tokenizer(TrainConfig(model=str(tiny / "chat"))), str(tiny / "pairs.jsonl")
    for as_chat in (False, True):
        config = TrainConfig(data=[path], seq_len=256, as_chat=as_chat, data_cache=str(tmp_path))
        sources = check_sources([path], config, tokenizer, key="data", problems=[])
        data = load_training_data(config, sources, [], tokenizer)
        assert data.uses_chat_template == as_chat and (UNUSED_TEMPLATE in data.notes) != as_chat


def padding_of(batches: list[dict], tokens: int) -> float:
    """Share of what a model computes that is no token."""
    return 1 - tokens / sum(batch["input_ids"].numel() for batch in batches)


@pytest.mark.parametrize(
    ("given", "strategy"),
    [
        (None, "batch_rebalance"),
        *((name, name) for name in ("random", "group_by_length", "batch_rebalance", "sequential")),
    ],
)
def test_the_share_of_padding_is_that_of_the_batches_of_the_first_epoch(load, given, strategy):
    data = load(seq_len=30, training={"train_sampling_strategy": given} if given else {})  # rows of 30 stay such
    assert data.strategy == strategy
    steps = PaddedToFullSteps(data.items, 2 * 4 * 3)
    for seed in (7, 8, 0):
        data.describe_batches(Batch(2, 4, 3), seed=seed)
        order = EpochSampler(steps, seed=seed, step=lambda: 0, strategy=strategy).order(0)
        assert len(order) == 48, "blank sequences fill the last step"
        assert (order == [*range(48)]) == (strategy == "sequential")
        batches = [data.collator([steps[index] for index in order[at : at + 2]]) for at in range(0, 48, 2)]
        share = padding_of(batches, data.items.lengths.sum())
        assert data.counts["padding_share"] == pytest.approx(share, abs=1e-4)


def test_an_epoch_that_leaves_out_what_fills_no_step_has_the_padding_of_its_steps(load):
    data = load(seq_len=30)
    data.describe_batches(Batch(2, 2, 1), seed=7, drop_last=True)
    order = {"seed": 7, "step": lambda: 0, "drop_last": True, "strategy": data.strategy}
    sampler = EpochSampler(steps := PaddedToFullSteps(data.items, 4), **order)
    assert 0 < len(sampler) == 4 * sampler.steps < len(data.items)
    filled = [steps[index] for index in sampler]
    batches = [data.collator(filled[at : at + 2]) for at in range(0, len(filled), 2)]
    share = padding_of(batches, sum(len(each["input_ids"]) for each in filled))
    assert data.counts["padding_share"] == pytest.approx(share, abs=1e-4)


def test_an_epoch_without_a_full_step_is_refused_where_the_rest_is_left_out(load):
    """transformers asked for max_steps instead."""
    load().describe_batches(Batch(31, 1, 1), seed=7, drop_last=True)
    load().describe_batches(Batch(32, 1, 1), seed=7)
    with pytest.raises(UserError, match="dataloader_drop_last: the data gives 31 sequences, and a step takes 32"):
        load().describe_batches(Batch(32, 1, 1), seed=7, drop_last=True)


def test_a_seed_of_the_data_of_0_is_a_seed(load):
    def held_out(**training):
        items = load(eval_fraction=0.5, training=training).held_out
        return sorted(tuple(item["input_ids"]) for item in items)

    assert held_out(data_seed=0, seed=5) == held_out(seed=0) != held_out(seed=5)
