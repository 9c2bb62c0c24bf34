"""Rows of local files, one after the other, each with its number in the file; what is wrong is said with file and line.

Nothing is read whole but a .json file that is one list, so memory stays flat. `datasets` is not used here: it guesses
column types over all rows,
fills the keys that other rows have with None, and loses line numbers.
"""

import codecs
import csv
import glob
import gzip
import io
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow
import pyarrow.parquet
import zstandard

from dsft.errors import UserError

ENDINGS = (".txt", ".json", ".jsonl", ".csv", ".parquet", ".arrow")
COMPRESSED = (".gz", ".zst")
ABOUT_DATA = ("dataset_info.json", "dataset_dict.json", "state.json")
"""What `datasets.save_to_disk` writes beside the rows."""
PIECE_BYTES = 1 << 14
"""A text file is one document; a longer one is read, and tokenised, in pieces of about this size."""
BEGUN, GOES_ON = "dsft begun", "dsft goes on"
"""Keys of a row that is a piece of a document: another one came before, another one follows."""

Row = tuple[int, dict[str, Any], int]
"""(number in the file from 1, values by column, bytes of the file read so far). The number is the line where the format
has lines.
"""


def ending(path: str | Path) -> str:
    """.jsonl of a.jsonl and of a.jsonl.gz; nothing where it is none of ENDINGS."""
    path = Path(path)
    inner = Path(path.stem).suffix if path.suffix in COMPRESSED else path.suffix
    return inner if inner in ENDINGS else ""


def find_files(entry: str, key: str) -> list[str]:
    """Files of a path, folder or glob, sorted by name; none where `entry` must be the name of a hub data set.

    Raises:
        UserError: naming `key`, the option.
    """
    path = Path(entry).expanduser()
    kinds = f"{', '.join(ENDINGS)} (also with {' or '.join(COMPRESSED)})"
    if path.is_file():
        found = [str(path)]
    elif path.is_dir():
        found = sorted(
            str(file)
            for file in path.iterdir()
            if file.is_file() and ending(file) and not file.name.startswith(".") and file.name not in ABOUT_DATA
        )
        if not found:
            raise UserError([f"{key}: the folder {entry} holds no {kinds} file"])
    else:
        found = sorted(file for file in glob.glob(str(path), recursive=True) if Path(file).is_file())
    if odd := [file for file in found if not ending(file)]:
        raise UserError([f"{key}: {odd[0]} has none of the endings {kinds}"])
    if not found and is_path(entry):
        raise UserError([f"{key}: {entry} does not exist (seen from {Path.cwd()})"])
    return found


def is_path(entry: str) -> bool:
    """Whether `entry`, where no file is, must be a path, not a name on the hub."""
    return (
        bool(ending(entry))
        or entry.startswith((".", "~", "/"))
        or entry.partition(":")[0].count("/") > 1
        or "*" in entry
    )


def read_file(path: str) -> Iterator[Row]:
    """The rows of one file.

    Raises:
        UserError: naming file and line.
    """
    if raw_size(path) == 0:
        raise UserError([f"{path} is empty"])
    try:
        yield from READERS[ending(path)](path)
    except PermissionError as error:
        raise UserError([f"{path} cannot be read ({error.strerror})"]) from None
    except (EOFError, OSError, zlib.error, zstandard.ZstdError, pyarrow.ArrowException) as error:
        raise UserError(
            [f"{path} cannot be read as {ending(path)[1:]}: {' '.join(str(error).split())[:300]}"]
        ) from None


def _open(path: str) -> tuple[BinaryIO, BinaryIO]:
    """(content, the file itself, whose position says how much is read)."""
    raw = open(path, "rb")  # noqa: SIM115 - closed with the content, or by the garbage collector
    if path.endswith(".gz"):
        return gzip.open(raw), raw
    if path.endswith(".zst"):
        return io.BufferedReader(zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True), 1 << 20), raw
    return raw, raw


