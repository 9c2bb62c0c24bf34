"""What DeepSpeed does in ZeRO 0 beside the training itself."""

from pathlib import Path

import pytest
import torch
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from ranks import on_ranks, trained
from safetensors.torch import load_file

from dsft.checkpoints.export import export
from dsft.models.build import load_weights
from dsft.runtime.distributed import start_ranks
from dsft.training.engine import patch_16_bit_optimizer

pytestmark = pytest.mark.launch


def losses(options: dict) -> list[float]:
    """Losses of a training, step by step."""
    return [entry["loss"] for entry in trained(options).state.log_history if "loss" in entry]


def copied_elements(options: dict) -> tuple[int, list[float]]:
    """Elements of gradients that DeepSpeed flattens to reduce them in a training, and the training's losses."""
    from deepspeed.runtime.engine import DeepSpeedEngine

    counts, reduce_bucket = [], DeepSpeedEngine.allreduce_bucket

    def counting(engine, bucket, *args, **kwargs):
        counts.append(sum(gradient.numel() for gradient in bucket))
        return reduce_bucket(engine, bucket, *args, **kwargs)

    DeepSpeedEngine.allreduce_bucket = counting
    history = losses(options)
    return sum(counts), history


def walks_of_a_micro_batch(options: dict) -> tuple[int, int]:
    """Modules that an engine which trains already visits in `train` and `zero_grad`, and gradients that are left."""
    engine = trained(options).model_wrapped
    parameters = list(engine.module.parameters())
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    engine.train()
    visited, train, named = [], torch.nn.Module.train, torch.nn.Module.named_parameters
    torch.nn.Module.train = lambda module, mode=True: visited.append(module) or train(module, mode)
    torch.nn.Module.named_parameters = lambda module, *args, **options: (
        visited.append(module) or named(module, *args, **options)
    )
    engine.train()
    engine.zero_grad()
    return len(visited), sum(parameter.grad is not None for parameter in parameters)


def test_a_micro_batch_walks_through_no_modules(tiny, options, tmp_path):
    assert on_ranks(1, walks_of_a_micro_batch, options(tmp_path / "run", zero="0")) == [(0, 0)]


def test_a_single_rank_copies_no_gradients_to_reduce_them(tiny, options, tmp_path):
    (alone,) = on_ranks(1, copied_elements, options(tmp_path / "alone", zero="0", per_device_train_batch_size=4))
    both = on_ranks(2, copied_elements, options(tmp_path / "both", zero="0", per_device_train_batch_size=2))
    assert alone[0] == 0 and both[0][0] > 0
    assert alone[1] == pytest.approx(both[0][1], rel=1e-5)


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
    patch_16_bit_optimizer(optimizer, resumes=False)
    assert not adam.state and torch.equal(optimizer.fp32_groups_flat[0], weight.float())


def steps_in_fp16(number: int) -> list[tuple[float, float, list[float]]]:
    """(scale, norm, weights after it) of each step with the same gradient; the scale doubles now and then."""
    start_ranks()
    weight = torch.nn.Parameter(torch.zeros(4, dtype=torch.float16))
    scale = {"init_scale": 16, "scale_window": 3, "min_scale": 1, "delayed_shift": 1, "consecutive_hysteresis": False}
    optimizer = FP16_UnfusedOptimizer(
        torch.optim.SGD([weight], lr=1.0),
        low_precision_dtype=torch.float16,
        dynamic_loss_scale=True,
        dynamic_loss_args=scale,
    )
    patch_16_bit_optimizer(optimizer, resumes=False)
    steps = []
    for _ in range(number):
        scale = optimizer.loss_scale_config.cur_scale
        weight.grad = torch.full_like(weight, 0.25) * scale
        optimizer.step()
        steps.append((scale, float(optimizer._global_grad_norm), weight.tolist()))
    return steps


def test_a_scale_of_fp16_that_grows_changes_no_step():
    (steps,) = on_ranks(1, steps_in_fp16, 8)
    assert [norm for _, norm, _ in steps] == [0.5] * 8 and len({scale for scale, *_ in steps}) > 1
    assert [weights for *_, weights in steps] == [[-0.25 * step] * 4 for step in range(1, 9)]


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
