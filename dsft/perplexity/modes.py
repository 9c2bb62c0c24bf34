"""Defines what is scored: the windows in which a model sees the tokens of documents, and which of these count. `--mode`
names a `Mode` by what it does, `--protocol` by the paper or tool that reports "the perplexity" of a model so; each
length of `--context_curve` is one too. The docstring of its function is the exact definition.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from dsft.config.options import EvalConfig
from dsft.errors import UserError, nearest
from dsft.perplexity.windows import Windows
from dsft.units import token_counts

if TYPE_CHECKING:
    from dsft.data.prepare import Store

WITHOUT_POSITIONS = 2048
"""Tokens of a window where a model has no positions (DEFAULT_MAX_LENGTH in lm_eval/models/utils.py)."""
CONTEXT = "context"  # the mode of `context_curve`; context-512 is the protocol of its length 512
Spans = Iterable[tuple[int, int, int]]  # start, end and scored_from of windows
Prepared = Callable[..., "Store"]
"""Prepares the data set, or finds it prepared: as a kind of `documents.py` with these fields."""


def cut(store: "Store", spans_of: Callable[[int, int], Spans], *, each_document: bool = False) -> Windows:
    """Cut all documents as one text, or each by itself. `spans_of`: (start, end) of a text -> its windows."""
    texts = pairwise(chain([0], map(int, store.ends))) if each_document else [(0, len(store.tokens))]
    spans = chain.from_iterable(span for start, end in texts for span in spans_of(start, end))
    return Windows(
        tokens=store.tokens,
        scorable=store.trained,
        document_ends=store.ends,
        spans=np.fromiter(spans, dtype=np.int64).reshape(-1, 3),
        document_bytes=store.document_bytes,
        document_words=store.document_words,
        document_hashes=store.hashes,
        known_hashes={"tokens": store.facts["tokens_hash"]},
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


def _windows(config: EvalConfig, prepared: Prepared) -> Windows:
    """Documents, a separator after each, are joined and cut into windows of L tokens that do not overlap. The first
    token of a window is context only. It is the view that finetuning trains on (`data/`), which has no empty texts.
    """
    store = prepared("texts", bos=config.bos, separator=config.separator)
    return cut(store, partial(disjoint_spans, length=config.seq_len))


def _sliding(config: EvalConfig, prepared: Prepared) -> Windows:
    """Windows of L tokens, each S further. A window scores what the one before it did not reach, so every token but the
    first is scored once, with at least L - S tokens of context (transformers' documentation, "Perplexity of
    fixed-length models"). Over the corpus, or each document by itself.
    """
    spans_of = partial(sliding_spans, length=config.seq_len, stride=config.stride or config.seq_len // 2)
    if config.scope == "document":
        return cut(prepared("texts", bos=config.bos), spans_of, each_document=True)
    return cut(prepared("texts", bos=config.bos, separator=config.separator), spans_of)


def _rolling(config: EvalConfig, prepared: Prepared) -> Windows:
    """Each document by itself, after a prefix token (BOS, else EOS), in windows of L predicted tokens with one token of
    context. The last window has as much context as fits. A BOS that the tokenizer puts before a text is that prefix.
    """
    store = prepared("texts", bos=config.bos, prefix="once")
    return cut(store, partial(rolling_spans, length=config.seq_len), each_document=True)


def _lm_eval(config: EvalConfig, prepared: Prepared, **fields: Any) -> Windows:
    """As rolling, but a BOS that the tokenizer puts before a text comes after the prefix and is scored, as it is by
    lm-evaluation-harness (`loglikelihood_rolling` in lm_eval/models/huggingface.py and `get_rolling_token_windows` in
    lm_eval/utils.py, version 0.4.13).
    """
    store = prepared("texts", bos="auto", prefix="always", **fields)
    return cut(store, partial(rolling_spans, length=config.seq_len), each_document=True)


def _answers(config: EvalConfig, prepared: Prepared) -> Windows:
    """Prompts with completions, or chats: only what finetuning trains on is scored."""
    store = prepared("answers")
    windows = cut(store, lambda start, end: [(start, end, min(start + 1, end))], each_document=True)
    windows.truncated_documents = store.counts["truncated"]
    return windows


def _gptq(
    config: EvalConfig,
    prepared: Prepared,
    scored_from: int = 1,
    most_documents: int | None = None,
    most_windows: int | None = None,
    **fields: Any,
) -> Windows:
    """All texts joined by two newlines and tokenised once, BOS as the tokenizer adds it. Windows of 2,048 tokens, or
    the model's positions where these are fewer, do not overlap. What does not fill a window is dropped, and the first
    token of a window is context only. `llama_eval` in llama.py of IST-DASLab/gptq and its `get_wikitext2`, of which
    many papers on quantisation carry copies. Its ptb-new and c4-new join by a blank instead (`get_ptb_new` and
    `get_c4_new` in datautils.py), and c4-new takes the first 1,100 documents and of them 256 windows at most.
    """
    if most_documents:
        fields["max_documents"] = min(most_documents, config.max_documents or most_documents)
    store = prepared("joined", **fields)
    if len(store.tokens) < config.seq_len:
        raise UserError(
            f"protocol={config.protocol} drops what does not fill a window of seq_len={config.seq_len} tokens, and"
            f" the data has {len(store.tokens):,}; use more data, a smaller seq_len or protocol dsft"
        )
    windows = cut(store, partial(disjoint_spans, length=config.seq_len, scored_from=scored_from, full=True))
    windows.spans = windows.spans[:most_windows]
    return _without_sizes(windows)


def _llama_cpp(config: EvalConfig, prepared: Prepared) -> Windows:
    """The text tokenised once, in windows of 512 tokens; BOS replaces the first of each where the tokenizer adds one.
    The tokens behind the middle are scored, and what does not fill a window is dropped. `perplexity` in
    tools/perplexity/perplexity.cpp of ggml-org/llama.cpp. That tool reads one file: a .txt file is taken as it is,
    other data is joined by two newlines.
    """
    return _gptq(config, prepared, scored_from=config.seq_len // 2 + 1)


def _hf(config: EvalConfig, prepared: Prepared) -> Windows:
    """Joined and tokenised as gptq, in sliding windows of 1,024 tokens, or the model's positions where these are fewer,
    each 512 further (`stride`). "Perplexity of fixed-length models" in the documentation of transformers. Its code
    weighs the mean of a window with one token less than the window scores, but for the first window; so does this.
    """
    store = prepared("joined")
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


def _context(config: EvalConfig, prepared: Prepared) -> Windows:
    """The last L tokens of each document. For every length half as many tokens as the shortest length are scored.
    Documents shorter than the longest length are left out.
    """
    store = prepared("texts", bos=config.bos)
    lengths = token_counts(config.context_curve)
    longest_document = np.diff(store.ends, prepend=0).max(initial=0)
    if longest_document < lengths[-1]:
        raise UserError(
            f"context_curve={config.context_curve}: needs documents of {lengths[-1]:,} tokens or more, and the"
            f" longest here has {longest_document:,}; use shorter contexts, or longer documents"
        )
    scored = lengths[0] // 2

    def spans_of(start: int, end: int) -> Spans:
        return [(end - config.seq_len, end, end - scored)] if end - start >= lengths[-1] else []

    return _without_sizes(cut(store, spans_of, each_document=True))


def _without_sizes(windows: Windows) -> Windows:
    # Part of the text is not scored, and how many bytes that part has is not known.
    windows.document_bytes = windows.document_words = np.zeros(len(windows.document_ends), dtype=np.int64)
    return windows


@dataclass(frozen=True, kw_only=True)
class Mode:
    windows: Callable[[EvalConfig, Prepared], Windows] | None  # None: those of the option `mode`
    named_by: Literal["mode", "protocol", "context_curve"]  # the option that asks for it
    options: tuple[str, ...] = ()
    """Of EvalConfig, that decide what is scored with which context, beside mode, protocol and seq_len."""
    is_text: bool = True  # whether it is of texts, else of prompts with completions and chats
    scores_text_alone: bool = False
    """All bytes of the texts are scored, and no token that a tokenizer puts before or between them."""
    bos_replaces_first: bool = False
    """BOS is fed in place of the first token of every window, where the tokenizer puts one before a text."""
    source: str = ""  # where a protocol is defined
    is_of_one_set: bool = False  # it is defined for one data set, so `protocol: all` leaves it out
    seq_len: int | None = None
    """Of a protocol: tokens of a window where the user names none; at most the model's positions, which None takes."""


GPTQ, HARNESS = "IST-DASLab/gptq, ", "EleutherAI/lm-evaluation-harness"
MODES = {
    "windows": Mode(named_by="mode", windows=_windows, options=("bos", "separator")),
    "sliding": Mode(named_by="mode", windows=_sliding, options=("stride", "scope", "bos", "separator")),
    "rolling": Mode(named_by="mode", windows=_rolling, options=("bos",), scores_text_alone=True),
    "answers": Mode(named_by="mode", windows=_answers, options=("too_long",), is_text=False),
    "gptq": Mode(named_by="protocol", windows=_gptq, source=f"{GPTQ}llama.py", seq_len=2048),
    "gptq-ptb-new": Mode(
        named_by="protocol",
        windows=partial(_gptq, separator=" "),
        source=f"{GPTQ}get_ptb_new in datautils.py",
        is_of_one_set=True,
        seq_len=2048,
    ),
    "gptq-c4-new": Mode(
        named_by="protocol",
        windows=partial(_gptq, separator=" ", most_documents=1100, most_windows=256),
        source=f"{GPTQ}get_c4_new in datautils.py",
        is_of_one_set=True,
        seq_len=2048,
    ),
    "llama.cpp": Mode(
        named_by="protocol",
        windows=_llama_cpp,
        bos_replaces_first=True,
        source="ggml-org/llama.cpp, tools/perplexity",
        seq_len=512,
    ),
    # Both report word and byte perplexity and bits per byte.
    "lm-eval": Mode(named_by="protocol", windows=_lm_eval, source=f"{HARNESS}, loglikelihood_rolling"),
    # The task wikitext, whose pages the harness rewrites; it counts bytes and words of the page before that.
    "lm-eval-wikitext-2.0": Mode(
        named_by="protocol",
        windows=partial(_lm_eval, is_wikitext=True),
        source=f"{HARNESS} 0.4.13, task wikitext, version 2.0",
        is_of_one_set=True,
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
CHOICES = {"mode": ("auto", *NAMED_BY["mode"]), "protocol": (*NAMED_BY["protocol"], "all")}
"""Option of EvalConfig -> the values that a user may choose, for help, completion and checks."""
WINDOW_OPTIONS = tuple(dict.fromkeys(name for mode in MODES.values() for name in mode.options))
"""All options that some mode reads: part of every result's fingerprint."""


def find_mode(name: str) -> Mode:
    """Return the mode, protocol, or length of context (context-512) of this name."""
    return MODES[CONTEXT if name.startswith(f"{CONTEXT}-") else name]


def mode_problems(config: EvalConfig) -> list[str]:
    """List unknown modes and protocols, and options that exclude each other."""
    problems = [
        f"{option}: invalid choice {value!r} (choose from {', '.join(choices)}){nearest(value, choices)}"
        for option, choices in CHOICES.items()
        if (value := getattr(config, option)) not in (None, *choices)
    ]
    changed = {field.name: value for field in fields(config) if (value := getattr(config, field.name)) != field.default}
    *others, by = [name for name in NAMED_BY if name in ("mode", *changed)]  # the last of these asks
    asked = getattr(config, by)
    of_modes, of_asked = (
        {name for mode in NAMED_BY[option] if MODES[mode].is_text for name in MODES[mode].options}
        for option in ("mode", by)
    )
    problems += [
        f"{by}={asked} and {name}={changed[name]} are both set; keep one"
        for name in (*others, *sorted(of_modes - of_asked))
        if name in changed
    ]
    if by != "context_curve":
        some = {"auto": ["windows", "answers"], "all": NAMED_BY["protocol"]}.get(asked, [asked])
        for name in ("stride", "scope") if not problems else ():
            if name in changed and not any(name in MODES[each].options for each in some):
                # Else windows that do not slide are scored, whose perplexity is another one.
                reading = " or ".join(f"{each.named_by} {mode}" for mode, each in MODES.items() if name in each.options)
                problems.append(
                    f"{name}={changed[name]}: {by}={asked} does not read it; use {reading}, or leave it out"
                )
        return problems
    try:
        lengths = token_counts(asked)
    except ValueError as error:
        return [*problems, f"context_curve={asked}: {error}; write for example 512,1k,2k"]
    if len(lengths) < 2 or lengths[0] < 2:
        problems.append(f"context_curve={asked}: name at least two lengths of 2 tokens or more, as in 512,1k,2k")
    elif config.batch_tokens is not None and config.batch_tokens < lengths[-1]:
        problems.append(
            f"batch_tokens={config.batch_tokens} is less than the longest context of context_curve; raise it"
        )
    return problems


def protocol_configs(config: EvalConfig, positions: int | None) -> list[EvalConfig]:
    """Return the options of each protocol, or length of context, that is asked for; the options alone where none is.
    Args: `positions`: of the model; None where there is no limit.
    """
    if config.context_curve:
        lengths = token_counts(config.context_curve)
        return [replace(config, protocol=f"{CONTEXT}-{length}", seq_len=length) for length in lengths]
    every = [name for name in NAMED_BY["protocol"] if not MODES[name].is_of_one_set]
    configs = []
    for name in every if config.protocol == "all" else [config.protocol]:
        length = config.seq_len
        if name in NAMED_BY["protocol"] and not config.has_seq_len:
            length = MODES[name].seq_len or positions or WITHOUT_POSITIONS
            length = min(length, positions or length)
        configs.append(replace(config, protocol=name, seq_len=length))
    return configs
