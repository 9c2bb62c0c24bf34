"""Reads the entries of `data`, row by row: local files, or a hub data set.

A hub data set is written as NAME, NAME:CONFIG or NAME:CONFIG:SPLIT, with a split that may be a slice (train[:5%]).

Rows of files are numbered, and an error names file and line; only a .json file that is one list is loaded whole.
`datasets` reads hub data sets only: for files it guesses the types of columns over all rows, fills keys of other rows
with None, and loses line numbers.
"""

import csv
import functools
import glob
import io
import json
import math
import os
import random
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from os.path import getsize
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from dsft.config import user_code
from dsft.config.options import DataFields
from dsft.errors import UserError, one_line

ENDINGS = (".txt", ".json", ".jsonl", ".csv", ".tsv", ".parquet", ".arrow")
OTHER_NAMES = {".ndjson": ".jsonl", ".jsonlines": ".jsonl"}  # of file extensions
# Word in the name of a file or folder -> its split, as in `datasets` (data_files.py, SPLIT_KEYWORDS).
SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
COMPRESSED = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}  # further extension of text files -> pyarrow's name
PACKED = (".xz", ".zip", ".lz4", ".7z")  # extensions that are not read: refused, not skipped
ABOUT_DATA = ("dataset_info.json", "dataset_dict.json", "state.json")  # `datasets.save_to_disk` writes them beside rows
LONGEST_TEXT = 1 << 30  # bytes of a text file, which is one document and one call of the tokenizer
WHITE_SPACE = re.compile(r"\s")
NEAR_CUT = 1000  # characters after a cut in which white space is searched
BATCH_ROWS = 1000
BATCH_CHARACTERS = 1 << 20
Values = dict[str, Any]  # of a row, by column
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Row(NamedTuple):
    """A row of a source; a text file is one row."""

    values: Values | None  # None if `map_row` left it out
    number: int = 1  # from 1 in its file or data set: the line if the format has lines, else the row
    place: str = ""  # the file, or the data set's name

    def where(self) -> str:
        has_lines = ending(self.place) in (".txt", ".jsonl", ".csv", ".tsv")
        return f"{self.place}, {'line' if has_lines else 'row'} {self.number}"


class Batch(NamedTuple):
    """Consecutive rows of one file or hub data set."""

    rows: list[Row]
    first: int = 0  # number of rows before it


def batched(rows: Iterable[Row]) -> Iterator[Batch]:
    first = 0
    size = 0
    batch = []
    for row in rows:
        is_full = len(batch) == BATCH_ROWS or size >= BATCH_CHARACTERS
        if batch and (is_full or row.place != batch[0].place):
            yield Batch(batch, first)
            first += len(batch)
            size = 0
            batch = []
        batch.append(row)
        size += len(str(row.values))
    if batch:
        yield Batch(batch, first)


@dataclass(frozen=True, kw_only=True)
class Source:
    """One entry of `data` or `eval_data`."""

    name: str  # as the user wrote it
    key: str  # its option, for messages
    files: tuple[str, ...] = ()
    other_splits: tuple[str, ...] = ()  # files beside these that are not read
    hub: tuple[str, str | None, str] | None = None  # (name, config, split) on the hub; None with files
    map_row: Callable[[Values], Values | None] | None = None
    """The user's function, called with each row before anything else reads it."""
    text_column: str = "text"  # column name of a text file's content

    @property
    def identity(self) -> list[Any]:
        """Facts that change with the content: path, size and modification time of each file; for the hub, name, split
        and fingerprint of the loaded data set; the source of `map_row`.
        """
        facts = []
        for file in map(Path, self.files):
            status = file.stat()
            facts.append([str(file.resolve()), status.st_size, status.st_mtime_ns])
        if self.hub:
            facts += [*self.hub, _load_from_hub(*self.hub)._fingerprint]
        if self.map_row:
            facts.append(user_code.digest(self.map_row))
        return facts

    @property
    def size_bytes(self) -> int:
        if self.files:
            return sum(map(getsize, self.files))
        return _load_from_hub(*self.hub).data.nbytes

    def rows(self) -> Iterator[Row]:
        """Yields all rows in order; UserError names the file and line, or the data set, that cannot be read."""
        for place in self.files or self.hub[:1]:
            if self.hub:
                numbered = enumerate(_load_from_hub(*self.hub), start=1)
                rows = (Row(values, number) for number, values in numbered)
            else:
                rows = read_file(place)
            for row in rows:
                row = row._replace(place=place)
                if ending(place) == ".txt":
                    row = row._replace(values={self.text_column: row.values["text"]})
                if self.map_row:
                    row = row._replace(values=user_code.mapped(self.map_row, row.values, row.where))
                yield row

    def first_rows(self) -> list[Row]:
        for batch in batched(row for row in self.rows() if row.values is not None):
            return batch.rows
        raise UserError(f"{self.name} contains no rows, or map_row leaves all of them out")


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """A share of the rows, drawn by seed: one of every 1 / fraction consecutive rows. For a text file, its end."""

    fraction: float
    seed: int
    wanted: bool  # True for the held-out rows, False for the rest

    def is_held_out(self, number: int) -> bool:
        """Whether the row of this number, from 0, is the one drawn from its block."""
        share = Fraction(str(self.fraction))
        block = math.floor(number * share)
        generator = random.Random(f"{self.seed} {block}")
        first = math.ceil(block / share)
        return number == generator.randrange(first, math.ceil((block + 1) / share))

    def rows(self, rows: Iterable[Row]) -> Iterator[Row]:
        number = 0
        for row in rows:
            if row.values is None:
                if not self.wanted:
                    yield row
            elif ending(row.place) == ".txt":
                ((column, text),) = row.values.items()
                cut = round(len(text) * (1 - self.fraction))
                if blank := WHITE_SPACE.search(text, cut, cut + NEAR_CUT):  # not within a word
                    cut = blank.start()
                part = text[cut:] if self.wanted else text[:cut]
                yield row._replace(values={column: part})
            else:
                if self.is_held_out(number) == self.wanted:
                    yield row
                number += 1


