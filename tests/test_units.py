"""Units and lines as users read and write them."""

import json

import pytest

from dsft.units import (
    GiB,
    in_digits,
    in_gib,
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


def test_a_json_that_cannot_be_written_is_named_as_the_user_did_and_leaves_nothing_beside(tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path / "file" / "x.json", tmp_path / "none" / "x.json"):
        with pytest.raises(OSError) as caught:
            write_json(path, {})
        assert caught.value.filename == str(path)
    write_json(tmp_path / "x.json", {"path": tmp_path})
    assert json.loads((tmp_path / "x.json").read_text()) == {"path": str(tmp_path)}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "x.json"]
