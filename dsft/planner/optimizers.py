"""What an optimizer keeps of each trained parameter: one entry of OPTIMIZERS for each that is planned.

A plan reads memory and time of it, `CheckpointSize` what a checkpoint has of it, the checks which configurations it can
train under. tests/planner/test_optimizers.py measures the entries that run on a CPU.
"""

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dsft.config.deepspeed import get_value

if TYPE_CHECKING:
    from dsft.models.size import ModelSize


@dataclass(frozen=True, kw_only=True)
class OptimizerMemory:
    """Bytes per trained parameter that an optimizer takes beside weight and gradient."""

    state_bytes: float
    """Its moments."""
    master_bytes: int = 4
    """The fp32 copy of the weight that is updated."""
    step_bytes: int
    """Copies that it makes for a moment while it updates."""
    needs_orthogonalization: bool = False
    """Whether matrices have one moment in place of Adam's two, and their updates are made orthogonal (Muon)."""
    counts_steps: bool = False
    """Whether it averages weights over the steps that it has counted for a group of parameters (schedule-free). A step
    that DeepSpeed makes to set states up, or one for each piece of a group, would then count too.
    """

    @property
    def checkpoint_bytes(self) -> float:
        """Master and moments: what stays between two steps, and what a checkpoint has of it."""
        return self.master_bytes + self.state_bytes

    @property
    def update_bytes(self) -> float:
        """What one update moves: gradient 4, master and moments are read; master, moments and bf16 weight 2 written."""
        return 4 + 2 * self.checkpoint_bytes + 2

    @property
    def formula(self) -> str:
        return f"master {self.master_bytes} + moments {self.state_bytes:g}"


EIGHT_BIT_BYTES = 1 + 4 / 256
"""A moment of bitsandbytes: a byte, and an fp32 scale for 256 of them (bitsandbytes/optim/optimizer.py). Its kernels
update in place; paged states are planned as if they stayed.
"""
OPTIMIZERS = {
    # m 4 + v 4 in fp32 (ZeRO paper, table 1)
    "adamw_torch_fused": OptimizerMemory(state_bytes=8, step_bytes=0),
    # two fp32 copies (torch/optim/adamw.py, _multi_tensor_adamw)
    "adamw_torch": OptimizerMemory(state_bytes=8, step_bytes=8),
    **dict.fromkeys(
        ("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit"),
        OptimizerMemory(state_bytes=2 * EIGHT_BIT_BYTES, step_bytes=0),
    ),
    "paged_adamw_32bit": OptimizerMemory(state_bytes=8, step_bytes=0),
    **dict.fromkeys(("lion_8bit", "paged_lion_8bit"), OptimizerMemory(state_bytes=EIGHT_BIT_BYTES, step_bytes=0)),
    **dict.fromkeys(("lion_32bit", "paged_lion_32bit"), OptimizerMemory(state_bytes=4, step_bytes=0)),
    # One moment or none; copies as in torch/optim (_multi_tensor_sgd with weight decay, _multi_tensor_adagrad ...).
    "sgd": OptimizerMemory(state_bytes=0, step_bytes=4),
    "adagrad": OptimizerMemory(state_bytes=4, step_bytes=8),
    "rmsprop": OptimizerMemory(state_bytes=4, step_bytes=8),
    "adafactor": OptimizerMemory(state_bytes=4, step_bytes=8),  # of ZeRO's flat shards nothing can be factored
    # z 4 + v 4, and a denominator while it updates; SGD keeps z alone, and works in the gradient (schedulefree 1.4.1).
    **dict.fromkeys(
        ("schedule_free_adamw", "schedule_free_radam"),
        OptimizerMemory(state_bytes=8, step_bytes=4, counts_steps=True),
    ),
    "schedule_free_sgd": OptimizerMemory(state_bytes=4, step_bytes=0, counts_steps=True),
}
"""By transformers' name (the option `optim`)."""
DEEPSPEED_OPTIMIZERS = {
    **dict.fromkeys(("adam", "adamw"), OPTIMIZERS["adamw_torch_fused"]),  # FusedAdam, and CPUAdam with offload
    "lion": OPTIMIZERS["lion_32bit"],
    "muon": OptimizerMemory(state_bytes=4, step_bytes=0, needs_orthogonalization=True),
    # torch.optim's, by the class's name
    **{name: OPTIMIZERS[name] for name in ("sgd", "adagrad", "rmsprop")},
    "adadelta": OptimizerMemory(state_bytes=8, step_bytes=8),
    **dict.fromkeys(("adamax", "nadam", "radam"), OptimizerMemory(state_bytes=8, step_bytes=4)),
    **dict.fromkeys(("asgd", "adafactor"), OptimizerMemory(state_bytes=4, step_bytes=4)),
}
"""By the type that a DeepSpeed JSON names (`optimizer.type`), in small letters."""
ONE_MORE_MOMENT = {
    "sgd": ("momentum",),
    "rmsprop": ("momentum", "centered"),
    "adam": ("amsgrad",),
    "adamw": ("amsgrad",),
}
"""Type -> its parameters (`optimizer.params`) each of which, where it is set, takes 4 bytes more."""
DEFAULT_OPTIMIZER = "adamw_torch_fused"
"""Where the user names none: transformers' own."""
PLANNED_AS = "adamw_torch"
"""As which an optimizer is planned that is not in OPTIMIZERS; the plan notes it (`candidates.unmodelled`)."""


def optimizer_memory(
    deepspeed_config: dict[str, Any], name: str | None, *, size: "ModelSize | None" = None
) -> OptimizerMemory:
    """Return what the optimizer takes that the configuration names, where it does (FusedAdam, CPUAdam ...), else that
    of `name`; with bf16_optimizer_states the moments and what is updated are bf16.

    Args:
        size: of the model, where Muon is to be told from the Adam that trains the embedding and an untied head.
    """
    memory = OPTIMIZERS.get(name or DEFAULT_OPTIMIZER, OPTIMIZERS[PLANNED_AS])
    if kind := str(get_value(deepspeed_config, "optimizer.type") or "").lower():
        given = get_value(deepspeed_config, "optimizer.params") or {}
        memory = DEEPSPEED_OPTIMIZERS.get(kind, OPTIMIZERS[PLANNED_AS])
        if kind in ("adam", "adamw") and given.get("torch_adam"):
            memory = OPTIMIZERS["adamw_torch"]
        more = 4 * sum(bool(given.get(key)) for key in ONE_MORE_MOMENT.get(kind, ()))
        if memory.needs_orthogonalization and size and not size.lora_r and size.num_trainable:
            # deepspeed/__init__.py, set_optimizer_flags: Adam for what is called embed or lm_head, and for vectors
            of_adam = size.embedding_params * size.trains_embedding + size.head_params
            more = memory.state_bytes * min(1, of_adam / size.num_trainable)  # a pattern may leave the head out
        memory = dataclasses.replace(memory, state_bytes=memory.state_bytes + more)
    if get_value(deepspeed_config, "bf16.bf16_optimizer_states"):
        halved = {"state_bytes": memory.state_bytes / 2, "step_bytes": memory.step_bytes // 2}
        return dataclasses.replace(memory, **halved, master_bytes=2)
    if get_value(deepspeed_config, "bf16.bf16_master_weights_and_grads"):
        return dataclasses.replace(memory, master_bytes=2)
    return memory
