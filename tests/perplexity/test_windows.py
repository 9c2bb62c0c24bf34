"""What a window scores of each document is found for all windows at once, and for a large corpus in little memory."""

import tracemalloc
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from dsft.data.batches import form_batches
from dsft.data.prepare import StoreWriter
from dsft.data.tokenization import Tokens
from dsft.models.trials import RowRules
from dsft.perplexity.modes import cut, disjoint_spans
from dsft.perplexity.windows import Windows, count_true, pieces_of


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
def test_pieces_are_the_scored_tokens_counted_one_by_one(seed, monkeypatch):
    monkeypatch.setattr("dsft.perplexity.windows.WINDOWS_AT_ONCE", 1 + seed % 4)
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
    columns = map(np.concatenate, zip(*windows.pieces(), strict=True))
    assert [*zip(*(column.tolist() for column in columns), strict=True)] == expected
    batches = form_batches(windows.lengths, 40, RowRules())
    pieces = pieces_of(windows)
    for batch in batches:
        place = pieces.of(batch)
        wanted = [item for window in batch for item in expected if item[0] == window]
        columns = (pieces.windows[place], pieces.documents[place], pieces.tokens[place])
        assert [*zip(*(column.tolist() for column in columns), strict=True)] == wanted


def test_tokens_are_counted_a_part_at_a_time():
    flags = np.ones(5 << 20, bool)
    flags[:: 1 << 19] = False
    begins = np.arange(0, len(flags), 1024)
    tracemalloc.start()
    counts = count_true(flags, begins, begins + 1024)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert counts.sum() == flags.sum() and counts.min() == 1023
    assert peak < 16 << 20  # bytes; all flags as int64 would be 40 MiB


def test_a_prepared_corpus_is_not_read_again_for_its_hash(tmp_path):
    with StoreWriter(tmp_path / "store", largest_id=383) as writer:
        for seed in range(3):
            ids = np.random.default_rng(seed).integers(0, 384, 30).astype(np.int32)
            ends, sizes = np.array([10, 30]), np.array([40, 80])
            hashes = np.array([seed, seed + 9], np.uint64)
            writer.append(
                Tokens(
                    ids=ids,
                    trained=np.arange(30) % 7 > 0,
                    ends=ends,
                    hashes=hashes,
                    counts=Counter(rows=2),
                    document_bytes=sizes,
                    document_words=sizes,
                )
            )
        store = writer.finish(is_text=True)
    windows = cut(store, lambda start, end: disjoint_spans(start, end, 16))
    known = windows.hashes()
    windows.known_hashes = {}
    assert known == windows.hashes()  # what is read from the tokens themselves
    assert "tokens" in cut(store, lambda start, end: disjoint_spans(start, end, 16)).known_hashes
