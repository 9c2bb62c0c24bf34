"""A DeepSpeed JSON: what DeepSpeed would ignore or cannot read is refused, and named."""

import json

import pytest

from dsft.config.deepspeed import (
    check_deepspeed_json,
    follow_options,
    known_names,
    read_zero_file,
)
from dsft.config.options import TrainConfig

GOOD = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "steps_per_print": 100,
    "wall_clock_breakdown": False,
    "zero_allow_untested_optimizer": True,
    "communication_data_type": "fp32",
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": [0.9, 0.95], "torch_adam": True}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_num_steps": 10}},
    "activation_checkpointing": {"partition_activations": False},
    "aio": {"block_size": 1048576},
    "data_types": {"grad_accum_dtype": "fp32"},
    "flops_profiler": {"enabled": False},
    "tensorboard": {"enabled": False, "job_name": "a"},
    "zero_optimization": {
        "stage": 3,
        "reduce_bucket_size": "auto",
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "none"},
    },
}


@pytest.mark.parametrize("name", known_names())
def test_our_own_files_have_no_problem(name):
    assert check_deepspeed_json(read_zero_file(name, []), name) == []


def test_a_file_with_all_that_users_write_has_no_problem():
    assert check_deepspeed_json(GOOD, "ds.json") == []


@pytest.mark.parametrize(
    ("place", "content", "expected"),
    [
        ("", {"zero_optimizaton": {"stage": 2}}, ["zero_optimizaton: unknown key", "'zero_optimization'"]),
        (
            "zero_optimization",
            {"reduce_bucket_sise": 1},
            ["zero_optimization.reduce_bucket_sise: Extra inputs", "_size'"],
        ),
        (
            "zero_optimization.offload_optimizer",
            {"pin_memry": True},
            ["zero_optimization.offload_optimizer.pin_memry: Extra inputs"],
        ),
        ("", {"zero_optimization": "auto"}, ['zero_optimization="auto": must be a JSON object; leave it out']),
        ("", {"zero_optimization": True}, ["zero_optimization=true: must be a JSON object"]),
        ("", {"timers": []}, ["timers=[]: must be a JSON object"]),
        ("", {"bf16": None}, ["bf16=null: must be a JSON object"]),
        ("optimizer", {"params": None}, ["optimizer.params=null: must be a JSON object"]),
        ("scheduler", {"params": []}, ["scheduler.params=[]: must be a JSON object"]),
        ("zero_optimization", {"stage": "2"}, ['zero_optimization.stage="2": must be 0, 1, 2 or 3, without quotes']),
        ("zero_optimization", {"stage": True}, ["zero_optimization.stage=true: must be 0, 1, 2 or 3"]),
        ("bf16", {"enbled": True}, ["bf16.enbled: Extra inputs", "'enabled'"]),
        ("optimizer", {"parms": {"lr": 1}}, ["optimizer.parms: unknown key", "'params'"]),
        ("optimizer", {"type": "Adom"}, ["optimizer.type", "'Adom'", "'Adam'"]),
        ("optimizer", {"type": 5}, ["optimizer.type: '5' is unknown"]),
        ("optimizer", {"type": "lr_scheduler"}, ["optimizer.type: 'lr_scheduler' is unknown"]),
        ("scheduler", {"type": "WarmupRL"}, ["scheduler.type", "'WarmupRL'", "'WarmupLR'"]),
        ("", {"gradient_clipping": -1}, ["gradient_clipping=-1.0: must not be negative"]),
        ("optimizer.params", {"lr": -1e-4}, ["optimizer.params.lr=-0.0001: must not be negative"]),
        ("", {"pipeline": {"stages": 2}}, ["pipeline: it needs a model made as"]),
        ("optimizer.params", {"lr": "1e-4"}, ["optimizer.params.lr: must be a number"]),
    ],
    ids=lambda value: json.dumps(value)[:50] if isinstance(value, dict) else "",
)
def test_each_fault_is_named_once_with_its_place(place, content, expected):
    config = json.loads(json.dumps(GOOD))
    section = config
    for part in filter(None, place.split(".")):
        section = section[part]
    section |= content
    problems = check_deepspeed_json(config, "ds.json")
    assert len(problems) == 1, problems
    assert all(part in problems[0] for part in ["zero=ds.json: ", *expected]), problems[0]


@pytest.mark.parametrize(
    "content",
    [
        {"communication_data_type": "auto"},
        {"optimizer": {"type": "SGD", "params": {"momentum": "auto"}}},
        {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "auto"}}},
    ],
    ids=json.dumps,
)
def test_an_auto_that_nothing_fills_is_refused_by_its_key(content):
    (problem,) = check_deepspeed_json({"zero_allow_untested_optimizer": True} | content, "ds.json")
    assert 'auto": nothing fills this in' in problem and next(iter(content)) in problem


@pytest.mark.parametrize(
    "content",
    [
        {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}},
        {"optimizer": {"type": "Muon", "params": {"lr": 1e-3, "muon_lr": 0.02, "adam_lr": 1e-4, "momentum": 0.9}}},
        {"zero_optimization": {"stage": 0}, "optimizer": {"type": "Lamb", "params": {}}},
        {"gradient_allreduce_op": "mean", "expert_parallel": {"enabled": False}},
    ],
    ids=json.dumps,
)
def test_what_is_right_beside_its_stage_is_taken(content):
    assert check_deepspeed_json({"zero_optimization": {"stage": 2}} | content, "ds.json") == []


