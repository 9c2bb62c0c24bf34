"""Trainings over models that are quantised on disk: unpacked while they load, planned so, or refused before."""

import copy
import json

import pytest
import torch
import transformers
from conftest import read_json
from packages import write_package
from peft import PeftModel
from quantized import as_fp8, describe, write_certain_model
from ranks import PROBE, train_all
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig
from transformers.quantizers.auto import get_hf_quantizer

from dsft.api import evaluate_all
from dsft.checkpoints.export import merge
from dsft.config.options import EvalConfig, TrainConfig
from dsft.errors import UserError
from dsft.models import build
from dsft.models.build import build_model, weight_problems
from dsft.models.measure import measure_model
from dsft.models.package import quantization_on_disk, unpacking_config
from dsft.planner.memory import Job, ZeroLayout
from dsft.runtime.hardware import Machine
from dsft.setup.arguments import ignored_options
from dsft.setup.evaluation import candidate_of

SECTIONS = {
    "fp8": {"weight_block_size": [16, 16], "modules_to_not_convert": ["lm_head"]},
    "mxfp8": {"weight_block_size": [1, 32]},
    "mxfp4": {"modules_to_not_convert": ["lm_head"]},
}


@pytest.fixture(scope="module")
def fp8(tmp_path_factory):
    """The folder of a model in FP8, and the same model unpacked."""
    folder = tmp_path_factory.mktemp("quantized")
    return as_fp8(write_certain_model(folder / "plain", intermediate_size=64), folder / "fp8")


def test_adapters_train_over_fp8_that_is_unpacked_and_are_evaluated_and_merged(
    fp8, options, tiny, tmp_path, monkeypatch
):
    folder, unpacked = fp8
    changes = {"model": str(folder), "method": "lora", "max_steps": 2, "learning_rate": 0.01}
    train_all(1, [options(tmp_path / "run", **changes)], tmp_path / "log")
    final, trained = tmp_path / "run" / "final", torch.load(tmp_path / "run" / "logits.pt")
    with torch.no_grad():
        assert (trained - unpacked(input_ids=PROBE).logits).abs().max() > 1e-3
        adapted = PeftModel.from_pretrained(copy.deepcopy(unpacked), final)
        torch.testing.assert_close(adapted(input_ids=PROBE).logits, trained)
    held_out = {"data": [str(tiny / "held_out.jsonl")], "seq_len": 32, "max_documents": 6}
    loads, load = [], build.load_weights
    monkeypatch.setattr(build, "load_weights", lambda name, **how: loads.append(how) or load(name, **how))
    (evaluation,) = evaluate_all(EvalConfig(model=[str(final)], **held_out))
    assert evaluation.perplexity.loss > 0 and loads[0]["quantization_config"].dequantize, (
        "on GPUs too, as it was trained"
    )
    assert candidate_of(EvalConfig(), str(final), []).facts.size.quantization.is_unpacked
    merged = AutoModelForCausalLM.from_pretrained(merge(str(final), str(tmp_path / "merged")))
    assert not hasattr(merged.config, "quantization_config")
    with torch.no_grad():
        torch.testing.assert_close(merged(input_ids=PROBE).logits, trained)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_base_of_adapters_takes_the_bytes_that_are_planned_on_any_device(fp8, dtype):
    options = TrainConfig(model=str(fp8[0]), method="lora")
    model, size = build_model(options, dtype=dtype), measure_model(options).size
    base = sum(p.nbytes for p in model.parameters() if not p.requires_grad)
    for has_gpu in (False, True):
        machine = Machine(nodes=1, ranks_per_node=2, device_bytes=10**12, host_bytes=10**12, has_gpu=has_gpu)
        job = Job(size=size, model_config=None, dtype=dtype)
        assert ZeroLayout(job, {}, machine, accumulation=1).frozen_bytes == base


