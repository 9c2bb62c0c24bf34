"""Builds the windows of a data set as the options say: by a mode, or by a protocol, which is what a paper or tool
reports as "the perplexity" of a model. Both are a `Mode`; here is where their definitions come from.

- `windows`: documents, a separator after each, are joined and cut into windows of L tokens that do not overlap; the
  first token of a window is context only. It is the view that finetuning trains on (`data/`).
- `sliding`: windows of L tokens, each S further; a window scores what the one before it did not reach, so every token
  but the first is scored once, with at least L - S tokens of context (transformers' documentation, "Perplexity of
  fixed-length models"). Over the corpus, or each document by itself.
- `rolling`: each document by itself, after a prefix token (BOS, else EOS), in windows of L predicted tokens with one
  token of context; the last window has as much context as fits (lm-evaluation-harness, `loglikelihood_rolling` in
  lm_eval/models/huggingface.py and `get_rolling_token_windows` in lm_eval/utils.py).
- `answers`: prompts with completions, or chats; only what finetuning trains on is scored.

Protocols:

- `gptq`: all texts joined by two newlines and tokenised once, BOS as the tokenizer adds it; windows of 2,048 tokens, or
  the model's positions where these are fewer, that do not overlap. What does not fill a window is dropped, and the
  first token of a window is context only. `llama_eval` in llama.py of IST-DASLab/gptq and its `get_wikitext2`, of which
  many papers on quantisation carry copies.
- `llama.cpp`: the text tokenised once; windows of 512 tokens, the first of each replaced by BOS where the tokenizer
  adds one. The tokens behind the middle are scored, and what does not fill a window is dropped. `perplexity` in
  tools/perplexity/perplexity.cpp of ggml-org/llama.cpp. That tool reads one file: a .txt file is taken as it is, other
  data is joined by two newlines.
- `lm-eval`: each document by itself (mode `rolling`), windows of the model's positions. `loglikelihood_rolling` in
  lm_eval/models/huggingface.py of EleutherAI/lm-evaluation-harness, which reports word and byte perplexity and bits per
  byte. The task wikitext changes its texts first (`wikitext_detokenizer`); give it texts so changed.
- `hf`: joined and tokenised as gptq, sliding windows of 1,024 tokens, or the model's positions where these are fewer,
  each 512 further (`stride`). "Perplexity of fixed-length models" in the documentation of transformers. Its code weighs
  the mean of a window with one token less than the window scores, but for the first window; so does this.
- `dsft`: the options' own defaults: the mode `windows`, or `answers`.
- `context-512`, and so for each length of `context_curve`: the last 512 tokens of each document, of which as many are
  scored for every length. Documents shorter than the longest length are left out.

A protocol's perplexity is exp of its weighted mean of nats; only hf's weights differ from one.

A new mode is a function here with its entry in MODES or PROTOCOLS, its line above and in the README. The entry names
the options of EvalConfig that it reads: they are part of the fingerprint, and results are compared where they agree.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from transformers import PreTrainedTokenizerBase

from dsft.config.options import EvalConfig
from dsft.data.encoding import encode
from dsft.data.formats import FormattedSource
from dsft.data.prepare import Preparation, cache_folder, prepare
from dsft.data.store import Store
from dsft.errors import UserError, nearest
from dsft.perplexity.documents import Answers, JoinedTexts, Texts
from dsft.perplexity.windows import (
    Spans,
    Windows,
    disjoint_spans,
    of_corpus,
    of_documents,
    rolling_spans,
    sliding_spans,
)
from dsft.units import token_counts

Prepared = Callable[[Preparation], Store]
"""Prepares the data set in this way, or finds it prepared."""
HF_STRIDE = 512
CONTEXT = "context-"
"""Before the number of tokens: the protocol of a length of `context_curve`."""


@dataclass(frozen=True, kw_only=True)
class Mode:
    """Says which windows are scored: by the options, or as one tool measures."""

    windows: Callable[[EvalConfig, Prepared, PreTrainedTokenizerBase], Windows] | None
    """None: as the option `mode` says."""
    options: tuple[str, ...] = ()
    """Of EvalConfig, that decide what is scored with which context, beside mode, protocol and seq_len."""
    is_text: bool = True
    """Whether it is of texts, else of prompts with completions and chats."""
    source: str = ""
    """Where a protocol is defined."""
    seq_len: int | None = None
    """Of a protocol: tokens of a window where the user names none; at most the model's positions, which None takes."""