@pytest.mark.parametrize(
    ("stage", "content", "expected"),
    [
        (
            0,
            {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}},
            ["only supported with ZeRO Stage 1, 2, or 3"],
        ),
        (2, {"bf16": {"bf16_optimizer_states": True}}, ["requires bf16_master_weights_and_grads"]),
        (2, {"flops_profiler": 3}, ["zero=ds.json: flops_profiler: "]),
        (2, {"gradient_allreduce_op": "sum"}, ["gradient_allreduce_op:", "too large by the number of ranks"]),
        (2, {"zero_optimization": {"stage": 2, "cpu_offload": True}}, ["cpu_offload: an old name"]),
        (1, {"zero_optimization": {"stage": 1, "zenflow": {"topk_ratio": 0.1}}}, ["zero_optimization.zenflow:"]),
        (3, {"zero_optimization": {"stage": 3, "mics_shard_size": 2}}, ["mics_shard_size", "removed"]),
        (2, {"expert_parallel": {"enabled": True, "autoep_size": 2}}, ["expert_parallel.enabled:"]),
        (2, {"data_efficiency": {"enabled": True}}, ["data_efficiency.enabled:"]),
        (1, {"optimizer": {"type": "SGD", "params": {}}}, ["sgd", "add zero_allow_untested_optimizer=true"]),
        (1, {"optimizer": {"type": "Lamb", "params": {}}}, ["optimizer.type: lamb: ", "norms of whole weights"]),
    ],
    ids=lambda value: json.dumps(value)[:60] if isinstance(value, dict) else "",
)
def test_what_would_fail_after_loading_or_train_something_else_is_refused_by_name(stage, content, expected):
    (problem,) = check_deepspeed_json({"zero_optimization": {"stage": stage}} | content, "ds.json")
    assert all(part in problem for part in ["zero=ds.json: ", *expected]), problem


def test_a_key_that_stands_twice_in_a_file_is_named(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text('{"zero_optimization": {"stage": 2, "stage": 3}}')
    problems: list[str] = []
    read_zero_file(str(path), problems)
    assert problems == [f"zero={path}: not valid JSON (duplicate key 'stage'; keep one)"]


def test_whole_numbers_are_whole_however_they_are_written(tmp_path):
    file, problems = tmp_path / "ds.json", []
    file.write_text('{"train_batch_size": 16.0, "zero_optimization": {"reduce_bucket_size": 5e8}, "a": [1e-4, 2.5]}')
    content = read_zero_file(str(file), problems)
    numbers = [content["train_batch_size"], content["zero_optimization"]["reduce_bucket_size"], *content["a"]]
    assert problems == [] and [(type(each), each) for each in numbers] == [
        (int, 16),
        (int, 500_000_000),
        (float, 1e-4),
        (float, 2.5),
    ]


def test_an_adam_of_a_json_is_torchs_unless_it_is_offloaded_or_has_parameters_of_deepspeeds():
    def is_torchs(params: dict, zero: dict) -> bool:
        content = {"optimizer": {"type": "AdamW", "params": params}, "zero_optimization": zero}
        return "torch_adam" in follow_options(content, TrainConfig())["optimizer"]["params"]

    assert is_torchs({}, {"stage": 2})
    assert not is_torchs({"bias_correction": True}, {"stage": 2})
    assert not is_torchs({}, {"stage": 2, "offload_optimizer": {"device": "cpu"}})


@pytest.mark.parametrize("kind", ["AdamW", "adam", "Lion", "Muon", "SGD", "Adagrad"])
def test_what_a_json_leaves_out_of_its_optimizer_follows_the_options(kind):
    given = {"momentum": 0.9} if kind in ("SGD", "Muon") else {}
    content = {"optimizer": {"type": kind, "params": given}}
    expected = {"lr": "auto", "weight_decay": "auto"} | given
    if kind in ("AdamW", "adam"):
        expected |= {"eps": "auto", "betas": "auto", "torch_adam": True, "fused": True}
    plain = follow_options(content, TrainConfig())
    assert plain["optimizer"]["params"] == expected, "DeepSpeed's rate would be 1e-3"
    assert "lr" not in content["optimizer"]["params"], "a copy"
    if kind not in ("SGD", "Adagrad"):
        expected["betas"] = "auto"
    followed = follow_options(content, TrainConfig(training={"adam_beta2": 0.95}))
    assert followed["optimizer"]["params"] == expected
    kept = {"optimizer": {"type": kind, "params": expected | {"lr": 1e-4, "weight_decay": 0.1}}}
    assert follow_options(kept, TrainConfig(training={"weight_decay": 0})) == kept


@pytest.mark.parametrize("kind", ["Rprop", "SparseAdam", "LBFGS"])
def test_no_weight_decay_is_given_to_an_optimizer_that_takes_none(kind):
    assert follow_options({"optimizer": {"type": kind}}, TrainConfig())["optimizer"]["params"] == {"lr": "auto"}


def test_what_a_json_leaves_out_of_its_warm_up_follows_the_options():
    content = {"scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 9}}}
    followed = follow_options(content, TrainConfig())
    assert followed["scheduler"]["params"] == {"warmup_num_steps": "auto", "total_num_steps": 9}
