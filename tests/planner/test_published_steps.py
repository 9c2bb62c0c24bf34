"""The predicted speed beside published steps of A100, H100, A800 and 4090: within 20 % each, 10 % in the median."""

import statistics

import pytest
from published import ROWS, STEPS, activations_of, predicted_tokens

from dsft.planner.gpus import GPUS
from dsft.planner.step_time import TIME_RANGE


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step["name"])
def test_a_published_step_is_met_within_20_percent(step):
    assert predicted_tokens(step) == pytest.approx(step["tokens_per_gpu"], rel=0.2), step["source"]


def test_the_median_of_the_published_steps_is_met_within_10_percent_and_the_range_is_their_spread():
    ratios = sorted(
        predicted_tokens(step) / step["tokens_per_gpu"] for step in STEPS
    )  # measured over predicted seconds
    assert len(ratios) >= 10
    assert statistics.median(abs(ratio - 1) for ratio in ratios) <= 0.1
    assert pytest.approx((ratios[0], ratios[-1]), abs=0.02) == TIME_RANGE


def test_every_row_names_its_source_and_what_was_left_out_says_why():
    assert all(step["source"] and step["gpu"] in GPUS for step in STEPS)
    assert all(row["source"] and row["why"] for row in ROWS["left_out"])


@pytest.mark.exhaustive
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step["name"])
def test_the_traffic_of_a_row_is_what_its_model_moves(step):
    tokens = step["micro_batch"] * step["seq_len"]
    for checkpointing in (False, True):
        traced = activations_of(step).traffic_bytes(tokens, checkpointing) / tokens
        assert traced == pytest.approx(step["traffic_per_token"][checkpointing], rel=0.01)
