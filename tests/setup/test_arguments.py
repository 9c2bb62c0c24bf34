"""What transformers is told, and what the user is told of options without effect."""

import dataclasses
import json
import socket
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from ranks import on_ranks

from dsft.checkpoints.manifest import MANIFEST
from dsft.config.options import REFUSED_ARGUMENTS, TrainConfig
from dsft.config.reader import check_config, make_config
from dsft.errors import UserError
from dsft.models.package import FORMATS
from dsft.runtime.hardware import this_machine
from dsft.setup.arguments import (
    CHECKPOINTING,
    CHECKPOINTING_KWARGS,
    accelerate_decisions,
    batch_decisions,
    check_machine,
    check_training_arguments,
    check_zero_file,
    checkpoint_size,
    dtype_decisions,
    ignored_options,
    keep_global_batch,
    training_arguments,
    with_defaults,
)

SIZE = SimpleNamespace(quantization=FORMATS["int8"])
OFFLOADED = {"optimizer": {"type": "AdamW"}, "zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
PLAN = SimpleNamespace(
    micro_batch=3,
    accumulation=2,
    activation_checkpointing=True,
    checkpoint_every=2,
    deepspeed_config={"zero_optimization": {"stage": 1}, "train_micro_batch_size_per_gpu": "auto"},
)


def test_a_temporary_folder_too_long_for_the_sockets_of_data_workers_is_named(monkeypatch):
    """Such workers waited for each other without an end."""
    machine = this_machine(ranks_per_node=1)
    for characters, workers, expected in ((75, 1, 0), (76, 1, 1), (76, 0, 0)):
        monkeypatch.setattr(tempfile, "tempdir", "x" * characters)
        problems = check_machine(TrainConfig(training={"dataloader_num_workers": workers}), machine)
        assert len(problems) == expected and all("TMPDIR=xxx" in problem for problem in problems)


def test_an_evaluation_feeds_8_sequences_but_no_more_tokens_than_that_of_dsft_eval(monkeypatch):
    """8 sequences of 65,536 tokens took more of a GPU than the training that was planned."""
    for on_gpu, most in ((True, 16_384), (False, 4_096)):
        monkeypatch.setattr("dsft.setup.arguments.has_gpu", lambda on_gpu=on_gpu: on_gpu)
        for seq_len, number in ((most // 16, 8), (most // 8, 8), (most // 4, 4), (most, 1), (4 * most, 1)):
            options = TrainConfig(seq_len=seq_len)
            assert with_defaults(options)["per_device_eval_batch_size"] == number, (on_gpu, seq_len)
            named = dataclasses.replace(options, training={"per_device_eval_batch_size": 3})
            assert with_defaults(named)["per_device_eval_batch_size"] == 3


def test_held_out_data_is_evaluated_each_epoch_and_the_best_model_is_saved_when_evaluated():
    held_out = TrainConfig(eval_fraction=0.1, training={"load_best_model_at_end": True})
    assert with_defaults(held_out)["eval_strategy"] == with_defaults(held_out)["save_strategy"] == "epoch"
    steps = TrainConfig(eval_data=["x"], training={"load_best_model_at_end": True, "eval_strategy": "steps"})
    assert with_defaults(steps)["save_strategy"] == "steps"
    explicit = TrainConfig(eval_data=["x"], training={"load_best_model_at_end": True, "save_strategy": "best"})
    assert with_defaults(explicit)["save_strategy"] == "best"
    unnamed = TrainConfig(eval_data=["x"], training={"save_strategy": "best"})
    assert with_defaults(unnamed)["metric_for_best_model"] == "loss", "without one no checkpoint would be saved"


def _told(many: list[TrainConfig]) -> list[tuple]:
    told = []
    for options in many:
        args = training_arguments(options, PLAN)
        batch = (args.per_device_train_batch_size, args.gradient_accumulation_steps)
        told.append((*batch, getattr(args, CHECKPOINTING), getattr(args, CHECKPOINTING_KWARGS)))
    return told


def test_no_token_is_in_the_arguments_that_lie_beside_the_weights(tmp_path):
    training = {"output_dir": str(tmp_path), "push_to_hub": True, "hub_token": "hf_secret"}
    arguments = training_arguments(TrainConfig(training=training), PLAN)
    assert arguments.hub_token is None and not arguments.push_to_hub


def test_tiles_keep_the_loss_beside_liger_s_other_kernels(monkeypatch):
    monkeypatch.setattr("dsft.setup.arguments.TrainingArguments", lambda **values: SimpleNamespace(**values))

    def config(**given):
        training = {"use_liger_kernel": True} | ({"liger_kernel_config": given["given"]} if "given" in given else {})
        arguments = training_arguments(TrainConfig(training=training, tiled_loss=given["tiled"]), PLAN)
        return vars(arguments).get("liger_kernel_config")

    tiled = {"fused_linear_cross_entropy": False, "cross_entropy": False}
    assert config(tiled=True) == config(tiled=False) == tiled
    assert config(tiled=True, given={"rope": False, "fused_linear_cross_entropy": True}) == tiled | {"rope": False}


def test_the_plan_decides_batches_and_checkpointing(tmp_path):
    training = {"output_dir": str(tmp_path), "report_to": "none", "max_steps": 2}
    many = [
        TrainConfig(training=training),
        TrainConfig(training=training | {"per_device_train_batch_size": 7, "gradient_checkpointing": False}),
        TrainConfig(training=training, packing=True),
        TrainConfig(training=training | {CHECKPOINTING_KWARGS: {"use_reentrant": True}}),
    ]
    plain, explicit, packed, reentrant = on_ranks(1, _told, many)[0]
    assert plain == explicit == packed == (3, 2, True, {"every_n_layers": 2})
    assert reentrant == (3, 2, True, {"every_n_layers": 2, "use_reentrant": True})


@pytest.mark.parametrize(
    ("options", "deepspeed_config", "parts"),
    [
        (TrainConfig(), {}, []),
        (TrainConfig(eval_data=["x"], eval_fraction=0.1), {}, ["eval_fraction: ignored, because eval_data"]),
        (TrainConfig(training={"use_cpu": True}), {}, ["use_cpu: ignored", "DS_ACCELERATOR=cpu"]),
        (TrainConfig(training={"optim": "sgd"}), {"optimizer": {"type": "Lion"}}, ["optim: ignored", "brings Lion"]),
        (TrainConfig(training={"optim": "adamw_8bit"}), OFFLOADED, ["optim: ignored", "brings AdamW"]),
        (TrainConfig(), {"optimizer": {"type": "AdamW"}}, []),
        (TrainConfig(training={"weight_decay": 0.1}), {"optimizer": {"type": "AdamW"}}, ["weight_decay: DeepSpeed's"]),
        (TrainConfig(training={"weight_decay": 0.1}), {}, []),
        (TrainConfig(lora_r=8, use_dora=True), {}, ["lora_r, use_dora: ignored, because method is full"]),
        (TrainConfig(method="lora", quantization="int8"), {}, ["quantization: ignored, because method is lora"]),
        (TrainConfig(method="qlora", quantization="int8"), {}, []),
        (TrainConfig(method="lora", lora_r=8, adapter="a"), {}, ["lora_r: ignored, because adapter=a"]),
    ],
)
def test_an_option_without_effect_says_why_in_one_note(options, deepspeed_config, parts):
    notes = ignored_options(options, deepspeed_config, SIZE)
    assert len(notes) == bool(parts), notes
    assert not parts or notes[0].startswith(parts[0])
    assert all(part in notes[0] for part in parts)


@pytest.mark.parametrize("name", REFUSED_ARGUMENTS)
def test_arguments_that_would_do_something_else_are_refused_with_a_way_out(name):
    def problems(value) -> list[str]:
        config = TrainConfig(model="m", data=["d"], training={"output_dir": "x", name: value})
        return [problem for problem in check_config(config) if problem.startswith(f"{name}: ")]

    assert problems(True) == [f"{name}: {REFUSED_ARGUMENTS[name]}"]
    assert problems(False) == problems(None) == []


@pytest.mark.parametrize(
    ("optim", "more", "is_taken"),
    [
        ("sgd", {}, False),
        ("adamw_8bit", {}, False),  # it would be Adam with L2
        ("adafactor", {"optimizer": {"type": "AdamW"}}, True),  # the file's, as a note reports
        ("sgd", {"zero_force_ds_cpu_optimizer": False}, True),
        *((name, {}, True) for name in (None, "adamw_torch", "adamw_torch_fused")),
    ],
)
def test_an_optimizer_that_an_offload_would_replace_is_refused(optim, more, is_taken):
    machine, options = SimpleNamespace(measured=False, world_size=1, has_gpu=True), TrainConfig(zero="ds.json")
    options = replace(options, training={} if optim is None else {"optim": optim})
    section = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    problems = check_zero_file({"zero_optimization": section} | more, options, machine)
    assert len(problems) == (not is_taken) and all(f"optim={optim} cannot be combined" in each for each in problems)


def test_rules_are_asked_without_meeting_the_ranks_that_variables_name(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:  # of the job whose variables a shell or notebook inherited
        job = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        for name, value in (job | {"MASTER_PORT": str(taken.getsockname()[1])}).items():
            monkeypatch.setenv(name, value)
        assert check_training_arguments(TrainConfig(training={"output_dir": "x"})) == []


@pytest.mark.parametrize("training", [{"optim": "adamw_torch", "optim_args": "eps"}, {"optim_args": "eps"}])
def test_wrong_optim_args_are_named(training):
    (problem,) = check_training_arguments(TrainConfig(training={"output_dir": "x"} | training))
    assert "optim_args=eps: " in problem


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
    ],
)
def test_batches_follow_from_the_global_one_on_2_ranks(total, training, decided):
    options = TrainConfig(global_batch_size=total, training=training)
    for world, shared_by in ((2, 1), (4, 2), (8, 4)):  # ranks that share sequences count once
        problems: list[str] = []
        decisions = batch_decisions(replace(options, sequence_parallel=shared_by), world, problems)
        assert values(decisions) == decided and problems == []


@pytest.mark.parametrize(
    ("total", "training", "problem"),
    [
        (7, {MICRO: 2}, "not divisible by per_device_train_batch_size=2 x 2 ranks; try 4 or 8, or another"),
        (3, {MICRO: 2}, "not divisible by per_device_train_batch_size=2 x 2 ranks; try 4, or another"),
        (7, {}, "not divisible by 2 ranks; try 6 or 8, or another"),
        (7, {ACCUMULATION: 2}, "not divisible by gradient_accumulation_steps=2 x 2 ranks; try 4 or 8"),
        (8, {MICRO: 2, ACCUMULATION: 3}, "is not per_device_train_batch_size=2 x gradient_accumulation_steps=3 x 2"),
    ],
)
def test_a_global_batch_that_does_not_divide_says_what_would(total, training, problem):
    problems: list[str] = []
    assert batch_decisions(TrainConfig(global_batch_size=total, training=training), 2, problems) == []
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


def test_the_file_of_accelerate_is_the_zero_that_was_not_named(tmp_path):
    problems: list[str] = []
    (decision,) = accelerate_decisions(TrainConfig(), {FILE: "ds.json"}, problems)
    assert (decision.name, decision.value) == ("zero", "ds.json")
    for environment in ({}, {FILE: "none"}):
        assert accelerate_decisions(TrainConfig(), environment, problems) == []
    first, same, other = (tmp_path / f"{name}.json" for name in ("first", "same", "other"))
    for path, stage in ((first, 2), (same, 2), (other, 3)):
        path.write_text(json.dumps({"zero_optimization": {"stage": stage}}))
    options = TrainConfig(zero=str(first))
    stage = {"ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}
    assert accelerate_decisions(options, {FILE: str(same)}, problems) == []
    assert accelerate_decisions(TrainConfig(zero="2"), stage, problems) == []
    assert problems == []
    assert accelerate_decisions(options, {FILE: str(other)}, problems) == []
    assert accelerate_decisions(TrainConfig(), stage, problems) == []
    assert f"zero={first}, but accelerate's deepspeed_config_file is {other}" in problems[0]
    assert "accelerate's own DeepSpeed settings" in problems[1]


def checkpoint(folder: Path, manifest: dict | None) -> str:
    if manifest is not None:
        (folder / MANIFEST).write_text(json.dumps(manifest))
    return str(folder)


def test_a_resume_on_other_ranks_takes_as_many_sequences_per_step_as_before(tmp_path):
    path = checkpoint(tmp_path, {"world_size": 2, "run_identity": {"sequences per step": 12}})
    options = TrainConfig(training={MICRO: 2, ACCUMULATION: 3})
    assert values(keep_global_batch(options, path, 3)) == {"global_batch_size": 12, ACCUMULATION: 2}
    assert keep_global_batch(options, path, 2) == []
    smaller = replace(options, training={MICRO: 1})
    assert values(keep_global_batch(smaller, path, 2)) == {"global_batch_size": 12, ACCUMULATION: 6}, "it follows"
    assert keep_global_batch(TrainConfig(global_batch_size=24), path, 3) == []
    shared = replace(options, sequence_parallel=2)
    assert values(keep_global_batch(shared, path, 2)) == {"global_batch_size": 12, ACCUMULATION: 6}
    assert keep_global_batch(shared, path, 4) == []
    of_pairs = {"world_size": 4, "sequence_parallel": 2, "run_identity": {"sequences per step": 12}}
    (tmp_path / "of_pairs").mkdir()
    decisions = keep_global_batch(options, checkpoint(tmp_path / "of_pairs", of_pairs), 3)
    assert values(decisions) == {"global_batch_size": 12, ACCUMULATION: 2}
    with pytest.raises(UserError, match=f"{path} took 12 sequences per step.*5 ranks cannot share"):
        keep_global_batch(options, path, 5)
    with pytest.raises(UserError) as error:  # as many as before must be taken: another total is no way out
        keep_global_batch(replace(options, training={MICRO: 8}), path, 3)
    assert "global_batch_size" not in str(error.value) and "smaller per_device_train_batch_size" in str(error.value)


def size_of(options: dict, *, stage: int | None = None, dtype: str = "float32", **parameters: int):
    problems: list[str] = []
    config = make_config(TrainConfig, {"model": "m", "data": ["d"], "output_dir": "out"} | options, problems)
    counts = {"num_trainable": 1000, "num_params": 1000, "lora_r": 0, "vocab_size": 100}
    counts |= parameters
    counts["saved_params"] = counts["num_trainable" if counts["lora_r"] else "num_params"]
    model = SimpleNamespace(**counts)
    deepspeed_config = None if stage is None else {"zero_optimization": {"stage": stage}}
    assert problems == []
    return checkpoint_size(dataclasses.replace(config, dtype=dtype), model, deepspeed_config)


@pytest.mark.parametrize(
    ("options", "count"),
    [
        ({"save_strategy": "no"}, 0),
        ({"save_strategy": "no", "save_minutes": 5}, 3),
        ({}, 3),
        ({"max_steps": 100}, 1),
        ({"max_steps": 1000, "save_steps": 1}, 3),
        ({"max_steps": 100, "save_minutes": 5}, 3),
        ({"save_strategy": "epoch", "num_train_epochs": 2, "save_total_limit": 10}, 2),
        ({"save_total_limit": 4}, 5),
        ({"save_total_limit": 1}, 2),
        ({"save_total_limit": 1, "metric_for_best_model": "loss"}, 3),
    ],
)
def test_the_checkpoints_that_lie_on_the_disk_at_once_are_counted(options, count):
    assert size_of(options).kept == count


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_stage_3_writes_no_second_copy_of_the_weights_and_weights_alone_have_no_states(dtype):
    sizes = [size_of({}, stage=stage, dtype=dtype) for stage in (1, 2, 3)]
    assert sizes[0] == sizes[1] and sizes[1].state_bytes - sizes[2].state_bytes == sizes[0].weight_bytes
    assert size_of({}, dtype=dtype) == sizes[2], "the stage that writes least, where none is known"
    without = size_of({"save_only_model": True}, stage=2, dtype=dtype)
    assert without.checkpoint_bytes == without.final_bytes == sizes[0].final_bytes
