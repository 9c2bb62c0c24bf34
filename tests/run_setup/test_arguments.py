"""What transformers is told, and what the user is told of options without effect."""

import dataclasses
import socket
from types import SimpleNamespace

import pytest
from ranks import on_ranks
from transformers import TrainingArguments

from dsft.config.checks import check_config
from dsft.config.options import IGNORED_ARGUMENTS, NEW_NAMES, REFUSED_ARGUMENTS, TrainConfig
from dsft.planner.optimizers import OPTIMIZERS
from dsft.run_setup.arguments import (
    check_training_arguments,
    check_zero_file,
    ignored_options,
    training_arguments,
    with_defaults,
)
from dsft.runtime.hardware import has_gpu

SIZE = SimpleNamespace(unadapted_expert_params=0)
PLAN = SimpleNamespace(
    micro_batch=3,
    accumulation=2,
    activation_checkpointing=True,
    deepspeed_config={"zero_optimization": {"stage": 1}, "train_micro_batch_size_per_gpu": "auto"},
)


def test_the_users_values_lie_over_dsfts_defaults():
    values = with_defaults(TrainConfig(training={"logging_steps": 3}))
    assert values["logging_steps"] == 3 and values["save_total_limit"] == 2 and values["eval_strategy"] == "no"
    assert values["use_cpu"] is True and values["remove_unused_columns"] is False
    assert "save_strategy" not in values and "activation_checkpointing_kwargs" not in values


def test_held_out_data_is_evaluated_each_epoch_and_the_best_model_is_saved_when_evaluated():
    held_out = TrainConfig(eval_fraction=0.1, training={"load_best_model_at_end": True})
    assert with_defaults(held_out)["eval_strategy"] == with_defaults(held_out)["save_strategy"] == "epoch"
    steps = TrainConfig(eval_data=["x"], training={"load_best_model_at_end": True, "eval_strategy": "steps"})
    assert with_defaults(steps)["save_strategy"] == "steps"
    explicit = TrainConfig(eval_data=["x"], training={"load_best_model_at_end": True, "save_strategy": "best"})
    assert with_defaults(explicit)["save_strategy"] == "best"


def test_of_two_names_for_activation_checkpointing_transformers_gets_one():
    old = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
    values = with_defaults(TrainConfig(training=old))
    assert values["activation_checkpointing_kwargs"] == {"use_reentrant": True}
    assert not values.keys() & old.keys()


def _told(many: list[TrainConfig]) -> list[dict]:
    names = (
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "activation_checkpointing",
        "include_num_input_tokens_seen",
    )
    told = []
    for options in many:
        args = training_arguments(options, PLAN)
        config = args.hf_deepspeed_config
        told.append(
            {name: getattr(args, name if hasattr(args, name) else NEW_NAMES[name]) for name in names}
            | {"dispatch_batches": args.accelerator_config.dispatch_batches, "zero3": config.is_zero3()}
        )
    return told


def test_copies_to_a_gpu_are_not_waited_for(monkeypatch, tmp_path):
    arguments = "dsft.run_setup.arguments"
    monkeypatch.setattr(f"{arguments}.TrainingArguments", lambda **values: SimpleNamespace(**values))
    monkeypatch.setattr(f"{arguments}.TrainingArguments.__dataclass_fields__", {*NEW_NAMES}, raising=False)
    (tmp_path / "own.json").write_text('{"even_batches": false}')

    def dealt(given=None, **options) -> dict:
        return training_arguments(
            TrainConfig(training={"accelerator_config": given}, **options), PLAN
        ).accelerator_config

    assert dealt() == {"non_blocking": False}  # there is no GPU
    monkeypatch.setattr(f"{arguments}.has_gpu", lambda: True)
    assert dealt(streaming=True) == {"non_blocking": True, "dispatch_batches": False}
    assert dealt({"non_blocking": False}) == {"non_blocking": False}
    assert dealt(str(tmp_path / "own.json")) == {"non_blocking": True, "even_batches": False}


