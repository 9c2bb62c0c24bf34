"""Quantised models are evaluated beside the model they were made from; what cannot be is refused before loading."""

import importlib.util
import json
import re
import shutil

import pytest
import torch
from quantized import as_fp8, describe, write_certain_model, write_gguf
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from dsft.api import evaluate_all
from dsft.cli.main import main
from dsft.config.options import EvalConfig
from dsft.errors import UserError
from dsft.models.weight_files import model_identity
from dsft.planner.choose import plan_evaluation
from dsft.runtime.hardware import this_machine
from dsft.setup.evaluation import candidate_of

ON_DISK = {
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 128}, 4),
    "awq": ({"quant_method": "awq", "bits": 4}, 4),
}


def needs(package):
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"{package} is not installed")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The folder of a model whose layers groups of 32 weights divide, and that predicts with some certainty."""
    return write_certain_model(tmp_path_factory.mktemp("quantized") / "model", intermediate_size=64)


def options_for(tiny, **changes) -> dict:
    base = {"model": [str(tiny / "model")], "data": [str(tiny / "held_out.jsonl")], "seq_len": 32}
    return base | {"batch_tokens": 256, "max_documents": 6} | changes


def results(tiny, **changes):
    return list(evaluate_all(EvalConfig(**options_for(tiny, **changes))))


def refusals(tiny, **changes) -> list[str]:
    with pytest.raises(UserError) as caught:
        results(tiny, **changes)
    return caught.value.problems


def loss_of(model: torch.nn.Module, tiny, evaluation) -> float:
    """Nats per token of a model that is in memory, in the windows of `evaluation`, with plain logits."""
    tokenizer = AutoTokenizer.from_pretrained(tiny / "model")
    rows = [json.loads(line)["text"] for line in (tiny / "held_out.jsonl").read_text().splitlines()[:6]]
    ids = torch.tensor([token for text in rows for token in [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]])
    nats, tokens = 0.0, 0
    for window in ids.split(evaluation.options["seq_len"]):
        log_probs = model(input_ids=window[None]).logits[0, :-1].double().log_softmax(-1)
        nats -= log_probs.gather(1, window[1:, None]).sum().item()
        tokens += len(window) - 1
    assert tokens == evaluation.perplexity.tokens
    return nats / tokens


@torch.no_grad()
def test_a_model_that_is_quantised_on_disk_is_evaluated_as_it_lies_and_a_missing_weight_is_told(tiny, model, tmp_path):
    folder, unpacked = as_fp8(model, tmp_path / "fp8")
    evaluation, plain = results(tiny, model=[str(folder), str(model)])
    apart = abs(evaluation.perplexity.loss - plain.perplexity.loss)
    assert abs(evaluation.perplexity.loss - loss_of(unpacked, tiny, evaluation)) < apart / 20
    assert (evaluation.options["quantization"], evaluation.zero, evaluation.model) == ("fp8", "0", str(folder))
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (problem,) = refusals(tiny, model=[str(folder)])
    assert "missing from its weights, model.layers.1.mlp.up_proj.weight" in problem


@pytest.mark.parametrize("name", ON_DISK)
def test_formats_on_disk_that_cannot_be_computed_here_are_one_line_before_loading(tiny, tmp_path, name):
    section, bits = ON_DISK[name]
    model = describe(shutil.copytree(tiny / "model", tmp_path / "model"), section)
    candidate = candidate_of(EvalConfig(**options_for(tiny)), model, [])
    quantization = candidate.facts.size.quantization
    assert quantization.format == name and quantization.bits == bits
    if importlib.util.find_spec("gptqmodel"):
        return
    (problem,) = refusals(tiny, model=[model])
    assert f"quantised as {name}, it cannot be computed here" in problem and "pip install" in problem
    assert "\n" not in problem


def test_what_cannot_be_quantised_or_sharded_is_refused_with_the_way_out(tiny, tmp_path):
    plain = tiny / "model"
    fp8 = describe(shutil.copytree(plain, tmp_path / "fp8"), {"quant_method": "fp8", "weight_block_size": [16, 16]})
    new = describe(shutil.copytree(plain, tmp_path / "new"), {"quant_method": "of_tomorrow"})
    for changes, part in (
        ({"quantization": ["int8"], "model": [str(plain / "config.json")]}, "has none; name a folder or hub id"),
        ({"model": [fp8], "zero": "3"}, "weights are quantised \\(fp8\\), .* under ZeRO-3 .*; use zero 0 or auto"),
        ({"model": [new]}, "quantised as of_tomorrow, unknown to this transformers"),
        ({"model": [str(tmp_path / "model.gguf")]}, "no such folder or file"),
    ):
        problems = refusals(tiny, **changes)
        assert any(re.search(part, problem) for problem in problems), problems


def test_a_quantised_model_is_planned_with_its_own_bytes_and_in_one_copy(tiny, tmp_path, capsys):
    folder = shutil.copytree(tiny / "model", tmp_path / "gptq")
    describe(folder, ON_DISK["gptq"][0])
    facts = candidate_of(EvalConfig(**options_for(tiny)), str(folder), []).facts
    plan = plan_evaluation(facts, this_machine(), dtype="float32", seq_len=32)
    (weights,) = [term.num_bytes for term in plan.terms if term.name.startswith("weights")]
    assert plan.zero == "0" and weights == (folder / "model.safetensors").stat().st_size
    with pytest.raises(SystemExit):
        main(["plan", "--model", str(folder), "--perplexity", "--seq_len", "32", "--zero", "3", "--gpus", "8x80GB"])
    assert "its weights are quantised (gptq)" in capsys.readouterr().err


def test_gguf_files_are_read_beside_the_model_they_were_made_from(tiny, model, tmp_path):
    plain, packed = (write_gguf(model, tmp_path / f"{kind}.gguf", kind) for kind in ("F32", "Q8_0"))
    (problem,) = refusals(tiny, model=[plain], reference=str(model))  # made anew from the file, with tokens of its own
    assert "predicts other tokens than" in problem and "set tokenizer" in problem
    kept = {"reference": str(model), "tokenizer": str(model), "output_dir": str(tmp_path / "kept")}
    of_base, of_plain, of_packed = results(tiny, model=[str(model), plain, packed], **kept)
    assert of_plain.perplexity.loss == pytest.approx(of_base.perplexity.loss, abs=1e-6)
    assert abs(of_plain.divergence["kl"]) < 1e-7 < of_packed.divergence["kl"] < 0.1
    assert of_packed.options["quantization"] == "gguf"
    assert all(each.is_known for each in results(tiny, model=[plain, packed], **kept))
    identities = [model_identity(name, revision=None, seed=0)["content"] for name in (plain, packed)]
    assert identities[0] != identities[1]
    (problem,) = refusals(tiny, model=[packed], zero="3")
    assert "weights are quantised (gguf)" in problem
    broken = tmp_path / "broken.gguf"
    for size in (100, -1):  # within the header, and within the weights
        broken.write_bytes((tmp_path / "Q8_0.gguf").read_bytes()[:size])
        (problem,) = refusals(tiny, model=[str(broken)])
        assert "no causal language model can be built" in problem


@needs("bitsandbytes")
@pytest.mark.exhaustive
@torch.no_grad()
def test_the_formats_of_bitsandbytes_are_evaluated_in_layers_of_any_size(tiny, tmp_path, caplog):
    """nf4 in fp32 is plain weights rounded to its grid, also where a CPU has products in bf16 for some sizes."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    model = str(write_certain_model(tmp_path / "model", intermediate_size=40))
    evaluations = results(tiny, model=[model], quantization=["none", "nf4", "int8"], reference=model)
    plain, nf4, int8 = evaluations
    assert sum("inputs will be cast" in record.getMessage() for record in caplog.records) <= 1, "in every layer"
    assert abs(plain.divergence["kl"]) < 1e-7 < int8.divergence["kl"] < nf4.divergence["kl"]
    rounded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for layer in rounded.model.layers.modules():
        if isinstance(layer, torch.nn.Linear):
            layer.weight.copy_(
                dequantize_4bit(*quantize_4bit(layer.weight, quant_type="nf4", compress_statistics=True))
            )
    assert nf4.perplexity.loss == pytest.approx(loss_of(rounded, tiny, nf4), rel=1e-6)
