"""Long texts are encoded in pieces, with the tokens of the whole."""

import random
from itertools import pairwise

import pytest
from tiny import sentences
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from dsft.data import encoding
from dsft.data.encoding import encode, safe_cuts

LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False)
SPLITS = {  # pre-tokenizer, normalizer
    "gpt2": (BYTES, None),
    "prefix_space": (pre_tokenizers.ByteLevel(add_prefix_space=True), None),
    "llama_3": (
        pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(LLAMA_3), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        ),
        normalizers.NFC(),
    ),
    "words": (pre_tokenizers.Whitespace(), None),
    "llama_2": (None, normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])),
}
SEPARATORS = [
    " ",
    "  ",
    "\n",
    "\n\n",
    " \n ",
    ".\n",
    "...",
    "\t",
    " 1234567 ",
    "<|end|>",
    " <|end|> ",
    "é\u0301 ",
    "。\n",
]


def text_of(words: int) -> str:
    rng = random.Random(3)
    return "".join(sentence + rng.choice(SEPARATORS) for sentence in sentences(words, longest=6))


def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    splits, normalizer = SPLITS[name]
    inner = Tokenizer(models.BPE(unk_token="<unk>"))
    if splits:
        inner.pre_tokenizer = splits
    if normalizer:
        inner.normalizer = normalizer
    inner.decoder = decoders.ByteLevel()
    special = ["<unk>", "<|end|>", "<s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=special, initial_alphabet=BYTES.alphabet(), show_progress=False
    )
    texts = [text_of(300)] if splits else text_of(300).split()  # a text without splits is one word to the trainer
    inner.train_from_iterator(texts, trainer)
    inner.post_processor = processors.TemplateProcessing(
        single="<s> $A <|end|>", special_tokens=[("<s>", 2), ("<|end|>", 1)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="<|end|>")


@pytest.mark.parametrize("name", SPLITS)
def test_a_long_text_has_the_tokens_of_the_whole_in_pieces(name, monkeypatch):
    tokenizer, text = tokenizer_of(name), text_of(1500)
    for constant, value in (("LONG_TEXT", 2000), ("PIECE", 300), ("AROUND", 60)):
        monkeypatch.setattr(encoding, constant, value)
    texts = ["short one", text, "", text[1000:]]
    for special in (True, False):
        assert (
            list(encode(tokenizer, texts, special=special)) == tokenizer(texts, add_special_tokens=special)["input_ids"]
        )
    cuts = safe_cuts(tokenizer, text)
    if name == "llama_2":
        assert not cuts
    else:
        bounds = [0, *cuts, len(text)]
        assert max(end - start for start, end in pairwise(bounds)) < 3 * 300


def test_a_text_without_a_safe_place_stays_whole(monkeypatch):
    monkeypatch.setattr(encoding, "LONG_TEXT", 2000)
    monkeypatch.setattr(encoding, "PIECE", 300)
    tokenizer = tokenizer_of("gpt2")
    for text in ("a" * 5000, " \n" * 3000, "1 " * 2000):
        assert safe_cuts(tokenizer, text) == []
        assert list(encode(tokenizer, [text])) == tokenizer([text])["input_ids"]
