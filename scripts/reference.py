"""Writes docs/reference.md, the options of all commands: python scripts/reference.py > docs/reference.md
and the tables of docs/migrating.md, in their place: python scripts/reference.py names
"""

import sys
from pathlib import Path

from dsft.cli.commands import COMMANDS
from dsft.cli.help import FieldDoc, command_groups, usage
from dsft.config.options import HINTS, OURS

HEAD = """# Options of every command

Made from the fields' texts by `python scripts/reference.py > docs/reference.md`; a test holds it up to date.
Options of `train` and `eval` have the same names in the YAML file and as flags, and a flag wins. A switch alone means
true. A flag given twice is one longer list where its option takes several values, and an error elsewhere."""
MIGRATING = Path(__file__).parent.parent / "docs" / "migrating.md"
TABLES = "## Names of other trainers"
"""Heading of docs/migrating.md from which on it is made here."""
NAMES_HEAD = """A file may use these names of TRL, axolotl, LLaMA-Factory, torchtune and transformers' examples: dsft
reads them as its own, with a note. If the value has another form, an error shows what to write."""


def reference() -> str:
    """Returns the text of docs/reference.md."""
    parts = [HEAD]
    for name, command in COMMANDS.items():
        parts.append(f"## dsft {name}\n\n{command.summary[0].upper()}{command.summary[1:]}.")
        parts.append(f"```\n{usage(name)}\n```")
        parts += [_table(heading, fields) for heading, fields in command_groups(command).items()]
    parts.append("Names of other trainers: [docs/migrating.md](migrating.md#names-of-other-trainers).")
    return "\n\n".join(parts)


def tables_of_migrating() -> str:
    """Returns the generated end of docs/migrating.md."""
    names = ["| elsewhere | dsft |", "|---|---|"]
    names += [f"| `{theirs}` | `{ours}` |" for theirs, ours in OURS.items()]
    names += [f"| `{theirs}` | {hint} |" for theirs, hint in HINTS.items()]
    return "\n\n".join([TABLES, NAMES_HEAD, "\n".join(names)]) + "\n"


def _table(heading: str, fields: list[FieldDoc]) -> str:
    rows = ["| option | value | default | |", "|---|---|---|---|"]
    for field in fields:
        cells = (f"`{field.flag}`", field.placeholder, field.default, field.text)
        rows.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join([heading, "", *rows])


if __name__ == "__main__":
    if sys.argv[1:] == ["names"]:
        MIGRATING.write_text(MIGRATING.read_text().partition(TABLES)[0] + tables_of_migrating())
    else:
        print(reference())
