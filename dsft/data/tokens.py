"""Turns rows into token sequences, marks their trained tokens, and handles those that are too long. Everything cut or
dropped is counted.

A source is tokenised once, on all cores, for every rank that sees the same cache folder and for every later run: the
first process acquires a lock and does the work, and the others wait for it outside any collective.

The tokens are on disk, memory-mapped, in a folder that is either complete or missing:

tokens.bin    [F] uint16 or int32: all sequences (or documents, if the data is text), concatenated
trained.bin   [F] bool
weights.bin   [F] float32, by which the loss of each token is multiplied; for chats, whose messages may have weights
ends.bin      [S] int64
row_ends.bin  [R] int64: end of the sequences of each row; a row that is left out has none
document_hashes.bin, document_bytes.bin, document_words.bin    [R], of the texts; only in an evaluation
facts.json    counts, the source, and the SHA-256 of tokens, trained, ends and weights
"""

import ctypes
import functools
import hashlib
import json
import os
import re
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
from filelock import FileLock
from transformers import PreTrainedTokenizerBase

from dsft.config.options import DataFields
from dsft.data.chats import TEMPLATE_ERRORS, ChatRenderer, Rendered, Spans
from dsft.data.formats import Chat, EmptyAnswer, FormatRules, FormattedSource, Pair, Text, canonical, format_rules
from dsft.data.sources import Batch, Row, batched
from dsft.errors import UserError, limited_time, one_line
from dsft.job import beat as watchdog
from dsft.runtime.console import progress_bar
from dsft.runtime.disk import user_cache
from dsft.runtime.hardware import cpu_count, free_host_bytes

_BYTE = re.compile("<0x[0-9A-F]{2}>")  # SentencePiece's token for a byte of a character without a piece
FACTS = "facts.json"
# Counts of every source, in the order of the printed line; `tokens` follow. For chats: rendered_apart (separate
# sequences for answers that the template renders differently in a longer chat), unrendered, unprompted (answers
# without a matching generation prompt), empty_thinking; weighted_tokens: trained tokens with a weight other than 1.
COUNTS = (
    *("rows", "left_out_by_map_row", "truncated", "split"),
    *("dropped_long", "dropped_untrained", "dropped_empty", "dropped_bad"),
    *("rendered_apart", "unrendered", "unprompted", "empty_thinking", "trained_tokens", "weighted_tokens"),
)
# Name -> type; bytes are UTF-8.
DOCUMENT_COLUMNS = {"document_hashes": "uint64", "document_bytes": "int64", "document_words": "int64"}
VERSION = 16  # of the folders; raised by changes of the code that change tokens
# Of chats, which are rendered one by one; smaller sources are tokenised in this process. Texts and pairs are
# tokenised in batches by the tokenizer's own threads.
WORKERS_FROM_BYTES = 8 << 20
# Memory of a worker beside shared pages; together they use at most a quarter of the free memory.
WORKER_BYTES = 200 << 20

Sample = Text | Pair | Chat | None  # a converted row; None if it is left out


@dataclass(kw_only=True)
class Tokens:
    """Concatenated sequences. F tokens, S sequences, R rows."""

    ids: np.ndarray  # [F] int32
    weights: np.ndarray
    """[F] float32: factor of each token's loss; 0 if it is not trained, such as the first of a sequence."""
    ends: np.ndarray  # [S] int64
    row_ends: np.ndarray  # [R] int64
    counts: Counter  # of rows and sequences; the keys are COUNTS
    first: dict[str, str] = field(default_factory=dict)
    """Key of `counts` -> place of the first such row, and why it is counted."""
    # [R], of the texts, in an evaluation; empty in training.
    documents: dict[str, np.ndarray] = field(default_factory=dict)

    @property
    def trained(self) -> np.ndarray:
        """[F] bool."""
        return self.weights != 0


def tokenise(rows: list[Row], rules: FormatRules, tokenizer: PreTrainedTokenizerBase) -> Tokens:
    """Turns rows into token sequences; UserError names a row that cannot be used, if `bad_rows` is error."""
    return tokenise_samples(TokensBuilder(rows, rules), tokenizer)