def _lines(path: str) -> Iterator[tuple[int, str, int]]:
    content, raw = _open(path)
    with content, raw:
        for number, line in enumerate(content, start=1):
            try:
                yield number, line.decode(), raw.tell()
            except UnicodeDecodeError as error:
                raise UserError(
                    [f"{path}, line {number}: not valid UTF-8 ({error.reason} at byte {error.start} of the line)"]
                ) from None


def _read_jsonl(path: str) -> Iterator[Row]:
    for number, line, position in _lines(path):
        if not line.strip():
            continue
        try:
            row = json.loads(line.removeprefix("\ufeff"), object_pairs_hook=_unique)
        except _Duplicate as error:
            raise UserError([f"{path}, line {number}: the column {error} is there twice"]) from None
        except (json.JSONDecodeError, RecursionError) as error:
            reason = (
                f"{error.msg} at column {error.colno}"
                if isinstance(error, json.JSONDecodeError)
                else "nested too deeply"
            )
            raise UserError([f"{path}, line {number}: not valid JSON ({reason}): {line.strip()[:80]}"]) from None
        yield number, _mapping(row, f"{path}, line {number}"), position


def _read_json(path: str) -> Iterator[Row]:
    """One list of objects, or one object per line."""
    content, raw = _open(path)
    with content, raw:
        start = content.read(1 << 16).lstrip(b"\xef\xbb\xbf \t\r\n")
    if not start.startswith(b"["):
        yield from _read_jsonl(path)
        return
    content, raw = _open(path)
    with content, raw:
        try:
            rows = json.loads(content.read().decode("utf-8-sig"), object_pairs_hook=_unique)
        except _Duplicate as error:
            raise UserError([f"{path}: the column {error} is there twice in a row"]) from None
        except UnicodeDecodeError as error:
            raise UserError([f"{path}: not valid UTF-8 ({error.reason} at byte {error.start})"]) from None
        except json.JSONDecodeError as error:
            raise UserError(
                [f"{path}, line {error.lineno}: not valid JSON ({error.msg} at column {error.colno})"]
            ) from None
        except RecursionError:
            raise UserError([f"{path}: not valid JSON (nested too deeply)"]) from None
    size = raw_size(path)
    for number, row in enumerate(rows, start=1):
        yield number, _mapping(row, f"{path}, row {number}"), size * number // len(rows)


class _Duplicate(ValueError):
    """A key that one JSON object has twice."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise _Duplicate(repr(next(name for name in names if names.count(name) > 1)))
    return found


def _mapping(row: Any, place: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise UserError([f"{place}: a JSON object is needed, found {type(row).__name__}"])
    return row


def _read_csv(path: str) -> Iterator[Row]:
    position = 0

    def lines() -> Iterator[str]:
        nonlocal position
        for number, line, position in _lines(path):  # noqa: B007
            yield line.removeprefix("\ufeff") if number == 1 else line

    limit = csv.field_size_limit(1 << 30)
    reader = csv.reader(lines(), strict=True)
    try:
        header = next(reader, [])
        if twice := [name for name in header if header.count(name) > 1]:
            raise UserError([f"{path}, line 1: the column {twice[0]!r} is there twice"])
        line = reader.line_num + 1
        for values in reader:
            if values and len(values) != len(header):
                raise UserError(
                    [f"{path}, line {line}: {len(values)} values for {len(header)} columns ({', '.join(header)})"]
                )
            if values:
                yield line, dict(zip(header, values, strict=True)), position
            line = reader.line_num + 1
    except csv.Error as error:
        raise UserError([f"{path}, line {reader.line_num}: not valid CSV ({error})"]) from None
    finally:
        csv.field_size_limit(limit)


def _read_parquet(path: str) -> Iterator[Row]:
    with open(path, "rb") as raw:
        file = pyarrow.parquet.ParquetFile(raw)
        yield from _arrow_rows(path, file.schema_arrow, file.iter_batches(batch_size=256), file.metadata.num_rows)


def _read_arrow(path: str) -> Iterator[Row]:
    """Both forms of Arrow's own format; `datasets` writes the stream."""
    with pyarrow.memory_map(path) as file:
        try:
            reader = pyarrow.ipc.open_stream(file)
            batches, number = iter(reader), None
        except pyarrow.ArrowInvalid:
            reader = pyarrow.ipc.open_file(file)
            batches, number = (reader.get_batch(i) for i in range(reader.num_record_batches)), None
        yield from _arrow_rows(path, reader.schema, (piece for batch in batches for piece in _slices(batch)), number)


