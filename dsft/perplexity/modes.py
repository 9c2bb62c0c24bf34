"""Defines what is scored: the documents, their tokens, and the windows in which a model sees them.

A `Mode` is one entry of MODES with its function below, whose docstring is the exact definition. `--mode` names one by
what it does, `--protocol` by the paper or tool that reports "the perplexity" of a model so; each length of
`--context_curve` is one too. To add one, write its function and its entry here, and its line in docs/perplexity.md:
the names that a user may choose, the options that cannot be combined, the fingerprint, and the comparison of results
follow from the entry.

A data set is tokenised once, in the store that training uses (`data/prepare.py`), for every rank that sees the cache
folder and for every model with the same tokenizer.
"""

import dataclasses
import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Literal

import numpy as np
from transformers import PreTrainedTokenizerBase

from dsft.config.options import EvalConfig
from dsft.data.formats import Chat, EmptyAnswer, FormatRules, FormattedSource, Pair, Text, canonical, text_of
from dsft.data.prepare import Preparation, cache_folder, prepare
from dsft.data.sources import Batch, Row
from dsft.data.store import Store
from dsft.data.tokenization import Tokens, closes_texts, encode, tokenise
from dsft.errors import UserError, nearest
from dsft.perplexity.windows import (
    Windows,
    disjoint_spans,
    full_spans,
    of_corpus,
    of_documents,
    rolling_spans,
    sliding_spans,
)
from dsft.units import token_counts

Prepared = Callable[[Preparation], Store]
"""Prepares the data set in this way, or finds it prepared."""
Sample = Text | Pair | Chat | None
"""A document in its canonical form; None for a row without an answer."""
CONTEXT = "context"
"""The mode of `context_curve`; context-512 is the protocol of its length 512."""


# ---- documents: what of the rows is tokenised, and which tokens count


@dataclass(frozen=True, kw_only=True)
class Documents(Preparation):
    """Takes one document after the other, whole: the pieces in which a long text file is read are joined."""

    max_documents: int | None = None
    """Only the first so many; no further row is read."""
    version: int = 2
    """Of what is stored for a document; part of the fingerprint, as all fields."""

    def batches(self, batches: Iterator[Batch], rules: FormatRules) -> Iterator[Batch]:
        pieces: list[Row] = []
        first = 0
        for batch in batches:
            rows = []
            for row in batch.rows:
                pieces.append(row)
                if row.ends_document:
                    text = "".join(piece.values["text"] for piece in pieces) if len(pieces) > 1 else None
                    rows.append(row if text is None else pieces[0]._replace(values={"text": text}, ends_document=True))
                    pieces = []
            if self.max_documents is not None:
                rows = rows[: self.max_documents - first]
            if rows:
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
        start, end, given = [], [], texts
        if self.has_prefix:
            start.append(tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id)
        if self.bos == "on":
            start.append(tokenizer.bos_token_id)
        if self.separator not in ("eos", "none"):  # each document but the first carries the separator before it
            given = [self.separator + text if batch.first + index else text for index, text in enumerate(texts)]
        elif self.separator == "eos" and tokenizer.eos_token_id is not None:
            is_closed = self.bos == "auto" and closes_texts(tokenizer)  # by the tokenizer itself
            end = [] if is_closed else [tokenizer.eos_token_id]
        documents = [
            np.concatenate([np.array(part, np.int32) for part in (start, ids, end if start or ids else [])])
            for ids in encode(tokenizer, given, special=self.bos == "auto")
        ]
        ends = np.cumsum([len(ids) for ids in documents], dtype=np.int64)
        ids = np.concatenate([np.zeros(0, np.int32), *documents])
        trained = np.ones(len(ids), bool)
        if self.has_prefix:
            trained[[0, *ends[:-1]]] = False
        return _with_sizes(ids, trained, ends, texts, samples, Counter(rows=len(batch.rows)))


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
        beside_content = {"reasoning_content", "tool_calls", "weight"}
        for index, (start, end) in enumerate(pairwise([0, *tokens.ends.tolist()])):
            ids, trained = tokens.ids[start:end], tokens.trained[start:end]
            messages = samples[index].messages if isinstance(samples[index], Chat) else []
            if not trained.any():
                texts[index] = ""
            elif (
                len(ids) == rules.seq_len
                or rules.train_on in ("all", "last")
                or any(each["role"] == "assistant" and not beside_content.isdisjoint(each) for each in messages)
            ):  # what is scored is not the text of the answers: cut off, less of them, or more than their content
                texts[index] = tokenizer.decode(ids[trained], skip_special_tokens=True)
        return _with_sizes(tokens.ids, tokens.trained, tokens.ends, texts, samples, tokens.counts)


