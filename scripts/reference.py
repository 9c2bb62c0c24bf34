"""Writes docs/reference.md, the options of all commands: python scripts/reference.py > docs/reference.md"""

from dsft.cli.commands import COMMANDS
from dsft.cli.help import Group, command_groups, usage
from dsft.config.elsewhere import ELSEWHERE

HEAD = """# Options of every command

Made from the fields' texts by `python scripts/reference.py > docs/reference.md`; a test holds it up to date.
Options of `train` and `eval` have the same names in the YAML file and as flags, and a flag wins. A switch alone means
true. A flag given twice is one longer list where its option takes several values, and an error elsewhere."""
ELSEWHERE_HEAD = """Options of TRL, axolotl, LLaMA-Factory, torchtune, transformers' examples and others, and what dsft
calls them. An error names that option where one of these is given. Of two, a command has the first or the other."""


def reference() -> str:
    """Returns the text of docs/reference.md."""
    parts = [HEAD]
    for name, command in COMMANDS.items():
        parts.append(f"## dsft {name}\n\n{command.summary[0].upper()}{command.summary[1:]}.")
        parts.append(f"```\n{usage(name)}\n```")
        parts += [_table(group) for group in command_groups(command)]
    parts += ["## Names of other trainers", ELSEWHERE_HEAD, _names()]
    return "\n\n".join(parts)


def _names() -> str:
    rows = ["| elsewhere | dsft | |", "|---|---|---|"]
    for names, ours, how in ELSEWHERE:
        cells = (*(", ".join(f"`{name}`" for name in each.split()) for each in (names, ours)), how)
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def _table(group: Group) -> str:
    rows = ["| option | value | default | |", "|---|---|---|---|"]
    for field in group.fields:
        cells = (f"`{'' if field.is_positional else '--'}{field.name}`", field.placeholder, field.default, field.text)
        rows.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join([group.heading, "", *rows])


if __name__ == "__main__":
    print(reference())
