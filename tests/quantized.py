"""Models that are quantised on disk, for tests."""

import json
import shutil

import gguf
import numpy as np
import torch
from conftest import read_json
from safetensors.torch import load_file, save_file
from tiny import write_model
from transformers import AutoModelForCausalLM, AutoTokenizer

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


def write_gguf(model, path, kind: str, **fields: str) -> str:
    """Write the model of a folder as llama.cpp's convert_hf_to_gguf.py does, its layers in one of ggml's types."""
    config, tokenizer = read_json(model / "config.json"), AutoTokenizer.from_pretrained(model)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    has_experts = config["model_type"] == "qwen3_moe"
    architecture = gguf.MODEL_ARCH.QWEN3MOE if has_experts else gguf.MODEL_ARCH.LLAMA
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    weights = load_file(model / "model.safetensors")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if has_experts:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
        writer.add_expert_count(config["num_local_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
    else:
        writer.add_rope_dimension_count(config["hidden_size"] // heads)
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    inner = read_json(model / "tokenizer.json")
    vocabulary = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
    special = {token["content"] for token in inner["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(vocabulary)
    writer.add_token_types([3 if token in special else 1 for token in vocabulary])
    writer.add_token_merges([" ".join(merge) for merge in inner["model"]["merges"]])
    writer.add_eos_token_id(tokenizer.eos_token_id)
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    for first in [name for name in weights if ".experts.0." in name]:
        experts = [first.replace(".experts.0.", f".experts.{n}.") for n in range(config["num_local_experts"])]
        weights[first.replace(".experts.0.", ".experts.")] = torch.stack([weights.pop(name) for name in experts])
    for name, tensor in weights.items():
        data = tensor.float().numpy()
        for part, number in (("q_proj", heads), ("k_proj", kv_heads)):
            if part in name and not has_experts:  # LlamaModel.permute
                halves = data.reshape(number, 2, len(data) // number // 2, *data.shape[1:])
                data = np.ascontiguousarray(halves.swapaxes(1, 2).reshape(data.shape))
        stored = gguf.GGMLQuantizationType.F32 if data.ndim < 2 else gguf.GGMLQuantizationType[kind]
        writer.add_tensor(names.get_name(name, (".weight",)), gguf.quants.quantize(data, stored), raw_dtype=stored)
    for name, value in fields.items():
        writer.add_string(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)