def test_tiles_keep_the_loss_beside_liger_s_other_kernels(monkeypatch):
    monkeypatch.setattr("dsft.run_setup.arguments.TrainingArguments", lambda **values: SimpleNamespace(**values))
    monkeypatch.setattr("dsft.run_setup.arguments.TrainingArguments.__dataclass_fields__", {*NEW_NAMES}, raising=False)

    def config(**given):
        training = {"use_liger_kernel": True} | ({"liger_kernel_config": given["given"]} if "given" in given else {})
        arguments = training_arguments(TrainConfig(training=training, tiled_loss=given["tiled"]), PLAN)
        return vars(arguments).get("liger_kernel_config")

    tiled = {"fused_linear_cross_entropy": False, "cross_entropy": False}
    assert config(tiled=True) == tiled and config(tiled=False) is None
    assert config(tiled=True, given={"rope": False, "fused_linear_cross_entropy": True}) == tiled | {"rope": False}
    assert config(tiled=True, given='{"swiglu": false}') == tiled | {"swiglu": False}


def test_the_plan_decides_batches_and_checkpointing(tmp_path):
    training = {"output_dir": str(tmp_path), "report_to": "none", "max_steps": 2}
    many = [
        TrainConfig(training=training),
        TrainConfig(training=training | {"per_device_train_batch_size": 7, "gradient_checkpointing": False}),
        TrainConfig(training=training, batch_tokens=64),
        TrainConfig(training=training, packing=True),
        TrainConfig(training=training, streaming=True),
    ]
    plain, explicit, filled, packed, stream = on_ranks(1, _told, many)[0]
    assert (
        plain
        == explicit
        == {
            "per_device_train_batch_size": 3,
            "gradient_accumulation_steps": 2,
            "activation_checkpointing": True,
            "include_num_input_tokens_seen": "non_padding",
            "dispatch_batches": None,
            "zero3": False,
        }
    )
    assert filled == plain | {"per_device_train_batch_size": 1}
    assert packed == plain
    assert stream == plain | {"dispatch_batches": False}