def find_sources(entries: list[str], config: DataFields, *, key: str, problems: list[str]) -> list[Source]:
    """Returns the source of each entry of the option `key`: the files of a path, folder or glob by name, else a hub
    data set. Paths without data are added to `problems`.
    """
    option = "eval_split" if key == "eval_data" else "data_split"
    split = getattr(config, option)  # for a hub data set without one in its name
    sources = []
    try:
        map_row = config.map_row and user_code.load("map_row", config.map_row)
    except UserError as error:
        problems += error.problems
        return []
    for entry in entries:
        try:
            files = _find_files(entry)
            if map_row and any(ending(file) == ".txt" for file in files):
                raise ValueError(f"{entry} has a text file, without rows that map_row could be called with")
        except ValueError as error:
            problems.append(f"{key}: {error}")
            continue
        of_split = files
        common = os.path.commonpath(files) if files else ""
        split_of = {file: _split_of(str(file).removeprefix(common)) for file in files}
        if len({*split_of.values()}) > 1:
            wanted = {part.partition("[")[0] for part in split.split("+")}
            of_split = [file for file in files if split_of[file] in wanted]
        others = [file.name for file in files if file not in of_split]
        if others and not of_split:
            names = ", ".join(others)
            problems.append(f"{key}: {entry} has no file of the split {split} ({option}); the files are {names}")
            continue
        name, _, rest = entry.partition(":")
        hub_config, _, hub_split = rest.partition(":")
        source = Source(
            name=entry,
            key=key,
            files=tuple(map(str, of_split)),
            other_splits=tuple(others),
            hub=None if files else (name, hub_config or config.data_name, hub_split or split),
            map_row=map_row,
            text_column=config.text_column,
        )
        sources.append(source)
    return sources


def _find_files(entry: str) -> list[Path]:
    """Lists the files of a path, folder or glob; empty for a possible hub name. ValueError if there is no data."""
    kinds = f"{', '.join(ENDINGS)} (also with {', '.join(COMPRESSED)})"
    path = Path(entry).expanduser()
    if path.is_dir():
        files = []
        for file in sorted(path.iterdir()):
            is_data = ending(file) or (file.suffix.lower() in PACKED and ending(file.stem))
            if is_data and file.name[0] != "." and file.name not in ABOUT_DATA:
                files.append(file)
    elif path.is_file():
        files = [path]
    else:
        files = [Path(file) for file in sorted(glob.glob(str(path), recursive=True))]
    files = [file for file in files if not file.is_dir()]
    if not files and path.is_dir():
        raise ValueError(f"the folder {entry} contains no {kinds} file")
    has_folders = entry.partition(":")[0].count("/") > 1
    is_path = has_folders or "*" in entry or entry.startswith((".", "~", "/"))
    if not files and (is_path or ending(entry)):
        raise ValueError(f"{entry} does not exist (working directory: {Path.cwd()})")
    for file in files:
        if not file.exists():
            raise ValueError(f"{file} is a link to a file that does not exist")
        if not ending(file):
            raise ValueError(f"{file} has none of the endings {kinds}")
    return files


def _split_of(path: str) -> str:
    """Returns the split that the last such word in a path names; else train."""
    words = re.split(r"[-._ 0-9/]+", path.lower())
    return next((SPLITS[word] for word in reversed(words) if word in SPLITS), "train")


