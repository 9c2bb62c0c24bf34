"""Loads models for scoring: one copy on each rank, or shards of ZeRO-3 over all ranks; one model at a time."""

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.integrations import HfDeepSpeedConfig
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from dsft.config.deepspeed_json import read_zero_file
from dsft.models.build import build_model
from dsft.models.quantization import Quantization
from dsft.planner.evaluation_plan import evaluation_section
from dsft.runtime import distributed
from dsft.runtime.hardware import has_gpu


@contextlib.contextmanager
def loaded_for_scoring(
    config: Any, zero: str, dtype: str, quantization: Quantization | None = None
) -> Iterator[PreTrainedModel]:
    """Load the model of `config` in evaluation mode; its memory is given back at the end, for the next one."""
    _free_memory()  # an earlier sharded model is in cycles
    try:
        with _replicated(config, dtype, quantization) if zero == "0" else _sharded(config, zero, dtype) as model:
            yield model.eval()
    finally:
        _free_memory()


def _free_memory() -> None:
    gc.collect()
    if has_gpu():
        torch.cuda.empty_cache()


@contextlib.contextmanager
def _replicated(config: Any, dtype: str, quantization: Quantization | None) -> Iterator[PreTrainedModel]:
    model = build_model(config, dtype=dtype, seed=config.seed, quantization=quantization)
    if not quantization:
        model.to(distributed.device())
    try:
        yield model
    finally:
        for module in model.modules():  # frees the weights, whoever still holds the module
            module._parameters.clear()
            module._buffers.clear()


@contextlib.contextmanager
def _sharded(config: Any, zero: str, dtype: str) -> Iterator[PreTrainedModel]:
    import deepspeed

    zero_file = read_zero_file(zero, [])
    deepspeed_config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": dtype == "bfloat16"},
        "fp16": {"enabled": dtype == "float16"},
        "steps_per_print": 10**9,
        "zero_optimization": evaluation_section(zero),
        **({"aio": zero_file["aio"]} if "aio" in zero_file else {}),
    }
    registered = HfDeepSpeedConfig(deepspeed_config)  # from_pretrained shards while this object lives
    try:
        model = build_model(config, dtype=dtype, seed=config.seed)
        engine = deepspeed.initialize(model=model, config=deepspeed_config)[0]
        distributed.extend_timeouts()
        try:
            yield engine.module
        finally:
            engine.destroy()
    finally:
        del registered
        unset_hf_deepspeed_config()
