"""Prepares documents for scoring: tokenises rows, marks the tokens that count, and cuts windows. A data set is
tokenised once for all models with the same tokenizer, in the store that training uses.
"""

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from typing import Literal

import numpy as np
from transformers import PreTrainedTokenizerBase

from dsft.config.options import EvalConfig
from dsft.data.formats import FormatRules, FormattedSource, Pair
from dsft.data.sources import Batch, Row
from dsft.data.tokens import (
    Preparation,
    Sample,
    Tokens,
    TokensBuilder,
    bytes_of_tokens,
    cache_folder,
    closes_texts,
    encode,
    end_of,
    opens_texts,
    prepare,
    tokenise_samples,
)
from dsft.errors import UserError
from dsft.perplexity.modes import MODES, Windows, find_mode
from dsft.units import one_of, plural

MOST_GROUPS = 1_000
BESIDE_CONTENT = {"reasoning_content", "tool_calls", "weight"}  # other keys of a message that change what is scored


@dataclass(frozen=True, kw_only=True)
class Documents(Preparation):
    max_documents: int | None = None  # number of rows to read; None for all
    version: int = 10  # of the stored data; part of the fingerprint, like all fields

    def rows(self, rows: Iterator[Row], rules: FormatRules) -> Iterator[Row]:
        return islice((row for row in rows if row.values is not None), self.max_documents)


@dataclass(frozen=True, kw_only=True)
class Texts(Documents):
    """Prepares texts; all their tokens count."""

    bos: str  # the option
    separator: str = "none"  # the option, for joined documents
    prefix: Literal["", "once", "always"] = ""
    """Whether each document begins with BOS, else EOS, as context only; "once": unless it already begins with BOS."""

    def tokens(self, batch: Batch, rules: FormatRules, tokenizer: PreTrainedTokenizerBase) -> Tokens:
        special = self.bos == "auto"
        bos = tokenizer.bos_token_id
        eos = tokenizer.eos_token_id
        start = [bos] if self.bos == "on" else []
        has_bos = start or (special and opens_texts(tokenizer))
        if self.prefix == "always" or (self.prefix and not has_bos):
            if bos is None and eos is None:
                raise UserError(
                    f"the tokenizer {tokenizer.name_or_path} has neither a BOS nor an EOS token, one of which this mode"
                    " or protocol puts before each text; use mode windows or sliding"
                )
            start.insert(0, eos if bos is None else bos)
        adds_end = self.separator == "eos" and not (special and closes_texts(tokenizer))
        builder = TokensBuilder(batch.rows, rules)
        texts = [sample.text if sample else "" for sample in builder.samples]
        joined = texts
        if self.separator not in ("eos", "none"):
            joined = [self.separator + text for text in texts]
            if batch.first == 0:
                joined[:1] = texts[:1]
        encoded = encode(tokenizer, joined, special=special)
        for _, text in zip(builder.rows(), joined, strict=True):
            ids = [*start, *next(encoded)]
            if adds_end:
                ids += end_of(text, tokenizer)
            # Training also leaves out an empty text, even if the tokenizer adds tokens to it.
            if text or self.prefix:
                weights = np.ones(len(ids), np.float32)
                if self.prefix:
                    weights[0] = 0
                builder.put(np.array(ids, np.int32), weights)
        return _with_sizes(texts, builder.samples, builder.tokens())


@dataclass(frozen=True, kw_only=True)
class JoinedTexts(Texts):
    """Prepares all texts as one document, joined by two newlines and tokenised once."""

    bos: str = "auto"

    def rows(self, rows: Iterator[Row], rules: FormatRules) -> Iterator[Row]:
        samples = TokensBuilder([*super().rows(rows, rules)], rules).samples
        texts = [sample.text for sample in samples if sample]
        if texts:
            yield Row({"text": "\n\n".join(texts)})

    def tokens(self, batch: Batch, rules: FormatRules, tokenizer: PreTrainedTokenizerBase) -> Tokens:
        plain = replace(rules, format="text", text_column="text", prompt_template=None, completion_template=None)
        return super().tokens(batch, plain, tokenizer)


@dataclass(frozen=True, kw_only=True)
class Answers(Documents):
    """Prepares prompts with completions, and chats; only the tokens that training learns count."""

    def tokens(self, batch: Batch, rules: FormatRules, tokenizer: PreTrainedTokenizerBase) -> Tokens:
        builder = TokensBuilder(batch.rows, rules)
        tokens = tokenise_samples(builder, tokenizer)
        texts = []
        bounds = pairwise([0, *tokens.row_ends.tolist()])
        for sample, is_too_long, (start, end) in zip(builder.samples, builder.are_too_long, bounds, strict=True):
            trained = tokens.trained[start:end]
            text = None
            if not is_too_long:
                text = _text_in_data(sample, trained, rules)
            if text is None:
                text = tokenizer.decode(tokens.ids[start:end][trained], skip_special_tokens=True)
            texts.append(text)
        sized = _with_sizes(texts, builder.samples, tokens)
        sized.documents["document_words"][sized.documents["document_bytes"] == 0] = 0  # nothing is scored
        return sized


