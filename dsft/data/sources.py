"""Reads the entries of `data`: files, or a hub data set.

A data set is written as NAME, NAME:CONFIG or NAME:CONFIG:SPLIT, with a split that may be a slice such as train[:5%].
"""

import functools
import itertools
import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from dsft.config.options import DataFields
from dsft.data.formats import FormatRules
from dsft.data.readers import Row, Rows, ending, find_files, raw_size, read_file, without_filler
from dsft.errors import UserError, one_line

BATCH_ROWS, BATCH_CHARACTERS = 1000, 1 << 20


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Some rows of one file or hub data set."""

    rows: list[Row]
    place: str
    """The file, or the data set's name."""
    position: int = 0
    """Bytes of the source read up to here; 0 where that is not known."""
    first: int = 0
    """Documents before it (evaluation)."""

    def where(self, row: Row) -> str:
        has_lines = ending(self.place) in (".txt", ".jsonl", ".csv")
        return f"{self.place}, {'line' if has_lines else 'row'} {row.number}"


@dataclass(frozen=True, kw_only=True)
class Source:
    """One entry of `data` or `eval_data`."""

    name: str
    """As the user wrote it."""
    key: str
    """The option it comes from, for messages."""
    files: tuple[str, ...] = ()
    hub: tuple[str, str | None, str] | None = None
    """(name, config, split) on the hub; None with files."""
    streaming: bool = False
    """Read from the hub without a copy on disk."""

    @property
    def total_bytes(self) -> int | None:
        """Of all files as they lie; None where it is not known."""
        return sum(map(raw_size, self.files)) if self.files else None

    @property
    def identity(self) -> list[Any]:
        """What changes when the content does.

        Path, size and time of change of each file; on the hub name and split, and the revision that is cached.
        """
        if self.files:
            return [[str(Path(file).resolve()), raw_size(file), Path(file).stat().st_mtime_ns] for file in self.files]
        return [*self.hub, getattr(self._load(), "_fingerprint", "")]

    def batches(self) -> Iterator[Batch]:
        """Reads all rows in order.

        Raises:
            UserError: naming the file and line, or the data set, that cannot be read.
        """
        before = 0
        for place, rows in self._parts():
            batch: list[Row] = []
            size = position = 0
            for row, position in rows:
                batch.append(row)
                size += _characters(row.values)
                if len(batch) == BATCH_ROWS or size >= BATCH_CHARACTERS:
                    yield Batch(rows=batch, place=place, position=before + position)
                    batch, size = [], 0
            if batch:
                yield Batch(rows=batch, place=place, position=before + position)
            before += raw_size(place) if self.files else 0

    def first_batch(self) -> Batch:
        """Reads the first rows.

        Raises:
            UserError: also where there is no row at all.
        """
        for batch in self.batches():
            return batch
        raise UserError([f"{self.name} holds no rows"])

    def _parts(self) -> Iterator[tuple[str, Rows]]:
        if self.files:
            yield from ((file, read_file(file)) for file in self.files)
        else:
            rows = enumerate(self._load(), start=1)
            yield self.hub[0], ((Row(without_filler(values), number), 0) for number, values in rows)

    def _load(self) -> Any:
        return _load_from_hub(*self.hub, streaming=self.streaming)


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """A seeded share of the rows: one of each 1 / fraction consecutive ones."""

    fraction: float
    seed: int
    wanted: bool
    """True for the rows that are held out, False for the others."""

    def rows(self) -> Iterator[int]:
        """Yields the rows that are held out, from 0, without end."""
        share, generator = Fraction(str(self.fraction)), random.Random(self.seed)
        for block in itertools.count():
            yield generator.randrange(math.ceil(block / share), math.ceil((block + 1) / share))


def batches_of(source: Source, held_out: HeldOut | None) -> Iterator[Batch]:
    """Reads all rows of a source, or those that `held_out` wants, in order."""
    if held_out is None:
        yield from source.batches()
        return
    first, held_out_rows = 0, held_out.rows()
    following = next(held_out_rows)
    for batch in source.batches():
        held_out_here = set()
        while following < first + len(batch.rows):
            held_out_here.add(following - first)
            following = next(held_out_rows)
        first += len(batch.rows)
        # A piece of a text is a document by itself here.
        yield replace(
            batch,
            rows=[
                row._replace(starts_document=True, ends_document=True)
                for index, row in enumerate(batch.rows)
                if (index in held_out_here) == held_out.wanted
            ],
        )


@dataclass(frozen=True, kw_only=True)
class FormattedSource:
    """A source and how its rows are read."""

    source: Source
    rules: FormatRules
    held_out: HeldOut | None = None
    """The share of the rows that is read; None for all of them."""

    def batches(self) -> Iterator[Batch]:
        """Reads the rows in order."""
        return batches_of(self.source, self.held_out)

    def __str__(self) -> str:
        return f"{self.source.name} ({self.rules.format})"


@functools.cache
def _load_from_hub(name: str, config: str | None, split: str, *, streaming: bool) -> Any:
    """Loads a data set once for everyone in this process who reads it."""
    import datasets

    try:
        return datasets.load_dataset(name, config, split=split, streaming=streaming)
    except Exception as error:  # the hub client raises dozens of kinds; each is the user's to see in one line
        raise UserError(
            [
                f"{name} is neither a file here (seen from {Path.cwd()}) nor a hub data set that can be read:"
                f" {type(error).__name__}: {one_line(error)[:300]}"
            ]
        ) from None


def _characters(value: Any) -> int:
    """Counts the characters of all texts within a row."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        value = value.values()
    return sum(map(_characters, value)) if isinstance(value, Iterable) and not isinstance(value, bytes) else 0


def find_sources(entries: list[str], config: DataFields, *, key: str, split: str, problems: list[str]) -> list[Source]:
    """Finds the source of each entry; what is wrong goes to `problems`.

    Args:
        split: of a hub data set that names none.
    """
    sources = []
    for entry in entries:
        try:
            files = find_files(entry, key)
        except UserError as error:
            problems += error.problems
            continue
        name, _, rest = entry.partition(":")
        hub_config, _, hub_split = rest.partition(":")
        hub = None if files else (name, hub_config or config.data_name, hub_split or split)
        sources.append(
            Source(name=entry, key=key, files=tuple(files), hub=hub, streaming=getattr(config, "streaming", False))
        )
    return sources