def tokenise_samples(builder: "TokensBuilder", tokenizer: PreTrainedTokenizerBase) -> Tokens:
    rules = builder.rules
    texts = [sample.text for sample in builder.samples if isinstance(sample, Text)]
    pairs = [sample for sample in builder.samples if isinstance(sample, Pair)]
    beginnings = encode_open(tokenizer, texts + [pair.prompt for pair in pairs])  # many at once
    completions = encode_continued(tokenizer, [pair.completion for pair in pairs])
    for sample in builder.rows():
        match sample:
            case Text():  # a document unchanged, of any length: windows are cut later
                ids = next(beginnings)
                if sample.text:
                    ids += end_of(sample.text, tokenizer)
                    weights = np.ones(len(ids), np.float32)
                    builder.put(np.array(ids, np.int32), weights)
                else:
                    builder.counts["dropped_empty"] += 1
            case Pair():  # prompt and completion unchanged
                prompt = next(beginnings)
                ids = prompt + next(completions) + end_of(sample.completion, tokenizer)
                trained_from = 0 if rules.train_on == "all" else len(prompt)
                builder.add(ids, [(trained_from, len(ids), 1)])
            case Chat():  # in the tokenizer's template
                try:
                    with limited_time("the chat template"):
                        renderer = ChatRenderer(sample, tokenizer, rules)
                        rendered = renderer.sequences()
                    sequences = [_encode_rendered(each, tokenizer) for each in rendered]
                except TEMPLATE_ERRORS as error:
                    kind = "" if isinstance(error, ValueError) else "the chat template raised: "
                    builder.drop_bad(f"{kind}{one_line(error)}")
                    continue
                for name, why in renderer.notes.items():
                    builder.note(name, why, len(sequences) - 1 if name == "rendered_apart" else 1)
                for ids, spans in sequences:
                    builder.add(ids, spans)
    return builder.tokens()


