"""Tokens are added up by document and by window, as whole numbers."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from dsft.data.epoch import form_batches
from dsft.errors import TrainingStopped
from dsft.models.probes import RowRules
from dsft.perplexity.modes import Windows
from dsft.perplexity.scoring import sum_tokens
from dsft.perplexity.sums import STEPS, add_up


def windows_over(scorable: np.ndarray, ends: list[int], spans: list[tuple[int, int, int]]) -> Windows:
    size, documents = len(scorable), np.array(ends, dtype=np.int64)
    return Windows(
        tokens=np.zeros(size, np.uint16),
        scorable=scorable,
        document_ends=documents,
        spans=np.array(spans, dtype=np.int64).reshape(-1, 3),
        document_bytes=documents,
        document_words=documents,
        document_hashes=np.zeros(len(documents), np.uint64),
    )


@pytest.mark.parametrize("seed", range(20))
def test_sums_of_documents_and_windows_are_those_of_tokens_one_by_one(seed):
    rng = np.random.default_rng(seed)
    size = int(rng.integers(1, 200))
    ends = [*np.sort(rng.integers(0, size + 1, int(rng.integers(0, 20)))).tolist(), size]  # some documents are empty
    cuts = [0, *np.unique(rng.integers(0, size, int(rng.integers(0, 20)))).tolist(), size]
    spans = [(a, b, min(a + int(rng.integers(0, 4)), b)) for a, b in pairwise(cuts) if a < b]
    windows = windows_over(rng.random(size) < 0.7, ends, spans)
    steps = rng.integers(0, 1 << 40, size)  # of 2^-28 nats, for each token
    expected = np.zeros((3, len(ends) + len(spans)), np.int64)
    for window, (_, end, scored_from) in enumerate(spans):
        for place in range(scored_from, end):
            document = next(number for number, stop in enumerate(ends) if place < stop)
            if windows.scorable[place]:
                expected[:2, document] += steps[place], 1
                expected[:2, len(ends) + window] += steps[place], 1
    sums = np.zeros_like(expected)
    for batch in form_batches(windows.lengths, 40, RowRules()):
        places = [windows.scored_places(window) for window in batch]
        windows_N = np.repeat(batch, [*map(len, places)])
        nats = torch.from_numpy(steps[np.concatenate(places)] / STEPS)
        cells, batch_sums = sum_tokens(windows, windows_N, np.concatenate(places), nats[None])
        sums[:, cells] += batch_sums
    assert np.array_equal(sums, expected)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e300])
def test_a_loss_that_is_not_finite_names_its_document(value):
    windows = windows_over(np.ones(6, bool), [2, 4, 6], [(0, 6, 0)])
    nats = torch.tensor([1.0, 2.0, 3.0, value, value, value], dtype=torch.float64)
    cells, sums = sum_tokens(windows, np.zeros(6, np.int64), np.arange(6), nats[None])
    assert cells.tolist() == [0, 1, 2, 3]
    with pytest.raises(TrainingStopped, match="document 2 of 3 is NaN or infinite"):
        add_up(windows, sums, fed_tokens=6)
