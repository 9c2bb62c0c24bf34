"""What a training is given, and the figures of it that run.json shows."""

import numpy as np
import pytest
from tiny import write_pairs

from dsft.config.options import TrainConfig
from dsft.data.batches import EpochSampler, PackedRows, PaddedToFullSteps, sequences_in
from dsft.data.training_data import _names_of, check_sources, load_training_data
from dsft.errors import UserError
from dsft.models.tokenizer import load_tokenizer
from dsft.units import IGNORED, Batch


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


def test_batches_filled_by_tokens_hold_every_sequence_once_within_the_budget(load):
    plain, data = load(), load(batch_tokens=64)
    assert isinstance(data.items, PackedRows) and data.strategy == "random"
    batches = [data.collator([group]) for group in data.items]
    assert data.counts["filled_batches"] == len(batches) > 1
    assert all(batch["input_ids"].numel() <= 64 for batch in batches)
    share = padding_of(batches, data.counts["tokens"])
    assert data.counts["padding_share"] == pytest.approx(share, abs=1e-4) and share > 0
    ids = [sorted(tuple(item["input_ids"]) for item in items) for items in (plain.items, sequences_in(data.items))]
    assert ids[0] == ids[1] and np.sum(plain.items.lengths) == data.counts["tokens"]
    data.describe_batches(Batch(1, 1, 2), seed=7)  # is known already
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


def test_lengths_that_the_model_computes_otherwise_share_no_batch_or_are_counted(load):
    """As longrope does."""
    lengths = np.unique(load().items.lengths)
    limit = int(lengths[len(lengths) // 2])

    def mixed(data, micro_batch: int) -> int:
        """Batches of the first epoch with both sides; what they are padded to stays on the side of the longest."""
        data.describe_batches(Batch(micro_batch, 2, 2), seed=7)
        steps = PaddedToFullSteps(data.items, 4 * micro_batch)
        order = EpochSampler(steps, seed=7, step=lambda: 0, strategy=data.strategy).order(0)
        number = 0
        for start in range(0, len(order), micro_batch):
            batch = sequences_in([steps[index] for index in order[start : start + micro_batch]])
            lengths = {len(item["input_ids"]) for item in batch if (item["labels"] != IGNORED).any()}
            number += bool(lengths) and min(lengths) <= limit < max(lengths)
            if lengths and max(lengths) <= limit:
                assert data.collator.rules.width(max(lengths)) <= limit
        return number

    data = load(limits=(limit, 64))
    number, batches = mixed(data, 4), -(-len(data.items) // 16) * 4
    assert number and data.notes == [data.notes[0]] and f"both sides of {limit} tokens" in data.notes[0]
    assert data.notes[0].startswith(f"{number} of the {batches} batches of the first epoch hold")
    for micro_batch, options in ((1, {}), (1, {"batch_tokens": 64})):
        data = load(limits=(limit, 64), **options)
        assert mixed(data, micro_batch) == 0 and data.notes == []
    packed = load(pack=True, limits=(limit, 64))
    packed.describe_batches(Batch(1, 1, 1), seed=7)
    sides = [{len(item["input_ids"]) > limit for item in row} for row in packed.items]
    assert packed.notes == [] and {True} in sides and {False} in sides and {True, False} not in sides
    assert load().rules.limits == (32,) and load(limits=(64,)).rules.limits == (32,)


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


def test_sources_have_names_that_differ_and_none_is_empty():
    """A loss in the log has the name of its source."""
    assert _names_of(["a/b.jsonl.gz", "c/b.json", "d.csv"]) == ("a/b.jsonl.gz", "c/b.json", "d")
    assert _names_of(["a_b_3", "a b", "a_b"]) == ("a_b_3", "a_b", "a_b_3_3")
    assert _names_of(["", "x"]) == ("_", "x")
