"""Groups add up to the total to the last bit, on any number of ranks and after an interruption."""

import json
import math

import pyarrow.parquet
import pytest
import torch
from conftest import read_json
from ranks import on_ranks
from tiny import sentences, write_jsonl
from transformers import AutoModelForCausalLM, AutoTokenizer

from dsft.api import evaluate, evaluate_all
from dsft.config.options import EvalConfig
from dsft.errors import UserError
from dsft.perplexity import documents, scoring
from dsft.perplexity.compare import read_evaluations

GROUPINGS = ["domain"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Two files of texts with a column."""
    folder = tmp_path_factory.mktemp("groups")
    rows = [{"text": text, "domain": "news" if len(text) % 3 else "code"} for text in sentences(24, seed=7)]
    rows[5].pop("domain")
    (folder / "texts").mkdir()
    for name, part in (("a.jsonl", rows[:15]), ("b.jsonl", rows[15:])):
        write_jsonl(folder / "texts" / name, part)
    return folder


def options_for(tiny, folder, **changes) -> dict:
    base = {"model": [str(tiny / "model")], "data": [str(folder / "texts")], "mode": "rolling", "seq_len": 16}
    return base | {"batch_tokens": 64, "zero": "0", "group_by": GROUPINGS} | changes


def _groups(options: dict):
    evaluation = next(evaluate_all(EvalConfig(**options)))
    return evaluation.perplexity.nats, evaluation.groups


def plain_tokens(tiny, data) -> list[tuple[str, str, int, int, float]]:
    """(domain, file, tokens before it in its window, token, nats) of each token in the mode rolling, windows of 16."""
    tokenizer = AutoTokenizer.from_pretrained(tiny / "model")
    model = AutoModelForCausalLM.from_pretrained(tiny / "model")
    tokens = []
    for path in sorted((data / "texts").iterdir()):
        for row in map(json.loads, path.open()):
            ids = [tokenizer.eos_token_id, *tokenizer(row["text"])["input_ids"]]
            for start in range(1, len(ids), 16):
                stop = min(start + 16, len(ids))
                begin = max(0, min(start - 1, stop - 17))
                with torch.no_grad():
                    logs = model(torch.tensor([ids[begin:stop]])).logits[0].double().log_softmax(-1)
                for place in range(start, stop):
                    nats = -logs[place - begin - 1, ids[place]].item()
                    tokens.append((row.get("domain", "(none)"), str(path), place - begin, ids[place], nats))
    return tokens


def test_groups_are_those_of_plain_sums_and_add_up_to_the_last_bit(tiny, data):
    nats, groups = _groups(options_for(tiny, data))
    tokens = plain_tokens(tiny, data)
    alone, _ = _groups(options_for(tiny, data, group_by=[]))
    assert alone == nats == pytest.approx(sum(token[-1] for token in tokens), rel=1e-6)
    rows = groups["domain"]
    assert math.fsum(row["nats"] for row in rows) == nats
    for row in rows:
        expected = [token[-1] for token in tokens if token[0] == row["group"]]
        assert row["tokens"] == len(expected) and row["nats"] == pytest.approx(sum(expected), rel=1e-5)
        assert row["perplexity"] == math.exp(row["nats"] / row["tokens"])
        low, high = row["interval"]
        if row["group"] == "(none)":  # a single document
            assert math.isnan(low)
        else:
            assert low < row["perplexity"] < high


def test_a_result_is_known_with_the_labels_that_the_data_has_now(tiny, data, tmp_path):
    """The text of the rows is the same, so texts, tokens and windows are too."""
    write_jsonl(
        path := tmp_path / "rows.jsonl", rows := [json.loads(line) for line in (data / "texts" / "a.jsonl").open()]
    )
    options = options_for(tiny, data, data=[str(path)], group_by=["domain"], output_dir=str(tmp_path / "out"))

    def domains() -> tuple[bool, list[str]]:
        evaluation = next(evaluate_all(EvalConfig(**options)))
        return evaluation.is_known, [group["group"] for group in evaluation.groups["domain"]]

    before = domains()[1]
    assert domains() == (True, before)
    write_jsonl(path, [row | {"domain": "one"} for row in rows])
    assert domains() == (False, ["one"])


class Interrupted(Exception):
    pass


def table_of(folder):
    table = pyarrow.parquet.read_table(folder).sort_by([("document", "ascending"), ("position", "ascending")])
    return table.to_pydict()


def test_groups_and_tokens_are_the_same_on_two_ranks(tiny, data, tmp_path, monkeypatch):
    options = options_for(tiny, data, output_dir=str(tmp_path / "alone"), save_tokens=True)
    nats, groups = _groups(options)
    report = read_json(tmp_path / "alone" / "perplexity.json")["results"][0]
    assert [row["nats"] for row in report["groups"]["domain"]] == [row["nats"] for row in groups["domain"]]
    tokens = table_of(report["tokens_folder"])
    assert math.fsum(tokens["nats"]) == nats and len(tokens["nats"]) == report["tokens"]
    assert list(tokens) == ["document", "position", "token", "nats"]
    assert tokens["token"] == [token[3] for token in plain_tokens(tiny, data)]
    # Interrupted; then begun again by two ranks.
    score, left = scoring.score, [9]

    def counted(*arguments):
        left[0] -= 1
        if left[0] < 0:
            raise Interrupted
        return score(*arguments)

    monkeypatch.setattr(scoring, "score", counted)
    options["output_dir"] = str(tmp_path / "again")
    with pytest.raises(Interrupted):
        _groups(options)
    again = on_ranks(2, _groups, options)
    (folder,) = (tmp_path / "again" / "tokens.parquet").iterdir()
    assert repr(again[0]) == repr(again[1])  # with NaN
    assert again[0][0] == pytest.approx(nats, rel=1e-9) and table_of(folder)["token"] == tokens["token"]
    assert math.fsum(table_of(folder)["nats"]) == again[0][0] == read_nats(tmp_path / "again")
    (read,) = read_evaluations([str(tmp_path / "again")])
    assert repr(read.groups) == repr(again[0][1])


def read_nats(folder) -> float:
    return read_json(folder / "perplexity.json")["results"][0]["nats"]


def test_groupings_that_cannot_be_made_are_refused_before_weights_load(tiny, data, monkeypatch):
    monkeypatch.setattr(documents, "MOST_GROUPS", 23)  # of 24 texts
    for options, part in (
        (
            {"group_by": ["domian"]},
            "group_by=domian: no such column in .*; it has text, domain",
        ),
        ({"group_by": ["text"]}, "group_by=text: the column has more than 23 values"),
        ({"group_by": ["domain"], "protocol": "gptq", "mode": "auto"}, "group_by=domain: protocol=gptq joins all"),
        ({"save_tokens": True}, "save_tokens needs output_dir"),
    ):
        with pytest.raises(UserError, match=part):
            evaluate(**options_for(tiny, data, **options), progress=False)
    monkeypatch.setattr(documents, "MOST_GROUPS", 24)
    evaluate(**options_for(tiny, data, group_by=["text"]), progress=False)
