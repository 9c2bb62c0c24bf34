"""What perplexity is computed over: a data set as one row of tokens, and the windows in which a model sees it.

Modes, and where their definitions come from:

- `windows`: documents, a separator after each, laid end to end and cut into windows of L tokens that do not overlap;
  the first
  token of a window is context only. It is the view that finetuning trains on (`data/`).
- `sliding`: windows of L tokens, each S further; a window scores what the one before it did not reach, so every token
  but
  the first is scored once, with at least L - S tokens of context (transformers' documentation, "Perplexity of
  fixed-length
  models"). Over the whole corpus, or each document by itself.
- `rolling`: each document by itself, after a prefix token (BOS, else EOS), in windows of L predicted tokens with one
  token of
  context; the last window has as much context as fits (lm-evaluation-harness, `loglikelihood_rolling` in
  lm_eval/models/huggingface.py and `get_rolling_token_windows` in lm_eval/utils.py).
- `answers`: prompts with completions, or chats; only what finetuning trains on is scored.

Words are counted as `re.split(r"\\s+", text)`, bytes in UTF-8, as lm-evaluation-harness does for word and byte
perplexity.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from transformers import PreTrainedTokenizerBase

from dsft.data.formats import Chat, EmptyAnswer, Pair, Text, canonical, text_of
from dsft.data.sequences import IGNORED, Sequence, sequence
from dsft.data.tokenization import tokenise
from dsft.data.training_data import FormattedSource
from dsft.errors import UserError


@dataclass(kw_only=True)
class Windows:
    """Tokens of all documents one after the other, and slices of them.

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
    mode: str
    counts: dict[str, int]
    """What was cut or dropped on the way, for the report."""

    @property
    def lengths(self) -> np.ndarray:
        """[W]: tokens that each window feeds to the model."""
        return self.spans[:, 1] - self.spans[:, 0] - 1

    def inputs_and_targets(self, window: int) -> tuple[np.ndarray, np.ndarray]:
        """([T], [T]) of a window: fed tokens, and for each position the token to predict or -100."""
        start, end, scored_from = self.spans[window]
        targets = np.where(self.scorable[start + 1 : end], self.tokens[start + 1 : end], IGNORED)
        targets[: scored_from - start - 1] = IGNORED
        return self.tokens[start : end - 1], targets

    def pieces(self, window: int) -> tuple[np.ndarray, np.ndarray]:
        """(documents, scored tokens of each) in a window, in order: what its sum of nats is split into."""
        _, end, scored_from = self.spans[window]
        scored = np.arange(scored_from, end)[self.scorable[scored_from:end]]
        return np.unique(np.searchsorted(self.document_starts, scored, side="right") - 1, return_counts=True)


def words_in(text: str) -> int:
    """As lm-evaluation-harness counts them (lm_eval/tasks/wikitext/preprocess_wikitext.py)."""
    return len(re.split(r"\s+", text))


def build_windows(data: FormattedSource, config, tokenizer: PreTrainedTokenizerBase) -> Windows:
    """Windows of the rows of `data` as `config` (an `EvalConfig`) says.

    Raises:
        UserError: where mode and data do not go together, or nothing can be scored.
    """
    is_text, mode = data.rules.is_text, config.mode
    if mode == "auto":
        mode = "windows" if is_text else "answers"
    if (mode == "answers") == is_text:
        raise UserError(
            [
                f"mode={mode} does not fit the data, which holds {data.rules.shape}; use"
                f" {'windows, sliding or rolling' if mode == 'answers' else 'answers'}"
            ]
        )
    windows = (
        _answers(data, config, tokenizer)
        if mode == "answers"
        else _of_text(read_texts(data, config, tokenizer), mode, config, tokenizer)
    )
    if not any(len(windows.pieces(window)[0]) for window in range(len(windows.spans))):
        raise UserError(
            [f"data: {len(windows.document_starts)} documents give no token to score: a first token is context only"]
        )
    return windows


def read_samples(
    data: FormattedSource, config, tokenizer: PreTrainedTokenizerBase
) -> Iterator[Text | Pair | Chat | None]:
    """The rows in their canonical form, the pieces of a text file each by itself; None for a row without an answer.

    Raises:
        UserError: with file and line of a row that cannot be used.
    """
    documents = 0
    for batch in data.source.batches():
        for index, row in enumerate(batch.rows):
            try:
                sample = canonical(row, data.rules.shape, data.rules, has_template=bool(tokenizer.chat_template))
            except EmptyAnswer:
                sample = None
            except ValueError as error:
                raise UserError([f"data: {batch.where(index)}: {error}"]) from None
            yield sample
            documents += not (isinstance(sample, Text) and sample.goes_on)
            if documents == config.max_documents:
                return


