"""Published steps (published_steps.json) as the planner sees them: their models, activations and predicted speed."""

import dataclasses
import json
from functools import cache
from pathlib import Path
from typing import Any

from transformers import GPT2Config, LlamaConfig, PreTrainedConfig, Qwen3Config

from dsft.config.deepspeed import read_zero_file
from dsft.config.options import TrainConfig
from dsft.models.lora import adapters_of
from dsft.models.size import ModelSize, empty_model, model_size
from dsft.planner.activations import TrainingActivations, training_activations
from dsft.planner.gpus import GPUS
from dsft.planner.step_time import Speeds, speeds_of, step_time
from dsft.planner.zero_layout import describe_layout
from dsft.runtime.hardware import Machine
from dsft.units import GB

ROWS = json.loads(Path(__file__).with_name("published_steps.json").read_text(encoding="utf-8"))
STEPS: list[dict[str, Any]] = ROWS["held"]
COMPILED = 0.5
"""Of the traffic of eager operators where a compiler fuses them (torchtune's rows)."""


def model_config(step: dict[str, Any]) -> PreTrainedConfig:
    """MPT is planned as a GPT-2 of its widths: LayerNorm, GELU, tied embedding."""
    values = step["model"]
    if values["like"] == "mpt":
        return GPT2Config(
            n_embd=values["hidden"],
            n_layer=values["layers"],
            n_head=values["heads"],
            vocab_size=50368,
            n_positions=step["seq_len"],
            activation_function="gelu",
            resid_pdrop=0,
            embd_pdrop=0,
            attn_pdrop=0,
        )
    architecture = Qwen3Config if values["like"] == "qwen3" else LlamaConfig
    return architecture(
        hidden_size=values["hidden"],
        num_hidden_layers=values["layers"],
        num_attention_heads=values["heads"],
        num_key_value_heads=values["kv_heads"],
        intermediate_size=values["ffn"],
        vocab_size=values["vocab"],
        tie_word_embeddings=values.get("tied", False),
    )


def options_of(step: dict[str, Any]) -> TrainConfig:
    lora = {"method": "lora", "lora_r": step["lora"]} if "lora" in step else {}
    return TrainConfig(model="published", **lora)


def size_of(step: dict[str, Any]) -> ModelSize:
    return _size(json.dumps({key: step[key] for key in ("model", "seq_len", "lora") if key in step}))


@cache
def _size(text: str) -> ModelSize:
    step = json.loads(text)
    options = options_of(step)
    model = empty_model(model_config(step))
    return model_size(model, options, adapters=adapters_of(options, model))


def activations_of(step: dict[str, Any]) -> TrainingActivations:
    return training_activations(
        size_of(step),
        model_config(step),
        dtype="bfloat16",
        attention="flash",
        loss="hf",
        adapters=adapters_of(options_of(step), empty_model(model_config(step))),
        seq_len=step["seq_len"],
    )


def machine_of(step: dict[str, Any]) -> Machine:
    return Machine(
        nodes=max(1, step["gpus"] // 8),
        ranks_per_node=min(8, step["gpus"]),
        device_bytes=GPUS[step["gpu"]].usable_bytes,
        host_bytes=1000 * GB,
        has_gpu=True,
        gpu_type=step["gpu"],
        interconnect=step.get("interconnect", ""),
    )


def speeds_for(step: dict[str, Any]) -> Speeds:
    """Of the card, or of the slower variant that the row describes."""
    speeds = speeds_of(machine_of(step), dtype="bfloat16")
    card, gpu = step.get("card", {}), GPUS[step["gpu"]]
    return dataclasses.replace(
        speeds,
        flops=speeds.flops * card.get("matmul_tflops", gpu.matmul_tflops) / gpu.matmul_tflops,
        device_bytes=speeds.device_bytes * card.get("memory_gbps", gpu.memory_gbps) / gpu.memory_gbps,
    )


def predicted_tokens(step: dict[str, Any], speeds: Speeds | None = None) -> float:
    """Tokens per second of one GPU. Selective checkpointing, of every second layer or product, lies half-way.

    Args:
        speeds: by default the planner's own for the card.
    """
    if step["checkpointing"] == "selective":
        halves = [predicted_tokens(step | {"checkpointing": checkpointing}, speeds) for checkpointing in (False, True)]
        return 2 / sum(1 / tokens for tokens in halves)
    name = step.get("zero", "3" if step["gpus"] > 1 else "1")
    machine, micro_batch = machine_of(step), step["micro_batch"]
    layout = describe_layout(
        size_of(step),
        read_zero_file(name, []) | {"gradient_accumulation_steps": step["accumulation"]},
        world_size=machine.world_size,
        ranks_per_node=machine.ranks_per_node,
        dtype="bfloat16",
        has_gpu=True,
    )
    traffic = step["traffic_per_token"][step["checkpointing"]] * micro_batch * step["seq_len"]
    time = step_time(
        layout,
        machine,
        speeds or speeds_for(step),
        micro_batch=micro_batch,
        accumulation=step["accumulation"],
        seq_len=step["seq_len"],
        checkpointing=step["checkpointing"],
        traffic_bytes=int(traffic * (COMPILED if step.get("compiled") else 1)),
    )
    return time.tokens_per_second / machine.world_size
