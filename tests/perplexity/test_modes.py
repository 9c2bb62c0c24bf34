"""Each named protocol gives what its source computes: the references here know nothing of dsft."""

import dataclasses
import json
import math
import shutil

import pytest
import torch
from conftest import grid
from tiny import sentences, write_jsonl, write_pairs
from tokenizers.processors import TemplateProcessing
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

from dsft.api import compare, evaluate, evaluate_all
from dsft.config.options import EvalConfig
from dsft.errors import UserError
from dsft.perplexity.modes import PROTOCOLS, disjoint_spans, mode_problems, protocol_config
from dsft.perplexity.of_training import evaluation_config

L, STRIDE = 32, 12
TEXTS = [*sentences(9, seed=5), "", *sentences(3, seed=6)]


def losses(model, ids: torch.Tensor) -> torch.Tensor:
    """[T - 1] nats of each token but the first."""
    logits = model(ids[None]).logits[0].double()
    return cross_entropy(logits[:-1], ids[1:], reduction="none")


def gptq(model, tokenizer) -> float:
    ids = tokenizer("\n\n".join(TEXTS), return_tensors="pt").input_ids[0]
    windows = len(ids) // L
    means = [losses(model, ids[i * L : (i + 1) * L]).mean() * L for i in range(windows)]
    return math.exp(sum(means) / (windows * L))


def llama_cpp(model, tokenizer) -> float:
    ids = tokenizer("\n\n".join(TEXTS), return_tensors="pt").input_ids[0]
    nll, count, first = 0.0, 0, L // 2
    for start in range(0, len(ids) // L * L, L):
        chunk = ids[start : start + L].clone()
        if tokenizer.bos_token_id is not None:
            chunk[0] = tokenizer.bos_token_id
        nll += losses(model, chunk)[first:].sum().item()  # the first of these predicts chunk[first + 1]
        count += L - first - 1
    return math.exp(nll / count)


def lm_eval(model, tokenizer) -> float:
    prefix = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    nll, tokens = 0.0, 0
    for text in TEXTS:
        ids = torch.tensor([prefix, *tokenizer(text)["input_ids"]])
        for start in range(1, len(ids), L):
            stop = min(start + L, len(ids))
            window = ids[max(0, min(start - 1, stop - L - 1)) : stop]
            nll += losses(model, window)[-(stop - start) :].sum().item()
            tokens += stop - start
    return math.exp(nll / tokens)


def hf(model, tokenizer) -> float:
    ids = tokenizer("\n\n".join(TEXTS), return_tensors="pt").input_ids
    nll_sum, n_tokens, prev_end = 0.0, 0, 0
    for begin in range(0, ids.size(1), STRIDE):
        end = min(begin + L, ids.size(1))
        trg_len = end - prev_end
        target = ids[:, begin:end].clone()
        target[:, :-trg_len] = -100
        loss = model(ids[:, begin:end], labels=target).loss.item()
        nll_sum += loss * ((target != -100).sum().item() - 1)
        n_tokens += (target != -100).sum().item() - 1
        prev_end = end
        if end == ids.size(1):
            break
    return math.exp(nll_sum / n_tokens)


REFERENCES = {"gptq": gptq, "llama.cpp": llama_cpp, "lm-eval": lm_eval, "hf": hf}


@pytest.fixture(scope="module", params=grid([False, True], [True]), ids=lambda value: "with BOS" if value else "plain")
def measured(request, tiny, tmp_path_factory):
    """The model, its tokenizer, and its evaluations by each protocol."""
    folder = tmp_path_factory.mktemp("protocols")
    model = shutil.copytree(tiny / "model", folder / "model")
    if request.param:
        tokenizer = AutoTokenizer.from_pretrained(model)
        tokenizer.bos_token = "<|user|>"
        bos = (tokenizer.bos_token, tokenizer.bos_token_id)
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=f"{bos[0]} $A", special_tokens=[bos])
        tokenizer.save_pretrained(model)
    data = folder / "texts.jsonl"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    config = EvalConfig(model=[str(model)], data=[str(data)], seq_len=L, zero="0")
    evaluations = []
    for protocol in REFERENCES:
        stride = STRIDE if protocol == "hf" else None
        evaluations += evaluate_all(dataclasses.replace(config, protocol=protocol, stride=stride))
    loaded = AutoModelForCausalLM.from_pretrained(model).eval()
    return loaded, AutoTokenizer.from_pretrained(model), evaluations