def read_texts(data: FormattedSource, config, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The documents of a source of texts, whole."""
    texts, pieces = [], []
    for sample in read_samples(data, config, tokenizer):
        pieces.append(sample.text)
        if not sample.goes_on:
            texts.append("".join(pieces))
            pieces = []
    return texts


def _of_text(texts: list[str], mode: str, config, tokenizer: PreTrainedTokenizerBase) -> Windows:
    per_document = mode == "rolling" or (mode == "sliding" and config.scope == "document")
    documents = _encode(texts, mode, config, tokenizer, per_document=per_document)
    tokens, starts = _concatenate(documents)
    scorable = np.ones(len(tokens), dtype=bool)
    ends = np.append(starts[1:], len(tokens))
    if mode == "rolling":
        scorable[starts] = False  # the prefix token
        spans = [
            span for start, end in zip(starts, ends, strict=True) for span in rolling_spans(start, end, config.seq_len)
        ]
    elif mode == "sliding":
        stride = config.stride or config.seq_len // 2
        ranges = zip(starts, ends, strict=True) if per_document else [(0, len(tokens))]
        spans = [span for start, end in ranges for span in sliding_spans(start, end, config.seq_len, stride)]
    else:
        spans = [
            (start, min(start + config.seq_len, len(tokens)), start + 1)
            for start in range(0, len(tokens), config.seq_len)
        ]
    return Windows(
        tokens=tokens,
        scorable=scorable,
        document_starts=starts,
        spans=np.array(spans, dtype=np.int64).reshape(-1, 3),
        document_bytes=np.array([len(text.encode()) for text in texts]),
        document_words=np.array([words_in(text) for text in texts]),
        mode=mode,
        counts={},
    )


def _encode(
    texts: list[str], mode: str, config, tokenizer: PreTrainedTokenizerBase, *, per_document: bool
) -> list[list[int]]:
    """Token ids of each document, with prefix, BOS and separator where mode and options ask for them."""
    start_token = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    if config.bos == "on" and tokenizer.bos_token_id is None:
        raise UserError([f"bos=on: the tokenizer {tokenizer.name_or_path} has no BOS token; use auto or off"])
    # The text separator joins documents; each document but the first carries the one before it.
    separator = "" if per_document or config.separator in ("eos", "none") else config.separator
    joined = [text if not index else separator + text for index, text in enumerate(texts)]
    special = {"auto": True, "on": False, "off": False}[config.bos]
    encoded = tokenizer(joined, add_special_tokens=special, verbose=False)["input_ids"]
    documents = []
    for ids in encoded:
        if config.bos == "on":
            ids = [tokenizer.bos_token_id, *ids]
        if mode == "rolling":
            ids = [start_token, *ids]
        elif not per_document and config.separator == "eos" and ids and tokenizer.eos_token_id is not None:
            ids = [*ids, tokenizer.eos_token_id]
        documents.append(ids)
    return documents


def rolling_spans(start: int, end: int, length: int) -> Iterable[tuple[int, int, int]]:
    """Windows over tokens[start:end], whose first token is the prefix."""
    predicted_to = start + 1
    while predicted_to < end:
        stop = min(predicted_to + length, end)
        # At least one token of context; the last window is filled up with context (but the first starts at the prefix).
        yield max(start, min(predicted_to - 1, stop - length - 1)), stop, predicted_to
        predicted_to = stop


def sliding_spans(start: int, end: int, length: int, stride: int) -> Iterable[tuple[int, int, int]]:
    """Windows over tokens[start:end], each `stride` further, none scoring what an earlier one did."""
    scored_to = start + 1
    for begin in range(start, end, stride):
        stop = min(begin + length, end)
        if scored_to < stop:
            yield begin, stop, scored_to
        scored_to = max(scored_to, stop)
        if stop == end:
            return


def _answers(data: FormattedSource, config, tokenizer: PreTrainedTokenizerBase) -> Windows:
    texts = [text_of(sample) if sample else "" for sample in read_samples(data, config, tokenizer)]
    sequences: list[Sequence] = []
    counts: Counter = Counter()
    for batch in data.source.batches():
        try:
            made = tokenise(
                batch.select(range(min(len(batch.rows), len(texts) - len(sequences)))), data.rules, tokenizer
            )
        except UserError as error:
            raise UserError([f"data: {problem}" for problem in error.problems]) from None
        counts += made.counts
        sequences += [
            sequence(made.ids[start:end], made.trained[start:end]) for start, end in pairwise([0, *made.ends])
        ]
    for index, one in enumerate(sequences):
        if not (one["labels"] != IGNORED).any():
            texts[index] = ""  # nothing of it is scored
        elif len(one["input_ids"]) == config.seq_len or config.train_on in ("all", "last"):
            texts[index] = tokenizer.decode(one["input_ids"][one["labels"] != IGNORED], skip_special_tokens=True)
    windows = windows_of_sequences(sequences, mode="answers")
    windows.document_bytes = np.array([len(text.encode()) for text in texts])
    windows.document_words = np.array([words_in(text) for text in texts])
    windows.counts = {"truncated": counts["truncated"]}
    return windows


def windows_of_sequences(sequences: Iterable[Sequence], *, mode: str) -> Windows:
    """Each sequence (as training has them) as a document and a window of its own."""
    sequences = list(sequences)
    tokens, starts = _concatenate(one["input_ids"] for one in sequences)
    labels, _ = _concatenate(one["labels"] for one in sequences)
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
        mode=mode,
        counts={},
    )


def _concatenate(documents: Iterable[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    arrays = [np.asarray(ids, dtype=np.int32) for ids in documents]
    starts = np.cumsum([0, *(len(array) for array in arrays)], dtype=np.int64)[:-1]
    return np.concatenate(arrays) if arrays else np.zeros(0, dtype=np.int32), starts
