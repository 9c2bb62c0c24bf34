"""Turns rows into token sequences: what is trained of each, and what happens to those that are too long.

Everything cut or dropped is counted.
"""

import functools
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from transformers import PreTrainedTokenizerBase, TokenizersBackend

from dsft.config.options import DataFields
from dsft.data.chats import TEMPLATE_ERRORS, Rendered, Spans, render_chat
from dsft.data.formats import Chat, EmptyAnswer, FormatRules, Pair, Text, canonical, format_rules
from dsft.data.sources import Batch, Row
from dsft.errors import UserError, limited_time, one_line

_BYTE = re.compile("<0x[0-9A-F]{2}>")  # a token of its own, where SentencePiece has no piece for a character


@dataclass(kw_only=True)
class Tokens:
    """Sequences laid end to end. F tokens, S sequences."""

    ids: np.ndarray  # [F] int32
    trained: np.ndarray  # [F] bool: whether the token is to be predicted; never the first of a sequence
    ends: np.ndarray  # [S] int64
    counts: Counter  # of rows and sequences; the keys are COUNTS of store.py
    first: dict[str, str] = field(default_factory=dict)
    """Key of `counts` -> where the first such row is, and why it is counted."""
    # Of the texts [S], in an evaluation; empty in a training.
    hashes: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint64))
    document_bytes: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))  # of UTF-8
    document_words: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    weights: np.ndarray | None = None
    """[F] float32: what the token's loss is multiplied by, 0 where it is not trained; None where it is 1 in all."""


def tokenise(batch: Batch, rules: FormatRules, tokenizer: PreTrainedTokenizerBase) -> Tokens:
    """Turns rows into token sequences; UserError names a row that cannot be used, where `bad_rows` is error."""
    builder = _TokensBuilder(rules)
    samples: list[tuple[str, Text | Pair | Chat | None]] = []  # where each is
    for row in batch.rows:
        where = batch.where(row)
        try:
            samples.append((where, canonical(row, rules)))
        except EmptyAnswer as error:
            builder.note("dropped_empty", f"{where}: {error}")
            if rules.keep_all:
                samples.append((where, None))
        except ValueError as error:
            builder.drop_bad(f"{where}: {error}")
    texts = [sample.text for _, sample in samples if isinstance(sample, Text)]
    pairs = [sample for _, sample in samples if isinstance(sample, Pair)]
    if texts or pairs:  # many at once
        beginnings = encode_open(tokenizer, texts + [pair.prompt for pair in pairs])
        completions = encode_continued(tokenizer, [pair.completion for pair in pairs])
    for where, sample in samples:
        builder.is_too_long = False
        match sample:
            case None:
                builder.put(np.zeros(1, np.int32), np.zeros(1, np.float32))  # a place where each row must have one
            case Text():  # a document as it stands, of any length: it is cut where its tokens are used
                ids = next(beginnings)
                if not sample.text:
                    builder.counts["dropped_empty"] += 1
                    continue
                ids = np.asarray(ids + end_of(sample.text, tokenizer), np.int32)
                builder.put(ids, np.ones(len(ids), np.float32))
            case Pair():  # prompt and completion as they stand
                prompt = next(beginnings)
                ids = prompt + next(completions) + end_of(sample.completion, tokenizer)
                trained_from = 0 if rules.train_on == "all" else len(prompt)
                builder.add(ids, [(trained_from, len(ids), 1)], where)
            case Chat():  # in the tokenizer's template
                try:
                    with limited_time("the chat template"):
                        rendered, notes = render_chat(sample, tokenizer, rules)
                    sequences = [_encode_rendered(each, tokenizer) for each in rendered]
                except TEMPLATE_ERRORS as error:
                    kind = "" if isinstance(error, ValueError) else "the chat template raised: "
                    builder.drop_bad(f"{where}: {kind}{one_line(error)}")
                    continue
                for name, why in notes.items():
                    number = len(sequences) - 1 if name == "rendered_apart" else 1
                    builder.note(name, f"{where}: {why}", number)
                for sequence in sequences:
                    builder.add(*sequence, where)
    builder.counts["rows"] = len(batch.rows)
    if batch.left_out:
        builder.counts["left_out_by_map_row"] = batch.left_out
    weights = np.concatenate([np.zeros(0, np.float32), *builder.weights])
    trained = weights != 0
    weighted_tokens = int(np.count_nonzero(weights != trained))
    if weighted_tokens:
        builder.counts["weighted_tokens"] = weighted_tokens
    return Tokens(
        ids=np.concatenate([np.zeros(0, np.int32), *builder.ids]),
        trained=trained,
        weights=weights if weighted_tokens else None,
        ends=np.array(builder.ends, np.int64),
        counts=builder.counts,
        first=builder.first,
    )


