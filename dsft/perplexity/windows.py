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

The tokens come from a store on disk (`documents.py`), which is prepared once and mapped by every rank. A rank itself
holds 24 bytes for each window.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise

import numpy as np
from transformers import PreTrainedTokenizerBase

from dsft.config.options import EvalConfig
from dsft.data.prepare import Preparation, cache_folder, prepare
from dsft.data.sequences import IGNORED, Sequence
from dsft.data.sources import FormattedSource
from dsft.data.token_store import Store
from dsft.errors import UserError, nearest
from dsft.perplexity.documents import Answers, Texts

Spans = Iterable[tuple[int, int, int]]
"""start, end and scored_from of windows."""

Prepared = Callable[[Preparation], Store]
"""Prepares the data set in this way, or finds it prepared."""


@dataclass(kw_only=True)
class Windows:
    """Holds the tokens of all documents one after the other, and slices of them.

    Window w feeds tokens[start : end - 1] and predicts tokens[scored_from : end], of which those with `scorable` count.
    """

    tokens: np.ndarray
    """[F] uint16 or int32, mapped where they come from a store."""
    scorable: np.ndarray
    """[F] bool; false for prefix tokens and what is masked in training."""
    document_ends: np.ndarray
    """[D] int64: where each document ends in `tokens`."""
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
        tokens = np.asarray(self.tokens[start:end], dtype=np.int64)
        targets = np.where(self.scorable[start + 1 : end], tokens[1:], IGNORED)
        targets[: scored_from - start - 1] = IGNORED
        return tokens[:-1], targets

    def content(self) -> Iterator[np.ndarray]:
        """Yield all that a result depends on, to be hashed."""
        yield from (self.tokens, self.scorable, self.document_ends, self.spans)
        yield from (self.document_bytes, self.document_words)

    def pieces(self, window: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (documents, scored tokens of each) in a window, in order: what its sum of nats is split into."""
        _, end, scored_from = self.spans[window]
        scored = np.arange(scored_from, end)[self.scorable[scored_from:end]]
        return np.unique(np.searchsorted(self.document_ends, scored, side="right"), return_counts=True)


def check_mode(mode: str, problems: list[str]) -> None:
    """Add to `problems` a mode that there is not."""
    modes = ("auto", *TEXT_MODES, *ANSWER_MODES)
    if mode not in modes:
        problems.append(f"mode: {mode!r} is none of {', '.join(modes)}{nearest(mode, modes)}")


def build_windows(
    data: FormattedSource, config: EvalConfig, tokenizer: PreTrainedTokenizerBase, *, show_progress: bool = False
) -> Windows:
    """Make the windows of the rows of `data` as `config` says. Who comes first prepares the tokens.

    Args:
        show_progress: of the preparation.

    Raises:
        UserError: where mode and data do not go together, or nothing can be scored.
    """
    modes = TEXT_MODES if data.rules.is_text else ANSWER_MODES
    mode = next(iter(modes)) if config.mode == "auto" else config.mode
    if mode not in modes:
        *first, last = modes
        names = f"{', '.join(first)} or {last}" if first else last
        raise UserError([f"mode={mode} does not fit the data, which holds {data.rules.format}; use {names}"])
    if mode in TEXT_MODES and config.bos == "on" and tokenizer.bos_token_id is None:
        raise UserError([f"bos=on: the tokenizer {tokenizer.name_or_path} has no BOS token; use auto or off"])

    def prepared(preparation: Preparation) -> Store:
        return prepare(
            data.source,
            data.rules,
            tokenizer,
            cache_folder(config),
            held_out=data.held_out,
            preparation=preparation,
            show_progress=show_progress,
        )

    windows = modes[mode](config, prepared)
    windows.mode = mode
    if not any(len(windows.pieces(window)[0]) for window in range(len(windows.spans))):
        raise UserError(
            [f"data: {len(windows.document_ends)} documents give no token to score: a first token is context only"]
        )
    return windows


def _windows(config: EvalConfig, prepared: Prepared) -> Windows:
    return _of_corpus(prepared(_corpus(config)), partial(disjoint_spans, length=config.seq_len))


def _sliding(config: EvalConfig, prepared: Prepared) -> Windows:
    spans_of = partial(sliding_spans, length=config.seq_len, stride=config.stride or config.seq_len // 2)
    if config.scope == "document":
        return _of_documents(prepared(Texts(bos=config.bos, max_documents=config.max_documents)), spans_of)
    return _of_corpus(prepared(_corpus(config)), spans_of)


def _rolling(config: EvalConfig, prepared: Prepared) -> Windows:
    store = prepared(Texts(bos=config.bos, has_prefix=True, max_documents=config.max_documents))
    return _of_documents(store, partial(rolling_spans, length=config.seq_len))


def _answers(config: EvalConfig, prepared: Prepared) -> Windows:
    store = prepared(Answers(max_documents=config.max_documents))
    windows = _of_documents(store, lambda start, end: [(start, end, min(start + 1, end))])
    windows.truncated_documents = store.counts["truncated"]
    return windows


def _corpus(config: EvalConfig) -> Texts:
    return Texts(bos=config.bos, separator=config.separator, max_documents=config.max_documents)


def _of_corpus(store: Store, spans_of: Callable[[int, int], Spans]) -> Windows:
    """Cut all documents as one text."""
    return _of_store(store, spans_of(0, len(store.tokens)))


def _of_documents(store: Store, spans_of: Callable[[int, int], Spans]) -> Windows:
    """Cut each document by itself."""
    return _of_store(
        store, (span for start, end in pairwise(chain([0], map(int, store.ends))) for span in spans_of(start, end))
    )


def _of_store(store: Store, spans: Spans) -> Windows:
    return Windows(
        tokens=store.tokens,
        scorable=store.trained,
        document_ends=store.ends,
        spans=np.fromiter(chain.from_iterable(spans), dtype=np.int64).reshape(-1, 3),
        document_bytes=store.document_bytes,
        document_words=store.document_words,
    )


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


TEXT_MODES = {"windows": _windows, "sliding": _sliding, "rolling": _rolling}
ANSWER_MODES = {"answers": _answers}
"""Name of a mode -> its windows of texts, or of prompts with completions and chats. `auto` takes the first."""


def windows_of_sequences(sequences: Iterable[Sequence]) -> Windows:
    """Make a document and a window of each sequence, as training has them."""
    sequences = list(sequences)
    tokens = np.concatenate([np.zeros(0, np.int32), *(item["input_ids"].astype(np.int32) for item in sequences)])
    scorable = np.concatenate([np.zeros(0, bool), *(item["labels"] != IGNORED for item in sequences)])
    ends = np.cumsum([len(item["input_ids"]) for item in sequences], dtype=np.int64)
    starts = ends - [len(item["input_ids"]) for item in sequences]
    scorable[starts] = False  # nothing stands before it
    zeros = np.zeros(len(starts), dtype=np.int64)
    return Windows(
        tokens=tokens,
        scorable=scorable,
        document_ends=ends,
        spans=np.stack([starts, ends, np.minimum(starts + 1, ends)], axis=1),
        document_bytes=zeros,
        document_words=zeros,
    )
