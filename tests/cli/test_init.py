import pandas
import pytest

from dsft.cli.commands import InitOptions
from dsft.cli.main import main
from dsft.cli.run_files import write_run_file
from dsft.config.options import TrainConfig
from dsft.config.reader import read_config
from dsft.errors import UserError


@pytest.mark.parametrize(("method", "rate"), [("full", 1e-5), ("lora", 5e-4)])
def test_the_file_is_one_that_a_training_takes(tmp_path, monkeypatch, capsys, method, rate):
    monkeypatch.chdir(tmp_path)
    data = ["a file: with #.jsonl", "ns/name:train[:50%]"]
    (tmp_path / data[0]).write_text('{"text": "a"}\n' * 12)
    path = tmp_path / "new" / "run.yaml"
    write_run_file(InitOptions(model="ns/model", data=data, method=method, out=str(path)))
    assert f"dsft preview {path}" in capsys.readouterr().out
    problems: list[str] = []
    config = read_config(TrainConfig, ["--config", str(path)], problems)
    assert problems == []
    assert (config.model, config.data, config.method, config.zero) == ("ns/model", data, method, "auto")
    assert config.training["learning_rate"] == rate and config.training["output_dir"] == "runs/first"
    with pytest.raises(UserError, match="--out"):
        write_run_file(InitOptions(model="ns/other", data=data, out=str(path)))
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
    write_run_file(InitOptions(model=str(tiny / "chat"), data=[str(path)], out=config))
    main(["preview", "--config", config, "--data_cache", str(tmp_path / "cache")])
    shown = capsys.readouterr().out
    assert "held out: 1 rows" in shown or "held out: 2 rows" in shown
    if not name.startswith(("text", "prompt")):
        assert f"<|user|>{QUESTION}<|end|><|assistant|>⟦{ANSWER}<|end|>⟧" in shown
