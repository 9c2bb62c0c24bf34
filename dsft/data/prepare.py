"""Tokenises a source once, on all cores, for every rank that sees the same cache folder and for every later run.

The first process to come holds a lock and works; the others wait for it outside of any collective, and send their
watchdogs heartbeats meanwhile.
"""

import ctypes
import hashlib
import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from os.path import getsize
from pathlib import Path

from filelock import FileLock, Timeout
from transformers import PreTrainedTokenizerBase

from dsft.data.formats import Chat, FormatRules, FormattedSource
from dsft.data.sources import Batch
from dsft.data.store import FACTS, Store, StoreWriter
from dsft.data.tokenization import Tokens, tokenise
from dsft.errors import UserError, one_line
from dsft.runtime.console import progress_bar
from dsft.runtime.disk import user_cache
from dsft.runtime.hardware import cpu_count, free_host_bytes
from dsft.watchdog import client as watchdog

VERSION = 6
"""Of the folders; a change of code that changes tokens raises it."""
WORKERS_FROM_BYTES, WORKERS_FROM_BYTES_OF_CHATS = 64 << 20, 8 << 20
"""Smaller sources are left to this process: workers take seconds to start. Texts and pairs are tokenised many at once
by the tokenizer's own threads, chats one by one.
"""
WORKER_BYTES = 400 << 20
"""What a worker takes with its imports; together they take at most a quarter of the memory that is free."""


@dataclass(frozen=True)
class Preparation:
    """What is made of the rows of a source: sequences for training. The evaluator has kinds of its own.

    Its fields are part of the fingerprint, and worker processes get a copy.
    """

    def batches(
        self, batches: Iterator[Batch], rules: FormatRules, tokenizer: PreTrainedTokenizerBase
    ) -> Iterator[Batch]:
        """Yields the batches to be tokenised."""
        return batches

    def tokens(self, batch: Batch, rules: FormatRules, tokenizer: PreTrainedTokenizerBase) -> Tokens:
        """Tokenises a batch.

        Raises:
            UserError: with file and line of a row that cannot be used.
        """
        return tokenise(batch, rules, tokenizer)


TRAINING = Preparation()


def cache_folder(data_cache: str | None) -> Path:
    """The folder of the option `data_cache`, else `dsft/data` in the user's cache."""
    return Path(data_cache).expanduser() if data_cache else user_cache() / "data"


def fingerprint(data: FormattedSource, tokenizer: PreTrainedTokenizerBase, preparation: Preparation = TRAINING) -> str:
    """Hashes everything that decides the tokens."""
    rules = data.rules
    if rules.is_text:
        rules = replace(rules, seq_len=0, too_long="")  # windows are cut when they are read
    backend = (
        tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else json.dumps(sorted(tokenizer.get_vocab().items()))
    )
    identity = [
        VERSION,
        data.source.identity,
        asdict(rules),
        data.held_out and asdict(data.held_out),
        type(tokenizer).__name__,
        backend,
        str(tokenizer.special_tokens_map),
        str(tokenizer.chat_template),
    ]
    if preparation != TRAINING:
        identity.append(repr(preparation))
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:32]


def prepare(
    data: FormattedSource,
    tokenizer: PreTrainedTokenizerBase,
    cache: Path,
    *,
    preparation: Preparation = TRAINING,
    show_progress: bool = True,
) -> Store:
    """Returns the tokens of `data`, made now or earlier.

    Raises:
        UserError: naming file and line of what cannot be used, or where nothing is left to train on.
    """
    place = cache / fingerprint(data, tokenizer, preparation)
    if (place / FACTS).is_file():
        return Store(place)
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"data_cache: {cache} cannot be made ({error.strerror}); name another folder") from None
    came, failed = time.time(), place.with_name(f"{place.name}.failed")
    # A soft lock would outlive a killed process.
    lock = FileLock(place.with_name(f"{place.name}.lock"), fallback_to_soft=False)
    while not lock.is_locked:  # however long another process is at work; the system frees the lock of a dead one
        try:
            lock.acquire(timeout=1)
        except Timeout:
            watchdog.heartbeat()
        except (OSError, NotImplementedError) as error:
            raise UserError(
                f"data_cache: {cache}: no file can be locked there ({one_line(error)}); name another folder"
            ) from None
    try:
        if (place / FACTS).is_file():
            return Store(place)
        if failed.is_file() and failed.stat().st_mtime >= came:  # while this process waited: it would fail the same way
            raise UserError(json.loads(failed.read_text(encoding="utf-8")))
        try:
            _write(data, tokenizer, place, preparation, show_progress=show_progress)
        except UserError as error:
            with suppress(OSError):  # of a full disk, say
                failed.write_text(json.dumps(error.problems), encoding="utf-8")
            raise
        failed.unlink(missing_ok=True)
    finally:
        lock.release()
    # glibc keeps most of what is freed, gigabytes after a document of 50 MB; other C libraries have no such function.
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)
    return Store(place)


