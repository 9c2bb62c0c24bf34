"""The figures that pages print are those of the kept results, and `scripts/reproduce` tells others from them."""

import re
import tomllib
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader

import pytest
from conftest import ROOT
from test_docs import PAGES

loader = SourceFileLoader("reproduce", str(ROOT / "scripts" / "reproduce"))
reproduce = module_from_spec(spec_from_loader("reproduce", loader))
loader.exec_module(reproduce)
TABLE = tomllib.loads(reproduce.TABLE.read_text())
BLOCKS = [
    pytest.param(experiment, block, id=block.get("marker", name))
    for name, experiment in TABLE["experiments"].items()
    for block in [{"marker": name} | each for each in experiment["blocks"]]
]


@pytest.mark.parametrize(("experiment", "block"), BLOCKS)
def test_a_page_prints_what_its_result_holds(experiment, block):
    printed = reproduce.markers(block["marker"]).search((ROOT / block["page"]).read_text())
    assert printed and printed[2].strip()
    assert block["kind"] in TABLE["kinds"]
    if "template" in block:
        result = reproduce.read_result((ROOT / experiment["result"]).read_text(), experiment["result"])
        assert reproduce.rendered(block, result) == printed[2].strip()


def test_every_marker_of_a_page_is_in_the_table():
    markers = [name for page in PAGES for name in re.findall(r"<!-- reproduce: (\w+) -->", page.read_text())]
    assert sorted(markers) == sorted(block.id for block in BLOCKS)


def test_every_command_says_what_it_needs():
    for name, experiment in TABLE["experiments"].items():
        assert {*re.findall(r"\$(\w+)", experiment["command"])} <= TABLE["inputs"].keys(), name
        assert experiment["minutes"] > 0 and experiment["about"]


@pytest.mark.parametrize(
    ("made", "tolerance", "differing"),
    [
        ("| a | 1,200 | 0.50 GB |", 0.0, []),
        ("| a | 1,250 | 0.50 GB |", 0.0, ["1,250 where 1,200 is printed"]),
        ("| a | 1,250 | 0.52 GB |", 0.05, []),
        ("| a | 1,300 | 0.50 GB |", 0.05, ["1,300 where 1,200 is printed"]),
        ("| a | 1,200 | -0.50 GB |", 0.05, ["-0.50 where 0.50 is printed"]),
    ],
)
def test_a_number_is_told_from_what_is_printed_by_its_tolerance(made, tolerance, differing):
    assert reproduce.differences("| a | 1,200 | 0.50 GB |", made, tolerance) == differing


def test_other_words_are_a_difference():
    (differing,) = reproduce.differences("| ZeRO-2 | 3.1 |", "| ZeRO-3 | 3.1 |", 1.0)
    assert differing.startswith("the texts differ")
