"""The user's own code in a run: named `module:function` in a YAML file or a flag, or passed from Python.

It is imported from installed modules and files of the current folder.
"""

import hashlib
import inspect
import os
import pkgutil
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

from dsft.errors import UserError

KEYS = ("map_row", "compute_loss", "callbacks")  # its options; callbacks is a list


def named(options: Any) -> Iterator[tuple[str, Any]]:
    """Yields option and value of all user code that `options` name."""
    for key in KEYS:
        value = getattr(options, key, None)
        for each in value if isinstance(value, list) else [value]:
            if each is not None:
                yield key, each


def name_of(value: Any) -> Any:
    """Returns `module:function`, as an option names it; of a list, those of its items."""
    if isinstance(value, list):
        return [name_of(each) for each in value]
    if value is None or isinstance(value, str):
        return value
    code = value if isinstance(value, FunctionType | type) else type(value)
    return f"{code.__module__}:{code.__qualname__}"


def load(key: str, value: Any) -> Any:
    """Returns the function or callback given or named by `value`; raises UserError if it cannot be imported."""
    code = value
    here = f"{key}={name_of(value)}"
    if isinstance(value, str):
        if not re.fullmatch(r"(?:\.?[^\W\d]\w*)+:(?:\.?[^\W\d]\w*)+", value):
            raise UserError(f"{here}: name it as module:function, such as my_code:{key}")
        if os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())  # last, so that no file there hides a library
        try:
            code = pkgutil.resolve_name(value)
        except ModuleNotFoundError as error:
            raise UserError(f"{here}: {error}, neither among installed packages nor in {os.getcwd()}") from None
        except Exception as error:
            if isinstance(error, AttributeError) and error.name in re.split(r"\W", value):
                raise UserError(f"{here}: {error}") from None
            raise failed(here, error) from None
    if key != "callbacks":
        if not isinstance(code, FunctionType):
            raise UserError(f"{here}: expected a function, got {type(code).__name__}")
        return code
    from transformers import TrainerCallback  # here: seconds

    if not issubclass(code if isinstance(code, type) else type(code), TrainerCallback):
        raise UserError(f"{here}: expected a class or an object of transformers.TrainerCallback, got {code!r}")
    return code


def problems(options: Any) -> list[str]:
    not_loaded = []
    for key, value in named(options):
        try:
            load(key, value)
        except UserError as error:
            not_loaded += error.problems
    return not_loaded


def digest(code: Any) -> str:
    """Hashes code: its whole file or notebook cell, whose functions it may call, its defaults and its closure."""
    from datasets.fingerprint import Hasher  # here: seconds

    if not isinstance(code, FunctionType | type):
        code = type(code)
    functions = [code]
    if isinstance(code, type):  # in a notebook it has no file, but its methods have the cell
        functions = [each for each in vars(code).values() if isinstance(each, FunctionType)]
    lines = []
    for each in (code, *functions):
        try:
            lines, _ = inspect.findsource(each)
            break
        except (OSError, TypeError):
            continue
    else:  # typed at a prompt; without sets, whose order is another one in each process
        for function in functions:
            compiled = function.__code__
            constants = [each for each in compiled.co_consts if isinstance(each, str | bytes | int | float)]
            lines.append(repr((compiled.co_code, compiled.co_names, constants)))
    hashes = []
    if isinstance(code, FunctionType):
        for value in (code.__defaults__, code.__kwdefaults__, *(code.__closure__ or ())):
            try:
                hashes.append(Hasher.hash(value))  # of arrays and tables too
            except Exception:  # whatever a value that cannot be pickled raises
                hashes.append(type(value).__name__)
    text = f"{name_of(code)} {hashes} {''.join(lines)}"
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def digests(options: Any) -> dict[str, str]:
    words: dict[str, list[str]] = {}
    for key, value in named(options):
        words.setdefault(key, []).append(f"{name_of(value)} (source {digest(load(key, value))})")
    return {key: ", ".join(each) for key, each in words.items()}


def failed(where: str, error: BaseException) -> UserError:
    """Returns an error of user code as a UserError with its traceback."""
    text = "".join(traceback.format_exception(error)).rstrip()
    return UserError(f"{where} raised {type(error).__name__}: {error}\n{text}")


def mapped(map_row: Callable, values: dict, where: Callable[[], str]) -> dict | None:
    """Returns the row that `map_row` makes of one, None to drop it; raises UserError, with the place, if it fails."""
    try:
        row = map_row(values)
    except Exception as error:
        raise failed(f"{where()}: map_row={name_of(map_row)}", error) from None
    is_row = isinstance(row, dict) and all(isinstance(name, str) for name in row)
    if is_row or row is None:
        return row
    raise UserError(
        f"{where()}: map_row={name_of(map_row)} returned {type(row).__name__}; expected a row (a dict by column), or"
        " None to leave it out"
    )
