"""Makes what perplexity is computed over: a data set as one row of tokens, and the windows in which a model sees it.

Modes, and where their definitions come from:

- `windows`: documents, a separator after each, are joined and cut into windows of L tokens that do not overlap; the
  first token of a window is context only. It is the view that finetuning trains on (`data/`).
- `sliding`: windows of L tokens, each S further; a window scores what the one before it did not reach, so every token
  but the first is scored once, with at least L - S tokens of context (transformers' documentation, "Perplexity of
  fixed-length models"). Over the corpus, or each document by itself.
- `rolling`: each document by itself, after a prefix token (BOS, else EOS), in windows of L predicted tokens with one
  token of context; the last window has as much context as fits (lm-evaluation-harness, `loglikelihood_rolling` in
  lm_eval/models/huggingface.py and `get_rolling_token_windows` in lm_eval/utils.py).
- `answers`: prompts with completions, or chats; only what finetuning trains on is scored.

A new mode is a function here, its line in TEXT_MODES or ANSWER_MODES, and its line in this list and in the README.

Words are counted as `re.split(r"\\s+", text)`, bytes in UTF-8, as lm-evaluation-harness does for word and byte
perplexity.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, pairwise

import numpy as np
from transformers import PreTrainedTokenizerBase

from dsft.config.options import EvalConfig
from dsft.data.formats import Chat, EmptyAnswer, Pair, Text, canonical, text_of
from dsft.data.sequences import IGNORED, Sequence, sequence
from dsft.data.sources import BATCH_ROWS, FormattedSource
from dsft.data.tokenization import closes_texts, encode, tokenise
from dsft.errors import UserError, nearest

Spans = Iterable[tuple[int, int, int]]
"""start, end and scored_from of windows."""


@dataclass(kw_only=True)
class Windows:
    """Holds the tokens of all documents one after the other, and slices of them.

    Window w feeds tokens[start : end - 1] and predicts tokens[scored_from : end], of which those with `scorable` count.
    """

    tokens: np.ndarray
    """[F] int32."""
    scorable: np.ndarray
    """[F] bool; false for prefix tokens and what is masked in training."""
    document_starts: np.ndarray
    """[D] int64: where each document begins in `tokens`."""
    spans: np.ndarray
    """[W, 3] int64: start, end, scored_from."""
    document_bytes: np.ndarray
    """[D] int64: UTF-8 bytes of each document's scored text."""
    document_words: np.ndarray
    """[D] int64."""
    mode: str = "training"
    truncated_documents: int = 0
    """Answers cut to seq_len; their cut-off tokens are not scored."""

    @property
    def lengths(self) -> np.ndarray:
        """Return [W]: tokens that each window feeds to the model."""
        return self.spans[:, 1] - self.spans[:, 0] - 1

    def inputs_and_targets(self, window: int) -> tuple[np.ndarray, np.ndarray]:
        """Return ([T], [T]) of a window: fed tokens, and for each position the token to predict or -100."""
        start, end, scored_from = self.spans[window]
        targets = np.where(self.scorable[start + 1 : end], self.tokens[start + 1 : end], IGNORED)
        targets[: scored_from - start - 1] = IGNORED
        return self.tokens[start : end - 1], targets

    def content(self) -> Iterator[np.ndarray]:
        """Yield all that a result depends on, to be hashed."""
        yield from (self.tokens, self.scorable, self.document_starts, self.spans)
        yield from (self.document_bytes, self.document_words)

    def pieces(self, window: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (documents, scored tokens of each) in a window, in order: what its sum of nats is split into."""
        _, end, scored_from = self.spans[window]
        scored = np.arange(scored_from, end)[self.scorable[scored_from:end]]
        return np.unique(np.searchsorted(self.document_starts, scored, side="right") - 1, return_counts=True)


def words_in(text: str) -> int:
    """Count words as lm-evaluation-harness (lm_eval/tasks/wikitext/preprocess_wikitext.py)."""
    return len(re.split(r"\s+", text))


def check_mode(mode: str, problems: list[str]) -> None:
    """Add to `problems` a mode that there is not."""
    modes = ("auto", *TEXT_MODES, *ANSWER_MODES)
    if mode not in modes:
        problems.append(f"mode: {mode!r} is none of {', '.join(modes)}{nearest(mode, modes)}")


def build_windows(data: FormattedSource, config: EvalConfig, tokenizer: PreTrainedTokenizerBase) -> Windows:
    """Make the windows of the rows of `data` as `config` says.

    Raises:
        UserError: where mode and data do not go together, or nothing can be scored.
    """
    modes = TEXT_MODES if data.rules.is_text else ANSWER_MODES
    mode = next(iter(modes)) if config.mode == "auto" else config.mode
    if mode not in modes:
        *first, last = modes
        names = f"{', '.join(first)} or {last}" if first else last
        raise UserError([f"mode={mode} does not fit the data, which holds {data.rules.format}; use {names}"])
    windows = modes[mode](data, config, tokenizer)
    windows.mode = mode
    if not any(len(windows.pieces(window)[0]) for window in range(len(windows.spans))):
        raise UserError(
            [f"data: {len(windows.document_starts)} documents give no token to score: a first token is context only"]
        )
    return windows


def read_samples(
    data: FormattedSource, config: EvalConfig, tokenizer: PreTrainedTokenizerBase
) -> Iterator[Text | Pair | Chat | None]:
    """Yield the rows in their canonical form, each piece of a text file by itself; None for a row without an answer.

    Raises:
        UserError: with file and line of a row that cannot be used.
    """
    documents = 0
    for batch in data.batches():
        for row in batch.rows:
            try:
                sample = canonical(row, data.rules, has_template=bool(tokenizer.chat_template))
            except EmptyAnswer:
                sample = None
            except ValueError as error:
                raise UserError([f"data: {batch.where(row)}: {error}"]) from None
            yield sample
            documents += sample.ends_document if isinstance(sample, Text) else 1
            if documents == config.max_documents:
                return


def read_texts(data: FormattedSource, config: EvalConfig, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the full documents of a source of texts."""
    texts, pieces = [], []
    for sample in read_samples(data, config, tokenizer):
        pieces.append(sample.text)
        if sample.ends_document:
            texts.append("".join(pieces))
            pieces = []
    return texts


def _windows(data: FormattedSource, config: EvalConfig, tokenizer: PreTrainedTokenizerBase) -> Windows:
    texts = read_texts(data, config, tokenizer)
    return _of_corpus(texts, config, tokenizer, partial(disjoint_spans, length=config.seq_len))


def _sliding(data: FormattedSource, config: EvalConfig, tokenizer: PreTrainedTokenizerBase) -> Windows:
    texts, stride = read_texts(data, config, tokenizer), config.stride or config.seq_len // 2
    of_texts = _of_documents if config.scope == "document" else _of_corpus
    return of_texts(texts, config, tokenizer, partial(sliding_spans, length=config.seq_len, stride=stride))


def _rolling(data: FormattedSource, config: EvalConfig, tokenizer: PreTrainedTokenizerBase) -> Windows:
    texts = read_texts(data, config, tokenizer)
    prefix = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    spans_of = partial(rolling_spans, length=config.seq_len)
    windows = _of_documents(texts, config, tokenizer, spans_of, prefix=[prefix])
    windows.scorable[windows.document_starts] = False  # the prefix token
    return windows


def _of_documents(
    texts: list[str],
    config: EvalConfig,
    tokenizer: PreTrainedTokenizerBase,
    spans_of: Callable[[int, int], Spans],
    *,
    prefix: Iterable[int] = (),
) -> Windows:
    """Cut each document by itself."""
    before = np.array([*prefix], dtype=np.int32)
    tokens, starts = _concatenate(np.append(before, ids) for ids in _encode(texts, config, tokenizer))
    ends = np.append(starts[1:], len(tokens))
    spans = (span for start, end in zip(starts, ends, strict=True) for span in spans_of(start, end))
    return _of_texts(texts, tokens, starts, spans)


def _of_corpus(
    texts: list[str], config: EvalConfig, tokenizer: PreTrainedTokenizerBase, spans_of: Callable[[int, int], Spans]
) -> Windows:
    """Cut all documents as one text, with the separator between them."""
    separator = "" if config.separator in ("eos", "none") else config.separator
    # Each document but the first carries the separator before it.
    separated = [separator + text if index else text for index, text in enumerate(texts)] if separator else texts
    documents = _encode(separated, config, tokenizer)
    is_closed = config.bos == "auto" and closes_texts(tokenizer)  # by the tokenizer itself
    if config.separator == "eos" and tokenizer.eos_token_id is not None and not is_closed:
        end = np.int32(tokenizer.eos_token_id)
        documents = (np.append(ids, end) if len(ids) else ids for ids in documents)
    tokens, starts = _concatenate(documents)
    return _of_texts(texts, tokens, starts, spans_of(0, len(tokens)))


def _of_texts(texts: list[str], tokens: np.ndarray, starts: np.ndarray, spans: Spans) -> Windows:
    return Windows(
        tokens=tokens,
        scorable=np.ones(len(tokens), dtype=bool),
        document_starts=starts,
        spans=np.fromiter(chain.from_iterable(spans), dtype=np.int64).reshape(-1, 3),
        document_bytes=np.array([len(text.encode()) for text in texts]),
        document_words=np.array([words_in(text) for text in texts]),
    )


def _encode(texts: list[str], config: EvalConfig, tokenizer: PreTrainedTokenizerBase) -> Iterator[np.ndarray]:
    """Yield the token ids of each document [T] int32, with BOS where the options ask for it."""
    if config.bos == "on" and tokenizer.bos_token_id is None:
        raise UserError([f"bos=on: the tokenizer {tokenizer.name_or_path} has no BOS token; use auto or off"])
    bos = [tokenizer.bos_token_id] if config.bos == "on" else []
    for start in range(0, len(texts), BATCH_ROWS):  # as Python lists, tokens take many times the room of the text
        for ids in encode(tokenizer, texts[start : start + BATCH_ROWS], special=config.bos == "auto"):
            yield np.array([*bos, *ids], dtype=np.int32)


def disjoint_spans(start: int, end: int, length: int) -> Spans:
    """Yield windows over tokens[start:end] one after the other; the first token of each is context."""
    for begin in range(start, end, length):
        yield begin, min(begin + length, end), begin + 1


def rolling_spans(start: int, end: int, length: int) -> Spans:
    """Yield windows over tokens[start:end], whose first token is the prefix."""
    predicted_to = start + 1
    while predicted_to < end:
        stop = min(predicted_to + length, end)
        # At least one token of context; the last window is filled up with context (but the first starts at the prefix).
        yield max(start, min(predicted_to - 1, stop - length - 1)), stop, predicted_to
        predicted_to = stop


def sliding_spans(start: int, end: int, length: int, stride: int) -> Spans:
    """Yield windows over tokens[start:end], each `stride` further, none scoring what an earlier one did."""
    scored_to = start + 1
    for begin in range(start, end, stride):
        stop = min(begin + length, end)
        if scored_to < stop:
            yield begin, stop, scored_to
        scored_to = max(scored_to, stop)
        if stop == end:
            return


def _answers(data: FormattedSource, config: EvalConfig, tokenizer: PreTrainedTokenizerBase) -> Windows:
    texts = [text_of(sample) if sample else "" for sample in read_samples(data, config, tokenizer)]
    sequences: list[Sequence] = []
    counts: Counter = Counter()
    for batch in data.batches():
        rows = batch.rows[: len(texts) - len(sequences)]
        try:
            tokens = tokenise(replace(batch, rows=rows), data.rules, tokenizer)
        except UserError as error:
            raise UserError([f"data: {problem}" for problem in error.problems]) from None
        counts += tokens.counts
        sequences += [
            sequence(tokens.ids[start:end], tokens.trained[start:end]) for start, end in pairwise([0, *tokens.ends])
        ]
    for index, item in enumerate(sequences):
        scored = item["labels"] != IGNORED
        if not scored.any():
            texts[index] = ""
        elif len(item["input_ids"]) == config.seq_len or config.train_on in ("all", "last"):
            texts[index] = tokenizer.decode(item["input_ids"][scored], skip_special_tokens=True)
    windows = windows_of_sequences(sequences)
    windows.document_bytes = np.array([len(text.encode()) for text in texts])
    windows.document_words = np.array([words_in(text) for text in texts])
    windows.truncated_documents = counts["truncated"]
    return windows


TEXT_MODES = {"windows": _windows, "sliding": _sliding, "rolling": _rolling}
ANSWER_MODES = {"answers": _answers}
"""Name of a mode -> its windows of texts, or of prompts with completions and chats. `auto` takes the first."""


def windows_of_sequences(sequences: Iterable[Sequence]) -> Windows:
    """Make a document and a window of each sequence, as training has them."""
    sequences = list(sequences)
    tokens, starts = _concatenate(item["input_ids"] for item in sequences)
    labels, _ = _concatenate(item["labels"] for item in sequences)
    ends = np.append(starts[1:], len(tokens))
    scorable = labels != IGNORED
    scorable[starts] = False  # nothing stands before it
    zeros = np.zeros(len(starts), dtype=np.int64)
    return Windows(
        tokens=tokens,
        scorable=scorable,
        document_starts=starts,
        spans=np.stack([starts, ends, np.minimum(starts + 1, ends)], axis=1),
        document_bytes=zeros,
        document_words=zeros,
    )


def _concatenate(documents: Iterable[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    arrays = [np.asarray(ids, dtype=np.int32) for ids in documents]
    starts = np.cumsum([0, *(len(array) for array in arrays)], dtype=np.int64)[:-1]
    return np.concatenate(arrays) if arrays else np.zeros(0, dtype=np.int32), starts
