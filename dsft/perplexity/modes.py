"""Builds the windows of a data set as the options say. Modes, and where their definitions come from:

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
"""

from functools import partial

from transformers import PreTrainedTokenizerBase

from dsft.config.options import EvalConfig
from dsft.data.prepare import Preparation, cache_folder, prepare
from dsft.data.sources import FormattedSource
from dsft.data.token_store import Store
from dsft.errors import UserError, nearest
from dsft.perplexity.documents import Answers, Texts
from dsft.perplexity.protocols import Prepared, find_protocol
from dsft.perplexity.windows import Windows, disjoint_spans, of_corpus, of_documents, rolling_spans, sliding_spans


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

    protocol = find_protocol(config.protocol)
    if protocol and protocol.windows:
        if not data.rules.is_text:
            key = "context_curve" if config.context_curve else f"protocol={config.protocol}"
            raise UserError([f"{key} is of texts, and the data holds {data.rules.format}; leave it out"])
        windows, mode = protocol.windows(config, prepared, tokenizer), config.protocol
    else:
        windows = modes[mode](config, prepared)
    windows.mode = mode
    if not windows.has_scored_tokens:
        raise UserError(
            [f"data: {len(windows.document_ends)} documents give no token to score: a first token is context only"]
        )
    return windows


def _windows(config: EvalConfig, prepared: Prepared) -> Windows:
    return of_corpus(prepared(_corpus(config)), partial(disjoint_spans, length=config.seq_len))


def _sliding(config: EvalConfig, prepared: Prepared) -> Windows:
    spans_of = partial(sliding_spans, length=config.seq_len, stride=config.stride or config.seq_len // 2)
    if config.scope == "document":
        return of_documents(prepared(Texts(bos=config.bos, max_documents=config.max_documents)), spans_of)
    return of_corpus(prepared(_corpus(config)), spans_of)


def _rolling(config: EvalConfig, prepared: Prepared) -> Windows:
    store = prepared(Texts(bos=config.bos, has_prefix=True, max_documents=config.max_documents))
    return of_documents(store, partial(rolling_spans, length=config.seq_len))


def _answers(config: EvalConfig, prepared: Prepared) -> Windows:
    store = prepared(Answers(max_documents=config.max_documents))
    windows = of_documents(store, lambda start, end: [(start, end, min(start + 1, end))])
    windows.truncated_documents = store.counts["truncated"]
    return windows


def _corpus(config: EvalConfig) -> Texts:
    return Texts(bos=config.bos, separator=config.separator, max_documents=config.max_documents)


TEXT_MODES = {"windows": _windows, "sliding": _sliding, "rolling": _rolling}
ANSWER_MODES = {"answers": _answers}
"""Name of a mode -> its windows of texts, or of prompts with completions and chats. `auto` takes the first."""