def closes_texts(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Returns whether the tokenizer itself adds an end token to each text."""
    return next(encode(tokenizer, ["a"]))[-1:] == [tokenizer.eos_token_id]


def opens_texts(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Returns whether the tokenizer itself adds BOS to each text."""
    return next(encode(tokenizer, ["a"]))[:1] == [tokenizer.bos_token_id]


def bytes_of_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[np.ndarray, int]:
    """Returns [V] int64, the UTF-8 bytes of each token's text, 0 for special tokens; and how many of them the first
    token of a text does not have: the space that SentencePiece adds before a text.
    """
    vocabulary = tokenizer.get_vocab()
    special = set(tokenizer.all_special_ids)
    added = {number: token.content for number, token in tokenizer.added_tokens_decoder.items()}
    # If so, a character of a piece is a byte of the text.
    is_byte_level = tokenizer.is_fast and "ByteLevel" in repr(tokenizer.backend_tokenizer.decoder)
    bytes_V = np.zeros(max(vocabulary.values()) + 1, np.int64)
    for piece, number in vocabulary.items():
        if number in special:
            continue
        if not is_byte_level and _BYTE.fullmatch(piece):
            bytes_V[number] = 1
        elif is_byte_level and number not in added:
            bytes_V[number] = len(piece)
        else:
            text = added.get(number) or piece.replace("\N{LOWER ONE EIGHTH BLOCK}", " ")
            bytes_V[number] = len(text.encode())
    first = next(encode(tokenizer, ["a"], special=False))
    blank = int(bytes_V[first].sum()) - 1
    return bytes_V, max(0, blank)


class TokensBuilder:
    """Collects the sequences of rows under the rules for length and for rows without a trained token."""

    def __init__(self, rows: list[Row], rules: FormatRules):
        self.rules = rules
        self.read_rows = [row for row in rows if row.values is not None]
        self.counts = Counter(rows=len(self.read_rows))
        if left_out := len(rows) - len(self.read_rows):
            self.counts["left_out_by_map_row"] = left_out
        self.first = {}
        self.ids = []
        self.weights = []  # float32, factors of the tokens' loss
        self.ends = [0]  # then the end of each sequence
        self.row_ends = []
        self.is_too_long = False  # whether the current row has a sequence that is too long
        # For each row.
        self.samples = []
        self.are_too_long = []
        for row in self.read_rows:
            self.place = row.where()
            sample = None
            try:
                sample = canonical(row, rules)
            except EmptyAnswer as error:
                self.note("dropped_empty", str(error))
            except ValueError as error:
                self.drop_bad(str(error))
            self.samples.append(sample)

    def rows(self) -> Iterator[Sample]:
        """Yields the sample of each row; sequences added before the next one belong to this row."""
        for row, sample in zip(self.read_rows, self.samples, strict=True):
            self.place = row.where()
            self.is_too_long = False
            yield sample
            self.row_ends.append(self.ends[-1])
            self.are_too_long.append(self.is_too_long)

    def note(self, name: str, why: str, number: int = 1) -> None:
        self.counts[name] += number
        self.first.setdefault(name, f"{self.place}: {why}")

    def drop_bad(self, problem: str) -> None:
        """Counts a row that cannot be used; raises UserError unless bad rows are dropped."""
        if self.rules.bad_rows == "error":
            raise UserError(
                f"{self.place}: {problem}; bad_rows: drop leaves such rows out of a training, and counts them"
            )
        self.note("dropped_bad", problem)

    def add(self, ids: list[int], spans: Spans) -> None:
        """Adds a sample whose tokens in `spans` are trained. `too_long` decides about one longer than seq_len. A
        sequence without a trained token (its answer was cut off) is left out.
        """
        array = np.asarray(ids, np.int32)
        weights = np.zeros(len(ids), np.float32)
        for start, end, weight in spans:
            weights[start:end] = weight
        length = self.rules.seq_len
        policy = self.rules.too_long
        starts = range(1)
        if len(array) > length:
            why = f"{len(array)} tokens are longer than seq_len={length}"
            if policy == "error":
                raise UserError(f"{self.place}: {why}; raise it, or set too_long to drop, truncate or split")
            kind = "truncated"
            if policy == "drop":
                kind = "dropped_long"
                starts = range(0)
            elif policy == "split":
                kind = "split"
                starts = range(0, len(array), length)
            self.note(kind, why, int(not self.is_too_long))  # a chat of several sequences is one row
            self.is_too_long = True
        for start in starts:
            weights[start : start + 1] = 0  # nothing precedes it
            of_piece = weights[start : start + length]
            if of_piece.any():
                self.put(array[start : start + length], of_piece)
            else:
                self.note("dropped_untrained", "no token of it is trained")

    def put(self, ids: np.ndarray, weights: np.ndarray) -> None:
        self.ids.append(ids)
        self.weights.append(weights)
        self.ends.append(self.ends[-1] + len(ids))

    def tokens(self) -> Tokens:
        return Tokens(
            ids=np.concatenate([np.zeros(0, np.int32), *self.ids]),
            weights=np.concatenate([np.zeros(0, np.float32), *self.weights]),
            ends=np.array(self.ends[1:], np.int64),
            row_ends=np.array(self.row_ends, np.int64),
            counts=self.counts,
            first=self.first,
        )


def _encode_rendered(rendered: Rendered, tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], Spans]:
    """Encodes the text of a chat, split at the ends of its trained spans, since a server encodes the prompt alone.
    Returns the ids, and the spans of trained ones.
    """
    bounds = {0, len(rendered.text)}
    for start, end, _ in rendered.spans:
        bounds |= {start, end}
    bounds = sorted(bounds)
    pieces = [rendered.text[start:end] for start, end in pairwise(bounds)]
    for place in range(1, len(pieces)):
        if pieces[place - 1].rstrip().endswith(_stripping_markers(tokenizer)):
            pieces[place] = pieces[place].lstrip()
    first = encode(tokenizer, pieces[:1], special=False)
    encoded = [*first, *encode_continued(tokenizer, pieces[1:])]
    ids = [token for piece in encoded for token in piece]
    ends = np.cumsum([0, *map(len, encoded)]).tolist()
    starts = dict(zip(bounds, ends, strict=True))
    spans = []
    for start, end, weight in rendered.spans:
        spans.append((starts[start], starts[end], weight))
    return ids, spans


