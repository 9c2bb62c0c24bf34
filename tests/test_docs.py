"""README and docs: every link leads somewhere, and every command is one that its own parser takes, values included."""

import json
import re
import shlex
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from conftest import ROOT

import dsft
from dsft.cli.commands import COMMANDS
from dsft.cli.help import command_groups
from dsft.cli.main import main
from dsft.config.options import TrainConfig
from dsft.config.reader import make_config, read_command, read_config, read_options
from dsft.launch import launch
from dsft.models.measure import usual_config
from dsft.perplexity.of_training import read_evaluation

PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/**/*.md")])
EXAMPLES = [path for path in sorted(ROOT.glob("examples/*.yaml")) if "# dsft plan" in path.read_text()]
OF_ALL = {"config", "help"}
SCRIPTS = {"dsft/train.py": "train", "dsft.train": "train", "dsft/eval_ppl.py": "eval", "dsft.eval_ppl": "eval"}
LAUNCHERS = ("deepspeed", "torchrun", "accelerate", "python")


def anchors(page: Path) -> set[str]:
    """As code hosting sites make them of headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_leads_to_a_file_and_a_heading(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith("http"):
            continue
        name, _, anchor = target.partition("#")
        linked = page.parent / name if name else page
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), target


def blocks(page: Path, languages: str) -> list[str]:
    return re.findall(rf"^```(?:{languages})\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def commands(page: Path) -> list[str]:
    """The lines of shell blocks, without comments."""
    lines = re.sub(r"\s*\\\n\s*", " ", "".join(blocks(page, "bash|sh"))).splitlines()
    return [re.sub(r"\s+#.*", "", line).strip() for line in lines if line.strip() and not line.startswith("#")]


def quoted(page: Path) -> list[str]:
    """The commands in the cells of tables, some with words that stand for others."""
    rows = [line for line in page.read_text().splitlines() if line.startswith("|")]
    starts = ("dsft ", *(f"{launcher} " for launcher in LAUNCHERS))
    return [cell for row in rows for cell in re.findall(r"`([^`]+)`", row) if cell.startswith(starts)]


def with_commands(find: Callable[[Path], list[str]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("page", [page for page in PAGES if find(page)], ids=name_of)


def own_options(name: str) -> set[str]:
    return {field.name for fields in command_groups(COMMANDS[name]).values() for field in fields} | OF_ALL


def options(name: str) -> set[str]:
    """Of a command, and of the training or evaluation that it starts or looks at."""
    if name == "launch" or COMMANDS[name].run_options:
        return set().union(*map(own_options, {name, "launch", "train", "eval"}))
    return own_options(name)


@with_commands(quoted)
def test_every_command_in_a_table_exists_with_every_option_that_is_written(page):
    for line in quoted(page):
        words = shlex.split(line, comments=True)
        if words[0] == "dsft":
            name, words = words[1], words[2:]
            assert name in COMMANDS or name == "--help", line
        else:
            script = next((word for word in words if word in SCRIPTS), None)
            if script is None:
                continue
            name, words = SCRIPTS[script], words[words.index(script) + 1 :]
        flags = {word[2:].partition("=")[0] for word in words if word.startswith("--")}
        assert flags <= options(name), (line, flags - options(name))


@pytest.fixture(scope="module")
def workplace(tmp_path_factory) -> Path:
    """A folder with the files that the pages' commands read before they start anything."""
    folder = tmp_path_factory.mktemp("docs")
    for name in ("ds_configs", "hostfiles", "scripts"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "hosts").write_text("node-0 slots=8\nnode-1 slots=8\n")
    (folder / "run.yaml").write_text("model: base\ndata: train.jsonl\noutput_dir: runs/first\n")
    for name in ("first", "full"):  # runs whose options an evaluation reads
        run = folder / "runs" / name / "run.json"
        run.parent.mkdir(parents=True)
        config = {"model": "base", "data": ["train.jsonl"], "output_dir": f"runs/{name}", "eval_fraction": 0.1}
        run.write_text(json.dumps({"config": config}))
        (run.parent / "final").mkdir()
        (run.parent / "final" / "config.json").write_text("{}")
    return folder


@with_commands(commands)
def test_every_command_of_a_block_is_one_that_its_parser_takes(page, workplace, monkeypatch, capsys):
    monkeypatch.chdir(workplace)
    for line in commands(page):
        words = shlex.split(line)
        while re.match(r"\w+=", words[0]):
            monkeypatch.setenv(*words.pop(0).split("=", 1))
        if words[0] == "srun":
            words = words[words.index("dsft") :]
        if words[0] == "dsft":
            parse(words[1], words[2:])
        elif script := next((word for word in words if word in SCRIPTS), None):
            parse_run(SCRIPTS[script], words[words.index(script) + 1 :])
        elif words[0] == "sbatch" or words[0].startswith("scripts/"):
            assert (ROOT / words[words[0] == "sbatch"]).is_file(), line


def parse(name: str, words: list[str]) -> None:
    """Raise or fail where the command does not take these words."""
    if name in ("train", "eval", "launch"):
        assert launch([*([] if name == "launch" else [name]), "--dry_run", *words]) == 0
    elif COMMANDS[name].run_options:
        problems: list[str] = []
        parse_run("train", read_options(COMMANDS[name].options, words, problems)[1])
        assert problems == []
    else:
        read_command(COMMANDS[name].options, words)


