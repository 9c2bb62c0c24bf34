"""Two laboratories compare results by a card, without the models."""

import dataclasses
import json

import pytest
from test_compare import HASHES, evaluation

from dsft.cli.main import run_command
from dsft.errors import UserError
from dsft.perplexity.results import Results


@pytest.fixture
def card(tmp_path):
    Results(tmp_path / "ours").add(evaluation("base", 0))
    run_command("compare", [str(tmp_path / "ours"), "--card", str(tmp_path / "card.json")])
    return tmp_path / "card.json"


def agreement_with(card, result, capsys) -> str:
    Results(card.parent / "theirs").add(result)
    capsys.readouterr()
    run_command("compare", [str(card.parent / "theirs"), "--against", str(card)])
    return capsys.readouterr().out


def test_the_same_result_agrees_to_the_bit(card, capsys):
    shown = agreement_with(card, evaluation("copies/base", 0, model_hash="base"), capsys)
    assert "40 of 40 bit-identical, largest relative difference 0.0e+00" in shown and "another" not in shown
    assert "texts" in json.loads(card.read_text())["results"][0]["hashes"]


def test_what_differs_is_named(card, capsys):
    other = evaluation("base", 0, versions={"torch": "9"}, model_hash="x")
    nats_D = other.perplexity.document_nats.copy()
    nats_D[3] *= 1.001
    result = dataclasses.replace(other.perplexity, document_nats=nats_D, nats=sum(nats_D))
    shown = agreement_with(card, dataclasses.replace(other, perplexity=result), capsys)
    assert "39 of 40 bit-identical, largest relative difference 1.0e-03 (document 3)" in shown
    assert "torch 9, there None" in shown and "another" in shown


def test_other_texts_and_files_that_are_no_card_are_refused(card, capsys):
    with pytest.raises(UserError, match="no result on the texts of texts.jsonl"):
        agreement_with(card, evaluation("base", 0, hashes=HASHES | {"texts": "x"}), capsys)
    with pytest.raises(UserError, match="is no card that dsft compare --card wrote"):
        run_command("compare", [str(card.parent / "ours"), "--against", str(card.parent / "ours" / "perplexity.json")])
    for content, part in (
        ('{"card": 1, "results": [{}]}', "is no card that dsft compare --card wrote"),
        ('{"card": 9, "results": []}', "a card of format 9; this dsft reads 1$"),
    ):
        card.write_text(content)
        with pytest.raises(UserError, match=part):
            run_command("compare", [str(card.parent / "ours"), "--against", str(card)])
