"""A training may multiply float32 in TF32; its evaluations never do."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dsft.training import trainer
from dsft.training.trainer import PerplexityTrainer


@pytest.mark.parametrize("in_training", ["tf32", "none"])
def test_an_evaluation_multiplies_exactly_and_training_goes_on_as_before(monkeypatch, in_training):
    def look(*args, **kwargs):
        seen.append((torch.backends.fp32_precision, torch.backends.cuda.matmul.fp32_precision))
        raise InterruptedError

    seen = []
    monkeypatch.setattr(trainer, "evaluate_windows", look)
    monkeypatch.setattr(trainer, "windows_of_sequences", lambda data: SimpleNamespace(lengths=np.array([8])))
    args = SimpleNamespace(per_device_eval_batch_size=1, device="cpu", disable_tqdm=True)
    evaluating = SimpleNamespace(
        eval_dataset=None,
        model=None,
        args=args,
        is_world_process_zero=bool,
        processing_class=SimpleNamespace(pad_token_id=0),
    )
    before = torch.backends.fp32_precision
    torch.backends.fp32_precision = in_training
    try:
        with pytest.raises(InterruptedError):
            PerplexityTrainer.evaluate(evaluating)
        assert seen == [("ieee", "ieee")] and torch.backends.fp32_precision == in_training
    finally:
        torch.backends.fp32_precision = before
