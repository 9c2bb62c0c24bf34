"""Prepared tokens on disk: what is written is read, in the smallest type that holds it."""

import dataclasses
from collections import Counter

import numpy as np
import pytest

from dsft.data.store import StoreWriter
from dsft.data.tokenization import Tokens


def tokens_of(*samples: list[int], hashes: list[int] | None = None, **counts: int) -> Tokens:
    ids = np.array([token for sample in samples for token in sample], np.int64)
    return Tokens(
        ids=ids,
        trained=ids % 2 == 0,
        ends=np.cumsum([len(sample) for sample in samples], dtype=np.int64),
        hashes=np.array(hashes if hashes is not None else range(len(samples)), np.uint64),
        counts=Counter(counts),
    )


@pytest.mark.parametrize(
    ("largest", "dtype"), [(383, "uint16"), (65_535, "uint16"), (65_536, "int32"), (128_255, "int32")]
)
def test_every_id_of_a_vocabulary_is_kept_in_the_smallest_type(tmp_path, largest, dtype):
    with StoreWriter(tmp_path / "store", largest_id=largest) as writer:
        writer.append(tokens_of([0, largest], [largest - 1]))
        writer.append(tokens_of([1, 2, largest]))
        store = writer.finish(source="here", is_text=False)
    assert store.tokens.dtype == dtype and store.tokens.tolist() == [0, largest, largest - 1, 1, 2, largest]
    assert store.ends.tolist() == [2, 3, 6] and store.trained.tolist() == [token % 2 == 0 for token in store.tokens]
    assert store.counts["tokens"] == 6 and store.counts["trained_tokens"] == int(store.trained.sum())
    assert [path.name for path in tmp_path.iterdir()] == ["store"] and not store.is_text


def test_weights_that_come_late_are_1_where_tokens_before_and_after_are_trained(tmp_path):
    with StoreWriter(tmp_path / "store", largest_id=9) as writer:
        writer.append(tokens_of([1, 2, 4]))
        weighted = dataclasses.replace(tokens_of([6, 7]), weights=np.array([0.5, 0], np.float32))
        writer.append(weighted)
        writer.append(tokens_of([3, 8]))
        store = writer.finish(source="here", is_text=False)
    assert store.weights.tolist() == [0, 1, 1, 0.5, 0, 0, 1]
    with StoreWriter(tmp_path / "plain", largest_id=9) as writer:
        writer.append(tokens_of([1, 2, 4]))
        assert writer.finish(source="here", is_text=False).weights is None


def test_counts_are_added_up_and_duplicates_found_in_all_parts(tmp_path):
    with StoreWriter(tmp_path / "store", largest_id=9) as writer:
        writer.append(tokens_of([1], [2], hashes=[5, 1 << 63], rows=2, truncated=1))
        writer.append(tokens_of([1], [2], [3], hashes=[5, 1 << 63, 6], rows=4, dropped_bad=1))
        store = writer.finish(source="here", is_text=True)
    counts = {name: number for name, number in store.counts.items() if number}
    assert counts == {
        "rows": 6,
        "truncated": 1,
        "dropped_bad": 1,
        "trained_tokens": 2,
        "tokens": 5,
        "duplicates": 2,
    }


def test_a_store_without_tokens_is_empty_and_an_unfinished_one_is_not_there(tmp_path):
    with StoreWriter(tmp_path / "empty", largest_id=9) as writer:
        store = writer.finish(source="here", is_text=False)
    assert store.tokens.tolist() == store.ends.tolist() == [] and store.counts["duplicates"] == 0
    with pytest.raises(KeyboardInterrupt), StoreWriter(tmp_path / "half", largest_id=9) as writer:
        writer.append(tokens_of([1]))
        raise KeyboardInterrupt
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]
