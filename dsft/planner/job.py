"""What the planner plans: a model and how it is trained, as far as memory and time depend on it."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from peft import LoraConfig
from transformers import PreTrainedConfig

from dsft.models.size import ModelFacts, ModelSize
from dsft.planner.activations import (
    EvaluationActivations,
    TrainingActivations,
    evaluation_activations,
    training_activations,
)
from dsft.planner.fake_model import LIGER_MODELS, Attention
from dsft.planner.optimizers import DEFAULT_OPTIMIZER, OPTIMIZERS, PLANNED_AS


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is to be trained, as far as memory and time depend on it."""

    size: ModelSize
    model_config: PreTrainedConfig
    dtype: str = "bfloat16"
    """Of the computation. bfloat16 and float16 have fp32 master weights; with float32 everything is fp32."""
    seq_len: int = 1024
    attention: Attention = "flash"
    adapters: LoraConfig | None = None
    optimizer: str = DEFAULT_OPTIMIZER
    """As transformers names it (the option `optim`); a key of OPTIMIZERS."""
    micro_batch: int | None = None
    """Sequences of one forward on one rank; None lets the plan choose."""
    accumulation: int | None = None
    sequences_per_step: int | None = None
    """Of one optimizer step over all ranks."""
    checkpointing: bool | None = None
    """As the user set it; None lets the plan decide."""

    liger: bool = False
    """Whether Liger's kernels are asked for; they change nothing where it has none for the architecture."""

    tiled_loss: bool = False
    """Whether logits of some tokens at a time exist (models/head.py)."""

    fp32_accumulation: bool | None = None
    """Whether gradients of micro batches are added up in fp32; None lets the plan decide."""

    fp32_reduction: bool = False
    """Whether gradients are sent in fp32."""

    compiled: bool = False
    """Whether torch.compile is asked for."""

    @property
    def unmodelled(self) -> list[str]:
        """What this job asks for and the plan does not count, a sentence each."""
        notes = []
        if self.optimizer not in OPTIMIZERS:
            notes.append(f"optim {self.optimizer} is not modelled: planned with the states of {PLANNED_AS}.")
        if self.liger and self.size.model_type not in LIGER_MODELS:
            notes.append(f"use_liger_kernel changes nothing: Liger has no kernels for {self.size.model_type}.")
        if self.compiled:
            notes.append("torch.compile is not modelled: a compiled model is faster and holds less than planned.")
        if self.size.unadapted_expert_params:
            experts = f"{self.size.unadapted_expert_params / 1e9:,.1f} B parameters"
            notes.append(f"{experts} of experts get no adapters.")
        return notes

    @cached_property
    def activations(self) -> TrainingActivations:
        liger = self.liger and self.size.model_type in LIGER_MODELS
        loss = "fused" if liger else "tiled" if self.tiled_loss else "hf"
        return training_activations(self.size, self.model_config, loss=loss, liger=liger, **self._traced())

    @cached_property
    def evaluation_activations(self) -> EvaluationActivations:
        return evaluation_activations(self.size, self.model_config, **self._traced())

    def _traced(self) -> dict[str, Any]:
        names = ("dtype", "attention", "seq_len", "adapters")
        return {name: getattr(self, name) for name in names}


def attention_of(facts: ModelFacts, *, seq_len: int, masked: bool) -> Attention:
    """Returns what attention holds: transformers leaves sdpa's mask out only where a batch asks for none and no sliding
    window is reached.
    """
    if facts.attn_implementation != "sdpa":
        return "eager" if facts.attn_implementation == "eager" else "flash"
    window = getattr(facts.config.get_text_config(), "sliding_window", None)
    return "sdpa" if masked or (window and seq_len >= window) else "flash"
