"""The law: each token once, and the same bits on any number of ranks."""

import dataclasses
import json
import math
import os
import re
import shutil

import numpy as np
import pytest
import torch
import transformers
from conftest import ROOT, read_json
from datasets import load_dataset
from ranks import on_ranks, run_entry
from tiny import ARCHITECTURES, GATED, sentences, windows_of_sequences, write_jsonl, write_model, write_texts
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer

from dsft.api import evaluate, evaluate_all
from dsft.checkpoints.run_folder import write_run
from dsft.config.options import EvalConfig, TrainConfig
from dsft.config.reader import make_config
from dsft.data.epoch import sequence
from dsft.data.training_data import check_sources
from dsft.errors import TrainingStopped, UserError
from dsft.models import chunked_head
from dsft.models.chunked_head import ChunkedHead
from dsft.models.tokenizer import load_tokenizer
from dsft.models.weight_files import model_identity
from dsft.perplexity import scoring
from dsft.perplexity.documents import build_windows
from dsft.perplexity.evaluation import fingerprint
from dsft.perplexity.modes import rolling_spans, sliding_spans
from dsft.perplexity.of_training import read_evaluation
from dsft.perplexity.results import Recorder
from dsft.perplexity.scoring import evaluate_windows
from dsft.runtime.software import versions
from dsft.units import IGNORED

MODES = [
    {"mode": "windows"},
    {"mode": "rolling"},
    {"mode": "sliding", "stride": 16},
    {"mode": "sliding", "stride": 24, "scope": "document"},
    {"mode": "windows", "separator": "\n\n"},
    {"mode": "answers"},
]
NAMES = ["windows", "rolling", "sliding", "sliding-document", "windows-text-separator", "answers"]


def mode_options(tiny, mode: dict) -> dict:
    data = "pairs.jsonl" if mode["mode"] == "answers" else "held_out.jsonl"
    return {"model": [str(tiny / "model")], "data": [str(tiny / data)], "seq_len": 32, "batch_tokens": 200} | mode


def windows_for(options: dict):
    config = make_config(EvalConfig, options, [])
    tokenizer = load_tokenizer(TrainConfig(model=options["model"][0]))
    return build_windows(
        check_sources(config.data, config, tokenizer, key="data", problems=[])[0],
        config,
        tokenizer,
    )


def plain_nats(model, windows) -> tuple[float, int]:
    """The definition, one window at a time, with full logits in float64."""
    nats, tokens = 0.0, 0
    for window in range(len(windows.spans)):
        ids, targets = windows.inputs_and_targets(window)
        with torch.no_grad():
            log_probs = model(input_ids=torch.tensor(ids)[None].long()).logits[0].double().log_softmax(-1)
        for position, target in enumerate(targets):
            if target != IGNORED:
                nats -= log_probs[position, target].item()
                tokens += 1
    return nats, tokens


def scored(options: dict):
    """The perplexity of the model in memory, without what stands around it in an evaluation."""
    model = AutoModelForCausalLM.from_pretrained(options["model"][0])
    how = {"pad_token_id": 0, "batch_tokens": options["batch_tokens"], "device": torch.device("cpu")}
    return evaluate_windows(model, windows_for(options), **how, collective_forward=False)


def _sums(many_options: list[dict]) -> list[tuple]:
    sums = []
    for options in many_options:
        evaluation = next(evaluate_all(EvalConfig(**options)))
        result = evaluation.perplexity
        others = (
            repr(evaluation.groups),
            repr(evaluation.divergence),
            result.reported_loss,
            result.document_pairs.tolist(),
        )
        sums.append((result.nats, result.tokens, result.document_nats.tolist(), *others))
    return sums


