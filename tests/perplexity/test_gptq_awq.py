"""Models that are packed as GPTQ and AWQ pack them give the numbers of plain weights rounded to the same grid.

gptqmodel, which transformers loads both with, comes as source alone:

    BUILD_CUDA_EXT=0 pip install --no-build-isolation gptqmodel optimum

Shape suffixes: O outputs, I inputs, G groups of inputs.
"""

import importlib.util
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import write_model
from transformers import AutoModelForCausalLM

from dsft.api import evaluate
from dsft.config.options import EvalConfig

GROUP = 32
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
SECTIONS = {
    "gptq": {"desc_act": False, "sym": False, "checkpoint_format": "gptq", "backend": "gptq_torch"},
    "awq": {"zero_point": True, "version": "gemm", "backend": "torch_awq"},
}


def rounded_to_4_bits(weight_OI: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return steps [O, I], zero points [O, G], scales [O, G], and the weight that they stand for."""
    groups_OGI = weight_OI.reshape(len(weight_OI), -1, GROUP)
    low, high = groups_OGI.amin(2, keepdim=True), groups_OGI.amax(2, keepdim=True)
    scale = ((high - low) / 15).half().float()
    zero = (-low / scale).round().clamp(1, 15)
    steps = ((groups_OGI / scale).round() + zero).clamp(0, 15)
    return (
        steps.reshape(weight_OI.shape),
        zero[..., 0],
        scale[..., 0],
        ((steps - zero) * scale).reshape(weight_OI.shape),
    )


def packed(numbers: torch.Tensor, order: tuple[int, ...] = (*range(8),)) -> torch.Tensor:
    """Put eight neighbours of the last dimension into an int32 each, four bits a number."""
    eights = numbers.long().reshape(*numbers.shape[:-1], -1, 8)[..., list(order)]
    return (eights << torch.arange(0, 32, 4)).sum(-1).to(torch.int32)


def tensors_of(method: str, weight_OI: torch.Tensor) -> dict[str, torch.Tensor]:
    steps_OI, zeros_OG, scales_OG, _ = rounded_to_4_bits(weight_OI)
    if method == "awq":
        weights, zeros = packed(steps_OI.T, AWQ_ORDER), packed(zeros_OG.T, AWQ_ORDER)
        return {"qweight": weights, "qzeros": zeros, "scales": scales_OG.T.half()}
    groups_I = torch.arange(weight_OI.shape[1], dtype=torch.int32) // GROUP
    weights, zeros = packed(steps_OI).T, packed(zeros_OG.T - 1)  # the format keeps zero points less one
    return {"qweight": weights, "qzeros": zeros, "scales": scales_OG.T.half(), "g_idx": groups_I}


@pytest.mark.skipif(importlib.util.find_spec("gptqmodel") is None, reason="gptqmodel is not installed")
@pytest.mark.exhaustive
@pytest.mark.parametrize("method", SECTIONS)
@torch.no_grad()
def test_a_packed_model_gives_the_numbers_of_its_rounded_weights(tiny, tmp_path, method):
    rounded = write_model(tmp_path / "rounded", hidden_size=64, intermediate_size=128)
    plain = AutoModelForCausalLM.from_pretrained(rounded)
    tensors = load_file(rounded / "model.safetensors")
    for name, weight in plain.named_parameters():
        if name.endswith("proj.weight"):
            parts = tensors_of(method, tensors.pop(name))
            tensors |= {name.replace("weight", part): tensor.contiguous() for part, tensor in parts.items()}
            weight.copy_(rounded_to_4_bits(weight)[-1])
    plain.save_pretrained(rounded)
    folder = shutil.copytree(rounded, tmp_path / method)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method, "bits": 4, "group_size": GROUP} | SECTIONS[method]
    (folder / "config.json").write_text(json.dumps(config))
    options = {"data": [str(tiny / "held_out.jsonl")], "seq_len": 32, "zero": "0", "dtype": "float32"}
    with torch.compiler.set_stance("force_eager"):
        (evaluation,) = evaluate(EvalConfig(model=[str(folder)], reference=str(rounded), **options))
    assert evaluation.options["quantization"] == method and evaluation.divergence.kl < 1e-7
    expected = evaluation.divergence.reference_perplexity
    assert evaluation.perplexity.perplexity == pytest.approx(expected, rel=1e-5)
