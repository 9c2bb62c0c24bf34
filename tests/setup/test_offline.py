"""`dsft plan` decides what `dsft train` would, and says what it rounds and what it takes for granted."""

import dataclasses
import itertools
import json

import pytest
import yaml
from conftest import grid
from peft import LoraConfig, get_peft_model
from tiny import ARCHITECTURES, write_model
from transformers import AutoModelForCausalLM, GptOssConfig

from dsft.cli.main import main
from dsft.config.options import TrainConfig
from dsft.config.reader import make_config
from dsft.models import probes
from dsft.models.measure import USUAL_MODELS
from dsft.planner.choose import as_dict
from dsft.planner.speed import CARDS
from dsft.runtime.hardware import Machine, this_machine
from dsft.setup import decide
from dsft.setup.decide import auto_dtype, resolve_offline, resolve_run
from dsft.units import GB

EIGHT_GPUS = Machine(
    nodes=1, ranks_per_node=8, device_bytes=CARDS["A100-80GB"].usable_bytes, host_bytes=1000 * GB, has_gpu=True
)
BATCH = "per_device_train_batch_size"
LORA = {"method": "lora", "lora_target_modules": ["q_proj", "v_proj"], "lora_r": 4}
VARIANTS = {
    "no batch": {BATCH: None},
    "lora": {"activation_checkpointing": True, "optim": "rmsprop", **LORA},
    "a stage": {"zero": "3", BATCH: 1, "gradient_accumulation_steps": 2},
    "offload": {"zero": "2-offload", BATCH: None, "global_batch_size": 64},
    "packed": {"data": "PAIRS", "packing": True, BATCH: None},
    "pairs": {"data": "PAIRS", "gradient_accumulation_steps": 3},
    "fp32": {"dtype": "float32", "activation_checkpointing": False},
}


@pytest.fixture
def asked(options, tiny, tmp_path):
    """The options of a variant, as a YAML file would hold them."""

    def make(**changes) -> dict:
        if changes.get("data") == "PAIRS":
            changes["data"] = str(tiny / "pairs.jsonl")
        return options(tmp_path / "run", **{"dtype": "bfloat16", "seq_len": 32, **changes})

    return make


KINDS = [*VARIANTS, *map(" ".join, itertools.product(ARCHITECTURES, ("full", "lora")))]


@pytest.mark.parametrize("kind", grid(KINDS, ["no batch", "lora", "a stage", "packed", "mixtral lora"]))
def test_a_config_is_planned_as_it_would_be_trained(asked, capsys, tmp_path, kind):
    if kind in VARIANTS:
        changes = VARIANTS[kind]
    else:
        architecture, method = kind.split()
        changes = {"model": str(write_model(tmp_path / "model", architecture)), "method": method, BATCH: None}
    values = asked(**changes)
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(values))
    problems: list[str] = []
    config = make_config(TrainConfig, values, problems)
    trained = resolve_run(config, machine=EIGHT_GPUS, problems=problems)
    main(["plan", "--config", str(file), "--gpus", "8x80GB", "--json"])
    on_paper = json.loads(capsys.readouterr().out)["chosen"]
    assert on_paper == json.loads(json.dumps(as_dict(trained.plan) | {"reason": trained.reason}))


def test_the_size_has_the_rank_of_the_adapter_that_is_trained_further(asked, tiny, tmp_path):
    adapter = str(tmp_path / "adapter")
    model = AutoModelForCausalLM.from_pretrained(tiny / "model")
    get_peft_model(model, LoraConfig(r=3, task_type="CAUSAL_LM", target_modules="all-linear")).save_pretrained(adapter)
    for changes, rank in (({"adapter": adapter}, 3), ({}, 16)):
        run = resolve_offline(make_config(TrainConfig, asked(method="lora", **changes), []), EIGHT_GPUS)
        assert run.job.size.lora_r == rank


def test_auto_is_what_the_card_computes_in():
    types = {name: auto_dtype(dataclasses.replace(EIGHT_GPUS, gpu_type=name)) for name in ("T4", "V100-32GB", "H100")}
    assert types == {"T4": "float32", "V100-32GB": "float32", "H100": "bfloat16"}
    assert auto_dtype(dataclasses.replace(EIGHT_GPUS, has_gpu=False)) == "float32"


@pytest.mark.parametrize("name", ["meta-llama/Llama-3.1-70B", "Qwen/Qwen2.5-0.5B"])
def test_a_usual_model_is_planned_without_the_hub(name):
    run = resolve_offline(TrainConfig(model=name, method="lora", training={"use_liger_kernel": False}), EIGHT_GPUS)
    assert run.model.size.num_layers == USUAL_MODELS[name]["num_hidden_layers"]
    assert run.notes == ["learning_rate 0.0001 is the default of method=lora"]


@pytest.mark.parametrize("kernels", grid(["none computes", "tried"], ["none computes"]))
def test_a_model_without_sdpa_is_planned_with_the_attention_that_a_gpu_takes(tmp_path, monkeypatch, kernels):
    few = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4}
    GptOssConfig(hidden_size=64, intermediate_size=64, head_dim=16, vocab_size=512, **few).save_pretrained(tmp_path)
    options = TrainConfig(model=str(tmp_path / "config.json"), dtype="bfloat16", seq_len=128)
    on_gpus = resolve_offline(options, EIGHT_GPUS)
    assert on_gpus.job.attention == "flash" and any("flex_attention" in note for note in on_gpus.notes)
    for other in ({"dtype": "float32"}, {"attn_implementation": "eager"}):
        assert resolve_offline(dataclasses.replace(options, **other), EIGHT_GPUS).job.attention == "eager"
    monkeypatch.setattr(decide, "has_gpu", lambda: True)  # one on which neither kernel computes: here the CPU
    if kernels == "tried":  # flex attention is compiled for it, which takes seconds
        monkeypatch.setattr(probes, "has_gpu", lambda: True)
    else:
        monkeypatch.setattr(decide, "attention_like_eager", lambda *_, **__: None)
    without = resolve_offline(options, this_machine())
    assert without.job.attention == "eager" and any("gpt_oss has no sdpa" in note for note in without.notes)