def closes_texts(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Returns whether the tokenizer puts an end token after each text by itself."""
    return next(encode(tokenizer, ["a"]))[-1:] == [tokenizer.eos_token_id]


def opens_texts(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Returns whether the tokenizer puts BOS before each text by itself."""
    bos = tokenizer.bos_token_id
    return bos is not None and next(encode(tokenizer, ["a"]))[:1] == [bos]


def bytes_of_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[np.ndarray, int]:
    """Returns [V] int64, how many UTF-8 bytes of a text each token stands for, none for special ones, and how many of
    them the first token of a text has too many: the blank that SentencePiece puts before a text.
    """
    vocabulary = tokenizer.get_vocab()
    special = set(tokenizer.all_special_ids)
    added = {number: token.content for number, token in tokenizer.added_tokens_decoder.items()}
    # Then a character of a piece is a byte of the text.
    is_byte_level = tokenizer.is_fast and "ByteLevel" in repr(tokenizer.backend_tokenizer.decoder)
    bytes_V = np.zeros(max(vocabulary.values()) + 1, np.int64)
    for piece, number in vocabulary.items():
        if number in special:
            continue
        if not is_byte_level and _BYTE.fullmatch(piece):
            bytes_V[number] = 1
        elif is_byte_level and number not in added:
            bytes_V[number] = len(piece)
        else:
            text = added.get(number) or piece.replace("\N{LOWER ONE EIGHTH BLOCK}", " ")
            bytes_V[number] = len(text.encode())
    blank = int(bytes_V[next(encode(tokenizer, ["a"], special=False))].sum()) - 1
    return bytes_V, max(0, blank)


class _TokensBuilder:
    """Collects sequences under the rules for length and for rows without a trained token."""

    def __init__(self, rules: FormatRules):
        self.rules, self.counts, self.first, self.size = rules, Counter(), {}, 0
        self.ids: list[np.ndarray] = []
        self.weights: list[np.ndarray] = []  # float32, of the loss of each token
        self.ends: list[int] = []
        self.is_too_long = False  # whether the row at hand has a sequence that is

    def note(self, name: str, why: str, number: int = 1) -> None:
        """Counts a row, and keeps the first reason."""
        self.counts[name] += number
        self.first.setdefault(name, why)

    def drop_bad(self, problem: str) -> None:
        """Counts a row that cannot be used; raises UserError unless bad rows are dropped."""
        if self.rules.keep_all:
            raise UserError(problem)
        if self.rules.bad_rows == "error":
            raise UserError(f"{problem}; bad_rows: drop leaves such rows out, and counts them")
        self.note("dropped_bad", problem)

    def add(self, ids: list[int], spans: Spans, where: str) -> None:
        """Adds a sample with the tokens of `spans` trained. One longer than seq_len follows the policy `too_long`. A
        sequence without a trained token (its answer was cut off) is left out.
        """
        array = np.asarray(ids, np.int32)
        weights = np.zeros(len(ids), np.float32)
        for start, end, weight in spans:
            weights[start:end] = weight
        length = self.rules.seq_len
        policy = self.rules.too_long
        starts = range(1)
        if len(array) > length:
            why = f"{where}: {len(array)} tokens are longer than seq_len={length}"
            if policy == "error":
                raise UserError(f"{why}; raise it, or set too_long to drop, truncate or split")
            kind = "truncated"
            if policy == "drop":
                kind = "dropped_long"
                weights[:] = 0
                starts = range(1 if self.rules.keep_all else 0)
            elif policy == "split" and not self.rules.keep_all:
                kind = "split"
                starts = range(0, len(array), length)
            self.note(kind, why, int(not self.is_too_long))  # a chat of several sequences is one row
            self.is_too_long = True
        for start in starts:
            weights[start : start + 1] = 0  # nothing stands before it
            of_piece = weights[start : start + length]
            if of_piece.any() or self.rules.keep_all:
                self.put(array[start : start + length], of_piece)
            else:
                self.note("dropped_untrained", f"{where}: no token of it is trained")

    def put(self, ids: np.ndarray, weights: np.ndarray) -> None:
        self.ids.append(ids)
        self.weights.append(weights)
        self.size += len(ids)
        self.ends.append(self.size)


def _encode_rendered(rendered: Rendered, tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], Spans]:
    """Encodes the text of a chat, cut where what is trained begins and ends, as a server does: it encodes the prompt
    alone. Returns the ids, and which of them are trained.
    """
    if rendered.ends_open and tokenizer.eos_token_id is None:
        raise ValueError(
            "nothing in the chat template ends an answer, and the tokenizer has no end token, so the model would"
            " never stop; name another template with chat_template"
        )
    bounds = sorted({0, len(rendered.text), *(bound for span in rendered.spans for bound in span[:2])})
    pieces = [rendered.text[start:end] for start, end in pairwise(bounds)]
    for place in range(1, len(pieces)):
        if pieces[place - 1].rstrip().endswith(_stripping_markers(tokenizer)):
            pieces[place] = pieces[place].lstrip()
    encoded = [*encode(tokenizer, pieces[:1], special=False), *encode_continued(tokenizer, pieces[1:])]
    ids = [token for piece in encoded for token in piece]
    starts = dict(zip(bounds, np.cumsum([0, *map(len, encoded)]).tolist(), strict=True))
    of_tokens = [(starts[start], starts[end], weight) for start, end, weight in rendered.spans]
    if rendered.ends_open:
        start, _, weight = of_tokens[-1]
        of_tokens[-1] = start, len(ids) + 1, weight
        ids.append(tokenizer.eos_token_id)
    return ids, of_tokens