def _with_sizes(
    ids: np.ndarray,
    trained: np.ndarray,
    ends: np.ndarray,
    texts: list[str],
    samples: list[Sample],
    counts: Counter,
) -> Tokens:
    """Add what is known of the texts: their hashes, whatever tokenizer and template, and the UTF-8 bytes and
    words of the scored ones.
    """
    contents = (
        json.dumps([type(each).__name__, vars(each) if each else {}], sort_keys=True, default=str) for each in samples
    )
    hashes = [int.from_bytes(hashlib.blake2b(content.encode(), digest_size=8).digest()) for content in contents]
    return Tokens(
        ids=ids,
        trained=trained,
        ends=ends,
        hashes=np.array(hashes, np.uint64),
        counts=counts,
        document_bytes=np.array([len(text.encode()) for text in texts], np.int64),
        document_words=np.array([words_in(text) for text in texts], np.int64),
    )


def words_in(text: str) -> int:
    r"""Count words as lm-evaluation-harness: len(re.split(r"\s+", text)), here without the words themselves
    (lm_eval/tasks/wikitext/preprocess_wikitext.py).
    """
    return 1 + sum(1 for _ in re.finditer(r"\s+", text))


def samples_in(batch: Batch, rules: FormatRules, tokenizer: PreTrainedTokenizerBase) -> list[Sample]:
    """Bring the rows into their canonical form.

    Raises:
        UserError: with file and line of a row that cannot be used.
    """
    samples: list[Sample] = []
    for row in batch.rows:
        try:
            samples.append(canonical(row, rules, has_template=bool(tokenizer.chat_template)))
        except EmptyAnswer:
            samples.append(None)
        except ValueError as error:
            raise UserError(f"data: {batch.where(row)}: {error}") from None
    return samples


def read_samples(data: FormattedSource, config: EvalConfig, tokenizer: PreTrainedTokenizerBase) -> Iterator[Sample]:
    """Yield the documents.

    Raises:
        UserError: with file and line of a row that cannot be used.
    """
    for batch in Documents(max_documents=config.max_documents).batches(data.batches(), data.rules):
        yield from samples_in(batch, data.rules, tokenizer)


# ---- modes


def _windows(config: EvalConfig, prepared: Prepared, _tokenizer: PreTrainedTokenizerBase) -> Windows:
    """Documents, a separator after each, are joined and cut into windows of L tokens that do not overlap. The first
    token of a window is context only. It is the view that finetuning trains on (`data/`).
    """
    texts = Texts(bos=config.bos, separator=config.separator, max_documents=config.max_documents)
    return of_corpus(prepared(texts), partial(disjoint_spans, length=config.seq_len))