@pytest.mark.parametrize(
    ("options", "deepspeed_config", "parts"),
    [
        (TrainConfig(), {}, []),
        (TrainConfig(training={"train_sampling_strategy": "random"}), {}, []),
        (TrainConfig(training={"train_sampling_strategy": "random"}, packing=True), {}, ["train_sampling_strategy"]),
        (TrainConfig(training={"train_sampling_strategy": "random"}, batch_tokens=9), {}, ["train_sampling_strategy"]),
        (TrainConfig(training={"train_sampling_strategy": "random"}, streaming=True), {}, ["train_sampling_strategy"]),
        (TrainConfig(eval_data=["x"]), {}, []),
        (TrainConfig(eval_data=["x"], eval_fraction=0.1), {}, ["eval_fraction: ignored, because eval_data"]),
        (TrainConfig(training={"use_cpu": True}), {}, ["use_cpu: ignored", "DS_ACCELERATOR=cpu"]),
        (TrainConfig(training={"do_train": True}), {}, ["do_train: ignored", "always trains"]),
        (TrainConfig(training={"eval_accumulation_steps": 4}), {}, ["eval_accumulation_steps: ignored", "no logits"]),
        (TrainConfig(training={"skip_memory_metrics": False}), {}, ["skip_memory_metrics: ignored", "peak_host_gib"]),
        (TrainConfig(training={"ddp_backend": "gloo"}), {}, ["ddp_backend: ignored", "DeepSpeed reduces gradients"]),
        (TrainConfig(training={"optim": "ademamix"}), {}, ["optim=ademamix: its memory", "AdamW's"]),
        (TrainConfig(training={"optim": "grokadamw"}), {}, ["optim=grokadamw: its memory"]),
        (TrainConfig(training={"optim": "adamw_torch"}), {"optimizer": {"type": "AdamW"}}, ["optim: ignored", "AdamW"]),
        (TrainConfig(), {"optimizer": {"type": "AdamW"}}, []),
        (TrainConfig(training={"weight_decay": 0.1}), {"optimizer": {"type": "AdamW"}}, ["weight_decay: DeepSpeed's"]),
        (TrainConfig(training={"weight_decay": 0.1}), {}, []),
        (TrainConfig(lora_r=8, use_dora=True), {}, ["lora_r, use_dora: ignored, because method is full"]),
        (TrainConfig(method="lora", lora_r=8), {}, []),
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


def test_arguments_without_effect_do_not_reach_transformers_and_are_its_own():
    fields = {field.name for field in dataclasses.fields(TrainingArguments)}
    assert {*IGNORED_ARGUMENTS, *REFUSED_ARGUMENTS} <= fields
    given = dict.fromkeys(IGNORED_ARGUMENTS, True) | {"output_dir": "x"}
    values = with_defaults(TrainConfig(training=given))
    set_by_dsft = {name: values[name] for name in IGNORED_ARGUMENTS if name in values}
    assert set_by_dsft == {"use_cpu": not has_gpu(), "remove_unused_columns": False, "logging_nan_inf_filter": False}


@pytest.mark.parametrize("name", REFUSED_ARGUMENTS)
def test_arguments_that_would_do_something_else_are_refused_with_a_way_out(name):
    def problems(value) -> list[str]:
        config = TrainConfig(model="m", data=["d"], training={"output_dir": "x", name: value})
        return [problem for problem in check_config(config) if problem.startswith(f"{name}: ")]

    assert problems(True) == [f"{name}: {REFUSED_ARGUMENTS[name]}"]
    assert problems(False) == problems(None) == []


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        ({"accelerator_config": {"split_batches": True}}, ["accelerator_config: split_batches", "global_batch_size"]),
        ({"accelerator_config": {"dispatch_batches": True}}, ["accelerator_config: dispatch_batches", "streaming"]),
        (
            {"accelerator_config": {"gradient_accumulation_kwargs": {"num_steps": 3}}},
            ["accelerator_config: num_steps", "gradient_accumulation_steps"],
        ),
        ({"accelerator_config": "own.json"}, ["accelerator_config: split_batches"]),
        ({"torch_compile_mode": "default"}, ["torch_compile_mode", "torch_compile: true"]),
        ({"torch_compile_mode": "default", "torch_compile": True}, []),
        ({"accelerator_config": {"even_batches": False}}, []),
    ],
)
def test_what_would_change_a_step_behind_the_plan_is_refused(given, parts, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.json").write_text('{"split_batches": true}')
    problems = check_training_arguments(TrainConfig(training={"output_dir": "x"} | given))
    assert len(problems) == bool(parts) and all(part in problems[0] for part in parts), problems


def test_deepcompile_alone_has_no_effect():
    machine, config = SimpleNamespace(measured=False, world_size=1), {"compile": {"deepcompile": True}}
    (problem,) = check_zero_file(config, TrainConfig(zero="ds.json"), machine)
    assert problem.startswith("zero=ds.json: compile.deepcompile has no effect without torch_compile")
    assert check_zero_file(config, TrainConfig(zero="ds.json", training={"torch_compile": True}), machine) == []


@pytest.mark.parametrize(
    ("training", "here", "expected"),
    [
        ({}, False, ["gains nothing while gradients are clipped (max_grad_norm=1.0)"]),
        ({"max_grad_norm": 0.5}, True, ["needs a GPU", "max_grad_norm=0.5"]),
        ({"max_grad_norm": 0}, True, ["needs a GPU"]),
        ({"max_grad_norm": 0}, False, []),
    ],
)
def test_super_offload_needs_a_gpu_and_no_clipping(training, here, expected):
    offload = {"device": "cpu", "super_offload": True}
    config = {"zero_optimization": {"stage": 3, "offload_optimizer": offload}}
    machine = SimpleNamespace(measured=here, world_size=1)
    problems = check_zero_file(config, TrainConfig(zero="ds.json", training=training), machine)
    assert len(problems) == len(expected)
    assert all(part in problem for part, problem in zip(expected, problems, strict=True)), problems


def test_rules_are_asked_without_meeting_the_ranks_that_variables_name(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:  # of the job whose variables a shell or notebook inherited
        job = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        for name, value in (job | {"MASTER_PORT": str(taken.getsockname()[1])}).items():
            monkeypatch.setenv(name, value)
        assert check_training_arguments(TrainConfig(training={"output_dir": "x"})) == []


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_optimizer_of_the_planner_needs_no_note(optimizer):
    assert ignored_options(TrainConfig(training={"optim": optimizer}), {}, SIZE) == []


def test_experts_that_get_no_adapter_are_counted():
    size = SimpleNamespace(unadapted_expert_params=1234)
    (note,) = ignored_options(TrainConfig(method="lora", lora_target_modules=["q_proj"]), {}, size)
    assert note.startswith("1,234 parameters of experts get no adapter") and "q_proj" in note
