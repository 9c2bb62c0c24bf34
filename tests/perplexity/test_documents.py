"""Documents that are scored come from a store on disk: prepared once, whole, and mapped."""

import re
import shutil
import tracemalloc
from itertools import pairwise

import numpy as np
import pytest
import torch
from conftest import grid
from ranks import on_ranks
from tiny import sentences, write_jsonl
from transformers import AutoModelForCausalLM, AutoTokenizer

from dsft.api import evaluate_all
from dsft.config.options import EvalConfig
from dsft.data.sources import BATCH_ROWS, Batch
from dsft.data.tokens import FACTS
from dsft.data.training_data import check_sources
from dsft.perplexity.documents import Answers, build_windows


@pytest.fixture(scope="module")
def tokenizer(tiny):
    return AutoTokenizer.from_pretrained(tiny / "model")


def source_of(config: EvalConfig, tokenizer):
    return check_sources(config.data, config, tokenizer, key="data", problems=[])[0]


def windows_of(path, tokenizer, **options):
    config = EvalConfig(model=["unused"], data=[str(path)], **{"seq_len": 32} | options)
    return build_windows(source_of(config, tokenizer), config, tokenizer)


def stores_in(cache) -> dict[str, int]:
    return {path.parent.name: path.stat().st_mtime_ns for path in cache.glob(f"*/{FACTS}")}


def _nats(options: dict) -> list[float]:
    return [evaluation.perplexity.nats for evaluation in evaluate_all(EvalConfig(**options))]


def test_a_data_set_is_prepared_once_for_all_ranks_and_for_models_with_the_same_tokenizer(tiny, tmp_path):
    cache = tmp_path / "cache"
    copy = shutil.copytree(tiny / "model", tmp_path / "copy")
    options = {"data": [str(tiny / "held_out.jsonl")], "seq_len": 32, "data_cache": str(cache), "mode": "rolling"}
    first = _nats(options | {"model": [str(tiny / "model")]})
    stores = stores_in(cache)
    assert len(stores) == 1
    assert on_ranks(2, _nats, options | {"model": [str(copy), str(tiny / "model")]}) == [first * 2] * 2
    assert _nats(options | {"model": [str(copy)], "seq_len": 16}) != first
    assert stores_in(cache) == stores


@pytest.mark.parametrize("mode", grid(["windows", "sliding", "rolling"], ["rolling"]))
def test_memory_of_windows_does_not_grow_with_the_tokens(tokenizer, tmp_path, mode):
    held, tokens = [], []
    for copies in (1, 8):
        path = tmp_path / f"{copies}.txt"
        path.write_text("\n\n".join(sentences(2000)) * copies)
        windows_of(path, tokenizer, mode=mode, seq_len=1024)  # prepares
        tracemalloc.start()
        windows = windows_of(path, tokenizer, mode=mode, seq_len=1024)
        held.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
        tokens.append(len(windows.tokens))
    assert tokens[1] > 7 * tokens[0] > 100_000
    assert held[1] - held[0] < (tokens[1] - tokens[0]) / 8  # bytes


def test_joined_texts_are_tokenised_once(tokenizer, tmp_path):
    texts = [f"{sentence}\n\né" for sentence in sentences(400)]
    rows = write_jsonl(tmp_path / "rows.jsonl", [{"text": text} for text in texts])
    (tmp_path / "one.txt").write_text("\n\n".join(texts))
    joined, whole = (windows_of(path, tokenizer, protocol="hf") for path in (rows, tmp_path / "one.txt"))
    assert joined.tokens.tolist() == whole.tokens.tolist() == tokenizer("\n\n".join(texts))["input_ids"]
    assert joined.hashes() == whole.hashes() and len(joined.document_ends) == 1
    few = windows_of(rows, tokenizer, protocol="hf", max_documents=3)
    assert few.tokens.tolist() == tokenizer("\n\n".join(texts[:3]))["input_ids"]


@pytest.mark.parametrize("max_documents", [None, BATCH_ROWS - 1, BATCH_ROWS, BATCH_ROWS + 2])
def test_documents_are_those_that_the_tokenizer_makes_of_the_rows(tokenizer, tmp_path, max_documents):
    """Of several batches, with empty documents in them; the separator stands before each but the first."""
    texts = ["", *sentences(BATCH_ROWS + 8, longest=12), "", "a"]
    path = write_jsonl(tmp_path / "rows.jsonl", [{"text": text} for text in texts])
    texts = texts[:max_documents]
    for options, expected in {
        ("windows", "eos"): [ids + [tokenizer.eos_token_id] * bool(ids) for ids in tokenizer(texts)["input_ids"]],
        ("windows", "||"): tokenizer([texts[0], *(f"||{text}" for text in texts[1:])])["input_ids"],
        ("rolling", "eos"): [[tokenizer.eos_token_id, *ids] for ids in tokenizer(texts)["input_ids"]],
    }.items():
        mode, separator = options
        windows = windows_of(path, tokenizer, mode=mode, separator=separator, max_documents=max_documents)
        bounds = pairwise([0, *windows.document_ends.tolist()])
        assert [windows.tokens[start:end].tolist() for start, end in bounds] == expected, options
        assert windows.document_words.tolist() == [len(re.split(r"\s+", text)) for text in texts]
        first = np.zeros(len(windows.tokens), bool)
        first[[0, *windows.document_ends[:-1]]] = mode == "rolling"
        assert np.array_equal(windows.scorable, ~first)


