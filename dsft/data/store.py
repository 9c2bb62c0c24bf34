"""Tokenises a source once, on all cores, for every rank that sees the same cache folder and for every later run.

The first process to come holds a lock and works; the others wait for it outside of any collective, and send their
watchdogs heartbeats meanwhile.

The tokens lie on disk, read without loading them, in a folder that is complete or not there:

tokens.bin    [F] uint16 or int32: all sequences (documents, where the data is text) end to end
trained.bin   [F] bool
weights.bin   [F] float32, by which the loss of each token is multiplied; of chats, whose messages may have weights
ends.bin      [S] int64
hashes.bin, document_bytes.bin, document_words.bin    [S] uint64, int64, int64, of the texts; only of an evaluation
facts.json    counts, what the tokens were made from, and the SHA-256 of tokens, trained, ends and weights
"""

import ctypes
import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock
from transformers import PreTrainedTokenizerBase

from dsft.data.formats import Chat, FormatRules, FormattedSource
from dsft.data.sources import Batch
from dsft.data.tokens import Tokens, encode, tokenise
from dsft.errors import UserError, one_line
from dsft.job import beat as watchdog
from dsft.runtime.console import progress_bar
from dsft.runtime.disk import user_cache
from dsft.runtime.hardware import cpu_count, free_host_bytes

FACTS = "facts.json"
COUNTS = (
    *("rows", "left_out_by_map_row", "truncated", "split"),
    *("dropped_long", "dropped_untrained", "dropped_empty", "dropped_bad"),
    *("rendered_apart", "unrendered", "unprompted", "empty_thinking", "trained_tokens", "weighted_tokens"),
)
"""What is counted of every source, in the order of the data line; `tokens` follow. Of chats:
rendered_apart (sequences for answers that the template renders otherwise in a longer chat), unrendered, unprompted
(answers that no generation prompt leads to), empty_thinking; weighted_tokens are trained ones of a weight other than 1.
"""
VERSION = 14  # of the folders; a change of code that changes tokens raises it
WORKERS_FROM_BYTES = 64 << 20
WORKERS_FROM_BYTES_OF_CHATS = 8 << 20
"""Smaller sources are left to this process: workers take seconds to start. Texts and pairs are tokenised many at once
by the tokenizer's own threads, chats one by one.
"""
WORKER_BYTES = 400 << 20
"""What a worker takes with its imports; together they take at most a quarter of the memory that is free."""


def _mapped(path: Path, dtype: str) -> np.ndarray:
    return np.memmap(path, dtype=dtype, mode="r") if path.stat().st_size else np.zeros(0, dtype)


def _column(name: str, dtype: str = "") -> cached_property:
    """A file of a store, opened when it is asked for; `facts` know the dtype of tokens."""
    return cached_property(lambda store: _mapped(store.folder / f"{name}.bin", dtype or store.facts["dtype"]))


@dataclass(frozen=True)
class Store:
    """A finished folder."""

    folder: Path

    def __reduce__(self):  # processes of torch's loader open the files themselves
        return Store, (self.folder,)

    @cached_property
    def facts(self) -> dict[str, Any]:
        """is_text, source, dtype, counts, first, tokens_hash."""
        return json.loads((self.folder / FACTS).read_text(encoding="utf-8"))

    tokens = _column("tokens")
    trained = _column("trained", "bool")
    ends = _column("ends", "int64")
    hashes = _column("hashes", "uint64")
    document_bytes = _column("document_bytes", "int64")
    document_words = _column("document_words", "int64")

    @cached_property
    def weights(self) -> np.ndarray | None:
        """None if they are 0 and 1."""
        return _mapped(self.folder / "weights.bin", "float32") if self.counts["weighted_tokens"] else None

    @property
    def is_text(self) -> bool:
        """Documents, to be cut into windows; else samples that are sequences as they are."""
        return self.facts["is_text"]

    @property
    def counts(self) -> dict[str, int]:
        return self.facts["counts"]


