"""Encodes texts as their tokenizer does, long ones in pieces with the tokens of the whole.

A tokenizer takes about 150 bytes of memory for each byte of a text, so a document of 50 MB would take 7 GB. It is cut
between words or lines, only where the tokens around a place are the same with the cut and without. A tokenizer that has
no such place (SentencePiece's Llama 2, which puts a blank before each text) gets the text whole.
"""

import re
from collections.abc import Iterator
from itertools import islice, pairwise

from transformers import PreTrainedTokenizerBase, TokenizersBackend

LONG_TEXT = 1 << 20
"""Characters. Longer texts are cut."""
PIECE = 1 << 18
"""Characters between places where a cut is tried."""
PIECES_AT_ONCE = 8
TRIED, AROUND = 4, 1 << 10
"""Cuts tried at each place, and characters on either side whose tokens are compared."""
_CUTS = re.compile(r"(?<=[^\W\d_])(?= [^\W\d_])|(?<=\S\n)(?=[^\W\d_])")
"""Between a word and the blank before the next, or behind a line."""


def encode(tokenizer: PreTrainedTokenizerBase, texts: list[str], *, special: bool = True) -> Iterator[list[int]]:
    """Encodes as `tokenizer(texts)` does.

    Args:
        special: with the tokens that the tokenizer puts around a text.
    """
    short = _encode_whole(tokenizer, [text for text in texts if len(text) <= LONG_TEXT], special=special)
    return (next(short) if len(text) <= LONG_TEXT else _encode_long(tokenizer, text, special=special) for text in texts)


def encode_continued(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> Iterator[list[int]]:
    """Encodes texts that continue another one.

    That is without the blank that some tokenizers put before each text (SentencePiece's dummy prefix).
    """
    before = next(encode(tokenizer, ["\n"], special=False))
    probe = next(encode(tokenizer, ["\na"], special=False))
    if probe[: len(before)] != before or probe[len(before) :] == next(encode(tokenizer, ["a"], special=False)):
        return encode(tokenizer, texts, special=False)
    joined = encode(tokenizer, [f"\n{text}" for text in texts], special=False)
    return (
        ids[len(before) :] if ids[: len(before)] == before else next(encode(tokenizer, [text], special=False))
        for ids, text in zip(joined, texts, strict=True)
    )


def _encode_whole(tokenizer: PreTrainedTokenizerBase, texts: list[str], *, special: bool) -> Iterator[list[int]]:
    if not isinstance(tokenizer, TokenizersBackend):
        return iter(tokenizer(texts, add_special_tokens=special, verbose=False)["input_ids"] if texts else [])
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = tokenizer.split_special_tokens
    # Without the offsets, which take a fifth of the time.
    return (encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=special))


def _encode_long(tokenizer: PreTrainedTokenizerBase, text: str, *, special: bool) -> list[int]:
    bounds = [0, *safe_cuts(tokenizer, text), len(text)]
    if len(bounds) == 2:
        return next(_encode_whole(tokenizer, [text], special=special))
    pieces = [text[start:end] for start, end in pairwise(bounds)]
    before, after = _tokens_around(tokenizer) if special else ([], [])
    ids = before
    for start in range(0, len(pieces), PIECES_AT_ONCE):
        for part in _encode_whole(tokenizer, pieces[start : start + PIECES_AT_ONCE], special=False):
            ids += part
    return ids + after


def safe_cuts(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return places, about a piece apart, where cutting a text leaves the tokens around as they are."""
    cuts = []
    for start in range(PIECE, len(text), PIECE):
        tried = [match.start() for match in islice(_CUTS.finditer(text, start, start + PIECE // 2), TRIED)]
        parts = [(text[max(0, cut - AROUND) : cut], text[cut : cut + AROUND]) for cut in tried]
        around, before, after = (
            _encode_whole(tokenizer, texts, special=False)
            for texts in ([a + b for a, b in parts], [a for a, _ in parts], [b for _, b in parts])
        )
        cuts += [cut for cut in tried if next(around) == next(before) + next(after)][:1]
    return cuts


def _tokens_around(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """Return what the tokenizer puts before and after a text."""
    inner, whole = (next(_encode_whole(tokenizer, ["a"], special=special)) for special in (False, True))
    start = next(at for at in range(len(whole)) if whole[at : at + len(inner)] == inner)
    return whole[:start], whole[start + len(inner) :]
