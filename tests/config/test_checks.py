"""Numbers that no run can mean are refused, by name and once."""

import typing

import pytest

from dsft.cli.commands import ChatOptions, PlanOptions, PreviewOptions
from dsft.config.checks import BOUNDS, check_config
from dsft.config.deepspeed import KINDS
from dsft.config.options import REFUSED_ARGUMENTS, EvalConfig, TrainConfig
from dsft.config.reader import check_values, field_types, make_config, training_types
from dsft.launch.launchers import LaunchOptions

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
        ("dataloader_num_workers", -1, "must be at least 0 and at most 256"),
        ("dataloader_num_workers", 100_000, "must be at least 0 and at most 256"),
        ("dataloader_prefetch_factor", 0, "must be at least 1"),
        ("num_train_epochs", 1e300, "at most 1,000,000"),
        ("global_batch_size", 10**12, "at most 10,000,000"),
        ("gradient_accumulation_steps", 10**9, "at most 10,000,000"),
        ("shuffle_buffer", 10**18, "at most 10,000,000"),
        ("neftune_noise_alpha", -5, "must be at least 0"),
        ("neftune_noise_alpha", 1e300, "at most 1,000"),
        ("load_timeout", 1e300, "at most 1,000,000 seconds"),
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


@pytest.mark.parametrize("cls", [TrainConfig, EvalConfig, LaunchOptions, PlanOptions, PreviewOptions])
def test_no_whole_number_is_beyond_what_libraries_count(cls):
    hints = training_types() if cls is TrainConfig else field_types(cls)
    names = [name for name, hint in hints.items() if int in (hint, *typing.get_args(hint))]
    assert names
    for value in (10**30, -(10**30)):
        problems: list[str] = []
        check_values(dict.fromkeys(names, value), hints, problems)
        named = [problem.partition("=")[0] for problem in problems]
        assert named == names, f"{value}: {sorted(set(names) ^ set(named))}"


def test_what_is_not_given_is_no_problem():
    assert check_config(TrainConfig(model="m", data=["d"], training={"output_dir": "run"})) == []
    assert problems_of(TrainConfig, max_steps=-1, save_steps=0.5, weight_decay=0, data_seed=0, seed=0) == []


@pytest.mark.parametrize("name", ["model", "data", "quantization", "group_by"])
def test_what_an_evaluation_is_to_do_twice_is_refused(name):
    assert problems_of(EvalConfig, **{name: ["none", "nf4", "none"]}) == [f"{name}: none is named twice; name it once"]
    assert problems_of(EvalConfig, **{name: ["none", "nf4"]}) == []


def test_every_bound_is_of_an_option_and_lets_its_default_through():
    """A bound of a name that no option has any more would hold nothing."""
    types = training_types() | field_types(EvalConfig, LaunchOptions, PreviewOptions, ChatOptions) | KINDS
    names = [name for bound in BOUNDS for name in bound[0].split()]
    assert len(set(names)) == len(names) and set(names) <= types.keys()
    assert problems_of(TrainConfig) == problems_of(EvalConfig) == []


CONTRADICTIONS = [
    {"streaming": True},
    {"streaming": True, "max_steps": 9, "eval_fraction": 0.1},
    {"streaming": True, "max_steps": 9, "dataloader_num_workers": 1},
    {"streaming": True, "max_steps": 9, "batch_tokens": 4096},
    {"global_batch_size": 8, "gradient_accumulation_steps": 2},
    {"batch_tokens": 4096, "packing": True},
    {"batch_tokens": 63, "seq_len": 64},
    {"batch_tokens": 4096, "global_batch_size": 8},
    {"data_weights": [1, 2]},
    {"data_weights": [0]},
    {"seq_len": 1},
    {"resume_weights_only": True},
    {"metric_for_best_model": "bleu"},
    {"metric_for_best_model": "eval_code_los", "eval_data": {"code": "a"}},
    {"eval_data": {"macro": "a"}},
    {"eval_data": {"a set": "a"}},
    {"early_stopping_patience": 2},
    {"early_stopping_patience": 2, "eval_data": ["a"], "eval_strategy": "no"},
    {"streaming": True, "max_steps": 9, "source_column": "domain"},
    {"optim": "galore_adamw_layerwise"},
    {"optim": "adalomo"},
    {"load_best_model_at_end": True, "save_only_model": True},
    {"adapter": "a"},
    {"bf16": True, "fp16": True},
    {"bf16": True, "dtype": "float32"},
    {"prompt_template": "{a}"},
    {"data_format": "template"},
    {"completion_template": "{a}", "data_format": "text"},
]
"""Options that cannot stand together, one fault each."""


@pytest.mark.parametrize("changes", CONTRADICTIONS, ids=str)
def test_a_contradiction_is_one_problem_that_names_an_option_of_it_and_goes_with_either(changes):
    problems = problems_of(TrainConfig, **changes)
    assert len(problems) == 1 and any(name in problems[0] for name in changes), problems
    if len(changes) > 1:  # without one of its options there is no contradiction left
        left = [problems_of(TrainConfig, **{key: changes[key] for key in changes if key != name}) for name in changes]
        assert [] in left, left


def test_problems_of_several_kinds_are_reported_at_once():
    """Each of them as when it is alone."""
    chosen = [{"data_weights": [0]}, {"adapter": "a"}, {"bf16": True, "dtype": "float32"}, {"lora_r": 0}]
    together = problems_of(TrainConfig, **{key: value for changes in chosen for key, value in changes.items()})
    assert sorted(together) == sorted(problem for changes in chosen for problem in problems_of(TrainConfig, **changes))


@pytest.mark.parametrize("name", [name for name in REFUSED_ARGUMENTS if name in training_types()])
def test_an_argument_that_would_do_nothing_is_refused_with_its_reason(name):
    hint = training_types()[name]
    value = True if hint is bool else "full_shard" if name == "fsdp" else {"a": 1}
    problems = problems_of(TrainConfig, **{name: value})
    assert len(problems) == 1 and problems[0].startswith(f"{name}: "), problems


@pytest.mark.parametrize(
    ("changes", "is_fine"),
    [
        ({"stride": 1, "seq_len": 8}, True),
        ({"stride": 7, "seq_len": 8}, True),
        ({"stride": 8, "seq_len": 8}, False),
        ({"batch_tokens": 8, "seq_len": 8}, True),
        ({"batch_tokens": 7, "seq_len": 8}, False),
        ({"batch_tokens": 7, "seq_len": 8, "context_curve": "2,4"}, True),
        ({"save_tokens": True}, False),
        ({"save_tokens": True, "output_dir": "o"}, True),
        ({"bad_rows": "drop"}, False),
    ],
    ids=str,
)
def test_an_evaluation_that_contradicts_itself_is_refused_and_its_neighbour_is_not(changes, is_fine):
    assert (problems_of(EvalConfig, **changes) == []) == is_fine
