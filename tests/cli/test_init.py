import pytest

from dsft.cli import quickstart
from dsft.cli.commands import InitOptions
from dsft.cli.main import main
from dsft.cli.quickstart import init
from dsft.config.options import TrainConfig
from dsft.config.reader import read_config
from dsft.errors import UserError


@pytest.mark.parametrize(
    ("method", "data", "rate"),
    [("full", ["a file: with #.jsonl"], 1e-5), ("lora", ["a.jsonl", "ns/name:train[:50%]"], 1e-4)],
)
def test_the_file_is_one_that_a_training_takes(tmp_path, capsys, method, data, rate):
    path = tmp_path / "new" / "run.yaml"
    init(InitOptions(model="ns/model", data=data, method=method, out=str(path)))
    assert f"dsft preview --config {path}" in capsys.readouterr().out
    problems: list[str] = []
    config = read_config(TrainConfig, ["--config", str(path)], problems)
    assert problems == []
    assert (config.model, config.data, config.method, config.zero) == ("ns/model", data, method, "auto")
    assert config.training["learning_rate"] == rate and config.training["output_dir"] == "runs/first"
    with pytest.raises(UserError, match="run.yaml: exists"):
        init(InitOptions(model="ns/other", data=data, out=str(path)))
    assert "ns/other" not in path.read_text()


def write_files(folder, names: list[str]) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("of an earlier one")


def files_of(folder) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_a_quickstart_replaces_what_an_earlier_one_made_and_nothing_else(tmp_path, monkeypatch):
    kept, replaced = (
        ["full.yaml", "corpus/train.jsonl", "runs/mine/run.json", "notes.txt"],
        ["runs/full/run.json", "runs/lora/final/a", "merged/a", "perplexity/a"],
    )
    write_files(tmp_path, kept + replaced)
    monkeypatch.setattr(quickstart, "STEPS", {"nothing": "--version"})
    monkeypatch.setattr(quickstart, "show_results", lambda folder, start: None)
    main(["quickstart", str(tmp_path)])
    assert files_of(tmp_path) == {*kept}


def test_demo_data_can_lie_in_a_folder_of_any_name(tmp_path, monkeypatch, capsys):
    """Its files name it, in YAML's own form of such a text."""
    monkeypatch.setattr(quickstart, "topics", {"one": "a topic"})
    monkeypatch.setattr(
        quickstart, "standard_library_docs", lambda: [(name, [("f()", "What it does.")]) for name in "abc"]
    )
    monkeypatch.chdir(tmp_path)
    for folder in ("mine: # 1", '"{2}"'):
        main(["demo-data", folder])
        assert f"dsft train --config '{folder}/full.yaml'" in capsys.readouterr().out
        problems: list[str] = []
        config = read_config(TrainConfig, ["--config", f"{folder}/full.yaml"], problems)
        assert (problems, config.data) == ([], [f"{folder}/corpus/train.jsonl"])
        assert config.training["output_dir"] == f"{folder}/runs/full"


def test_a_quickstart_stops_at_the_step_that_fails_and_leaves_another_folder_alone(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(quickstart, "STEPS", {"good": "--version", "bad": "no-command", "never": "--version"})
    with pytest.raises(SystemExit) as ended:
        main(["quickstart", str(tmp_path / "new")])
    printed = capfd.readouterr()
    assert ended.value.code == 2 and "2 of 3: bad" in printed.out and "never" not in printed.out
    write_files(tmp_path / "other", ["thesis.txt", "report.html"])
    with pytest.raises(SystemExit):
        main(["quickstart", str(tmp_path / "other")])
    assert "is no quickstart folder; choose a new one" in capfd.readouterr().err
    assert files_of(tmp_path / "other") == {"thesis.txt", "report.html"}
