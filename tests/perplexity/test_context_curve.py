"""The same last tokens of each document are scored with growing context."""

import math

import pytest
import torch
from conftest import read_json
from tiny import sentences, write_jsonl, write_pairs
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

from dsft.api import evaluate, evaluate_perplexity
from dsft.config.options import EvalConfig
from dsft.errors import UserError
from dsft.perplexity.compare import print_together
from dsft.perplexity.of_training import evaluation_config

TEXTS = [*sentences(20, seed=1), "short"]


def loss_of_last(model, tokenizer, *, length: int, longest: int, scored: int) -> tuple[float, int]:
    """Mean nats and documents, with nothing of dsft."""
    nats = []
    for text in TEXTS:
        ids = torch.tensor(tokenizer(text)["input_ids"])
        if len(ids) >= longest:
            logits = model(ids[None, -length:]).logits[0].double()
            nats.append(cross_entropy(logits[:-1], ids[-length + 1 :], reduction="none")[-scored:].sum())
    return (sum(nats) / len(nats) / scored).item(), len(nats)


def test_each_length_scores_the_same_last_tokens_and_is_kept_and_drawn(tiny, tmp_path, capsys):
    data = write_jsonl(tmp_path / "texts.jsonl", [{"text": text} for text in TEXTS])
    options = {"model": [str(tiny / "model")], "data": [str(data)], "zero": "0", "output_dir": str(tmp_path / "out")}
    config = EvalConfig(**options, context_curve="16,8,32", batch_tokens=64)
    evaluations = list(evaluate(config))
    model, tokenizer = (part.from_pretrained(tiny / "model") for part in (AutoModelForCausalLM, AutoTokenizer))
    assert [evaluation.protocol for evaluation in evaluations] == ["context-8", "context-16", "context-32"]
    for evaluation, length in zip(evaluations, (8, 16, 32), strict=True):
        with torch.no_grad():
            loss, documents = loss_of_last(model, tokenizer, length=length, longest=32, scored=4)
        assert 1 < documents < len(TEXTS) and evaluation.perplexity.tokens == 4 * documents
        assert evaluation.perplexity.loss == pytest.approx(loss, abs=1e-6)
        assert evaluation.perplexity.unscored_documents == len(TEXTS) - documents
    kept = read_json(tmp_path / "out" / "perplexity.json")["results"]
    assert [math.log(result["perplexity"]) for result in kept] == [
        pytest.approx(evaluation.perplexity.loss) for evaluation in evaluations
    ]
    capsys.readouterr()
    print_together(evaluations, config.output_dir)
    said = capsys.readouterr().out
    assert "Context curve of" in said and "32 tokens" in said and f"the last 4 tokens of {documents} documents" in said
    assert (tmp_path / "out" / "context_curve.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"context_curve": "512,2x"}, "'2x' is no number of tokens; write for example 512,1k,2k"),
        ({"context_curve": "1k"}, "at least two lengths"),
        ({"context_curve": "8,16", "protocol": "hf"}, "context_curve=8,16 and protocol=hf are both set"),
        ({"context_curve": "8,16", "mode": "rolling"}, "context_curve=8,16 and mode=rolling are both set"),
        ({"context_curve": "8,16", "scope": "document"}, "context_curve=8,16 and scope=document are both set"),
        ({"context_curve": "8,16", "separator": "--"}, "context_curve=8,16 and separator=-- are both set"),
        ({"context_curve": "64,128"}, "use shorter contexts, or longer documents"),
        ({"context_curve": "256,1k"}, "context_curve=1024 is beyond the 256 positions"),
    ],
)
def test_a_curve_that_cannot_be_is_one_problem(tiny, changes, said):
    problems: list[str] = []
    values = {"model": str(tiny / "model"), "data": str(tiny / "held_out.jsonl"), "zero": "0"}
    config = evaluation_config(values | changes, problems)
    with pytest.raises(UserError) as caught:
        next(evaluate(config, problems))
    assert len(caught.value.problems) == 1 and said in caught.value.problems[0]


def test_a_curve_is_of_texts_and_gives_several_results(tiny, tmp_path):
    pairs = write_pairs(tmp_path / "pairs.jsonl", 3)
    with pytest.raises(UserError, match="context_curve is of texts.* leave it out"):
        next(evaluate(EvalConfig(model=[str(tiny / "model")], data=[str(pairs)], context_curve="8,16", zero="0")))
    with pytest.raises(UserError, match="a result for each length"):
        evaluate_perplexity(model=str(tiny / "model"), data=str(pairs), context_curve="8,16")
