"""Rows become token sequences: what is learnt of each, and what happens to those that are too long or teach nothing.
Everything cut or left out is counted.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase, TokenizersBackend

from dsft.data.chat_masks import Spans, chat_tokens
from dsft.data.formats import Chat, EmptyAnswer, Pair, Text, canonical
from dsft.data.sources import Batch
from dsft.errors import UserError, one_line


@dataclass(frozen=True, kw_only=True)
class FormatRules:
    """What decides the tokens of a row, beside the tokenizer; the fields are those of `config.DataFields`."""

    shape: str
    text_column: str
    prompt_template: str | None
    completion_template: str | None
    train_on: str
    seq_len: int
    too_long: str
    bad_rows: str
    of_chats: bool = False
    """Whether prompts and completions are lists of messages."""
    keep_all: bool = False
    """One sequence for each row, in order, whatever it holds (evaluation): what must be left out stays with no trained
    token.
    """

    @property
    def is_text(self) -> bool:
        """Documents of any length, all trained, to be laid end to end."""
        return self.shape == "text" or (self.shape == "template" and not self.prompt_template)

    @classmethod
    def of(cls, config: Any, shape: str, *, first_row: dict[str, Any], keep_all: bool = False) -> "FormatRules":
        names = ("text_column", "prompt_template", "completion_template", "train_on", "seq_len", "too_long", "bad_rows")
        return cls(
            shape=shape,
            of_chats=isinstance(first_row.get("completion"), list),
            keep_all=keep_all,
            **{name: getattr(config, name) for name in names},
        )


@dataclass(kw_only=True)
class Tokens:
    """Sequences laid end to end. F tokens, S sequences."""

    ids: np.ndarray
    """[F] int32."""
    trained: np.ndarray
    """[F] bool: whether the token is to be predicted; never the first of a sequence."""
    ends: np.ndarray
    """[S] int64; what follows the last of them belongs to a document that goes on in the next batch."""
    hashes: np.ndarray
    """[S] uint64, of the ids: the same for duplicates."""
    counts: Counter
    """rows, truncated, split, dropped_long, dropped_untrained, dropped_empty, dropped_bad."""
    first_bad: str = ""
    """What was wrong with the first row left out as bad, and where."""


def tokenise(batch: Batch, rules: FormatRules, tokenizer: PreTrainedTokenizerBase) -> Tokens:
    """
    Raises:
        UserError: with file and line of a row that cannot be used, where `bad_rows` is error.
    """
    made = _Made(rules)
    has_template = bool(tokenizer.chat_template)
    samples: list[tuple[int, Text | Pair | Chat | None]] = []
    for index, row in enumerate(batch.rows):
        try:
            samples.append((index, canonical(row, rules.shape, rules, has_template=has_template)))
        except EmptyAnswer:
            made.counts["dropped_empty"] += 1
            if rules.keep_all:
                samples.append((index, None))
        except ValueError as error:
            made.bad(f"{batch.where(index)}: {error}")
    kinds = {type(sample) for _, sample in samples} - {type(None)}
    if kinds == {Text}:
        _add_texts(made, [text for _, text in samples], tokenizer)
    elif kinds == {Pair}:
        _add_pairs(made, samples, batch.where, tokenizer)
    else:
        for index, sample in samples:
            if sample is None:
                made.blank()
                continue
            try:
                made.add(
                    *chat_tokens(sample, tokenizer, train_on="answers" if rules.train_on == "auto" else rules.train_on),
                    lambda index=index: batch.where(index),
                )
            except (ValueError, TypeError, KeyError, AttributeError, TemplateError) as error:
                kind = "the chat template raised: " if isinstance(error, TemplateError) else ""
                made.bad(f"{batch.where(index)}: {kind}{one_line(error)[:500]}")
    made.counts["rows"] = len(batch.rows)
    return made.tokens()


def _add_texts(made: "_Made", texts: list[Text], tokenizer: PreTrainedTokenizerBase) -> None:
    """Documents as they stand, an end token after each."""
    encoded = _encode(tokenizer, [text.text for text in texts if not text.begun])
    going_on = _continued(tokenizer, [text.text for text in texts if text.begun])
    closes = _closes(tokenizer)
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    for text in texts:
        ids = next(going_on if text.begun else encoded)
        if closes and not text.begun:
            ids = ids[:-1]  # the end is added where the document ends
        if text.goes_on:
            made.open(ids)
        elif text.text or text.begun:
            made.document(ids + end)
        else:
            made.counts["dropped_empty"] += 1


def _add_pairs(
    made: "_Made",
    samples: list[tuple[int, Pair | None]],
    where: Callable[[int], str],
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """Prompt and completion as they stand, then the end token."""
    prompts = _encode(tokenizer, [pair.prompt for _, pair in samples if pair])
    completions = _continued(tokenizer, [pair.completion for _, pair in samples if pair])
    closes = _closes(tokenizer)
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    for index, pair in samples:
        if pair is None:
            made.blank()
            continue
        prompt, completion = next(prompts), next(completions)
        if closes:
            prompt = prompt[:-1]
        ids = prompt + completion + end
        made.add(
            ids, [(0 if made.rules.train_on == "all" else len(prompt), len(ids))], lambda index=index: where(index)
        )


def _closes(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer puts an end token after each text by itself."""
    return next(_encode(tokenizer, ["a"]))[-1:] == [tokenizer.eos_token_id]