def _slices(batch: pyarrow.RecordBatch) -> Iterator[pyarrow.RecordBatch]:
    for start in range(0, len(batch), 256):
        yield batch.slice(start, 256)


def _arrow_rows(
    path: str, schema: pyarrow.Schema, batches: Iterator[pyarrow.RecordBatch], number_of_rows: int | None
) -> Iterator[Row]:
    if twice := [name for name in schema.names if schema.names.count(name) > 1]:
        raise UserError([f"{path}: the column {twice[0]!r} is there twice"])
    size, number = raw_size(path), 0
    for batch in batches:
        for index in range(len(batch)):
            number += 1
            try:
                row = {name: batch.column(name)[index].as_py() for name in schema.names}
            except UnicodeDecodeError as error:
                raise UserError(
                    [f"{path}, row {number}: not valid UTF-8 ({error.reason} at byte {error.start})"]
                ) from None
            yield number, without_filler(row), size * number // number_of_rows if number_of_rows else 0


def without_filler(value: Any) -> Any:
    """Arrow gives every struct of a column the keys of all; those that are None were not there."""
    if isinstance(value, dict):
        return {key: without_filler(one) for key, one in value.items() if one is not None}
    return [without_filler(one) for one in value] if isinstance(value, list) else value


def _read_text(path: str) -> Iterator[Row]:
    """The file as one document, in pieces that end with a line before one that does not begin with white space: there
    tokenizers begin a new word anyhow.
    """
    pieces = _pieces(path)
    piece = next(pieces, None)
    begun = False
    while piece is not None:
        following = next(pieces, None)
        number, text, position = piece
        yield number, {"text": text, BEGUN: begun, GOES_ON: following is not None}, position
        piece, begun = following, True


def _pieces(path: str) -> Iterator[tuple[int, str, int]]:
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    held, first = "", 1
    content, raw = _open(path)
    with content, raw:
        while data := content.read(PIECE_BYTES):
            try:
                held += decoder.decode(data)
            except UnicodeDecodeError as error:
                line = first + held.count("\n") + error.object[: error.start].count(b"\n")
                raise UserError([f"{path}, line {line}: not valid UTF-8 ({error.reason})"]) from None
            cut = _cut_of(held)
            if cut:
                yield first, held[:cut], raw.tell()
                first += held.count("\n", 0, cut)
                held = held[cut:]
        if decoder.getstate()[0]:
            raise UserError([f"{path}: not valid UTF-8: its last character is cut off"])
    if held:
        yield first, held, raw_size(path)


def _cut_of(text: str) -> int:
    """Where `text` can be cut: after its last line that is followed by no white space; 0 where that is nowhere and it
    is not yet long.
    """
    cut = text.rfind("\n", 0, len(text) - 1) + 1
    while cut and text[cut].isspace():
        cut = text.rfind("\n", 0, cut - 1) + 1
    return cut or (len(text) if len(text) >= 4 * PIECE_BYTES else 0)


def raw_size(path: str) -> int:
    return Path(path).stat().st_size


READERS = {
    ".txt": _read_text,
    ".json": _read_json,
    ".jsonl": _read_jsonl,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
    ".arrow": _read_arrow,
}