class StoreWriter:
    """Writes a folder beside its place, `PLACE.partial`, and puts it there when all is on disk."""

    def __init__(self, place: Path, *, largest_id: int, has_weights: bool = False):
        self.place, self.partial = place, place.with_name(f"{place.name}.partial")
        shutil.rmtree(self.partial, ignore_errors=True)
        self.partial.mkdir(parents=True)
        self.dtype = "uint16" if largest_id < 1 << 16 else "int32"
        self.files = {}
        names = ["tokens", "trained", "ends", "hashes", "document_bytes", "document_words"]
        for name in [*names, "weights"] if has_weights else names:
            self.files[name] = open(self.partial / f"{name}.bin", "wb")  # noqa: SIM115
        self.size, self.counts = 0, Counter()
        self.first: dict[str, str] = {}

    def append(self, tokens: Tokens) -> None:
        tokens.ids.astype(self.dtype).tofile(self.files["tokens"])
        tokens.trained.tofile(self.files["trained"])
        if "weights" in self.files:
            weights = tokens.trained if tokens.weights is None else tokens.weights
            weights.astype(np.float32).tofile(self.files["weights"])
        (tokens.ends + self.size).tofile(self.files["ends"])
        for name in ("hashes", "document_bytes", "document_words"):
            getattr(tokens, name).tofile(self.files[name])
        self.size += len(tokens.ids)
        self.counts += tokens.counts
        self.counts["trained_tokens"] += int(tokens.trained.sum())
        self.first = tokens.first | self.first

    def finish(self, *, source: str, is_text: bool) -> Store:
        for file in self.files.values():
            file.flush()
        content = hashlib.sha256()
        for name in ("tokens", "trained", "ends", "weights"):
            if name in self.files:
                content.update(_mapped(self.partial / f"{name}.bin", "uint8"))
        facts = {
            "source": source,
            "is_text": is_text,
            "dtype": self.dtype,
            "counts": {name: int(self.counts[name]) for name in COUNTS} | {"tokens": self.size},
            "first": self.first,
            "tokens_hash": content.hexdigest(),
        }
        self.files["facts"] = open(self.partial / FACTS, "w", encoding="utf-8")  # noqa: SIM115
        json.dump(facts, self.files["facts"], indent=1)
        for file in self.files.values():
            file.flush()
            os.fsync(file.fileno())
        self.partial.rename(self.place)
        return Store(self.place)

    def __enter__(self) -> "StoreWriter":
        return self

    def __exit__(self, *_: Any) -> None:  # removes what was not finished
        for file in self.files.values():
            file.close()
        shutil.rmtree(self.partial, ignore_errors=True)


# Preparation


@dataclass(frozen=True)
class Preparation:
    """What is made of the rows of a source: sequences for training. The evaluator has kinds of its own, with fields,
    which are part of the fingerprint. Worker processes get a copy.
    """

    def batches(
        self, batches: Iterator[Batch], rules: FormatRules, tokenizer: PreTrainedTokenizerBase
    ) -> Iterator[Batch]:
        """Yields the batches to be tokenised."""
        return batches

    def tokens(self, batch: Batch, rules: FormatRules, tokenizer: PreTrainedTokenizerBase) -> Tokens:
        """Tokenises a batch; raises UserError with file and line of a row that cannot be used."""
        return tokenise(batch, rules, tokenizer)


TRAINING = Preparation()


def cache_folder(data_cache: str | None) -> Path:
    return Path(data_cache).expanduser() if data_cache else user_cache() / "data"


def fingerprint(data: FormattedSource, tokenizer: PreTrainedTokenizerBase, preparation: Preparation = TRAINING) -> str:
    """Hashes everything that decides the tokens."""
    rules = data.rules
    if rules.is_text:
        rules = replace(rules, seq_len=0, too_long="")  # windows are cut when they are read
    if tokenizer.is_fast:
        backend = tokenizer.backend_tokenizer.to_str()
    else:
        # Whether it puts BOS before a text is an option of such a tokenizer, not of its vocabulary.
        backend = json.dumps([sorted(tokenizer.get_vocab().items()), next(encode(tokenizer, ["a"]))])
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
    """Returns the tokens of `data`, made now or earlier; UserError names file and line of what cannot be used."""
    place = cache / fingerprint(data, tokenizer, preparation)
    if (place / FACTS).is_file():
        return Store(place)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        lock = FileLock(place.with_name(f"{place.name}.lock"), fallback_to_soft=False)  # a soft one outlives a kill
        with lock.acquire(cancel_check=watchdog.heartbeat):  # however long another process is at work that has it
            if not (place / FACTS).is_file():
                _write(data, tokenizer, place, preparation, show_progress)
    except (OSError, NotImplementedError) as error:
        raise UserError(f"data_cache: {cache}: {one_line(error)}; free some space or name another folder") from None
    # glibc keeps most of what is freed, gigabytes after a text of 50 MB; other C libraries have no such function.
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)
    return Store(place)


