"""Cards by name, links by word, and the time of published steps."""

import pytest

from dsft.errors import UserError
from dsft.planner.speed import CARDS, cards_named, choose_card, parse_interconnect
from dsft.units import GB


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA H100 NVL", "H100-NVL"),
        ("NVIDIA GeForce RTX 4090", "4090"),
        ("Tesla T4", "T4"),
        ("NVIDIA GH200 480GB", "GH200"),
    ],
)
def test_a_driver_s_name_is_one_card(name, key):
    assert cards_named(name) == [key]


@pytest.mark.parametrize("name", ["NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA H100 MIG 1g.10gb", "RTX 9999"])
def test_another_card_of_that_name_is_not_known(name):
    assert cards_named(name) == []
    with pytest.raises(UserError, match="is not known"):
        choose_card(name)


def test_a_name_of_several_cards_is_asked_for():
    with pytest.raises(UserError, match="is A100-80GB or A100-40GB"):
        choose_card("A100")


@pytest.mark.parametrize(
    ("text", "link", "network"),
    [
        ("", 0.8 * 450, 0.8 * 50),
        ("nvlink+8xib400", 0.8 * 450, 0.8 * 400),
        ("pcie4+eth25", 0.8 * 32, 0.8 * 25 / 8),
        ("roce200", 0.8 * 450, 0.8 * 25),
    ],
)
def test_links_are_read(text, link, network):
    assert parse_interconnect(text, CARDS["H100"]) == pytest.approx((link * GB, network * GB))


def test_an_unknown_link_is_refused():
    with pytest.raises(UserError, match="'wifi' is unknown"):
        parse_interconnect("nvlink+wifi", CARDS["H100"])
