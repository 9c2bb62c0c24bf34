"""What other trainers call what dsft has: the names of elsewhere.toml, for hints at unknown options, for `dsft convert`
(`cli/convert.py` translates the values) and for the table in docs/migrating.md.
"""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple


class Elsewhere(NamedTuple):
    """Options of others for one thing."""

    names: str  # separated by blanks
    ours: str  # options of dsft, of which a command has the first or another; none where dsft has no option for it
    how: str  # where the meaning or the form of the value differs, or what takes the place of an option
    becomes: str | Mapping[Any, Mapping[str, Any]] | None
    """The kind by which values are translated; or their value, of those that can be translated -> options of dsft. By
    default the first of `ours` takes the value as it is."""
    is_refused: bool
    """Whether a training with it is none that dsft can do: a value that `becomes` does not translate ends the
    conversion."""

    @property
    def option(self) -> str:
        """Of dsft, that the value is for."""
        return (self.ours or self.names).split()[0]


_TABLES = tomllib.loads(Path(__file__).with_name("elsewhere.toml").read_text(encoding="utf-8"))
_REFUSED: dict[str, str] = _TABLES["refused"]
SUPERVISED, TEXT_ALONE = _REFUSED["supervised"], _REFUSED["text_alone"]


def _read(table: str) -> tuple[Elsewhere, ...]:
    """The rows of a table of elsewhere.toml, in their order."""
    entries = []
    for names, row in _TABLES[table].items():
        ours, how, becomes, *_ = [row, "", None] if isinstance(row, str) else [*row, None]
        entry = Elsewhere(names, ours, _REFUSED.get(how, how), becomes, is_refused=how in _REFUSED)
        if isinstance(becomes, dict) or (becomes is None and entry.is_refused):
            if becomes is None or "true" in becomes:
                becomes = {"false": {}} | (becomes or {})
            keys = {"true": True, "false": False} | {key: int(key) for key in becomes if key.isdigit()}
            becomes = {
                keys.get(key, key): options if isinstance(options, dict) else {entry.option: options}
                for key, options in becomes.items()
            }
        entries.append(entry._replace(becomes=becomes))
    return tuple(entries)


ELSEWHERE, SAME_NAME = _read("elsewhere"), _read("same_name")
"""Options that dsft has under another name or not at all; those to which others give another form of value."""
OF = {name: each for each in ELSEWHERE for name in each.names.split()}  # by each of the names
VALUES = {
    (name, value): each.how
    for each in SAME_NAME
    if isinstance(each.becomes, Mapping)
    for name in each.names.split()
    for value in each.becomes
    if isinstance(value, str)
}
"""(option of dsft, value that others give it) -> what is meant here."""

TRAINERS: dict[str, str] = _TABLES["trainers"]
"""Trainer that `dsft convert` reads -> options by which its files are known, in this order."""
DEFAULTS: dict[str, dict[str, Any]] = _TABLES["defaults"]
"""What these trainers take where nothing is given, and dsft does not; empty where it is derived."""