def _sliding(config: EvalConfig, prepared: Prepared, _tokenizer: PreTrainedTokenizerBase) -> Windows:
    """Windows of L tokens, each S further. A window scores what the one before it did not reach, so every token but the
    first is scored once, with at least L - S tokens of context (transformers' documentation, "Perplexity of
    fixed-length models"). Over the corpus, or each document by itself.
    """
    spans_of = partial(sliding_spans, length=config.seq_len, stride=config.stride or config.seq_len // 2)
    texts = Texts(bos=config.bos, max_documents=config.max_documents)
    if config.scope == "document":
        return of_documents(prepared(texts), spans_of)
    return of_corpus(prepared(replace(texts, separator=config.separator)), spans_of)


def _rolling(
    config: EvalConfig, prepared: Prepared, _tokenizer: PreTrainedTokenizerBase, bos: str | None = None
) -> Windows:
    """Each document by itself, after a prefix token (BOS, else EOS), in windows of L predicted tokens with one token of
    context. The last window has as much context as fits (lm-evaluation-harness, `loglikelihood_rolling` in
    lm_eval/models/huggingface.py and `get_rolling_token_windows` in lm_eval/utils.py).
    """
    store = prepared(Texts(bos=bos or config.bos, has_prefix=True, max_documents=config.max_documents))
    return of_documents(store, partial(rolling_spans, length=config.seq_len))


def _answers(config: EvalConfig, prepared: Prepared, _tokenizer: PreTrainedTokenizerBase) -> Windows:
    """Prompts with completions, or chats: only what finetuning trains on is scored."""
    store = prepared(Answers(max_documents=config.max_documents))
    windows = of_documents(store, lambda start, end: [(start, end, min(start + 1, end))])
    windows.truncated_documents = store.counts["truncated"]
    return windows


def _gptq(config: EvalConfig, prepared: Prepared, _tokenizer: PreTrainedTokenizerBase, scored_from: int = 1) -> Windows:
    """All texts joined by two newlines and tokenised once, BOS as the tokenizer adds it. Windows of 2,048 tokens, or
    the model's positions where these are fewer, do not overlap. What does not fill a window is dropped, and the first
    token of a window is context only. `llama_eval` in llama.py of IST-DASLab/gptq and its `get_wikitext2`, of which
    many papers on quantisation carry copies.
    """
    store = prepared(JoinedTexts(max_documents=config.max_documents))
    if len(store.tokens) < config.seq_len:
        raise UserError(
            f"protocol={config.protocol} drops what does not fill a window of seq_len={config.seq_len} tokens, and"
            f" the data has {len(store.tokens):,}; use more data, a smaller seq_len or protocol dsft"
        )
    return _without_sizes(of_corpus(store, partial(full_spans, length=config.seq_len, scored_from=scored_from)))


def _llama_cpp(config: EvalConfig, prepared: Prepared, tokenizer: PreTrainedTokenizerBase) -> Windows:
    """The text tokenised once, in windows of 512 tokens; BOS replaces the first of each where the tokenizer adds one.
    The tokens behind the middle are scored, and what does not fill a window is dropped. `perplexity` in
    tools/perplexity/perplexity.cpp of ggml-org/llama.cpp. That tool reads one file: a .txt file is taken as it is,
    other data is joined by two newlines.
    """
    windows = _gptq(config, prepared, tokenizer, scored_from=config.seq_len // 2 + 1)
    begins_with = next(encode(tokenizer, ["a"]))[:1]
    if tokenizer.bos_token_id is not None and begins_with == [tokenizer.bos_token_id]:
        windows.first_token = tokenizer.bos_token_id
    return windows


def _hf(config: EvalConfig, prepared: Prepared, _tokenizer: PreTrainedTokenizerBase) -> Windows:
    """Joined and tokenised as gptq, in sliding windows of 1,024 tokens, or the model's positions where these are fewer,
    each 512 further (`stride`). "Perplexity of fixed-length models" in the documentation of transformers. Its code
    weighs the mean of a window with one token less than the window scores, but for the first window; so does this.
    """
    store = prepared(JoinedTexts(max_documents=config.max_documents))
    stride = config.stride or min(512, config.seq_len // 2)
    windows = of_corpus(store, partial(sliding_spans, length=config.seq_len, stride=stride))
    scored = windows.spans[:, 1] - windows.spans[:, 2]
    windows.weights = 1 - 1 / np.maximum(scored, 1)
    windows.weights[:1] = 1.0
    return windows


def _context(config: EvalConfig, prepared: Prepared, _tokenizer: PreTrainedTokenizerBase) -> Windows:
    """The last L tokens of each document. For every length half as many tokens as the shortest length are scored.
    Documents shorter than the longest length are left out.
    """
    store = prepared(Texts(bos=config.bos, max_documents=config.max_documents))
    lengths = token_counts(config.context_curve)
    longest_document = np.diff(store.ends, prepend=0).max(initial=0)
    if longest_document < lengths[-1]:
        raise UserError(
            f"context_curve={config.context_curve}: needs documents of {lengths[-1]:,} tokens or more, and the"
            f" longest here has {longest_document:,}; use shorter contexts, or longer documents"
        )
    scored = lengths[0] // 2
    return _without_sizes(
        of_documents(
            store,
            lambda start, end: [(end - config.seq_len, end, end - scored)] if end - start >= lengths[-1] else [],
        )
    )


def _without_sizes(windows: Windows) -> Windows:
    """Part of the text is not scored, and how many bytes that part has is not known."""
    windows.document_bytes = windows.document_words = np.zeros(len(windows.document_ends), dtype=np.int64)
    return windows


@dataclass(frozen=True, kw_only=True)
class Mode:
    """Says which windows are scored."""

    windows: Callable[[EvalConfig, Prepared, PreTrainedTokenizerBase], Windows] | None
    """None: as the option `mode` says."""
    named_by: Literal["mode", "protocol", "context_curve"]
    """The option that asks for it."""
    options: tuple[str, ...] = ()
    """Of EvalConfig, that decide what is scored with which context, beside mode, protocol and seq_len."""
    is_text: bool = True
    """Whether it is of texts, else of prompts with completions and chats."""
    source: str = ""
    """Where a protocol is defined."""
    seq_len: int | None = None
    """Of a protocol: tokens of a window where the user names none; at most the model's positions, which None takes."""


MODES = {
    "windows": Mode(named_by="mode", windows=_windows, options=("bos", "separator")),
    "sliding": Mode(named_by="mode", windows=_sliding, options=("stride", "scope", "bos", "separator")),
    "rolling": Mode(named_by="mode", windows=_rolling, options=("bos",)),
    "answers": Mode(named_by="mode", windows=_answers, options=("too_long",), is_text=False),
    "gptq": Mode(named_by="protocol", windows=_gptq, source="IST-DASLab/gptq, llama.py", seq_len=2048),
    "llama.cpp": Mode(
        named_by="protocol", windows=_llama_cpp, source="ggml-org/llama.cpp, tools/perplexity", seq_len=512
    ),
    # Reports word and byte perplexity and bits per byte. The harness changes the texts of its task wikitext first
    # (`wikitext_detokenizer`); it is given texts so changed.
    "lm-eval": Mode(
        named_by="protocol",
        windows=partial(_rolling, bos="auto"),
        source="EleutherAI/lm-evaluation-harness, loglikelihood_rolling",
    ),
    "hf": Mode(
        named_by="protocol",
        windows=_hf,
        options=("stride",),
        source="transformers' documentation, fixed-length models",
        seq_len=1024,
    ),
    "dsft": Mode(named_by="protocol", windows=None, source="mode windows, or answers", seq_len=1024),
    CONTEXT: Mode(
        named_by="context_curve",
        windows=_context,
        options=("bos",),
        source="windows that end with the document, its last tokens scored",
    ),
}
"""`mode: auto` takes the first of texts, or of prompts with completions and chats. `protocol: all` goes by this order.

A protocol's perplexity is exp of its weighted mean of nats; only hf's weights differ from one.
"""
NAMED_BY = {
    option: [name for name, mode in MODES.items() if mode.named_by == option]
    for option in ("mode", "protocol", "context_curve")
}
"""Option -> the names of the modes that it may ask for."""
WINDOW_OPTIONS = tuple(dict.fromkeys(name for mode in MODES.values() for name in mode.options))
"""All options that some mode reads: part of every result's fingerprint."""


def find_mode(name: str) -> Mode:
    """Return the mode, protocol, or length of context (context-512) of this name."""
    return MODES[CONTEXT if name.startswith(f"{CONTEXT}-") else name]


def mode_problems(config: EvalConfig) -> list[str]:
    """List unknown modes and protocols, and options that exclude each other."""
    problems = []
    for option, choices in (("mode", ["auto", *NAMED_BY["mode"]]), ("protocol", [*NAMED_BY["protocol"], "all"])):
        value = getattr(config, option)
        if value not in (None, *choices):
            problems.append(
                f"{option}: invalid choice {value!r} (choose from {', '.join(choices)}){nearest(value, choices)}"
            )
    if config.protocol:
        defaults = {field.name: field.default for field in dataclasses.fields(config)}
        of_modes = {name for mode in NAMED_BY["mode"] if MODES[mode].is_text for name in MODES[mode].options}
        of_protocols = {name for protocol in NAMED_BY["protocol"] for name in MODES[protocol].options}
        problems += [
            f"protocol={config.protocol} and {name}={getattr(config, name)} are both set; keep one"
            for name in ("mode", *sorted(of_modes - of_protocols))
            if getattr(config, name) != defaults[name]
        ]
    if config.context_curve is None:
        return problems
    where = f"context_curve={config.context_curve}"
    try:
        lengths = token_counts(config.context_curve)
    except ValueError as error:
        return [*problems, f"{where}: {error}; write for example 512,1k,2k"]
    if len(lengths) < 2 or lengths[0] < 2:
        return [*problems, f"{where}: name at least two lengths of 2 tokens or more, as in 512,1k,2k"]
    if config.batch_tokens is not None and config.batch_tokens < lengths[-1]:
        problems.append(
            f"batch_tokens={config.batch_tokens} is less than the longest context of context_curve; raise it"
        )
    set_too = [name for name in ("protocol", "stride") if getattr(config, name) is not None]
    set_too += [f"mode={config.mode}"] if config.mode != "auto" else []
    return problems + [
        f"context_curve and {name} are both set; keep one: it has windows of its own" for name in set_too
    ]


def protocol_configs(config: EvalConfig, positions: int | None) -> list[EvalConfig]:
    """Return the options of each protocol, or length of context, that is asked for; the options alone where none is.

    Args:
        positions: of the model; None where there is no limit.
    """
    if config.context_curve:
        return [
            replace(config, protocol=f"{CONTEXT}-{length}", seq_len=length)
            for length in token_counts(config.context_curve)
        ]
    names = NAMED_BY["protocol"] if config.protocol == "all" else [config.protocol]
    configs = []
    for name in names:
        length = config.seq_len
        if name in NAMED_BY["protocol"] and not config.has_seq_len:
            length = MODES[name].seq_len or positions or config.seq_len
            length = min(length, positions or length)
        configs.append(replace(config, protocol=name, seq_len=length))
    return configs


def build_windows(
    data: FormattedSource, config: EvalConfig, tokenizer: PreTrainedTokenizerBase, *, show_progress: bool = False
) -> Windows:
    """Make the windows of the rows of `data` as `config` says. Who comes first prepares the tokens.

    Args:
        show_progress: of the preparation.

    Raises:
        UserError: where mode and data do not go together, or nothing can be scored.
    """
    is_text = data.rules.is_text
    fitting = [name for name in NAMED_BY["mode"] if MODES[name].is_text == is_text]
    name = fitting[0] if config.mode == "auto" else config.mode
    if name not in fitting:
        *first, last = fitting
        names = f"{', '.join(first)} or {last}" if first else last
        raise UserError(f"mode={name} does not fit the data, which holds {data.rules.format}; use {names}")
    if is_text and config.bos == "on" and tokenizer.bos_token_id is None:
        raise UserError(f"bos=on: the tokenizer {tokenizer.name_or_path} has no BOS token; use auto or off")
    if config.protocol and find_mode(config.protocol).windows:
        name = config.protocol
        if not is_text:
            key = "context_curve" if config.context_curve else f"protocol={config.protocol}"
            raise UserError(f"{key} is of texts, and the data holds {data.rules.format}; leave it out")

    def prepared(preparation: Preparation) -> Store:
        how = {"preparation": preparation, "show_progress": show_progress}
        return prepare(data, tokenizer, cache_folder(config), **how)

    windows = find_mode(name).windows(config, prepared, tokenizer)
    windows.mode = name
    if not windows.has_scored_tokens:
        raise UserError(
            f"data: {len(windows.document_ends)} documents give no token to score: a first token is context only"
        )
    return windows
