"""Turns rows into token sequences: what is trained of each, and what happens to those that are too long.

Everything cut or dropped is counted.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from dsft.data.chats import TEMPLATE_ERRORS, ChatRules, Spans, chat_samples
from dsft.data.encoding import encode, encode_continued
from dsft.data.formats import Chat, EmptyAnswer, FormatRules, Pair, Text, canonical
from dsft.data.sources import Batch, Row
from dsft.errors import UserError, one_line


@dataclass(kw_only=True)
class Tokens:
    """Sequences laid end to end. F tokens, S sequences."""

    ids: np.ndarray
    """[F] int32."""
    trained: np.ndarray
    """[F] bool: whether the token is to be predicted; never the first of a sequence."""
    ends: np.ndarray
    """[S] int64; what follows the last of them belongs to a document that continues in the next batch."""
    hashes: np.ndarray
    """[S] uint64, of the ids: the same for duplicates. In an evaluation, of the texts."""
    counts: Counter
    """rows, truncated, split, dropped_long, dropped_untrained, dropped_empty, dropped_bad; of chats also rendered_apart
    (sequences for answers that the template renders otherwise in a longer chat), unrendered, empty_thinking and
    weighted_tokens (trained ones of a weight other than 1).
    """
    first: dict[str, str] = field(default_factory=dict)
    """Key of `counts` -> where the first such row is, and why it is counted."""
    document_bytes: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    """[S] UTF-8 bytes of the text of each; none where only training reads them."""
    document_words: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    """[S] words, likewise."""
    weights: np.ndarray | None = None
    """[F] float32: what the token's loss is multiplied by, 0 where it is not trained; None where it is 1 in all."""


def tokenise(batch: Batch, rules: FormatRules, tokenizer: PreTrainedTokenizerBase) -> Tokens:
    """Turns rows into token sequences.

    Raises:
        UserError: with file and line of a row that cannot be used, where `bad_rows` is error.
    """
    builder = _TokensBuilder(rules)
    has_template = bool(tokenizer.chat_template)
    samples: list[tuple[Row, Text | Pair | Chat | None]] = []
    for row in batch.rows:
        try:
            samples.append((row, canonical(row, rules, has_template=has_template)))
        except EmptyAnswer as error:
            builder.note("dropped_empty", f"{batch.where(row)}: {error}")
            if rules.keep_all:
                samples.append((row, None))
        except ValueError as error:
            builder.drop_bad(f"{batch.where(row)}: {error}")
    kinds = {type(sample) for _, sample in samples} - {type(None)}
    if kinds == {Text}:
        _add_texts(builder, [text for _, text in samples], tokenizer)
    elif kinds == {Pair}:
        _add_pairs(builder, samples, batch.where, tokenizer)
    else:
        _add_chats(builder, samples, batch.where, tokenizer)
    builder.counts["rows"] = len(batch.rows)
    return builder.tokens()


def _add_texts(builder: "_TokensBuilder", texts: list[Text], tokenizer: PreTrainedTokenizerBase) -> None:
    """Adds documents as they stand, an end token after each."""
    first = encode(tokenizer, [text.text for text in texts if text.starts_document])
    later = encode_continued(tokenizer, [text.text for text in texts if not text.starts_document])
    closes, end = closes_texts(tokenizer), _end_tokens(tokenizer)
    for text in texts:
        ids = next(first if text.starts_document else later)
        if closes and text.starts_document:
            ids = ids[:-1]  # the end is added where the document ends
        if not text.ends_document:
            builder.text(ids, ends=False)
        elif text.text or not text.starts_document:
            builder.text(ids + end)
        else:
            builder.counts["dropped_empty"] += 1


