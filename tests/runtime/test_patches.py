"""Laws of what dsft replaces in libraries: known code, one test each, the same applied once or twice, changes told."""

import ast
import dataclasses
import importlib.metadata
import subprocess
import sys

import pytest
from conftest import ROOT
from deepspeed import DeepSpeedEngine
from transformers import LlamaConfig
from transformers.integrations import deepspeed as transformers_deepspeed
from without_patches import TESTS

from dsft.errors import UserError
from dsft.models.size import empty_model
from dsft.runtime import patches
from dsft.runtime.patches import PATCHES


@pytest.mark.parametrize("name", PATCHES)
def test_every_patch_knows_the_installed_code(name):
    assert PATCHES[name].digest() in PATCHES[name].seen.values()
    assert PATCHES[name].change == ""


def test_every_patch_has_a_test_that_fails_without_it():
    assert sorted(name for names in TESTS.values() for name in names) == sorted(PATCHES)


@pytest.mark.parametrize("place", TESTS)
def test_each_test_that_fails_without_a_patch_exists(place):
    file, _, test = place.partition("::")
    nodes = ast.parse((ROOT / "tests" / file).read_text()).body
    assert test in [node.name for node in nodes if isinstance(node, ast.FunctionDef)]


def test_patches_are_listed_without_an_import_of_a_library():
    code = (
        "import sys; from dsft.runtime.patches import active_patches; patches = active_patches();"
        " assert all(patch.change == '' and patch.digest() for patch in patches.values()) and patches;"
        " assert not {'torch', 'transformers', 'deepspeed', 'peft'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


class Counter:
    """In the place of a library's class."""

    def clip_fp32_gradients(self) -> int:
        return 1


def test_applied_twice_a_patch_is_as_applied_once():
    counter = Counter()
    for _ in range(2):
        patches.replace("kept_norm", lambda count: lambda: count() + 1, on=counter)
    assert counter.clip_fp32_gradients() == 2


def test_after_its_with_a_patch_is_gone_where_it_was_nested_too():
    original, counter = DeepSpeedEngine.clip_fp32_gradients, Counter()
    with patches.replaced("kept_norm", lambda _: "outer"):
        with patches.replaced("kept_norm", lambda search: "inner" if search is original else search):
            assert DeepSpeedEngine.clip_fp32_gradients == "inner"
        assert DeepSpeedEngine.clip_fp32_gradients == "outer"
    assert DeepSpeedEngine.clip_fp32_gradients is original
    with patches.replaced("kept_norm", lambda count: lambda: count() + 1, on=counter):
        assert counter.clip_fp32_gradients() == 2
    assert counter.clip_fp32_gradients() == 1


@pytest.fixture(params=["changed", "gone"])
def changed(request, monkeypatch):
    """Has a patch stand for other code than the installed."""

    def change(name: str) -> str:
        patch = dataclasses.replace(PATCHES[name], seen={"0.0.1": "0123456789ab"})
        if request.param == "gone":
            patch = dataclasses.replace(patch, code=(f"{patch.target}_of_another_release",))
        monkeypatch.setitem(PATCHES, name, patch)
        return "has no longer" if request.param == "gone" else "changed"

    return change


def test_a_changed_library_whose_results_could_be_wrong_is_refused_in_one_line(changed):
    how = changed("first_step_of_zeros")
    with pytest.raises(UserError) as refused:
        patches.fits("first_step_of_zeros")
    (line,) = refused.value.problems
    version = importlib.metadata.version("deepspeed")
    assert line.startswith(f"deepspeed {version} {how} ")
    assert PATCHES["first_step_of_zeros"].why in line
    assert line.endswith("pip install deepspeed==0.0.1")


def test_a_patch_that_saves_time_is_left_out_where_the_library_changed(changed):
    changed("kept_norm")
    original = DeepSpeedEngine.clip_fp32_gradients
    with patches.replaced("kept_norm", lambda _: None):
        assert DeepSpeedEngine.clip_fp32_gradients is original
    assert "left out" in PATCHES["kept_norm"].change


def test_a_model_of_one_rank_is_whole_while_a_training_shards():
    config = transformers_deepspeed.HfDeepSpeedConfig({"zero_optimization": {"stage": 3}})
    try:
        model = empty_model(LlamaConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=32))
        assert all(weight.dim() and not hasattr(weight, "ds_id") for weight in model.parameters())
        assert transformers_deepspeed.is_deepspeed_zero3_enabled()
    finally:
        transformers_deepspeed.unset_hf_deepspeed_config()
        del config
