"""Parameters that are trained by pattern: what is frozen stays as it was, is saved, planned and resumed."""

import pytest
import torch
from conftest import grid, needed_cases, read_json
from ranks import on_ranks, train_all, trained
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from dsft.checkpoints.export import export
from dsft.config.options import TrainConfig
from dsft.config.reader import make_config
from dsft.errors import UserError
from dsft.models.build import build_model
from dsft.models.measure import measure_model
from dsft.setup.arguments import checkpoint_size

FROZEN = {"frozen": ["embed_tokens", r"layers\.0\."]}
CASES = {
    **{f"frozen-{zero}": FROZEN | {"zero": zero} for zero in "0123"},
    "chosen": {"trainable": ["norm", "lm_head"], "zero": "2"},
    "adapter-A": {"frozen": ["lora_A"], "method": "lora", "zero": "3"},
    "whole": FROZEN | {"zero": "3", "max_steps": 4},
    "resumed": FROZEN | {"zero": "3", "max_steps": 4},
    "resharded": FROZEN | {"zero": "2", "max_steps": 4},
}
FULL = [*CASES][:5]


@pytest.fixture(scope="module")
def runs(request, options, tmp_path_factory):
    folder, needed = tmp_path_factory.mktemp("trained"), needed_cases(request)
    saves = {"save_strategy": "steps", "save_steps": 2, "logging_steps": 1}
    cases = {name: options(folder / name, **changes, **saves) for name, changes in CASES.items()}
    for name in ("resumed", "resharded"):
        cases[name]["resume_from_checkpoint"] = str(folder / "whole" / "checkpoint-2")
    train_all(2, [case for name, case in cases.items() if name in needed], folder / "log.txt")
    return folder


def changed(folder, model) -> set[str]:
    """Names of the weights that are not those of `model`."""
    before, after = (AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (model, folder))
    return {name for name in before if not torch.equal(before[name], after[name])}


@pytest.mark.launch
@pytest.mark.cases("{name}")
@pytest.mark.parametrize(
    "name", grid([name for name in CASES if name[:6] in ("frozen", "chosen", "whole")], ["whole", "chosen"])
)
def test_only_what_patterns_choose_is_trained_and_all_is_saved(runs, tiny, tmp_path, name):
    names = AutoModelForCausalLM.from_pretrained(tiny / "model").state_dict().keys()
    if name == "chosen":
        expected = {each for each in names if "norm" in each or "lm_head" in each}
    else:
        expected = {each for each in names if "embed_tokens" not in each and "layers.0." not in each}
    assert changed(runs / name / "final", tiny / "model") == expected
    last = runs / name / f"checkpoint-{CASES[name].get('max_steps', 2)}"
    assert changed(export(str(last), str(tmp_path / "out")), runs / name / "final") == set()


@pytest.mark.launch
@pytest.mark.cases("adapter-A")
def test_frozen_adapters_are_saved_with_what_is_trained(runs):
    """Under ZeRO-3 the Trainer's own gather leaves out what is not trained."""
    run = runs / "adapter-A"
    assert read_json(run / "run.json")["results"]["steps"] == 2
    tensors = load_file(run / "final" / "adapter_model.safetensors")
    of_a, of_b = ([tensor for name, tensor in tensors.items() if part in name] for part in ("lora_A", "lora_B"))
    assert len(of_a) == len(of_b) > 0
    assert all(tensor.abs().sum() > 0 for tensor in of_a), "as they were drawn"


@pytest.mark.launch
@pytest.mark.cases("whole", "{name}")
@pytest.mark.parametrize("name", ["resumed", "resharded"])
def test_a_run_with_frozen_weights_resumes_on_its_stage_and_on_another(runs, name):
    logs = [read_json(runs / each / "run.json")["results"]["log"] for each in ("whole", name)]
    losses = [{entry["step"]: entry["loss"] for entry in log if "loss" in entry} for log in logs]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5) and max(losses[1]) == 4
    assert changed(runs / name / "final", runs / "whole" / "final") == set() or name == "resharded"


def test_the_plan_and_the_disk_count_what_is_trained(tiny):
    whole, frozen = (measure_model(TrainConfig(model=str(tiny / "model"), **changes)).size for changes in ({}, FROZEN))
    assert 0 < frozen.num_trainable < whole.num_trainable == whole.num_params == frozen.num_params
    assert whole.trained_share == 1 and frozen.trained_share == frozen.num_trainable / frozen.num_params
    config = make_config(TrainConfig, {"dtype": "float32"}, [])
    assert checkpoint_size(config, frozen).weight_bytes == checkpoint_size(config, whole).weight_bytes
    assert checkpoint_size(config, frozen).state_bytes < checkpoint_size(config, whole).state_bytes


def test_adapters_that_are_frozen_in_part_take_the_bytes_on_the_disk_that_are_counted(tiny, tmp_path):
    options = TrainConfig(model=str(tiny / "model"), method="lora", frozen=["lora_A"])
    model, size = build_model(options, dtype="float32"), measure_model(options).size
    model.save_pretrained(tmp_path)
    written = sum(tensor.nbytes for tensor in load_file(tmp_path / "adapter_model.safetensors").values())
    counted = checkpoint_size(make_config(TrainConfig, {"dtype": "float32"}, []), size)
    assert counted.weight_bytes == written > 4 * size.num_trainable


PROBLEMS = {
    "frozen: 'embed_token$' finds no parameter that is trained; such as model.embed_tokens.weight": {
        "frozen": ["embed_token$"]
    },
    "trainable and frozen leave nothing to train": {"trainable": ["lm_head"], "frozen": ["lm_head"]},
}


@pytest.mark.parametrize("problem", PROBLEMS)
def test_a_pattern_that_finds_nothing_is_refused_by_name(tiny, problem):
    with pytest.raises(UserError) as error:
        measure_model(TrainConfig(model=str(tiny / "model"), **PROBLEMS[problem]))
    assert str(error.value).startswith(problem)


def _rates(cases: list[dict]) -> list[list[float]]:
    return [[group["initial_lr"] for group in trained(case).model_wrapped.optimizer.param_groups] for case in cases]


def test_learning_rates_are_multiples_of_the_one_that_is_logged(options, tmp_path):
    changes = {"learning_rates": {"norm": 0.5, "embed": 3}, "lr_scheduler_type": "linear"}
    (rates,) = on_ranks(1, _rates, [options(tmp_path / zero, zero=zero, **changes) for zero in "23"])
    for zero, initial in zip("23", rates, strict=True):
        assert sorted(set(initial)) == pytest.approx([5e-3, 1e-2, 3e-2])
        logged = read_json(tmp_path / zero / "run.json")["results"]["log"][0]["learning_rate"]
        assert logged == pytest.approx(1e-2)


def _plus_rates(case: dict) -> list[tuple[float, list[str]]]:
    trainer = trained(case)
    names = {parameter: name for name, parameter in trainer.model.named_parameters()}
    groups = trainer.create_optimizer().param_groups
    return [(group["initial_lr"], sorted({names[p].split(".")[-3] for p in group["params"]})) for group in groups]


def test_lora_plus_trains_b_matrices_faster(options, tmp_path):
    case = options(tmp_path / "run", zero="0", method="lora", loraplus_lr_ratio=16)
    (groups,) = on_ranks(1, _plus_rates, case)
    assert groups == [(pytest.approx(1e-2), ["lora_A"]), (pytest.approx(0.16), ["lora_B"])]
