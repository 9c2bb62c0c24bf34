"""Numbers that no run can mean are refused, by name and once."""

import pytest

from dsft.config.checks import check_config
from dsft.config.options import EvalConfig, TrainConfig
from dsft.config.reader import make_config

TRAIN = {"model": "m", "data": "d.jsonl", "output_dir": "run"}
EVAL = {"model": "m", "data": "d.jsonl"}


def problems_of(cls: type, **changes) -> list[str]:
    problems: list[str] = []
    make_config(cls, (TRAIN if cls is TrainConfig else EVAL) | changes, problems)
    return problems


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("lora_alpha", 0, "must be at least 1"),
        ("lora_alpha", -16, "must be at least 1"),
        ("lora_r", 0, "must be at least 1"),
        ("max_steps", -2, "must be at least 1, or -1"),
        ("max_steps", 0, "must be at least 1, or -1"),
        ("learning_rate", "nan", "expected a finite number"),
        ("learning_rate", float("inf"), "expected a finite number"),
        ("learning_rate", -1e-4, "must not be negative"),
        ("num_train_epochs", 0, "must be more than 0"),
        ("num_train_epochs", -3, "must be more than 0"),
        ("weight_decay", -0.1, "must not be negative"),
        ("warmup_steps", -5, "must not be negative"),
        ("max_grad_norm", -1, "must not be negative"),
        ("adam_beta1", 1.0, "must be at least 0 and less than 1"),
        ("adam_beta2", -0.1, "must be at least 0 and less than 1"),
        ("adam_epsilon", -1e-8, "must not be negative"),
        ("label_smoothing_factor", 1.5, "must be at least 0 and less than 1"),
        ("logging_steps", -5, "must be more than 0"),
        ("save_steps", 0, "must be more than 0"),
        ("eval_steps", -1, "must be more than 0"),
        ("per_device_eval_batch_size", 0, "must be at least 1"),
        ("per_device_train_batch_size", 0, "must be at least 1"),
        ("gradient_accumulation_steps", -1, "must be at least 1"),
        ("global_batch_size", 0, "must be at least 1"),
        ("dataloader_num_workers", -1, "must not be negative"),
        ("seed", -1, "must be at least 0 and less than 4294967296"),
        ("data_seed", 2**32, "must be at least 0 and less than 4294967296"),
        ("ddp_timeout", 0, "must be at least 1"),
        ("lora_dropout", 1.0, "must be at least 0 and less than 1"),
        ("eval_fraction", 1, "must be at least 0 and less than 1"),
        ("shuffle_buffer", 0, "must be at least 1"),
        ("save_minutes", 0, "must be more than 0"),
        ("step_timeout", 0, "must be more than 0"),
        ("step_timeout", "nan", "expected a finite number"),
        ("data_weights", ["nan"], "expected a finite number"),
    ],
)
def test_a_number_out_of_bounds_is_named_once_with_its_bounds(name, value, expected):
    problems = problems_of(TrainConfig, **{name: value})
    assert len(problems) == 1 and problems[0].startswith(name) and expected in problems[0], problems


@pytest.mark.parametrize(
    ("name", "value"), [("seed", -1), ("max_documents", 0), ("verify", -1), ("batch_tokens", 0), ("stride", 0)]
)
def test_an_evaluation_s_numbers_too(name, value):
    problems = problems_of(EvalConfig, **{name: value})
    assert len(problems) == 1 and problems[0].startswith(name), problems


def test_what_is_not_given_is_no_problem():
    assert check_config(TrainConfig(model="m", data=["d"], training={"output_dir": "run"})) == []
    assert problems_of(TrainConfig, max_steps=-1, save_steps=0.5, weight_decay=0, data_seed=0, seed=0) == []


@pytest.mark.parametrize("name", ["model", "data", "quantization", "group_by"])
def test_what_an_evaluation_is_to_do_twice_is_refused(name):
    assert problems_of(EvalConfig, **{name: ["none", "nf4", "none"]}) == [f"{name}: none is named twice; name it once"]
    assert problems_of(EvalConfig, **{name: ["none", "nf4"]}) == []
