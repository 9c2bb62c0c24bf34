"""DeepSpeed skips steps whose gradient is infinite: dsft counts them, says them in bf16, and stops at many."""

import json

import pytest
import torch
from conftest import read_json
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from ranks import on_ranks, train
from safetensors.torch import load_file

from dsft.errors import TrainingStopped
from dsft.setup import arguments
from dsft.training.callbacks import MOST_SKIPPED, MOST_SKIPPED_IN_FP16, SkippedSteps
from dsft.training.trainer import PerplexityTrainer


class InfiniteGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, loss):
        return loss.clone()

    @staticmethod
    def backward(ctx, gradient):
        return torch.full_like(gradient, torch.inf)


def train_with_infinite_gradients(options: dict, steps: list[int]) -> str:
    """Train with a finite loss and an infinite gradient in `steps`, by their numbers from 0."""
    compute_loss = PerplexityTrainer.compute_loss
    if options["dtype"] == "float16":  # a CPU is too slow for users, not for this
        CPU_Accelerator.is_fp16_supported = lambda self: True
        arguments.check_machine = lambda *_: []

    def spoilt(trainer, *args, **kwargs):
        loss = compute_loss(trainer, *args, **kwargs)
        return InfiniteGradient.apply(loss) if trainer.state.global_step in steps else loss

    PerplexityTrainer.compute_loss = spoilt
    try:
        train(options)
    except TrainingStopped as error:
        return str(error)
    finally:
        PerplexityTrainer.compute_loss = compute_loss
    return "done"


def train_each(cases: list[tuple[dict, list[int]]]) -> list[str]:
    return [train_with_infinite_gradients(*case) for case in cases]


@pytest.fixture(scope="module")
def runs(options, tmp_path_factory):
    """The folder of three trainings of one rank: one that skips steps 1 and 2, and two types."""
    folder = tmp_path_factory.mktemp("skipped")
    cases = [(options(folder / "run", dtype="bfloat16", zero="1", max_steps=4), [1, 2])]
    for dtype in ("float32", "float16"):
        cases.append((options(folder / dtype, dtype=dtype, zero="1", max_steps=4, logging_steps=1), []))
    assert on_ranks(1, train_each, cases, log=folder / "log") == [["done"] * 3]
    return folder


def test_steps_that_are_left_out_are_counted_and_said(runs):
    assert read_json(runs / "run" / "run.json")["results"]["skipped_steps"] == 2
    said = "a gradient is infinite or NaN at step 2: DeepSpeed skips this optimizer step"
    assert (runs / "log").read_text().count(said) == 1


@pytest.mark.exhaustive
@pytest.mark.parametrize("zero", ["0", "2", "3"])
def test_training_that_leaves_out_every_step_stops(options, tmp_path, zero):
    case = options(tmp_path / "run", dtype="bfloat16", zero=zero, max_steps=MOST_SKIPPED + 5)
    (outcome,) = on_ranks(1, train_with_infinite_gradients, case, [*range(100)], log=tmp_path / "log")
    assert f"in {MOST_SKIPPED} steps in a row, up to step {MOST_SKIPPED}" in outcome


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("stage", "power", "steps"), [(2, 16, MOST_SKIPPED_IN_FP16), (3, 16, MOST_SKIPPED_IN_FP16), (2, 3, 5)]
)
def test_fp16_training_that_finds_no_scale_stops_with_the_cause(options, tmp_path, stage, power, steps):
    """One step before DeepSpeed ends by itself at the least scale, or as it does where the first scale was small."""
    zero = tmp_path / "zero.json"
    zero.write_text(json.dumps({"zero_optimization": {"stage": stage}, "fp16": {"initial_scale_power": power}}))
    case = options(tmp_path / "run", dtype="float16", zero=str(zero), max_steps=MOST_SKIPPED_IN_FP16 + 5)
    (outcome,) = on_ranks(1, train_with_infinite_gradients, case, [*range(100)], log=tmp_path / "log")
    assert f"in {steps} steps in a row, up to step {steps}:" in outcome
    assert "beyond the range of float16" in outcome
    assert "skips this optimizer step" not in (tmp_path / "log").read_text()


def test_a_training_in_fp16_takes_the_steps_and_logs_the_norms_of_fp32(runs, tiny):
    norms, trained = {}, {}
    for dtype in ("float32", "float16"):
        run = runs / dtype
        results = read_json(run / "run.json")["results"]
        norms[dtype] = [entry["grad_norm"] for entry in results["log"] if "grad_norm" in entry]
        weights = load_file(run / "final" / "model.safetensors")
        trained[dtype] = torch.cat([weights[name].float().flatten() for name in sorted(weights)])
    assert norms["float16"] == pytest.approx(norms["float32"], rel=0.02)
    weights = load_file(tiny / "model" / "model.safetensors")
    started = torch.cat([weights[name].flatten() for name in sorted(weights)])
    apart, learnt = (trained["float32"] - other for other in (trained["float16"], started))
    assert apart.norm() < 0.1 * learnt.norm()


def test_steps_in_a_row_are_counted_anew_after_one_that_was_taken():
    skipped = SkippedSteps()
    for step in range(1, 3 * MOST_SKIPPED):
        skipped.note(step, is_skipped=step % MOST_SKIPPED != 0)
    with pytest.raises(TrainingStopped):
        skipped.note(3 * MOST_SKIPPED, is_skipped=True)
