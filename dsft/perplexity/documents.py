"""Prepares documents for scoring: what of the rows is tokenised, which tokens count, and the windows over them. A data
set is tokenised once, in the store that training uses, for all models with the same tokenizer. And splits a result into
groups of tokens (`group_by`): nats of tokens are multiples of 2^-28, so sums of groups are exact up to 33 million nats,
and bit-identical on any number of ranks.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from typing import Any, Literal

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from dsft.config.options import EvalConfig
from dsft.data.formats import Chat, EmptyAnswer, FormatRules, FormattedSource, Pair, Text, canonical, text_of
from dsft.data.prepare import Preparation, Store, cache_folder, prepare
from dsft.data.sources import Batch, Row
from dsft.data.tokenization import (
    Tokens,
    bytes_of_tokens,
    closes_texts,
    encode,
    end_of,
    opens_texts,
    tokenise,
)
from dsft.errors import UserError, nearest
from dsft.perplexity.modes import MODES, NAMED_BY, find_mode
from dsft.perplexity.results import groups_of
from dsft.perplexity.windows import Windows
from dsft.runtime.distributed import sum_over_ranks
from dsft.units import one_of, plural

MOST_GROUPS = 1_000
MOST_SUMS = 1 << 22  # documents x groups of a grouping whose sums are kept, for intervals: 64 MiB
LAST_TURN = 9  # later turns are counted with this one
BESIDE_CONTENT = {"reasoning_content", "tool_calls", "weight"}  # what decides of a message beside its content

Sample = Text | Pair | Chat | None  # a document in its canonical form; None for a row without an answer


@dataclass(frozen=True, kw_only=True)
class Documents(Preparation):
    """Takes one document after the other."""

    max_documents: int | None = None  # only the first so many; no further row is read
    version: int = 7  # of what is stored for a document; part of the fingerprint, as all fields

    def batches(
        self, batches: Iterator[Batch], rules: FormatRules, tokenizer: PreTrainedTokenizerBase
    ) -> Iterator[Batch]:
        first = 0
        for batch in batches:
            rows = batch.rows[: None if self.max_documents is None else self.max_documents - first]
            yield replace(batch, rows=rows, first=first)
            first += len(rows)
            if first == self.max_documents:
                return


@dataclass(frozen=True, kw_only=True)
class Texts(Documents):
    """Takes texts, all tokens of which count."""

    bos: str  # as the option
    separator: str = "none"  # as the option, where documents are joined
    is_wikitext: bool = False
    """Tokens are of the text as lm-evaluation-harness rewrites it, bytes and words of the text as it stands."""
    prefix: Literal["", "once", "always"] = ""
    """Each document begins with BOS, else EOS, which is context only; "once" where no BOS is there already."""

    @property
    def joint(self) -> str:
        """Text before each document but the first."""
        return "" if self.separator in ("eos", "none") else self.separator

    def tokens(self, batch: Batch, rules: FormatRules, tokenizer: PreTrainedTokenizerBase) -> Tokens:
        special, bos, eos = self.bos == "auto", tokenizer.bos_token_id, tokenizer.eos_token_id
        start = [bos] if self.bos == "on" else []
        if self.prefix == "always" or (self.prefix and not start and not (special and opens_texts(tokenizer))):
            if bos is None and eos is None:
                raise UserError(
                    f"the tokenizer {tokenizer.name_or_path} has neither a BOS nor an EOS token, one of which this mode"
                    " or protocol puts before each text; use mode windows or sliding"
                )
            start.insert(0, eos if bos is None else bos)
        adds_end = self.separator == "eos" and not (special and closes_texts(tokenizer))
        samples = samples_in(batch, rules, tokenizer)
        texts = [text_of(sample) for sample in samples]
        given = [wikitext_rewritten(text) for text in texts] if self.is_wikitext else texts
        given = [self.joint * (batch.first + index > 0) + text for index, text in enumerate(given)]
        documents = []
        for text, ids in zip(given, encode(tokenizer, given, special=special), strict=True):
            end = end_of(text, tokenizer) if adds_end else []
            # As a training leaves an empty text out, whatever its tokenizer puts around one.
            documents.append(np.array([*start, *ids, *end] if text or self.prefix else [], np.int32))
        ends = np.cumsum([len(ids) for ids in documents], dtype=np.int64)
        ids = np.concatenate([np.zeros(0, np.int32), *documents])
        trained = np.ones(len(ids), bool)
        if self.prefix:
            trained[[0, *ends[:-1]]] = False
        return _with_sizes(texts, samples, ids=ids, trained=trained, ends=ends, counts=Counter(rows=len(batch.rows)))


WIKITEXT = (
    *((r"s '", "s'"), (r"/' [0-9]/", "/'[0-9]/"), (" @-@ ", "-"), (" @,@ ", ","), (r" @\.@ ", ".")),
    *((" : ", ": "), (" ; ", "; "), (r" \. ", ". "), (" ! ", "! "), (r" \? ", "? "), (" , ", ", ")),
    *(
        (rf"\{left}\s*([^\{right}]*?)\s*\{right}", rf"{left}\1{right}")
        for left, right in ("()", "[]", "{}", '""', "''")
    ),
    *(("= = = =", "===="), ("= = =", "==="), ("= =", "=="), (" ° ", "°"), (" \n", "\n"), ("\n ", "\n")),
    *((" N ", " 1 "), (" 's", "'s")),
)
"""What the harness replaces in a page of its task wikitext, version 2.0, one after the other (`wikitext_detokenizer` in
lm_eval/tasks/wikitext/preprocess_wikitext.py, 0.4.13).
"""


def wikitext_rewritten(page: str) -> str:
    for pattern, replacement in WIKITEXT:
        page = re.sub(pattern, replacement, page)
    return page


@dataclass(frozen=True, kw_only=True)
class JoinedTexts(Documents):
    """Takes all texts as one document, joined and tokenised once."""

    separator: str = "\n\n"

    def batches(
        self, batches: Iterator[Batch], rules: FormatRules, tokenizer: PreTrainedTokenizerBase
    ) -> Iterator[Batch]:
        batch, texts = None, []
        for batch in Documents.batches(self, batches, rules, tokenizer):
            texts += [text_of(sample) for sample in samples_in(batch, rules, tokenizer)]
        if texts:
            row = Row({"text": self.separator.join(texts)}, number=1)
            yield replace(batch, rows=[row], first=len(texts))

    def tokens(self, batch: Batch, rules: FormatRules, tokenizer: PreTrainedTokenizerBase) -> Tokens:
        texts = [row.values["text"] for row in batch.rows]
        (ids,) = encode(tokenizer, texts)
        samples = [Text(text=text) for text in texts]
        ids = np.array(ids, np.int32)
        counts = Counter(rows=batch.first)
        ends = np.array([len(ids)], np.int64)
        return _with_sizes(texts, samples, ids=ids, trained=np.ones(len(ids), bool), ends=ends, counts=counts)


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
        for index, (start, end) in enumerate(pairwise([0, *tokens.ends.tolist()])):
            ids, trained = tokens.ids[start:end], tokens.trained[start:end]
            messages = samples[index].messages if isinstance(samples[index], Chat) else []
            answers = [each for each in messages if each["role"] == "assistant"]
            if not trained.any():
                texts[index] = ""
            elif (
                len(ids) == rules.seq_len  # cut off
                or rules.train_on in ("all", "last")
                or (answers and rules.train_thinking == "all")  # with empty think blocks
                # Reasoning may stand in the content too, and be scored or not.
                or any(each.keys() & BESIDE_CONTENT or "</think>" in each["content"] for each in answers)
            ):  # what is scored is not the text of the answers, but more or less
                texts[index] = tokenizer.decode(ids[trained], skip_special_tokens=True)
        sized = _with_sizes(
            texts, samples, ids=tokens.ids, trained=tokens.trained, ends=tokens.ends, counts=tokens.counts
        )
        sized.document_words[sized.document_bytes == 0] = 0  # nothing of it is scored
        return sized


def _with_sizes(texts: list[str], samples: list[Sample], **tokens: Any) -> Tokens:
    """Add hashes of the texts, whatever tokenizer and template, and bytes and words of the scored ones."""
    contents = (
        json.dumps([type(each).__name__, vars(each) if each else {}], sort_keys=True, default=str) for each in samples
    )
    hashes = [int.from_bytes(hashlib.blake2b(content.encode(), digest_size=8).digest()) for content in contents]
    return Tokens(
        **tokens,
        hashes=np.array(hashes, np.uint64),
        document_bytes=np.array([len(text.encode()) for text in texts], np.int64),
        # As lm-evaluation-harness counts words, len(re.split(r"\s+", text)), here without the words themselves
        # (lm_eval/tasks/wikitext/preprocess_wikitext.py).
        document_words=np.array([1 + sum(1 for _ in re.finditer(r"\s+", text)) for text in texts], np.int64),
    )


def samples_in(batch: Batch, rules: FormatRules, tokenizer: PreTrainedTokenizerBase) -> list[Sample]:
    """Bring the rows into their canonical form. Raises UserError with file and line of a row that cannot be used."""
    samples: list[Sample] = []
    for row in batch.rows:
        try:
            samples.append(canonical(row, rules, has_template=bool(tokenizer.chat_template)))
        except EmptyAnswer:
            samples.append(None)
        except ValueError as error:
            raise UserError(f"data: {batch.where(row)}: {error}") from None
    return samples


def build_windows(
    data: FormattedSource, config: EvalConfig, tokenizer: PreTrainedTokenizerBase, *, show_progress: bool = False
) -> Windows:
    """Make the windows of the rows of `data` that `config` asks for. The first process to come prepares the tokens.
    Raises UserError where mode and data do not go together, or nothing can be scored.
    """
    is_text = data.rules.is_text
    fitting = [name for name in NAMED_BY["mode"] if MODES[name].is_text == is_text]
    name = fitting[0] if config.mode == "auto" else config.mode
    if name not in fitting:
        raise UserError(f"mode={name} does not fit the data, which holds {data.rules.format}; use {one_of(fitting)}")
    if is_text and config.bos == "on" and tokenizer.bos_token_id is None:
        raise UserError(f"bos=on: the tokenizer {tokenizer.name_or_path} has no BOS token; use auto or off")
    if config.protocol and find_mode(config.protocol).windows:
        name = config.protocol
        if not is_text:
            key = "context_curve" if config.context_curve else f"protocol={config.protocol}"
            raise UserError(f"{key} is of texts, and the data holds {data.rules.format}; leave it out")

    def prepared(kind: str, **fields: Any) -> Store:
        documents = {"texts": Texts, "joined": JoinedTexts, "answers": Answers}[kind]
        preparation = documents(**{"max_documents": config.max_documents} | fields)
        cache = cache_folder(config.data_cache)
        store = prepare(data, tokenizer, cache, preparation=preparation, show_progress=show_progress)
        if is_text and not store.document_bytes.any():  # of BOS and end tokens alone
            raise UserError(f"data: {data.source.name}: {plural(len(store.ends), 'document')}, none of which has text")
        return store

    mode = find_mode(name)
    windows = mode.windows(config, prepared)
    windows.mode = name
    if mode.bos_replaces_first and opens_texts(tokenizer):
        windows.first_token = tokenizer.bos_token_id
    if is_text and windows.document_bytes.any():
        windows.leave_out_bytes(*bytes_of_tokens(tokenizer))
    if not any(len(tokens) for *_, tokens in windows.pieces()):
        raise UserError(
            f"data: {len(windows.document_ends)} documents give no token to score: a first token is context only"
        )
    return windows


@dataclass(frozen=True)
class Grouping:
    """Assigns each scored token to a group."""

    name: str
    labels: list[str]
    groups_of: Callable[[int, np.ndarray], np.ndarray]
    """(window, places [N] of its scored tokens in `windows.tokens`) -> groups [N], numbers of labels."""
    of_data: str = ""
    """Hash of what decides the groups beside texts, tokens and windows: a column, or the mask of the answers."""


class Breakdown:
    """Adds up nats and tokens by group and document, on this rank."""

    def __init__(self, windows: Windows, groupings: list[Grouping]):
        self.windows, self.groupings, documents = windows, groupings, len(windows.document_ends)
        numbers = [len(grouping.labels) for grouping in groupings]
        self.sums = [np.zeros((2, documents if documents * number <= MOST_SUMS else 1, number)) for number in numbers]
        """[2, D, G] nats and tokens of documents by group, for each grouping; [2, 1, G] of too many documents."""

    def update(self, windows: list[int], columns_KN: np.ndarray) -> list[list[list[float]]]:
        """Add a batch, nats first; return its sums of each grouping: places in [D, G], nats and tokens."""
        places = [self.windows.scored_places(window) for window in windows]
        documents_N = self.windows.documents_of(np.concatenate(places))
        recorded = []
        for grouping, sums in zip(self.groupings, self.sums, strict=True):
            groups_N = np.concatenate([grouping.groups_of(*pair) for pair in zip(windows, places, strict=True)])
            sums_at_N = groups_N + len(grouping.labels) * np.minimum(documents_N, sums.shape[1] - 1)
            here, of_here_N = np.unique(sums_at_N, return_inverse=True)
            nats = np.bincount(of_here_N, columns_KN[0], len(here))
            recorded.append([here.tolist(), nats.tolist(), np.bincount(of_here_N, minlength=len(here)).tolist()])
        self.restore(recorded)
        return recorded

    def restore(self, recorded: list[list[list[float]]]) -> None:
        """Add what `update` returned for a batch."""
        for sums, (here, nats, tokens) in zip(self.sums, recorded, strict=True):
            sums.reshape(2, -1)[:, here] += [nats, tokens]

    def report(self) -> tuple[dict[str, list[dict[str, Any]]], dict[str, np.ndarray]]:
        """Return `groups` and `group_sums` of an Evaluation, over all ranks. Collective."""
        groups, sums_of = {}, {}
        for grouping, sums in zip(self.groupings, self.sums, strict=True):
            sums_2DG = sum_over_ranks(torch.from_numpy(sums)).numpy()
            groups[grouping.name], sums_2DG = groups_of(grouping.labels, sums_2DG)
            if sums_2DG.shape[1] == len(self.windows.document_ends):
                sums_of[grouping.name] = sums_2DG
        return groups, sums_of


def grouping(
    name: str, data: FormattedSource, config: EvalConfig, tokenizer: PreTrainedTokenizerBase, windows: Windows
) -> Grouping:
    """Make the grouping that an entry of `group_by` names; `source`, if it is not a column, means the file.
    Raises UserError where the data has no such column or no turns, or a column has too many values.
    """
    columns = dict.fromkeys(name for row in data.source.first_batch().rows for name in row.values)
    column = name if name in columns else None
    if column or name == "source":
        numbers: dict[str, int] = {}
        of_document = []
        rows = ((batch, row) for batch in data.batches() for row in batch.rows)
        for batch, row in islice(rows, config.max_documents):
            label = row.label(column) if column else batch.place
            of_document.append(numbers.setdefault(label, len(numbers)))
            if len(numbers) > MOST_GROUPS:
                raise UserError(f"group_by={name}: the column has more than {MOST_GROUPS:,} values; name another")
        if len(of_document) != len(windows.document_ends):
            raise UserError(
                f"group_by={name}: protocol={windows.mode} joins all documents; use protocol lm-eval or dsft"
            )
        group_D = np.array(of_document, dtype=np.int64)
        of_data = hashlib.sha256(json.dumps([*numbers]).encode() + group_D.tobytes()).hexdigest()
        return Grouping(name, list(numbers), lambda _, places: group_D[windows.documents_of(places)], of_data)

    if name == "position":  # tokens before a token in its window, between powers of two
        starts_W = windows.spans[:, 0]
        bounds = [2**power for power in range(int((windows.spans[:, 1] - starts_W).max()).bit_length())]
        labels = ["1 token before"] + [f"{bound:,} to {2 * bound - 1:,} tokens before" for bound in bounds[1:]]
        return Grouping(
            name, labels, lambda window, places: np.searchsorted(bounds, places - starts_W[window], side="right") - 1
        )

    if name == "frequency":  # occurrences of a token in this data, between powers of ten
        counts_V = np.zeros(int(windows.tokens.max()) + 1, dtype=np.int64)
        for start in range(0, len(windows.tokens), 1 << 20):  # a part at a time: the store may be larger than memory
            counts_V += np.bincount(windows.tokens[start : start + (1 << 20)], minlength=len(counts_V))
        bounds = [10**power for power in range(len(str(counts_V.max())))]
        class_V = np.searchsorted(bounds, counts_V, side="right") - 1
        labels = [f"token seen {bound:,} to {10 * bound - 1:,} times" for bound in bounds]
        return Grouping(name, labels, lambda _, places: class_V[windows.tokens[places]])

    if name not in ("role", "turn"):
        known = ["source", "position", "frequency", "role", "turn", *columns]
        raise UserError(f"group_by={name}: invalid choice (choose from {', '.join(known)}){nearest(name, known)}")
    if data.rules.is_text:
        raise UserError(f"group_by={name}: texts have no turns; it is for prompts with completions and chats")
    rules = replace(data.rules, train_on="answers")  # whose mask marks the answers
    answers, masked = Answers(max_documents=config.max_documents), replace(data, rules=rules)
    cache = cache_folder(config.data_cache)
    store = prepare(masked, tokenizer, cache, preparation=answers, show_progress=False)
    is_answer, of_data = store.trained, store.facts["tokens_hash"]
    if name == "role":
        return Grouping(name, ["prompt", "answer"], lambda _, places: is_answer[places].astype(np.int64), of_data)

    batches = answers.batches(masked.batches(), rules, tokenizer)
    numbers_D = [_numbers_of(sample) for batch in batches for sample in samples_in(batch, rules, tokenizer)]

    def turn_of(window: int, places: np.ndarray) -> np.ndarray:
        """Number the answers; a prompt counts with the answer after it."""
        start, end = windows.spans[window, :2]  # of a document
        is_answer_T = np.asarray(is_answer[start:end])
        begins_T = np.diff(is_answer_T.astype(np.int8), prepend=0) == 1
        turn_T = np.cumsum(begins_T) + ~is_answer_T
        turns = np.take(numbers_D[window], turn_T[places - start] - 1, mode="clip")
        return np.minimum(turns, LAST_TURN) - 1

    turns = [f"turn {number}" for number in range(1, LAST_TURN)]
    return Grouping(name, [*turns, f"turn {LAST_TURN} and later"], turn_of, of_data)


def _numbers_of(sample: Sample) -> list[int]:
    """Number the answers of a document that may be scored among all of its answers, and what would come after them."""
    messages, first = (
        (sample.messages, sample.answers_from) if isinstance(sample, Chat) else ([{"role": "assistant"}], 0)
    )
    answers = [(place, message) for place, message in enumerate(messages) if message["role"] == "assistant"]
    wanted = [
        number for number, (place, answer) in enumerate(answers, start=1) if place >= first and answer.get("weight", 1)
    ]
    return [*wanted, len(answers) + 1]
