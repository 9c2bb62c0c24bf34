"""What a window scores of each document is found for all windows at once."""

from itertools import pairwise

import numpy as np
import pytest

from dsft.data.epoch import form_batches
from dsft.models.probes import RowRules
from dsft.perplexity.modes import Windows, pieces_of


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
def test_pieces_are_the_scored_tokens_counted_one_by_one(seed):
    rng = np.random.default_rng(seed)
    size = int(rng.integers(1, 200))
    ends = [*np.sort(rng.integers(0, size + 1, int(rng.integers(0, 20)))).tolist(), size]  # some documents are empty
    cuts = [0, *np.unique(rng.integers(0, size, int(rng.integers(0, 20)))).tolist(), size]
    spans = [(a, b, min(a + int(rng.integers(0, 4)), b)) for a, b in pairwise(cuts) if a < b]
    windows = windows_over(rng.random(size) < 0.7, ends, spans)
    counted: dict[tuple[int, int], int] = {}
    for window, (_, end, scored_from) in enumerate(spans):
        for place in range(scored_from, end):
            document = next(number for number, stop in enumerate(ends) if place < stop)
            counted[window, document] = counted.get((window, document), 0) + int(windows.scorable[place])
    expected = [(*key, tokens) for key, tokens in counted.items() if tokens]
    pieces = pieces_of(windows)
    columns = (pieces.windows, pieces.documents, pieces.tokens)
    assert [*zip(*(column.tolist() for column in columns), strict=True)] == expected
    batches = form_batches(windows.lengths, 40, RowRules())
    for batch in batches:
        place = pieces.of(batch)
        wanted = [item for window in batch for item in expected if item[0] == window]
        columns = (pieces.windows[place], pieces.documents[place], pieces.tokens[place])
        assert [*zip(*(column.tolist() for column in columns), strict=True)] == wanted
