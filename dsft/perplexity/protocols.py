"""Defines the named protocols: what papers and tools report as "the perplexity" of a model, each with its source.

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
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from transformers import PreTrainedTokenizerBase

from dsft.config.options import EvalConfig
from dsft.data.encoding import encode
from dsft.data.prepare import Preparation
from dsft.data.token_store import Store
from dsft.errors import UserError
from dsft.perplexity.documents import JoinedTexts, Texts
from dsft.perplexity.windows import Spans, Windows, of_corpus, of_documents, rolling_spans, sliding_spans
from dsft.units import token_counts

Prepared = Callable[[Preparation], Store]
"""Prepares the data set in this way, or finds it prepared."""
HF_STRIDE = 512
CONTEXT = "context-"
"""Before the number of tokens: the protocol of a length of `context_curve`."""


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """Says how one tool measures."""

    source: str
    """Where it is defined."""
    seq_len: int | None = None
    """Tokens of a window where the user names none; at most the model's positions, which None takes."""
    windows: Callable[[EvalConfig, Prepared, PreTrainedTokenizerBase], Windows] | None = None
    """None: as the mode says."""


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


def full_spans(total: int, length: int, scored_from: int) -> Spans:
    """Yield windows over tokens[:total] one after the other, without a last one that is not full.

    Args:
        scored_from: place within the window of the first scored token.
    """
    for begin in range(0, total - length + 1, length):
        yield begin, begin + length, begin + scored_from


def _gptq(config: EvalConfig, prepared: Prepared, _tokenizer: PreTrainedTokenizerBase) -> Windows:
    return _full_windows(config, prepared, scored_from=1)


def _llama_cpp(config: EvalConfig, prepared: Prepared, tokenizer: PreTrainedTokenizerBase) -> Windows:
    windows = _full_windows(config, prepared, scored_from=config.seq_len // 2 + 1)
    begins_with = next(encode(tokenizer, ["a"]))[:1]
    if tokenizer.bos_token_id is not None and begins_with == [tokenizer.bos_token_id]:
        windows.first_token = tokenizer.bos_token_id
    return windows


def _full_windows(config: EvalConfig, prepared: Prepared, *, scored_from: int) -> Windows:
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


def _lm_eval(config: EvalConfig, prepared: Prepared, _tokenizer: PreTrainedTokenizerBase) -> Windows:
    store = prepared(Texts(bos="auto", has_prefix=True, max_documents=config.max_documents))
    return of_documents(store, partial(rolling_spans, length=config.seq_len))


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


PROTOCOLS = {
    "gptq": Protocol(source="IST-DASLab/gptq, llama.py", seq_len=2048, windows=_gptq),
    "llama.cpp": Protocol(source="ggml-org/llama.cpp, tools/perplexity", seq_len=512, windows=_llama_cpp),
    "lm-eval": Protocol(source="EleutherAI/lm-evaluation-harness, loglikelihood_rolling", windows=_lm_eval),
    "hf": Protocol(source="transformers' documentation, fixed-length models", seq_len=1024, windows=_hf),
    "dsft": Protocol(source="mode windows, or answers", seq_len=1024),
}
"""In the order of the table."""
CONTEXT_CURVE = Protocol(source="windows that end with the document, its last tokens scored", windows=_context)


def find_protocol(name: str | None) -> Protocol | None:
    """Return the protocol of this name, also of a length of context."""
    return CONTEXT_CURVE if name and name.startswith(CONTEXT) else PROTOCOLS.get(name)