def _add_pairs(
    builder: "_TokensBuilder",
    samples: list[tuple[Row, Pair | None]],
    where: Callable[[Row], str],
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """Adds prompt and completion as they stand, then the end token."""
    prompts = encode(tokenizer, [pair.prompt for _, pair in samples if pair])
    completions = encode_continued(tokenizer, [pair.completion for _, pair in samples if pair])
    closes, end = closes_texts(tokenizer), _end_tokens(tokenizer)
    for row, pair in samples:
        if pair is None:
            builder.blank()
            continue
        prompt, completion = next(prompts), next(completions)
        if closes:
            prompt = prompt[:-1]
        ids = prompt + completion + end
        builder.add(ids, [(0 if builder.rules.train_on == "all" else len(prompt), len(ids))], partial(where, row))


def _add_chats(
    builder: "_TokensBuilder",
    samples: list[tuple[Row, Chat | None]],
    where: Callable[[Row], str],
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """Adds chats in the tokenizer's template."""
    rules = ChatRules(
        train_on="answers" if builder.rules.train_on == "auto" else builder.rules.train_on,
        train_thinking=builder.rules.train_thinking,
        drop_unrendered=builder.rules.drop_unrendered,
        one_sequence=builder.rules.keep_all,
    )
    for row, chat in samples:
        if chat is None:
            builder.blank()
            continue
        try:
            samples = chat_samples(chat, tokenizer, rules)
        except TEMPLATE_ERRORS as error:
            kind = "the chat template raised: " if isinstance(error, TemplateError) else ""
            builder.drop_bad(f"{where(row)}: {kind}{one_line(error)[:500]}")
            continue
        for name, why in samples.notes.items():
            number = len(samples.sequences) - 1 if name == "rendered_apart" else 1
            builder.note(name, f"{where(row)}: {why}", number)
        for ids, spans, weights in samples.sequences:
            builder.add(ids, spans, partial(where, row), weights)


def _end_tokens(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    return [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]


def closes_texts(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Tells whether the tokenizer puts an end token after each text by itself."""
    return next(encode(tokenizer, ["a"]))[-1:] == [tokenizer.eos_token_id]


class _TokensBuilder:
    """Collects sequences under the rules for length and for rows without a trained token."""

    def __init__(self, rules: FormatRules):
        self.rules, self.counts, self.first = rules, Counter(), {}
        self.ids: list[np.ndarray] = []
        self.trained: list[np.ndarray] = []
        """Of each sequence bool, or float32 weights where one is neither 0 nor 1."""
        self.ends: list[int] = []
        self.hashes: list[int] = []
        self.size = 0

    def note(self, name: str, why: str, number: int = 1) -> None:
        """Counts a row, and keeps the first reason."""
        self.counts[name] += number
        self.first.setdefault(name, why)

    def drop_bad(self, problem: str) -> None:
        """Counts a row that cannot be used.

        Raises:
            UserError: unless bad rows are dropped.
        """
        if self.rules.keep_all:
            raise UserError([problem])
        if self.rules.bad_rows == "error":
            raise UserError([f"{problem}; bad_rows: drop leaves such rows out, and counts them"])
        self.note("dropped_bad", problem)

    def blank(self) -> None:
        """Fills the place of a row that has nothing to train on, where each must have one."""
        self._put(np.zeros(1, np.int32), np.zeros(1, bool))

    def text(self, ids: list[int], *, ends: bool = True) -> None:
        """Adds a document, or a piece of one, of any length: it is cut where its tokens are used."""
        self._put(np.asarray(ids, np.int32), np.ones(len(ids), bool), ends=ends)

    def add(
        self, ids: list[int], spans: Spans, where: Callable[[], str], weights: Sequence[float] | None = None
    ) -> None:
        """Adds a sample with the tokens of `spans` trained; where these overlap, the weight of the later one holds."""
        weights = [1] * len(spans) if weights is None else weights
        array, trained = np.asarray(ids, np.int32), np.zeros(len(ids), bool if {*weights} <= {0, 1} else np.float32)
        for (start, end), weight in zip(spans, weights, strict=True):
            trained[start:end] = weight
        trained[:1] = 0  # nothing stands before it
        if len(array) <= self.rules.seq_len:
            self._put_if_trained(array, trained, where)
        else:
            self._too_long(array, trained, where)

    def _too_long(self, ids: np.ndarray, trained: np.ndarray, where: Callable[[], str]) -> None:
        length, policy = self.rules.seq_len, self.rules.too_long
        why = f"{where()}: {len(ids)} tokens are longer than seq_len={length}"
        if policy == "error":
            raise UserError([f"{why}; raise it, or set too_long to drop, truncate or split"])
        if policy == "drop":
            self.note("dropped_long", why)
            if self.rules.keep_all:
                self._put(ids[:length], np.zeros(length, bool))
        elif policy == "split" and not self.rules.keep_all:
            self.note("split", why)
            for start in range(0, len(ids), length):
                trained[start] = False
                self._put_if_trained(ids[start : start + length], trained[start : start + length], where)
        else:
            self.note("truncated", why)
            self._put_if_trained(ids[:length], trained[:length], where)

    def _put_if_trained(self, ids: np.ndarray, trained: np.ndarray, where: Callable[[], str]) -> None:
        """Adds a sequence, but for one without a trained token (its answer was cut off)."""
        if trained.any() or self.rules.keep_all:
            self._put(ids, trained)
        else:
            self.note("dropped_untrained", f"{where()}: no token of it is trained")

    def _put(self, ids: np.ndarray, trained: np.ndarray, *, ends: bool = True) -> None:
        self.ids.append(ids)
        self.trained.append(trained)
        self.size += len(ids)
        if ends:
            self.ends.append(self.size)
            self.hashes.append(int.from_bytes(hashlib.blake2b(ids.tobytes(), digest_size=8).digest()))

    def tokens(self) -> Tokens:
        weights = np.concatenate([np.zeros(0, bool), *self.trained])
        if weights.dtype != bool:
            self.counts["weighted_tokens"] = int(np.count_nonzero(weights != weights.astype(bool)))
        return Tokens(
            ids=np.concatenate([np.zeros(0, np.int32), *self.ids]),
            trained=weights.astype(bool, copy=False),
            weights=None if weights.dtype == bool else weights,
            ends=np.array(self.ends, np.int64),
            hashes=np.array(self.hashes, np.uint64),
            counts=self.counts,
            first=self.first,
        )