def _write(
    data: FormattedSource,
    tokenizer: PreTrainedTokenizerBase,
    place: Path,
    preparation: Preparation,
    *,
    show_progress: bool,
) -> None:
    start, source, rules = time.perf_counter(), data.source, data.rules
    total_bytes = sum(map(getsize, source.files)) if source.files else None
    name = "held-out rows" if data.held_out and data.held_out.wanted else source.key
    bar = progress_bar(is_shown=show_progress, total=total_bytes, desc=f"Preparing {name}", unit="B", unit_scale=True)
    try:
        with bar, StoreWriter(place, largest_id=max(tokenizer.get_vocab().values())) as writer:
            batches = preparation.batches(data.batches(), rules, tokenizer)
            tokenised = partial(preparation.tokens, rules=rules, tokenizer=tokenizer)
            smallest = WORKERS_FROM_BYTES_OF_CHATS if Chat in rules.forms else WORKERS_FROM_BYTES
            is_small = total_bytes is not None and total_bytes < smallest
            most = min(cpu_count(), free_host_bytes() // 4 // WORKER_BYTES)
            for batch, tokens in _tokenised(batches, tokenised, workers=1 if is_small else max(1, most)):
                writer.append(tokens)
                watchdog.heartbeat()
                bar.update(batch.position - bar.n if batch.position else 0)
                bar.set_postfix_str(f"{writer.size / 1e6:.1f}M tokens", refresh=False)
            has_rows = writer.counts["rows"] or data.held_out is None
            if not writer.counts["trained_tokens"] and has_rows and not rules.keep_all:
                dropped = {
                    name: number
                    for name, number in writer.counts.items()
                    if number and name not in ("rows", "trained_tokens")
                }
                raise UserError(
                    f"{source.key}: {source.name}: {writer.counts['rows']} rows give no token to train on (of"
                    f" {writer.size} tokens; {dropped or 'nothing left out'})"
                    + ("; raise seq_len, or set too_long to truncate or split" if dropped.get("dropped_long") else "")
                )
            seconds = time.perf_counter() - start
            writer.finish(format=rules.format, is_text=rules.is_text, source=source.name, seconds=seconds)
    except OSError as error:
        raise UserError(
            f"data_cache: {place.parent}: {one_line(error)}; free some space or name another folder"
        ) from None


def _tokenised(
    batches: Iterator[Batch], tokenised: Callable[[Batch], Tokens], *, workers: int
) -> Iterator[tuple[Batch, Tokens]]:
    """Tokenises in the order of the batches, with at most a few of them in memory."""
    if workers == 1:
        # The tokenizer's threads are off elsewhere, for the processes that torch's loader forks (runtime/console.py).
        before = os.environ.get("TOKENIZERS_PARALLELISM", "false")
        os.environ["TOKENIZERS_PARALLELISM"] = "true"
        try:
            yield from ((batch, tokenised(batch)) for batch in batches)
        finally:
            os.environ["TOKENIZERS_PARALLELISM"] = before
        return
    # "spawn": this process has threads (of the process group, of tokenizers), which a fork would copy half.
    with ProcessPoolExecutor(
        workers, mp_context=multiprocessing.get_context("spawn"), initializer=_start_worker, initargs=(tokenised,)
    ) as pool:
        waiting: list[tuple[Batch, Future]] = []
        try:
            started = pool.submit(int)
            for batch in batches:
                if not started.done():  # workers take seconds to start; until then this process does it
                    yield batch, tokenised(batch)
                    continue
                waiting.append((batch, pool.submit(_work, batch)))
                if len(waiting) > 2 * workers:
                    yield waiting[0][0], waiting.pop(0)[1].result()
            while waiting:
                yield waiting[0][0], waiting.pop(0)[1].result()
        except BrokenProcessPool:
            raise UserError(
                "a process that tokenised was killed (out of memory?); what was prepared so far is removed"
            ) from None
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


_worker: Callable[[Batch], Tokens] | None = None


def _start_worker(tokenised: Callable[[Batch], Tokens]) -> None:
    global _worker
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there is a worker for each core
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process ends the workers

    def exit_with_parent() -> None:  # a worker of a killed process would wait for work for ever
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=exit_with_parent, daemon=True).start()
    _worker = tokenised


def _work(batch: Batch) -> Tokens:
    return _worker(batch)
