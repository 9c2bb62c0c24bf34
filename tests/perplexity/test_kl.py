"""KL divergence and likeliest tokens are those of plain full logits in float64."""

import json
import math
import shutil

import numpy as np
import pytest
import torch
from conftest import grid, read_json
from ranks import on_ranks
from tiny import ARCHITECTURES, windows_of_sequences, write_model
from transformers import AutoModelForCausalLM, AutoTokenizer, OPTConfig

from dsft.api import evaluate, evaluate_all
from dsft.config.options import EvalConfig
from dsft.data.epoch import sequence
from dsft.errors import UserError
from dsft.models import chunked_head
from dsft.perplexity import scoring
from dsft.units import IGNORED

OPT = {"vocab_size": 384, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 64}
OPT |= {"word_embed_proj_dim": 32, "max_position_embeddings": 256}
MODELS = ARCHITECTURES | {"opt": (OPTConfig, OPT)}  # whose head cannot be split


def plain_columns(model, reference, windows) -> np.ndarray:
    """[5, N]: nats of both, KL both ways, and whether the likeliest token is the same; one window at a time."""
    columns = []
    for window in range(len(windows.spans)):
        ids, targets = (torch.from_numpy(part) for part in windows.inputs_and_targets(window))
        with torch.no_grad():
            p, q = (each(input_ids=ids[None]).logits[0].double().log_softmax(-1) for each in (model, reference))
        for here in torch.nonzero(targets != IGNORED)[:, 0].tolist():
            kl, reverse = ((a[here].exp() * (a[here] - b[here])).sum() for a, b in ((q, p), (p, q)))
            same = p[here].argmax() == q[here].argmax()
            columns.append([-p[here, targets[here]], -q[here, targets[here]], kl, reverse, same])
    return np.array(columns, dtype=np.float64).T


@pytest.mark.parametrize("architecture", grid(MODELS, ["llama", "gemma3", "gpt2", "qwen2_moe", "opt"]))
def test_tiles_of_both_heads_give_plain_full_logits(architecture, monkeypatch):
    monkeypatch.setattr(chunked_head, "TILE_LOGITS", 16 * 384)
    cls, values = MODELS[architecture]
    models = []
    for scale in (2.0, 2.2):
        torch.manual_seed(0)
        models.append(AutoModelForCausalLM.from_config(cls(**values)).eval())
        with torch.no_grad():
            for parameter in models[-1].parameters():
                parameter.mul_(scale)
    windows = windows_of_sequences([sequence(ids.numpy(), np.ones(20, bool)) for ids in torch.randint(1, 384, (5, 20))])
    expected = plain_columns(*models, windows)
    result = scoring.evaluate_windows(
        models[0],
        windows,
        pad_token_id=0,
        batch_tokens=48,
        device=torch.device("cpu"),
        collective_forward=False,
        reference=models[1],
    )
    nats, of_reference, kl, reverse, same = expected.mean(axis=1)
    _, *means = result.document_pairs.sum(axis=1) / result.tokens
    assert kl > 1e-5 and reverse > 1e-5 and result.loss == pytest.approx(nats, abs=1e-6)
    assert means == [pytest.approx(kl, abs=1e-6), pytest.approx(reverse, abs=1e-6), pytest.approx(same, abs=1e-9)]
    assert result.reference_loss == pytest.approx(of_reference, abs=1e-6)
    by_document = expected[2].reshape(5, -1).sum(axis=1)
    np.testing.assert_allclose(result.document_pairs[1], by_document, atol=2e-5)


