"""An evaluation that runs out of memory ends with one line, as a training does."""

import pytest
import torch

from dsft.config.options import EvalConfig
from dsft.errors import UserError
from dsft.perplexity import evaluation


@pytest.mark.parametrize(("step", "doing"), [("_load", "loading"), ("_evaluate_job", "scoring")])
def test_out_of_memory_is_one_line_with_the_way_out(tiny, monkeypatch, step, doing):
    def fail(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has ...")

    monkeypatch.setattr(evaluation, step, fail)
    config = EvalConfig(model=[str(tiny / "model")], data=[str(tiny / "held_out.jsonl")], seq_len=32, batch_tokens=64)
    with pytest.raises(UserError) as raised:
        next(evaluation.evaluate(config))
    (problem,) = raised.value.problems
    assert f"out of memory in {doing} {tiny / 'model'} (CUDA out of memory" in problem and "\n" not in problem
    assert "use a smaller batch_tokens (here 64)" in problem and "zero 3-offload" in problem


def test_another_error_is_left_as_it_is(tiny, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(evaluation, "_evaluate_job", fail)
    config = EvalConfig(model=[str(tiny / "model")], data=[str(tiny / "held_out.jsonl")], seq_len=32)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        next(evaluation.evaluate(config))
