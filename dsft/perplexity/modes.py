"""Defines what is scored: the windows in which a model sees the tokens of documents, and which of these count. `--mode`
names a `Mode` by what it does, `--protocol` by the paper or tool that reports "the perplexity" of a model so. The
docstring of its function is the exact definition.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import chain, pairwise
from typing import TYPE_CHECKING

import numpy as np

from dsft.config.options import EvalConfig
from dsft.errors import UserError
from dsft.perplexity.windows import Windows

if TYPE_CHECKING:
    from dsft.data.store import Store

WITHOUT_POSITIONS = 2048
"""Tokens of a window if a model has no positions (DEFAULT_MAX_LENGTH in lm_eval/models/utils.py)."""
Spans = Iterable[tuple[int, int, int]]  # start, end and scored_from of windows
Prepare = Callable[..., "Store"]
"""Prepares the data set, or finds it prepared: as a kind of `documents.py` with these fields."""


def cut(store: "Store", spans_of: Callable[[int, int], Spans], *, each_document: bool = False) -> Windows:
    """Cut all documents as one text, or each by itself. `spans_of`: (start, end) of a text -> its windows."""
    texts = [(0, len(store.tokens))]
    if each_document:
        texts = pairwise(chain([0], map(int, store.ends)))
    spans = chain.from_iterable(spans_of(start, end) for start, end in texts)
    spans = chain.from_iterable(spans)
    return Windows(
        tokens=store.tokens,
        scorable=store.trained,
        document_ends=store.ends,
        spans=np.fromiter(spans, dtype=np.int64).reshape(-1, 3),
        document_bytes=store.document_bytes,
        document_words=store.document_words,
        document_hashes=store.hashes,
        tokens_hash=store.facts["tokens_hash"],
    )


def disjoint_spans(start: int, end: int, length: int, *, scored_from: int = 1, full: bool = False) -> Spans:
    """Yield windows over tokens[start:end] one after the other. Args: `scored_from`: place within the window of the
    first scored token; those before it are context; `full`: leave out a last window that is not full.
    """
    for begin in range(start, end - length + 1 if full else end, length):
        yield begin, min(begin + length, end), begin + scored_from


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


def _windows(config: EvalConfig, prepare: Prepare) -> Windows:
    """Documents, a separator after each, are joined and cut into windows of L tokens that do not overlap. The first
    token of a window is context only. It is the view that finetuning trains on (`data/`), which has no empty texts.
    """
    store = prepare("texts", bos=config.bos, separator=config.separator)
    return cut(store, partial(disjoint_spans, length=config.seq_len))


def _sliding(config: EvalConfig, prepare: Prepare) -> Windows:
    """Windows of L tokens, each S further. A window scores what the one before it did not reach, so every token but the
    first is scored once, with at least L - S tokens of context (transformers' documentation, "Perplexity of
    fixed-length models"). Over the corpus, or each document by itself.
    """
    spans_of = partial(sliding_spans, length=config.seq_len, stride=config.stride or config.seq_len // 2)
    if config.scope == "document":
        return cut(prepare("texts", bos=config.bos), spans_of, each_document=True)
    return cut(prepare("texts", bos=config.bos, separator=config.separator), spans_of)


def _rolling(config: EvalConfig, prepare: Prepare) -> Windows:
    """Each document by itself, after a prefix token (BOS, else EOS), in windows of L predicted tokens with one token of
    context. The last window has as much context as fits. A BOS that the tokenizer puts before a text is that prefix.
    """
    store = prepare("texts", bos=config.bos, prefix="once")
    return cut(store, partial(rolling_spans, length=config.seq_len), each_document=True)


def _lm_eval(config: EvalConfig, prepare: Prepare) -> Windows:
    """As rolling, but a BOS that the tokenizer puts before a text comes after the prefix and is scored, as it is by
    lm-evaluation-harness (`loglikelihood_rolling` in lm_eval/models/huggingface.py and `get_rolling_token_windows` in
    lm_eval/utils.py, version 0.4.13). It reports word and byte perplexity and bits per byte.
    """
    store = prepare("texts", bos="auto", prefix="always")
    return cut(store, partial(rolling_spans, length=config.seq_len), each_document=True)


def _answers(config: EvalConfig, prepare: Prepare) -> Windows:
    """Prompts with completions, or chats: only what finetuning trains on is scored."""
    store = prepare("answers")
    windows = cut(store, lambda start, end: [(start, end, min(start + 1, end))], each_document=True)
    windows.truncated_documents = store.counts["truncated"]
    return windows


def _gptq(config: EvalConfig, prepare: Prepare, scored_from: int = 1) -> Windows:
    """All texts joined by two newlines and tokenised once, BOS as the tokenizer adds it. Windows of 2,048 tokens, or
    the model's positions if these are fewer, do not overlap. What does not fill a window is dropped, and the first
    token of a window is context only. `llama_eval` in llama.py of IST-DASLab/gptq and its `get_wikitext2`, of which
    many papers on quantisation carry copies.
    """
    store = prepare("joined")
    if len(store.tokens) < config.seq_len:
        raise UserError(
            f"protocol={config.protocol} drops what does not fill a window of seq_len={config.seq_len} tokens, and"
            f" the data has {len(store.tokens):,}; use more data, a smaller seq_len, or no protocol"
        )
    windows = cut(store, partial(disjoint_spans, length=config.seq_len, scored_from=scored_from, full=True))
    # Part of the text is not scored, and how many bytes that part has is not known.
    windows.document_bytes = np.zeros(len(windows.document_ends), dtype=np.int64)
    windows.document_words = windows.document_bytes
    return windows


def _llama_cpp(config: EvalConfig, prepare: Prepare) -> Windows:
    """The text tokenised once, in windows of 512 tokens; BOS replaces the first of each if the tokenizer adds one.
    The tokens behind the middle are scored, and what does not fill a window is dropped. `perplexity` in
    tools/perplexity/perplexity.cpp of ggml-org/llama.cpp. That tool reads one file: a .txt file is taken as it is,
    other data is joined by two newlines.
    """
    return _gptq(config, prepare, scored_from=config.seq_len // 2 + 1)


def _hf(config: EvalConfig, prepare: Prepare) -> Windows:
    """Joined and tokenised as gptq, in sliding windows of 1,024 tokens, or the model's positions if these are fewer,
    each 512 further (`stride`). "Perplexity of fixed-length models" in the documentation of transformers. Its code
    weighs the mean of a window with one token less than the window scores, but for the first window; so does this.
    """
    store = prepare("joined")
    stride = config.stride or min(512, config.seq_len // 2)
    if stride >= config.seq_len:  # the length may be the model's, which is known only now
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
    options: tuple[str, ...] = ()
    """Of EvalConfig, that decide what is scored with which context, beside mode, protocol and seq_len."""
    is_text: bool = True
    """Whether it is of texts, else of prompts with completions and chats."""
    scores_text_alone: bool = False
    """All bytes of the texts are scored, and no token that a tokenizer puts before or between them."""
    bos_replaces_first: bool = False
    """BOS is fed in place of the first token of every window, if the tokenizer puts one before a text."""
    source: str = ""
    """What defines a protocol."""
    seq_len: int | None = None
    """Of a protocol: tokens of a window if the user names none; at most the model's positions, which None takes."""


MODES = {
    "windows": Mode(windows=_windows, options=("bos", "separator")),
    "sliding": Mode(windows=_sliding, options=("stride", "scope", "bos", "separator")),
    "rolling": Mode(windows=_rolling, options=("bos",), scores_text_alone=True),
    "answers": Mode(windows=_answers, options=("too_long",), is_text=False),
}
"""Values of the option `mode`. `auto` takes the first of texts, or of prompts with completions and chats."""
PROTOCOLS = {
    "gptq": Mode(windows=_gptq, source="IST-DASLab/gptq, llama.py", seq_len=2048),
    "llama.cpp": Mode(
        windows=_llama_cpp, bos_replaces_first=True, source="ggml-org/llama.cpp, tools/perplexity", seq_len=512
    ),
    "lm-eval": Mode(windows=_lm_eval, source="EleutherAI/lm-evaluation-harness, loglikelihood_rolling"),
    "hf": Mode(
        windows=_hf, options=("stride",), source="transformers' documentation, fixed-length models", seq_len=1024
    ),
}
"""Values of the option `protocol`, whose perplexity is exp of its weighted mean of nats; only hf has weights."""
WINDOW_OPTIONS = ("bos", "separator", "stride", "scope", "too_long")
"""All options that some mode reads: part of every result's fingerprint."""


def find_mode(name: str) -> Mode:
    """Return the mode or protocol of this name."""
    return MODES.get(name) or PROTOCOLS[name]


def mode_problems(config: EvalConfig) -> list[str]:
    """List options that exclude each other."""
    problems = []
    changed = {field.name for field in fields(config) if getattr(config, field.name) != field.default}
    protocol = config.protocol
    if protocol:
        refused = {"mode", "scope", "bos", "separator", "stride"} - {*PROTOCOLS[protocol].options}
        for name in sorted(refused & changed):
            problems.append(f"protocol={protocol} and {name}={getattr(config, name)} are both set; keep one")
        return problems
    is_sliding = config.mode == "sliding"
    for name in ("stride", "scope"):
        if name in changed and not is_sliding:
            # Else windows that do not slide are scored, whose perplexity is another one.
            value = getattr(config, name)
            problems.append(f"{name}={value}: mode={config.mode} does not read it; use mode sliding, or leave it out")
    return problems


def protocol_config(config: EvalConfig, positions: int | None) -> EvalConfig:
    """Return the options with the length of window of their protocol. Args: `positions`: of the model; None if there is
    no limit.
    """
    if not config.protocol or config.has_seq_len:
        return config
    length = PROTOCOLS[config.protocol].seq_len or positions or WITHOUT_POSITIONS
    return replace(config, seq_len=min(length, positions or length))
