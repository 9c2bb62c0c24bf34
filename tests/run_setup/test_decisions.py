"""What is decided in the user's place, each with its reason, and what contradicts itself."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from dsft.checkpoints.manifest import MANIFEST
from dsft.config.options import TrainConfig
from dsft.errors import UserError
from dsft.models.trials import Packing
from dsft.run_setup.decisions import (
    accelerate_decisions,
    batch_decisions,
    dtype_decisions,
    keep_global_batch,
    packing_decisions,
    tf32_decision,
)

MICRO, ACCUMULATION = "per_device_train_batch_size", "gradient_accumulation_steps"


def values(decisions) -> dict:
    assert all(decision.reason for decision in decisions)
    return {decision.name: decision.value for decision in decisions}


@pytest.mark.parametrize(
    ("total", "training", "decided"),
    [
        (None, {MICRO: 2}, {}),
        (8, {MICRO: 2}, {ACCUMULATION: 2}),
        (4, {MICRO: 2}, {ACCUMULATION: 1}),
        (6, {}, {}),  # the plan chooses a size that divides
        (24, {ACCUMULATION: 4}, {MICRO: 3}),
        (24, {MICRO: 3, ACCUMULATION: 4}, {}),
        (7, {MICRO: 0}, {}),  # its own error
    ],
)
def test_batches_follow_from_the_global_one_on_2_ranks(total, training, decided):
    options = TrainConfig(global_batch_size=total, training=training)
    for world, shared_by in ((2, 1), (4, 2), (8, 4)):  # ranks that share sequences count once
        decisions, problems = batch_decisions(replace(options, sequence_parallel=shared_by), world)
        assert values(decisions) == decided and problems == []


@pytest.mark.parametrize(
    ("total", "training", "problem"),
    [
        (7, {MICRO: 2}, "not divisible by per_device_train_batch_size=2 x 2 ranks; try 4 or 8, or another"),
        (3, {MICRO: 2}, "not divisible by per_device_train_batch_size=2 x 2 ranks; try 4, or another"),
        (7, {}, "not divisible by per_device_train_batch_size=1 x 2 ranks; try 6 or 8, or another"),
        (7, {ACCUMULATION: 2}, "not divisible by gradient_accumulation_steps=2 x 2 ranks; leave"),
        (8, {MICRO: 2, ACCUMULATION: 3}, "is not per_device_train_batch_size=2 x gradient_accumulation_steps=3 x 2"),
    ],
)
def test_a_global_batch_that_does_not_divide_says_what_would(total, training, problem):
    _, problems = batch_decisions(TrainConfig(global_batch_size=total, training=training), 2)
    assert len(problems) == 1 and f"global_batch_size={total}" in problems[0] and problem in problems[0]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ("float32", False, False)),  # of CPU ranks
        ({"dtype": "float16"}, ("float16", False, True)),
        ({"dtype": "bfloat16"}, ("bfloat16", True, False)),
        ({"training": {"bf16": True}}, ("bfloat16", True, False)),
        ({"training": {"fp16": True, "bf16": False}}, ("float16", False, True)),
        ({"training": {"bf16": False}}, ("float32", False, False)),
    ],
)
def test_dtype_and_its_flags_are_one_decision(options, expected):
    assert values(dtype_decisions(TrainConfig(**options), "float32")) == dict(
        zip(("dtype", "bf16", "fp16"), expected, strict=True)
    )


FILE = "ACCELERATE_DEEPSPEED_CONFIG_FILE"


def test_the_file_of_accelerate_is_the_zero_that_was_not_named():
    (decision,), problems = accelerate_decisions(TrainConfig(), {FILE: "ds.json"})
    assert (decision.name, decision.value, problems) == ("zero", "ds.json", [])
    assert accelerate_decisions(TrainConfig(), {}) == ([], [])
    assert accelerate_decisions(TrainConfig(), {FILE: "none"}) == ([], [])


def test_two_files_with_the_same_content_agree_and_others_are_both_named(tmp_path):
    first, same, other = (tmp_path / f"{name}.json" for name in ("first", "same", "other"))
    for path, stage in ((first, 2), (same, 2), (other, 3)):
        path.write_text(json.dumps({"zero_optimization": {"stage": stage}}))
    options = TrainConfig(zero=str(first))
    assert accelerate_decisions(options, {FILE: str(same)}) == ([], [])
    decisions, (problem,) = accelerate_decisions(options, {FILE: str(other)})
    assert decisions == [] and f"zero={first}, but accelerate's deepspeed_config_file is {other}" in problem


def test_settings_of_accelerate_that_would_not_be_read_are_refused_unless_zero_is_named():
    stage = {"ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}
    decisions, (problem,) = accelerate_decisions(TrainConfig(), stage)
    assert decisions == [] and "accelerate's own DeepSpeed settings" in problem
    assert accelerate_decisions(TrainConfig(zero="2"), stage) == ([], [])


def checkpoint(folder: Path, manifest: dict | None) -> str:
    if manifest is not None:
        (folder / MANIFEST).write_text(json.dumps(manifest))
    return str(folder)


def test_a_resume_on_other_ranks_takes_as_many_sequences_per_step_as_before(tmp_path):
    path = checkpoint(tmp_path, {"world_size": 2, "run_identity": {"sequences per step": 12}})
    options = TrainConfig(training={MICRO: 2, ACCUMULATION: 3})
    assert values(keep_global_batch(options, path, 3)) == {"global_batch_size": 12, ACCUMULATION: 2}
    assert keep_global_batch(options, path, 2) == []
    assert keep_global_batch(TrainConfig(global_batch_size=24), path, 3) == []
    shared = replace(options, sequence_parallel=2)
    assert values(keep_global_batch(shared, path, 2)) == {"global_batch_size": 12, ACCUMULATION: 6}
    assert keep_global_batch(shared, path, 4) == []
    of_pairs = {"world_size": 4, "sequence_parallel": 2, "run_identity": {"sequences per step": 12}}
    (tmp_path / "of_pairs").mkdir()
    decisions = keep_global_batch(options, checkpoint(tmp_path / "of_pairs", of_pairs), 3)
    assert values(decisions) == {"global_batch_size": 12, ACCUMULATION: 2}
    assert "on 4 ranks, 2 to a sequence" in decisions[0].reason
    with pytest.raises(UserError, match=f"{path} took 12 sequences per step.*per_device_train_batch_size=2 x 5 ranks"):
        keep_global_batch(options, path, 5)


@pytest.mark.parametrize("manifest", [None, {"world_size": 2}])
def test_a_checkpoint_of_another_tool_tells_no_batch(tmp_path, manifest):
    assert keep_global_batch(TrainConfig(), checkpoint(tmp_path, manifest), 3) == []


def test_packing_is_taken_back_where_samples_would_see_each_other():
    possible = Packing(attn_implementation="sdpa", problem=None)
    assert values(packing_decisions(possible)) == {"packing": True, "attn_implementation": "sdpa"}
    impossible = packing_decisions(Packing(attn_implementation=None, problem="they mix"))
    assert values(impossible)["packing"] is False and impossible[0].reason == "they mix"


def test_float32_trains_in_tf32_where_gpus_have_it_unless_the_user_says():
    assert values(tf32_decision(TrainConfig(dtype="float32"), available=True)) == {"tf32": True}
    assert tf32_decision(TrainConfig(dtype="float32"), available=False) == []
    assert tf32_decision(TrainConfig(dtype="float32", training={"tf32": False}), available=True) == []
    assert tf32_decision(TrainConfig(dtype="bfloat16"), available=True) == []
