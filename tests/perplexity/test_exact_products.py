"""A training may multiply float32 in TF32; evaluations never do."""

import numpy as np
import pytest
import torch

from dsft.data.sequences import sequence
from dsft.perplexity.scoring import evaluate_windows
from dsft.perplexity.windows import windows_of_sequences


class Looks(torch.nn.Module):
    """Keeps how float32 is multiplied when it is about to be scored."""

    def eval(self):
        self.seen = (torch.backends.fp32_precision, torch.backends.cuda.matmul.fp32_precision)
        raise InterruptedError


@pytest.mark.parametrize("everywhere", ["tf32", "none"])
@pytest.mark.parametrize("products", ["tf32", "ieee"])
def test_an_evaluation_multiplies_exactly_and_training_goes_on_as_before(everywhere, products):
    settings = torch.backends, torch.backends.cuda.matmul
    before = [setting.fp32_precision for setting in settings]
    model, windows = Looks(), windows_of_sequences([sequence(np.arange(8), np.ones(8, bool))])
    try:
        torch.backends.fp32_precision, torch.backends.cuda.matmul.fp32_precision = everywhere, products
        with pytest.raises(InterruptedError):
            evaluate_windows(
                model,
                windows,
                pad_token_id=0,
                batch_tokens=8,
                device=torch.device("cpu"),
                collective_forward=False,
            )
        assert model.seen == ("ieee", "ieee")
        assert [setting.fp32_precision for setting in settings] == [everywhere, products]
    finally:
        for setting, precision in zip(settings, before, strict=True):
            setting.fp32_precision = precision
