"""The predicted time beside published steps of seven cards: those that chose the planner's numbers, and those that did
not (published_steps.json, "split").
"""

import functools
import statistics
from collections import defaultdict

import pytest
from published import ROWS, STEPS, activations_of, measured_over_predicted, predicted, traffic_of

from dsft.planner.step_time import GPUS, TIME_RANGES


@functools.cache
def ratios_of(split: str) -> dict[str, list[float]]:
    """Measured over predicted seconds by kind of step."""
    ratios = defaultdict(list)
    for step in STEPS:
        if step["split"] == split:
            ratios[predicted(step).kind].append(measured_over_predicted(step))
    return ratios


@pytest.mark.parametrize("split", ["chose", "held out"])
@pytest.mark.parametrize("kind", TIME_RANGES)
def test_the_printed_range_holds_four_of_five_published_steps_of_its_kind(kind, split):
    least, most = TIME_RANGES[kind]
    ratios = ratios_of(split)[kind]
    assert ratios and sum(least <= ratio <= most for ratio in ratios) >= 0.8 * len(ratios), sorted(ratios)


def test_the_median_of_the_published_steps_is_met_within_10_percent():
    for split in ("chose", "held out"):
        errors = [abs(ratio - 1) for kind, ratios in ratios_of(split).items() if kind != "long" for ratio in ratios]
        assert len(errors) >= 30 and statistics.median(errors) <= 0.1


def test_experts_and_compiled_steps_have_no_range_and_are_met_within_a_third():
    others = [step for step in STEPS if predicted(step).kind not in TIME_RANGES]
    assert len(others) >= 20
    for step in others:
        assert predicted(step).range_seconds is None
        assert step.get("compiled") or "a3b" in step["model"]
        assert measured_over_predicted(step) == pytest.approx(1, abs=0.33), step["source"]


def test_every_row_names_its_source_and_what_was_left_out_says_why():
    assert all(step["source"] and step["gpu"] in GPUS for step in STEPS)
    assert all(row["source"] and row["why"] for row in ROWS["left_out"])


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "step", {str(traffic_of(step)): step for step in STEPS}.values(), ids=lambda step: step["name"]
)
def test_the_traffic_of_a_row_is_what_its_model_moves(step):
    tokens, traced = step["micro_batch"] * step["seq_len"], activations_of(step)
    for cost, (fixed, per_token) in zip((traced.traffic, traced.traffic_checkpointed), traffic_of(step), strict=True):
        assert cost.num_bytes(tokens) == pytest.approx(fixed + per_token * tokens, rel=0.02)