@torch.no_grad()
@pytest.mark.parametrize("protocol", REFERENCES)
def test_a_protocol_gives_what_its_source_computes(measured, protocol):
    model, tokenizer, evaluations = measured
    by_protocol = {evaluation.protocol: evaluation for evaluation in evaluations}
    report = by_protocol[protocol].report()
    assert report["perplexity"] == pytest.approx(REFERENCES[protocol](model, tokenizer), rel=1e-5)
    others = [other.report()["perplexity"] for name, other in by_protocol.items() if name != protocol]
    assert report["perplexity"] not in others


def test_a_result_has_one_perplexity(measured):
    """Also by hf, whose windows have weights of their own."""
    model, tokenizer, evaluations = measured
    for evaluation in evaluations:
        number = evaluation.perplexity.perplexity
        assert number == evaluation.report()["perplexity"]
        assert evaluation.summary()["perplexity"].startswith(f"{number:,.4f}, ")
    (by_hf,) = [evaluation for evaluation in evaluations if evaluation.protocol == "hf"]
    assert by_hf.perplexity.loss != by_hf.perplexity.reported_loss == pytest.approx(math.log(hf(model, tokenizer)))
    better = dataclasses.replace(by_hf.perplexity, reported_loss=by_hf.perplexity.reported_loss - 0.1)
    (comparison,) = compare(by_hf, dataclasses.replace(by_hf, model="better", perplexity=better))
    ratio = better.perplexity / by_hf.perplexity.perplexity
    assert comparison.perplexity_ratio.value == pytest.approx(ratio, rel=1e-12)


def test_bytes_are_counted_only_where_the_whole_text_is_scored(measured):
    *_, evaluations = measured
    bytes_of = {evaluation.protocol: evaluation.perplexity.bytes for evaluation in evaluations}
    whole = len("\n\n".join(TEXTS).encode())
    assert bytes_of["gptq"] == bytes_of["llama.cpp"] == 0
    assert bytes_of["lm-eval"] == whole - 2 * 12
    tokenizer = measured[1]
    first = tokenizer("\n\n".join(TEXTS))["input_ids"][:1]  # is context only
    assert bytes_of["hf"] == whole - len(tokenizer.decode(first, skip_special_tokens=True).encode())


@pytest.mark.parametrize(("mode", "bos"), [("windows", "on"), ("rolling", "auto")])
def test_documents_without_any_text_are_refused_also_where_bos_and_end_tokens_are_there(tiny, tmp_path, mode, bos):
    model = shutil.copytree(tiny / "model", tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.bos_token = "<|user|>"
    tokenizer.save_pretrained(model)
    data = write_jsonl(tmp_path / "empty.jsonl", [{"text": ""}] * 3)
    with pytest.raises(UserError, match=r"empty.jsonl: 3 documents, none of which has text"):
        evaluate(model=str(model), data=str(data), seq_len=L, mode=mode, bos=bos, progress=False)


def test_one_model_under_a_tokenizer_that_adds_bos_differs_by_nothing(tiny, tmp_path):
    """Rolling puts no BOS before one that the tokenizer has put, and scores none."""
    model = shutil.copytree(tiny / "model", tmp_path / "with_bos")
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.bos_token = tokenizer.eos_token  # which the other tokenizer has as the prefix
    bos = (tokenizer.bos_token, tokenizer.bos_token_id)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=f"{bos[0]} $A", special_tokens=[bos])
    tokenizer.save_pretrained(model)
    options = {"data": str(tiny / "held_out.jsonl"), "seq_len": L, "progress": False}
    for how, alike in (({"mode": "rolling"}, True), ({"mode": "windows"}, False), ({"protocol": "lm-eval"}, False)):
        results = [evaluate(model=str(name), **options, **how) for name in (tiny / "model", model)]
        (comparison,) = compare(*results)
        if alike:
            assert results[0].perplexity.nats == results[1].perplexity.nats
            assert (comparison.better, comparison.worse, comparison.bits_per_byte.value) == (0, 0, 0.0)
        before, after = (result.perplexity.bits_per_byte for result in results)
        assert comparison.bits_per_byte.value == pytest.approx(after - before, abs=1e-12)
        assert ("mode rolling compares the texts alone" in comparison.note) != alike