@pytest.mark.parametrize("options", [{}, {"mode": "sliding", "scope": "document"}, {"mode": "rolling"}], ids=str)
def test_bytes_of_tokens_that_are_not_scored_do_not_count(tiny, tokenizer, options):
    windows = windows_of(tiny / "held_out.jsonl", tokenizer, seq_len=16, **options)
    places = np.concatenate([windows.scored_places(window) for window in range(len(windows.spans))])
    documents = np.searchsorted(windows.document_ends, places, side="right")
    scored = [tokenizer.decode(windows.tokens[places[documents == d]], skip_special_tokens=True) for d in range(31)]
    assert windows.document_bytes.tolist() == [len(text.encode()) for text in scored]


@pytest.mark.parametrize("train_on", ["answers", "last"])
@pytest.mark.parametrize("length", [16, 12])
def test_bytes_of_an_answer_that_is_split_are_those_of_its_scored_tokens(tokenizer, tmp_path, length, train_on):
    """Also where the prompt fills sequences of its own, so that the answer's first token has nothing before it."""
    row = {"prompt": "a" + " a" * (2 * length - 1), "completion": " big small"}
    assert len(tokenizer(row["prompt"])["input_ids"]) == 2 * length
    path = write_jsonl(tmp_path / "pairs.jsonl", [row, row | {"prompt": "a"}])
    windows = windows_of(path, tokenizer, seq_len=length, too_long="split", train_on=train_on)
    scored = [windows.scored_places(window) for window in range(len(windows.spans))]
    text = tokenizer.decode(windows.tokens[scored[0]], skip_special_tokens=True)
    assert len(scored) == 2 and " big small".endswith(text) and text != " big small"
    assert windows.document_bytes.tolist() == [len(text), len(" big small")]


def test_an_answer_of_which_nothing_is_scored_has_no_bytes_and_no_words(tokenizer, tmp_path):
    rows = [{"prompt": "a", "completion": text} for text in (" one two", " far too long" * 40, "", " three")]
    path = write_jsonl(tmp_path / "pairs.jsonl", rows)
    windows = windows_of(path, tokenizer, mode="answers", too_long="drop")
    assert (windows.document_bytes > 0).tolist() == (windows.document_words > 0).tolist() == [True, False, False, True]


def test_bytes_of_an_answer_are_those_of_the_data_whatever_the_tokenizer_decodes(tiny, tmp_path):
    answer = "  Toi\u0302 , I do n't ."
    rows = [{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": answer}]}]
    path = write_jsonl(tmp_path / "chats.jsonl", rows)
    windows = windows_of(path, AutoTokenizer.from_pretrained(tiny / "chat"), seq_len=256)
    assert windows.document_bytes.tolist() == [len(answer.encode())]


@torch.no_grad()
def test_chats_of_several_turns_are_scored_as_an_oracle_does(tiny, tmp_path):
    """Rendered by hand; each answer with its end token is predicted from all turns before it."""
    words = iter(sentences(24, seed=9, longest=8))
    chats = [[(role, next(words)) for role in ("user", "assistant") * turns] for turns in (1, 3, 2)]
    rows = [{"messages": [{"role": role, "content": text} for role, text in chat]} for chat in chats]
    tokenizer = AutoTokenizer.from_pretrained(tiny / "chat")
    model = AutoModelForCausalLM.from_pretrained(tiny / "chat")
    expected = []
    for chat in chats:
        ids, is_answer = [], []
        for role, text in chat:
            parts = tokenizer(f"<|{role}|>")["input_ids"], tokenizer(text)["input_ids"] + [tokenizer.eos_token_id]
            ids += parts[0] + parts[1]
            is_answer += [False] * len(parts[0]) + [role == "assistant"] * len(parts[1])
        logs = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
        expected.append(-sum(logs[at - 1, ids[at]].item() for at in range(1, len(ids)) if is_answer[at]))
    data = write_jsonl(tmp_path / "chats.jsonl", rows)
    result = next(
        evaluate_all(EvalConfig(model=[str(tiny / "chat")], data=[str(data)], seq_len=256, zero="0"))
    ).perplexity
    assert result.document_nats == pytest.approx(expected, rel=1e-6)


def test_a_chat_is_scored_in_the_sequences_that_a_training_makes_of_it(tiny, tmp_path):
    """A template may leave reasoning out of earlier turns: each answer is then scored behind its own prompt."""
    tokenizer = AutoTokenizer.from_pretrained(tiny / "chat")
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "{{ m['content'] }}", "{{ m['content'] if loop.last else m['content'].split('</think>')[-1] }}"
    )
    assert "loop.last" in tokenizer.chat_template
    answers = ["<think>the loss</think>a node", "<think>a rank</think>big"]
    turns = [[{"role": "user", "content": "a step"}, {"role": "assistant", "content": text}] for text in answers]
    data = write_jsonl(tmp_path / "chats.jsonl", [{"messages": turns[0] + turns[1]}])
    source = source_of(EvalConfig(model=["unused"], data=[str(data)]), tokenizer)
    tokens = Answers().tokens(Batch(source.source.first_rows()), source.rules, tokenizer)
    assert tokenizer.decode(tokens.ids[tokens.trained], skip_special_tokens=True) == "".join(answers)
    assert tokens.documents["document_bytes"].tolist() == [len("".join(answers))]
    assert len(tokens.ends) == 2 and tokens.row_ends.tolist() == [tokens.ends[1]]
