"""The loss of each piece of a text, as the notebook shows it."""

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer

from dsft.perplexity.scoring import token_nats

TEXT = "the big model 😀 learns 漢字"
"""Its last words are characters of several tokens."""


@pytest.fixture(scope="module")
def model(tiny):
    return AutoModelForCausalLM.from_pretrained(tiny / "model")


@pytest.fixture
def tokenizer(tiny):
    return AutoTokenizer.from_pretrained(tiny / "model")


def plain_nats(model, ids: list[int]) -> list[float]:
    with torch.no_grad():
        log_probs = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
    return [-log_probs[position, token].item() for position, token in enumerate(ids[1:])]


def test_pieces_are_the_text_and_their_losses_those_of_its_tokens(model, tokenizer):
    ids = tokenizer(TEXT)["input_ids"]
    pieces = token_nats(model, tokenizer, TEXT, seq_len=256)
    assert "".join(piece for piece, _ in pieces) == TEXT
    assert len(pieces) < len(ids) and all(piece for piece, _ in pieces), "tokens of one character are one piece"
    assert pieces[0][1] is None, "nothing stands before the first token"
    expected = plain_nats(model, ids)
    assert sum(nats for _, nats in pieces[1:]) == pytest.approx(sum(expected), rel=1e-5)
    assert pieces[1][1] == pytest.approx(expected[0], rel=1e-5)


def test_a_first_character_of_several_tokens_has_the_loss_of_all_but_its_first(model, tokenizer):
    ids = tokenizer("😀 a")["input_ids"]
    ((first, nats), *_) = token_nats(model, tokenizer, "😀 a", seq_len=256)
    shown = len(tokenizer("😀")["input_ids"])
    assert first == "😀" and nats == pytest.approx(sum(plain_nats(model, ids)[: shown - 1]), rel=1e-5)


def test_a_bos_token_is_context_and_no_piece(model, tokenizer):
    bos = tokenizer.convert_tokens_to_ids("<|user|>")
    tokenizer._tokenizer.post_processor = TemplateProcessing(single="<|user|> $A", special_tokens=[("<|user|>", bos)])
    ids = tokenizer(TEXT)["input_ids"]
    assert ids[0] == bos
    pieces = token_nats(model, tokenizer, TEXT, seq_len=256)
    assert "".join(piece for piece, _ in pieces) == TEXT
    assert pieces[0][1] == pytest.approx(plain_nats(model, ids)[0], rel=1e-5)


def test_only_the_first_tokens_are_scored_and_an_empty_text_has_none(model, tokenizer):
    pieces = token_nats(model, tokenizer, TEXT, seq_len=3)
    assert len(pieces) == 3 and TEXT.startswith("".join(piece for piece, _ in pieces))
    assert token_nats(model, tokenizer, "", seq_len=3) == []
