"""Finds and reads data sets: local files through `datasets`, or a hub name. Says what is wrong with a file, and where.

The rows come back as they stand in the file; turning them into tokens is `samples.py`.
"""

import glob
import json
from pathlib import Path

import datasets
import pyarrow
from datasets import Dataset

from dsft.problems import UserError

BUILDERS = {".txt": "text", ".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}


def read_rows(sources: list[str], config, *, key: str, split: str) -> Dataset:
    """All rows of `sources` in order (files sorted by name inside a folder or glob).

    Args:
        key: name of the option the sources come from, for messages.
        split: split of a hub data set; local files have none.

    Raises:
        UserError: naming the file (and line) that cannot be read.
    """
    files = [path for source in sources for path in _find_files(source, key)]
    if not files:
        return _read_hub(sources, config, key=key, split=split)
    problems, parts = [], []
    for path in files:
        try:
            parts.append(_read_file(path))
        except UserError as error:
            problems += [f"{key}: {problem}" for problem in error.problems]
    if problems:
        raise UserError(problems)
    rows = parts[0] if len(parts) == 1 else _join(files, parts, config, key=key)
    if not len(rows):
        raise UserError([f"{key}: {', '.join(sources)} holds no rows"])
    return rows


def _join(files: list[str], parts: list[Dataset], config, *, key: str) -> Dataset:
    """One data set of several files; only the columns that dsft reads must agree."""
    columns = [name for name in (config.text_column, "prompt", "completion", "messages") if name in parts[0].column_names] or parts[0].column_names
    for path, part in zip(files, parts, strict=True):
        if missing := set(columns) - set(part.column_names):
            raise UserError([f"{key}: {path} lacks the column {', '.join(sorted(missing))} that {files[0]} has; it has {', '.join(part.column_names)}"])
    try:
        return datasets.concatenate_datasets([part.select_columns(columns) for part in parts])
    except ValueError as error:
        raise UserError([f"{key}: the files hold different kinds of values in {', '.join(columns)}: {' '.join(str(error).split())[:200]}"]) from None


def _find_files(source: str, key: str) -> list[str]:
    path = Path(source).expanduser()
    if path.is_file():
        found = [str(path)]
    elif path.is_dir():
        found = sorted(str(p) for p in path.iterdir() if p.suffix in BUILDERS)
        if not found:
            raise UserError([f"{key}: the folder {source} holds no {', '.join(BUILDERS)} file"])
    else:
        found = sorted(glob.glob(str(path), recursive=True))
    for file in found:
        if Path(file).suffix not in BUILDERS:
            raise UserError([f"{key}: {file} has none of the endings {', '.join(BUILDERS)}"])
    if not found and (path.suffix in BUILDERS or path.is_absolute() or source.startswith(".") or source.count("/") > 1 or "*" in source):
        raise UserError([f"{key}: {source} does not exist (seen from {Path.cwd()})"])
    return found


def _read_file(path: str) -> Dataset:
    if Path(path).stat().st_size == 0:
        raise UserError([f"{path} is empty"])
    builder = BUILDERS[Path(path).suffix]
    # A text file is one document; its lines are not documents of their own.
    options = {"sample_by": "document"} if builder == "text" else {}
    try:
        rows = datasets.load_dataset(builder, data_files=path, split="train", **options)
        for column in rows.data.columns:
            column.validate(full=True)  # invalid UTF-8 would else raise in the middle of tokenising
        return rows
    except PermissionError as error:
        raise UserError([f"{path} cannot be read ({error.strerror})"]) from None
    except (datasets.exceptions.DatasetGenerationError, pyarrow.ArrowInvalid, UnicodeDecodeError, ValueError, TypeError) as error:
        if "corresponds to no data" in str(error):
            raise UserError([f"{path} holds no rows"]) from None
        cause = error.__cause__ or error
        raise UserError([first_bad_line(path) or f"{path} cannot be read as {builder}: {' '.join(str(cause).split())[:300]}"]) from None


def first_bad_line(path: str) -> str | None:
    """What is wrong with the first line of a JSONL file that is not one JSON object, or None where every line is."""
    if not path.endswith((".jsonl", ".json")):
        return None
    columns = None
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except UnicodeDecodeError as error:
                return f"{path}, line {number}: not valid UTF-8 ({error.reason} at byte {error.start})"
            except json.JSONDecodeError as error:
                if number == 1 and path.endswith(".json"):
                    return None  # one JSON document over many lines
                return f"{path}, line {number}: not valid JSON ({error.msg} at column {error.colno}): {line.decode(errors='replace').strip()[:80]}"
            if not isinstance(row, dict):
                return f"{path}, line {number}: a JSON object is needed, found {type(row).__name__}"
            types = {name: type(value).__name__ for name, value in row.items() if value is not None}
            columns = columns or types
            for name, found in types.items():
                if columns.setdefault(name, found) != found:
                    return f"{path}, line {number}: column {name!r} holds {found}, but {columns[name]} in earlier lines"
    return None


def _read_hub(sources: list[str], config, *, key: str, split: str) -> Dataset:
    if len(sources) != 1:
        raise UserError([f"{key}: {', '.join(sources)}: no such files, and only one hub data set can be named"])
    try:
        return datasets.load_dataset(sources[0], config.data_name, split=split)
    except Exception as error:  # the hub client raises dozens of kinds; each is the user's to see in one line
        raise UserError([
            f"{key}: {sources[0]} is neither a file here (seen from {Path.cwd()}) nor a hub data set that can be read: "
            f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        ]) from None