def check_mode(mode: str, problems: list[str]) -> None:
    """Add an unknown mode to `problems`."""
    modes = ("auto", *MODES)
    if mode not in modes:
        problems.append(f"mode: invalid choice {mode!r} (choose from {', '.join(modes)}){nearest(mode, modes)}")


def protocol_configs(config: EvalConfig, positions: int | None) -> list[EvalConfig]:
    """Return the options of each protocol, or length of context, that is asked for; the options alone where none is.

    Args:
        positions: of the model; None where there is no limit.
    """
    if config.context_curve:
        return [
            dataclasses.replace(config, protocol=f"{CONTEXT}{length}", seq_len=length)
            for length in token_counts(config.context_curve)
        ]
    if config.protocol is None:
        return [config]
    names = list(PROTOCOLS) if config.protocol == "all" else [config.protocol]
    configs = []
    for name in names:
        length = config.seq_len
        if not config.has_seq_len:
            length = PROTOCOLS[name].seq_len or positions or config.seq_len
            length = min(length, positions or length)
        configs.append(dataclasses.replace(config, protocol=name, seq_len=length))
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
    fitting = [name for name, mode in MODES.items() if mode.is_text == is_text]
    name = fitting[0] if config.mode == "auto" else config.mode
    if name not in fitting:
        *first, last = fitting
        names = f"{', '.join(first)} or {last}" if first else last
        raise UserError([f"mode={name} does not fit the data, which holds {data.rules.format}; use {names}"])
    if is_text and config.bos == "on" and tokenizer.bos_token_id is None:
        raise UserError([f"bos=on: the tokenizer {tokenizer.name_or_path} has no BOS token; use auto or off"])
    protocol = find_protocol(config.protocol)
    if protocol and protocol.windows:
        if not is_text:
            key = "context_curve" if config.context_curve else f"protocol={config.protocol}"
            raise UserError([f"{key} is of texts, and the data holds {data.rules.format}; leave it out"])
        name, mode = config.protocol, protocol
    else:
        mode = MODES[name]

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

    windows = mode.windows(config, prepared, tokenizer)
    windows.mode = name
    if not windows.has_scored_tokens:
        raise UserError(
            [f"data: {len(windows.document_ends)} documents give no token to score: a first token is context only"]
        )
    return windows


def full_spans(total: int, length: int, scored_from: int) -> Spans:
    """Yield windows over tokens[:total] one after the other, without a last one that is not full.

    Args:
        scored_from: place within the window of the first scored token.
    """
    for begin in range(0, total - length + 1, length):
        yield begin, begin + length, begin + scored_from


def _windows(config: EvalConfig, prepared: Prepared, _tokenizer: PreTrainedTokenizerBase) -> Windows:
    texts = Texts(bos=config.bos, separator=config.separator, max_documents=config.max_documents)
    return of_corpus(prepared(texts), partial(disjoint_spans, length=config.seq_len))


