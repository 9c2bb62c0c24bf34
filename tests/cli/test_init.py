import pandas
import pytest

from dsft.cli import quickstart
from dsft.cli.commands import InitOptions
from dsft.cli.init import run
from dsft.cli.main import main
from dsft.config.options import TrainConfig
from dsft.config.reader import read_config
from dsft.data.formats import format_rules
from dsft.data.sources import Row
from dsft.errors import UserError


@pytest.mark.parametrize(("method", "rate"), [("full", 1e-5), ("lora", 1e-4)])
def test_the_file_is_one_that_a_training_takes(tmp_path, monkeypatch, capsys, method, rate):
    monkeypatch.chdir(tmp_path)
    data = ["a file: with #.jsonl", "ns/name:train[:50%]"]
    (tmp_path / data[0]).write_text('{"text": "a"}\n' * 12)
    path = tmp_path / "new" / "run.yaml"
    run(InitOptions(model="ns/model", data=data, method=method, out=str(path)))
    assert f"dsft preview --config {path}" in capsys.readouterr().out
    problems: list[str] = []
    config = read_config(TrainConfig, ["--config", str(path)], problems)
    assert problems == []
    assert (config.model, config.data, config.method, config.zero) == ("ns/model", data, method, "auto")
    assert config.training["learning_rate"] == rate and config.training["output_dir"] == "runs/first"
    with pytest.raises(UserError, match="run.yaml: exists"):
        run(InitOptions(model="ns/other", data=data, out=str(path)))
    assert "ns/other" not in path.read_text()


QUESTION, ANSWER = "the model reads", "big"
TURNS = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}]
SHARED_TURNS = [{"from": "human", "value": QUESTION}, {"from": "gpt", "value": ANSWER}]
SHAPES = {
    **{
        f"{question} {answer}.jsonl": {question: QUESTION, answer: ANSWER}
        for question, answer in (
            ("question", "answer"),
            ("Question", "Answer"),
            ("input", "output"),
            ("query", "response"),
            ("instruction", "response"),
            ("prompt", "completion"),
            ("Prompt", "Completion"),
        )
    },
    "messages.json": {"messages": TURNS},
    "conversations.jsonl": {"conversations": SHARED_TURNS},
    "conversation.parquet": {"conversation": SHARED_TURNS},
    "dolly.jsonl": {"instruction": QUESTION, "context": "", "response": ANSWER},
    "alpaca.jsonl": {"instruction": QUESTION, "input": "", "output": ANSWER},
    "system and history.jsonl": {"system": "fast", "history": [], "question": QUESTION, "answer": ANSWER},
    "turns on both sides.jsonl": {"prompt": TURNS[:1], "completion": TURNS[1:]},
    "table.csv": {"question": QUESTION, "answer": ANSWER},
    "text.jsonl": {"text": QUESTION},
}


@pytest.mark.parametrize("name", SHAPES)
def test_what_is_written_for_data_of_every_shape_passes_preview(tiny, tmp_path, capsys, name):
    path, rows = tmp_path / name, pandas.DataFrame([SHAPES[name]] * 3)
    if name.endswith(".parquet"):
        rows.to_parquet(path)
    elif name.endswith(".csv"):
        rows.to_csv(path, index=False)
    else:
        rows.to_json(path, orient="records", lines=True)
    config = str(tmp_path / "run.yaml")
    run(InitOptions(model=str(tiny / "chat"), data=[str(path)], out=config))
    main(["preview", "--config", config, "--data_cache", str(tmp_path / "cache")])
    shown = capsys.readouterr().out
    assert "held out: 1 rows" in shown or "held out: 2 rows" in shown
    if not name.startswith(("text", "prompt")):
        assert f"<|user|>{QUESTION}<|end|><|assistant|>⟦{ANSWER}<|end|>⟧" in shown


def test_the_error_of_an_unknown_shape_has_the_line_that_reads_it():
    with pytest.raises(ValueError, match=r"columns: \{user: Problem, assistant: SOLUTION\}"):
        format_rules([Row({"Problem": "a", "SOLUTION": "b"}, 1)], TrainConfig())
    with pytest.raises(ValueError, match=r"columns: \{user: COLUMN, assistant: COLUMN\} or for text: text_column"):
        format_rules([Row({"body": "a"}, 1)], TrainConfig())


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
