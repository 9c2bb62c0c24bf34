"""Prepares the documents that are scored, in the store that training uses (`data/prepare.py`).

A data set is tokenised once, for every rank that sees the cache folder and for every model with the same tokenizer.
Texts are tokenised as a whole: the pieces in which a text file is read are joined first.

Words are counted as `re.split(r"\\s+", text)`, bytes in UTF-8, as lm-evaluation-harness does for word and byte
perplexity.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from transformers import PreTrainedTokenizerBase

from dsft.config.options import EvalConfig
from dsft.data.encoding import encode
from dsft.data.formats import Chat, EmptyAnswer, FormatRules, FormattedSource, Pair, Text, canonical, text_of
from dsft.data.prepare import Preparation
from dsft.data.sources import Batch, Row
from dsft.data.tokenization import Tokens, closes_texts, tokenise
from dsft.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Documents(Preparation):
    """Takes one document after the other, whole."""

    max_documents: int | None = None
    """Only the first so many; no further row is read."""
    version: int = 2
    """Of what is stored for a document; part of the fingerprint, as all fields."""

    def batches(self, batches: Iterator[Batch], rules: FormatRules) -> Iterator[Batch]:
        first = 0
        for batch in _whole(batches) if rules.format == "text" else batches:
            rows = batch.rows if self.max_documents is None else batch.rows[: self.max_documents - first]
            yield replace(batch, rows=rows, first=first)
            first += len(rows)
            if first == self.max_documents:
                return


@dataclass(frozen=True, kw_only=True)
class Texts(Documents):
    """Takes texts, all tokens of which count."""

    bos: str
    """As the option."""
    separator: str = "none"
    """As the option, where documents are joined."""
    has_prefix: bool = False
    """Each document begins with BOS, else EOS, which is context only."""

    def tokens(self, batch: Batch, rules: FormatRules, tokenizer: PreTrainedTokenizerBase) -> Tokens:
        samples = samples_in(batch, rules, tokenizer)
        texts = [text_of(sample) for sample in samples]
        documents = list(self._encoded(texts, batch.first, tokenizer))
        ends = np.cumsum([len(ids) for ids in documents], dtype=np.int64)
        ids = np.concatenate([np.zeros(0, np.int32), *documents])
        trained = np.ones(len(ids), bool)
        if self.has_prefix:
            trained[[0, *ends[:-1]]] = False
        return _with_sizes(ids, trained, ends, texts, samples, Counter(rows=len(batch.rows)))

    def _encoded(self, texts: list[str], first: int, tokenizer: PreTrainedTokenizerBase) -> Iterator[np.ndarray]:
        """Yield the token ids of each document [T] int32.

        Args:
            first: documents before these.
        """
        start, end = [], []
        if self.has_prefix:
            start.append(tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id)
        if self.bos == "on":
            start.append(tokenizer.bos_token_id)
        if self.separator not in ("eos", "none"):  # each document but the first carries the separator before it
            texts = [self.separator + text if first + index else text for index, text in enumerate(texts)]
        elif self.separator == "eos" and tokenizer.eos_token_id is not None:
            is_closed = self.bos == "auto" and closes_texts(tokenizer)  # by the tokenizer itself
            end = [] if is_closed else [tokenizer.eos_token_id]
        for ids in encode(tokenizer, texts, special=self.bos == "auto"):
            yield np.concatenate([np.array(part, np.int32) for part in (start, ids, end if start or ids else [])])


@dataclass(frozen=True, kw_only=True)
class JoinedTexts(Documents):
    """Takes all texts as one document, joined by two newlines and tokenised once."""

    def batches(self, batches: Iterator[Batch], rules: FormatRules) -> Iterator[Batch]:
        whole = list(super().batches(batches, rules))
        if whole:
            rows = [row for batch in whole for row in batch.rows]
            yield Batch(rows=rows, place=", ".join(dict.fromkeys(batch.place for batch in whole)))

    def tokens(self, batch: Batch, rules: FormatRules, tokenizer: PreTrainedTokenizerBase) -> Tokens:
        joined = Text(text="\n\n".join(text_of(sample) for sample in samples_in(batch, rules, tokenizer)))
        ids = np.array(next(encode(tokenizer, [joined.text])), np.int32)
        ends, counts = np.array([len(ids)], np.int64), Counter(rows=len(batch.rows))
        return _with_sizes(ids, np.ones(len(ids), bool), ends, [joined.text], [joined], counts)


@dataclass(frozen=True, kw_only=True)
class Answers(Documents):
    """Takes prompts with completions, and chats; only what training learns of them counts."""

    def tokens(self, batch: Batch, rules: FormatRules, tokenizer: PreTrainedTokenizerBase) -> Tokens:
        samples = samples_in(batch, rules, tokenizer)
        texts = [text_of(sample) if sample else "" for sample in samples]
        try:
            tokens = tokenise(batch, rules, tokenizer)
        except UserError as error:
            raise UserError([f"data: {problem}" for problem in error.problems]) from None
        for index, (start, end) in enumerate(pairwise([0, *tokens.ends.tolist()])):
            ids, trained = tokens.ids[start:end], tokens.trained[start:end]
            if not trained.any():
                texts[index] = ""
            elif (
                len(ids) == rules.seq_len
                or rules.train_on in ("all", "last")
                or (isinstance(samples[index], Chat) and _has_more_than_content(samples[index]))
            ):
                texts[index] = tokenizer.decode(ids[trained], skip_special_tokens=True)
        return _with_sizes(tokens.ids, tokens.trained, tokens.ends, texts, samples, tokens.counts)


def _has_more_than_content(chat: Chat) -> bool:
    return any(
        message["role"] == "assistant" and not {"reasoning_content", "tool_calls", "weight"}.isdisjoint(message)
        for message in chat.messages
    )


def _with_sizes(
    ids: np.ndarray,
    trained: np.ndarray,
    ends: np.ndarray,
    texts: list[str],
    samples: list[Text | Pair | Chat | None],
    counts: Counter,
) -> Tokens:
    """Add what is known of the texts: their hashes, and the sizes of the scored ones."""
    return Tokens(
        ids=ids,
        trained=trained,
        ends=ends,
        hashes=np.array([text_hash(sample) for sample in samples], np.uint64),
        counts=counts,
        document_bytes=np.array([len(text.encode()) for text in texts], np.int64),
        document_words=np.array([words_in(text) for text in texts], np.int64),
    )


def text_hash(sample: Text | Pair | Chat | None) -> int:
    """Hash the texts of a sample, whatever tokenizer and template they will meet."""
    fields = [type(sample).__name__, vars(sample) if sample else {}]
    content = json.dumps(fields, sort_keys=True, default=str).encode()
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest())


def words_in(text: str) -> int:
    """Count words as lm-evaluation-harness (lm_eval/tasks/wikitext/preprocess_wikitext.py)."""
    return 1 + sum(1 for _ in re.finditer(r"\s+", text))  # as len(re.split(...)), without the words


def samples_in(batch: Batch, rules: FormatRules, tokenizer: PreTrainedTokenizerBase) -> list[Text | Pair | Chat | None]:
    """Bring the rows into their canonical form; None for a row without an answer.

    Raises:
        UserError: with file and line of a row that cannot be used.
    """
    samples: list[Text | Pair | Chat | None] = []
    for row in batch.rows:
        try:
            samples.append(canonical(row, rules, has_template=bool(tokenizer.chat_template)))
        except EmptyAnswer:
            samples.append(None)
        except ValueError as error:
            raise UserError([f"data: {batch.where(row)}: {error}"]) from None
    return samples


def read_samples(
    data: FormattedSource, config: EvalConfig, tokenizer: PreTrainedTokenizerBase
) -> Iterator[Text | Pair | Chat | None]:
    """Yield the documents in their canonical form; None for a row without an answer.

    Raises:
        UserError: with file and line of a row that cannot be used.
    """
    for batch in Documents(max_documents=config.max_documents).batches(data.batches(), data.rules):
        yield from samples_in(batch, data.rules, tokenizer)


def read_texts(data: FormattedSource, config: EvalConfig, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the full documents of a source of texts."""
    return [sample.text for sample in read_samples(data, config, tokenizer)]


def _whole(batches: Iterator[Batch]) -> Iterator[Batch]:
    """Join the pieces of long text files."""
    pieces: list[Row] = []
    for batch in batches:
        rows = []
        for row in batch.rows:
            pieces.append(row)
            if row.ends_document:
                text = "".join(piece.values["text"] for piece in pieces) if len(pieces) > 1 else None
                rows.append(row if text is None else pieces[0]._replace(values={"text": text}, ends_document=True))
                pieces = []
        if rows:
            yield replace(batch, rows=rows)
