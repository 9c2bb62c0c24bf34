"""Writes docs/reference.md, the options of all commands: python scripts/reference.py > docs/reference.md
and the tables of docs/migrating.md, in their place: python scripts/reference.py names
"""

import sys
from pathlib import Path

from dsft.cli.commands import COMMANDS
from dsft.cli.help import Group, command_groups, usage
from dsft.config.elsewhere import DEFAULTS, ELSEWHERE

HEAD = """# Options of every command

Made from the fields' texts by `python scripts/reference.py > docs/reference.md`; a test holds it up to date.
Options of `train` and `eval` have the same names in the YAML file and as flags, and a flag wins. A switch alone means
true. A flag given twice is one longer list where its option takes several values, and an error elsewhere."""
MIGRATING = Path(__file__).parent.parent / "docs" / "migrating.md"
TABLES = "## Defaults that are written down"
"""Heading of docs/migrating.md from which on it is made here."""
DEFAULTS_HEAD = """Where a file gives nothing, its trainer takes these, and dsft would not. They stand in the
run.yaml with that remark."""
NAMES_HEAD = """Options of TRL, axolotl, LLaMA-Factory, torchtune, transformers' examples and others, and what dsft
calls them. An error names that option where one of these is given. Of two, a command has the first or the other."""


def reference() -> str:
    """Returns the text of docs/reference.md."""
    parts = [HEAD]
    for name, command in COMMANDS.items():
        parts.append(f"## dsft {name}\n\n{command.summary[0].upper()}{command.summary[1:]}.")
        parts.append(f"```\n{usage(name)}\n```")
        parts += [_table(group) for group in command_groups(command)]
    parts.append("Names of other trainers: [docs/migrating.md](migrating.md#names-of-other-trainers).")
    return "\n\n".join(parts)


def tables_of_migrating() -> str:
    """Returns the generated end of docs/migrating.md."""
    defaults = ["| trainer | options |", "|---|---|"]
    for trainer, values in DEFAULTS.items():
        given = [f"`{name}: {value}`" for name, value in values.items() if value != ""]
        defaults.append(f"| {trainer} | {', '.join(given)} |")
    names = ["| elsewhere | dsft | |", "|---|---|---|"]
    for each in ELSEWHERE:
        words = (", ".join(f"`{name}`" for name in text.split()) for text in (each.names, each.ours))
        how = each.how
        if each.is_refused:
            how = f"{how}; others are refused" if set(each.becomes) - {False} else f"refused: {how}"
        names.append(f"| {' | '.join((*words, how))} |")
    parts = [TABLES, DEFAULTS_HEAD, "\n".join(defaults), "## Names of other trainers", NAMES_HEAD, "\n".join(names)]
    return "\n\n".join(parts) + "\n"


def _table(group: Group) -> str:
    rows = ["| option | value | default | |", "|---|---|---|---|"]
    for field in group.fields:
        cells = (f"`{'' if field.is_positional else '--'}{field.name}`", field.placeholder, field.default, field.text)
        rows.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join([group.heading, "", *rows])


if __name__ == "__main__":
    if sys.argv[1:] == ["names"]:
        MIGRATING.write_text(MIGRATING.read_text().partition(TABLES)[0] + tables_of_migrating())
    else:
        print(reference())