def _write(
    data: FormattedSource,
    tokenizer: PreTrainedTokenizerBase,
    place: Path,
    preparation: Preparation,
    show_progress: bool,
) -> None:
    source = data.source
    rules = data.rules
    name = "held-out rows" if data.held_out and data.held_out.wanted else source.key
    smallest = WORKERS_FROM_BYTES_OF_CHATS if rules.form is Chat else WORKERS_FROM_BYTES
    workers = 1
    if source.size_bytes >= smallest:
        workers = max(1, min(cpu_count(), free_host_bytes() // 4 // WORKER_BYTES))
    bar = progress_bar(is_shown=show_progress, desc=f"Preparing {name}", unit=" tokens", unit_scale=True)
    largest_id = max(tokenizer.get_vocab().values())
    with bar, StoreWriter(place, largest_id=largest_id, has_weights=rules.form is Chat) as writer:
        batches = preparation.batches(data.batches(), rules, tokenizer)
        tokenise_batch = partial(preparation.tokens, rules=rules, tokenizer=tokenizer)
        for tokens in _tokenised(batches, tokenise_batch, workers=workers):
            writer.append(tokens)
            watchdog.heartbeat()
            bar.update(len(tokens.ids))
        writer.finish(is_text=rules.is_text, source=source.name)


def _tokenised(
    batches: Iterator[Batch], tokenise_batch: Callable[[Batch], Tokens], *, workers: int
) -> Iterator[Tokens]:
    """Tokenises in the order of the batches, with at most a few of them in memory."""
    if workers == 1:
        # The tokenizer's threads are off elsewhere, for the processes that torch's loader forks (runtime/console.py).
        before = os.environ.get("TOKENIZERS_PARALLELISM", "false")
        os.environ["TOKENIZERS_PARALLELISM"] = "true"
        try:
            for batch in batches:
                yield tokenise_batch(batch)
        finally:
            os.environ["TOKENIZERS_PARALLELISM"] = before
        return
    # This process has threads (of the process group, of tokenizers), which a fork would copy half.
    spawn = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=spawn, initializer=_start_worker, initargs=(tokenise_batch,))
    waiting: deque[Future] = deque()
    try:
        for batch in batches:
            with _without_program():  # each may start a process
                waiting.append(pool.submit(_work, batch))
            if len(waiting) > 2 * workers:
                yield waiting.popleft().result()
        for future in waiting:
            yield future.result()
    except BrokenProcessPool:
        problem = "a process that tokenised was killed (out of memory?); what was prepared so far is removed"
        raise UserError(problem) from None
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


@contextmanager
def _without_program() -> Iterator[None]:
    """Hides the user's program from processes that start in here: spawn runs it again in each of them. One that
    evaluates at its top, without `if __name__ == "__main__"`, would wait there for the lock that is held for it.
    """
    main = vars(sys.modules["__main__"])
    hidden = {name: main.pop(name) for name in ("__file__", "__spec__") if name in main}
    main["__spec__"] = None  # get_preparation_data of multiprocessing/spawn.py goes by these two
    try:
        yield
    finally:
        main.update(hidden)


_worker: Callable[[Batch], Tokens] | None = None  # of a worker process


def _start_worker(tokenise_batch: Callable[[Batch], Tokens]) -> None:
    global _worker
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there is a worker for each core
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process ends the workers

    def exit_with_parent() -> None:  # a worker of a killed process would wait for work for ever
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=exit_with_parent, daemon=True).start()
    _worker = tokenise_batch


def _work(batch: Batch) -> Tokens:
    return _worker(batch)