def test_a_protocol_takes_its_own_length_unless_one_is_named():
    def lengths(positions, **options):
        configs = [evaluation_config({"model": "m", "data": "d", "protocol": name} | options, []) for name in PROTOCOLS]
        return [protocol_config(config, positions).seq_len for config in configs]

    assert lengths(8192) == [2048, 512, 8192, 1024]
    assert lengths(1024) == [1024, 512, 1024, 1024]
    assert lengths(None) == [2048, 512, 2048, 1024]
    assert lengths(8192, seq_len=256) == [256] * 4
    assert list(disjoint_spans(0, 10, 4, scored_from=3, full=True)) == [(0, 4, 3), (4, 8, 7)]


def test_what_a_protocol_cannot_be_given_is_refused(tiny, tmp_path):
    pairs = write_pairs(tmp_path / "pairs.jsonl", 3)
    base = {"model": str(tiny / "model"), "data": str(tiny / "held_out.jsonl"), "progress": False}
    for options, part in (
        ({"protocol": "gptq", "mode": "rolling"}, "mode=rolling: protocol=gptq does not read it; leave it out"),
        ({"protocol": "gptq", "data": str(pairs)}, "protocol=gptq needs texts, .* leave it out"),
        ({"protocol": "gptq", "seq_len": 256, "max_documents": 1}, "drops what does not fill a window of seq_len=256"),
        ({"protocol": "gtpq", "seq_len": 32}, "did you mean 'gptq'"),
        (
            {"protocol": "all", "seq_len": 32},
            "protocol: invalid choice: 'all' .choose from gptq, llama.cpp, lm-eval, hf",
        ),
        ({"suite": ["wikitext-2"], "seq_len": 32}, "suite: removed; name the data sets with data"),
    ):
        with pytest.raises(ValueError, match=part) as caught:
            evaluate(**base | options)
        assert len(caught.value.problems) == 1


def test_a_stride_is_of_windows_that_slide():
    """An evaluation in other windows has another perplexity."""
    for options, problem in (
        ({"stride": 8}, "stride=8: mode=auto does not read it; leave it out, or use mode sliding"),
        ({"mode": "rolling", "scope": "document"}, "scope=document: mode=rolling does not read it; leave it out"),
    ):
        (message,) = mode_problems(EvalConfig(**options))
        assert message.startswith(problem)
    for options in ({"mode": "sliding", "stride": 8, "scope": "document"}, {"protocol": "hf", "stride": 8}):
        assert not mode_problems(EvalConfig(**options))


def test_a_stride_beyond_the_window_that_a_protocol_takes_is_refused(tiny):
    asked = {"model": str(tiny / "model"), "data": str(tiny / "held_out.jsonl"), "protocol": "hf", "progress": False}
    with pytest.raises(UserError, match="stride=512: must be less than the 256 tokens of a window of protocol=hf"):
        evaluate(**asked, stride=512)
    assert evaluate(**asked, stride=255).perplexity.perplexity > 1
