"""Models that are quantised on disk, for tests."""

import json
import shutil

import torch
from conftest import read_json
from safetensors.torch import load_file, save_file
from tiny import write_model
from transformers import AutoModelForCausalLM

FP8_BLOCK = 16


def write_certain_model(folder, **sizes):
    write_model(folder, **sizes)
    built = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.mul_(4 if parameter.dim() > 1 else 1)
    built.save_pretrained(folder)
    return folder


def as_fp8(model, folder):
    """A folder with a model in FP8 blocks, as DeepSeek and Qwen publish them, and the same model unpacked."""
    shutil.copytree(model, folder)
    tensors, unpacked = load_file(folder / "model.safetensors"), AutoModelForCausalLM.from_pretrained(model)
    for name, weight in unpacked.named_parameters():
        if name.endswith("proj.weight"):
            blocks = weight.detach().unfold(0, FP8_BLOCK, FP8_BLOCK).unfold(1, FP8_BLOCK, FP8_BLOCK)
            scale = blocks.abs().amax(dim=(2, 3)) / 448
            wide = scale.repeat_interleave(FP8_BLOCK, 0).repeat_interleave(FP8_BLOCK, 1)
            tensors[name] = (weight.detach() / wide).to(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = scale
            weight.data = tensors[name].float() * wide
        else:  # in the dtype of the publisher's training
            tensors[name] = weight.detach().bfloat16()
            weight.data = tensors[name].float()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    describe(folder, {"quant_method": "fp8", "weight_block_size": [FP8_BLOCK] * 2})
    return folder, unpacked


def describe(folder, quantization: dict) -> str:
    config = read_json(folder / "config.json") | {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)