@functools.lru_cache(maxsize=8)
def _stripping_markers(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """Lists added tokens that stand for the white space after them too, as markers of Phi-3 do."""
    return tuple(token.content for token in tokenizer.added_tokens_decoder.values() if token.rstrip)


def stop_tokens(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Lists the ids of the tokens that trained answers end with, that of a plain answer first.

    Small chats are rendered: an answer at the end, one that another message follows, and a tool call. A server must
    stop at each: `eos_token_id` of the generation configuration.
    """
    if not tokenizer.chat_template:
        return []
    ask = {"role": "user", "content": "question"}
    answer = {"role": "assistant", "content": "answer"}
    call = {"type": "function", "id": "call00001", "function": {"name": "look_up", "arguments": {"word": "it"}}}
    calling = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {"role": "tool", "content": "found", "name": "look_up", "tool_call_id": "call00001"}
    rules = format_rules([Row({"messages": []}, 1)], DataFields())
    stops = []
    for messages in ([ask, answer], [ask, answer, ask, answer], [ask, calling], [ask, calling, result, answer]):
        try:
            rendered, _ = render_chat(Chat(messages=messages), tokenizer, rules)
            sequences = [_encode_rendered(each, tokenizer) for each in rendered]
        except TEMPLATE_ERRORS:
            continue  # a template without tools has no such end
        stops += [ids[end - 1] for ids, spans in sequences for _, end, _ in spans]
    return list(dict.fromkeys(stops))


# Texts with the tokens of their tokenizer


def encode(tokenizer: PreTrainedTokenizerBase, texts: list[str], *, special: bool = True) -> Iterator[list[int]]:
    """Encodes as `tokenizer(texts)` does; `special` with the tokens that the tokenizer puts around a text, but without
    a second BOS before a text that was rendered before and has one.
    """
    if not texts:
        return
    if isinstance(tokenizer, TokenizersBackend):
        backend = tokenizer.backend_tokenizer
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = tokenizer.split_special_tokens
        # Without the offsets, which take a fifth of the time.
        encodings = backend.encode_batch_fast(texts, add_special_tokens=special)
        encoded = (encoding.ids for encoding in encodings)
    else:
        encoded = iter(tokenizer(texts, add_special_tokens=special, verbose=False)["input_ids"])
    bos = tokenizer.bos_token_id
    for ids in encoded:
        has_second = special and bos is not None and ids[:2] == [bos, bos]
        yield ids[1:] if has_second else ids


def encode_open(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> Iterator[list[int]]:
    """Encodes texts that something follows: without the end token that the tokenizer may put after each."""
    closes = closes_texts(tokenizer)
    for ids in encode(tokenizer, texts):
        yield ids[:-1] if closes else ids


def encode_continued(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> Iterator[list[int]]:
    """Encodes texts that continue another one: without the blank that SentencePiece puts before each text."""
    if not _puts_blank_before(tokenizer):
        yield from encode(tokenizer, texts, special=False)
        return
    before, bar = encode(tokenizer, ["\n", "|"], special=False)
    leads = ["|" if text.startswith("\n") else "\n" for text in texts]  # two line breaks may be one token
    joined = encode(tokenizer, [lead + text for lead, text in zip(leads, texts, strict=True)], special=False)
    for lead, ids in zip(leads, joined, strict=True):
        yield ids[len(bar if lead == "|" else before) :]


@functools.lru_cache(maxsize=8)
def _puts_blank_before(tokenizer: PreTrainedTokenizerBase) -> bool:
    before, probe, alone = encode(tokenizer, ["\n", "\na", "a"], special=False)
    return probe[: len(before)] == before and probe[len(before) :] != alone


def end_of(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Returns the end token that is to follow a text; none where a text that was rendered before has it."""
    eos = tokenizer.eos_token
    return [] if eos is None or text.rstrip().endswith(eos) else [tokenizer.eos_token_id]
