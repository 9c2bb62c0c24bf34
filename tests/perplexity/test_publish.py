"""The table of a paper: each number in it is that of a result, and each format is read by what reads it.
Two laboratories compare results by a card, without the models.
"""

import csv
import dataclasses
import io
import json
import math

import pytest
from test_compare import HASHES, OPTIONS, evaluation

from dsft.cli.main import run_command
from dsft.errors import UserError
from dsft.perplexity.compare import joined_seeds
from dsft.perplexity.publish import table_of, written
from dsft.perplexity.results import Results


@pytest.fixture
def results():
    return [
        evaluation(model, seed, data=data, documents=number, hashes=HASHES | {"texts": data})
        for data, number in (("a.jsonl", 40), ("b_1.jsonl", 20))
        for seed, model in enumerate(("base", "runs/x_1", "runs/x_2"))
    ]


def read_csv(text: str) -> dict[str, dict[str, str]]:
    return {row["model"]: row for row in csv.DictReader(io.StringIO(text))}


def test_a_table_has_the_perplexities_and_both_means_over_sets(results):
    rows = read_csv(written(*table_of(results, "perplexity"), metric="perplexity", format="csv"))
    assert list(rows) == ["base", "runs/x_1", "runs/x_2"]
    first, second = (result.perplexity for result in results if result.model == "runs/x_1")
    assert float(rows["runs/x_1"]["a.jsonl"]) == first.perplexity
    assert float(rows["runs/x_1"]["b_1.jsonl low"]) == pytest.approx(results[4].intervals.perplexity[0])
    nats, tokens = first.nats + second.nats, first.tokens + second.tokens
    assert float(rows["runs/x_1"]["micro mean"]) == pytest.approx(math.exp(nats / tokens))
    macro = math.exp((first.reported_loss + second.reported_loss) / 2)
    assert float(rows["runs/x_1"]["macro mean"]) == pytest.approx(macro)
    bits = read_csv(written(*table_of(results, "bits_per_byte"), metric="bits_per_byte", format="csv"))
    assert float(bits["base"]["a.jsonl"]) == pytest.approx(results[0].perplexity.bits_per_byte)


def test_a_model_without_one_of_the_sets_has_no_mean(results):
    rows = read_csv(written(*table_of(results[:-1], "perplexity"), metric="perplexity", format="csv"))
    assert rows["runs/x_2"]["macro mean"] == rows["runs/x_2"]["b_1.jsonl"] == "" != rows["base"]["macro mean"]


def test_protocols_of_one_set_are_no_sets_to_take_a_mean_over():
    by_protocol = [evaluation("base", seed, protocol=name) for seed, name in enumerate(("gptq", "hf"))]
    columns, cells = table_of(by_protocol, "perplexity")
    assert columns == [*cells["base"]] == ["texts.jsonl by gptq", "texts.jsonl by hf"]


def test_seeds_are_a_row_with_their_standard_deviation(results):
    table = table_of(joined_seeds(results, ["runs/x_*"]), "perplexity")
    rows = read_csv(written(*table, metric="perplexity", format="csv"))
    first, second = (result.perplexity.perplexity for result in results[1:3])
    assert float(rows["runs/x_*"]["a.jsonl sd over seeds"]) == pytest.approx(abs(first - second) / math.sqrt(2))
    shown = written(*table, metric="perplexity", format="markdown")
    assert " ± " in shown and "standard deviation over seeds" in shown


def test_results_that_would_share_a_cell_are_told_apart_or_refused():
    by_dtype = [evaluation("base", seed, options=OPTIONS | {"dtype": f"{seed}"}) for seed in (1, 2)]
    assert list(table_of(by_dtype, "perplexity")[1]) == ["base (1)", "base (2)"]
    with pytest.raises(UserError, match="base has two results on texts.jsonl that differ"):
        table_of([evaluation("base", 1), evaluation("base", 2)], "perplexity")
    assert len(table_of([evaluation("base", 1)] * 2, "perplexity")[1]) == 1


def test_latex_and_markdown_are_well_formed(results):
    markdown = written(*table_of(results, "perplexity"), metric="perplexity", format="markdown").splitlines()
    assert len({line.count(" | ") for line in markdown[:5]}) == 1 and markdown[1].startswith("| --- |")
    latex = written(*table_of(results, "perplexity"), metric="perplexity", format="latex")
    assert r"runs/x\_1 & " in latex and r"\begin{tabular}{lrrrr}" in latex and r"b\_1.jsonl" in latex


def test_groups_are_columns(results):
    groups = {"domain": [{"group": "news", "nats": 20.0, "tokens": 10, "perplexity": math.e**2, "interval": [7, 8]}]}
    results = [evaluation("base", 0, groups=groups), evaluation("other", 1)]
    rows = read_csv(written(*table_of(results, "perplexity", "domain"), metric="perplexity", format="csv"))
    assert float(rows["base"]["news (texts.jsonl)"]) == pytest.approx(math.e**2)
    assert float(rows["base"]["news (texts.jsonl) high"]) == pytest.approx(8)
    with pytest.raises(UserError, match="group_by=domian: no such .* have domain; did you mean 'domain'"):
        table_of(results, "perplexity", "domian")
    with pytest.raises(UserError, match="the bytes of a group are not known; leave one out"):
        table_of(results, "bits_per_byte", "domain")


def test_the_command_prints_the_table(results, tmp_path, capsys):
    for result in results:
        Results(tmp_path).add(result)
    run_command("compare", [str(tmp_path), "--format", "markdown", "--metric", "nats_per_token", "--seeds", "runs/*"])
    shown = capsys.readouterr().out
    assert "| runs/* | " in shown and "macro mean" in shown and "nats per token, 95% interval" in shown
    run_command("compare", [str(tmp_path), "--metric", "bits_per_byte"])
    assert "bits per byte, 95% interval" in capsys.readouterr().out
    for options, part in (
        (["--metric", "bits_per_byte", "--json"], "json: not read here, a table"),
        (["--card", str(tmp_path / "card.json"), "--format", "csv"], "format: not read here, card"),
    ):
        with pytest.raises(UserError, match=part):
            run_command("compare", [str(tmp_path), *options])
    assert not (tmp_path / "card.json").exists()


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
