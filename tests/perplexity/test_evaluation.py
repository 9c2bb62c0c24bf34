"""What an evaluation reports of itself: its report, its progress, what is wrong with a model, answers without a token,
and memory that runs out.
"""

import math

import pytest
import torch
from tiny import write_jsonl

from dsft.api import evaluate, evaluate_all
from dsft.config.options import EvalConfig
from dsft.errors import UserError
from dsft.perplexity import evaluation


@pytest.fixture
def evaluated(tiny):
    def make(**changes):
        base = {"model": str(tiny / "model"), "data": str(tiny / "held_out.jsonl"), "seq_len": 32, "max_documents": 4}
        return evaluate(**base | {"progress": False} | changes)

    return make


def test_the_report_holds_every_figure_of_the_result_and_how_it_came_about(evaluated, tiny):
    evaluation = evaluated(verify=2, zero="0", stride=8, mode="sliding", batch_tokens=64)
    report, result = evaluation.report(), evaluation.perplexity
    figures = ("perplexity", "nats", "tokens", "bytes", "words", "documents", "unscored_documents")
    assert {name: report[name] for name in figures} == {name: getattr(result, name) for name in figures}
    assert report["nats_per_token"] == result.nats / result.tokens
    assert report["bits_per_byte"] == pytest.approx(result.nats / math.log(2) / result.bytes)
    assert report["byte_perplexity"] == pytest.approx(2 ** report["bits_per_byte"])
    assert report["word_perplexity"] == math.exp(result.nats / result.words)
    assert (report["model"], report["data"]) == (str(tiny / "model"), str(tiny / "held_out.jsonl"))
    assert (report["mode"], report["zero"], report["ranks"], report["truncated_documents"]) == ("sliding", "0", 1, 0)
    options = {"seq_len": 32, "stride": 8, "scope": "corpus", "dtype": "float32", "batch_tokens": 64}
    assert options.items() <= report["options"].items()
    assert 0 <= report["verified_difference"] < 1e-5
    assert report["tokens_per_second"] == result.fed_tokens / report["seconds"] > 0
    assert report["peak_memory_bytes"]["host"] > 0 and len(report["model_hash"]) == 64


def test_rows_without_an_answer_stay_in_their_place_and_count_nothing(evaluated, tmp_path):
    rows = [{"prompt": "the ", "completion": text} for text in ("", "big model", "", "", "small loss", "")]
    path, alone = (
        str(write_jsonl(tmp_path / name, part)) for name, part in (("all.jsonl", rows), ("alone.jsonl", rows[1:5:3]))
    )
    result = evaluated(
        data=path, max_documents=None, seq_len=8, batch_tokens=8
    ).perplexity  # batches with nothing to score
    expected = evaluated(data=alone, max_documents=None, seq_len=8, batch_tokens=8).perplexity
    assert [bool(tokens) for tokens in result.document_tokens] == [False, True, False, False, True, False]
    assert result.document_nats[[1, 4]].tolist() == expected.document_nats.tolist()
    assert result.nats == expected.nats and result.unscored_documents == 4 and result.bytes == expected.bytes


@pytest.mark.parametrize("step", ["_load", "_evaluate_job"])
def test_out_of_memory_is_one_line_with_the_way_out(tiny, monkeypatch, step):
    def fail(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has ...")

    monkeypatch.setattr(evaluation, step, fail)
    config = EvalConfig(model=[str(tiny / "model")], data=[str(tiny / "held_out.jsonl")], seq_len=32, batch_tokens=64)
    with pytest.raises(UserError) as raised:
        next(evaluate_all(config))
    (problem,) = raised.value.problems
    assert f"out of memory in evaluating {tiny / 'model'} (CUDA out of memory" in problem and "\n" not in problem
    assert "use a smaller batch_tokens (here 64)" in problem and "zero 3-offload" in problem