@functools.lru_cache(maxsize=8)
def _stripping_markers(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """Lists added tokens that include the white space after them, such as Phi-3's markers."""
    return tuple(token.content for token in tokenizer.added_tokens_decoder.values() if token.rstrip)


def stop_tokens(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Lists the ids of the tokens that end trained answers, that of a plain answer first, from small chats. A server
    must stop at each of them: `eos_token_id` of the generation configuration.
    """
    if not tokenizer.chat_template:
        return []
    ask = {"role": "user", "content": "question"}
    answer = {"role": "assistant", "content": "answer"}
    call = {"type": "function", "id": "call00001", "function": {"name": "look_up", "arguments": {"word": "it"}}}
    calling = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {"role": "tool", "content": "found", "name": "look_up", "tool_call_id": "call00001"}
    place = {"type": "object", "properties": {"word": {"type": "string", "description": "a word"}}}
    tool = {"type": "function", "function": {"name": "look_up", "description": "looks up", "parameters": place}}
    in_words = {"role": "system", "content": "look_up(word)"}  # for a template without tools
    rows = []
    for messages in ([ask, answer], [ask, answer, ask, answer]):
        rows.append(Row({"messages": messages}))
    for messages in ([ask, calling], [ask, calling, result, answer]):
        rows.append(Row({"messages": messages, "tools": [tool]}))
        rows.append(Row({"messages": [in_words, *messages]}))
    # A template without tools cannot render calls: such chats are dropped.
    rules = format_rules(rows, DataFields(bad_rows="drop", seq_len=1 << 20))
    tokens = tokenise(rows, rules, tokenizer)
    is_next_trained = np.append(tokens.trained[1:], False)
    ids = tokens.ids[tokens.trained & ~is_next_trained]
    return list(dict.fromkeys(ids.tolist()))


# Encoding


def encode(tokenizer: PreTrainedTokenizerBase, texts: list[str], *, special: bool = True) -> Iterator[list[int]]:
    """Yields the ids of each text, without a second BOS before one that already contains it."""
    if not texts:
        return
    encoded = tokenizer(
        texts,
        add_special_tokens=special,
        return_attention_mask=False,
        verbose=False,
    )
    twice = [tokenizer.bos_token_id] * 2 if special else None
    for ids in encoded["input_ids"]:
        has_second = ids[:2] == twice
        if ids[:3:2] == twice:
            has_second = not tokenizer.decode(ids[1]).strip()  # the text has a blank before it
        yield ids[1:] if has_second else ids


def encode_open(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> Iterator[list[int]]:
    """Encodes texts that will be continued: without the end token that the tokenizer may add."""
    closes = closes_texts(tokenizer)
    for ids in encode(tokenizer, texts):
        yield ids[:-1] if closes else ids


def encode_continued(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> Iterator[list[int]]:
    """Encodes texts that continue another one: without the space that SentencePiece adds before each text."""
    if not _puts_blank_before(tokenizer):
        yield from encode(tokenizer, texts, special=False)
        return
    before, bar = encode(tokenizer, ["\n", "|"], special=False)
    leads = ["|" if text.startswith("\n") else "\n" for text in texts]  # two line breaks may be one token
    texts = [lead + text for lead, text in zip(leads, texts, strict=True)]
    joined = encode(tokenizer, texts, special=False)
    for lead, ids in zip(leads, joined, strict=True):
        yield ids[len(bar if lead == "|" else before) :]


@functools.lru_cache(maxsize=8)
def _puts_blank_before(tokenizer: PreTrainedTokenizerBase) -> bool:
    before, probe, alone = encode(tokenizer, ["\n", "\na", "a"], special=False)
    return probe[: len(before)] == before and probe[len(before) :] != alone


def end_of(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Returns the end token to append to a text; empty if the text already ends with it."""
    eos = tokenizer.eos_token
    return [] if eos is None or text.rstrip().endswith(eos) else [tokenizer.eos_token_id]


# On disk


class Store:
    """A finished folder of tokens."""

    def __init__(self, folder: Path):
        self.folder = folder
        facts = (folder / FACTS).read_text(encoding="utf-8")
        self.facts = json.loads(facts)
        """is_text, source, dtype, counts, first, tokens_hash."""
        self.counts = self.facts["counts"]
        self.is_text = self.facts["is_text"]
        """Whether it contains documents, to be cut into windows; else each sample is a sequence."""
        self.tokens = _mapped(folder, "tokens", self.facts["dtype"])
        self.trained = _mapped(folder, "trained", "bool")
        self.ends = _mapped(folder, "ends", "int64")
        self.row_ends = _mapped(folder, "row_ends", "int64")
        self.documents = {name: _mapped(folder, name, dtype) for name, dtype in DOCUMENT_COLUMNS.items()}
        self.weights = _mapped(folder, "weights", "float32") if self.counts["weighted_tokens"] else None
        """None if all are 0 or 1."""

    def __reduce__(self):  # processes of torch's DataLoader open the files themselves
        return Store, (self.folder,)


def _mapped(folder: Path, name: str, dtype: str) -> np.ndarray:
    path = folder / f"{name}.bin"
    if not path.stat().st_size:
        return np.zeros(0, dtype)
    return np.memmap(path, dtype=dtype, mode="r")


def write_store(
    place: Path, parts: Iterable[Tokens], *, source: str, is_text: bool, largest_id: int, has_weights: bool = False
) -> Store:
    """Writes the folder `PLACE.partial`, renames it to `place` when everything is on disk, and returns it."""
    beside = place.with_name(f"{place.name}.partial")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    dtype = "uint16" if largest_id < 1 << 16 else "int32"
    names = ["tokens", "trained", "ends", "row_ends", *DOCUMENT_COLUMNS]
    hashed = ["tokens", "trained", "ends"]
    if has_weights:
        names.append("weights")
        hashed.append("weights")
    size = 0
    counts = Counter()
    first = {}
    try:
        with ExitStack() as stack:
            files = {name: stack.enter_context(open(beside / f"{name}.bin", "wb")) for name in names}
            for tokens in parts:
                trained = tokens.trained
                columns = dict.fromkeys(DOCUMENT_COLUMNS, np.zeros(0)) | vars(tokens) | tokens.documents
                columns["tokens"] = tokens.ids.astype(dtype)
                columns["trained"] = trained
                columns["ends"] = tokens.ends + size
                columns["row_ends"] = tokens.row_ends + size
                for name, file in files.items():
                    columns[name].tofile(file)
                size += len(tokens.ids)
                counts += tokens.counts
                counts["trained_tokens"] += int(trained.sum())
                counts["weighted_tokens"] += int((tokens.weights[trained] != 1).sum())
                first = tokens.first | first
        content = hashlib.sha256()
        for name in hashed:
            content.update(_mapped(beside, name, "uint8"))
        facts = {
            "source": source,
            "is_text": is_text,
            "dtype": dtype,
            "counts": {name: int(counts[name]) for name in COUNTS} | {"tokens": size},
            "first": first,
            "tokens_hash": content.hexdigest(),
        }
        (beside / FACTS).write_text(json.dumps(facts, indent=1), encoding="utf-8")
        for path in beside.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        beside.rename(place)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return Store(place)


# Preparation


@dataclass(frozen=True)
class Preparation:
    """Turns the rows of a source into sequences for training. The evaluator has subclasses with fields, which are part
    of the fingerprint. Worker processes get a copy.
    """

    def rows(self, rows: Iterator[Row], rules: FormatRules) -> Iterator[Row]:
        return rows

    def tokens(self, batch: Batch, rules: FormatRules, tokenizer: PreTrainedTokenizerBase) -> Tokens:
        return tokenise(batch.rows, rules, tokenizer)


TRAINING = Preparation()


def cache_folder(data_cache: str | None) -> Path:
    return Path(data_cache).expanduser() if data_cache else user_cache() / "data"


def fingerprint(data: FormattedSource, tokenizer: PreTrainedTokenizerBase, preparation: Preparation = TRAINING) -> str:
    rules = data.rules
    if rules.is_text:
        rules = replace(rules, seq_len=0, too_long="")  # windows are cut when they are read
    if tokenizer.is_fast:
        backend = tokenizer.backend_tokenizer.to_str()
    else:
        # For a slow tokenizer, adding BOS is an option that is not part of its vocabulary.
        vocabulary = sorted(tokenizer.get_vocab().items())
        backend = json.dumps([vocabulary, next(encode(tokenizer, ["a"]))])
    identity = [VERSION, data.source.identity, asdict(rules), data.held_out and asdict(data.held_out)]
    identity += [type(tokenizer).__name__, backend, tokenizer.split_special_tokens]
    identity += [str(tokenizer.special_tokens_map), str(tokenizer.chat_template), repr(preparation)]
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:32]


def prepare(
    data: FormattedSource,
    tokenizer: PreTrainedTokenizerBase,
    cache: Path,
    *,
    preparation: Preparation = TRAINING,
    show_progress: bool = True,
) -> Store:
    """Returns the tokens of `data`, from the cache or computed; UserError names file and line of unusable rows."""
    place = cache / fingerprint(data, tokenizer, preparation)
    if (place / FACTS).is_file():
        return Store(place)
    source = data.source
    rules = data.rules
    is_chat = rules.form is Chat
    name = "held-out rows" if data.held_out and data.held_out.wanted else source.key
    workers = 1
    if is_chat and source.size_bytes >= WORKERS_FROM_BYTES:
        workers = max(1, min(cpu_count(), free_host_bytes() // 4 // WORKER_BYTES))

    def parts(bar):
        batches = batched(preparation.rows(data.rows(), rules))
        tokenise_batch = partial(preparation.tokens, rules=rules, tokenizer=tokenizer)
        for tokens in _tokenised(batches, tokenise_batch, workers=workers):
            yield tokens
            watchdog.heartbeat()
            bar.update(len(tokens.ids))

    try:
        cache.mkdir(parents=True, exist_ok=True)
        lock = FileLock(place.with_name(f"{place.name}.lock"), fallback_to_soft=False)  # a soft one outlives a kill
        with lock.acquire(cancel_check=watchdog.heartbeat):  # no time limit: another process may be preparing
            if not (place / FACTS).is_file():
                with progress_bar(
                    is_shown=show_progress, desc=f"Preparing {name}", unit=" tokens", unit_scale=True
                ) as bar:
                    write_store(
                        place,
                        parts(bar),
                        source=source.name,
                        is_text=rules.is_text,
                        largest_id=max(tokenizer.get_vocab().values()),
                        has_weights=is_chat,
                    )
    except (OSError, NotImplementedError) as error:
        raise UserError(f"data_cache: {cache}: {one_line(error)}; free some space or name another folder") from None
    except (RuntimeError, UserError) as error:  # torch raises it wherever this process is, also while it reads a row
        if "DataLoader worker (pid" not in str(error):
            raise
        raise UserError(f"a process that tokenised ended ({one_line(error)}); was it out of memory?") from None
    # glibc keeps most freed memory, gigabytes after a text of 50 MB; other C libraries have no such function.
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)
    return Store(place)


def _tokenised(
    batches: Iterator[Batch], tokenise_batch: Callable[[Batch], Tokens], *, workers: int
) -> Iterator[Tokens]:
    """Tokenises in the order of the batches, with at most a few of them in memory."""
    if workers == 1:
        # Elsewhere the tokenizer's threads are off, since torch's DataLoader forks processes (runtime/console.py).
        before = os.environ.get("TOKENIZERS_PARALLELISM", "false")
        os.environ["TOKENIZERS_PARALLELISM"] = "true"
        try:
            yield from map(tokenise_batch, batches)
        finally:
            os.environ["TOKENIZERS_PARALLELISM"] = before
        return
    import torch  # not needed if the tokens are cached

    loader = torch.utils.data.DataLoader(
        _Tokeniser(tokenise_batch),
        sampler=batches,
        batch_size=None,  # each item is a batch
        num_workers=workers,
        worker_init_fn=_end_with_parent,
        multiprocessing_context="fork",
        generator=torch.Generator(),  # its own: the loader draws a seed, and ranks that prepare nothing do not
    )
    for tokens in loader:
        if isinstance(tokens, UserError):
            raise tokens
        yield tokens


def _end_with_parent(_worker: int) -> None:
    """Lets the kernel kill this process with its parent (PR_SET_PDEATHSIG): it would wait forever to return tokens."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


class _Tokeniser:
    """The data set of the loader's processes: an item is a tokenised batch."""

    def __init__(self, tokenise_batch: Callable[[Batch], Tokens]):
        self.tokenise_batch = tokenise_batch

    def __getitem__(self, batch: Batch) -> Tokens | UserError:
        try:
            return self.tokenise_batch(batch)
        except UserError as error:  # the loader would add its own text to a raised one
            return error
