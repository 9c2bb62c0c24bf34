import pytest

from dsft.cli.commands import InitOptions
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
