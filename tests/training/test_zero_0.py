"""What DeepSpeed does in ZeRO 0 beside the training itself."""

from pathlib import Path

import pytest
import torch
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from ranks import on_ranks, trained
from safetensors.torch import load_file

from dsft.checkpoints.export import export
from dsft.models.build import load_weights
from dsft.training.trainer import take_back_first_step

pytestmark = pytest.mark.launch


def losses(options: dict) -> list[float]:
    """Losses of a training, step by step."""
    return [entry["loss"] for entry in trained(options).state.log_history if "loss" in entry]


def test_the_first_step_in_bfloat16_is_the_first_of_adam(tiny, options, tmp_path):
    """DeepSpeed makes the optimizer's states by a step of zero gradients."""
    runs = [
        on_ranks(1, losses, options(tmp_path / zero, zero=zero, dtype="bfloat16", weight_decay=0.1, logging_steps=1))
        for zero in "01"
    ]
    assert runs[0][0] == pytest.approx(runs[1][0], rel=1e-4)


def test_nor_does_a_fused_optimizer_keep_the_step_of_zero_gradients():
    """DeepSpeed flattens the weights of its FusedAdam; here torch's stands in its place."""
    weight = torch.nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    adam = torch.optim.AdamW([weight], lr=0.1, weight_decay=0.5)
    optimizer = FP16_Optimizer(adam, low_precision_dtype=torch.bfloat16)
    assert adam.state and not torch.equal(optimizer.fp32_groups_flat[0], weight.float())
    take_back_first_step(optimizer)
    assert not adam.state and torch.equal(optimizer.fp32_groups_flat[0], weight.float())


def test_its_checkpoint_is_read_without_safetensors(tiny, options, tmp_path):
    """DeepSpeed's own reader of checkpoints wants the shards of other stages."""
    save = {"save_strategy": "steps", "save_steps": 2}
    on_ranks(1, losses, options(tmp_path / "run", zero="0", **save))
    folder = tmp_path / "run" / "checkpoint-2"
    (folder / "model.safetensors").unlink()
    expected = load_file(tmp_path / "run" / "final" / "model.safetensors")
    for source in (folder, folder / "global_step2"):
        read = load_weights(str(source), dtype=torch.float32).state_dict()
        assert all(torch.equal(read[name], tensor) for name, tensor in expected.items())
    exported = load_file(Path(export(str(folder), str(tmp_path / "out"))) / "model.safetensors")
    assert all(torch.equal(exported[name], tensor) for name, tensor in expected.items())