def ending(path: str | Path) -> str:
    """Returns .jsonl for a.jsonl and for a.jsonl.gz; "" for extensions that are not in ENDINGS."""
    path = Path(str(path).lower())
    is_compressed = path.suffix in COMPRESSED
    suffix = Path(path.stem).suffix if is_compressed else path.suffix
    suffix = OTHER_NAMES.get(suffix, suffix)
    if suffix not in ENDINGS or (is_compressed and suffix in (".parquet", ".arrow")):
        return ""
    return suffix


@functools.cache
def _load_from_hub(name: str, config: str | None, split: str) -> Any:
    import datasets  # takes a second, and files do not need it

    try:
        return datasets.load_dataset(name, config, split=split)
    except Exception as error:  # the hub client raises dozens of kinds; each is reported in one line
        raise UserError(
            f"{name} is neither a file (working directory: {Path.cwd()}) nor a hub data set that can be read:"
            f" {type(error).__name__}: {one_line(error)}"
        ) from None


# Files


def read_file(path: str) -> Iterator[Row]:
    """Yields the rows of one file; UserError names the file, and the line if the format has lines."""
    if getsize(path) == 0:
        raise UserError(f"{path} is empty")
    readers = {
        ".txt": _read_text,
        ".csv": _read_csv,
        ".tsv": _read_csv,
        ".parquet": _read_columnar,
        ".arrow": _read_columnar,
    }
    kind = ending(path)
    try:
        yield from readers.get(kind, _read_json)(path)
    except UserError:
        raise
    except Exception as error:  # from five libraries; each is reported in one line
        raise UserError(f"{path} cannot be read as {kind[1:]}: {one_line(error)}") from None


def _open(path: str) -> BinaryIO:
    compression = COMPRESSED.get(Path(path).suffix.lower())
    if not compression:
        return open(path, "rb")
    import pyarrow  # not needed by a launch

    # Raises if the file is truncated, even at the end of a frame.
    return io.BufferedReader(pyarrow.input_stream(path, compression=compression))


def _read_json(path: str) -> Iterator[Row]:
    """Yields one object per line, or those of a .json file that is one list, which is loaded whole."""
    with _open(path) as content:
        if ending(path) == ".json" and content.peek(1).lstrip(BYTE_ORDER_MARK + b" \t\r\n").startswith(b"["):
            place = "row"
            numbered = enumerate(json.loads(content.read().decode("utf-8-sig")), start=1)
        else:
            place = "line"
            numbered = _read_lines(path, content)
        for number, row in numbered:
            if not isinstance(row, dict):
                raise UserError(f"{path}, {place} {number}: expected a JSON object, got {type(row).__name__}")
            yield Row(row, number)


def _read_lines(path: str, content: BinaryIO) -> Iterator[tuple[int, Any]]:
    """Yields (number, value) for each line that is not empty."""
    for number, line in enumerate(content, start=1):
        line = line.removeprefix(BYTE_ORDER_MARK).strip()
        if not line:
            continue
        try:
            yield number, json.loads(line.decode())
        except (ValueError, RecursionError) as error:
            kind = "UTF-8" if isinstance(error, UnicodeDecodeError) else "JSON"
            raise UserError(f"{path}, line {number}: not valid {kind} ({one_line(error)})") from None


def _read_csv(path: str) -> Iterator[Row]:
    csv.field_size_limit(1 << 30)  # by default 128 KiB, which a text column exceeds
    with io.TextIOWrapper(_open(path), encoding="utf-8-sig", newline="") as lines:
        reader = csv.DictReader(lines, delimiter="\t" if ending(path) == ".tsv" else ",", strict=True)
        columns = reader.fieldnames or []
        if len(set(columns)) < len(columns):
            raise UserError(f"{path}, line 1: two columns have the same name ({', '.join(columns)})")
        for values in reader:
            if None in values or None in values.values():
                raise UserError(f"{path}, line {reader.line_num}: not one value for each column ({', '.join(columns)})")
            yield Row(values, reader.line_num)


def _read_columnar(path: str) -> Iterator[Row]:
    """Yields the rows of Parquet, and of Arrow's stream format, which `datasets` writes."""
    import pyarrow.parquet

    with pyarrow.memory_map(path) as file:
        if ending(path) == ".parquet":
            batches = pyarrow.parquet.ParquetFile(file).iter_batches(batch_size=256)  # rows decoded at once
        else:
            batches = pyarrow.ipc.open_stream(file)
        number = 0
        for batch in batches:
            for row in batch.to_pylist():
                number += 1
                yield Row(row, number)


def _read_text(path: str) -> Iterator[Row]:
    with _open(path) as content:
        encoded = content.read(LONGEST_TEXT + 1)
    if len(encoded) > LONGEST_TEXT:
        raise UserError(f"{path} is one text of more than 1 GiB; use jsonl, with one document on each line")
    if text := encoded.decode("utf-8-sig"):
        yield Row({"text": text}, 1)
