"""Units and lines as users read and write them."""

import json

import numpy
import pytest

from dsft.units import (
    Batch,
    GiB,
    in_digits,
    in_gib,
    one_of,
    padded_width,
    plural,
    write_json,
)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 GiB"), (GiB // 2, "0.5 GiB"), (12.34 * GiB, "12.3 GiB"), (999 * GiB, "999 GiB"), (1000 * GiB, "1,000 GiB")],
)
def test_bytes_have_three_digits_and_no_exponent(num_bytes, text):
    assert in_gib(num_bytes) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(7, "7"), (4110, "4,110"), (0.0029951, "0.002995"), (98.2, "98.2"), (999.94, "999.9"), (999.96, "1,000")],
)
def test_numbers_have_four_digits_and_integers_all(value, text):
    assert in_digits(value) == text


def test_counts_and_choices_are_read_as_sentences():
    assert [plural(number, "node") for number in (0, 1, 2)] == ["0 nodes", "1 node", "2 nodes"]
    assert [one_of(range(1, last)) for last in (2, 3, 4)] == ["1", "1 or 2", "1, 2 or 3"]


def test_rows_are_padded_to_the_next_multiple_of_eight():
    assert [padded_width(length) for length in (0, 1, 8, 9)] == [0, 8, 8, 16]
    assert padded_width(numpy.array([7, 16, 17])).tolist() == [8, 16, 24]


def test_ranks_that_share_a_micro_batch_count_once():
    assert Batch(micro=3, accumulation=2, ranks=4).sequences == 24
    assert Batch(micro=3, accumulation=2, ranks=4, sequence_parallel=2).sequences == 12


def test_a_json_that_cannot_be_written_is_named_as_the_user_did_and_leaves_nothing_beside(tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path / "file" / "x.json", tmp_path / "none" / "x.json"):
        with pytest.raises(OSError) as caught:
            write_json(path, {})
        assert caught.value.filename == str(path)
    write_json(tmp_path / "x.json", {"path": tmp_path})
    assert json.loads((tmp_path / "x.json").read_text()) == {"path": str(tmp_path)}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "x.json"]
