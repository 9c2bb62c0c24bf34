"""README and docs: every link leads somewhere, and every command is one that `dsft` takes."""

import re
import shlex
from pathlib import Path

import pytest
from conftest import ROOT

from dsft.cli.commands import COMMANDS
from dsft.cli.help import command_groups

PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/**/*.md")])
OF_ALL = {"config", "help"}
SCRIPTS = {"dsft/train.py": "train", "dsft.train": "train", "dsft/eval_ppl.py": "eval", "dsft.eval_ppl": "eval"}
LAUNCHERS = ("deepspeed", "torchrun", "accelerate", "python")


def anchors(page: Path) -> set[str]:
    """As code hosting sites make them of headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_to_a_file_and_a_heading(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith("http"):
            continue
        name, _, anchor = target.partition("#")
        linked = page.parent / name if name else page
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), target


def commands(page: Path) -> list[str]:
    """The lines of shell blocks, without comments, and the commands in the cells of tables."""
    text = page.read_text()
    blocks = re.findall(r"^```(?:bash|sh)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    quoted = [cell for row in text.splitlines() if row.startswith("|") for cell in re.findall(r"`([^`]+)`", row)]
    starts = ("dsft ", "scripts/", *(f"{launcher} " for launcher in LAUNCHERS))
    return [line for line in (*lines, *quoted) if line.startswith(starts)]


def own_options(name: str) -> set[str]:
    return {field.name for group in command_groups(COMMANDS[name]) for field in group.fields} | OF_ALL


def options(name: str) -> set[str]:
    """Of a command, and of the training or evaluation that it starts or looks at."""
    if name == "launch" or COMMANDS[name].run_options:
        return set().union(*map(own_options, {name, "launch", "train", "eval"}))
    return own_options(name)


@pytest.mark.parametrize(
    "page", [page for page in PAGES if commands(page)], ids=lambda page: str(page.relative_to(ROOT))
)
def test_every_command_exists_with_every_option_that_is_written(page):
    for line in commands(page):
        words = shlex.split(line, comments=True)
        if words[0] == "dsft":
            name, words = words[1], words[2:]
            assert name in COMMANDS or name == "--help", line
        elif words[0].startswith("scripts/"):
            assert (ROOT / words[0]).is_file(), line
            continue
        else:
            script = next((word for word in words if word in SCRIPTS), None)
            if script is None:
                continue
            name, words = SCRIPTS[script], words[words.index(script) + 1 :]
        flags = {word[2:].partition("=")[0] for word in words if word.startswith("--")}
        assert flags <= options(name), (line, flags - options(name))
