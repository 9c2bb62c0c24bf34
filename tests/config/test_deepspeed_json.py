"""A DeepSpeed JSON: what DeepSpeed would ignore or cannot read is refused, and named."""

import json

import pytest

from dsft.config.deepspeed_json import known_names, read_zero_file
from dsft.config.deepspeed_rules import check_deepspeed_json

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
        ("", {"zero_optimizaton": "auto"}, ["zero_optimizaton: unknown key", "'zero_optimization'"]),
        ("", {"_comment": "mine"}, ["_comment: unknown key"]),
        ("zero_optimization", {"reduce_bucket_sise": 1}, ["zero_optimization.reduce_bucket_sise", "_size'"]),
        ("zero_optimization", {"reduce_bucket_sise": "auto"}, ["zero_optimization.reduce_bucket_sise", "_size'"]),
        (
            "zero_optimization.offload_optimizer",
            {"pin_memry": True},
            ["zero_optimization.offload_optimizer.pin_memry: unknown key", "'pin_memory'"],
        ),
        ("zero_optimization", {"stage": 4}, ["zero_optimization.stage"]),
        ("zero_optimization", {"overlap_comm": "perhaps"}, ["zero_optimization.overlap_comm"]),
        ("", {"zero_optimization": 3}, ["zero_optimization=3", "JSON object"]),
        ("", {"zero_optimization": "auto"}, ['zero_optimization="auto"', "nothing fills"]),
        ("", {"zero_optimization": None}, ["zero_optimization=null", "JSON object"]),
        ("", {"bf16": True}, ["bf16=true", "JSON object"]),
        ("bf16", {"enbled": True}, ["bf16.enbled: unknown key", "'enabled'"]),
        ("fp16", {"enabled": 7}, ["fp16.enabled"]),
        ("", {"fp16": {"enabled": True}, "bf16": {"enabled": True}}, ["bf16.enabled", "fp16.enabled", "keep one"]),
        ("activation_checkpointing", {"partition_activation": True}, ["activation_checkpointing.partition_activation"]),
        ("aio", {"block_sise": 1}, ["aio.block_sise: unknown key", "'block_size'"]),
        ("data_types", {"grad_acum_dtype": "fp32"}, ["data_types.grad_acum_dtype", "'grad_accum_dtype'"]),
        ("tensorboard", {"enabeld": True}, ["tensorboard.enabeld", "'enabled'"]),
        ("optimizer", {"parms": {"lr": 1}}, ["optimizer.parms: unknown key", "'params'"]),
        ("optimizer.params", {"weight_decy": 1}, ["optimizer.params.weight_decy: unknown", "'weight_decay'"]),
        ("optimizer", {"type": "Adom"}, ["optimizer.type", "'Adom'", "'Adam'"]),
        ("optimizer", {"type": "OneBitAdam"}, ["optimizer.type"]),
        ("scheduler", {"type": "WarmupRL"}, ["scheduler.type", "'WarmupRL'", "'WarmupLR'"]),
        ("scheduler.params", {"warmup_steps": 1}, ["scheduler.params.warmup_steps: unknown", "'warmup_num_steps'"]),
        ("", {"train_micro_batch_size_per_gpu": "four"}, ['train_micro_batch_size_per_gpu="four"', "whole number"]),
        ("", {"gradient_accumulation_steps": 0}, ["gradient_accumulation_steps=0", "at least 1"]),
        ("", {"train_batch_size": 2.5}, ["train_batch_size=2.5", "whole number"]),
        ("", {"gradient_clipping": "much"}, ['gradient_clipping="much"', "number"]),
        ("optimizer.params", {"lr": "1e-4"}, ['optimizer.params.lr="1e-4"', "number"]),
        ("", {"sparse_attention": {}}, ["Sparse Attention has been removed"]),
        ("", {"communication_data_type": "fp8"}, ["communication_data_type"]),
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


def test_all_faults_of_all_sections_come_at_once():
    config = {"zero_optimization": {"stage": 2, "a_key": 1, "b_key": 2}, "bf16": {"c_key": 1}, "d_key": 1}
    problems = check_deepspeed_json(config, "ds.json")
    assert sorted(problem.partition("ds.json: ")[2].partition(":")[0] for problem in problems) == [
        "bf16.c_key",
        "d_key",
        "zero_optimization.a_key",
        "zero_optimization.b_key",
    ]


def test_a_key_that_stands_twice_in_a_file_is_named(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text('{"zero_optimization": {"stage": 2, "stage": 3}}')
    problems: list[str] = []
    read_zero_file(str(path), problems)
    assert problems == [f"zero={path}: the key 'stage' is there twice; keep one"]
