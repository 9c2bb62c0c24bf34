"""Published steps (published_steps.json) as the planner sees them: their models, activations and predicted speed."""

import dataclasses
import json
from functools import cache
from pathlib import Path
from typing import Any

from transformers import GPT2Config, LlamaConfig, PreTrainedConfig, Qwen3Config, Qwen3MoeConfig

from dsft.config.deepspeed import compose, read_zero_file
from dsft.config.options import TrainConfig
from dsft.models.size import ModelSize, empty_model, model_size
from dsft.models.trained import adapters_of
from dsft.planner.activations import Job, TrainingActivations
from dsft.planner.step_time import GPUS, Speeds, StepTime, speeds_of, step_time
from dsft.planner.zero_layout import ZeroLayout
from dsft.runtime.hardware import Machine
from dsft.units import GB, Batch

ROWS = json.loads(Path(__file__).with_name("published_steps.json").read_text(encoding="utf-8"))
STEPS: list[dict[str, Any]] = ROWS["rows"]
COMPILED = 0.5
"""Of the traffic of eager operators where a compiler fuses them (torchtune's rows)."""


def model_config(step: dict[str, Any]) -> PreTrainedConfig:
    """MPT is planned as a GPT-2 of its widths: LayerNorm, GELU, tied embedding."""
    values = ROWS["models"][step["model"]]
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
    architecture = {"llama": LlamaConfig, "qwen3": Qwen3Config, "qwen3_moe": Qwen3MoeConfig}[values["like"]]
    experts = {}
    if "experts" in values:
        experts = {
            "num_experts": values["experts"],
            "num_experts_per_tok": values["chosen"],
            "moe_intermediate_size": values["ffn"],
            "head_dim": 128,
        }
    return architecture(
        **experts,
        hidden_size=values["hidden"],
        num_hidden_layers=values["layers"],
        num_attention_heads=values["heads"],
        num_key_value_heads=values["kv_heads"],
        intermediate_size=values["ffn"],
        vocab_size=values["vocab"],
        tie_word_embeddings=values.get("tied", False),
    )


def options_of(step: dict[str, Any]) -> TrainConfig:
    lora = {"method": "qlora" if step.get("qlora") else "lora", "lora_r": step["lora"]} if "lora" in step else {}
    return TrainConfig(model="published", **lora)


def size_of(step: dict[str, Any]) -> ModelSize:
    """Of all sequence lengths at once, but where positions are learnt (MPT's)."""
    asked = {key: step[key] for key in ("model", "seq_len", "lora", "qlora") if key in step}
    if ROWS["models"][step["model"]]["like"] != "mpt":
        del asked["seq_len"]
    return _size(json.dumps(asked))


@cache
def _size(text: str) -> ModelSize:
    step = json.loads(text)
    options = options_of(step)
    model = empty_model(model_config(step))
    size = model_size(model, options, adapters=adapters_of(options, model))
    # Of Qwen, whose q, k and v are one product, and of experts in a list: modules of a layer with weights, and adapted.
    values = ROWS["models"][step["model"]]
    if "modules" in values:
        adapters = 2 * values["adapted"] * bool(size.lora_r)
        looped = size.num_layers * values["experts"] if values.get("looped") else 0
        modules = (values["modules"] + adapters) * size.num_layers
        size = dataclasses.replace(size, num_modules=modules, looped_experts=looped)
    return size


def activations_of(step: dict[str, Any]) -> TrainingActivations:
    return Job(
        size=size_of(step),
        model_config=model_config(step),
        liger=step.get("liger", False),
        adapters=adapters_of(options_of(step), empty_model(model_config(step))),
        seq_len=step["seq_len"],
    ).activations


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
        flops=speeds.flops * card.get("matmul_tflops", gpu.matmul_flops / 1e12) / gpu.matmul_flops * 1e12,
        device_bytes=speeds.device_bytes * card.get("memory_gbps", gpu.memory_gbps) / gpu.memory_gbps,
    )


def traffic_of(step: dict[str, Any]) -> list[list[int]]:
    """(fixed bytes, bytes per token) of a micro batch, without checkpointing and with it."""
    liger = ", Liger" if step.get("liger") else ""
    return ROWS["traffic"][step["model"] + (f", LoRA {step['lora']}" if "lora" in step else "") + liger]


def predicted(step: dict[str, Any]) -> StepTime:
    """What the planner says of this step. Selective checkpointing, of every second layer or product, lies half-way."""
    if step["checkpointing"] == "selective":
        off, on = (predicted(step | {"checkpointing": checkpointing}) for checkpointing in (False, True))
        return dataclasses.replace(off, step_seconds=(off.step_seconds + on.step_seconds) / 2)
    machine, micro_batch = machine_of(step), step["micro_batch"]
    zero_file = compose(read_zero_file(step["zero"], []), hpz_ranks=machine.ranks_per_node)
    layout = ZeroLayout(
        size_of(step),
        zero_file | {"gradient_accumulation_steps": step["accumulation"]},
        machine,
        dtype="bfloat16",
    )
    fixed, per_token = traffic_of(step)[step["checkpointing"]]
    traffic = fixed + per_token * micro_batch * step["seq_len"]
    compiled = step.get("compiled", False)
    return step_time(
        layout,
        speeds_for(step),
        Batch(micro_batch, step["accumulation"], machine.world_size),
        seq_len=step["seq_len"],
        recomputed=float(step["checkpointing"]),
        traffic_bytes=int(traffic * (COMPILED if compiled else 1)),
        compiled=compiled,
    )


def measured_over_predicted(step: dict[str, Any]) -> float:
    """Seconds of the published step over the predicted ones."""
    return predicted(step).tokens_per_second / step["gpus"] / step["tokens_per_gpu"]