@pytest.mark.parametrize("length", [2, 3, 7, 50])
@pytest.mark.parametrize("total", [1, 2, 3, 7, 8, 9, 49, 50, 51, 100])
def test_windows_score_every_token_but_the_first_once_with_the_context_promised(total, length):
    for stride in {1, length // 2 or 1, length - 1}:
        spans = list(sliding_spans(0, total, length, stride))
        assert [token for start, end, scored in spans for token in range(scored, end)] == list(range(1, total))
        assert all(
            end - start <= length and (start == 0 or scored - start >= length - stride) for start, end, scored in spans
        )
    spans = list(rolling_spans(0, total, length))
    assert [token for start, end, scored in spans for token in range(scored, end)] == list(range(1, total))
    assert all(scored - start >= 1 and end - start <= length + 1 for start, end, scored in spans)


@pytest.mark.exhaustive
def test_rolling_agrees_with_lm_evaluation_harness(tiny):
    lm_eval_models = pytest.importorskip("lm_eval.models.huggingface")
    from lm_eval.api.instance import Instance

    texts = [row["text"] for row in map(json.loads, (tiny / "held_out.jsonl").open())]
    harness = lm_eval_models.HFLM(
        pretrained=AutoModelForCausalLM.from_pretrained(tiny / "model"),
        tokenizer=AutoTokenizer.from_pretrained(tiny / "model"),
        max_length=32,
        batch_size=4,
    )
    requests = [
        Instance(request_type="loglikelihood_rolling", doc={}, arguments=(text,), idx=index)
        for index, text in enumerate(texts)
    ]
    theirs = -np.array(harness.loglikelihood_rolling(requests))
    ours = evaluate(**mode_options(tiny, {"mode": "rolling"}), progress=False).perplexity
    np.testing.assert_allclose(ours.document_nats, theirs, rtol=1e-6)
    assert ours.word_perplexity == pytest.approx(
        math.exp(theirs.sum() / sum(len(re.split(r"\s+", text)) for text in texts)), rel=1e-6
    )
    assert ours.byte_perplexity == pytest.approx(
        math.exp(theirs.sum() / sum(len(text.encode()) for text in texts)), rel=1e-6
    )


@pytest.mark.parametrize("mode", MODES, ids=NAMES)
def test_perplexity_is_the_definition(tiny, mode):
    options = mode_options(tiny, mode)
    nats, tokens = plain_nats(AutoModelForCausalLM.from_pretrained(tiny / "model"), windows_for(options))
    result = scored(options)
    assert result.tokens == tokens > 0
    assert result.nats == pytest.approx(nats, rel=1e-6)
    assert result.perplexity == math.exp(result.nats / result.tokens)
    assert result.bits_per_byte == pytest.approx(result.nats / math.log(2) / result.bytes)
    assert (
        math.fsum(result.document_nats) == pytest.approx(result.nats, rel=1e-12)
        and result.document_tokens.sum() == tokens
    )


def test_every_text_token_is_scored_once_and_counts_match_the_text(tiny):
    texts = [row["text"] for row in map(json.loads, (tiny / "held_out.jsonl").open())]
    tokenizer = AutoTokenizer.from_pretrained(tiny / "model")
    lengths = [len(ids) for ids in tokenizer(texts)["input_ids"]]
    rolling = scored(mode_options(tiny, {"mode": "rolling"}))
    assert rolling.document_tokens.tolist() == lengths
    sliding = scored(mode_options(tiny, {"mode": "sliding", "separator": "none"}))
    assert sliding.tokens == sum(lengths) - 1
    assert rolling.bytes == sum(len(text.encode()) for text in texts) and rolling.words == sum(
        len(text.split(" ")) for text in texts
    )


def _cases_on_ranks(tiny, tmp_path) -> list[dict]:
    """Every mode, groups, a reference, a protocol that weighs windows, and fewer batches than ranks."""
    few = {"mode": "windows", "data": [str(write_texts(tmp_path / "few.jsonl", 1))]}
    weighted = {"mode": "auto", "protocol": "hf", "reference": str(write_model(tmp_path / "other", seed=1))}
    cases = [mode_options(tiny, mode) for mode in [*MODES, weighted, few]]
    cases[1]["group_by"] = ["text"]
    return cases


def test_ppl_has_the_same_bits_on_1_and_3_ranks(tiny, tmp_path):
    """Some cases replicated, some sharded, and the last, of fewer batches than ranks, both ways."""
    cases = _cases_on_ranks(tiny, tmp_path)
    cases = [cases[index] for index in (0, 1, 2, 6, 5, 7)]
    expected = on_ranks(1, _sums, [case | {"zero": "0"} for case in cases])[0]
    assert len({nats for nats, *_ in expected}) == len(cases)
    mixed = [case | {"zero": "03"[index % 2]} for index, case in enumerate([*cases, cases[-1]])]
    for sums in on_ranks(3, _sums, mixed):
        assert sums == [*expected, expected[-1]]


@pytest.mark.exhaustive
def test_ppl_has_the_same_bits_on_1_2_3_and_4_ranks_replicated_and_sharded(tiny, tmp_path):
    cases = _cases_on_ranks(tiny, tmp_path)
    replicated, sharded = ([case | {"zero": zero} for case in cases] for zero in ("0", "3"))
    expected = on_ranks(1, _sums, replicated)[0]
    for world in (1, 2, 3, 4):
        for sums in on_ranks(world, _sums, replicated + sharded):
            assert sums == expected + expected, world


def test_a_deepspeed_file_can_say_how_to_shard(tiny, tmp_path):
    options = mode_options(tiny, {"mode": "windows"})
    path = tmp_path / "ds.json"
    of_training = {"offload_optimizer": {"device": "nvme", "nvme_path": "/nowhere"}}  # which scoring has not
    path.write_text(json.dumps({"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}} | of_training}))
    plain, offloaded = (evaluate(**options, zero=zero, progress=False) for zero in ("0", str(path)))
    assert offloaded.perplexity.nats == plain.perplexity.nats and offloaded.zero == str(path)
    for zero, part in (
        ("2", "not of stage 2"),
        ("3-nvme", "name a DeepSpeed JSON of your own"),
        ("4", "zero=4: unknown"),
    ):
        with pytest.raises(UserError, match=part):
            evaluate(**options, zero=zero)


def test_an_interrupted_evaluation_resumes_with_the_same_bits(tiny, tmp_path):
    options = mode_options(tiny, {"mode": "rolling"})
    windows, model = windows_for(options), AutoModelForCausalLM.from_pretrained(tiny / "model")

    def score(recorder: Recorder):
        how = {"pad_token_id": 0, "batch_tokens": 200, "device": torch.device("cpu"), "collective_forward": False}
        return evaluate_windows(model, windows, **how, recorder=recorder)

    expected = score(Recorder(windows))
    recorder = Recorder(windows, partial=tmp_path / "a")
    assert score(recorder).nats == expected.nats and len(recorder.scored_before) == 0
    file = tmp_path / "a" / "rank-0.jsonl"
    lines = file.read_text().splitlines()
    file.write_text("\n".join(lines[: len(lines) // 2]) + "\n[7, [1.2, 3")  # killed while it wrote
    recorder = Recorder(windows, partial=tmp_path / "a")
    resumed = score(recorder)
    assert len(recorder.scored_before) == len(lines) // 2 - 1 > 1  # before each batch stands a line end
    assert (resumed.nats, resumed.document_nats.tolist()) == (expected.nats, expected.document_nats.tolist())
    assert 0 < resumed.fed_tokens < expected.fed_tokens == windows.lengths.sum()
    assert Recorder(windows, partial=tmp_path / "b").scored_before == {}
    recorder.remove()
    assert not file.exists()


def test_an_evaluation_resumes_after_a_window_without_a_scored_token(tiny, tmp_path):
    windows = windows_for(mode_options(tiny, {"mode": "rolling"}))
    windows = dataclasses.replace(windows, spans=np.array([[0, 8, 1], [8, 9, 9]]))
    model = AutoModelForCausalLM.from_pretrained(tiny / "model")
    results = []
    for _ in range(2):
        options = {"pad_token_id": 0, "batch_tokens": 1, "device": torch.device("cpu"), "collective_forward": False}
        results.append(evaluate_windows(model, windows, **options, recorder=Recorder(windows, partial=tmp_path)))
    first, resumed = results
    assert resumed.nats == first.nats > 0 and resumed.fed_tokens == 0


def test_what_changes_a_result_changes_the_fingerprint(tiny, tmp_path):
    windows = windows_for(mode_options(tiny, {"mode": "rolling"}))
    others = windows_for(mode_options(tiny, {"mode": "sliding"}))
    model = shutil.copytree(tiny / "model", tmp_path / "model")

    def print_of(windows=windows, **options) -> str:
        identity = model_identity(str(model), revision=None, seed=42)
        return fingerprint([identity], windows.hashes(), {"dtype": "float32"} | options, versions())

    content = model_identity(str(model), revision=None, seed=42)["content"]
    prints = [print_of(), print_of(dtype="bfloat16"), print_of(others)]
    assert print_of() == prints[0]
    (model / "model.safetensors").touch()
    prints.append(print_of())
    assert model_identity(str(model), revision=None, seed=42)["content"] == content  # model_hash of the report
    with (model / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"x")
    prints.append(print_of())
    assert model_identity(str(model), revision=None, seed=42)["content"] != content
    assert len(set(prints)) == 5


def test_batch_size_does_not_move_the_result(tiny):
    options = mode_options(tiny, {"mode": "sliding"})
    results = [scored(options | {"batch_tokens": budget}) for budget in (32, 128, 4096)]
    assert len({result.tokens for result in results}) == 1
    assert results[0].nats == pytest.approx(results[1].nats, rel=1e-6) == pytest.approx(results[2].nats, rel=1e-6)


def test_bos_and_max_documents(tiny, tmp_path):
    folder = shutil.copytree(tiny / "model", tmp_path / "bos")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.bos_token = "<|user|>"
    tokenizer.save_pretrained(folder)
    options = mode_options(tiny, {"mode": "sliding", "scope": "document"}) | {"max_documents": 5}
    without, with_bos = scored(options | {"bos": "off"}), scored(options | {"bos": "on", "model": [str(folder)]})
    assert without.documents == 5 and with_bos.tokens == without.tokens + 5  # the first token has context now
    with pytest.raises(UserError, match="bos=on: the tokenizer .* has no BOS token"):
        windows_for(options | {"bos": "on"})


@pytest.mark.parametrize("mode", ["windows", "sliding"])
def test_a_tokenizer_that_closes_texts_gives_one_end_token_between_documents(tiny, tmp_path, mode):
    folder = shutil.copytree(tiny / "model", tmp_path / "closing")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    end = (tokenizer.eos_token, tokenizer.eos_token_id)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=f"$A {end[0]}", special_tokens=[end])
    tokenizer.save_pretrained(folder)
    plain, closing = (
        windows_for(mode_options(tiny, {"mode": mode}) | {"model": [str(model)]}) for model in (tiny / "model", folder)
    )
    assert closing.tokens.tolist() == plain.tokens.tolist()


def test_a_document_of_one_token_is_counted_as_unscored_and_a_long_one_is_not_cut(tiny, tmp_path):
    data = write_jsonl(
        tmp_path / "odd.jsonl", [{"text": "a"}, {"text": sentences(1, longest=400)[0] * 5}, {"text": ""}]
    )
    options = {"model": str(tiny / "model"), "data": str(data), "mode": "sliding", "scope": "document", "seq_len": 32}
    evaluation = evaluate(**options, progress=False)
    assert evaluation.perplexity.unscored_documents == 2 and evaluation.perplexity.tokens > 200
    report = evaluation.report()
    assert report["unscored_documents"] == 2 and report["documents"] == 3


def test_nan_weights_stop_the_evaluation_and_name_the_document(tiny):
    model = AutoModelForCausalLM.from_pretrained(tiny / "model")
    with torch.no_grad():
        model.get_input_embeddings().weight[9] = math.nan
    windows = windows_of_sequences([sequence(np.array(ids), np.ones(3, bool)) for ids in ([5, 6, 7], [5, 9, 7])])
    with pytest.raises(TrainingStopped, match="document 2 of 2"):
        evaluate_windows(
            model, windows, pad_token_id=0, batch_tokens=8, device=torch.device("cpu"), collective_forward=False
        )


HEADS = {
    "gemma2": (
        transformers.Gemma2Config,
        GATED | {"head_dim": 8, "sliding_window": 64, "final_logit_softcapping": 3.0},
    ),
    "cohere": (transformers.CohereConfig, GATED | {"logit_scale": 0.25}),
    "granite": (transformers.GraniteConfig, GATED | {"logits_scaling": 4.0}),
    "olmo": (transformers.OlmoConfig, GATED),
    "phi": (transformers.PhiConfig, GATED),  # a head with a bias
    "opt": (
        transformers.OPTConfig,
        {
            "vocab_size": 384,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "ffn_dim": 64,
            "word_embed_proj_dim": 32,
            "max_position_embeddings": 256,
        },
    ),
} | ARCHITECTURES


@pytest.mark.parametrize("architecture", HEADS)
def test_parts_of_the_head_give_plain_full_logits_in_every_architecture(architecture, monkeypatch):
    monkeypatch.setattr(chunked_head, "TILE_LOGITS", 16 * 384)
    cls, values = HEADS[architecture]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(cls(**values)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)  # so that a softcap bends the logits
    windows = windows_of_sequences([sequence(ids.numpy(), np.ones(20, bool)) for ids in torch.randint(1, 384, (5, 20))])
    nats, tokens = plain_nats(model, windows)
    result = evaluate_windows(
        model, windows, pad_token_id=0, batch_tokens=48, device=torch.device("cpu"), collective_forward=False
    )
    assert result.tokens == tokens and result.nats == pytest.approx(nats, rel=1e-5)
    assert ChunkedHead(model).agrees(torch.ones(1, 8, dtype=torch.long))


def test_no_full_logits_exist(tiny, monkeypatch):
    """Whatever the log-softmax gets is a part: never more positions or columns than ROW_TILE and VOCAB_TILE."""
    seen = []
    original = scoring.negative_log_likelihood

    def watch(parts, targets):
        parts = [part.clone() for part in parts]
        seen.extend(part.shape for part in parts)
        return original(parts, targets)

    monkeypatch.setattr(scoring, "negative_log_likelihood", watch)
    monkeypatch.setitem(chunked_head.ROW_TILE, "cpu", 16)
    monkeypatch.setitem(chunked_head.VOCAB_TILE, "cpu", 128)
    evaluate(**mode_options(tiny, {"mode": "windows"}), progress=False)
    assert len(seen) > 10 and max(rows for rows, _ in seen) == 16 and max(columns for _, columns in seen) == 128


def test_problems_of_the_evaluator_come_together(tiny):
    with pytest.raises(UserError) as caught:
        evaluate(model="./nowhere", data="nowhere.jsonl", bogus=1, stride=5000, mode="slidng")
    text = str(caught.value)
    assert all(
        part in text
        for part in (
            "bogus: unknown key",
            "./nowhere",
            "nowhere.jsonl does not exist",
            "stride=5000",
            "mode: invalid choice: 'slidng' (choose from auto, windows, sliding, rolling, answers); did you mean",
        )
    )
    with pytest.raises(UserError, match="one model, one data set"):
        evaluate(model=[str(tiny / "model")] * 2, data=str(tiny / "held_out.jsonl"))
    with pytest.raises(UserError, match="mode=answers does not fit"):
        evaluate(**mode_options(tiny, {"mode": "windows"}) | {"mode": "answers"})


def test_the_evaluate_library_computes_the_same(tiny, tmp_path):
    import evaluate as library

    metric = library.load(str(ROOT / "dsft" / "evaluate_perplexity"))
    result = evaluate(**mode_options(tiny, {"mode": "rolling"}), progress=False).perplexity
    texts = [row["text"] for row in map(json.loads, (tiny / "held_out.jsonl").open())]
    from_texts = metric.compute(predictions=texts, model=str(tiny / "model"), mode="rolling", seq_len=32)
    for name in ("perplexity", "nats", "word_perplexity", "bits_per_byte"):
        assert from_texts[name] == pytest.approx(getattr(result, name), rel=1e-6)
    # Texts are texts, whatever the form of the data that a run was trained on.
    shutil.copytree(tiny / "model", tmp_path / "final")
    trained_on = {"model": "base", "data": "chats.jsonl", "text_column": "body", "completion_template": "{answer}"}
    write_run(str(tmp_path), config=trained_on | {"output_dir": str(tmp_path)})
    of_run = metric.compute(predictions=texts, run=str(tmp_path), mode="rolling", seq_len=32)
    assert of_run["perplexity"] == from_texts["perplexity"]


def _evaluated(words: list) -> None:
    problems: list[str] = []
    for _ in evaluate_all(read_evaluation([str(word) for word in words], problems), problems):
        pass


def test_several_models_and_data_sets_in_one_launch_and_an_interruption_between(tiny, tmp_path):
    """The ranks are killed in the middle of the long data: no result is from part of it. The same command, on another
    number of ranks, ends with the bits of an uninterrupted one.
    """
    long = write_texts(tmp_path / "long.jsonl", 400, seed=4)  # not done before it is seen
    options = [
        "--model",
        tiny / "model",
        tiny / "chat",
        "--data",
        tiny / "held_out.jsonl",
        long,
        "--seq_len",
        "64",
        "--batch_tokens",
        "64",
    ]
    uninterrupted = run_entry("dsft.eval_ppl", [*options, "--output_dir", tmp_path / "uninterrupted"])
    assert uninterrupted.returncode == 0, uninterrupted.stderr
    out = tmp_path / "out"

    def is_in_the_middle() -> bool:
        return sum(len(path.read_text().splitlines()) for path in out.glob("partial/*/rank-1.jsonl")) > 40

    assert on_ranks(2, _evaluated, [*options, "--output_dir", out], kill_when=is_in_the_middle) is None
    known = read_json(out / "perplexity.json")["results"] if (out / "perplexity.json").is_file() else []
    assert len(known) < 4 and list(out.glob("partial/*/rank-*.jsonl"))
    again = run_entry("dsft.eval_ppl", [*options, "--output_dir", out])
    assert again.returncode == 0, again.stderr
    results = [read_json(folder / "perplexity.json")["results"] for folder in (tmp_path / "uninterrupted", out)]
    sums = [[(report["model"], report["data"], report["nats"]) for report in reports] for reports in results]
    assert sums[0] == sums[1]
    assert len(results[0]) == 4 and not list(out.glob("partial/*"))
    table = load_dataset("parquet", data_files=str(out / "documents.parquet"), split="train")
    assert set(table.column_names) == {
        "model",
        "data",
        "protocol",
        "document",
        "text",
        "nats",
        "tokens",
        "bytes",
        "words",
    }
    first = table.filter(lambda row: row["model"] == results[1][0]["model"] and row["data"] == results[1][0]["data"])
    assert len(first) == 31 and math.fsum(first["nats"]) == results[1][0]["nats"]
