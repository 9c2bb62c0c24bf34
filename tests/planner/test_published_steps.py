"""The predicted speed beside published steps of five cards: within 20 % each, 10 % in the median."""

import dataclasses
import statistics

import pytest
from published import ROWS, STEPS, activations_of, predicted_tokens, speeds_for

from dsft.planner import gpus
from dsft.planner.gpus import GPUS
from dsft.planner.step_time import MEMORY_SHARE, TIME_RANGE


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


FAMILIES = dict(zip("AH4", gpus.TRAINING_SHARES.values(), strict=True))
"""First letter of a card -> the share of its products' rate that a training reaches."""


def fitted_ratio(step: dict, share: float, memory: float) -> float:
    """Predicted over published tokens, had these two shares been chosen."""
    speeds = speeds_for(step)
    flops = speeds.flops * share / FAMILIES[step["gpu"][0]]
    speeds = dataclasses.replace(
        speeds,
        flops=flops,
        attention_share=speeds.attention_flops / flops,
        device_bytes=speeds.device_bytes * memory / MEMORY_SHARE,
    )
    return predicted_tokens(step, speeds) / step["tokens_per_gpu"]


def fit(steps: list[dict]) -> tuple[float, dict[str, float]]:
    """(share of the memory's rate, share of the products' rate by family) with the least squared error."""
    grid = [0.5 + 0.05 * number for number in range(11)]
    best = (float("inf"), 0.0, {})
    for memory in (0.4, 0.5, 0.6, 0.7, 0.8):
        shares, total = {}, 0.0
        for family in {step["gpu"][0] for step in steps}:
            errors = {
                share: sum((fitted_ratio(step, share, memory) - 1) ** 2 for step in steps if step["gpu"][0] == family)
                for share in grid
            }
            shares[family] = min(errors, key=errors.get)
            total += errors[shares[family]]
        best = min(best, (total, memory, shares), key=lambda found_fit: found_fit[0])
    return best[1], best[2]


@pytest.mark.exhaustive
@pytest.mark.parametrize("first", [0, 1])
def test_shares_fitted_on_every_second_row_predict_the_others(first):
    """The planner's own shares were chosen by all rows; this is what they are worth on rows that chose nothing."""
    memory, shares = fit(STEPS[first::2])
    held_out = [
        abs(fitted_ratio(step, shares.get(step["gpu"][0], FAMILIES["4"]), memory) - 1) for step in STEPS[1 - first :: 2]
    ]
    assert statistics.median(held_out) <= 0.06 and max(held_out) <= 0.15


@pytest.mark.exhaustive
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step["name"])
def test_the_traffic_of_a_row_is_what_its_model_moves(step):
    tokens = step["micro_batch"] * step["seq_len"]
    for checkpointing in (False, True):
        traced = activations_of(step)
        traffic = traced.traffic_checkpointed if checkpointing else traced.traffic
        assert traffic.num_bytes(tokens) / tokens == pytest.approx(step["traffic_per_token"][checkpointing], rel=0.01)
