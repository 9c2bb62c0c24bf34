"""Scoring: exact products, and heads that cannot be computed in parts."""

import numpy as np
import pytest
import torch
from tiny import ARCHITECTURES, windows_of_sequences
from transformers import LlamaForCausalLM

from dsft.data.epoch import sequence
from dsft.models.chunked_head import ChunkedHead
from dsft.perplexity import scoring
from dsft.perplexity.modes import Windows
from dsft.perplexity.results import Recorder
from dsft.perplexity.scoring import evaluate_windows
from dsft.units import IGNORED


def test_a_head_alone_and_all_logits_are_compared_side_by_side():
    config, values = ARCHITECTURES["llama"]
    torch.manual_seed(0)
    models = [LlamaForCausalLM(config(**values)).eval() for _ in range(2)]
    batch = {"input_ids": torch.randint(1, 384, (3, 20)), "targets": torch.randint(1, 384, (3, 20))}
    batch["targets"][:, ::3] = batch["targets"][1, 4:] = IGNORED
    split, whole, other = ChunkedHead(models[0]), ChunkedHead(models[0]), ChunkedHead(models[1])
    whole.is_split = False
    wanted = batch["targets"] != IGNORED
    with torch.no_grad():
        for pair, scorers in (((0, 1), [split, other]), ((1, 0), [other, whole]), ((0,), [whole])):
            scored_KN = scoring.score(scorers, batch)
            for number, scored_N in zip(pair, scored_KN, strict=False):  # nats of both, then how they differ
                logits = models[number](input_ids=batch["input_ids"]).logits[wanted]
                expected = torch.nn.functional.cross_entropy(logits, batch["targets"][wanted], reduction="none")
                torch.testing.assert_close(scored_N, expected.double(), rtol=1e-5, atol=1e-6)


class Looks(torch.nn.Module):
    """Keeps how float32 is multiplied when it is about to be scored."""

    def eval(self):
        self.seen = (torch.backends.fp32_precision, torch.backends.cuda.matmul.fp32_precision)
        raise InterruptedError


def evaluated(model: torch.nn.Module, windows: Windows, recorder: Recorder | None = None) -> None:
    how = {"pad_token_id": 0, "batch_tokens": 8, "device": torch.device("cpu"), "collective_forward": False}
    evaluate_windows(model, windows, recorder=recorder, **how)


@pytest.mark.parametrize("everywhere", ["tf32", "none"])
@pytest.mark.parametrize("products", ["tf32", "ieee"])
def test_an_evaluation_multiplies_exactly_and_training_goes_on_as_before(everywhere, products):
    settings = torch.backends, torch.backends.cuda.matmul
    before = [setting.fp32_precision for setting in settings]
    model, windows = Looks(), windows_of_sequences([sequence(np.arange(8), np.ones(8, bool))])
    try:
        torch.backends.fp32_precision, torch.backends.cuda.matmul.fp32_precision = everywhere, products
        with pytest.raises(InterruptedError):
            evaluated(model, windows)
        assert model.seen == ("ieee", "ieee")
        assert [setting.fp32_precision for setting in settings] == [everywhere, products]
    finally:
        for setting, precision in zip(settings, before, strict=True):
            setting.fp32_precision = precision