def _text_in_data(sample: Sample, trained: np.ndarray, rules: FormatRules) -> str | None:
    """Return the text of a row's answers if exactly this text is scored (`trained`: [T]), else None."""
    if not trained.any() or rules.train_on == "all":
        return None
    if isinstance(sample, Pair):
        return sample.completion
    answers = [message for message in sample.messages if message["role"] == "assistant" and message["content"]]
    num_scored = np.count_nonzero(trained & ~np.append(False, trained[:-1]))
    # Reasoning may also be in the content, and may be scored or not.
    has_more = any(message.keys() & BESIDE_CONTENT or "</think>" in message["content"] for message in answers)
    if has_more or rules.train_thinking == "all" or num_scored != len(answers):
        return None
    return "".join(message["content"] for message in answers)


KINDS: dict[str, type[Documents]] = {"texts": Texts, "joined": JoinedTexts, "answers": Answers}


def _with_sizes(texts: list[str], samples: list[Sample], tokens: Tokens) -> Tokens:
    """Add hashes of the texts, independent of tokenizer and template, and bytes and words of the scored text."""
    hashes = []
    for sample in samples:
        content = [type(sample).__name__, vars(sample) if sample else {}]
        encoded = json.dumps(content, sort_keys=True, default=str).encode()
        hashes.append(int.from_bytes(hashlib.blake2b(encoded, digest_size=8).digest()))
    num_bytes = [len(text.encode()) for text in texts]
    # Words as in lm-evaluation-harness (lm_eval/tasks/wikitext/preprocess_wikitext.py).
    num_words = [len(re.split(r"\s+", text)) for text in texts]
    documents = {
        "document_hashes": np.array(hashes, np.uint64),
        "document_bytes": np.array(num_bytes, np.int64),
        "document_words": np.array(num_words, np.int64),
    }
    return replace(tokens, documents=documents)


def build_windows(
    data: FormattedSource, config: EvalConfig, tokenizer: PreTrainedTokenizerBase, *, show_progress: bool = False
) -> Windows:
    """Build the windows over the rows of `data` that `config` specifies. The first process prepares the tokens.
    Raises UserError if the mode does not fit the data, or nothing can be scored.
    """
    is_text = data.rules.is_text
    fitting = [name for name, mode in MODES.items() if mode.is_text == is_text]
    name = fitting[0] if config.mode == "auto" else config.mode
    if name not in fitting:
        raise UserError(f"mode={name} does not fit the data, which is {data.rules.format}; use {one_of(fitting)}")
    if is_text and config.bos == "on" and tokenizer.bos_token_id is None:
        raise UserError(f"bos=on: the tokenizer {tokenizer.name_or_path} has no BOS token; use auto or off")
    if config.protocol:
        name = config.protocol
        if not is_text:
            raise UserError(f"protocol={name} needs texts, and the data is {data.rules.format}; leave it out")

    def prepared(kind, **fields):
        preparation = KINDS[kind](max_documents=config.max_documents, **fields)
        cache = cache_folder(config.data_cache)
        store = prepare(data, tokenizer, cache, preparation=preparation, show_progress=show_progress)
        if is_text and not store.documents["document_bytes"].any():  # only BOS and end tokens
            documents = plural(len(store.row_ends), "document")
            raise UserError(f"data: {data.source.name}: {documents}, none of which has text")
        return store

    mode = find_mode(name)
    windows = mode.windows(config, prepared)
    windows.mode = name
    if mode.bos_replaces_first and opens_texts(tokenizer):
        windows.first_token = tokenizer.bos_token_id
    if is_text and windows.document_bytes.any():
        windows.document_bytes = windows.scored_bytes(*bytes_of_tokens(tokenizer))
    if not any(len(windows.scored_places(window)) for window in range(len(windows.spans))):
        raise UserError(
            f"data: {len(windows.document_ends)} documents have no token to score: a first token is context only"
        )
    return windows


def group_documents(column: str, data: FormattedSource, config: EvalConfig, windows: Windows) -> np.ndarray:
    """Return [D] texts: each document's value of `column`. Raises UserError if the data has no such column, it has too
    many values, or the protocol joins all documents.
    """
    columns = dict.fromkeys(name for row in data.source.first_rows() for name in row.values)
    if column not in columns:
        raise UserError(f"group_by={column}: no such column in {data.source.name}; it has {', '.join(columns)}")
    rows = Documents(max_documents=config.max_documents).rows(data.rows(), data.rules)
    values = [row.values.get(column) for row in rows]
    labels = ["(none)" if value is None else str(value) for value in values]
    if len(set(labels)) > MOST_GROUPS:
        raise UserError(f"group_by={column}: the column has more than {MOST_GROUPS:,} values; name another")
    if len(labels) != len(windows.document_ends):
        raise UserError(f"group_by={column}: protocol={windows.mode} joins all documents; leave one of them out")
    return np.array(labels, dtype=object)
