"""In bf16 DeepSpeed leaves out steps whose gradient is infinite: dsft counts and says them, and stops at many."""

import pytest
import torch
from conftest import read_json
from ranks import on_ranks, train

from dsft.errors import TrainingStopped
from dsft.training.callbacks import MOST_SKIPPED, SkippedSteps
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


def test_steps_that_are_left_out_are_counted_and_said(options, tmp_path):
    case = options(tmp_path / "run", dtype="bfloat16", zero="1", max_steps=4)
    assert on_ranks(1, train_with_infinite_gradients, case, [1, 2], log=tmp_path / "log") == ["done"]
    assert read_json(tmp_path / "run" / "run.json")["results"]["skipped_steps"] == 2
    said = "a gradient is infinite or NaN at step 2: DeepSpeed leaves this step out"
    assert (tmp_path / "log").read_text().count(said) == 1


@pytest.mark.exhaustive
@pytest.mark.parametrize("zero", ["0", "2", "3"])
def test_training_that_leaves_out_every_step_stops(options, tmp_path, zero):
    case = options(tmp_path / "run", dtype="bfloat16", zero=zero, max_steps=MOST_SKIPPED + 5)
    (outcome,) = on_ranks(1, train_with_infinite_gradients, case, [*range(100)], log=tmp_path / "log")
    assert f"in {MOST_SKIPPED} steps in a row, up to step {MOST_SKIPPED}" in outcome


def test_steps_in_a_row_are_counted_anew_after_one_that_was_taken():
    skipped = SkippedSteps()
    for step in range(1, 3 * MOST_SKIPPED):
        skipped.note(step, is_skipped=step % MOST_SKIPPED != 0)
    with pytest.raises(TrainingStopped):
        skipped.note(3 * MOST_SKIPPED, is_skipped=True)