def _continued(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> Iterator[list[int]]:
    """The ids of texts that go on from another one: without the blank that some tokenizers put before each text
    (SentencePiece's dummy prefix).
    """
    before = next(_encode(tokenizer, ["\n"], special=False))
    probe = next(_encode(tokenizer, ["\na"], special=False))
    if probe[: len(before)] != before or probe[len(before) :] == next(_encode(tokenizer, ["a"], special=False)):
        return _encode(tokenizer, texts, special=False)
    joined = _encode(tokenizer, [f"\n{text}" for text in texts], special=False)
    return (
        ids[len(before) :] if ids[: len(before)] == before else next(_encode(tokenizer, [text], special=False))
        for ids, text in zip(joined, texts, strict=True)
    )


def _encode(tokenizer: PreTrainedTokenizerBase, texts: list[str], *, special: bool = True) -> Iterator[list[int]]:
    """The ids that `tokenizer(texts)` gives.

    Args:
        special: with the tokens that the tokenizer puts around a text.
    """
    if not isinstance(tokenizer, TokenizersBackend):
        return iter(tokenizer(texts, add_special_tokens=special, verbose=False)["input_ids"] if texts else [])
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = tokenizer.split_special_tokens
    return (
        encoding.ids for encoding in backend.encode_batch_fast(texts, add_special_tokens=special)
    )  # without the offsets, which take a fifth of the time


class _Made:
    """Sequences as they are made, under the rules for length and for what teaches nothing."""

    def __init__(self, rules: FormatRules):
        self.rules, self.counts, self.first_bad = rules, Counter(), ""
        self.ids: list[np.ndarray] = []
        self.trained: list[np.ndarray] = []
        self.ends: list[int] = []
        self.hashes: list[int] = []
        self.size = 0

    def bad(self, what: str) -> None:
        """
        Raises:
            UserError: unless bad rows are left out.
        """
        if self.rules.bad_rows == "error" or self.rules.keep_all:
            raise UserError(
                [what + ("" if self.rules.keep_all else "; bad_rows: drop leaves such rows out, and counts them")]
            )
        self.first_bad = self.first_bad or what
        self.counts["dropped_bad"] += 1

    def blank(self) -> None:
        """The place of a row that has nothing to learn, where each must have one."""
        self._put(np.zeros(1, np.int32), np.zeros(1, bool), end=True)

    def open(self, ids: list[int]) -> None:
        """A piece of a document that goes on."""
        self._put(np.asarray(ids, np.int32), np.ones(len(ids), bool), end=False)

    def document(self, ids: list[int]) -> None:
        """A text, of any length: it is cut where its tokens are used."""
        self._put(np.asarray(ids, np.int32), np.ones(len(ids), bool), end=True)

    def add(self, ids: list[int], spans: Spans, where: Callable[[], str]) -> None:
        """A sample with the tokens of `spans` trained."""
        array, trained = np.asarray(ids, np.int32), np.zeros(len(ids), bool)
        for start, end in spans:
            trained[start:end] = True
        trained[:1] = False  # nothing stands before it
        if len(array) <= self.rules.seq_len:
            self._put_if_trained(array, trained)
        else:
            self._too_long(array, trained, where)

    def _too_long(self, ids: np.ndarray, trained: np.ndarray, where: Callable[[], str]) -> None:
        length, policy = self.rules.seq_len, self.rules.too_long
        if policy == "error":
            raise UserError(
                [
                    f"{where()}: {len(ids)} tokens are longer than seq_len={length}; raise it, or set too_long to"
                    " truncate, split or drop"
                ]
            )
        if policy == "drop":
            self.counts["dropped_long"] += 1
            if self.rules.keep_all:
                self._put(ids[:length], np.zeros(length, bool), end=True)
        elif policy == "split" and not self.rules.keep_all:
            self.counts["split"] += 1
            for start in range(0, len(ids), length):
                trained[start] = False
                self._put_if_trained(ids[start : start + length], trained[start : start + length])
        else:
            self.counts["truncated"] += 1
            self._put_if_trained(ids[:length], trained[:length])

    def _put_if_trained(self, ids: np.ndarray, trained: np.ndarray) -> None:
        """What has no trained token (its answer was cut off) teaches nothing."""
        if trained.any() or self.rules.keep_all:
            self._put(ids, trained, end=True)
        else:
            self.counts["dropped_untrained"] += 1

    def _put(self, ids: np.ndarray, trained: np.ndarray, *, end: bool) -> None:
        self.ids.append(ids)
        self.trained.append(trained)
        self.size += len(ids)
        if end:
            self.ends.append(self.size)
            self.hashes.append(int.from_bytes(hashlib.blake2b(ids.tobytes(), digest_size=8).digest()))

    def tokens(self) -> Tokens:
        return Tokens(
            ids=np.concatenate([np.zeros(0, np.int32), *self.ids]),
            trained=np.concatenate([np.zeros(0, bool), *self.trained]),
            ends=np.array(self.ends, np.int64),
            hashes=np.array(self.hashes, np.uint64),
            counts=self.counts,
            first_bad=self.first_bad,
        )