def test_logits_of_minus_infinity_add_nothing():
    """A head may give ids that no text has -inf: the log-softmax of the others is finite."""
    logits = torch.randn(2, 5, 40, generator=torch.Generator().manual_seed(0))
    logits[:, :, 10:30] = -math.inf
    logits[:, :, :10] = -math.inf
    targets = torch.arange(30, 35)
    model, reference = (each.double().log_softmax(-1) for each in logits)
    nats = scoring.negative_log_likelihood([logits[0].clone()], targets)
    expected = -model.gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(nats.double(), expected, atol=1e-5, rtol=0)
    columns = scoring.compare_logits(*logits, targets)
    kl = (reference.exp() * (reference - model)).nan_to_num().sum(1)
    torch.testing.assert_close(columns[0], expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(columns[2], kl, atol=1e-5, rtol=0)
    logits[1, :, :10] = 0.0  # of the reference alone: what the model excludes is lost to it
    columns = scoring.compare_logits(*logits, targets)
    reference = logits[1].double().log_softmax(-1)
    reverse = (model.exp() * (model - reference)).nan_to_num(neginf=0).sum(1)
    assert columns[2].isinf().all()
    torch.testing.assert_close(columns[3], reverse, atol=1e-5, rtol=0)


@pytest.fixture(scope="module")
def pair(tiny, tmp_path_factory):
    """The folder of a model that is a little off the one of `tiny`."""
    folder = shutil.copytree(tiny / "model", tmp_path_factory.mktemp("pair") / "off")
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    model.save_pretrained(folder)
    return folder


def options_for(tiny, pair, **changes) -> dict:
    base = {"model": [str(pair)], "reference": str(tiny / "model"), "data": [str(tiny / "held_out.jsonl")]}
    return base | {"mode": "rolling", "seq_len": 32, "batch_tokens": 200, "zero": "0"} | changes


def _reports(many: list[dict]) -> list:
    reports = []
    for options in many:
        evaluation = next(evaluate_all(EvalConfig(**options)))
        reports.append((evaluation.perplexity.nats, evaluation.divergence))
    return reports


@pytest.mark.exhaustive
def test_the_divergence_has_the_same_bits_on_one_and_two_ranks_replicated_and_sharded(tiny, pair):
    ((expected,),) = on_ranks(1, _reports, [options_for(tiny, pair)])
    cases = [options_for(tiny, pair, zero=zero) for zero in ("0", "3")]
    assert on_ranks(2, _reports, cases) == [[expected] * 2] * 2
    assert expected[1]["kl"] > 1e-6 and 0 < expected[1]["same_top"] <= 1


class Interrupted(Exception):
    pass


def test_an_interrupted_comparison_with_a_reference_resumes_and_is_read_back(tiny, pair, tmp_path, monkeypatch):
    options = options_for(tiny, pair)
    ((expected, divergence),) = _reports([options])
    options["output_dir"] = str(tmp_path)
    score, left = scoring.score, [3]

    def counted(*arguments):
        left[0] -= 1
        if left[0] < 0:
            raise Interrupted
        return score(*arguments)

    monkeypatch.setattr(scoring, "score", counted)
    with pytest.raises(Interrupted):
        _reports([options])
    left[0] = 10**9
    assert _reports([options]) == [(expected, divergence)]
    left[0] = 0
    evaluation = next(evaluate_all(EvalConfig(**options)))
    assert evaluation.is_known and evaluation.divergence == divergence
    total = divergence["kl"] * evaluation.perplexity.tokens
    assert evaluation.perplexity.document_pairs[1].sum() == pytest.approx(total)
    report = read_json(tmp_path / "perplexity.json")["results"][0]
    assert report == json.loads(json.dumps(evaluation.report()))
    for name, bounds in report["divergence"]["intervals"].items():
        assert bounds[0] <= divergence[name] <= bounds[1]
    low, high = report["divergence"]["intervals"]["kl"]
    assert f"({low:.6f} to {high:.6f})" in evaluation.summary()[f"against {tiny / 'model'}"]
    assert list(evaluation.to_pandas().columns)[-4:] == ["reference_nats", "kl", "reverse_kl", "same_top"]
    assert f"against {tiny / 'model'}" in evaluation.summary()


@pytest.mark.parametrize("protocol", [None, "hf"])
def test_the_same_model_diverges_by_nothing(tiny, protocol):
    """Also by hf, which weighs the nats of both."""
    how = {"max_documents": 3} | ({"mode": "auto", "protocol": protocol} if protocol else {})
    evaluation = evaluate(**options_for(tiny, tiny / "model", **how), progress=False)
    assert abs(evaluation.divergence["kl"]) < 1e-7 and evaluation.divergence["same_top"] == 1.0
    assert evaluation.divergence["reference_perplexity"] == evaluation.perplexity.perplexity


def test_a_reference_with_another_tokenizer_or_head_is_refused(tiny, tmp_path):
    other = write_model(tmp_path / "other")
    tokenizer = AutoTokenizer.from_pretrained(other)
    tokenizer.add_tokens(["another"])
    tokenizer.save_pretrained(other)
    wider = write_model(tmp_path / "wider", vocab_size=392)
    for reference, part in (
        (other, "predicts other tokens than .* set tokenizer; else .* dsft compare"),
        (wider, "predicts other tokens than .*model, and KL needs"),
        (tmp_path / "nowhere", "^reference=.*nowhere: no such folder or file"),
    ):
        with pytest.raises(UserError, match=part):
            evaluate(**options_for(tiny, tiny / "model", reference=str(reference)), progress=False)
