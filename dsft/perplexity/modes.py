"""Defines what is scored: a data set as one row of tokens, memory-mapped from a store on disk, the windows in which a
model sees it, 24 bytes each, and the tokens in them that count.

`--mode` names a `Mode` by what it does, `--protocol` by the paper or tool that reports "the perplexity" in this way.
The docstring of its function is the exact definition.
"""

import functools
import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, pairwise
from typing import TYPE_CHECKING

import numpy as np

from dsft.config.options import EvalConfig
from dsft.errors import UserError
from dsft.units import IGNORED

if TYPE_CHECKING:  # options are checked against the modes before torch and transformers load
    from dsft.data.epoch import Sequences
    from dsft.data.tokens import Store

WITHOUT_POSITIONS = 2048
"""Window length for a model without positions (DEFAULT_MAX_LENGTH in lm_eval/models/utils.py)."""
Spans = Iterable[tuple[int, int, int]]  # start, end and scored_from of windows
Prepare = Callable[..., "Store"]  # returns the prepared data set, for a kind in `documents.py` and its fields


@dataclass(kw_only=True)
class Windows:
    """The concatenated tokens of all documents, and windows over them.

    Window w feeds tokens[start : end - 1] and predicts tokens[scored_from : end]; those with `scorable` count.
    """

    tokens: np.ndarray  # [F] uint16 or int32, memory-mapped if they come from a store
    scorable: np.ndarray  # [F] bool; False for prefix tokens and tokens that training masks
    document_ends: np.ndarray  # [D] int64: end of each document in `tokens`
    spans: np.ndarray  # [W, 3] int64: start, end, scored_from
    document_bytes: np.ndarray  # [D] int64: UTF-8 bytes of the part of each document's text that is scored
    document_words: np.ndarray  # [D] int64
    document_hashes: np.ndarray  # [D] uint64, of the texts, independent of the tokenizer; empty in training
    mode: str = "training"
    truncated_documents: int = 0  # answers truncated to seq_len; tokens beyond are not scored
    first_token: int | None = None  # fed in place of the first token of every window
    tokens_hash: str = ""  # of all tokens, from the store
    weights: np.ndarray | None = None
    """[W] float64: a protocol's weight for the tokens of each window; None for equal weights."""

    @property
    def lengths(self) -> np.ndarray:
        """[W]: number of tokens that each window feeds to the model."""
        return self.spans[:, 1] - self.spans[:, 0] - 1

    @property
    def document_starts(self) -> np.ndarray:
        return np.concatenate([[0], self.document_ends])[:-1]

    def excerpts(self, tokens: int) -> list[list[int]]:
        """Return up to `tokens` of each document, half of them before the first scorable one."""
        excerpts = []
        for start, end in zip(self.document_starts, self.document_ends, strict=True):
            first = start
            if end > start:
                first += int(self.scorable[start:end].argmax())
            begin = max(start, first - tokens // 2)
            excerpts.append(self.tokens[begin : min(begin + tokens, end)].tolist())
        return excerpts

    def documents_of(self, places: np.ndarray) -> np.ndarray:
        """Return the indices of the documents that contain these positions in `tokens`."""
        return np.searchsorted(self.document_ends, places, side="right")

    def inputs_and_targets(self, window: int) -> tuple[np.ndarray, np.ndarray]:
        """Return ([T], [T]) for a window: the input tokens, and for each position the token to predict or -100."""
        start, end, scored_from = self.spans[window]
        tokens = np.asarray(self.tokens[start:end], dtype=np.int64)
        targets = np.where(self.scorable[start + 1 : end], tokens[1:], IGNORED)
        targets[: scored_from - start - 1] = IGNORED
        if self.first_token is not None:
            tokens[0] = self.first_token
        return tokens[:-1], targets

    def hashes(self) -> dict[str, str]:
        """Hash the texts, their tokens, and the windows: together all data that a result depends on."""
        first_token = self.first_token
        if first_token is None:
            first_token = -1
        texts = hashlib.sha256(
            np.ascontiguousarray(self.document_hashes)
        )  # not of the text that a tokenizer makes scorable
        windows = hashlib.sha256(np.ascontiguousarray(self.spans))
        windows.update(np.array([first_token]))
        return {"texts": texts.hexdigest(), "tokens": self.tokens_hash, "windows": windows.hexdigest()}

    def scored_bytes(self, bytes_V: np.ndarray, blank: int) -> np.ndarray:
        """Return [D] `document_bytes` without those of tokens that no window scores. Args: `bytes_V`: UTF-8 bytes of
        each token's text; `blank`: how many of them a document's first token does not have.
        """
        is_unscored = np.ones(len(self.tokens), bool)
        for _, end, scored_from in self.spans:
            is_unscored[scored_from:end] = False
        places = np.flatnonzero(is_unscored)
        documents = self.documents_of(places)
        is_first = places == self.document_starts[documents]
        unscored = np.maximum(bytes_V[self.tokens[places]] - blank * is_first, 0)
        unscored_D = np.bincount(documents, unscored, len(self.document_ends)).astype(np.int64)
        return np.maximum(self.document_bytes - unscored_D, 0)

    def scored_places(self, window: int) -> np.ndarray:
        """Return the positions in `tokens` of a window's scored tokens, in order."""
        _, end, scored_from = self.spans[window]
        return np.arange(scored_from, end)[self.scorable[scored_from:end]]


@functools.lru_cache(maxsize=1)
def windows_of_held_out(held_out: "Sequences") -> Windows:
    """Return a window for each sequence of a training's held-out data, once for all of its evaluations. Intervals are
    over documents; a window may contain several, or a part of one.
    """
    stores = held_out.stores
    befores = np.cumsum([0, *(len(store.tokens) for store in stores)])
    starts = held_out.starts + befores[held_out.places]
    ends = held_out.ends + befores[held_out.places]
    scored_from = np.minimum(starts + 1, ends)
    document_ends = [store.row_ends + before for store, before in zip(stores, befores, strict=False)]
    sizes = np.zeros(sum(map(len, document_ends)), dtype=np.int64)
    return Windows(
        tokens=np.concatenate([store.tokens for store in stores]),
        scorable=np.concatenate([store.trained for store in stores]),
        document_ends=np.concatenate(document_ends),
        spans=np.stack([starts, ends, scored_from], axis=1),
        document_bytes=sizes,
        document_words=sizes,
        document_hashes=np.zeros(0, dtype=np.uint64),
    )


def cut(store: "Store", spans_of: Callable[[int, int], Spans], *, each_document: bool = False) -> Windows:
    """Cut all documents as one text, or each separately, into windows. `spans_of`: (start, end) of a text -> its
    windows. A chat may have several texts, in which answers are scored.
    """
    texts = [(0, len(store.tokens))]
    if each_document:
        texts = pairwise(chain([0], map(int, store.ends)))
    spans = chain.from_iterable(spans_of(start, end) for start, end in texts)
    return Windows(
        tokens=store.tokens,
        scorable=store.trained,
        document_ends=store.row_ends,
        spans=np.fromiter(spans, dtype=(np.int64, 3)),
        **store.documents,
        tokens_hash=store.facts["tokens_hash"],
        truncated_documents=store.counts["truncated"],
    )


def disjoint_spans(start: int, end: int, length: int, *, scored_from: int = 1, full: bool = False) -> Spans:
    """Yield windows over tokens[start:end] without overlap. Args: `scored_from`: position in the window of the first
    scored token; those before it are context; `full`: leave out a last window that is not full.
    """
    for begin in range(start, end - length + 1 if full else end, length):
        yield begin, min(begin + length, end), begin + scored_from


def rolling_spans(start: int, end: int, length: int) -> Spans:
    """Yield windows over tokens[start:end]; the first token is the prefix."""
    predicted_to = start + 1
    while predicted_to < end:
        stop = min(predicted_to + length, end)
        # At least one token of context; the last window is filled up with context, but no earlier than the prefix.
        yield max(start, min(predicted_to - 1, stop - length - 1)), stop, predicted_to
        predicted_to = stop


def sliding_spans(start: int, end: int, length: int, stride: int) -> Spans:
    """Yield windows over tokens[start:end] with this stride; each token is scored in one of them only."""
    scored_to = start + 1
    for begin in range(start, end, stride):
        stop = min(begin + length, end)
        if scored_to < stop:
            yield begin, stop, scored_to
        scored_to = max(scored_to, stop)
        if stop == end:
            return


def _windows(config: EvalConfig, prepare: Prepare) -> Windows:
    """Documents, each followed by a separator, are concatenated and cut into windows of L tokens without overlap. The
    first token of a window is context only. Finetuning trains on the same view (`data/`), which has no empty texts.
    """
    store = prepare("texts", bos=config.bos, separator=config.separator)
    return cut(store, partial(disjoint_spans, length=config.seq_len))


def _sliding(config: EvalConfig, prepare: Prepare) -> Windows:
    """Windows of L tokens with stride S. A window scores the tokens that the one before it did not reach, so every
    token except the first is scored once, with at least L - S tokens of context (transformers' documentation,
    "Perplexity of fixed-length models"). Over the corpus, or each document separately.
    """
    spans_of = partial(sliding_spans, length=config.seq_len, stride=config.stride or config.seq_len // 2)
    if config.scope == "document":
        return cut(prepare("texts", bos=config.bos), spans_of, each_document=True)
    return cut(prepare("texts", bos=config.bos, separator=config.separator), spans_of)


def _rolling(config: EvalConfig, prepare: Prepare) -> Windows:
    """Each document separately, after a prefix token (BOS, else EOS), in windows of L predicted tokens with one token
    of context. The last window has as much context as fits. A BOS that the tokenizer adds to a text is that prefix.
    """
    store = prepare("texts", bos=config.bos, prefix="once")
    return cut(store, partial(rolling_spans, length=config.seq_len), each_document=True)


def _lm_eval(config: EvalConfig, prepare: Prepare) -> Windows:
    """As rolling, but a BOS that the tokenizer adds to a text follows the prefix and is scored, as in
    lm-evaluation-harness (`loglikelihood_rolling` in lm_eval/models/huggingface.py and `get_rolling_token_windows` in
    lm_eval/utils.py, version 0.4.13), which reports word and byte perplexity and bits per byte.
    """
    store = prepare("texts", bos="auto", prefix="always")
    return cut(store, partial(rolling_spans, length=config.seq_len), each_document=True)


def _answers(config: EvalConfig, prepare: Prepare) -> Windows:
    """Prompts with completions, or chats: only the tokens that finetuning trains on are scored."""
    store = prepare("answers")
    return cut(store, lambda start, end: [(start, end, min(start + 1, end))], each_document=True)


def _gptq(config: EvalConfig, prepare: Prepare, scored_from: int = 1) -> Windows:
    """All texts joined by two newlines and tokenised once, BOS as the tokenizer adds it. Windows of 2,048 tokens, or
    the model's positions if these are fewer, without overlap. A rest that does not fill a window is dropped, and the
    first token of a window is context only. `llama_eval` in llama.py of IST-DASLab/gptq and its `get_wikitext2`; many
    papers on quantisation use copies of them.
    """
    store = prepare("joined")
    if len(store.tokens) < config.seq_len:
        raise UserError(
            f"protocol={config.protocol} drops what does not fill a window of seq_len={config.seq_len} tokens, and"
            f" the data has {len(store.tokens):,}; use more data, a smaller seq_len, or no protocol"
        )
    windows = cut(store, partial(disjoint_spans, length=config.seq_len, scored_from=scored_from, full=True))
    # The number of bytes in the part that is not scored is unknown.
    windows.document_bytes = windows.document_words = np.zeros_like(windows.document_bytes)
    return windows


def _llama_cpp(config: EvalConfig, prepare: Prepare) -> Windows:
    """The text tokenised once, in windows of 512 tokens; BOS replaces the first of each if the tokenizer adds one.
    The tokens after the middle are scored, and a rest that does not fill a window is dropped. `perplexity` in
    tools/perplexity/perplexity.cpp of ggml-org/llama.cpp. That tool reads one file: a .txt file is used unchanged,
    other data is joined by two newlines.
    """
    return _gptq(config, prepare, scored_from=config.seq_len // 2 + 1)


def _hf(config: EvalConfig, prepare: Prepare) -> Windows:
    """Joined and tokenised as in gptq, in sliding windows of 1,024 tokens, or the model's positions if these are fewer,
    with `stride` 512. "Perplexity of fixed-length models" in the documentation of transformers. As in its code, the
    mean of each window except the first has the weight of one token less than the window scores.
    """
    store = prepare("joined")
    stride = config.stride or min(512, config.seq_len // 2)
    if stride >= config.seq_len:  # the length may be the model's, which was unknown before
        raise UserError(
            f"stride={stride}: must be less than the {config.seq_len} tokens of a window of protocol={config.protocol}"
        )
    windows = cut(store, partial(sliding_spans, length=config.seq_len, stride=stride))
    scored = windows.spans[:, 1] - windows.spans[:, 2]
    windows.weights = 1 - 1 / np.maximum(scored, 1)
    windows.weights[:1] = 1.0
    return windows


@dataclass(frozen=True, kw_only=True)
class Mode:
    windows: Callable[[EvalConfig, Prepare], Windows]
    is_text: bool = True  # whether it is for texts, else for prompts with completions and chats
    bos_replaces_first: bool = False
    """Whether BOS replaces the first input token of every window, if the tokenizer adds one to a text."""
    seq_len: int | None = None
    """A protocol's default window length, at most the model's positions; None for all positions."""


MODES = {
    "windows": Mode(windows=_windows),
    "sliding": Mode(windows=_sliding),
    "rolling": Mode(windows=_rolling),
    "answers": Mode(windows=_answers, is_text=False),
}
"""Values of the option `mode`. `auto` is the first that fits the data."""
PROTOCOLS = {
    "gptq": Mode(windows=_gptq, seq_len=2048),
    "llama.cpp": Mode(windows=_llama_cpp, bos_replaces_first=True, seq_len=512),
    "lm-eval": Mode(windows=_lm_eval),
    "hf": Mode(windows=_hf, seq_len=1024),
}
"""Values of the option `protocol`. Perplexity is exp of the weighted mean of nats; only hf has weights."""
WINDOW_OPTIONS = ("bos", "separator", "stride", "scope", "too_long")
"""All options that a mode reads: part of every result's fingerprint."""


def find_mode(name: str) -> Mode:
    return (MODES | PROTOCOLS)[name]


def mode_problems(config: EvalConfig) -> list[str]:
    """List options that the mode or protocol does not read, although they would change the perplexity."""
    unread = []
    reader = f"mode={config.mode}"
    if config.protocol:
        reader = f"protocol={config.protocol}"
        unread = ["bos", "mode", "scope", "separator"]
    if config.mode != "sliding" and config.protocol != "hf":
        unread += ["stride", "scope"]
    defaults = EvalConfig()
    problems = []
    for name in dict.fromkeys(unread):
        value = getattr(config, name)
        if value != getattr(defaults, name):
            problems.append(f"{name}={value}: {reader} does not read it; leave it out, or use mode sliding")
    return problems


def protocol_config(config: EvalConfig, positions: int | None) -> EvalConfig:
    """Return the options with their protocol's window length. `positions`: of the model; None if unlimited."""
    if not config.protocol or config.has_seq_len:
        return config
    length = PROTOCOLS[config.protocol].seq_len or positions or WITHOUT_POSITIONS
    return replace(config, seq_len=min(length, positions or length))