def _sliding(config: EvalConfig, prepared: Prepared, _tokenizer: PreTrainedTokenizerBase) -> Windows:
    spans_of = partial(sliding_spans, length=config.seq_len, stride=config.stride or config.seq_len // 2)
    texts = Texts(bos=config.bos, max_documents=config.max_documents)
    if config.scope == "document":
        return of_documents(prepared(texts), spans_of)
    return of_corpus(prepared(dataclasses.replace(texts, separator=config.separator)), spans_of)


def _rolling(config: EvalConfig, prepared: Prepared, _tokenizer: PreTrainedTokenizerBase) -> Windows:
    bos = "auto" if config.protocol == "lm-eval" else config.bos
    store = prepared(Texts(bos=bos, has_prefix=True, max_documents=config.max_documents))
    return of_documents(store, partial(rolling_spans, length=config.seq_len))


def _answers(config: EvalConfig, prepared: Prepared, _tokenizer: PreTrainedTokenizerBase) -> Windows:
    store = prepared(Answers(max_documents=config.max_documents))
    windows = of_documents(store, lambda start, end: [(start, end, min(start + 1, end))])
    windows.truncated_documents = store.counts["truncated"]
    return windows


def _gptq(config: EvalConfig, prepared: Prepared, _tokenizer: PreTrainedTokenizerBase, scored_from: int = 1) -> Windows:
    store = prepared(JoinedTexts(max_documents=config.max_documents))
    if len(store.tokens) < config.seq_len:
        raise UserError(
            [
                f"protocol={config.protocol} drops what does not fill a window of seq_len={config.seq_len} tokens, and"
                f" the data has {len(store.tokens):,}; use more data, a smaller seq_len or protocol dsft"
            ]
        )
    windows = of_corpus(store, lambda start, end: full_spans(end, config.seq_len, scored_from))
    # Part of the text is not scored, and how many bytes that part has is not known.
    windows.document_bytes = windows.document_words = np.zeros(len(windows.document_ends), dtype=np.int64)
    return windows


def _llama_cpp(config: EvalConfig, prepared: Prepared, tokenizer: PreTrainedTokenizerBase) -> Windows:
    windows = _gptq(config, prepared, tokenizer, scored_from=config.seq_len // 2 + 1)
    begins_with = next(encode(tokenizer, ["a"]))[:1]
    if tokenizer.bos_token_id is not None and begins_with == [tokenizer.bos_token_id]:
        windows.first_token = tokenizer.bos_token_id
    return windows


def _hf(config: EvalConfig, prepared: Prepared, _tokenizer: PreTrainedTokenizerBase) -> Windows:
    store = prepared(JoinedTexts(max_documents=config.max_documents))
    stride = config.stride or min(HF_STRIDE, config.seq_len // 2)
    windows = of_corpus(store, partial(sliding_spans, length=config.seq_len, stride=stride))
    scored = windows.spans[:, 1] - windows.spans[:, 2]
    windows.weights = 1 - 1 / np.maximum(scored, 1)
    windows.weights[:1] = 1.0
    return windows


def _context(config: EvalConfig, prepared: Prepared, _tokenizer: PreTrainedTokenizerBase) -> Windows:
    store = prepared(Texts(bos=config.bos, max_documents=config.max_documents))
    lengths = token_counts(config.context_curve)
    document_tokens = np.diff(store.ends, prepend=0)
    if document_tokens.max(initial=0) < lengths[-1]:
        raise UserError(
            [
                f"context_curve={config.context_curve}: needs documents of {lengths[-1]:,} tokens or more, and the"
                f" longest here has {document_tokens.max(initial=0):,}; use shorter contexts, or longer documents"
            ]
        )
    scored = lengths[0] // 2
    windows = of_documents(
        store,
        lambda start, end: [(end - config.seq_len, end, end - scored)] if end - start >= lengths[-1] else [],
    )
    windows.document_bytes = windows.document_words = np.zeros(len(windows.document_ends), dtype=np.int64)
    return windows


MODES = {
    "windows": Mode(windows=_windows, options=("bos", "separator")),
    "sliding": Mode(windows=_sliding, options=("stride", "scope", "bos", "separator")),
    "rolling": Mode(windows=_rolling, options=("bos",)),
    "answers": Mode(windows=_answers, options=("too_long",), is_text=False),
}
"""The option `mode`; `auto` takes the first of texts, or of prompts with completions and chats."""
PROTOCOLS = {
    "gptq": Mode(windows=_gptq, source="IST-DASLab/gptq, llama.py", seq_len=2048),
    "llama.cpp": Mode(windows=_llama_cpp, source="ggml-org/llama.cpp, tools/perplexity", seq_len=512),
    "lm-eval": Mode(windows=_rolling, source="EleutherAI/lm-evaluation-harness, loglikelihood_rolling"),
    "hf": Mode(
        windows=_hf, options=("stride",), source="transformers' documentation, fixed-length models", seq_len=1024
    ),
    "dsft": Mode(windows=None, source="mode windows, or answers", seq_len=1024),
}
"""The option `protocol`, in the order of the table."""
CONTEXT_CURVE = Mode(
    windows=_context, options=("bos",), source="windows that end with the document, its last tokens scored"
)
WINDOW_OPTIONS = tuple(
    dict.fromkeys(name for mode in (*MODES.values(), *PROTOCOLS.values(), CONTEXT_CURVE) for name in mode.options)
)
"""All options that some mode reads."""


def find_protocol(name: str | None) -> Mode | None:
    """Return the protocol of this name, also of a length of context."""
    return CONTEXT_CURVE if name and name.startswith(CONTEXT) else PROTOCOLS.get(name)