@pytest.mark.parametrize("method", SECTIONS)
def test_trainings_unpack_on_gpus_that_would_keep_the_format(fp8, monkeypatch, method):
    """Of a GPU only its answers are needed: what it can compute, and that there are kernels."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    config = AutoConfig.from_pretrained(fp8[0])
    config.quantization_config = {"quant_method": method} | SECTIONS[method]
    quantizer, loaded, _ = get_hf_quantizer(config, unpacking_config(config), None, True, {})
    assert quantizer.quantization_config.dequantize
    assert loaded.quantization_config.modules_to_not_convert == SECTIONS[method].get("modules_to_not_convert")
    assert quantization_on_disk(config, trained=True).is_unpacked
    assert not quantization_on_disk(config).is_unpacked, "evaluations keep what the GPU can"


@pytest.mark.parametrize("section", [{"quant_method": "fp8", "weight_block_size": [16, 16]}, {"quant_method": "mxfp4"}])
def test_full_training_of_quantised_weights_is_refused(fp8, tmp_path, section):
    (tmp_path / "config.json").write_text((fp8[0] / "config.json").read_text())
    model = describe(tmp_path, section)
    with pytest.raises(UserError, match=f"quantised \\({section['quant_method']}\\), which method=full cannot train"):
        measure_model(TrainConfig(model=model))
    with pytest.raises(UserError, match="and method=qlora would do so again; use method lora"):
        measure_model(TrainConfig(model=model, method="qlora"))
    assert not measure_model(TrainConfig(model=model), scored=True).size.quantization.is_unpacked


def test_qlora_trains_over_the_format_that_bitsandbytes_has_left_on_disk(fp8, tmp_path):
    (tmp_path / "config.json").write_text((fp8[0] / "config.json").read_text())
    for section, bits in ({"load_in_8bit": True}, 8), ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, 4):
        model = describe(tmp_path, {"quant_method": "bitsandbytes"} | section)
        size = measure_model(TrainConfig(model=model, method="qlora", quantization="nf4")).size
        assert (size.quantization.format, size.quantization.bits) == ("bitsandbytes", bits)
    (note,) = ignored_options(TrainConfig(model=model, method="qlora", quantization="int8"), {}, size)
    assert note == f"quantization: ignored, because {model} is already bitsandbytes on disk"


def test_weights_of_a_package_may_be_quantised_by_its_text_config_alone(tmp_path):
    model = write_package(tmp_path / "model", "llava")
    config = read_json(model / "config.json")
    config["text_config"]["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    (model / "config.json").write_text(json.dumps(config))
    facts = measure_model(TrainConfig(model=str(model), method="lora"))
    assert facts.size.quantization.format == "gptq"
    assert weight_problems(str(model), facts) == [], "left to what knows the format, which asks for a package"


@pytest.mark.parametrize(
    ("section", "bits"),
    [
        ({"quant_method": "gptq", "bits": 3}, 3),
        ({"quant_method": "fp8"}, 8),
        ({"quant_method": "mxfp4"}, 4),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 4),
        ({"quant_method": "unheard of"}, 8),
    ],
    ids=str,
)
def test_a_model_on_disk_has_the_bits_that_its_format_names(section, bits):
    config = LlamaConfig(quantization_config=section)
    assert quantization_on_disk(config).bits == bits
    assert quantization_on_disk(LlamaConfig()) is None


def test_experts_are_counted_by_their_class_whatever_their_dimensions(tmp_path):
    """gpt-oss has biases of two dimensions, JetMoE no module called experts."""
    small = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    for config, names in (
        (transformers.GptOssConfig(**small, num_local_experts=4, head_dim=8), ("experts",)),
        (transformers.JetMoeConfig(**small, num_local_experts=4, kv_channels=8), ("input_linear", "output_linear")),
    ):
        config.save_pretrained(tmp_path / config.model_type)
        size = measure_model(TrainConfig(model=str(tmp_path / config.model_type / "config.json"))).size
        model = AutoModelForCausalLM.from_config(config)
        expected = sum(p.numel() for name, p in model.named_parameters() if {*names} & {*name.split(".")})
        assert size.expert_params == expected > 0, config.model_type