def parse_run(name: str, words: list[str]) -> None:
    problems: list[str] = []
    read_config(TrainConfig, words, problems) if name == "train" else read_evaluation(words, problems)
    assert [problem for problem in problems if ": missing" not in problem] == []


@pytest.mark.parametrize("page", [ROOT / "README.md", *ROOT.glob("docs/*.md")], ids=name_of)
def test_no_sentence_has_more_than_25_words(page):
    """Of prose: pieces of code and addresses of links count as none, and blocks, tables and headings are left out."""
    text = re.sub(
        r"^```.*?^```|`[^`]*`", lambda code: "\n" if "\n" in code[0] else "`", page.read_text(), flags=re.M | re.S
    )
    text = re.sub(r"\]\([^)]*\)", "", re.sub(r"^[|#>!].*", "\n", text, flags=re.M))
    for paragraph in re.split(r"\n\s*\n|\n\s*(?:-|\d\.) ", text):
        for sentence in re.split(r"(?<=[.!?])[*)]*\s+(?=[\W\d]*[A-Z`\d])", " ".join(paragraph.split())):
            assert len(re.findall(r"\S*\w\S*", sentence)) <= 25, sentence


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "reference.md"], ids=name_of)
def test_lines_are_short_enough_to_edit(page):
    """Of prose that a person writes: tables, blocks, quoted output and addresses cannot be broken."""
    text = re.sub(r"^```.*?^```|^[|>].*?$", "", page.read_text(), flags=re.M | re.S)
    assert [line for line in text.splitlines() if len(line) > 120 and " " in line.strip()] == []


@pytest.mark.parametrize("page", [ROOT / "README.md", *ROOT.glob("docs/*.md")], ids=name_of)
def test_lines_of_code_fit_the_site(page):
    code = "".join(re.findall(r"^```.*?^```", page.read_text(), flags=re.M | re.S))
    assert [line for line in code.splitlines() if len(line) > 88] == []


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "yaml")], ids=name_of)
def test_every_yaml_block_holds_options_of_a_training(page):
    for block in blocks(page, "yaml"):
        problems: list[str] = []
        make_config(TrainConfig, yaml.safe_load(block), problems)
        assert [problem for problem in problems if ": missing" not in problem] == []


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_fits_the_machine_that_it_names(path, tmp_path, monkeypatch, capsys):
    """By the command in its first lines; the config of its model is made here, where no hub is."""
    monkeypatch.chdir(ROOT)
    text = path.read_text()
    name = yaml.safe_load(text)["model"].removesuffix("-Instruct")
    usual_config(name).save_pretrained(tmp_path)
    words = shlex.split(re.search(r"^# dsft (plan .*)$", text, re.MULTILINE)[1])
    assert words[2] == f"examples/{path.name}"
    main([*words, "--model", str(tmp_path)])  # exits with code 1 if nothing fits
    assert "\nfits: " in capsys.readouterr().out
    assert f"](../examples/{path.name})" in (ROOT / "docs" / "cookbook.md").read_text()


def test_every_page_is_in_the_site_and_the_index():
    site = (ROOT / "mkdocs.yml").read_text()
    index = (ROOT / "docs" / "README.md").read_text()
    for page in ROOT.glob("docs/*.md"):
        assert f": docs/{page.name}\n" in site, page
        assert page.name == "README.md" or f"]({page.name}" in index, page


def test_one_version_stands_everywhere():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert version == dsft.__version__ == yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"]
    assert re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[1].strip(",") == version


def test_workflows_and_forms_name_what_is_there():
    for path in (ROOT / ".github").rglob("*.yml"):
        text = path.read_text()
        assert yaml.safe_load(text), path
        assert "secrets." not in text, path
        for script in re.findall(r"\bscripts/\w+|\btests/\w+", text):
            assert (ROOT / script).exists(), (path, script)


@pytest.mark.exhaustive
def test_the_site_is_built_without_a_warning():
    result = subprocess.run([ROOT / "scripts" / "docs"], capture_output=True, text=True)
    assert result.returncode == 0 and "WARNING -" not in result.stderr, result.stderr
    for page in PAGES:
        parts = page.relative_to(ROOT).with_suffix("").parts
        folder = parts[:-1] if parts[-1] == "README" else parts
        assert (ROOT / ".site/html").joinpath(*folder, "index.html").is_file(), page


@pytest.mark.exhaustive
def test_the_page_of_gpu_memory_is_what_the_planner_predicts(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import gpu_memory

    page = (ROOT / "docs" / "gpu_memory.md").read_text()
    assert page == gpu_memory.page() + "\n", "python scripts/gpu_memory.py"


def test_the_memory_table_of_the_readme_is_that_of_its_page():
    def cells(line: str) -> list[str]:
        return [cell.strip() for cell in line.strip("|").split("|")]

    page = [cells(line) for line in (ROOT / "docs" / "gpu_memory.md").read_text().splitlines() if "/" in line]
    known = {row[0]: [row[1], *row[3:6]] for row in page if len(row) == 7}
    readme = [cells(line) for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("| ")]
    rows = [row for row in readme if row[0] in known]
    assert len(rows) == 7 and all(known[row[0]] == row[1:] for row in rows)
